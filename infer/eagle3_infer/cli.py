"""`eagle3-infer`: measure a draft head against plain decoding and HF generate. `eagle3-infer --help`.

Reports errors; torch is imported only once the arguments are known to be right.
"""

import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from eagle3.errors import Eagle3Error, one_line
from eagle3_infer.flags import build_parser, settings_of
from eagle3_infer.settings import EXIT_ERROR, EXIT_INTERRUPTED, TUNE, RunSettings
from eagle3_infer.tune_flags import parse_tune_settings


def parse_settings(argv: Sequence[str]) -> RunSettings:
    """Raises ConfigError for whatever can be known to be wrong without reading a model."""
    return settings_of(RunSettings, vars(build_parser().parse_args(argv)))


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a terminal that lacks a character shows a question mark, and does not end the run
            stream.reconfigure(errors="replace")
    try:
        return _tune(argv[1:]) if argv[:1] == [TUNE] else _measure(argv)
    except BrokenPipeError:
        # whoever read the output is gone (`| head`): nothing more to say, also not at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except (Eagle3Error, OSError) as error:
        print(one_line(error), file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _measure(argv: Sequence[str]) -> int:
    settings = parse_settings(argv)
    _quieten()
    with warnings_as_notes():
        if settings.server is not None:
            with ended_by_ctrl_c():
                from eagle3_infer.server_run import run_server
            return run_server(settings, argv)
        with ended_by_ctrl_c():
            from eagle3_infer.run import run
        return run(settings, argv)


def _tune(argv: Sequence[str]) -> int:
    settings = parse_tune_settings(argv)
    _quieten()
    with warnings_as_notes():
        with ended_by_ctrl_c():
            from eagle3_infer.tune import tune
        return tune(settings, argv)


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """For imports, of seconds: a library may swallow KeyboardInterrupt, and there is nothing yet to be kept.

    Changes nothing where Ctrl-C is ignored or handled already, or in a thread, which never hears it.
    """
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not heard or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: object) -> NoReturn:
    os.write(2, b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)


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
