"""What became of the chats that were read: the counts that users see, and that run.json keeps."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class SourceReport:
    """What became of the chats of one source; `forms` counts them by form."""

    name: str
    forms: dict[str, int] = field(default_factory=dict)
    rows_kept: int = 0
    rows_dropped: int = 0

    def __str__(self) -> str:
        forms = ", ".join(f"{count:,} x {form}" for form, count in self.forms.items()) or "no chats"
        return f"{self.name}: {forms}; rows kept {self.rows_kept:,}, dropped {self.rows_dropped:,}"


@dataclass
class DataReport:
    """What became of the chats; `str()` is the table that users see. A chat without a reply counts as a dropped row."""

    chats_read: int = 0
    rows_rendered: int = 0
    rows_kept: int = 0
    rows_truncated: int = 0
    dropped_no_reply: int = 0
    dropped_after_truncation: int = 0
    dropped_duplicate: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    greedy_rows: int = 0
    train_rows: int = 0
    eval_rows: int = 0
    eval_rows_not_greedy: int = 0
    sources: list[SourceReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> DataReport:
        return cls(**{**fields, "sources": [SourceReport(**source) for source in fields["sources"]]})

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        counts = {name: count for name, count in asdict(self).items() if isinstance(count, int)}
        table = [f"{name.replace('_', ' '):<26}{count:>12,}" for name, count in counts.items()]
        return "\n".join([*map(str, self.sources), *table, *(f"note: {note}" for note in self.notes)])
