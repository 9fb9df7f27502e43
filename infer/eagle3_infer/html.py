"""The report as one HTML file that needs nothing beside it: summary, charts, coloured replies with their draft trees.

Reads the report's dict and the replies of `replies.py`; computes no figure of its own.
"""

import json
import shlex
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from eagle3.files import replace_file
from eagle3_infer.figures import text
from eagle3_infer.html_charts import Modes, acceptance_figures, cost_figures, speed_figures, table
from eagle3_infer.names import key_name, mode_title
from eagle3_infer.replies import Told
from eagle3_infer.settings import HF_ASSISTED, HF_PROMPT_LOOKUP
from eagle3_infer.table import (
    GROUPS,
    group_rows,
    identity_lines,
    logprob_line,
    loop_lines,
    summary_notes,
    summary_rows,
)
from eagle3_infer.unseen import cut_middle

NOTHING = "Nothing was measured: the run ended before any mode had finished a reply."
PARTIAL = "This run was interrupted. The figures cover what was finished; speedups compare the replies that both ran."
# characters of the first prompt
SHOWN_PROMPT = 3000

LEGEND = (
    "Every token by how it came: from the prefill, as an accepted draft of some level, or as the target's own at the "
    "end of a round. Choose a round to see the tree that it verified."
)


def write_html(report: dict[str, Any], told: Told, path: Path) -> None:
    """Write under a temporary name beside `path`, then rename."""
    with replace_file(path) as file:
        file.write(render_html(report, told))


def render_html(report: dict[str, Any], told: Told) -> str:
    """The whole page.

    Args:
        report: as `build_report` gives it; modes, outputs and most of `run` may be missing.
        told: replies to look at; there may be none.
    """
    assets = resources.files("eagle3_infer") / "assets"
    skeleton, style, script = ((assets / f"report.{end}").read_text("utf-8") for end in ("html", "css", "js"))
    modes: Modes = report["modes"]
    return Template(skeleton).substitute(
        title=text(_title(report["run"])),
        policy=f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'",
        style=style,
        script=script,
        header=_header(report),
        summary=_summary(report),
        speed=_section("Tau and speed", speed_figures(modes)),
        acceptance=_section("Acceptance by level", acceptance_figures(modes)),
        cost=_section("Cost", cost_figures(modes)),
        replies=_replies(told),
        groups=_groups(report),
        identity=_identity(report),
        run=_run(report["run"]),
        data=_data(
            {
                "names": {key: mode_title(key, mode) for key, mode in modes.items()},
                "replies": told.replies,
                "words": told.words,
            }
        ),
    )  # fmt: skip


def _title(run: dict[str, Any]) -> str:
    return f"{Path(str(run.get('target', 'target'))).name}: EAGLE-3 report"


def _section(title: str, body: str) -> str:
    name = title.lower().replace(" ", "-")
    return f'<section id="{name}"><h2>{text(title)}</h2>{body}</section>' if body else ""


def _header(report: dict[str, Any]) -> str:
    run, modes = report["run"], report["modes"]
    facts = {
        "target": run.get("target"),
        "head": run.get("draft") or "none",
        "machine": ", ".join(str(run[key]) for key in ("dtype", "device") if run.get(key)),
        "threads": run.get("threads"),
        "replies": _asked(report),
        "sampling": _sampling(run.get("settings", {}).get("sampling", {})),
    }
    pairs = "".join(f"<div><dt>{k}</dt><dd>{text(v)}</dd></div>" for k, v in facts.items() if v is not None and v != "")
    banners = [NOTHING if not modes else PARTIAL if run.get("interrupted") else ""]
    banners += [f"{mode_title(k, m)} may emit what the target would not." for k, m in modes.items() if m["lossy"]]
    shown = "".join(f'<p class="banner">{text(banner)}</p>' for banner in banners if banner)
    lead = "".join(f'<p class="lead">{text(line)}</p>' for line in headline(modes) if line)
    title = text(_title(run)).replace("EAGLE-3", '<span class="word">EAGLE-3</span>')
    return f'<h1>{title}</h1>{lead}<dl class="facts">{pairs}</dl>{shown}'


def _asked(report: dict[str, Any]) -> str:
    places = {(row["id"], row["turn"]) for row in report["outputs"]}
    prompts = len({place[0] for place in places})
    if not prompts:
        return ""
    settings = report["run"].get("settings", {})
    parts = [f"{len(places)} to {prompts} prompt{'' if prompts == 1 else 's'}"]
    if most := settings.get("max_new_tokens"):
        parts.append(f"up to {most} tokens")
    if (batch := settings.get("batch", 1)) > 1:
        parts.append(f"{batch} at once")
    return ", ".join(parts)


def _sampling(sampling: dict[str, Any]) -> str:
    if not sampling:
        return ""
    heat = sampling.get("temperature", 0)
    return f"temperature {heat:g}, seed {sampling.get('seed')}" if heat else "greedy"


