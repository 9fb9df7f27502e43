"""The flags of `eagle3-infer`, group by group, and the settings that come of them. Knows no torch and runs nothing."""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

from eagle3_infer.command_line import Parser, bias, integers, mapping, nodes, numbers, words
from eagle3_infer.config import DRAFT_NOISES, RULES, SamplingConfig
from eagle3_infer.settings import AUTO, HF_MODES, MODES, NONE, PROMPTS_FOLDER, RANDOM_DRAFT, SHIPPED, RunSettings

DESCRIPTION = """\
Decode prompts with a target and its EAGLE-3 draft head: plainly, as a chain, as a dynamic tree, and with
Hugging Face generate; print what the head bought, and whether the outputs are the same.
Without arguments: the embedded target, the shipped head, the shipped prompts."""
EPILOG = """\
eagle3-infer tune finds the tree that is fastest on this machine (eagle3-infer tune --help).

exit codes: 0 done; 1 --verify found a bug; 2 bad input; 130 interrupted (partial results are kept)

examples:
  eagle3-infer --limit 4 --verify --dtype float32
  eagle3-infer --target Qwen/Qwen3-1.7B --draft runs/qwen3/best --prompts mine.jsonl --json report.json
  eagle3-infer --mode tree --tree-nodes 8,16,32,auto --repeats 3
  eagle3-infer --temperature 1 --rule match,target_only,rejection --draft-noise none,shared --batch 8"""

Settings = TypeVar("Settings", bound=RunSettings)
# fields of flags that have the singular for a name
_FIELDS = {"mode": "modes", "bad_word": "bad_words"}


