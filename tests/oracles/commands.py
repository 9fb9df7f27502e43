"""Runs a page's shell command in this process, on tiny settings, or has its real parsers read it and stops there.

The working directory is a workshop (test_docs.py): MODEL, HEAD, prompts.jsonl and chats.jsonl lie in it, all tiny.
"""

import argparse
import importlib
import itertools
import re
import runpy
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import eagle3.config
from eagle3_infer import cli
from eagle3_infer.tune_flags import parse_tune_settings
from oracles.pages import ROOT


def _flags(settings: dict[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


TINY_RUN = _flags(
    {
        "target": "MODEL",
        "draft": "HEAD",
        "prompts": "prompts.jsonl",
        "limit": 1,
        "max-new-tokens": 6,
        "threads": 1,
    }
)
TINY_SEARCH = _flags({"tree-depth": 2, "tree-top-k": 2, "tree-nodes": 4, "finalists": 1, "repeats": 1})
TINY_TRAINING = {
    "target": "MODEL",
    "output": "runs/tiny",
    "data.files": "[chats.jsonl]",
    "data.max_length": 96,
    "data.eval_rows": 2,
    "head.draft_vocab_size": 64,
    "ttt.steps": 2,
    "max_steps": 2,
    "autocast": "float32",
    "device": "cpu",
    "threads": 1,
}
TINY_REPLIES = {"target": "MODEL", "max_new_tokens": 6, "batch": 2, "threads": 1}
# script -> words that stand before those of the command
TINY = {
    **dict.fromkeys(
        ("train_draft.py", "prepare_data.py", "build_vocab_map.py", "dump_features.py"), _flags(TINY_TRAINING)
    ),
    "regenerate.py": _flags(TINY_REPLIES),
    # hours: all of its runs are planned, and their commands printed
    "run_ablations.py": ["--dry-run"],
}
HEADS = re.compile(r"runs/\S+/best|exported/\S+")


class Parsed(BaseException):
    """A script's parser took its arguments."""


def perform(command: str, parse_only: bool = False) -> None:
    """Run a command; AssertionError if no entry of PROGRAMS knows it, or it fails."""
    words = shlex.split(command, comments=True)
    while re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
        words = words[1:]
    for before, word in itertools.pairwise(words):
        # a head that an earlier command of the page made
        if HEADS.fullmatch(word) and before in ("--draft", "--init_head") and not Path(word).exists():
            shutil.copytree("HEAD", word)
    program, rest = Path(words[0]).name, words[1:]
    assert program in PROGRAMS, f"no entry says what to do with {program!r}: {command}"
    try:
        PROGRAMS[program](rest, parse_only)
    except SystemExit as end:
        if end.code or "--help" not in words:
            raise AssertionError(f"a parser refuses {command}") from end


def _infer(argv: list[str], parse_only: bool) -> None:
    tunes = argv[:1] == ["tune"]
    if parse_only:
        parse_tune_settings(argv[1:]) if tunes else cli.parse_settings(argv)
    else:
        tiny = ["tune", *TINY_RUN, *argv[1:], *TINY_SEARCH] if tunes else [*TINY_RUN, *argv]
        assert cli.main(tiny) == 0


def _python(words: list[str], parse_only: bool) -> None:
    script, *argv = words
    behind = argv.index("--config") + 2 if "--config" in argv else 0
    argv = [*argv[:behind], *TINY.get(Path(script).name, []), *argv[behind:]]
    terminate = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        if parse_only:
            _stop_behind_the_parser(patch)
        try:
            if argv[:1] == ["pytest"]:
                assert parse_only and all((ROOT / path).is_file() for path in argv[1:])
            elif script == "-m":
                assert importlib.import_module(argv[0]).main(argv[1:]) == 0
            else:
                assert (ROOT / script).is_file(), f"{script} is no script here"
                assert runpy.run_path(str(ROOT / script))["main"](argv) == 0
        except Parsed:
            assert parse_only
        finally:
            signal.signal(signal.SIGTERM, terminate)


def _stop_behind_the_parser(patch: pytest.MonkeyPatch) -> None:
    """Whatever a script would do with its arguments is left out, once they were read."""

    def stopping(read: Callable) -> Callable:
        def reading(*args: Any, **options: Any) -> None:
            read(*args, **options)
            raise Parsed

        return reading

    patch.setattr(eagle3.config, "load_config", stopping(eagle3.config.load_config))
    patch.setattr(argparse.ArgumentParser, "parse_args", stopping(argparse.ArgumentParser.parse_args))


def _accelerate(words: list[str], parse_only: bool) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    assert words[0] == "launch"
    given = launch_command_parser().parse_args(words[1:])
    if given.config_file:
        load_config_from_file(given.config_file)
    _python([given.training_script, *given.training_script_args], parse_only)


def _torchrun(words: list[str], parse_only: bool) -> None:
    from torch.distributed.run import get_args_parser

    given = get_args_parser().parse_args(words)
    _python([given.training_script, *given.training_script_args], parse_only)


def _srun(words: list[str], parse_only: bool) -> None:
    assert words[-2] == "-c"
    perform(words[-1], parse_only)


def _make(words: list[str], parse_only: bool) -> None:
    assert parse_only, "make is not run"
    done = subprocess.run(["make", "-n", "-C", str(ROOT), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _pip(words: list[str], parse_only: bool) -> None:
    from pip._internal.commands import create_command

    assert parse_only, "nothing is installed"
    options, asked = create_command(words[0]).parse_args(words[1:])
    if words[0] == "uninstall":
        return
    assert all(Path(file).is_file() for file in options.constraints), words
    extras = re.findall(r"\[(.+?)\]", " ".join([*asked, *options.editables]))
    known = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name in (name.strip() for extra in extras for name in extra.split(",")):
        assert re.search(rf"^{name} = \[", known, re.MULTILINE), f"there is no extra {name!r}"


PROGRAMS: dict[str, Callable[[list[str], bool], None]] = {
    "eagle3-infer": _infer,
    "python": _python,
    "accelerate": _accelerate,
    "torchrun": _torchrun,
    "srun": _srun,
    "make": _make,
    "pip": _pip,
}
