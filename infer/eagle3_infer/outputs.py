"""A report in every form that was asked for, whole whatever is pressed meanwhile, and then on the terminal."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3.files import write_json
from eagle3_infer.html import write_html
from eagle3_infer.plots import write_charts
from eagle3_infer.replies import Told
from eagle3_infer.settings import RunSettings
from eagle3_infer.unseen import name_unseen


def deliver(
    settings: RunSettings, report: dict[str, Any], text: str, tell: Callable[[bool], Told] = lambda interrupted: Told()
) -> bool:
    """Write the files, then print `text` and where they are: whoever reads the output may be gone (`| head`).

    Ctrl-C begins the files again, and is not heard a second time.

    Args:
        text: the report as a terminal shows it; printed also where a file cannot be written.
        tell: the replies of the page; told whether Ctrl-C came, after which it must not take long.
    Returns:
        Whether Ctrl-C came.
    """
    interrupted, lines = False, []
    try:
        try:
            lines = _write(settings, report, tell, interrupted)
        except KeyboardInterrupt:
            interrupted = True
            with ignoring_ctrl_c():
                lines = _write(settings, report, tell, interrupted)
    finally:
        print(name_unseen("\n".join(["", text, *lines])), flush=True)
    return interrupted


def _write(settings: RunSettings, report: dict[str, Any], tell: Callable[[bool], Told], interrupted: bool) -> list[str]:
    """A line for each form."""
    lines = []
    if settings.json is not None:
        write_json(Path(settings.json), report, allow_nan=False)
        lines.append(f"report: {settings.json}")
    if settings.plot is not None:
        charts = write_charts(report, Path(settings.plot))
        lines.append(f"charts: {', '.join(map(str, charts)) or 'nothing to draw'}")
    if settings.html is not None:
        write_html(report, tell(interrupted), Path(settings.html))
        lines.append(f"page: {settings.html}")
    return lines


@contextmanager
def ignoring_ctrl_c(ignored: bool = True) -> Iterator[None]:
    """So that pressing it twice does not lose what the first time kept; only the main thread hears it at all."""
    if not ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
