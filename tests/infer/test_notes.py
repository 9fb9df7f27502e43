"""What is said before a measurement: every note true, and of what that measurement does."""

import pytest

from eagle3_infer.cli import parse_settings
from eagle3_infer.notes import run_notes, server_notes, tuning_notes
from eagle3_infer.tune_flags import parse_tune_settings

SERVER = ("--server", "http://h:1")


@pytest.mark.parametrize(
    "rules, idle",
    [
        ("match,threshold", []),
        ("threshold,rejection", ["rejection"]),
        ("rejection,match,target_only,threshold", ["rejection", "target_only"]),
    ],
)
def test_only_rules_that_greedy_requests_do_not_know_are_named(rules, idle):
    """The threshold takes other drafts of a greedy request, too."""
    greedy = run_notes(parse_settings(["--rule", rules]))
    assert [note for note in greedy if "--rule" in note] == [
        f"--rule {rule} changes nothing at temperature 0" for rule in idle
    ]
    sampled = run_notes(parse_settings(["--rule", rules, "--temperature", "1"]))
    assert not any("--rule" in note for note in sampled)


@pytest.mark.parametrize("noise, reason", [("none,shared", "at temperature 0"), ("none", ": it belongs to")])
def test_sharpness_of_noise_that_there_is_not(noise, reason):
    """Said once, with the reason that holds."""
    flags = ["--draft-noise", noise, "--draft-sharpness", "1.2"]
    (note,) = [note for note in run_notes(parse_settings(flags)) if note.startswith("--draft-sharpness")]
    assert f"changes nothing{reason if reason[0] == ':' else f' {reason}'}" in note
    sampled = run_notes(parse_settings([*flags, "--temperature", "1"]))
    assert any("--draft-sharpness" in note for note in sampled) == (noise == "none")


def test_of_a_server_nothing_is_said_of_modes_that_are_not_run():
    flags = ["--batch", "8", "--hf", "prompt_lookup", "--mode", "auto", "--rule", "rejection", "--temperature", "1"]
    assert any("one prompt at a time" in note for note in run_notes(parse_settings(flags)))
    assert any("the same seed" in note for note in run_notes(parse_settings(flags)))
    notes = server_notes(parse_settings([*SERVER, *flags]))
    assert [note.split(":")[0] for note in notes] == [
        f"{name} changes nothing" for name in ("--mode", "--rule", "--hf")
    ]


@pytest.mark.parametrize(
    "flags, named",
    [
        ([], []),
        # there are no rounds to look at, with a page or without
        (["--html-replies", "2"], ["--html-replies"]),
        (["--seed", "3"], ["--seed"]),
        (["--seed", "3", "--temperature", "1"], []),
        (["--min-tokens", "200"], ["--min-tokens"]),
        # what is sent is the server's to honour
        (["--top-k", "5", "--server-model", "m", "--limit", "1"], []),
    ],
)
def test_what_a_server_is_not_told(flags, named, tmp_path):
    page = ["--html", str(tmp_path / "page.html")]
    for given in (flags, [*flags, *page]):
        assert [note.split()[0] for note in server_notes(parse_settings([*SERVER, *given]))] == named


def test_of_a_search():
    settings = parse_tune_settings(["--draft-noise", "shared", "--min-p", "0.1", "--min-tokens", "500"])
    assert [note.split()[0] for note in tuning_notes(settings)] == ["--min-p", "--draft-noise", "--min-tokens"]
