"""One process == two ranks, under DDP, FSDP2 and ZeRO as a real DeepSpeed engine; and a run that goes on elsewhere.

What could differ: a mean over ranks or micro-batches, N_k of one rank, steps whose rows do not divide (5 rows of 17,
one by one, on two ranks: one of them takes a stand-in), clipping by a rank's own norm, a learning rate that comes late,
Adam's step counter, weights or states of a shard taken for whole ones, a target that was divided too.
"""

import json
import shutil
import subprocess
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from eagle3.errors import ConfigError, Eagle3Error
from eagle3_train import zero
from eagle3_train.accelerator import open_accelerator
from eagle3_train.config import OptimConfig
from eagle3_train.launch import several
from eagle3_train.optim import make_optimizer
from eagle3_train.parallel import parallelize
from oracles.ranks import free_port, train_ranks
from oracles.runs import arguments, metrics, train
from oracles.script import ENV, ROOT, SCRIPT, launch, launch_command

pytestmark = pytest.mark.filterwarnings("ignore:only .* distinct tokens")
CONFIGS = ROOT / "recipes/accelerate"
SETTINGS = {
    "data.eval_rows": 3,
    "data.max_length": 60,
    "tokens_per_batch": 60,
    "rows_per_step": 5,
    "max_steps": 8,
    "eval.every": 8,
    "save_every": 4,
}
FULL = pytest.mark.full


@pytest.fixture(scope="module")
def trained(made, tmp_path_factory):
    """Called with (kind, ema): the folder of a run of 8 steps that was made so; kinds are those of `_train`."""
    runs, folder = {}, tmp_path_factory.mktemp("runs")

    def run(kind, ema=0.0):
        if (kind, ema) not in runs:
            runs[kind, ema] = _train(made, folder / f"{kind}-{ema}", kind, ema)
        return runs[kind, ema]

    return run


def _train(made, run, kind, ema):
    """one: in this process; launched and zero2.yaml: by `accelerate launch`; others: of oracles.ranks."""
    settings = {**SETTINGS, "optim.ema": ema}
    if kind.startswith("zero"):
        pytest.importorskip("deepspeed", reason="pip install -e '.[scale]'")
    if kind == "one":
        return train(made, run, **settings)
    words = arguments(made, run, **settings)
    if kind == "launched":
        done = launch("--num_processes", 2, "--main_process_port", free_port(), SCRIPT, *words)
    elif kind.endswith(".yaml"):
        done = launch("--config_file", CONFIGS / kind, "--main_process_port", free_port(), SCRIPT, *words)
    else:
        train_ranks(words, kind)
        return run
    assert done.returncode == 0, done.stderr
    return run


def close(run, wanted, since=0):
    """Losses and norms within 1e-6, weights, their averages and Adam's moments of the checkpoints within 2e-6, relative
    to the tensor's norm: fp32 sums in other orders."""
    found, expected = ([r for r in metrics(x) if r["step"] > since] for x in (run, wanted))
    assert [r["tokens"] for r in found] == [r["tokens"] for r in expected]
    for name in ("loss", "grad_norm", "alpha", "coverage"):
        torch.testing.assert_close([r[name] for r in found], [r[name] for r in expected], rtol=1e-6, atol=0)
    (evaluated,), (evaluation,) = metrics(run, "eval"), metrics(wanted, "eval")
    assert evaluated["loss"] == pytest.approx(evaluation["loss"], rel=1e-6)
    assert (evaluated["tau"], evaluated["tokens"]) == (evaluation["tau"], evaluation["tokens"])
    files = [p.relative_to(wanted) for p in (wanted / "checkpoints/step-00000008").glob("*.safetensors")]
    assert len(files) >= 2
    for file in files:
        same(load_file(run / file), load_file(wanted / file))


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        error = (found[name].double() - x.double()).norm() / x.double().norm()
        assert error <= 2e-6, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    "kind, ema, framework",
    [
        ("launched", 0.0, "MULTI_CPU"),
        ("zero2.yaml", 0.9, "DEEPSPEED"),
        pytest.param("ddp", 0.9, "MULTI_CPU", marks=FULL),
        pytest.param("fsdp2", 0.0, "FSDP", marks=FULL),
        pytest.param("fsdp2", 0.9, "FSDP", marks=FULL),
        pytest.param("zero1", 0.9, "DEEPSPEED", marks=FULL),
        pytest.param("zero3", 0.0, "DEEPSPEED", marks=FULL),
        pytest.param("zero3", 0.9, "DEEPSPEED", marks=FULL),
    ],
)
def test_two_ranks_equal_one_process(trained, kind, ema, framework):
    run = trained(kind, ema)
    close(run, trained("one", ema))
    record = json.loads((run / "run.json").read_text())
    assert (record["framework"], record["processes"]) == (framework, 2)


