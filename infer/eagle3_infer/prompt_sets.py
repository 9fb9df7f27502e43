"""What `--prompts` names: files, and sets by name. Knows where they lie; `prompts.py` reads them."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from eagle3.errors import ConfigError, DataError
from eagle3_infer.prompts import Prompt, load_prompts, shipped_prompts_path
from eagle3_infer.settings import PROMPTS_FOLDER, SHIPPED

SUFFIXES = (".jsonl", ".jsonl.gz")


def load_sets(words: Sequence[str], limit: int | None = None, max_turns: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of each file or named set, each cut to `max_turns`.

    Of more than one set, prompts know which they are of, and their ids begin with it: `mt_bench/81`.

    Raises:
        ConfigError: two sets of one name.
        DataError: no file and no set of that name, or a file that holds no prompts (see prompts.load_prompts).
    """
    paths = _by_name(words)
    sets = {name: load_prompts(path, limit, max_turns) for name, path in paths.items()}
    if len(sets) == 1:
        return next(iter(sets.values()))
    return [
        replace(prompt, id=f"{name}/{prompt.id}", prompt_set=name) for name, each in sets.items() for prompt in each
    ]


def sets_told(words: Sequence[str]) -> str:
    """Files' names, for the header of a run. Raises DataError as find_set does."""
    return ", ".join(find_set(word).name for word in words)


def find_set(word: str) -> Path:
    """The file that `word` names: the shipped prompts, a path, or a set in the folder $EAGLE3_PROMPTS.

    Raises:
        DataError: no file, and no set of that name. What looks like a path is returned, be it there or not.
    """
    if word == SHIPPED:
        return shipped_prompts_path()
    path = Path(os.path.expanduser(word))
    if _is_path(word, path):
        return path
    folder = os.environ.get(PROMPTS_FOLDER)
    if not folder:
        raise DataError(
            f"--prompts {word}: no such file, and ${PROMPTS_FOLDER}, the folder of prompt sets with a name, is not set"
        )
    found = next((file for suffix in SUFFIXES if (file := Path(folder, word + suffix)).is_file()), None)
    if found is None:
        names = ", ".join([SHIPPED, *sorted(set(map(set_name, _files(Path(folder)))))])
        raise DataError(
            f"--prompts {word}: no such file, and no set of ${PROMPTS_FOLDER} ({folder}); there are {names}"
        )
    return found


def set_name(path: Path) -> str:
    """The file's name without `.jsonl` or `.jsonl.gz`."""
    return path.name.removesuffix(".gz").removesuffix(".jsonl")


def _is_path(word: str, path: Path) -> bool:
    # what looks like a path is one, so that a missing file is told as such
    return os.sep in word or word.endswith(SUFFIXES) or os.path.lexists(path)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.endswith(SUFFIXES)] if folder.is_dir() else []


def _by_name(words: Sequence[str]) -> dict[str, Path]:
    paths: dict[str, Path] = {}
    for word in words:
        path = find_set(word)
        name = SHIPPED if word == SHIPPED else set_name(path)
        if name in paths:
            raise ConfigError(f"--prompts names {name!r} twice, as {paths[name]} and {path}: rename one of the files")
        paths[name] = path
    return paths
