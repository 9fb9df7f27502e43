"""Head folders: what is written, that it comes back bit for bit, and every way in which one can be broken."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.attention import DenseCausal
from eagle3.checkpoint import folder as folder_module
from eagle3.checkpoint.reference import load_head, save_head
from eagle3.config import HeadOptions
from eagle3.errors import CheckpointError, ConfigError, VocabMapError
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.target import Target
from eagle3.vocab import VocabMap, build_vocab_map, identity_map

LAYER = [
    *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    "input_layernorm.weight",
    "hidden_norm.weight",
    "post_attention_layernorm.weight",
]
REFERENCE = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", *(f"midlayer.{name}" for name in LAYER)}


@pytest.fixture(scope="module")
def target(build) -> Target:
    """Deep enough for the default capture layers (1, 3, 4)."""
    return Target(build("llama", num_hidden_layers=8))


@pytest.fixture(scope="module")
def vocab_map() -> VocabMap:
    counts = torch.randint(1, 99, (300,), generator=torch.Generator().manual_seed(0))
    return build_vocab_map(counts, 100, [5], 300)


@pytest.fixture(scope="module")
def head(target, vocab_map) -> Eagle3Head:
    return moved(Eagle3Head.for_target(target, vocab_map))


def moved(head: Eagle3Head) -> Eagle3Head:
    """Every weight off its default."""
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return head


@pytest.fixture
def folder(tmp_path, head) -> Path:
    return save_head(tmp_path / "head", head, torch.float32)


@pytest.fixture
def change(folder) -> Callable[..., Path]:
    """change(tensors=f, config=g): the folder with its state dict and its JSON edited in place."""

    def edit(tensors: Callable[[dict], Any] | None = None, config: Callable[[dict], Any] | None = None) -> Path:
        if tensors is not None:
            state = load_file(folder / "model.safetensors")
            tensors(state)
            save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        if config is not None:
            content = json.loads((folder / "config.json").read_text())
            config(content)
            (folder / "config.json").write_text(json.dumps(content))
        return folder

    return edit


def state_equal(one: Eagle3Head, other: Eagle3Head) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class TestRoundTrip:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"num_layers": 2, "fc_norm": True, "qk_norm": True, "attention_bias": True},
            {"norm_before_residual": True, "norm_output": True, "sliding_window": 7},
            {"hidden_size": 32, "num_attention_heads": 2, "head_dim": 24, "capture_layers": (0, 7)},
        ],
        ids=["plain", "more weights", "switches", "other width"],
    )
    def test_bit_equal_in_fp32(self, target, vocab_map, tmp_path, options):
        """Catches: a weight, an option or the map lost or rounded on the way."""
        head = moved(Eagle3Head.for_target(target, vocab_map, HeadOptions(**options)))
        loaded = load_head(save_head(tmp_path / "head", head, torch.float32), target)
        assert loaded.config == head.config
        assert state_equal(loaded, head)
        ids = torch.arange(9)
        feature = torch.randn(9, head.config.feature_size)
        ours, theirs = (
            x.logits(x.step(x.start(feature), x.embed(ids, target), ids, DenseCausal([9]))) for x in (loaded, head)
        )
        assert torch.equal(ours, theirs)

    def test_whole_vocabulary_without_a_map(self, target, tmp_path):
        """Catches: a map demanded where draft and target ids are the same."""
        head = Eagle3Head.for_target(target, identity_map(300))
        folder = save_head(tmp_path / "head", head, torch.float32)
        state = load_file(folder / "model.safetensors")
        del state["d2t"], state["t2d"]
        save_file(state, folder / "model.safetensors")
        assert state_equal(load_head(folder, target), head)

    def test_rope_parameters_survive_json(self, build, vocab_map, tmp_path):
        """Catches: rope lists or numbers that come back as something else, so that the angles are not compared."""
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.5] * 8, "long_factor": [4.0] * 8}
        target = Target(build("phi3", rope_parameters=rope, original_max_position_embeddings=64))
        head = Eagle3Head.for_target(target, vocab_map, HeadOptions(capture_layers=(0,)))
        loaded = load_head(save_head(tmp_path / "head", head), target)
        assert loaded.config.rope_parameters == head.config.rope_parameters
        assert torch.equal(loaded.inv_freq, head.inv_freq)

    @pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
    def test_half_precision_is_loaded_as_asked(self, target, head, tmp_path, stored):
        """Catches: weights left in the file's dtype; the target's dtype not being the default."""
        folder = save_head(tmp_path / "head", head, stored)
        assert load_file(folder / "model.safetensors")["fc.weight"].dtype == stored
        loaded = load_head(folder, target)
        assert {x.dtype for x in loaded.parameters()} == {torch.float32}
        assert torch.equal(loaded.fc.weight, head.fc.weight.to(stored).float())
        assert torch.equal(loaded.inv_freq, head.inv_freq)
        half = load_head(folder, target, torch.bfloat16)
        assert {x.dtype for x in half.parameters()} == {torch.bfloat16}
        assert torch.equal(half.inv_freq, head.inv_freq)

    def test_loading_leaves_the_random_state(self, target, folder):
        """Catches: a run whose draws depend on whether a head was loaded."""
        state = torch.get_rng_state()
        loaded = load_head(folder, target)
        assert torch.equal(torch.get_rng_state(), state)
        assert not loaded.training


class TestFormat:
    def test_tensor_names(self, folder):
        """Catches: names that the reference code and the engines do not read; an embedding saved for nothing."""
        state = load_file(folder / "model.safetensors")
        assert state.keys() == REFERENCE
        assert state["fc.weight"].shape == (64, 192)
        assert state["midlayer.self_attn.q_proj.weight"].shape == (64, 128)
        assert state["midlayer.self_attn.k_proj.weight"].shape == (32, 128)
        assert (state["d2t"].dtype, state["d2t"].shape) == (torch.int64, (100,))
        assert (state["t2d"].dtype, state["t2d"].shape) == (torch.bool, (300,))

    def test_names_of_options(self, target, vocab_map, tmp_path):
        """Catches: names that differ from SpecForge's and speculators'."""
        options = HeadOptions(num_layers=2, fc_norm=True, qk_norm=True, hidden_size=32)
        state = load_file(
            save_head(tmp_path / "h", Eagle3Head.for_target(target, vocab_map, options)) / "model.safetensors"
        )
        second = {f"layers.1.{name}" for name in LAYER if name != "hidden_norm.weight"}
        norms = {f"{layer}.self_attn.{x}_norm.weight" for layer in ("midlayer", "layers.1") for x in "qk"}
        more = {"embed_tokens.weight", *(f"fc_norm.{i}.weight" for i in range(3))}
        assert state.keys() == REFERENCE | second | norms | more

    def test_offsets(self, folder, vocab_map):
        """Catches: absolute ids written as d2t."""
        state = load_file(folder / "model.safetensors")
        ids = torch.arange(100) + state["d2t"]
        assert torch.equal(ids, vocab_map.t2d.nonzero().flatten())
        assert torch.equal(state["t2d"].nonzero().flatten(), ids)

    def test_config(self, folder, target):
        """Catches: keys that engines need; capture layers, fingerprint or options missing from our block."""
        content = json.loads((folder / "config.json").read_text())
        assert content["architectures"] == ["LlamaForCausalLMEagle3"]
        assert content["model_type"] == "llama"
        assert (content["hidden_size"], content["head_dim"], content["num_hidden_layers"]) == (64, 16, 1)
        assert (content["vocab_size"], content["draft_vocab_size"]) == (300, 100)
        assert (content["rope_theta"], content["tie_word_embeddings"], content["torch_dtype"]) == (
            1e4,
            False,
            "float32",
        )
        assert content["eagle3"] == {
            "schema": 1,
            "capture_layers": [1, 3, 4],
            "target_fingerprint": target.fingerprint,
            "trained_length": None,
            "num_layers": 1,
            "fc_norm": False,
            "norm_before_residual": False,
            "norm_output": False,
            "qk_norm": False,
            "attention_bias": False,
            "sliding_window": None,
        }


class TestSaving:
    def test_over_an_earlier_head(self, target, head, vocab_map, folder):
        """Catches: files of two heads mixed, leftovers beside the folder."""
        (folder / "run.json").write_text("{}")
        other = Eagle3Head.for_target(target, vocab_map, seed=5)
        assert save_head(folder, other, torch.float32) == folder
        assert state_equal(load_head(folder, target), other)
        assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
        assert [p.name for p in folder.parent.iterdir()] == ["head"]

    @pytest.mark.parametrize("at", ["weights", "config", "rename"])
    def test_interrupted_save_leaves_the_old_head(self, target, head, vocab_map, folder, monkeypatch, at):
        """Catches: a kill, a full disk or a failed rename that leaves half a head or none."""
        error = OSError("disk full")

        def fail(*_args, **_kwargs):
            raise error

        if at == "weights":
            monkeypatch.setattr(folder_module, "save_file", fail)
        elif at == "config":
            monkeypatch.setattr(Path, "write_text", fail)
        else:
            rename = Path.rename
            monkeypatch.setattr(Path, "rename", lambda p, to: fail() if p.name.endswith(".part") else rename(p, to))
        with pytest.raises(CheckpointError, match="cannot be written: disk full"):
            save_head(folder, Eagle3Head.for_target(target, vocab_map, seed=5))
        monkeypatch.undo()
        assert state_equal(load_head(folder, target), head)
        assert [p.name for p in folder.parent.iterdir()] == ["head"]

    def test_keyboard_interrupt(self, target, head, folder, monkeypatch):
        """Catches: Ctrl-C swallowed, or leaving a temporary folder."""

        def stop(*_args, **_kwargs):
            raise KeyboardInterrupt

        monkeypatch.setattr(folder_module, "save_file", stop)
        with pytest.raises(KeyboardInterrupt):
            save_head(folder, head)
        assert [p.name for p in folder.parent.iterdir()] == ["head"]

    @pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
    def test_permissions(self, head, tmp_path, umask):
        """Catches: safetensors' 0600 files and mkdtemp's 0700 folder, which colleagues and servers cannot read."""
        before = os.umask(umask)
        try:
            folder = save_head(tmp_path / "head", head)
        finally:
            os.umask(before)
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (folder, *folder.iterdir())}
        assert modes == {
            "head": 0o777 & ~umask,
            "config.json": 0o666 & ~umask,
            "model.safetensors": 0o666 & ~umask,
        }

    def test_nothing_else_is_overwritten(self, head, tmp_path):
        """Catches: a wrong --output that deletes a user's folder or file."""
        (tmp_path / "notes").mkdir()
        (tmp_path / "notes" / "thesis.txt").write_text("years of work")
        (tmp_path / "file").write_text("also")
        for name in ("notes", "file"):
            with pytest.raises(CheckpointError, match="is no head's folder: it is not overwritten"):
                save_head(tmp_path / name, head)
        assert (tmp_path / "notes" / "thesis.txt").read_text() == "years of work"
        (tmp_path / "empty").mkdir()
        save_head(tmp_path / "empty", head)
        save_head(tmp_path / "new" / "deeper", head)