def headline(modes: Modes) -> list[str]:
    """What the run showed, in a sentence: the fastest of the modes that keep the target's output."""
    drafting = {key: mode for key, mode in modes.items() if mode["settings"] and not mode["lossy"]}
    rated = {key: mode for key, mode in drafting.items() if mode["tokens_per_second"] is not None}
    if not rated:
        return []
    # speeds of an interrupted run are of different replies, speedups of those that both gave
    rank = "tokens_per_second" if any(m["speedup_vs_plain"] is None for m in rated.values()) else "speedup_vs_plain"
    key, best = max(rated.items(), key=lambda pair: pair[1][rank])
    baselines = {"plain decoding": best["speedup_vs_plain"], "HF generate": best["speedup_vs_hf"]}
    ratios = [f"{ratio:.2f} times {name}'s" for name, ratio in baselines.items() if ratio is not None]
    rate = f"{best['tokens_per_second']:.1f} tokens per second" + (f", {' and '.join(ratios)}" if ratios else "")
    tau = f", and {best['tau']:.2f} tokens per round" if best["tau"] is not None else ""
    faster = [name for name, ratio in baselines.items() if ratio is not None and ratio < 1]
    ahead = [key_name(k) for k in (HF_PROMPT_LOOKUP, HF_ASSISTED) if k in modes and _faster(modes[k], best)]
    verdict = _verdict(faster, ahead)
    return [f"Fastest draft: {mode_title(key, best)} with {rate}{tau}.{verdict}"]


def _faster(mode: dict[str, Any], other: dict[str, Any]) -> bool:
    """By what both were measured against, if anything."""
    for figure in ("speedup_vs_plain", "speedup_vs_hf", "tokens_per_second"):
        if mode[figure] is not None and other[figure] is not None:
            return mode[figure] > other[figure]
    return False


def _verdict(baselines: Sequence[str], drafting: Sequence[str]) -> str:
    """What was faster than the best draft: decoding without drafts, and drafts without a head."""
    names = [*baselines, *drafting]
    if not names:
        return ""
    said = f"{' and '.join(names)} {'were' if len(names) > 1 else 'was'} faster."
    return f" Drafting did not pay here: {said}" if baselines else f" But {said}"


def _summary(report: dict[str, Any]) -> str:
    if not report["modes"]:
        return ""
    notes = [*summary_notes(report), loop_lines(report), logprob_line(report), *report["run"].get("notes", [])]
    said = "".join(f"<li>{text(note)}</li>" for note in notes if note)
    return _section("Summary", table(summary_rows(report), "summary") + f'<ul class="notes">{said}</ul>')


def _groups(report: dict[str, Any]) -> str:
    """By category, context and set, where there are several."""
    parts = []
    for group in GROUPS:
        if rows := group_rows(group, report):
            parts.append(f"<h3>{text(group.title)}</h3>{table(rows)}")
    return _section("Where tau varies", "".join(parts))


def _identity(report: dict[str, Any]) -> str:
    lines = identity_lines(report["verify"]).split("\n") if report["modes"] else []
    items = "".join(f"<li>{text(line.strip().removeprefix('outputs: '))}</li>" for line in lines)
    return _section("Are the outputs the same", f'<ul class="notes">{items}</ul>' if items else "")


def _run(run: dict[str, Any]) -> str:
    """Command, settings and machine, as far as they are told."""
    command = shlex.join(["eagle3-infer", *map(str, run.get("argv", []))])
    left_out = ("argv", "first_prompt", "notes", "settings", "interrupted")
    rows = [("what", "value")]
    rows += [(key, _plain(value)) for key, value in run.items() if key not in left_out]
    rows += [(f"settings: {key}", _plain(value)) for key, value in run.get("settings", {}).items()]
    prompt = run.get("first_prompt")
    shown = f"<h3>First prompt as rendered</h3><pre>{text(cut_middle(prompt, SHOWN_PROMPT))}</pre>" if prompt else ""
    body = f"<pre>{text(command)}</pre><details><summary>Settings and machine</summary>{table(rows, 'pairs')}</details>"
    return _section("Run", body + shown)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    return "-" if value is None else str(value)


def _replies(told: Told) -> str:
    """What the script fills in; notes alone where there is nothing to look at."""
    notes = "".join(f"<p>{text(note)}</p>" for note in told.notes)
    if not told.replies:
        return _section("Replies", notes)
    off = "<noscript><p>The replies are drawn by the script in this file, which is switched off.</p></noscript>"
    return _section("Replies", f'<p>{text(LEGEND)}</p>{notes}{off}<div id="viewer"></div>')


def _data(data: dict[str, Any]) -> str:
    """JSON that cannot end its script element, nor begin a comment in it."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
