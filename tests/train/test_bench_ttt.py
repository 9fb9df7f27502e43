"""The benchmark of a training step runs on a small case, and measures what it says."""

import csv
import runpy
import subprocess
import sys
from typing import Any

import pytest
import torch

from oracles.script import ENV, ROOT

SCRIPT = str(ROOT / "train/bench_ttt.py")


@pytest.fixture(scope="module")
def bench() -> dict[str, Any]:
    return runpy.run_path(SCRIPT)


def test_runs_without_a_peer(tmp_path):
    """A script that only its author can run; a peer that is absent without a word; columns that are missing."""
    command = [sys.executable, SCRIPT, "--tiny", "--lengths", "16", "--ours", "24", "--repeat", "1"]
    command += ["--peer", str(tmp_path / "absent"), "--csv", str(tmp_path / "ttt.csv")]
    result = subprocess.run(command, env=ENV, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("no peer: ")
    with open(tmp_path / "ttt.csv") as file:
        records = list(csv.DictReader(file))
    assert [(int(r["length"]), float(r["supervised"]), r["frozen"] == "True") for r in records] == [
        (16, 1.0, True),
        (16, 0.6, True),
        (16, 1.0, False),
        (16, 0.6, False),
        (24, 1.0, True),
    ]
    for record in records:
        assert float(record["ours_seconds"]) > float(record["ours_teacher"]) > 0
        assert float(record["floor_seconds"]) > 0
        assert int(record["ours_bytes"]) > 0
        assert float(record["ours_loss"]) > 0
        assert "peer_seconds" not in record


def test_peak_counts_what_is_alive_at_once(bench):
    """Freed tensors counted still, temporaries missed, what was there before counted."""
    before = torch.randn(1000)
    model = torch.nn.Linear(1, 1)

    def step(teacher):
        first = before + 1
        second = first * 2
        del first
        return second.sum() + teacher.sum()

    side = bench["Side"](model, lambda: torch.ones(500), step)
    assert 4 * 2500 <= bench["peak_bytes"](side) < 4 * 2600
    assert 4 * 2000 <= bench["peak_bytes"](side._replace(teaches=True)) < 4 * 2100


@pytest.mark.parametrize("frozen", [True, False])
def test_trains_what_it_says(bench, frozen):
    """A frozen lm_head that gets a gradient, or a trained one without: the sides would not do the same work."""
    side = bench["ours"](bench["Case"](16, 1.0, frozen, tiny=True))
    bench["_once"](side)
    without = [name for name, parameter in side.model.named_parameters() if parameter.grad is None]
    assert without == (["lm_head.weight"] if frozen else [])


def test_supervised_share(bench):
    """Rows beyond the reply that are supervised, or a share that is not the one asked for."""
    spans = bench["inputs"](bench["Case"](100, 0.6))["span_ids"]
    assert spans.sum() == 60
    assert bench["inputs"](bench["Case"](100, 1.0))["span_ids"].sum() == 99