class TestBroken:
    def test_missing_tensor(self, change, target):
        """Catches: a tensor that is not in the file and stays random."""
        for name in ("fc.weight", "midlayer.hidden_norm.weight"):
            with pytest.raises(CheckpointError, match=f"lacks .*{name}"):
                load_head(change(lambda state, name=name: state.pop(name)), target)

    def test_extra_tensor(self, change, target):
        """Catches: a weight of another architecture that would be ignored."""
        with pytest.raises(CheckpointError, match=r"does not: midlayer\.self_attn\.q_norm\.weight"):
            load_head(change(lambda s: s.update({"midlayer.self_attn.q_norm.weight": torch.ones(16)})), target)

    def test_misshaped_tensor(self, change, target):
        """Catches: an fc for another number of features, named with both shapes."""
        with pytest.raises(CheckpointError, match=r"fc\.weight is \[64, 128\], config.json asks for \[64, 192\]"):
            load_head(change(lambda s: s.update({"fc.weight": torch.ones(64, 128)})), target)

    @pytest.mark.parametrize(
        "edit, words",
        [
            (lambda c: c["eagle3"].update(num_layers=10**6), "says 1000000 layers, .* holds 1"),
            (lambda c: c.update(head_dim=10**9), r"q_proj\.weight is .*config\.json asks for \[4000000000, 128\]"),
            (lambda c: c.update(target_hidden_size=10**15), r"fc\.weight is "),
            (lambda c: c.update(intermediate_size=10**12), r"gate_proj\.weight is "),
        ],
    )
    def test_sizes_that_no_machine_holds(self, change, target, edit, words):
        """Catches: a head of the config's sizes built, and the process killed for memory, before they are compared."""
        with pytest.raises(CheckpointError, match=words):
            load_head(change(config=edit), target)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_not_finite(self, change, target, value):
        """Catches: a diverged run's head."""
        with pytest.raises(CheckpointError, match=r"norm\.weight holds NaN or infinity"):
            load_head(change(lambda s: s["norm.weight"].fill_(value)), target)

    @pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
    def test_quantised(self, change, target, dtype):
        """Catches: integers read as weights."""
        with pytest.raises(CheckpointError, match=r"fc\.weight is torch\.\w+; quantised"):
            load_head(change(lambda s: s.update({"fc.weight": torch.ones(64, 192).to(dtype)})), target)

    @pytest.mark.parametrize(
        "edit, error, words",
        [
            (lambda s: s.pop("d2t"), CheckpointError, r"d2t is missing although the draft vocabulary \(100\)"),
            (lambda s: s["d2t"].add_(torch.arange(100)), VocabMapError, "offsets"),
            (lambda s: s["d2t"].zero_(), VocabMapError, "disagree"),
            (lambda s: (s["d2t"].zero_(), s.pop("t2d")), VocabMapError, "all zeros"),
            (lambda s: s["t2d"].logical_not_(), VocabMapError, "disagree"),
            (lambda s: s.update({"d2t": s["d2t"][:99].clone(), "t2d": None}), CheckpointError, "99 entries"),
        ],
        ids=["missing", "absolute", "zeros", "zeros, no t2d", "t2d", "short"],
    )
    def test_map(self, change, target, edit, error, words):
        """Catches: drafts that name the wrong tokens."""

        def tensors(state):
            edit(state)
            for name in [name for name, x in state.items() if x is None]:
                del state[name]

        with pytest.raises(error, match=words):
            load_head(change(tensors), target)

    @pytest.mark.parametrize(
        "edit, words",
        [
            (lambda c: c.update(intermediate_size=128), r"\[96, 64\], config.json asks for \[128, 64\]"),
            (lambda c: c.update(vocab_size=320), "320|t2d"),
            (lambda c: c["eagle3"].update(capture_layers=[1, 3, 9]), "reads layers .* has 8 layers"),
            (lambda c: c["eagle3"].update(capture_layers=[1, 3]), r"config.json asks for \[64, 128\]"),
            (lambda c: c["eagle3"].update(schema=2), "schema 2 is not 1"),
            (lambda c: c["eagle3"].pop("schema"), "schema None is not 1"),
            (lambda c: c.update(eagle3=[1]), r"schema \[1\] is not 1"),
            (lambda c: c["eagle3"].update(norm_befor=True), r"unknown settings \['norm_befor'\]"),
            (lambda c: c["eagle3"].update(norm_output="yes"), "norm_output is 'yes'"),
            (lambda c: c["eagle3"].pop("capture_layers"), "capture_layers"),
            (lambda c: c.pop("hidden_size"), "hidden_size"),
            (lambda c: c.pop("rms_norm_eps"), "rms_norm_eps"),
            (lambda c: c.update(hidden_size="64"), "hidden_size is '64'"),
            (lambda c: c.update(num_key_value_heads=3), "4 attention heads are not a multiple of 3"),
            (lambda c: c.update(rope_parameters=[3]), "rope_parameters is"),
            (lambda c: c.update(rope_parameters={"rope_type": "abacus"}), "rope_type 'abacus' is unknown"),
            (lambda c: c["rope_parameters"].update(rope_theta="x"), "rope_theta is 'x'"),
            (lambda c: c["rope_parameters"].update(rope_theta=0), "rope_theta is 0"),
            (lambda c: c.update(rms_norm_eps="x"), "rms_norm_eps is 'x'"),
            (lambda c: c.update(rms_norm_eps=-1.0), "rms_norm_eps is -1.0"),
            (lambda c: c.update(hidden_act="gelu"), "hidden_act 'gelu'"),
            (lambda c: c["eagle3"].update(capture_layers="abc"), "capture_layers is"),
            (lambda c: c["eagle3"].update(capture_layers=[1.5, 2, 3]), "capture_layers is"),
            (lambda c: (c.pop("eagle3"), c.update(eagle_config=3)), "config.json"),
            (lambda c: (c.pop("eagle3"), c.update(eagle_aux_hidden_state_layer_ids=[1, "a"])), "config.json"),
            (lambda c: (c.pop("eagle3"), c.pop("rope_parameters"), c.update(rope_scaling="abc")), "config.json"),
            (lambda c: (c.pop("rope_parameters"), c.pop("rope_theta")), "neither rope_parameters nor rope_theta"),
        ],
    )
    def test_config(self, change, target, edit, words):
        """Catches: a config that does not belong to the weights, the target or this version."""
        with pytest.raises((CheckpointError, ConfigError), match=words) as error:
            load_head(change(config=edit), target)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("content", ["{", "[]", "3", "\x00", "[" * 100_000])
    def test_config_is_no_object(self, folder, target, content):
        """Catches: tracebacks from the JSON reader."""
        (folder / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"config\.json (is not JSON|holds no JSON object)"):
            load_head(folder, target)

    def test_paths(self, folder, target, tmp_path):
        """Catches: a missing draft that becomes the target or a random head."""
        with pytest.raises(CheckpointError, match="does not exist"):
            load_head(tmp_path / "nowhere", target)
        with pytest.raises(CheckpointError, match="is a file, not a folder"):
            load_head(folder / "config.json", target)
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=r"model\.safetensors is missing; convert its pytorch_model\.bin"):
            load_head(folder, target)
        (folder / "config.json").unlink()
        with pytest.raises(CheckpointError, match=r"config\.json is missing"):
            load_head(folder, target)

    @pytest.mark.parametrize("size", [0, 5, 500])
    def test_truncated_weights(self, folder, target, size):
        """Catches: an interrupted download."""
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
            load_head(folder, target)

    def test_another_target(self, build, folder):
        """Catches: a head for another hidden size."""
        with pytest.raises(CheckpointError, match=r"hidden size 64; .* has 96"):
            load_head(folder, Target(build("llama", num_hidden_layers=8, hidden_size=96)))


