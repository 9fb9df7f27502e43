"""Targets whose layers lie elsewhere: spread over places, divided among ranks, and whole under ZeRO-3 and FSDP."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.multiprocessing.spawn import spawn
from transformers.integrations import deepspeed, fsdp

from eagle3.errors import ConfigError, UnsupportedTargetError
from eagle3.loading import undivided
from eagle3.placement import device_map, spread, spread_layers, tensor_plan
from eagle3.target import Target
from oracles.tiny import tiny_model

from .divided import LENGTHS, WORLD, features_and_logits, rank_of

# plain; tied, soft-capped and with windows; experts
DIVIDED = ("llama", "gemma2", "qwen3_moe")
# fused projections, norms of heads, keys wider than values, layers of two kinds
DIVIDED_TOO = ("mistral", "qwen2", "qwen3", "phi3", "gemma3", "deepseek_v3")
UNDIVIDED = {"gpt_oss": "no tensor-parallel plan", "gemma4": "does not run divided among 2 processes"}
IDS = torch.randint(0, 250, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A folder with every family's checkpoint."""
    root = tmp_path_factory.mktemp("targets")
    for family in (*DIVIDED, *DIVIDED_TOO, *UNDIVIDED):
        tiny_model(family).save_pretrained(root / family)
    return root


def run_ranks(folders: Path, families: tuple[str, ...]) -> list[dict]:
    """What each rank found, by family."""
    spawn(rank_of, (folders, families, IDS), nprocs=WORLD)
    return [torch.load(folders / f"{rank}.pt") for rank in range(WORLD)]


@pytest.fixture(scope="module")
def ranks(folders) -> list[dict]:
    return run_ranks(folders, (*DIVIDED, *UNDIVIDED))


def check_divided(folders: Path, ranks: list[dict], family: str) -> None:
    whole = Target.load(folders / family, tokenizer=False)
    expected, count = features_and_logits(whole, IDS), sum(p.numel() for p in whole.model.parameters())
    for found in (rank[family] for rank in ranks):
        for name, values in expected.items():
            assert (found[name] - values).abs().max() <= 1e-5 * values.abs().max(), name
        assert found["fingerprint"] == whole.fingerprint
        assert found["collective"]
        assert not whole.collective
        layers = sum(p.numel() for p in whole.layers.parameters())
        assert count - layers < found["numbers"] < count - layers / 4
    # ranks that saw different numbers would train different heads
    assert all(torch.equal(ranks[0][family][name], ranks[1][family][name]) for name in expected)


@pytest.mark.parametrize("family", DIVIDED)
def test_divided_equals_whole(folders, ranks, family):
    """Catches: local heads, sliced lm_heads and embeddings, sums that miss a rank; a rank that holds everything."""
    check_divided(folders, ranks, family)


@pytest.mark.full
def test_other_families_divided_equal_whole(folders):
    """The same of every other family whose plan transformers can run on two processes."""
    ranks = run_ranks(folders, DIVIDED_TOO)
    for family in DIVIDED_TOO:
        check_divided(folders, ranks, family)


@pytest.mark.parametrize("family, words", UNDIVIDED.items())
def test_what_cannot_be_divided_says_so(ranks, family, words):
    """Catches: a family without a plan that is held whole by every rank; torch's own errors about shapes."""
    assert all(words in rank[family] and "use" in rank[family] for rank in ranks)


@pytest.mark.parametrize("places", [["cpu"] * 4 + ["disk"] * 4, ["disk"] * 2 + ["cpu"] * 6], ids=["last", "first"])
@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_spread_equals_whole(folders, family, places):
    """Catches: accelerate's hooks losing the context, rotary tables or features on their way; weights on meta read
    as they are."""
    spread_out = Target.load(folders / family, tokenizer=False, placement=places)
    whole = Target.load(folders / family, tokenizer=False)
    assert any(p.is_meta for p in spread_out.model.parameters())
    assert spread_out.fingerprint == whole.fingerprint
    assert spread_out.device == whole.device
    expected = features_and_logits(whole, IDS)
    for name, values in features_and_logits(spread_out, IDS).items():
        assert torch.equal(values, expected[name]), name


def test_device_map_without_accelerators_is_whole(folders):
    """Catches: a setting for large machines that a laptop cannot run."""
    target = Target.load(folders / "llama", tokenizer=False, placement="device_map")
    assert not any(p.is_meta for p in target.model.parameters())


def test_all_but_the_layers_stays_with_the_head():
    """Catches: an embedding or lm_head on another device than the head's, whose rows it reads."""
    with torch.device("meta"):
        model = tiny_model("llama")
    found = device_map(model, "model.layers", [0, 0, 1, 1, 2, 2, "cpu", "cpu"], torch.device("cuda", 2))
    layers = {name: place for name, place in found.items() if ".layers." in name}
    assert list(layers.values()) == [0, 0, 1, 1, 2, 2, "cpu", "cpu"]
    rest = {name: place for name, place in found.items() if name not in layers}
    assert rest == dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), 2)
    named = [name for name, _ in model.named_parameters()]
    assert all(any(name.startswith(f"{key}.") for key in found) for name in named)


@pytest.mark.parametrize(
    "sizes, room, places",
    [
        # half of the first device is left for the head
        ([10] * 6, {0: 40, 1: 80}, [0, 0, 1, 1, 1, 1]),
        ([10] * 6, {0: 1000, 1: 1000, 2: 1000}, [0, 0, 1, 1, 2, 2]),
        ([10] * 6, {0: 25, 1: 25}, [0, 0, 1, 1, "cpu", "cpu"]),
        ([10] * 3, {0: -5, 1: 100}, [1, 1, 1]),
        ([10] * 2, {0: 0}, ["cpu", "cpu"]),
        ([5, 5, 30, 5], {0: 20, 1: 40}, [0, 0, 1, 1]),
    ],
)
def test_spread(sizes, room, places):
    """Catches: a device that is overfilled, layers that jump to and fro, layers that are lost."""
    assert spread(sizes, room) == places


