"""The folder of a run: made, held by one trainer at a time, and gone again if nothing was put into it."""

import fcntl
import os
import socket
import tempfile
from pathlib import Path
from typing import IO

from eagle3.errors import ConfigError

LOCK = ".lock"


class RunFolder:
    """Open it on the main process only; closing is safe anywhere, any number of times.

    The lock is the kernel's, so it ends with the process that holds it, however that ends.
    """

    def __init__(self, path: Path):
        self.path = path
        self._made: list[Path] = []
        self._lock: IO[str] | None = None

    def open(self) -> None:
        """Make the folder and lock it.

        Raises:
            ConfigError: it is a file, cannot be written, or another trainer works in it.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"output {str(self.path)!r} is a file; give a folder")
        self._made = [p for p in (self.path, *self.path.parents) if not p.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
            self._lock = (self.path / LOCK).open("a+", encoding="utf-8")
        except OSError as error:
            self.close()
            raise ConfigError(
                f"output {str(self.path)!r} cannot be written: {error.strerror}; give another folder"
            ) from error
        self._hold(self._lock)

    def _hold(self, lock: IO[str]) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "another trainer"
            lock.close()
            self._lock = None
            raise ConfigError(f"output {str(self.path)!r} is in use by {holder}; give another folder") from None
        except OSError as error:
            # file systems without locks
            print(f"{lock.name}: {error.strerror}: take care that no other trainer works in this folder", flush=True)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()

    def close(self) -> None:
        """Let go of the folder, and remove it if it was made here and holds nothing."""
        if self._lock is not None:
            if self._made and os.listdir(self.path) == [LOCK]:
                os.unlink(self._lock.name)
            self._lock.close()
            self._lock = None
        for folder in self._made:
            try:
                folder.rmdir()
            except OSError:
                break
        self._made = []