def as_foreign(config: dict) -> None:
    """What the reference code writes: none of our keys, no head_dim, rope as transformers 4 had it."""
    for key in ("eagle3", "rope_parameters", "head_dim", "target_hidden_size"):
        del config[key]


class TestForeign:
    @pytest.mark.parametrize("embedding", [True, False])
    @pytest.mark.parametrize("naming", ["midlayer.", "layers.0."])
    def test_reference_folder(self, change, target, head, naming, embedding):
        """Catches: heads of EAGLE, SpecForge or Model-Optimizer not being read, or read in another order."""

        def rename(state: dict) -> None:
            for name in [name for name in state if name.startswith("midlayer.")]:
                state[name.replace("midlayer.", naming)] = state.pop(name)
            if embedding:
                state["embed_tokens.weight"] = target.embed(torch.arange(300)).clone()

        loaded = load_head(change(rename, as_foreign), target)
        assert state_equal(loaded, head)
        assert loaded.capture_layers == (1, 3, 4)
        assert torch.equal(loaded.inv_freq, head.inv_freq)

    @pytest.mark.parametrize("nested", [True, False])
    @pytest.mark.parametrize("ids", [[1, 3, 4], [2, 4, 5], [4, 1, 3]])
    def test_default_ids_in_either_numbering(self, change, target, ids, nested):
        """Catches: "output of layer i" and "input of layer i" told apart wrongly, Model-Optimizer's unsorted lists."""

        def named(config: dict) -> None:
            as_foreign(config)
            (config.setdefault("eagle_config", {}) if nested else config)["eagle_aux_hidden_state_layer_ids"] = ids

        assert load_head(change(config=named), target).capture_layers == (1, 3, 4)

    def test_other_ids_are_ambiguous(self, change, target):
        """Catches: a guess between the two numberings."""

        def named(config: dict) -> None:
            as_foreign(config)
            config["eagle_aux_hidden_state_layer_ids"] = [0, 3, 6]

        with pytest.raises(CheckpointError, match=r"\[0, 3, 6\].*two ways.*add \"eagle3\""):
            load_head(change(config=named), target)

    def test_the_suggested_block_is_enough(self, change, target, head):
        """Catches: an error message whose advice does not work."""

        def advised(config: dict) -> None:
            as_foreign(config)
            config["eagle3"] = {"schema": 1, "capture_layers": [0, 3, 6]}

        assert load_head(change(config=advised), target).capture_layers == (0, 3, 6)

    @pytest.mark.parametrize("option", ["norm_output", "fc_norm", "norm_before_residual", "norm_before_fc"])
    def test_options_that_we_would_drop(self, change, target, option):
        """Catches: an architecture flag of another tool that is ignored."""

        def with_option(config: dict) -> None:
            as_foreign(config)
            config[option] = True

        with pytest.raises(CheckpointError, match=option):
            load_head(change(config=with_option), target)

    def test_a_targets_window_in_a_foreign_config_is_not_the_heads(self, change, target):
        """Catches: configs copied from the target's, whose sliding_window the reference code ignores."""

        def with_window(config: dict) -> None:
            as_foreign(config)
            config["sliding_window"] = 4096

        assert load_head(change(config=with_window), target).config.sliding_window is None

    def test_shallow_target(self, build, change):
        """Catches: default layers that do not exist, with advice for another command."""
        with pytest.raises(CheckpointError, match=r"which of 4 layers.*add \"eagle3\""):
            load_head(change(config=as_foreign), Target(build("llama")))

    @pytest.mark.parametrize("key", ["type", "rope_type"])
    def test_rope_scaling_of_transformers_4(self, change, target, key):
        """Catches: rope_scaling beside rope_theta being ignored."""

        def scaled(config: dict) -> None:
            as_foreign(config)
            config.update(rope_theta=5e5, rope_scaling={key: "linear", "factor": 4.0})

        with pytest.warns(UserWarning, match="other angles"):
            loaded = load_head(change(config=scaled), target)
        assert loaded.config.rope_parameters == {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}
        torch.testing.assert_close(loaded.inv_freq, 5e5 ** (-torch.arange(8) / 8) / 4)
