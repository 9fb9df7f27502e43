"""From a sweep and the command line to runs: their folders, settings and commands. Runs nothing, loads no torch."""

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from eagle3.config import load_config
from eagle3.errors import ConfigError, Eagle3Error
from eagle3_infer.cli import parse_settings
from eagle3_infer.prompt_sets import find_set
from eagle3_infer.settings import RANDOM_DRAFT, RunSettings
from eagle3_recipes.budget import Budget
from eagle3_recipes.identity import Identity, data_content, file_content, head_content
from eagle3_recipes.sweep import Settings, Sweep
from eagle3_train.config import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
SHIPPED_HEAD = ROOT / "infer/eagle3_infer/assets/head"
EVALUATE = "evaluate."
# what changes a run's speed, place or records, and nothing that is measured
_OF_TRAINING = frozenset(
    (
        *("output", "threads", "log_with", "project", "group", "run_name", "save_every", "log_every", "resume"),
        *("data.files", "data.workers", "features.source", "features.store", "features.shard_mib"),
    )
)
_OF_EVALUATION = frozenset(("draft", "prompts", "threads", "json", "html", "html_replies", "plot"))
# flags of eagle3-infer that are given once for every value, as a value may hold a comma
REPEATED = frozenset(("stop", "bad_word", "logit_bias"))


@dataclass(frozen=True)
class Options:
    """What the command line changes of a sweep, and how it is run; see run_ablations.py."""

    output: Path
    files: tuple[str, ...] = ()
    prompts: str | None = None
    budget: Budget | None = None
    seeds: tuple[int, ...] = ()
    only: tuple[str, ...] = ()
    jobs: int = 1
    gpus: tuple[str, ...] = ()
    threads: int | None = None
    store: Path | None = None
    log_with: tuple[str, ...] = ()

    @property
    def places(self) -> list[dict[str, str]]:
        """What the environment of each job at once adds: the GPUs in turn."""
        return [{"CUDA_VISIBLE_DEVICES": self.gpus[i % len(self.gpus)]} if self.gpus else {} for i in range(self.jobs)]

    def takes(self, variant: str) -> bool:
        """Whether it is to be run; the table shows the others, too."""
        return not self.only or variant in self.only


@dataclass(frozen=True)
class Training:
    """One training: the trainer's flags, and what it resolves to."""

    base: Path
    given: Settings

    @property
    def words(self) -> list[str]:
        overrides = [word for name, value in self.given.items() for word in (f"--{name}", _text(value))]
        return ["--config", str(self.base), *overrides]

    @cached_property
    def config(self) -> TrainConfig:
        return load_config(TrainConfig, self.words)

    @cached_property
    def identity(self) -> Identity:
        config = self.config
        contents: Settings = {"data": data_content(config.data.files)}
        if config.init_head is not None:
            contents["init_head"] = head_content(config.init_head)
        if config.data.vocab_map is not None:
            contents["data.vocab_map"] = file_content(config.data.vocab_map)
        return Identity(config, TrainConfig(), _OF_TRAINING, contents)

    def store(self, root: Path) -> Path:
        """The feature store that this run may share: of one target, set of layers, length and template."""
        config = self.config
        parts = {
            "target": config.target,
            "dtype": config.dtype,
            "layers": config.head.capture_layers,
            "length": config.data.max_length,
            "template": config.data.template_options,
            "kept": config.features.dtype,
        }
        layers = config.head.capture_layers
        name = "default" if layers is None else "_".join(map(str, layers))
        return root / f"layers-{name}-{_digest(parts)}"


@dataclass(frozen=True)
class Evaluation:
    """One run of eagle3-infer: its flags, with _ for -."""

    given: Settings
    # of the head that the run trains
    head: str | None = None

    @property
    def temperature(self) -> float:
        return self.settings.sampling.temperature

    @property
    def words(self) -> list[str]:
        return [word for name, value in self.given.items() for word in _flag(name, value)]

    @cached_property
    def settings(self) -> RunSettings:
        return parse_settings(self.words)

    @cached_property
    def identity(self) -> Identity:
        return self._identity(self.given)

    @property
    def without_temperature(self) -> Identity:
        return self._identity({k: v for k, v in self.given.items() if k != "temperature"})

    def _identity(self, given: Settings) -> Identity:
        settings = Evaluation(given).settings
        head = self.head or _draft_content(settings.draft)
        contents = {"prompts": [_prompts_content(word) for word in settings.prompts], "head": head}
        return Identity(settings, RunSettings(), _OF_EVALUATION, contents)


