"""Run stages of runs as subprocesses, several runs at once; a run that fails is told and the others go on.

Knows commands, logs and exit codes, nothing of what they do. Children have process groups of their own: ^C
reaches this process alone, which then asks them to end and waits. Each holds the lock of its run's folder.
"""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from eagle3.errors import Eagle3Error
from eagle3_recipes.lock import note_holder, take_lock

DONE, FAILED, STOPPED, WAITING = "done", "failed", "stopped", "waiting"
LAST_LINES = 6
# for a checkpoint to be written
GRACE = 120.0


@dataclass(frozen=True)
class Stage:
    """One command of a run. `done` tells whether its result lies there; `after` is called when it has ended well."""

    name: str
    command: Sequence[str]
    log: Path
    done: Callable[[], bool]
    after: Callable[[], None] = lambda: None


@dataclass
class Job:
    """The stages of one run, in their order, and what became of them. Jobs of one folder run one after the other."""

    name: str
    folder: Path
    stages: Sequence[Stage]
    status: str = WAITING
    # of the stage that failed
    failure: str = ""
    seconds: dict[str, float] = field(default_factory=dict)


class Process(Protocol):
    def poll(self) -> int | None: ...
    def send_signal(self, signal: int, /) -> None: ...
    def kill(self) -> None: ...


# command, log, what its environment adds
Start = Callable[[Sequence[str], Path, Mapping[str, str]], Process]


@dataclass
class _Running:
    job: Job
    stage: Stage
    process: Process
    place: Mapping[str, str]
    began: float


class Execution:
    """Jobs, as many at a time as there are places.

    Args:
        places: what the environment of the jobs there adds (such as a GPU of its own).
        start: starts a command whose output goes to a log.
        tell: what is said on the way.
        pause: seconds between looks at the children.
    """

    def __init__(
        self,
        jobs: Iterable[Job],
        places: Iterable[Mapping[str, str]] = ({},),
        start: Start | None = None,
        tell: Callable[[str], None] = print,
        pause: float = 0.2,
    ):
        self.jobs, self.tell, self.pause = list(jobs), tell, pause
        self._free = list(places)
        self._start = start or start_process
        self._running: list[_Running] = []

    def run(self) -> None:
        """Until every job is done or has failed.

        Raises:
            KeyboardInterrupt: after all children have ended.
        """
        waiting = list(self.jobs)
        try:
            while waiting or self._running:
                while self._free and (job := self._next(waiting)) is not None:
                    waiting.remove(job)
                    self._go_on(job, self._free.pop(0))
                self._look()
                if self._running:
                    time.sleep(self.pause)
        except BaseException:
            self._stop()
            raise

    def _next(self, waiting: Sequence[Job]) -> Job | None:
        taken = {one.job.folder for one in self._running}
        return next((job for job in waiting if job.folder not in taken), None)

    def _go_on(self, job: Job, place: Mapping[str, str]) -> None:
        """Start the job's next stage, or note that there is none and give the place back."""
        for stage in job.stages:
            try:
                if stage.done():
                    continue
                job.status = WAITING
                self.tell(f"{self._count(job)} {job.name}: {stage.name} -> {stage.log}")
                process = self._start(stage.command, stage.log, place)
            except (Eagle3Error, OSError) as error:
                self._fail(job, place, f"{stage.name} did not start", str(error))
                return
            self._running.append(_Running(job, stage, process, place, time.monotonic()))
            return
        if not job.seconds:
            self.tell(f"{self._count(job)} {job.name}: done before")
        job.status = DONE
        self._free.append(place)

    def _look(self) -> None:
        for one in list(self._running):
            if (code := one.process.poll()) is not None:
                self._running.remove(one)
                self._finish(one, code)

    def _finish(self, one: _Running, code: int) -> None:
        job, stage = one.job, one.stage
        if code:
            # its workers may go on without it
            one.process.kill()
        job.seconds[stage.name] = time.monotonic() - one.began
        try:
            if code == 0:
                stage.after()
            good = code == 0 and stage.done()
        except (Eagle3Error, OSError, KeyError, ValueError) as error:
            what = f"{stage.name} ended well, and its result cannot be kept"
            self._fail(job, one.place, what, f"{type(error).__name__}: {error}")
            return
        if good:
            self._go_on(job, one.place)
            return
        what = f"{stage.name} {f'ended with code {code}' if code else 'ended well, and left no result'}"
        self._fail(job, one.place, what, f"the end of {stage.log}:\n{tail(stage.log)}")

    def _fail(self, job: Job, place: Mapping[str, str], what: str, why: str) -> None:
        job.status, job.failure = FAILED, f"{what}; {why}"
        self._free.append(place)
        self.tell(f"{self._count(job)} {job.name}: {what}")

    def _count(self, job: Job) -> str:
        return f"[{self.jobs.index(job) + 1}/{len(self.jobs)}]"

    def _stop(self) -> None:
        """Ask the children to end, wait, and end those that do not, or all at another ^C."""
        for one in self._running:
            one.job.status = STOPPED
            one.process.send_signal(signal.SIGTERM)
        try:
            until = time.monotonic() + GRACE
            while time.monotonic() < until and any(one.process.poll() is None for one in self._running):
                time.sleep(min(self.pause, 0.2))
        finally:
            # also those that have ended, for workers that they left
            for one in self._running:
                one.process.kill()


class Group(subprocess.Popen[bytes]):
    """A process with a group of its own, which ends as one: workers that are left would hold the folder's lock."""

    def kill(self) -> None:
        # also where its first process has ended: the others keep the group
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def start_process(command: Sequence[str], log: Path, place: Mapping[str, str]) -> Group:
    """Start a command; its output is appended to the log, after the command itself. It holds the folder's lock.

    Raises:
        ConfigError: another process works in the log's folder.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with take_lock(log.parent) as lock, log.open("ab") as file:
        # an argument may hold bytes that are no text
        file.write(f"$ {shlex.join(command)}\n".encode("utf-8", "backslashreplace"))
        file.flush()
        process = Group(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
            pass_fds=(lock.fileno(),),
            env={**os.environ, "PYTHONUNBUFFERED": "1", **place},
        )
        note_holder(lock, process.pid)
        return process


def tail(log: Path, lines: int = LAST_LINES) -> str:
    """The last lines of a log, indented."""
    if not log.is_file():
        return "  (no log)"
    text = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
    return "\n".join(f"  {line}" for line in text[-lines:])
