"""The Markdown pages as a reader sees them: fenced blocks, commands, links, anchors, inline code, tables.

Knows Markdown, nothing of what the commands do.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").rglob("*.md"), ROOT / "README.md", ROOT / "kernels/README.md"]
)
_FENCE = re.compile(r"^(```+)(\w*)$")
_CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is its first line's number on the page."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """One shell command each: lines that end in a backslash joined, comments and empty lines left out."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        return [line.strip() for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page; a fence that is not closed is an AssertionError."""
    found, begun = [], None
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        match = _FENCE.match(line)
        if match and begun is None:
            begun = number, match[1], match[2]
        elif begun is not None and line == begun[1]:
            found.append(Block(name_of(page), begun[0] + 1, begun[2], "\n".join(lines[begun[0] : number - 1])))
            begun = None
    assert begun is None, f"{name_of(page)}:{begun and begun[0]}: this block is not closed"
    return found


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    kept, fence = [], None
    for line in page.read_text(encoding="utf-8").splitlines():
        match = _FENCE.match(line)
        if fence is None and match:
            fence = match[1]
        elif fence is None:
            kept.append(line)
        elif line == fence:
            fence = None
    return "\n".join(kept)


def inline_code(page: Path) -> list[str]:
    """The text of every span of code outside of blocks, on one line."""
    return [" ".join(match[2].split()) for match in _CODE.finditer(prose(page))]


def links(page: Path) -> list[str]:
    """The targets of all links and images."""
    text = _CODE.sub("", prose(page))
    return re.findall(r"\]\(\s*([^)\s]+)[^)]*\)", text) + re.findall(r"<(https?://[^>]+)>", text)


def anchors(page: Path) -> set[str]:
    """What a link may name behind `#`, by the rule of the code hosts."""
    found: list[str] = []
    for title in re.findall(r"^#{1,6} +(.+?) *$", prose(page), re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)).lower().replace(" ", "-")
        same = sum(re.fullmatch(rf"{re.escape(plain)}(-\d+)?", other) is not None for other in found)
        found.append(f"{plain}-{same}" if same else plain)
    return set(found)


def table_rows(page: Path, *heads: str) -> Iterator[list[str]]:
    """The rows of every table whose first columns are called `heads`."""
    inside, lines = False, prose(page).splitlines()
    for line in lines:
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if inside and not set(line) <= set("|-: "):
            yield cells
        elif tuple(cells[: len(heads)]) == heads:
            inside = True
