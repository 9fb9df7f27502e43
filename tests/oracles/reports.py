"""Reports and traces by hand, small enough to count: what pages are made of without a model."""

from typing import Any

from eagle3_infer.compare import compare_modes
from eagle3_infer.replies import Told, Words, tell_reply
from eagle3_infer.report import ModeRun, Output, build_report
from eagle3_infer.request import STAGES
from eagle3_infer.trace import Trace, TracedRound, TracedTree

TREE = {"depth": 2, "top_k": 2, "nodes": 5, "rule": "match", "draft_noise": "none", "adaptive": False, "lossless": True}
AUTO = TREE | {"adaptive": True}
CHAIN = TREE | {"top_k": 1, "nodes": 2}
LOSSY = TREE | {"rule": "threshold", "lossless": False}
HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=hacked=1>\u202e\x00&amp;"
# token -> its text; every token of the traces below
TEXTS = [
    *(" the", " of", "\n", " שלום", " مرحبا", "🙂", HOSTILE, " quite-a-long-word-that-is-cut-short"),
    *("<|im_end|>", "漢字", "\t", ""),
]


class Vocabulary:
    """A tokenizer of TEXTS; token 99 is its anchor."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        assert text == "a"
        return {"input_ids": [99]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join("a" if token == 99 else TEXTS[token] for token in ids)


# root - 1 - 3, 4 ; root - 2 - 5
FULL = TracedTree(
    tokens=[0, 1, 2, 3, 4, 5],
    parents=[-1, 0, 0, 1, 1, 2],
    scores=[0.0, -0.1, -2.5, -0.3, -1.1, -2.6],
    edges=[0.0, -0.1, -2.5, -0.2, -1.0, -0.1],
)
BARE = TracedTree([1], [-1], [0.0], [0.0])
HOSTILE_TREE = TracedTree(list(range(3, 12)), [-1, 0, 0, 1, 1, 2, 2, 3, 3], [0.0] + [-0.5] * 8, [0.0] + [-0.5] * 8)
# the prefill's token, then: both levels accepted, the first only, nothing drafted, none accepted, a reply that ends
ROUNDS = [
    TracedRound(FULL, [1, 4, 5], [1, 4]),
    TracedRound(FULL, [2, 8], [2]),
    TracedRound(BARE, [7], []),
    TracedRound(HOSTILE_TREE, [6], []),
    TracedRound(FULL, [1], [1]),
]
TOKENS = [0] + [token for r in ROUNDS for token in r.emitted]


def output(mode: str, runs: list[int], tokens: list[int] | None = None, **rest: Any) -> Output:
    """A reply in a second and a half, a second of it verification."""
    seconds = dict.fromkeys(STAGES, 0.0) | {"prefill": 0.25, "draft": 0.25, "verify": 1.0, "other": 0.25}
    known = {"id": "a", "category": "x", "turn": 0, "prompt_tokens": 10, "finish_reason": "length", "text": "t"}
    ids = list(range(1 + sum(runs))) if tokens is None else tokens
    return Output(**{**known, "seconds": seconds, "mode": mode, "token_ids": ids, "run_lengths": runs, **rest})


def traced_output(mode: str, **rest: Any) -> Output:
    runs = [len(r.emitted) for r in ROUNDS]
    counted = {"offered_by_level": [10, 12], "accepted_by_level": [3, 1], "nodes": 23, "path_conflict": (1, 4)}
    return output(mode, runs, TOKENS, **{**counted, **rest})


def drafting_modes(**rest: Any) -> list[ModeRun]:
    """plain, chain, tree, auto, HF; `rest` goes to every output."""
    alone = {"seconds": dict.fromkeys(STAGES, 0.0) | {"prefill": 0.25, "other": 1.5}}
    plain = output("plain", [1] * (len(TOKENS) - 1), TOKENS, **rest)
    hf = output("hf_generate", [1] * (len(TOKENS) - 1), TOKENS, **{**alone, **rest})
    kinds = {"chain": CHAIN, "tree": TREE, "auto": AUTO}
    drafting = [ModeRun(key, settings, [[traced_output(key, **rest)]]) for key, settings in kinds.items()]
    return [ModeRun("plain", {}, [[plain]]), *drafting, ModeRun("hf_generate", {}, [[hf]])]


def report_of(modes: list[ModeRun], **run: Any) -> dict[str, Any]:
    settings = {"max_new_tokens": 16, "batch": 1, "sampling": {"temperature": 0.0, "seed": 0}}
    known = {
        "argv": ["--limit", "1"],
        "target": "/models/tiny",
        "draft": "runs/head",
        "dtype": "float32",
        "device": "cpu",
    }
    return build_report({**known, "settings": settings, **run}, modes, compare_modes(modes, None, sampled=False))


def told_of(modes: list[ModeRun], asked: str = "Why?", traced: bool = True) -> Told:
    """Every reply of the modes, those of drafting ones with the rounds above."""
    words = Words(Vocabulary())
    told = Told(words=words.known)
    for at in range(len(modes[0].outputs)):
        outputs = [mode.outputs[at] for mode in modes]
        traces = {m.key: Trace(m.outputs[at], ROUNDS) for m in modes if m.settings and traced}
        told.replies.append(tell_reply(outputs, traces, asked, words))
    return told
