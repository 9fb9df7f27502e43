"""Faults of a run on one or two ranks: a clear message, an end in bounded time, nothing lost that was saved."""

import os
import re
import runpy
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3.errors import ConfigError
from eagle3_train.folder import RunFolder
from eagle3_train.signals import lost_touch
from oracles.ranks import KINDS, free_port, start_ranks
from oracles.runs import arguments, losses, metrics, train
from oracles.script import ENV, SCRIPT, launch_command

pytestmark = pytest.mark.filterwarnings("ignore:only .* distinct tokens")
SETTINGS = {"max_steps": 12, "eval.every": 12, "save_every": 4, "rows_per_step": 2}
GO_ON = "the same command goes on from the last checkpoint"
# steps that take long enough for a signal to come between the first and the last
SLOW = """
import time
from eagle3_train.ttt import TTTRollout
forward = TTTRollout.forward
TTTRollout.forward = lambda *inputs: (time.sleep(0.3), forward(*inputs))[1]
"""
# on rank 1, at step 6: what is to happen
AT_STEP_6 = """
import os, signal
from eagle3_train.parallel import Parallel as P
from eagle3_train.zero import Zero as Z
for kind in (P, Z):
    def backward(self, loss, before=kind.backward, count=[0]):
        count[0] += 1
        {}
        before(self, loss)
    kind.backward = backward
"""
DIES = AT_STEP_6.format("if count[0] == 6 and os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)")
NAN = AT_STEP_6.format("loss = loss * float('nan') if count[0] == 6 and os.environ['RANK'] == '1' else loss")


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory):
    """The run that nothing happened to, on one rank."""
    return train(made, tmp_path_factory.mktemp("whole") / "run", **SETTINGS)


def checkpoint(run) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def same(run, wanted, exactly):
    file = "checkpoints/step-00000012/model.safetensors"
    found, expected = load_file(run / file), load_file(wanted / file)
    for name, x in expected.items():
        error = (found[name].double() - x.double()).norm() / x.double().norm()
        assert error <= (0 if exactly else 2e-6), name


@pytest.mark.parametrize("world", [1, 2])
def test_sigterm(made, whole, tmp_path, world):
    """Work since the last checkpoint thrown away; a rank that stops a step before the others, and hangs them.

    Only the last rank is signalled: all stop after the same step.
    """
    run = tmp_path / "run"
    words = arguments(made, run, **{**SETTINGS, "save_every": 100})
    ranks = start_ranks(words, world=world, patch=SLOW)
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(metrics(run)) > 1, ranks.output)
    os.kill(ranks.processes[-1].pid, signal.SIGTERM)
    assert ranks.wait(120) == [128 + signal.SIGTERM] * world, ranks.output()
    step = int(checkpoint(run).name.removeprefix("step-"))
    assert 2 <= step < 12
    for rank in range(world):
        assert f"terminated after step {step}, which is saved; {GO_ON}" in ranks.output(rank)
    train(made, run, **SETTINGS)
    same(run, whole, exactly=world == 1)
    if world == 1:
        assert losses(run) == losses(whole)


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_to_the_launcher(made, tmp_path, processes):
    """accelerate ends at once and leaves what it started running for ever."""
    run, log = tmp_path / "run", tmp_path / "log"
    words = ["--num_processes", processes, "--main_process_port", free_port(), SCRIPT]
    words += arguments(made, run, **{**SETTINGS, "max_steps": 100_000, "save_every": 100_000})
    with log.open("w") as output:
        launcher = subprocess.Popen(launch_command(*words), env=ENV, stdout=output, stderr=output)
    try:
        wait_for(lambda: (run / "metrics.jsonl").exists() and metrics(run), log.read_text)
        launcher.terminate()
        launcher.wait(60)
        wait_for(lambda: log.read_text().count("which is saved") == processes, log.read_text)
    finally:
        launcher.kill()
    assert checkpoint(run).is_dir()


def wait_for(condition, output, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, output()
        time.sleep(0.05)


def test_sigterm_before_the_first_step(made, tmp_path):
    """A handler that waits for a step which never comes."""
    run = tmp_path / "run"
    patch = "import os, signal, eagle3_train.run as r; r.load_parts = lambda *a: os.kill(os.getpid(), signal.SIGTERM)"
    ranks = start_ranks(arguments(made, run, **SETTINGS), world=1, patch=patch)
    assert ranks.wait(120) == [128 + signal.SIGTERM], ranks.output()
    assert f"terminated; {GO_ON}" in ranks.output()


def test_a_dying_rank(made, whole, tmp_path):
    """The other rank waits for ever, or ends with a traceback of gloo's; the checkpoint before is lost."""
    run = tmp_path / "run"
    words = arguments(made, run, **SETTINGS)
    ranks = start_ranks(words, patch=DIES)
    began = time.monotonic()
    assert ranks.wait(300) == [1, -signal.SIGKILL], ranks.output()
    assert time.monotonic() - began < 300
    assert "error: another process of this run ended or hangs" in ranks.output()
    assert GO_ON in ranks.output()
    assert "Traceback" not in ranks.output()
    assert checkpoint(run).name == "step-00000004"
    train(made, run, **SETTINGS)
    same(run, whole, exactly=False)


@pytest.mark.parametrize("kind", ["ddp", *(pytest.param(k, marks=pytest.mark.full) for k in KINDS if k != "ddp")])
def test_a_nan_batch_on_one_rank(made, tmp_path, kind):
    """One rank that stops and one that waits for it; NaN weights that are saved."""
    if kind.startswith("zero"):
        pytest.importorskip("deepspeed", reason="pip install -e '.[scale]'")
    run = tmp_path / "run"
    ranks = start_ranks(arguments(made, run, **SETTINGS), kind, patch=NAN)
    assert ranks.wait(300) == [2, 2], ranks.output()
    for rank in range(2):
        message = r"error: step 6: the gradients are not finite \(the loss is not finite on rank 1\)"
        assert re.search(message, ranks.output(rank)), ranks.output(rank)
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-00000004"]
    assert all(x.isfinite().all() for x in load_file(checkpoint(run) / "model.safetensors").values())


def test_two_trainers_on_one_folder(made, tmp_path, capsys):
    """Two runs' checkpoints and records in one another."""
    run = tmp_path / "run"
    held = RunFolder(run)
    held.open()
    main = runpy.run_path(str(SCRIPT))["main"]
    assert main(arguments(made, run, **SETTINGS)) == 2
    assert f"is in use by process {os.getpid()} on" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="in use"):
        RunFolder(run).open()
    held.close()
    RunFolder(run).open()


def test_the_lock_of_a_dead_trainer(made, tmp_path):
    """A run that cannot be resumed after a kill until somebody removes a file."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.lock").write_text("process 1 on this-host\n")
    train(made, tmp_path / "run", **{**SETTINGS, "max_steps": 1})


def test_a_wrong_setting_leaves_no_folder(made, tmp_path, capsys):
    main = runpy.run_path(str(SCRIPT))["main"]
    run = tmp_path / "some/where/run"
    assert main(arguments(made, run, data__files="[none.jsonl]")) == 2
    assert "none.jsonl" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_stays(tmp_path):
    folder = RunFolder(tmp_path / "run")
    (tmp_path / "run").mkdir()
    folder.open()
    folder.close()
    assert (tmp_path / "run").is_dir()


def test_what_a_lost_process_looks_like():
    assert lost_touch(RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert lost_touch(torch.distributed.DistBackendError("NCCL watchdog"))
    assert not lost_touch(RuntimeError("shape '[2]' is invalid"))