@pytest.mark.parametrize(
    "kind, ema, there",
    [
        ("launched", 0.0, "one"),
        ("zero2.yaml", 0.9, "one"),
        pytest.param("one", 0.0, "zero3", marks=FULL),
        pytest.param("one", 0.9, "zero2", marks=FULL),
        pytest.param("zero3", 0.9, "fsdp2", marks=FULL),
        pytest.param("fsdp2", 0.0, "ddp", marks=FULL),
        pytest.param("zero1", 0.9, "zero3", marks=FULL),
    ],
)
def test_a_run_goes_on_elsewhere(made, trained, tmp_path, kind, ema, there):
    """Four steps here, four there == eight in one process."""
    run = tmp_path / "run"
    shutil.copytree(trained(kind, ema) / "checkpoints/step-00000004", run / "checkpoints/step-00000004")
    close(_train(made, run, there, ema), trained("one", ema), since=4)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_a_run_goes_on_bit_equal(made, trained, tmp_path, kind):
    """State of one rank restored on all; rows that a resumed rank sees twice; a shard's padding that matters."""
    whole, run = trained(kind, 0.9), tmp_path / "run"
    shutil.copytree(whole / "checkpoints/step-00000004", run / "checkpoints/step-00000004")
    _train(made, run, kind, 0.9)
    for file in (whole / "checkpoints/step-00000008").glob("*.safetensors"):
        wanted, found = load_file(file), load_file(run / "checkpoints/step-00000008" / file.name)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], x) for name, x in wanted.items()), file.name
    losses = [[r["loss"] for r in metrics(x) if r["step"] > 4] for x in (run, whole)]
    assert losses[0] == losses[1]


@pytest.mark.full
@pytest.mark.parametrize("name, framework", [("cpu2", "MULTI_CPU"), ("ddp", "MULTI_CPU"), ("fsdp2", "FSDP")])
def test_launch_files(trained, name, framework):
    """A file that accelerate misreads here, and with it what is told to start it."""
    run = trained(f"{name}.yaml")
    close(run, trained("one"))
    record = json.loads((run / "run.json").read_text())
    assert (record["framework"], record["processes"]) == (framework, 2)


def test_every_launch_file_tells_its_command():
    files = sorted(CONFIGS.glob("*.yaml"))
    assert len(files) >= 6
    for file in files:
        comment = [line for line in file.read_text().splitlines() if line.startswith("# accelerate launch")]
        assert len(comment) == 1, file
        assert f"--config_file recipes/accelerate/{file.name}" in comment[0]
        assert "train/train_draft.py --config" in comment[0]


