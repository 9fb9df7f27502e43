"""Check chat data before training: what is kept, what is dropped, and exactly what is supervised.

    python train/prepare_data.py --config recipes/base/smollm2-135m.yaml --inspect 3
    python train/prepare_data.py --target MODEL --data.files '[chats.jsonl]'

The settings are the trainer's own, so what is shown is what would be trained on. Only the target's tokenizer and
config are loaded. Supervised text is printed between ⟦ and ⟧.
"""

import sys
import warnings
from dataclasses import dataclass
from typing import Any

from eagle3.config import load_config
from eagle3.errors import ConfigError, Eagle3Error, one_line
from eagle3_train.config import TrainConfig

COVERAGE_SIZES = (1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class InspectConfig(TrainConfig):
    """The trainer's settings, and what to show.

    Args:
        inspect: rows to print.
    """

    inspect: int = 3


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, or 2 on bad input (one line on stderr)."""
    try:
        inspect(load_config(InspectConfig, argv, description=__doc__))
    except Eagle3Error as error:
        print(one_line(error), file=sys.stderr)
        return 2
    return 0


def inspect(config: InspectConfig) -> None:
    """Print the counts, some rows and the coverage of draft vocabularies."""
    from eagle3_train.data import load_data
    from eagle3_train.render import ChatRenderer

    tokenizer, eos = load_tokenizer(config.target)
    renderer = ChatRenderer(tokenizer, eos)
    data = config.data
    train, held_out, report = load_data(data.files, renderer, data.max_length, eval_rows=data.eval_rows)
    print(report)
    for number in range(min(config.inspect, len(train))):
        row = train[number]
        greedy = "greedy" if row["greedy"] else "sampled or unknown"
        print(f"\n--- row {number}: {len(row['input_ids'])} tokens, {greedy} reply")
        print(marked_text(tokenizer, row["input_ids"], row["span_ids"]))
    print_coverage(train, held_out, len(tokenizer), renderer.end_ids)


def marked_text(tokenizer: Any, input_ids: list[int], span_ids: list[int]) -> str:
    """A row's text, each supervised span between ⟦ and ⟧."""
    parts, start = [], 0
    for end in range(1, len(input_ids) + 1):
        if end == len(input_ids) or span_ids[end] != span_ids[start]:
            text = tokenizer.decode(input_ids[start:end])
            parts.append(f"⟦{text}⟧" if span_ids[start] else text)
            start = end
    return "".join(parts)


def print_coverage(train: Any, held_out: Any, vocab_size: int, always: frozenset[int]) -> None:
    """Share of the supervised tokens that draft vocabularies of several sizes, made of the training rows, hold."""
    from eagle3.vocab import build_vocab_map
    from eagle3_train.data import token_counts

    counts, unseen = token_counts(train, vocab_size), token_counts(held_out, vocab_size)
    print(f"\n{int((counts > 0).sum()):,} distinct supervised tokens; coverage by draft vocabulary size:")
    for size in (s for s in COVERAGE_SIZES if s < vocab_size):
        with warnings.catch_warnings():
            # a size that the data cannot fill shows in the line above
            warnings.simplefilter("ignore", UserWarning)
            chosen = build_vocab_map(counts, size, always, vocab_size)
        print(f"{size:>8,}  train {chosen.coverage(counts):.4f}  held-out {chosen.coverage(unseen):.4f}")


def load_tokenizer(target: str) -> tuple[Any, tuple[int, ...]]:
    """(tokenizer, EOS ids) of the embedded target by name, of a local folder or of a hub id."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    from eagle3.target import eos_ids, resolve_path

    path = resolve_path(target)
    try:
        tokenizer, config = AutoTokenizer.from_pretrained(path), AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"target {target!r} has no tokenizer and config: {str(error).splitlines()[0]}") from None
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:
        generation = None
    return tokenizer, eos_ids(config, generation, tokenizer)


if __name__ == "__main__":
    sys.exit(main())