@dataclass(frozen=True)
class PlannedRun:
    """One variant under one seed."""

    variant: str
    seed: int
    given: Settings
    # of its identity
    digest: str
    folder: Path
    training: Training | None
    evaluations: tuple[Evaluation, ...]

    @property
    def name(self) -> str:
        return f"{self.variant} s{self.seed}"

    @property
    def digests(self) -> list[str]:
        return [self.digest, *(evaluation.identity.digest for evaluation in self.evaluations)]

    @property
    def head(self) -> Path:
        """The folder that the trainer writes."""
        return self.folder / "head"

    def report(self, evaluation: Evaluation) -> Path:
        return self.folder / f"evaluate-{evaluation.identity.digest}.json"

    def settings(self, evaluation: Evaluation) -> Path:
        """What the evaluation's identity is, beside its report."""
        return self.report(evaluation).with_suffix(".settings.json")


def plan(sweep: Sweep, options: Options, tell: Callable[[str], None] = print) -> list[PlannedRun]:
    """All runs, also those that --only leaves out, the first seed of every variant before the second of any.

    Args:
        tell: is told of a variant that --only leaves out and that cannot be planned; none of its runs is returned.
    Raises:
        ConfigError: a variant that is not there, a setting that trainer or eagle3-infer refuse.
    """
    unknown = [name for name in options.only if name not in sweep.variants]
    if unknown:
        raise ConfigError(f"--only names {', '.join(unknown)}; {sweep.path} has {', '.join(sweep.variants)}")
    if not sweep.trains and (options.files or options.budget):
        raise ConfigError(f"{sweep.path} trains nothing; leave out --files and --budget")
    seeds = options.seeds or sweep.seeds
    runs = _runs(sweep, options, seeds, tell)
    if not sweep.trains:
        runs = [run for one in runs if (run := _drawn(one, seeds[0])).evaluations]
    chosen = [run for run in runs if options.takes(run.variant)]
    for i, run in enumerate(chosen):
        if same := [other.name for other in chosen[:i] if other.digests == run.digests]:
            raise ConfigError(f"{sweep.path}: {run.name} is the same run as {same[0]}; leave one out")
    return runs


def _runs(sweep: Sweep, options: Options, seeds: Sequence[int], tell: Callable[[str], None]) -> list[PlannedRun]:
    """Without those of variants that need not be run and cannot be."""
    folders: dict[str, Path] = {}
    runs: list[PlannedRun] = []
    left_out: dict[str, str] = {}
    for seed in seeds:
        for name, given in sweep.variants.items():
            try:
                runs.append(_run(sweep, options, name, given, seed, folders))
            except (Eagle3Error, OSError) as error:
                told = f"{sweep.path}, variant {name}: {error}"
                if options.takes(name):
                    raise ConfigError(told) from error
                left_out.setdefault(name, told)
    for told in left_out.values():
        tell(f"{told}; it is left out of the table")
    return [run for run in runs if run.variant not in left_out]


def _run(sweep: Sweep, options: Options, name: str, given: Settings, seed: int, folders: dict[str, Path]) -> PlannedRun:
    """`folders` are those of this sweep's runs so far, by digest: one head may be measured in several ways."""
    own = {k.removeprefix(EVALUATE): v for k, v in given.items() if k.startswith(EVALUATE) or not sweep.trains}
    flags = {**sweep.evaluate, **own}
    if options.prompts is not None:
        flags["prompts"] = options.prompts
    training = None
    if sweep.base is not None:
        training = _training(sweep, options, given, seed)
        flags.setdefault("target", training.config.target)
        # a head is measured on the prompts that it was trained to read
        if template := training.config.data.template_options:
            flags.setdefault("template_options", template)
    else:
        flags.setdefault("seed", seed)
    temperatures = flags.get("temperature", 0)
    several = temperatures if isinstance(temperatures, list) else [temperatures]
    if not several:
        raise ConfigError("temperature is []; give one or more")
    head = None if training is None else training.identity.digest
    evaluations = tuple(Evaluation({**flags, "temperature": t}, head) for t in several)
    identity = evaluations[0].without_temperature if training is None else training.identity
    if len({evaluation.identity.digest for evaluation in evaluations}) < len(evaluations):
        raise ConfigError(f"temperature is {several}; give each once")
    if identity.digest not in folders:
        folders[identity.digest] = _folder(options.output / "runs", f"{name}-s{seed}", identity)
    folder = folders[identity.digest]
    run = PlannedRun(name, seed, given, identity.digest, folder, training, evaluations)
    for evaluation in evaluations:
        if (report := run.report(evaluation)).is_file():
            evaluation.identity.check(run.settings(evaluation), report)
    return run


