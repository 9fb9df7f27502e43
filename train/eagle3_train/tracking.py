"""The record of a run on disk: metrics.jsonl, samples.jsonl and run.json.

Knows nothing of models or losses. Make these on the main process only.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from dataclasses import is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eagle3.environment import git_revision, hardware, versions
from eagle3.errors import ConfigError
from eagle3.files import replace_file, write_json

# what decides the numbers
PACKAGES = ("torch", "transformers", "datasets", "accelerate", "triton", "deepspeed", "bitsandbytes")


def write_record(path: Path, value: Any) -> None:
    """What `plain` makes of the value, as a file that is old or whole."""
    write_json(path, plain(value))


def plain(value: Any) -> Any:
    """The value as JSON holds it: dataclasses as objects, tensors as numbers, NaN and infinity as null."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if is_dataclass(value):
        return plain(vars(value))
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


class MetricsLog:
    """`metrics.jsonl`, `samples.jsonl`: one JSON object per line, flushed at once, steps never falling.

    Args:
        path: the file; its folder is made.
        resume_step: None starts the file anew; a step keeps earlier records up to and including it and drops later
            ones (they come from steps that the resumed run repeats) and a line that a kill cut short.
    """

    def __init__(self, path: Path | str, resume_step: int | None = None):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [] if resume_step is None else [r for r in read_metrics(self.path) if r["step"] <= resume_step]
        with replace_file(self.path) as file:
            file.writelines(json.dumps(r) + "\n" for r in kept)
        self._last = kept[-1]["step"] if kept else 0
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; it must hold `step`."""
        assert record["step"] >= self._last, f"step {record['step']} after step {self._last}"
        self._last = record["step"]
        self._file.write(json.dumps(plain(record)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The records of a metrics file, without a last line that was cut short; no file: none."""
    path = Path(path)
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise ConfigError(f"{path}: a line without a step is no metrics record: {line[:60]!r}; move the file away")
        records.append(record)
    return records


class RunRecord:
    """`run.json`: how the run was started, on what, and how it ended.

    A resumed run keeps the record of the earlier part under `previous`.
    """

    def __init__(self, path: Path | str, config: Any, seeds: dict[str, int], resume_step: int | None = None):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.record = {
            "argv": sys.argv,
            "versions": versions(PACKAGES),
            "git": git_revision(),
            "seeds": seeds,
            "config": plain(config),
            "hardware": hardware(),
            "started": _now(),
            "ended": None,
            "resumed_from_step": resume_step,
            "previous": self._previous() if resume_step is not None else [],
        }
        self._started = time.monotonic()
        write_record(self.path, self.record)

    def finish(self, **results: Any) -> None:
        """Note the end time, the seconds taken and the results."""
        self.update(ended=_now(), seconds=round(time.monotonic() - self._started, 1), **results)

    def update(self, **fields: Any) -> None:
        self.record.update(plain(fields))
        write_record(self.path, self.record)

    @property
    def provenance(self) -> dict[str, Any]:
        """What decided the run's numbers, besides its settings."""
        return {k: self.record[k] for k in ("argv", "versions", "git", "seeds", "data", "hardware") if k in self.record}

    def _previous(self) -> list[dict]:
        if not self.path.exists():
            return []
        try:
            old = json.loads(self.path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{self.path} is not valid JSON ({error}): move it away to resume this run") from None
        if not isinstance(old, dict):
            raise ConfigError(f"{self.path} holds no run's record: move it away to resume this run")
        return [*old.pop("previous", []), old]


def peak_memory() -> int:
    """Bytes that this process has used at most: of the GPU where there is one, else of main memory."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    # kilobytes on Linux, bytes on a Mac
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