@pytest.mark.parametrize(
    "rank, ranks, places",
    [
        # beside the other weights 5 layers have room on each; half of the head's device is the head's
        (0, 1, [0] * 2 + [1] * 3 + [2] * 3),
        # two processes on one machine: the second has the odd devices
        (1, 2, [1] * 2 + [3] * 6),
    ],
)
def test_layers_are_spread_by_free_memory(monkeypatch, rank, ranks, places):
    """Catches: a head's device that is filled up by the target; two processes that fill the same devices."""
    with torch.device("meta"):
        model = tiny_model("llama", vocab_size=8)
    layers = model.model.layers
    layer = 4 * sum(p.numel() for p in layers[0].parameters())
    rest = 4 * sum(p.numel() for p in model.parameters()) - 8 * layer
    free = {0: rest + 5 * layer, 1: 5 * layer + (rest if rank else 0), 2: 5 * layer, 3: 8 * layer}
    count = 4 if rank else 3
    backend = SimpleNamespace(device_count=lambda: count, mem_get_info=lambda i: (free[i], 10**12))
    monkeypatch.setattr(torch, "get_device_module", lambda device: backend)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert spread_layers(model, layers, torch.device("cuda", rank), torch.float32) == places


def test_layers_that_fit_nowhere_are_told(monkeypatch):
    """Catches: a training run that is slow for a reason that nobody learns."""
    with torch.device("meta"):
        model = tiny_model("llama")
    backend = SimpleNamespace(device_count=lambda: 1, mem_get_info=lambda i: (0, 0))
    monkeypatch.setattr(torch, "get_device_module", lambda device: backend)
    with pytest.warns(UserWarning, match="8 of the target's 8 layers do not fit on the devices \\[0\\]"):
        places = spread_layers(model, model.model.layers, torch.device("cuda", 0), torch.float32)
    assert places == ["cpu"] * 8


def test_tensor_parallel_needs_processes(folders):
    """Catches: a target that is silently whole in a run of one process; an error of torch.distributed."""
    with pytest.raises(ConfigError, match="there is one: accelerate launch more"):
        Target.load(folders / "llama", tokenizer=False, placement="tensor_parallel")


def test_plan_is_of_this_machines_devices(monkeypatch):
    """Catches: a target on the GPUs of a run that was told to use the CPU."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    with pytest.raises(ConfigError, match="cuda devices, not over cpu"):
        tensor_plan(tiny_model("llama"), "model.layers", torch.device("cpu"))


def test_plan_without_layers_is_refused(monkeypatch):
    """Catches: the embedding or lm_head of a plan divided, alone or too."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    model = tiny_model("llama")
    assert "lm_head" in model.tp_plan
    assert all(name.startswith("model.layers.*.") for name in tensor_plan(model, "model.layers", torch.device("cpu")))
    model.tp_plan = {"lm_head": "colwise_gather_output"}
    with pytest.raises(UnsupportedTargetError, match="no tensor-parallel plan"):
        tensor_plan(model, "model.layers", torch.device("cpu"))


class TestWholeOnEveryRank:
    @pytest.fixture
    def zero3(self):
        """A live config of stage 3, as accelerate's DeepSpeedPlugin keeps one."""
        pytest.importorskip("deepspeed")
        config = deepspeed.HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_batch_size": 1})
        yield config
        deepspeed.unset_hf_deepspeed_config()

    @pytest.fixture
    def second_rank_of_fsdp(self, monkeypatch, tmp_path):
        """As accelerate launch sets up the second rank of FSDP with RAM-efficient loading."""
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
        monkeypatch.setenv("LOCAL_RANK", "1")
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'sync'}", rank=0, world_size=1)
        yield
        dist.destroy_process_group()

    def check(self, folder: Path) -> None:
        weights, expected = Target.load(folder, tokenizer=False).model.state_dict(), tiny_model("llama").state_dict()
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)

    def test_zero3(self, folders, zero3):
        """Catches: a target partitioned by DeepSpeed, and a run whose ZeRO-3 is forgotten afterwards."""
        assert deepspeed.is_deepspeed_zero3_enabled()
        self.check(folders / "llama")
        assert deepspeed.is_deepspeed_zero3_enabled()
        assert deepspeed.deepspeed_config() is zero3.config

    def test_fsdp(self, folders, second_rank_of_fsdp):
        """Catches: a target of zeros on every rank but the first."""
        assert fsdp.is_fsdp_enabled()
        untrue = transformers.AutoModelForCausalLM.from_pretrained(folders / "llama")
        assert not untrue.model.layers[0].mlp.up_proj.weight.any()
        self.check(folders / "llama")
        assert fsdp.is_fsdp_enabled()

    @pytest.mark.parametrize("value", [None, "true", "false"])
    def test_the_environment_is_restored(self, zero3, monkeypatch, value):
        """Catches: state that leaks, after an error too."""
        monkeypatch.delenv("FSDP_CPU_RAM_EFFICIENT_LOADING", raising=False)
        if value is not None:
            monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", value)
        enabled = []
        with pytest.raises(ZeroDivisionError), undivided():
            enabled.append(deepspeed.is_deepspeed_zero3_enabled() or 1 / 0)
        assert not enabled
        assert deepspeed.is_deepspeed_zero3_enabled()
        assert os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING") == value
