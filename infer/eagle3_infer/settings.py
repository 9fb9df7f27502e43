"""What one `eagle3-infer` run does: validated settings and the plan of its modes. No torch, no files read."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from eagle3.embedded import EMBEDDED
from eagle3.errors import ConfigError
from eagle3_infer.config import (
    MATCH,
    NO_NOISE,
    SHARED_NOISE,
    THRESHOLD,
    EngineConfig,
    RuleConfig,
    SamplingConfig,
    TreeConfig,
    check_graphs,
)
from eagle3_infer.request import has_surrogate

RANDOM_DRAFT = "random"
# the prompts that come with the package, and the variable that names the folder of others
SHIPPED, PROMPTS_FOLDER = "shipped", "EAGLE3_PROMPTS"
PLAIN, CHAIN, TREE, AUTO = "plain", "chain", "tree", "auto"
MODES = (PLAIN, CHAIN, TREE, AUTO)
HF, HF_PROMPT_LOOKUP, HF_ASSISTED = "hf_generate", "hf_prompt_lookup", "hf_assisted"
# what --hf calls them, and their keys in the report
HF_MODES = {"generate": HF, "prompt_lookup": HF_PROMPT_LOOKUP, "assisted": HF_ASSISTED}
HF_KEYS = tuple(HF_MODES.values())
NONE = "none"
# the command that finds a tree
TUNE = "tune"
# of the command: done, --verify found a bug, bad input, interrupted
EXIT_OK, EXIT_BUG, EXIT_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class ModePlan:
    """One row of the table: `key` is its name in the report; `tree` and `rule` are None without a head."""

    key: str
    kind: str
    tree: TreeConfig | None = None
    rule: RuleConfig | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """What the report says of the mode; nothing where nothing is drafted."""
        if self.tree is None or self.rule is None:
            return {}
        return {**asdict(self.tree), **asdict(self.rule), "lossless": self.rule.lossless}


@dataclass(frozen=True)
class RunSettings:
    """Everything the command line sets; None = the shipped head, or the obvious default."""

    target: str = EMBEDDED
    draft: str | None = None
    prompts: tuple[str, ...] = (SHIPPED,)
    limit: int | None = None
    max_turns: int | None = None
    modes: tuple[str, ...] = (PLAIN, CHAIN, TREE)
    tree_depth: tuple[int, ...] = (TreeConfig.depth,)
    tree_top_k: tuple[int, ...] = (TreeConfig.top_k,)
    # None is TreeConfig's own default, AUTO makes the tree adaptive
    tree_nodes: tuple[int | str | None, ...] = (None,)
    tree_level_weight: tuple[float, ...] = (TreeConfig.level_weight,)
    chain_depth: tuple[int, ...] | None = None
    rule: tuple[str, ...] = (RuleConfig.rule,)
    draft_noise: tuple[str, ...] = (RuleConfig.draft_noise,)
    draft_sharpness: tuple[float, ...] = (RuleConfig.draft_sharpness,)
    threshold: float = RuleConfig.threshold
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    bad_words: tuple[str, ...] = ()
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    kernels: str | None = None
    batch: int = 1
    prefill_rows: int = EngineConfig.prefill_rows
    graphs: str = EngineConfig.graphs
    repeats: int = 1
    hf: tuple[str, ...] = ("generate",)
    assistant: str | None = None
    server: str | None = None
    server_model: str | None = None
    logprobs: bool = False
    verify: bool = False
    json: str | None = None
    html: str | None = None
    html_replies: int = 4
    plot: str | None = None

    def __post_init__(self) -> None:
        counts = ("limit", "max_turns", "max_new_tokens", "threads", "batch", "prefill_rows", "repeats", "html_replies")
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{flag(name)} is {value}, expected at least 1")
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown or not self.modes:
            found = ", ".join(unknown) or "nothing"
            raise ConfigError(f"--mode names {found}, expected some of {','.join(MODES)}")
        self._check_baselines()
        for name in ("rule", "draft_noise", "draft_sharpness", "prompts"):
            if not getattr(self, name):
                raise ConfigError(f"{flag(name)} names nothing, see --help")
        _check_texts("--stop", self.stop, "would end every reply at once")
        _check_texts("--bad-word", self.bad_words, "forbids nothing")
        for name in ("json", "html"):
            if (path := getattr(self, name)) is not None:
                check_writable(flag(name), Path(path))
        if self.plot is not None:
            check_folder("--plot", Path(self.plot))
        check_graphs(self.graphs)
        self.plans()

    def _check_baselines(self) -> None:
        allowed = f"expected {NONE}, or some of {','.join(HF_MODES)}"
        unknown = [name for name in self.hf if name not in (NONE, *HF_MODES)]
        if unknown or not self.hf:
            raise ConfigError(f"--hf names {', '.join(unknown) or 'nothing'}, {allowed}")
        if NONE in self.hf and len(self.hf) > 1:
            raise ConfigError(f"--hf is {','.join(self.hf)}, {allowed}")
        if self.drafts_assisted and self.assistant is None:
            raise ConfigError("--hf assisted needs --assistant MODEL: a small model with the target's tokenizer")
        if self.server is not None and not self.server.startswith(("http://", "https://")):
            raise ConfigError(f"--server is {self.server}, expected http://host:port or https://...")

    @property
    def drafts_assisted(self) -> bool:
        return "assisted" in self.hf

    def hf_plans(self) -> list[ModePlan]:
        """Hugging Face's modes in run order, `generate` first."""
        return [ModePlan(key, key) for name, key in HF_MODES.items() if name in self.hf]

    def plans(self) -> list[ModePlan]:
        """The engine modes in run order, plain first (it is what the others are compared with)."""
        plans = [ModePlan(PLAIN, PLAIN)] if PLAIN in self.modes or self.verify else []
        if CHAIN in self.modes:
            depths = dict.fromkeys(self.chain_depth or self.tree_depth)
            plans += self._keyed(CHAIN, [TreeConfig.chain(depth) for depth in depths])
        if TREE in self.modes and self.fixed_nodes:
            shapes = product(self.tree_depth, self.tree_top_k, self.fixed_nodes, self.tree_level_weight)
            trees = dict.fromkeys(TreeConfig(depth, top_k, n, weight) for depth, top_k, n, weight in shapes)
            plans += self._keyed(TREE, list(trees))
        if AUTO in self.modes or (TREE in self.modes and AUTO in self.tree_nodes):
            plans += self._keyed(AUTO, [self.adaptive_tree])
        return plans

    @property
    def fixed_nodes(self) -> list[Any]:
        return [nodes for nodes in self.tree_nodes if nodes != AUTO]

    @property
    def adaptive_tree(self) -> TreeConfig:
        """As large as the largest that is asked for: a round of it may be any smaller one. It takes no level weight."""
        nodes: Any = max((nodes for nodes in self.fixed_nodes if nodes is not None), default=None)
        return TreeConfig(max(self.tree_depth), max(self.tree_top_k), nodes, adaptive=True)

    @property
    def rules(self) -> list[RuleConfig]:
        """One per run of a mode; the draft noise belongs to the match rule where that is among several."""
        rules: list[RuleConfig] = []
        for rule in dict.fromkeys(self.rule):
            noises = self.draft_noise if rule == MATCH or MATCH not in self.rule else (NO_NOISE,)
            for noise in dict.fromkeys(noises):
                each = self.draft_sharpness if noise == SHARED_NOISE else (RuleConfig.draft_sharpness,)
                rules += [RuleConfig(rule, noise, self.threshold, sharpness) for sharpness in dict.fromkeys(each)]
        return rules

    def _keyed(self, kind: str, trees: list[TreeConfig]) -> list[ModePlan]:
        """The first tree of a mode under the default rule bears the mode's name; others what is not so beside it."""
        plans = []
        for tree, rule in product(trees, self.rules):
            parts = [shape_name(tree)] if tree != trees[0] else []
            parts += [rule_name(rule)] if rule_name(rule) else []
            plans.append(ModePlan(f"{kind}[{','.join(parts)}]" if parts else kind, kind, tree, rule))
        return plans

    def notes(self) -> list[str]:
        """What the user must know before the run."""
        return [*self.unused(), *self._unreachable(), *self._untied_to_the_seed(), *self._one_at_a_time()]

    def _one_at_a_time(self) -> list[str]:
        names = [name for name in HF_MODES if name in self.hf and name != "generate"]
        if self.batch == 1 or not names:
            return []
        return [f"--hf {', '.join(names)}: transformers drafts for one prompt at a time, whatever --batch"]

    def _unreachable(self) -> list[str]:
        least, most = self.sampling.min_tokens, self.max_new_tokens
        if least <= most:
            return []
        return [f"--min-tokens {least} is more than --max-new-tokens {most}: every reply ends at {most} (or --stop)"]

    def _untied_to_the_seed(self) -> list[str]:
        # the threshold gives a greedy request, too, whatever was drafted
        greedy = self.sampling.temperature == 0
        keys = [
            plan.key
            for plan in self.plans()
            if plan.kind == AUTO and plan.rule and (plan.rule.rule == THRESHOLD if greedy else not plan.rule.pathwise)
        ]
        if not keys:
            return []
        return [
            f"{', '.join(keys)} draw other tokens with other trees, and adaptive trees follow the machine's speed: "
            "the same seed may give other outputs; --rule match does not have this"
        ]

    def unused(self) -> list[str]:
        """What was asked for and changes nothing, flag by flag."""
        if self.server is not None:
            return [f"{name} changes nothing: --server alone is measured" for name in self._unused_by_servers()]
        said = [f"{name} changes nothing at temperature 0" for name in self._unused_when_greedy()]
        said += self._unused_by_shapes()
        if self.draft is not None and not self.needs_head:
            said.append("--draft changes nothing: no mode drafts")
        if self.chain_depth is not None and CHAIN not in self.modes:
            said.append("--chain-depth changes nothing: chain is no mode of this run")
        if self.rules != [RuleConfig(threshold=self.threshold)] and not self.needs_head:
            said.append("--rule and --draft-noise change nothing: no mode drafts")
        if self._given(["draft_sharpness"]) and SHARED_NOISE not in self.draft_noise:
            said.append(f"--draft-sharpness changes nothing: it belongs to --draft-noise {SHARED_NOISE}")
        if self.threshold != RuleConfig.threshold and THRESHOLD not in self.rule:
            said.append(f"--threshold changes nothing: it belongs to --rule {THRESHOLD}")
        if self.assistant is not None and not self.drafts_assisted:
            said.append("--assistant changes nothing: it drafts for --hf assisted")
        if self.server_model is not None and self.server is None:
            said.append("--server-model changes nothing without --server")
        if self.html_replies != RunSettings.html_replies and self.html is None:
            said.append("--html-replies changes nothing without --html")
        if self.logprobs and self.json is None:
            said.append("--logprobs changes nothing without --json: log-probabilities go to the report alone")
        return said

    def _unused_by_servers(self) -> list[str]:
        """Flags of this package's engine and of Hugging Face's decoding."""
        names = ["target", "draft", "dtype", "device", "threads", "kernels", "prefill_rows", "graphs", "verify"]
        names += ["tree_depth", "tree_top_k", "tree_nodes", "tree_level_weight", "chain_depth", "rule", "draft_noise"]
        names += ["draft_sharpness", "threshold", "hf", "assistant"]
        return ["--mode"] * bool(self._given(["modes"])) + [flag(name) for name in self._given(names)]

    def _unused_by_shapes(self) -> list[str]:
        """Flags of trees that no mode grows."""
        kinds = {plan.kind for plan in self.plans()}
        names = [] if kinds & {TREE, AUTO} else ["tree_top_k", "tree_nodes", "tree_level_weight"]
        if names and (CHAIN not in kinds or self.chain_depth is not None):
            names.insert(0, "tree_depth")
        said = [f"{flag(name)} changes nothing: no mode of this run has such trees" for name in self._given(names)]
        if AUTO in kinds and self._given(["tree_level_weight"]):
            said.append(f"--tree-level-weight changes nothing of {AUTO}: it ranks nodes by learned acceptance")
        return said

    def _given(self, names: Sequence[str]) -> list[str]:
        """Those that are not what they are by default."""
        return [name for name in names if getattr(self, name) != getattr(RunSettings, name)]

    def _unused_when_greedy(self) -> list[str]:
        if self.sampling.temperature != 0:
            return []
        given, default = self.sampling, SamplingConfig()
        names = [n for n in ("top_k", "top_p", "min_p", "seed") if getattr(given, n) != getattr(default, n)]
        if self.needs_head and set(self.rule) - {MATCH, THRESHOLD}:
            names.append("rule")
        if self.needs_head and set(self.draft_noise) != {NO_NOISE}:
            names.append("draft_noise")
        return [flag(name) for name in names]

    @property
    def needs_head(self) -> bool:
        return any(plan.tree is not None for plan in self.plans())