@pytest.mark.full
@pytest.mark.parametrize("config", [(), ("--config_file", CONFIGS / "zero2.yaml")])
def test_two_nodes(made, trained, tmp_path, config):
    """The launch lines of docs/multi-node.md, both nodes on this machine."""
    if config:
        pytest.importorskip("deepspeed", reason="pip install -e '.[scale]'")
    words = ["--num_machines", 2, "--num_processes", 2, "--main_process_ip", "127.0.0.1"]
    words += ["--main_process_port", free_port(), *config]
    script = [SCRIPT, *arguments(made, tmp_path / "run", **SETTINGS)]
    nodes = [
        subprocess.Popen(
            launch_command(*words, "--machine_rank", i, *script), env=ENV, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    deadline = time.monotonic() + 600
    try:
        errors = [node.communicate(timeout=deadline - time.monotonic())[1] for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], errors
    finally:
        for node in nodes:
            node.kill()
    close(tmp_path / "run", trained("one"))


@pytest.mark.parametrize(
    "asked, words",
    [
        ("--num_processes 2 x.py --cpu", "--multi_gpu --num_processes 2 x.py --cpu"),
        ("--cpu --num_processes 2 x.py", "--multi_gpu --num_processes 2 x.py"),
        ("--cpu --num_processes 1 x.py", None),
        (f"--cpu --config_file {CONFIGS}/zero2.yaml x.py", f"--config_file {CONFIGS}/zero2.yaml x.py"),
        (
            "--num_machines 2 --num_processes 4 --machine_rank 1 x.py",
            "--multi_gpu --num_machines 2 --num_processes 4 --machine_rank 1 x.py",
        ),
    ],
)
@pytest.mark.parametrize("start", ["python /bin/accelerate launch", "python -m accelerate.commands.launch"])
def test_a_launch_that_starts_one_process_is_told_how(start, asked, words):
    """accelerate starts one process on a CPU whatever it is told: two runs of half of what was asked for."""
    found = several([*start.split(), *asked.split()])
    assert found == (words and words.split())


def test_other_parents_are_no_launch():
    assert several(["bash", "launch.sh"]) is None
    assert several(["python", "-m", "pytest", "-q"]) is None


@pytest.fixture
def parallel():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    return parallelize(
        open_accelerator("cpu"), module, make_optimizer(module.named_parameters(), OptimConfig(lr=0.1)), 1.0
    )


def test_a_step_that_is_not_finite(parallel):
    """NaN weights, or a moment of Adam that stays NaN."""
    before = parallel.whole()
    with pytest.raises(Eagle3Error, match=r"step 7.*not finite.*the loss.*rank 0.*optim\.lr"):
        _step(parallel, float("nan"))
    parallel.optimizer.zero_grad()
    assert parallel.states() == {}
    assert all(torch.equal(x, before[name]) for name, x in parallel.whole().items())
    _step(parallel, 1.0)
    assert any(not torch.equal(x, before[name]) for name, x in parallel.whole().items())


def _step(parallel, factor):
    with parallel.micro_batch(last=True):
        parallel.backward(parallel(torch.ones(4, 3)).pow(2).sum() * factor)
    return parallel.step(0.1, 7)


def test_averages_are_looked_at_apart(parallel):
    """An evaluation of averaged weights that leaves them in the trained module."""
    mine = parallel.whole()
    assert parallel.plain() is parallel.module
    average = {name: torch.full_like(x, 0.25) for name, x in parallel.local().items()}
    plain = parallel.plain(average)
    assert all((p == 0.25).all() for p in plain.parameters())
    assert all(torch.equal(x, mine[name]) for name, x in parallel.whole().items())
    average["0.bias"].fill_(3.0)
    assert (parallel.plain(average).get_parameter("0.bias") == 3).all()


def test_fsdp_of_version_1(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(ConfigError, match="fsdp_version: 2"):
        open_accelerator("cpu")


@pytest.mark.parametrize(
    "stage, config, found",
    [
        (0, {}, "zero_stage is 0"),
        (2, {"bf16": {"enabled": True}}, "enables bf16"),
        (2, {"fp16": {"enabled": True}}, "enables fp16"),
        (2, {"optimizer": {"type": "AdamW"}}, "its own optimizer"),
        (3, {"scheduler": {"type": "WarmupLR"}}, "its own scheduler"),
    ],
)
def test_deepspeed_configs_against_our_settings(stage, config, found):
    """Two settings of one thing, of which DeepSpeed's would win."""
    with pytest.raises(ConfigError, match=found):
        zero._configure(SimpleNamespace(zero_stage=stage, deepspeed_config=config), 1.0)


def test_deepspeed_takes_adamw_alone():
    """Muon over flat pieces of matrices trains, and learns nothing of worth."""
    module = nn.Linear(4, 4)
    optimizer = make_optimizer(module.named_parameters(), OptimConfig(name="muon"))
    accelerator: Any = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=2, deepspeed_config={}))
    with pytest.raises(ConfigError, match=r"optim\.name adamw"):
        zero.Zero(accelerator, module, optimizer, 1.0)


def test_autocast_reaches_into_an_engine():
    """Training in fp32 under DeepSpeed, on GPUs alone: its engine turns off the autocast that is on around it."""
    module, dtypes = nn.Linear(2, 2), []

    def engine(x):
        with torch.autocast("cpu", enabled=False):
            dtypes.append(module(x).dtype)

    parallel: Any = object.__new__(zero.Zero)
    parallel.accelerator, parallel.wrapped = SimpleNamespace(device=torch.device("cpu")), engine
    parallel._take_autocast_inside(module)
    with torch.autocast("cpu", torch.bfloat16):
        parallel(torch.ones(1, 2))
    parallel(torch.ones(1, 2))
    assert dtypes == [torch.bfloat16, torch.float32]
