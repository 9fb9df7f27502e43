"""What one `eagle3-infer` run does: validated settings and the plan of its modes. No torch, no files read."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

from eagle3.chats import check_template_options
from eagle3.embedded import EMBEDDED
from eagle3.errors import ConfigError
from eagle3_infer.config import (
    MATCH,
    NO_NOISE,
    SHARED_NOISE,
    EngineConfig,
    RuleConfig,
    SamplingConfig,
    TreeConfig,
    check_graphs,
)
from eagle3_infer.destinations import check_destinations
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
    # variables of the chat template; without one they are refused
    template_options: dict[str, Any] = field(default_factory=dict, hash=False)
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
        check_template_options("--template-options", self.template_options)
        self._check_baselines()
        for name in ("rule", "draft_noise", "draft_sharpness", "prompts"):
            if not getattr(self, name):
                raise ConfigError(f"{flag(name)} names nothing, see --help")
        _check_texts("--stop", self.stop, "would end every reply at once")
        _check_texts("--bad-word", self.bad_words, "forbids nothing")
        check_destinations({"--json": self.json, "--html": self.html}, {"--plot": self.plot})
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
        for name, given in (("--bad-word", self.bad_words), ("--logprobs", self.logprobs)):
            if self.server is not None and given:
                raise ConfigError(f"{name} cannot be asked of --server")

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
