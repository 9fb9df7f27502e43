"""Check chat data before training: what is kept, what is dropped, and exactly what is supervised.

    python train/prepare_data.py chats.jsonl --target smollm2-135m-instruct --max-length 512 --inspect 3

Only the target's tokenizer is loaded. Supervised text is printed between ⟦ and ⟧.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

COVERAGE_SIZES = (1024, 2048, 4096, 8192, 16384, 32768)


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    # imported here, so that --help answers at once
    from eagle3.errors import Eagle3Error

    try:
        inspect(args)
    except Eagle3Error as error:
        print(f"prepare_data: error: {error}", file=sys.stderr)
        return 2
    return 0


def inspect(args: Any) -> None:
    """Print the counts, some rows and the coverage of draft vocabularies."""
    from eagle3_train.data import load_data
    from eagle3_train.render import ChatRenderer

    tokenizer, eos_ids = load_tokenizer(args.target)
    train, held_out, report = load_data(
        args.files, ChatRenderer(tokenizer, eos_ids), args.max_length, args.eval_fraction, args.eval_rows
    )
    print(report)
    for number in range(min(args.inspect, len(train))):
        row = train[number]
        greedy = "greedy" if row["greedy"] else "sampled or unknown"
        print(f"\n--- row {number}: {len(row['input_ids'])} tokens, {greedy} reply")
        print(marked_text(tokenizer, row["input_ids"], row["span_ids"]))
    print_coverage(train, held_out, len(tokenizer))


def marked_text(tokenizer: Any, input_ids: list[int], span_ids: list[int]) -> str:
    """A row's text, each supervised span between ⟦ and ⟧."""
    parts, start = [], 0
    for end in range(1, len(input_ids) + 1):
        if end == len(input_ids) or span_ids[end] != span_ids[start]:
            text = tokenizer.decode(input_ids[start:end])
            parts.append(f"⟦{text}⟧" if span_ids[start] else text)
            start = end
    return "".join(parts)


def print_coverage(train: Any, held_out: Any, vocab_size: int) -> None:
    """Share of the supervised tokens that the most frequent training tokens hold, by draft vocab size."""
    from eagle3_train.data import coverage, token_counts

    counts = token_counts(train, vocab_size)
    ranked = counts.argsort(descending=True, stable=True)
    unseen = token_counts(held_out, vocab_size) if len(held_out) else None
    print(f"\n{int((counts > 0).sum()):,} distinct supervised tokens; coverage by draft vocab size:")
    for size in (s for s in COVERAGE_SIZES if s < vocab_size):
        line = f"{size:>8,}  train {coverage(counts, ranked[:size]):.4f}"
        print(line if unseen is None else f"{line}  held-out {coverage(unseen, ranked[:size]):.4f}")


def load_tokenizer(target: str) -> tuple[Any, tuple[int, ...]]:
    """(tokenizer, EOS ids) of the embedded target by name, of a local folder or of a hub id."""
    from transformers import AutoTokenizer, GenerationConfig

    from eagle3.embedded import EMBEDDED, embedded_model_path
    from eagle3.errors import DataError

    path = str(embedded_model_path()) if target == EMBEDDED else target
    path = str(Path(path).expanduser()) if path.startswith("~") else path
    if path.startswith(("/", ".")) and not Path(path).is_dir():
        raise DataError(f"--target {target}: no such folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"no tokenizer at {target!r}: {str(error).splitlines()[0]}") from None
    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        eos = None
    eos = tokenizer.eos_token_id if eos is None else eos
    return tokenizer, tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)


def _parser() -> Any:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog="prepare_data.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", help="JSONL files (.jsonl, .jsonl.gz) with 'messages' per line")
    parser.add_argument("--target", default="smollm2-135m-instruct", help="target: embedded name, folder or hub id")
    parser.add_argument("--max-length", "--max_length", type=int, default=2048, help="tokens kept per row")
    parser.add_argument("--inspect", type=int, default=3, help="rows to print")
    parser.add_argument("--eval-fraction", "--eval_fraction", type=float, default=0.0, help="share held out")
    parser.add_argument("--eval-rows", "--eval_rows", type=int, default=0, help="rows held out")
    return parser


if __name__ == "__main__":
    sys.exit(main())
