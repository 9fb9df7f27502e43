"""How the processes of one machine wait for the one that prepares the rows, without a collective that can time out.

The builder says in a file what it is doing, by which the others wait, go on, or fail for the same reason. Knows no
rows.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from eagle3.errors import DataError, Eagle3Error
from eagle3_train.tracking import write_record

# seconds: between looks at the builder, between lines about it, and without any builder before giving up
_POLL, _TELL, _NOBODY = 0.2, 30.0, 300.0


def node() -> str:
    """This machine, or torchrun's group on it (two of a test may share a machine)."""
    return f"{socket.gethostname().split('.')[0]}-{os.environ.get('GROUP_RANK', '0')}"


def notice_file(folder: Path) -> Path:
    return folder / f"builder-{node()}.json"


@dataclass(frozen=True)
class Notice:
    """What the builder says of itself.

    state: building, ready (text: the rows' key) or failed (text: the reason); pid, created: of its process; at: when
    this was written. Times are seconds of this machine's clock.
    """

    state: str
    text: str
    pid: int
    created: float
    at: float

    @property
    def alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.created) < 1 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


@dataclass(frozen=True)
class _Teller:
    file: Path

    def tell(self, state: str, text: str = "") -> None:
        me = psutil.Process()
        write_record(self.file, vars(Notice(state, text, me.pid, me.create_time(), time.time())))


@contextmanager
def telling(file: Path) -> Iterator[_Teller]:
    """Say what becomes of a build; a failure's reason reaches the waiting ranks."""
    teller = _Teller(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        teller.tell("building")
    except OSError as error:
        raise DataError(f"{file.parent} cannot be written: {error}; give another output") from error
    try:
        yield teller
    except Eagle3Error as error:
        # on a full disk it cannot be said: the ranks then see that this process is gone
        with suppress(OSError):
            teller.tell("failed", str(error))
        raise


def _read_notice(file: Path) -> Notice | None:
    try:
        return Notice(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def wait_for_rows(file: Path) -> str:
    """The key of the rows that this machine's local rank 0 makes.

    A notice of an earlier run is ignored: its process is gone, and it was written before this one began.
    """
    began, told = time.monotonic(), 0.0
    # of two processes that begin at once, the builder may fail before the other is there
    born = psutil.Process().create_time() - 2
    seen = False
    while True:
        notice = _read_notice(file)
        if notice is not None and (notice.alive or notice.at >= born):
            seen = True
            if notice.state == "failed":
                raise DataError(notice.text)
            if notice.state == "ready" and notice.alive:
                return notice.text
            if not notice.alive:
                raise DataError(f"local rank 0 (process {notice.pid}) ended while it prepared the rows: see its output")
        waited = time.monotonic() - began
        if not seen and waited > _NOBODY:
            raise DataError(f"no local rank 0 has begun to prepare rows in {file.parent} for {waited:.0f} s")
        if waited - told > _TELL:
            told = waited
            by = f"process {notice.pid} prepares the rows" if seen and notice else "waiting for local rank 0"
            print(f"rank {os.environ.get('RANK', '?')}: {by} ({waited:.0f} s)", flush=True)
        time.sleep(_POLL)
