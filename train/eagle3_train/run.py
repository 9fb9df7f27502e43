"""What surrounds the training loop: opening a run, loading its parts, evaluating, exporting. Knows no rollout."""

import traceback
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, get_int_from_env
from torch import Tensor

from eagle3.checkpoint.reference import load_head, save_head
from eagle3.errors import ConfigError
from eagle3.heads.eagle3 import Eagle3Head, head_config
from eagle3.target import Target
from eagle3.vocab import build_vocab_map
from eagle3_train.accelerator import open_accelerator
from eagle3_train.batches import PackedBatch, Supervision, batches_of, supervise
from eagle3_train.config import TrainConfig
from eagle3_train.evaluate import Counts, Tally
from eagle3_train.features import Features
from eagle3_train.folder import RunFolder
from eagle3_train.prepared import PreparedRows, prepare_rows
from eagle3_train.shelf import open_shelf
from eagle3_train.sources import open_sources
from eagle3_train.state import RunState
from eagle3_train.tokenizer import load_tokenizer
from eagle3_train.trackers import Trackers
from eagle3_train.tracking import MetricsLog, RunRecord, write_record
from eagle3_train.ttt import TTTRollout
from eagle3_train.vocab_file import load_vocab_map

RANK = ["RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"]


@dataclass
class Parts:
    """Everything a run trains with."""

    target: Target
    head: Eagle3Head
    features: Features
    rows: PreparedRows

    @property
    def record(self) -> dict[str, Any]:
        """What run.json says of them."""
        count = sum(p.numel() for p in self.head.parameters())
        return {"head": self.head.config, "parameters": count, "data": self.rows.report.as_dict()}


