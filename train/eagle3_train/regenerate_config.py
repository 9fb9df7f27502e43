"""The settings of train/regenerate.py: one default, in one place. Flags are these names."""

import os
from dataclasses import dataclass, field
from typing import Any

from eagle3.chats import check_template_options
from eagle3.embedded import EMBEDDED
from eagle3.errors import ConfigError
from eagle3_train.reply_file import SUFFIXES

AUTO, PLAIN, CHAIN, TREE = "auto", "plain", "chain", "tree"
MODES = (AUTO, PLAIN, CHAIN, TREE)


@dataclass(frozen=True)
class RegenerateConfig:
    """Let the target answer prompts, or write its own chats, as training data.

    Args:
        target: folder, hub id, or smollm2-135m-instruct (the embedded default).
        prompts: JSON lines (or .jsonl.gz) of `prompt`, `turns`, or `messages`, whose replies are written anew.
        self: the target writes so many chats, user turns included, instead of answering prompts.
        system: system message of the chats that the target writes itself.
        output: .jsonl or .jsonl.gz file; a run that was stopped goes on with it.
        limit: only the first so many prompts.
        temperature: of the replies that are sampled.
        top_k: keep the k most likely tokens; 0 = all.
        top_p: keep the most likely tokens that reach this mass; 1 = all.
        greedy_share: share of the chats, by a hash of their ids, whose replies are greedy.
        self_temperature: of user turns that the target writes.
        self_top_k: of user turns that the target writes.
        max_new_tokens: of each turn; a reply that reaches it ends its chat.
        max_prompt_tokens: longer prompts are counted and left out; None = what the target holds.
        draft: folder of a head, or shipped: speculative decoding, whose tokens are the same.
        mode: plain, chain, tree, or auto (plain without a draft, adaptive trees with one).
        tree_depth: levels below the root, at most.
        tree_top_k: nodes of a level that are expanded, and children offered for each.
        tree_nodes: draft nodes verified per round, at most; None = tree_top_k * tree_depth.
        batch: replies written at once.
        template_options: extra variables for the chat template (such as enable_thinking).
        dtype: auto (the target's own), float32, bfloat16, float16.
        device: auto, cpu, cuda, cuda:1; of several processes each takes the GPU of its local rank.
        threads: torch threads; None leaves torch's choice.
        seed: with it and a chat's id alone, a reply is determined.
    """

    target: str = EMBEDDED
    prompts: str | None = None
    self: int | None = None
    system: str | None = None
    output: str = "replies.jsonl.gz"
    limit: int | None = None
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    greedy_share: float = 0.6
    self_temperature: float = 0.9
    self_top_k: int = 100
    max_new_tokens: int = 224
    max_prompt_tokens: int | None = None
    draft: str | None = None
    mode: str = AUTO
    tree_depth: int = 4
    tree_top_k: int = 4
    tree_nodes: int | None = None
    batch: int = 32
    template_options: dict[str, Any] = field(default_factory=dict, hash=False)
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    seed: int = 0

    def __post_init__(self):
        for name in ("self", "limit", "max_new_tokens", "max_prompt_tokens", "batch", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more")
        if (self.prompts is None) == (self.self is None):
            raise ConfigError("give either --prompts FILE or --self N, the number of chats that the target writes")
        if self.self is None and self.system is not None:
            raise ConfigError("system belongs to --self; prompts bring their own system messages")
        check_template_options("template_options", self.template_options)
        if not 0 <= self.greedy_share <= 1:
            raise ConfigError(f"greedy_share is {self.greedy_share}; it must be between 0 and 1")
        if not self.output.endswith(SUFFIXES):
            raise ConfigError(f"output {self.output!r} must end in {' or '.join(SUFFIXES)}")
        if self.mode not in MODES:
            raise ConfigError(f"mode is {self.mode!r}; use {', '.join(MODES)}")
        if self.draft is None and self.mode in (CHAIN, TREE):
            raise ConfigError(f"mode is {self.mode}; it needs a --draft")
        if self.draft is not None and self.mode == PLAIN:
            raise ConfigError("mode is plain, which needs no --draft; leave one of them out")
        for name in ("prompts", "output"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, os.path.expanduser(path))

    def determines(self) -> dict[str, Any]:
        """The settings that a row depends on, besides target, prompts and its id."""
        names = ["system", "temperature", "top_k", "top_p", "greedy_share", "max_new_tokens", "seed"]
        names += ["self_temperature", "self_top_k"] if self.self else []
        return {name: getattr(self, name) for name in (*names, "template_options")}
