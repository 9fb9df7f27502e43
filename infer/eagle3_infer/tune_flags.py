"""The flags of `eagle3-infer tune`: its settings, and the command line that its answer is. Knows no torch."""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from eagle3.errors import ConfigError
from eagle3_infer.command_line import Parser
from eagle3_infer.config import DRAFT_NOISES, NO_NOISE, TreeConfig
from eagle3_infer.flags import (
    add_machine,
    add_models,
    add_processors,
    add_prompts,
    add_sampling,
    settings_of,
)
from eagle3_infer.settings import AUTO, CHAIN, NONE, PLAIN, TREE, ModePlan, RunSettings, flag, shape_name

DESCRIPTION = """\
Find the draft tree that makes this target and head fastest on this machine, and print the command that uses it.
Counts what the head offers below every token of some replies, measures what rows cost, predicts trees of many shapes
from the two, and times the best of them beside plain decoding and adaptive trees."""
EPILOG = """\
examples:
  eagle3-infer tune
  eagle3-infer tune --target Qwen/Qwen3-1.7B --draft runs/qwen3/best --prompts mine.jsonl --batch 8
  eagle3-infer tune --temperature 0.7 --draft-noise shared --tree-depth 8 --json tuned.json"""
# prompts and tokens that tell shapes apart in three to four minutes on two CPU cores with a target of 135 M parameters
LIMIT, MAX_TURNS, MAX_NEW_TOKENS, REPEATS = 16, 1, 48, 2
# the largest tree that is looked at
MOST = TreeConfig(depth=6, top_k=8, nodes=64)
FINALISTS = 3
# of no concern to whoever uses the answer
_OWN = ("limit", "max_turns", "repeats", "json", "finalists", "tree_depth", "tree_top_k", "tree_nodes")


@dataclass(frozen=True)
class TuneSettings(RunSettings):
    """A run whose modes are plain decoding and `trees`, each by its shape's name.

    Args:
        tree_depth, tree_top_k, tree_nodes: one each, the most that is looked at.
        finalists: shapes that are timed, adaptive trees aside.
        trees: what is timed, once it is known.
    """

    limit: int | None = LIMIT
    max_turns: int | None = MAX_TURNS
    max_new_tokens: int = MAX_NEW_TOKENS
    repeats: int = REPEATS
    tree_depth: tuple[int, ...] = (MOST.depth,)
    tree_top_k: tuple[int, ...] = (MOST.top_k,)
    tree_nodes: tuple[int | str | None, ...] = (MOST.nodes,)
    hf: tuple[str, ...] = (NONE,)
    finalists: int = FINALISTS
    trees: tuple[TreeConfig, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.finalists < 1:
            raise ConfigError(f"--finalists is {self.finalists}, expected at least 1")
        for name in ("tree_depth", "tree_top_k", "tree_nodes"):
            if getattr(self, name)[0] < 1:
                raise ConfigError(f"{flag(name)} is {getattr(self, name)[0]}, expected at least 1")
        # both raise ConfigError for what they do not know
        _ = self.most, self.rules

    @property
    def most(self) -> TreeConfig:
        """Bounds of the search: no more nodes than depth and top-k can fill, no depth or top-k beyond the nodes.

        Raises:
            ConfigError: larger than trees may be.
        """
        depth, top_k, nodes = self.tree_depth[0], self.tree_top_k[0], int(self.tree_nodes[0] or 1)
        full = TreeConfig(min(depth, nodes), min(top_k, nodes))
        return replace(full, nodes=min(nodes, full.candidates))

    def plans(self) -> list[ModePlan]:
        """Plain decoding first; of several trees each has its shape in its key."""
        trees = [ModePlan(tree_key(tree), _kind(tree), tree, self.rules[0]) for tree in self.trees]
        return [ModePlan(PLAIN, PLAIN), *trees]

    @property
    def needs_head(self) -> bool:
        return True


def _kind(tree: TreeConfig) -> str:
    if tree.adaptive:
        return AUTO
    return CHAIN if tree.top_k == 1 else TREE


def tree_key(tree: TreeConfig) -> str:
    """What the report calls a tree: `tree[d4k4n16]`, `chain[d3k1n3]`, `auto[<=d6k4n32]`."""
    return f"{_kind(tree)}[{shape_name(tree)}]"


def build_tune_parser() -> Parser:
    parser = Parser(
        prog="eagle3-infer tune",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_models(parser.add_argument_group("models"))
    add_prompts(parser.add_argument_group(f"prompts (the first turns of {LIMIT}, unless told otherwise)"))
    _add_search(parser.add_argument_group("what is looked at"))
    add_sampling(parser.add_argument_group("sampling"))
    add_processors(parser.add_argument_group("penalties and bans"))
    add_machine(parser.add_argument_group("machine"))
    parser.set_defaults(**{name: getattr(TuneSettings, name) for name in ("limit", "max_turns", "max_new_tokens")})
    return parser


def _add_search(group: Any) -> None:
    for name, metavar, most, text in (
        ("--tree-depth", "D", MOST.depth, "most levels below the root"),
        ("--tree-top-k", "K", MOST.top_k, "most nodes of a level that are expanded, and children offered for each"),
        ("--tree-nodes", "N", MOST.nodes, "most draft nodes verified per round"),
        ("--finalists", "N", FINALISTS, "shapes that are timed, beside plain decoding and adaptive trees"),
        ("--repeats", "N", REPEATS, "times that all of them are timed, in turn"),
    ):
        group.add_argument(name, type=int, default=most, metavar=metavar, help=f"{text} (default: %(default)s)")
    group.add_argument(
        "--draft-noise",
        default=NO_NOISE,
        metavar="NAME",
        help=f"{' or '.join(DRAFT_NOISES)}, where replies are sampled (default: %(default)s)",
    )
    group.add_argument("--json", metavar="PATH", help="write every prediction and the report of the finalists as JSON")


def parse_tune_settings(argv: Sequence[str]) -> TuneSettings:
    """Raises ConfigError for whatever can be known to be wrong without reading a model."""
    options = vars(build_tune_parser().parse_args(argv))
    for name in ("tree_depth", "tree_top_k", "tree_nodes", "draft_noise"):
        options[name] = (options[name],)
    return settings_of(TuneSettings, options)


def command_line(argv: Sequence[str], tree: TreeConfig | None) -> str:
    """The `eagle3-infer` call that uses a tree (None: plain decoding), with the user's flags of models and machine."""
    words = ["eagle3-infer", *_kept(argv), "--mode", PLAIN if tree is None else _kind(tree)]
    if tree is not None and _kind(tree) == CHAIN:
        words += ["--chain-depth", str(tree.depth)]
    elif tree is not None:
        words += ["--tree-depth", str(tree.depth), "--tree-top-k", str(tree.top_k), "--tree-nodes", str(tree.nodes)]
    return shlex.join(words)


def _kept(argv: Sequence[str]) -> list[str]:
    """Flags with their values as they were typed, without those of the search alone; every flag here takes one."""
    own, kept, rest = {flag(name) for name in _OWN}, [], iter(argv)
    for word in rest:
        pair = [word] if "=" in word else [word, next(rest)]
        if word.split("=")[0] not in own:
            kept += pair
    return kept