class Run:
    """A run's folder, accelerator and records; only the main process writes. Leaving its block closes them all."""

    def __init__(self, config: TrainConfig):
        self.config, self.folder = config, Path(config.output)
        self.metrics: MetricsLog | None = None
        self.samples: MetricsLog | None = None
        self.record: RunRecord | None = None
        with ExitStack() as closing:
            folder = RunFolder(self.folder)
            closing.callback(folder.close)
            first = get_int_from_env(RANK, 0) == 0
            if first:
                folder.open()
            if config.resume == "never" and any(self.folder.glob("checkpoints/step-*")):
                raise ConfigError(f"output {config.output!r} holds a run and resume is never; give another folder")
            if config.threads is not None:
                torch.set_num_threads(config.threads)
            # before there is a process group: long work meets no collective's timeout
            self.rows = _prepare_rows(config, self.folder / "data")
            place = {"project": config.project, "group": config.group, "name": config.run_name}
            self.trackers = Trackers(config.log_with, self.folder / "tracking", **place, told=first)
            self.accelerator = open_accelerator(
                config.device, log_with=[*self.trackers.names] or None, project_dir=self.trackers.folder
            )
            # a rank that ends with its group open may abort, and hide its exit code
            closing.callback(self.accelerator.state.destroy_process_group)
            closing.callback(self.accelerator.free_memory)
            self.is_main = self.accelerator.is_main_process
            # what is to be done however the run ends
            self.closing = closing.pop_all()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, _kind: object, _error: object, trace: TracebackType | None) -> None:
        # what frames of an error hold of DDP would end after its process group, which hangs now and then
        traceback.clear_frames(trace)
        for log in (self.metrics, self.samples):
            if log is not None:
                log.close()
        self.trackers.finish()
        self.closing.close()

    def note(self, text: str) -> None:
        if self.is_main:
            print(text, flush=True)

    def start(self, state: RunState, details: dict[str, Any]) -> None:
        """Open metrics.jsonl, run.json and the trackers, continuing them after a resume."""
        resumed, told = state.step or None, asdict(self.config)
        if self.is_main:
            self.metrics = MetricsLog(self.folder / "metrics.jsonl", resumed)
            self.samples = MetricsLog(self.folder / "samples.jsonl", resumed)
            self.record = RunRecord(self.folder / "run.json", self.config, {"seed": self.config.seed}, resumed)
            framework, processes = self.accelerator.distributed_type.value, self.accelerator.num_processes
            self.record.update(**details, framework=framework, processes=processes)
            told["run"] = self.record.provenance
        self.trackers.start(self.accelerator, told, state.tracker or None, resumed)
        state.tracker = self.trackers.state()

    def log(self, record: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(record)
        self.trackers.log(record)

    def log_drafts(self, rows: list[dict[str, Any]], step: int) -> None:
        """What became of drafts, a row each: to samples.jsonl and the trackers' tables."""
        if self.samples is not None:
            for row in rows:
                self.samples.write({"step": step, **row})
        self.trackers.table("engine/drafts", rows, step)

    def export(self, name: str, head: Eagle3Head, state: RunState) -> None:
        """Write the head's folder, ready for the runtime, with the record of how it was made."""
        if self.record is None:
            return
        folder = save_head(self.folder / name, head)
        write_record(folder / "run.json", {**self.record.record, **state.results})

    def finish(self, state: RunState) -> None:
        if self.record is not None:
            self.record.finish(**state.results)
        self.note(f"best held-out tau {state.best_tau:.3f} at step {state.best_step}: {self.folder / 'best'}")


def _prepare_rows(config: TrainConfig, folder: Path) -> PreparedRows:
    if config.data.streaming and config.data.vocab_map is None and config.init_head is None:
        raise ConfigError("data.streaming counts no tokens: give data.vocab_map, a file of build_vocab_map.py")
    open_sources(config.data.files)  # a wrong path shows before the tokenizer is loaded
    return prepare_rows(config, *load_tokenizer(config.target), folder)


def load_parts(config: TrainConfig, run: Run) -> Parts:
    """Load the target, build or load the head.

    Raises:
        Eagle3Error: whatever the user got wrong about target, data or head.
    """
    device = str(run.accelerator.device) if config.device == "auto" else config.device
    offline = config.features.source == "offline"
    layers = 1 if offline else None
    target = Target.load(config.target, config.dtype, device, layers=layers, placement=config.target_placement)
    if config.data.max_length > target.max_positions:
        raise ConfigError(
            f"data.max_length {config.data.max_length} exceeds the target's {target.max_positions} positions"
        )
    rows = run.rows
    run.note(str(rows.report))
    head = _load_head(config, target, rows)
    if config.init_head is not None:
        run.note(f"warm start from {config.init_head}: its architecture and vocabulary map are kept")
    ranks = run.accelerator.process_index, run.accelerator.num_processes
    kept = () if rows.streamed is not None else chain(rows.train, rows.held_out)
    shelf, told = open_shelf(config, target, head.capture_layers, kept, ranks)
    if told:
        run.note(told)
    features = Features(target, head, config.tokens_per_batch, shelf)
    run.closing.callback(features.flush)
    if not offline:
        first = torch.tensor(rows.held_out[0]["input_ids"], device=target.device)
        with torch.no_grad():
            target.check_teacher(first, torch.arange(len(first), device=target.device))
    return Parts(target, head, features, rows)


def _load_head(config: TrainConfig, target: Target, rows: PreparedRows) -> Eagle3Head:
    """A fresh head with the map of a file or of the training rows, or the one to start from with its own map. Weights
    are fp32.
    """
    if config.init_head is not None:
        head = load_head(config.init_head, target, torch.float32)
        head.config = replace(head.config, trained_length=config.data.max_length, target_fingerprint=target.fingerprint)
        return head.train().requires_grad_(True)
    head_config(target, 1, config.head)  # a wrong architecture shows before the data is counted
    size = config.head.draft_vocab_size or target.vocab_size
    if config.data.vocab_map is not None:
        vocab_map = load_vocab_map(config.data.vocab_map, target.tokenizer, target.vocab_size, size, rows.end_ids)
    else:
        vocab_map = build_vocab_map(rows.counts_of(target.vocab_size), size, rows.end_ids, target.usable_vocab)
    head = Eagle3Head.for_target(target, vocab_map, config.head, config.seed)
    head.config = replace(head.config, trained_length=config.data.max_length)
    return head


def normalisers(
    micro: list[PackedBatch], supervisions: list[Supervision], accelerator: Accelerator
) -> tuple[Tensor, int]:
    """(N_k fp32 [steps], tokens) of the whole optimizer step: all micro-batches, all ranks; from masks alone."""
    counts = torch.stack([s.counted.sum(1) for s in supervisions]).sum(0)
    tokens = counts.new_tensor([sum(batch.tokens for batch in micro)])
    total = accelerator.reduce(torch.cat((counts, tokens)), reduction="sum")
    assert isinstance(total, Tensor)
    return total[:-1].float(), int(total[-1])


def over_ranks(tally: Tally, accelerator: Accelerator) -> Counts:
    """The sum of all ranks' counts, on every rank."""
    counts = tally.counts()
    return counts if accelerator.num_processes == 1 else Counts.merged(gather_object([counts]))


@torch.no_grad()
def evaluate(parts: Parts, rollout: TTTRollout, config: TrainConfig, accelerator: Accelerator, autocast) -> Counts:
    """Simulated tau and rates over the held-out rows, shared among the ranks; `rollout` is not the wrapped one."""
    steps = config.ttt.steps
    tally = Tally(steps)
    ones = torch.ones(steps, device=parts.target.device)
    rank, world = accelerator.process_index, accelerator.num_processes
    for batch in batches_of(parts.rows.held_out, config.tokens_per_batch, rank, world):
        batch = batch.to(parts.target.device)
        inputs = parts.features.prepare(batch, supervise(batch, parts.head.t2d, steps))
        with autocast:
            output = rollout(inputs, ones)
        tally.add(inputs, output)
    return over_ranks(tally, accelerator)
