"""Where a run's report goes, checked before the run: nobody waits an hour for what cannot be written."""

import os
from collections.abc import Mapping
from pathlib import Path

from eagle3.errors import ConfigError


def check_destinations(files: Mapping[str, str | None], folders: Mapping[str, str | None]) -> None:
    """Raises ConfigError for what could not be written, or where one would replace another.

    Args:
        files, folders: path by flag; None where the flag is not given.
    """
    taken: dict[str, str] = {}
    for flags, check in ((files, _check_file), (folders, _check_folder)):
        for flag, path in flags.items():
            if path is None:
                continue
            check(flag, Path(path))
            first = taken.setdefault(os.path.realpath(path), flag)
            if first != flag:
                raise ConfigError(f"{flag} {path} is where {first} goes, too; give each a path of its own")


def _check_file(name: str, path: Path) -> None:
    """Raise before the run, not after it, when flag `name`'s file could not be written."""
    if path.is_dir():
        raise ConfigError(f"{name} {path} is a folder, expected a file to write")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{name} {path} is a device or a pipe; the report replaces a file, give another path")
    _check_parent(name, path)


def _check_folder(name: str, path: Path) -> None:
    """Raise when flag `name`'s folder is none, cannot be made, or cannot be written into."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{name} {path} is a file, expected a folder")
    if not path.is_dir():
        _check_parent(name, path)
    elif not os.access(path, os.W_OK):
        raise ConfigError(f"{name} {path} is not writable")


def _check_parent(name: str, path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigError(f"{name} {path}: the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{name} {path}: the folder {path.parent} is not writable")