def shape_name(tree: TreeConfig) -> str:
    """`d4k4n16`, the level weight where it says something, and `<=` where a round may take less."""
    weight = "" if tree.level_weight == 1 else f"w{tree.level_weight:g}"
    return f"{'<=' if tree.adaptive else ''}d{tree.depth}k{tree.top_k}n{tree.nodes}{weight}"


def rule_name(rule: RuleConfig) -> str:
    """What a mode's key says of its rule: nothing for the default."""
    if rule.rule != MATCH:
        return rule.rule
    if rule.draft_noise == NO_NOISE:
        return ""
    return rule.draft_noise + ("" if rule.draft_sharpness == 1 else f"*{rule.draft_sharpness:g}")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_texts(name: str, texts: Sequence[str], when_empty: str) -> None:
    if "" in texts:
        raise ConfigError(f"{name} is an empty string, which {when_empty}")
    if has_surrogate(texts):
        raise ConfigError(f"{name} holds bytes that are no text in this locale's encoding")


def check_writable(name: str, path: Path) -> None:
    """Raise before the run, not after it, when flag `name`'s file could not be written."""
    if path.is_dir():
        raise ConfigError(f"{name} {path} is a folder, expected a file to write")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{name} {path} is a device or a pipe; the report replaces a file, give another path")
    _check_parent(name, path)


def check_folder(name: str, path: Path) -> None:
    """Raise when flag `name`'s folder is none, cannot be made, or cannot be written into."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{name} {path} is a file, expected a folder")
    _check_parent(name, path)
    if path.is_dir() and not os.access(path, os.W_OK):
        raise ConfigError(f"{name} {path} is not writable")


def _check_parent(name: str, path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigError(f"{name} {path}: the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{name} {path}: the folder {path.parent} is not writable")
