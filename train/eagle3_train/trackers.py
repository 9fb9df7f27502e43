"""accelerate's trackers (W&B, TensorBoard, trackio, mlflow): what they are told, and how a resumed run goes on in them.

Make these on every process, as accelerate needs; only the main one logs.
"""

import os
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from importlib import util
from pathlib import Path
from typing import Any

from eagle3.errors import ConfigError
from eagle3_train.tracking import plain


class Trackers:
    """accelerate's trackers (W&B, TensorBoard, ...), so that a resumed run continues the same one.

    Pass `names` to `Accelerator(log_with=...)`, then `start`. Keep `state()` in the checkpoint and give it
    back to `start` on resume. What is asked for and not installed is left out, said once.
    """

    def __init__(
        self,
        log_with: Iterable[str] = (),
        folder: Path | str = ".",
        project: str = "eagle3",
        group: str | None = None,
        name: str | None = None,
        told: bool = True,
    ):
        """`group` and `name` are the run's; `told`: whether this process says what is left out."""
        self.names = available_trackers(log_with, told)
        self.folder, self.project, self.group, self.name = str(folder), project, group, name
        self.run_id = uuid.uuid4().hex[:12]
        self._accelerator: Any = None

    def start(
        self,
        accelerator: Any,
        config: dict[str, Any],
        state: dict[str, Any] | None = None,
        resume_step: int | None = None,
    ) -> None:
        """Open the trackers; `state` is what `state()` returned in the run that is resumed, after `resume_step`.

        WANDB_MODE is honoured. W&B that cannot start otherwise (no login, no network) goes offline and says so.

        Raises:
            ConfigError: a tracker cannot start.
        """
        if not self.names:
            return
        self.run_id = (state or {}).get("run_id", self.run_id)
        settings = _flat(plain(config))
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        options = self.init_kwargs(resume_step)
        try:
            accelerator.init_trackers(self.project, settings, init_kwargs=options)
        # wandb raises its own errors, and is not always installed
        except Exception as error:
            if "wandb" not in self.names or os.environ.get("WANDB_MODE"):
                raise ConfigError(f"tracker {', '.join(self.names)} cannot start: {error}") from error
            print(f"wandb cannot start online ({error}); its run is kept offline in {self.folder}", file=sys.stderr)
            # accelerate keeps the tracker that failed, and would start it again
            accelerator.trackers.clear()
            options["wandb"]["mode"] = "offline"
            accelerator.init_trackers(self.project, settings, init_kwargs=options)
        self._accelerator = accelerator

    def init_kwargs(self, resume_step: int | None) -> dict[str, dict[str, Any]]:
        """What `accelerator.init_trackers` takes: one run, continued where the trackers know it already."""
        group = {} if self.group is None else {"group": self.group}
        named = {} if self.name is None else {"name": self.name}
        # trackio knows a run by its name
        unique = self.run_id if self.name is None else f"{self.name}-{self.run_id}"
        options = {
            "wandb": {"id": self.run_id, "resume": "allow", "dir": self.folder, **group, **named},
            # steps that the resumed run repeats are dropped; W&B keeps the first of two records by itself
            "tensorboard": {} if resume_step is None else {"purge_step": resume_step + 1},
            "trackio": {"name": unique, "resume": "allow", **group},
        }
        return {name: options[name] for name in self.names if options.get(name)}

    def state(self) -> dict[str, Any]:
        return {"run_id": self.run_id}

    def log(self, record: dict[str, Any]) -> None:
        """Log the numbers of a metrics record at its step, as `train/name` or `eval/name`; lists as name.0"""
        if self._accelerator is None:
            return
        values = {k: v for k, v in _flat(plain(record)).items() if isinstance(v, int | float) and k != "step"}
        split = record.get("split", "train")
        self._accelerator.log({f"{split}/{k}": v for k, v in values.items()}, step=record["step"])

    def table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Rows of one kind: a table in W&B and trackio, text in TensorBoard; mlflow has no such thing."""
        if self._accelerator is None or not rows:
            return
        columns, data = list(rows[0]), [list(row.values()) for row in rows]
        for tracker in self._accelerator.trackers:
            if tracker.name == "wandb":
                tracker.log_table(name, columns=columns, data=data, step=step)
            elif tracker.name == "trackio":
                import pandas
                import trackio

                tracker.log({name: trackio.Table(dataframe=pandas.DataFrame(data, columns=columns))}, step=step)
            elif tracker.name == "tensorboard":
                tracker.log({name: _markdown([columns, ["---"] * len(columns), *data])}, step=step)

    def finish(self) -> None:
        if self._accelerator is not None:
            self._accelerator.end_training()
            self._accelerator = None


def available_trackers(log_with: Iterable[str], told: bool = True) -> list[str]:
    """The trackers of `log_with` that are installed; says which are not, if `told`. ConfigError: unknown names."""
    packages = {"wandb": "wandb", "tensorboard": "tensorboard", "trackio": "trackio", "mlflow": "mlflow"}
    found = []
    for name in dict.fromkeys([log_with] if isinstance(log_with, str) else log_with):
        if name not in packages:
            raise ConfigError(f"unknown tracker {name!r} in log_with; allowed: {', '.join(packages)}")
        if util.find_spec(packages[name]):
            found.append(name)
        elif told:
            print(f"{name} is not installed: going on without it (metrics.jsonl is written)", file=sys.stderr)
    return found


def _flat(value: Any, name: str = "") -> dict[str, bool | int | float | str]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, item in items for k, v in _flat(item, f"{name}.{key}" if name else str(key)).items()}
    return {name: str(value) if value is None else value}


def _markdown(rows: Iterable[Sequence[Any]]) -> str:
    """A table, its heading first; text as it is, but for what would end a cell."""
    lines = ([str(cell).replace("|", "\\|").replace("\n", "\\n") for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
