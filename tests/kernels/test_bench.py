"""The benchmark and gpu-check without a GPU: inputs, rivals that compute the same, the table's arithmetic, steps."""

import csv
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_kernels.testing import device

pytest.importorskip("triton")
workloads = pytest.importorskip("eagle3_kernels.workloads")
training_workloads = pytest.importorskip("eagle3_kernels.training_workloads")
from eagle3_kernels.traffic import Cost, Model, Round  # noqa: E402
from eagle3_kernels.training_traffic import Packed  # noqa: E402

pytestmark = pytest.mark.skipif(device().type != "cpu", reason="what a GPU runs is timed there")
KERNELS = Path(__file__).parents[2] / "kernels"
SMALL = Model(layers=2, heads=4, kv_heads=2, head_dim=16, hidden=64, vocab=320, draft_vocab=96)
TREE = Round(2, 8, 40, 4, 4)


@pytest.fixture(scope="module")
def bench() -> dict[str, Any]:
    return runpy.run_path(str(KERNELS / "bench_kernels.py"))


@pytest.fixture(scope="module")
def check() -> dict[str, Any]:
    return runpy.run_path(str(KERNELS / "gpu_check.py"))


def place(dtype=torch.float32):
    torch.manual_seed(0)
    return workloads.Place(torch.device("cpu"), dtype, SMALL, TREE)


def training_place(dtype=torch.float32):
    torch.manual_seed(0)
    return training_workloads.TrainingPlace(torch.device("cpu"), dtype, SMALL, Packed(2, 10, 2))


