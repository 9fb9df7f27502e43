"""Check chat data before training: what is kept, what is dropped, and exactly what is supervised.

    python train/prepare_data.py --config recipes/base/smollm2-135m.yaml --inspect 3
    python train/prepare_data.py --target MODEL --data.files '[chats.jsonl]'

The settings are the trainer's own, so what is shown is what would be trained on. Only the target's tokenizer and
config are loaded. Supervised text is printed between ⟦ and ⟧. The rows are left in `<output>/data`, where the trainer
finds them.
"""

import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from eagle3.config import load_config
from eagle3.errors import ConfigError, Eagle3Error, one_line
from eagle3_train.config import COVERAGE_SIZES, TrainConfig


@dataclass(frozen=True)
class InspectConfig(TrainConfig):
    """The trainer's settings, and what to show.

    Args:
        inspect: rows to print.
    """

    inspect: int = 3

    def __post_init__(self):
        super().__post_init__()
        if self.inspect < 0:
            raise ConfigError(f"inspect is {self.inspect}; it must be 0 or more")


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, 2 on bad input or a full disk (one line on stderr), 130 when interrupted."""
    try:
        inspect(load_config(InspectConfig, argv, description=__doc__))
    except (Eagle3Error, OSError) as error:
        print(one_line(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was kept of rows that were not whole", file=sys.stderr)
        return 130
    return 0


def inspect(config: InspectConfig) -> None:
    """Print the counts, some rows and the coverage of draft vocabularies."""
    from eagle3_train.prepared import prepare_rows
    from eagle3_train.tokenizer import load_tokenizer
    from eagle3_train.vocab_file import coverage_table

    tokenizer, eos = load_tokenizer(config.target)
    rows = prepare_rows(config, tokenizer, eos, Path(config.output) / "data")
    print(rows.report)
    row: Any
    for number, row in enumerate(islice(rows.train, config.inspect)):
        greedy = "greedy" if row["greedy"] else "sampled or unknown"
        print(f"\n--- row {number}: {len(row['input_ids'])} tokens, {greedy} reply")
        print(marked_text(tokenizer, row["input_ids"], row["span_ids"]))
    print()
    print(coverage_table(rows, COVERAGE_SIZES))


def marked_text(tokenizer: Any, input_ids: list[int], span_ids: list[int]) -> str:
    """A row's text, each supervised span between ⟦ and ⟧."""
    parts, start = [], 0
    for end in range(1, len(input_ids) + 1):
        if end == len(input_ids) or span_ids[end] != span_ids[start]:
            text = tokenizer.decode(input_ids[start:end])
            parts.append(f"⟦{text}⟧" if span_ids[start] else text)
            start = end
    return "".join(parts)


if __name__ == "__main__":
    sys.exit(main())
