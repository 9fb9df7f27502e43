"""What stands on the terminal around a run: a busy machine, settings that are not the defaults, the first prompt."""

import pytest

from eagle3_infer import terminal
from eagle3_infer.cli import parse_settings
from eagle3_infer.prompts import Prompt
from eagle3_infer.terminal import SHOWN_CHARACTERS, machine_line, print_first_prompt, print_header, prompts_line
from eagle3_infer.unseen import cut_middle


@pytest.mark.parametrize(
    "load, told",
    [
        (None, ""),
        (0.04, ", load 0.0"),
        (4.0, ", load 4.0"),
        (4.1, ", load 4.1 (of the last minute; while other work runs, speeds are off)"),
    ],
)
def test_a_machine_with_other_work_is_said_to_be_busy(monkeypatch, load, told):
    """Above half a job per core; not where the system does not tell."""
    monkeypatch.setattr(terminal, "cpu_model", lambda: "Fast CPU")
    monkeypatch.setattr(terminal, "usable_cores", lambda: 8)
    monkeypatch.setattr(terminal, "load_average", lambda: load)
    assert machine_line() == f"machine  Fast CPU, 8 cores{told}"


@pytest.mark.parametrize(
    "flags, told",
    [
        ([], ", up to 128 new tokens, greedy"),
        (["--seed", "5"], ", up to 128 new tokens, greedy: seed 5"),
        (["--batch", "4", "--max-new-tokens", "9"], ", 4 at once, up to 9 new tokens, greedy"),
        (["--min-tokens", "3", "--bad-word", "no"], "greedy: min_tokens 3, bad_words ['no']"),
        (["--temperature", "1"], "sampled: temperature 1.0, seed 0"),
        (["--temperature", "0.5", "--top-k", "9", "--seed", "5"], "sampled: temperature 0.5, top_k 9, seed 5"),
    ],
)
def test_settings_that_are_not_the_defaults_are_shown(flags, told):
    """Each once; a default one is the seed alone, where something is drawn."""
    prompts = [Prompt("1", "c", ("a", "b")), Prompt("2", "c", ("a",))]
    line = prompts_line(parse_settings(flags), prompts)
    assert line.startswith("prompts  prompts.jsonl: 2 prompts, 3 turns, ")
    assert line.endswith(told)


@pytest.mark.parametrize("templated", [True, False])
def test_the_first_prompt_is_shown_as_it_is(capsys, templated):
    """A line each, what acts on a terminal by its name, no blanks at ends; a missing template is said."""
    print_first_prompt("<|user|>a\x1b[2J\n\nb  ", templated)
    head, *body = capsys.readouterr().out.splitlines()
    assert body == ["  | <|user|>a[U+001B][2J", "  |", "  | b"]
    assert ("has no chat template" in head) == (not templated)


def test_a_long_first_prompt_is_cut(capsys):
    print_first_prompt("a" * SHOWN_CHARACTERS + "bc", templated=True)
    half = SHOWN_CHARACTERS // 2
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"  | {'a' * half}",
        "  | [... 2 characters ...]",
        f"  | {'a' * (half - 2)}bc",
    ]


def test_the_header_ends_with_its_notes(capsys):
    print_header(["target   a\x1bb", "head     c"], ["slow", "old"])
    assert capsys.readouterr().out == "target   a[U+001B]b\nhead     c\nnote: slow\nnote: old\n"


@pytest.mark.parametrize(
    "most, shown",
    [
        (8, "abcdefgh"),
        (7, "abc\n[... 2 characters ...]\nfgh"),
        (6, "abc\n[... 2 characters ...]\nfgh"),
        (5, "ab\n[... 4 characters ...]\ngh"),
    ],
)
def test_a_text_is_cut_in_its_middle(most, shown):
    """Catches: a letter too many that is left out or shown twice, and a count that is not of what lies between."""
    assert cut_middle("abcdefgh", most) == shown
