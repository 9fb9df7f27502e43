"""What one `eagle3-infer` run does: validated settings and the plan of its modes. No torch, no files read."""

import os
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from eagle3.embedded import EMBEDDED
from eagle3.errors import ConfigError
from eagle3_infer.config import SamplingConfig, TreeConfig

RANDOM_DRAFT = "random"
PLAIN, CHAIN, TREE, HF = "plain", "chain", "tree", "hf_generate"
MODES = (PLAIN, CHAIN, TREE)
# of the command: done, --verify found a bug, bad input, interrupted
EXIT_OK, EXIT_BUG, EXIT_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class ModePlan:
    """One row of the table: `key` is its name in the report, `tree` is None without a head."""

    key: str
    kind: str
    tree: TreeConfig | None = None

    @property
    def label(self) -> str:
        """The shape for the table: `d4k4n16`, or nothing."""
        return "" if self.tree is None else shape_name(self.tree)


@dataclass(frozen=True)
class RunSettings:
    """Everything the command line sets; None = the shipped head / prompts, or the obvious default."""

    target: str = EMBEDDED
    draft: str | None = None
    prompts: str | None = None
    limit: int | None = None
    max_turns: int | None = None
    modes: tuple[str, ...] = MODES
    tree_depth: tuple[int, ...] = (TreeConfig.depth,)
    tree_top_k: tuple[int, ...] = (TreeConfig.top_k,)
    tree_nodes: tuple[int, ...] = (TreeConfig.nodes,)
    chain_depth: tuple[int, ...] | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    repeats: int = 1
    hf: bool = True
    verify: bool = False
    json: str | None = None

    def __post_init__(self) -> None:
        for name in ("limit", "max_turns", "max_new_tokens", "threads", "repeats"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{flag(name)} is {value}, expected at least 1")
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown or not self.modes:
            found = ", ".join(unknown) or "nothing"
            raise ConfigError(f"--mode names {found}, expected some of {','.join(MODES)}")
        if "" in self.stop:
            raise ConfigError("--stop is an empty string, which would end every reply at once")
        if any("\ud800" <= letter <= "\udfff" for text in self.stop for letter in text):
            raise ConfigError("--stop holds bytes that are no text in this locale's encoding")
        if self.json is not None:
            check_writable(Path(self.json))
        self.plans()

    def plans(self) -> list[ModePlan]:
        """The engine modes in run order, plain first (it is what the others are compared with)."""
        plans = [ModePlan(PLAIN, PLAIN)] if PLAIN in self.modes or self.verify else []
        if CHAIN in self.modes:
            depths = dict.fromkeys(self.chain_depth or self.tree_depth)
            plans += _keyed(CHAIN, [TreeConfig.chain(depth) for depth in depths])
        if TREE in self.modes:
            shapes = dict.fromkeys(product(self.tree_depth, self.tree_top_k, self.tree_nodes))
            trees = [TreeConfig(depth=d, top_k=k, nodes=n) for d, k, n in shapes]
            plans += _keyed(TREE, trees)
        return plans

    def unused(self) -> list[str]:
        """What was asked for and changes nothing, flag by flag."""
        given, default = self.sampling, SamplingConfig()
        greedy = [flag(n) for n in ("top_k", "top_p", "seed") if getattr(given, n) != getattr(default, n)]
        said = [f"{name} changes nothing at temperature 0" for name in greedy if given.temperature == 0]
        if self.draft is not None and not self.needs_head:
            said.append("--draft changes nothing: no mode drafts")
        if self.chain_depth is not None and CHAIN not in self.modes:
            said.append("--chain-depth changes nothing: chain is no mode of this run")
        return said

    @property
    def needs_head(self) -> bool:
        return any(plan.tree is not None for plan in self.plans())


def _keyed(kind: str, trees: list[TreeConfig]) -> list[ModePlan]:
    """The first setting of a mode bears the mode's name, later ones their shape beside it."""
    keys = [kind] + [f"{kind}[{shape_name(tree)}]" for tree in trees[1:]]
    return [ModePlan(key, kind, tree) for key, tree in zip(keys, trees, strict=True)]


def shape_name(tree: TreeConfig) -> str:
    return f"d{tree.depth}k{tree.top_k}n{tree.nodes}"


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_writable(path: Path) -> None:
    """Raise before the run, not after it, when the report could not be written to `path`."""
    if path.is_dir():
        raise ConfigError(f"--json {path} is a folder, expected a file to write")
    if path.exists() and not path.is_file():
        raise ConfigError(f"--json {path} is a device or a pipe; the report replaces a file, give another path")
    if not path.parent.is_dir():
        raise ConfigError(f"--json {path}: the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--json {path}: the folder {path.parent} is not writable")