def build_parser() -> Parser:
    parser = Parser(
        prog="eagle3-infer",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_models(parser.add_argument_group("models"))
    add_prompts(parser.add_argument_group("prompts"))
    add_drafting(parser.add_argument_group("modes and draft trees (a comma list runs every combination)"))
    add_rules(parser.add_argument_group("how drafts are drawn and accepted (a comma list runs each of them)"))
    add_sampling(parser.add_argument_group("sampling (the same for every mode)"))
    add_processors(parser.add_argument_group("penalties and bans (the same for every mode)"))
    add_baselines(parser.add_argument_group("what else is measured with the same prompts"))
    add_machine(parser.add_argument_group("machine"))
    add_report(parser.add_argument_group("measuring and report"))
    return parser


def settings_of(kind: type[Settings], options: dict[str, Any]) -> Settings:
    """Settings of what a parser has read; `options` are named after the flags.

    Raises:
        ConfigError: whatever can be known to be wrong without reading a model.
    """
    given = {_FIELDS.get(name, name): value for name, value in options.items()}
    given |= {name: tuple(given[name]) for name in ("stop", "bad_words", "logit_bias")}
    # words become token ids once there is a tokenizer
    names = ({field.name for field in fields(SamplingConfig)} - {"bad_words"}) & given.keys()
    sampling = SamplingConfig(**{name: given.pop(name) for name in names})
    return kind(sampling=sampling, **given)


def add_models(group: Any) -> None:
    default = RunSettings.target
    group.add_argument("--target", default=default, metavar="MODEL", help=f"folder or hub id (default: {default})")
    group.add_argument(
        "--draft", metavar="DIR", help=f"folder of the head, or {RANDOM_DRAFT!r}: untrained (default: the shipped head)"
    )


def add_prompts(group: Any) -> None:
    group.add_argument(
        "--prompts",
        type=words,
        default=RunSettings.prompts,
        metavar="LIST",
        help="files of JSON lines ({prompt}, {messages} or {question_id, category, turns}), or names of sets: "
        f"{SHIPPED}, or NAME for NAME.jsonl(.gz) in the folder ${PROMPTS_FOLDER} (default: {SHIPPED})",
    )
    group.add_argument("--limit", type=int, metavar="N", help="only the first N prompts of each set")
    group.add_argument("--max-turns", type=int, metavar="N", help="only the first N turns of each prompt")
    group.add_argument(
        "--template-options",
        type=mapping,
        default={},
        metavar="YAML",
        help="variables of the target's chat template, as the head was trained with: '{enable_thinking: false}'",
    )


def add_drafting(group: Any) -> None:
    default = RunSettings
    group.add_argument(
        "--mode",
        type=words,
        default=default.modes,
        metavar="LIST",
        help=f"some of {','.join(MODES)} (default: {','.join(default.modes)})",
    )
    group.add_argument(
        "--tree-depth",
        type=integers,
        default=default.tree_depth,
        metavar="D",
        help=_help("levels below the root", default.tree_depth),
    )
    group.add_argument(
        "--tree-top-k",
        type=integers,
        default=default.tree_top_k,
        metavar="K",
        help=_help("nodes of a level that are expanded, and children offered for each", default.tree_top_k),
    )
    group.add_argument(
        "--tree-nodes",
        type=nodes,
        default=default.tree_nodes,
        metavar="N",
        help=f"draft nodes verified per round, root excluded; {AUTO!r} is --mode {AUTO}: up to the largest depth, "
        "top-k and nodes given, each round what promises most tokens per second (default: top-k * depth)",
    )
    group.add_argument(
        "--tree-level-weight",
        type=numbers,
        default=default.tree_level_weight,
        metavar="W",
        help=_help("score policy: above 1 favours width, below 1 depth", default.tree_level_weight),
    )
    group.add_argument("--chain-depth", type=integers, metavar="D", help="tokens of the chain (default: --tree-depth)")


def add_rules(group: Any) -> None:
    default = RunSettings
    group.add_argument(
        "--rule",
        type=words,
        default=default.rule,
        metavar="LIST",
        help=_help(f"some of {','.join(RULES)}; the last one is lossy, and labelled so", default.rule),
    )
    group.add_argument(
        "--draft-noise",
        type=words,
        default=default.draft_noise,
        metavar="LIST",
        help=_help(f"some of {','.join(DRAFT_NOISES)}, of the match rule", default.draft_noise),
    )
    group.add_argument(
        "--draft-sharpness",
        type=numbers,
        default=default.draft_sharpness,
        metavar="W",
        help=_help(
            "weight of log q beside shared noise: above 1 for a head that is less sure than it should be",
            default.draft_sharpness,
        ),
    )
    group.add_argument(
        "--threshold",
        type=float,
        default=default.threshold,
        metavar="P",
        help="smallest target probability that the threshold rule takes (default: %(default)s)",
    )


def add_sampling(group: Any) -> None:
    default = SamplingConfig()
    group.add_argument(
        "--temperature", type=float, default=default.temperature, metavar="T", help="0 is greedy (default: %(default)s)"
    )
    group.add_argument("--top-k", type=int, default=default.top_k, metavar="K", help="0 is off (default: %(default)s)")
    group.add_argument(
        "--top-p", type=float, default=default.top_p, metavar="P", help="1 is off (default: %(default)s)"
    )
    group.add_argument(
        "--min-p", type=float, default=default.min_p, metavar="P", help="0 is off (default: %(default)s)"
    )
    group.add_argument(
        "--seed", type=int, default=default.seed, metavar="S", help="of the sampling noise (default: %(default)s)"
    )
    group.add_argument(
        "--max-new-tokens",
        type=int,
        default=RunSettings.max_new_tokens,
        metavar="N",
        help="per reply (default: %(default)s)",
    )
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop string, may be repeated")


def add_processors(group: Any) -> None:
    default = SamplingConfig()
    for name, text in (
        ("repetition", "divides logits of tokens in prompt or reply; 1 is off"),
        ("presence", "subtracted once from logits of tokens in the reply; 0 is off"),
        ("frequency", "subtracted as often as the token is in the reply; 0 is off"),
    ):
        value = getattr(default, f"{name}_penalty")
        group.add_argument(
            f"--{name}-penalty", type=float, default=value, metavar="X", help=f"{text} (default: {value:g})"
        )
    group.add_argument(
        "--logit-bias",
        type=bias,
        action="append",
        default=[],
        metavar="ID=VALUE",
        help="added to the logit of a token id, may be repeated",
    )
    group.add_argument(
        "--bad-word",
        action="append",
        default=[],
        metavar="TEXT",
        help="never emitted, neither as it is nor after a blank; may be repeated",
    )
    group.add_argument(
        "--min-tokens",
        type=int,
        default=default.min_tokens,
        metavar="N",
        help="tokens before the reply may end (default: %(default)s)",
    )


def add_baselines(group: Any) -> None:
    group.add_argument(
        "--hf",
        type=words,
        default=RunSettings.hf,
        metavar="LIST",
        help=_help(f"Hugging Face's own decoding: {NONE}, or some of {','.join(HF_MODES)}", RunSettings.hf),
    )
    group.add_argument("--assistant", metavar="MODEL", help="small model that drafts for --hf assisted")
    group.add_argument(
        "--server",
        metavar="URL",
        help="measure this OpenAI-compatible server, http://host:port, and nothing else; acceptance from its counters",
    )
    group.add_argument(
        "--server-model", metavar="NAME", help="what --server calls the model (default: the one that it lists)"
    )


def add_machine(group: Any) -> None:
    group.add_argument(
        "--dtype",
        default=RunSettings.dtype,
        help="auto, float32, bfloat16 or float16 (default: %(default)s, the target's)",
    )
    group.add_argument("--device", default=RunSettings.device, help="auto, cpu, cuda, cuda:N (default: %(default)s)")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")
    group.add_argument(
        "--kernels",
        metavar="NAME",
        help="auto (Triton on CUDA and ROCm, torch elsewhere), triton or torch (default: $EAGLE3_KERNELS, else auto)",
    )
    group.add_argument(
        "--batch", type=int, default=RunSettings.batch, metavar="N", help="prompts at once (default: %(default)s)"
    )
    group.add_argument(
        "--prefill-rows",
        type=int,
        default=RunSettings.prefill_rows,
        metavar="N",
        help="prompt tokens read per round (default: %(default)s)",
    )
    group.add_argument(
        "--graphs",
        default=RunSettings.graphs,
        help="auto: rounds are CUDA graphs where there is a GPU; fixed: in their shapes, but not captured; off "
        "(default: %(default)s)",
    )


def add_report(group: Any) -> None:
    group.add_argument(
        "--verify", action="store_true", help="replay every divergence in fp32: rounding, or a bug (exit code 1)"
    )
    group.add_argument(
        "--repeats",
        type=int,
        default=RunSettings.repeats,
        metavar="N",
        help="runs of everything, the modes in turn: medians and ranges are reported (default: %(default)s)",
    )
    group.add_argument("--logprobs", action="store_true", help="the log-prob of every token, in the report of --json")
    group.add_argument("--json", metavar="PATH", help="write the full report, with every reply, as JSON")
    group.add_argument("--html", metavar="PATH", help="write the report as one page: tables, charts, every draft tree")
    group.add_argument(
        "--html-replies",
        type=int,
        default=RunSettings.html_replies,
        metavar="N",
        help="replies that --html shows round by round (default: %(default)s)",
    )
    group.add_argument("--plot", metavar="DIR", help="write the charts as PNG files into this folder")


def _help(text: str, default: Sequence[Any]) -> str:
    return f"{text} (default: {','.join(map(str, default))})"
