"""Files that are old or whole: readers never see half of one."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def replace_file(path: Path, binary: bool = False) -> Iterator[IO[Any]]:
    """A file under a temporary name, which takes `path` once the block is done; an error leaves `path` as it was.

    Text is UTF-8; a lone surrogate (an argument or an id that is no text) becomes the escape that JSON has for it.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    text: dict[str, Any] = {} if binary else {"encoding": "utf-8", "errors": "backslashreplace"}
    try:
        with os.fdopen(handle, "wb" if binary else "w", **text) as file:
            yield file
        # mkstemp makes files private; these are as readable as any other
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def write_json(path: Path, value: Any, allow_nan: bool = True) -> None:
    """Write `value` as JSON that is old or whole.

    Args:
        allow_nan: write NaN and infinity as Python reads them: a setting may be infinite (optim.clip). Other readers
            refuse such a file.
    Raises:
        TypeError, ValueError or RecursionError: it holds what JSON cannot, itself, or too deep a nesting; without
            `allow_nan`, a ValueError for NaN and infinity, too. `path` is then as it was.
    """
    with replace_file(path) as file:
        json.dump(value, file, indent=1, ensure_ascii=False, allow_nan=allow_nan)
        file.write("\n")
