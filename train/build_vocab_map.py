"""Choose the draft vocabulary: which of the target's tokens a head can propose.

    python train/build_vocab_map.py --config recipes/base/smollm2-135m.yaml
    python train/build_vocab_map.py --config recipes/base/smollm2-135m.yaml --map map.safetensors

The settings are the trainer's own, and so are the rows whose tokens are counted: replies alone, of the training side.
Coverage is printed for several sizes, of the training rows and of the held-out ones. With `--map` the map of
`head.draft_vocab_size` tokens is written, for the trainer's `data.vocab_map`. The rows are left in `<output>/data`,
where the trainer finds them. Only the target's tokenizer and config are loaded.
"""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from eagle3.config import load_config
from eagle3.errors import ConfigError, Eagle3Error, one_line
from eagle3_train.config import COVERAGE_SIZES, TrainConfig


@dataclass(frozen=True)
class MapConfig(TrainConfig):
    """The trainer's settings, and what to choose.

    Args:
        map: file to write the map to; None = print the coverage alone.
        sizes: of the draft vocabularies whose coverage is printed.
    """

    map: str | None = None
    sizes: tuple[int, ...] = COVERAGE_SIZES

    def __post_init__(self):
        super().__post_init__()
        if not self.sizes or min(self.sizes) < 1:
            raise ConfigError(f"sizes is {list(self.sizes)}; give sizes of 1 or more")
        if self.map is not None and self.head.draft_vocab_size is None:
            raise ConfigError("head.draft_vocab_size is null, the whole vocabulary, which needs no map")
        if self.map is not None:
            object.__setattr__(self, "map", os.path.expanduser(self.map))


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, 2 on bad input or a full disk (one line on stderr), 130 when interrupted."""
    try:
        build(load_config(MapConfig, argv, description=__doc__))
    except (Eagle3Error, OSError) as error:
        print(one_line(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was kept of rows that were not whole", file=sys.stderr)
        return 130
    return 0


def build(config: MapConfig) -> None:
    """Print the coverage, and write the map if one is asked for."""
    from eagle3.vocab import build_vocab_map
    from eagle3_train.prepared import prepare_rows
    from eagle3_train.tokenizer import load_tokenizer
    from eagle3_train.vocab_file import coverage_table, save_vocab_map

    tokenizer, eos = load_tokenizer(config.target)
    # the map that is to be built is not needed to count
    data = replace(config.data, vocab_map=None, streaming=False)
    rows = prepare_rows(replace(config, data=data), tokenizer, eos, Path(config.output) / "data")
    print(coverage_table(rows, config.sizes))
    if config.map is None or config.head.draft_vocab_size is None:
        return
    chosen = build_vocab_map(rows.counts, config.head.draft_vocab_size, rows.end_ids, len(rows.counts))
    facts = {
        "counted": f"{int(rows.counts.sum())} supervised tokens of {', '.join(config.data.files)}",
        "coverage_train": f"{chosen.coverage(rows.counts):.6f}",
        "coverage_held_out": f"{chosen.coverage(rows.held_out_counts):.6f}",
    }
    save_vocab_map(Path(config.map), chosen, tokenizer, facts)
    print(f"wrote {config.map}: {config.head.draft_vocab_size:,} tokens; use it with --data.vocab_map {config.map}")


if __name__ == "__main__":
    sys.exit(main())