def _drawn(run: PlannedRun, first: int) -> PlannedRun:
    """Without what another seed gives as well: at T=0 nothing is drawn."""
    kept = tuple(one for one in run.evaluations if run.seed == first or one.temperature > 0)
    return replace(run, evaluations=kept)


def _training(sweep: Sweep, options: Options, given: Settings, seed: int) -> Training:
    assert sweep.base is not None
    budget = options.budget or sweep.budget
    settings = {**sweep.set, **({} if budget is None else budget.settings), "seed": seed}
    if options.files:
        settings["data.files"] = list(options.files)
    return Training(sweep.base, settings | {k: v for k, v in given.items() if not k.startswith(EVALUATE)})


def _folder(root: Path, name: str, identity: Identity) -> Path:
    """Where a run of these settings lies already, of whatever sweep, or is to lie."""
    found = sorted(root.glob(f"*-{identity.digest}"))
    slug = re.sub(r"[^\w.=,-]+", "_", name)[:60]
    folder = found[0] if found else root / f"{slug}-{identity.digest}"
    identity.check(folder / "settings.json", folder)
    return folder


def training_command(run: PlannedRun, sweep: Sweep, options: Options, threads: int) -> list[str]:
    """`train_draft.py` with what the run's identity leaves out, too."""
    assert run.training is not None
    rest: Settings = {"output": str(run.head), "threads": threads}
    if options.store is not None:
        rest |= {"features.source": "hybrid", "features.store": str(run.training.store(options.store))}
    if options.log_with:
        rest |= {"log_with": list(options.log_with), "group": sweep.name, "run_name": f"{run.variant}-s{run.seed}"}
    words = Training(run.training.base, {**run.training.given, **rest}).words
    return [sys.executable, str(ROOT / "train/train_draft.py"), *words]


def evaluation_command(run: PlannedRun, evaluation: Evaluation, threads: int) -> list[str]:
    """`eagle3-infer`, with the run's head where it trains one."""
    rest: Settings = {"threads": threads, "json": str(partial(run.report(evaluation)))}
    if run.training is not None:
        rest["draft"] = str(run.head / "last")
    return [sys.executable, "-m", "eagle3_infer.cli", *Evaluation({**evaluation.given, **rest}).words]


def partial(report: Path) -> Path:
    """Where a report lies until its run has ended well: one that was interrupted is written, too."""
    return report.with_suffix(".part")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _flag(name: str, value: Any) -> list[str]:
    """A switch has no value; a list is a comma list, or the flag once for each value; a mapping is YAML."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool) or value is None:
        return [flag] if value else []
    if name in REPEATED:
        # = as a text may begin with a dash
        return [f"{flag}={one}" for one in (value if isinstance(value, list) else [value])]
    if isinstance(value, dict):
        return [flag, _yaml(value)]
    return [flag, ",".join(map(str, value)) if isinstance(value, list) else str(value)]


def _yaml(value: dict[Any, Any]) -> str:
    """As eagle3-infer reads it: to YAML, JSON's 1e+20 is a text, and an emoji's escapes are two characters."""
    import yaml

    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf")).strip()


def _prompts_content(word: str) -> str:
    file = find_set(word)
    if not file.is_file():
        raise ConfigError(f"prompts {word!r}: no such file")
    return file_content(file)


def _draft_content(draft: str | None) -> str:
    if draft == RANDOM_DRAFT:
        return draft
    return head_content(SHIPPED_HEAD if draft is None else os.path.expanduser(draft))


def _digest(value: Any) -> str:
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=4).hexdigest()
