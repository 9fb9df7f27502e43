"""One process at a time works in a run's folder. The lock is the kernel's: it goes when its holders end."""

import fcntl
import os
from pathlib import Path
from typing import IO

from eagle3.errors import ConfigError


def take_lock(folder: Path) -> IO[str]:
    """Lock a run's folder for whoever holds the open file; pass it to the child that works there, and close it here.

    So it outlives a runner that was killed, as long as its child does.

    Raises:
        ConfigError: a process holds it, one of another runner or one that a killed runner left.
    """
    lock = (folder / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        lock.close()
        raise ConfigError(f"{folder} is in use by {holder}; wait until it has ended, or end it") from None
    except OSError as error:
        # file systems without locks
        print(f"{lock.name}: {error.strerror}: take care that nothing else works in this folder", flush=True)
    return lock


def note_holder(lock: IO[str], process: int) -> None:
    """Write who holds it, for those who wait."""
    lock.truncate(0)
    lock.write(f"process {process}, started by {os.getpid()}\n")
    lock.flush()