@pytest.mark.parametrize("rival", ["SDPA", "FlexAttention"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_dense_rivals_compute_the_same_attention(rival):
    work = workloads.work_tree_attention(place())
    torch.testing.assert_close(work.own[rival](), work.run())


def test_torchs_own_argmax_and_topk_choose_the_same():
    greedy = workloads.work_sample(place(), "greedy")
    assert torch.equal(greedy.run(), greedy.own["argmax"]())
    level = workloads.work_expand_level(place())
    assert torch.equal(level.run().tokens, level.own["topk"]().indices.flatten(1))


def test_the_verified_walks_reach_the_last_level():
    for work in (workloads.work_verify_match, workloads.work_verify_target_only):
        assert work(place()).run().accepted.tolist() == [TREE.depth] * TREE.batch


def test_a_line_compares_with_the_best_rival_and_the_floor(bench, monkeypatch):
    """Triton 10 us, reference 40, argmax 20; the floor is the logits' bytes at 1 GB/s."""
    names = bench["bench"].__globals__
    times = iter([(10.0, 9.0, 11.0), (40.0, 40.0, 40.0), (20.0, 20.0, 20.0)])
    monkeypatch.setitem(names, "measure", lambda run: next(times))
    row = bench["bench"]("sample_greedy", place(torch.bfloat16), bench["Rates"](1e9, 1e12))
    rows = TREE.batch * TREE.rows
    assert row["floor_us"] == pytest.approx((rows * SMALL.vocab * 2 + rows * 8) / 1e3)
    assert row["of_floor"] == pytest.approx(row["floor_us"] / 10)
    assert row["speedup"] == 2.0
    assert row["own"] == "argmax 20"
    cells = bench["line"](row).split()
    assert cells[:6] == ["sample_greedy", "bfloat16", "2", "8", "10.0", "40.0"]
    assert len(bench["header"](False).split()) == len(cells) - 1


def test_a_line_of_a_training_op(bench, monkeypatch):
    """Documents and tokens in the place of batch and nodes; the floor is the flops at 1 Tflop/s."""
    names = bench["bench"].__globals__
    times = iter([(10.0, 9.0, 11.0), (40.0, 40.0, 40.0), (20.0, 20.0, 20.0)])
    monkeypatch.setitem(names, "measure", lambda run: next(times))
    row = bench["bench"]("ttt_forward", training_place(torch.bfloat16), bench["Rates"](1e15, 1e12))
    # 2 documents, rows 4..9 of each with their two own keys
    seen = 2 * (sum(range(5, 11)) + 6 * 2)
    assert row["floor_us"] == pytest.approx(4 * seen * SMALL.heads * SMALL.head_dim / 1e6)
    cells = bench["line"](row).split()
    assert cells[:6] == ["ttt_forward", "bfloat16", "2", "20", "10.0", "40.0"]
    assert bench["header"](True).split()[2:4] == ["documents", "tokens"]
    skipped = {"op": "ttt_forward", "dtype": "float16", "documents": 2, "tokens": 20, "skipped": "full"}
    assert bench["line"](skipped).split() == ["ttt_forward", "float16", "2", "20", "full"]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_training_rivals_compute_the_same():
    """FlexAttention's mask and the eager loss: a rival that computes something else is no rival."""
    work = training_workloads.work_ttt_forward(training_place())
    torch.testing.assert_close(work.own["FlexAttention"](), work.run())
    work = training_workloads.work_draft_loss(training_place())
    for ours, theirs in zip(work.run(), work.own["cross_entropy"](), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_floor_is_the_slower_of_moving_and_computing(bench):
    rates = bench["Rates"](copy=1e9, gemm=1e12)
    assert rates.floor(Cost(2e6, 1e9)) == 2000
    assert rates.floor(Cost(2e6, 1e10)) == 10000


def test_what_does_not_fit_is_said(bench, monkeypatch):
    def full(_run):
        raise torch.cuda.OutOfMemoryError("full")

    monkeypatch.setitem(bench["bench"].__globals__, "measure", full)
    row = bench["bench"]("capture_copy", place(), bench["Rates"](1e9, 1e12))
    assert bench["line"](row).endswith("out of memory")


def test_csv_holds_every_column_of_every_row(bench, tmp_path):
    path = tmp_path / "k.csv"
    bench["write_csv"](path, [{"op": "a", "triton_us": 1.5}, {"op": "b", "skipped": "out of memory"}])
    with path.open() as file:
        assert list(csv.DictReader(file)) == [
            {"op": "a", "triton_us": "1.5", "skipped": ""},
            {"op": "b", "triton_us": "", "skipped": "out of memory"},
        ]
    assert [p.name for p in tmp_path.iterdir()] == ["k.csv"]


def run_bench(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(KERNELS / "bench_kernels.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(KERNELS)})


def test_dry_run_lists_what_a_gpu_would_time():
    ended = run_bench("--dry", "--fast", "--op", "capture_copy", "expand_level", "--dtype", "bfloat16", "float32")
    assert ended.returncode == 0, ended.stderr
    *lines, last = [line.split()[:2] for line in ended.stdout.splitlines()]
    assert last == ["both", "implementations"]
    # three rounds; expand_level's keys are float32 whatever the model's dtype
    assert (
        lines
        == [["capture_copy", dtype] for dtype in ("bfloat16", "float32") for _ in range(3)]
        + [["expand_level", "bfloat16"]] * 3
    )


@pytest.mark.full
def test_dry_run_of_everything():
    ended = run_bench("--dry")
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.splitlines()) == 4 * len(workloads.WORKS) + 5 + 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_both_say_what_can_be_done(check, capsys):
    ended = run_bench()
    assert (ended.returncode, "--dry checks" in ended.stderr) == (1, True)
    assert check["main"]([]) == 1
    assert "DRY=1" in capsys.readouterr().err


def test_a_step_reports_its_last_line_its_failure_and_its_limit(check):
    step = check["Step"]
    python = sys.executable
    outcomes = [
        check["run"](step("good", [python, "-c", "print('one'); print('two')"], 60)),
        check["run"](step("bad", [python, "-c", "raise SystemExit('broken')"], 60)),
        check["run"](step("long", [python, "-c", "import time; print('begun', flush=True); time.sleep(60)"], 2)),
    ]
    assert [o.passed for o in outcomes] == [True, False, False]
    lines = check["table"](outcomes).splitlines()
    assert lines[-3].endswith("two")
    assert lines[-2].startswith("FAILED")
    assert lines[-2].endswith("broken")
    assert lines[-1].endswith("stopped after 2 s; last line: begun")


def test_steps_run_compiled_and_undirected(check, monkeypatch):
    """A leftover variable decides nothing: GPU steps never run the interpreter; tests are told where to run."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("EAGLE3_KERNELS", "torch")
    steps = {step.name: step for step in check["gpu_steps"](Path("x.csv"))}
    for step in [*steps.values(), *check["dry_steps"]()]:
        env = check["environment"](step)
        assert not {"TRITON_INTERPRET", "EAGLE3_KERNELS"} & set(env)
        assert all((KERNELS.parent / part).is_file() for part in step.command if part.endswith(".py"))
    kernels = steps["kernels and engine, fp32"]
    assert kernels.env == {"EAGLE3_TEST_DEVICE": "cuda"}
    assert "tests/kernels/test_triton_small.py" in kernels.command
    assert sum(step.seconds for step in steps.values()) < 8 * 60
