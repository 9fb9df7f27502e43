"""`eagle3-infer`: measure a draft head against plain decoding and HF generate. `eagle3-infer --help`.

Parses and reports errors; torch is imported only once the arguments are known to be right.
"""

import argparse
import difflib
import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from eagle3.errors import ConfigError, Eagle3Error, one_line
from eagle3_infer.config import SamplingConfig
from eagle3_infer.settings import EXIT_ERROR, EXIT_INTERRUPTED, MODES, RANDOM_DRAFT, RunSettings

DESCRIPTION = """\
Decode prompts with a target and its EAGLE-3 draft head: plainly, as a chain, as a dynamic tree, and with
Hugging Face generate; print what the head bought, and whether the outputs are the same.
Without arguments: the embedded target, the shipped head, the shipped prompts."""
EPILOG = """\
exit codes: 0 done; 1 --verify found a bug; 2 bad input; 130 interrupted (partial results are kept)

examples:
  eagle3-infer --limit 4 --verify --dtype float32
  eagle3-infer --target Qwen/Qwen3-1.7B --draft runs/qwen3/best --prompts mine.jsonl --json report.json
  eagle3-infer --mode tree --tree-nodes 8,16,32 --repeats 3"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, naming the nearest flag for an unknown one."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def parse_args(self, args=None, namespace=None):  # type: ignore[override]
        known, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return known
        word = unknown[0].split("=")[0]
        near = difflib.get_close_matches(word, self._option_string_actions, n=1, cutoff=0.4)
        hint = f", did you mean {near[0]}?" if near else ""
        self.error(f"unknown argument {word!r}{hint}")


def build_parser() -> Parser:
    parser = Parser(
        prog="eagle3-infer",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_models(parser.add_argument_group("models"))
    _add_prompts(parser.add_argument_group("prompts"))
    _add_drafting(parser.add_argument_group("modes and draft trees (a comma list runs every combination)"))
    _add_sampling(parser.add_argument_group("sampling (the same for every mode)"))
    _add_machine(parser.add_argument_group("machine"))
    _add_report(parser.add_argument_group("measuring and report"))
    return parser


def _add_models(group: Any) -> None:
    default = RunSettings.target
    group.add_argument("--target", default=default, metavar="MODEL", help=f"folder or hub id (default: {default})")
    group.add_argument(
        "--draft", metavar="DIR", help=f"folder of the head, or {RANDOM_DRAFT!r}: untrained (default: the shipped head)"
    )


def _add_prompts(group: Any) -> None:
    group.add_argument(
        "--prompts",
        metavar="FILE",
        help="JSON lines: {prompt}, {messages} or {question_id, category, turns} (default: the shipped ones)",
    )
    group.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")
    group.add_argument("--max-turns", type=int, metavar="N", help="only the first N turns of each prompt")


def _add_drafting(group: Any) -> None:
    default = RunSettings
    group.add_argument(
        "--mode",
        type=_words,
        default=default.modes,
        metavar="LIST",
        help=f"some of {','.join(MODES)} (default: all of them)",
    )
    group.add_argument(
        "--tree-depth",
        type=_integers,
        default=default.tree_depth,
        metavar="D",
        help=_help("levels below the root", default.tree_depth),
    )
    group.add_argument(
        "--tree-top-k",
        type=_integers,
        default=default.tree_top_k,
        metavar="K",
        help=_help("children kept per level", default.tree_top_k),
    )
    group.add_argument(
        "--tree-nodes",
        type=_integers,
        default=default.tree_nodes,
        metavar="N",
        help=_help("draft nodes verified per round, root excluded", default.tree_nodes),
    )
    group.add_argument("--chain-depth", type=_integers, metavar="D", help="tokens of the chain (default: --tree-depth)")


def _add_sampling(group: Any) -> None:
    default = SamplingConfig()
    group.add_argument(
        "--temperature", type=float, default=default.temperature, metavar="T", help="0 is greedy (default: %(default)s)"
    )
    group.add_argument("--top-k", type=int, default=default.top_k, metavar="K", help="0 is off (default: %(default)s)")
    group.add_argument(
        "--top-p", type=float, default=default.top_p, metavar="P", help="1 is off (default: %(default)s)"
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


def _add_machine(group: Any) -> None:
    group.add_argument(
        "--dtype",
        default=RunSettings.dtype,
        help="auto, float32, bfloat16 or float16 (default: %(default)s, the target's)",
    )
    group.add_argument("--device", default=RunSettings.device, help="auto, cpu, cuda, cuda:N (default: %(default)s)")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")


def _add_report(group: Any) -> None:
    group.add_argument("--no-hf", action="store_true", help="do not time Hugging Face generate")
    group.add_argument(
        "--verify", action="store_true", help="replay every divergence in fp32: rounding, or a bug (exit code 1)"
    )
    group.add_argument(
        "--repeats",
        type=int,
        default=RunSettings.repeats,
        metavar="N",
        help="runs of everything (default: %(default)s)",
    )
    group.add_argument("--json", metavar="PATH", help="write the full report, with every reply, as JSON")


def _help(text: str, default: tuple[int, ...]) -> str:
    return f"{text} (default: {','.join(map(str, default))})"


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number or a comma list of them") from None


def parse_settings(argv: Sequence[str]) -> RunSettings:
    """Raises ConfigError for whatever can be known to be wrong without reading a model."""
    options = vars(build_parser().parse_args(argv))
    sampling = {name: options.pop(name) for name in ("temperature", "top_k", "top_p", "seed")}
    options["modes"] = options.pop("mode")
    options["hf"] = not options.pop("no_hf")
    options["stop"] = tuple(options["stop"])
    return RunSettings(sampling=SamplingConfig(**sampling), **options)


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a terminal that lacks a character shows a question mark, and does not end the run
            stream.reconfigure(errors="replace")
    try:
        settings = parse_settings(argv)
        _quieten()
        with warnings_as_notes():
            from eagle3_infer.run import run

            return run(settings, argv)
    except Eagle3Error as error:
        print(one_line(error), file=sys.stderr)
        return EXIT_ERROR
    except BrokenPipeError:
        # whoever read the output is gone (`| head`): nothing more to say, also not at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except OSError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Every warning is one line `note: ...` on stderr, without its place in the code, and is said once."""
    said: set[str] = set()

    def show(message: Any, *place: Any, **more: Any) -> None:
        text = " ".join(str(message).split())
        if text not in said:
            said.add(text)
            # over the progress line, where there is one
            start = "\r\033[K" if sys.stderr.isatty() else ""
            print(f"{start}note: {text}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _quieten() -> None:
    """No progress bars and advice of the libraries, unless the user asked for them."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


if __name__ == "__main__":
    sys.exit(main())
