"""Targets: every family's logits through the seam, loading from disk, and what is refused with which words."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import eagle3.target
from eagle3.attention import SEAM, DenseCausal
from eagle3.errors import ConfigError, UnsupportedTargetError
from eagle3.target import Target, eos_ids
from oracles.tiny import tiny_folder, tiny_tokenizer

SIX = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3")
OTHERS = (
    "gemma3",
    "granite",
    "cohere2",
    "stablelm",
    "nemotron",
    "gpt_neox",
    "gpt2",
    "phi",
    "deepseek_v3",
    "gpt_oss",
)
TIED = [(family, tied) for family in SIX for tied in (True, False)]


@torch.no_grad()
def eager_logits(model, ids: torch.Tensor) -> torch.Tensor:
    """The model's own logits [T, V], before anything of ours touched it."""
    model.set_attn_implementation("eager")
    return model(input_ids=ids[None], use_cache=False).logits[0]


@torch.no_grad()
def seam_logits(target: Target, ids: torch.Tensor, plain: bool = False) -> torch.Tensor:
    return target.logits(target.hidden(ids, torch.arange(len(ids)), DenseCausal([len(ids)], plain)))


def assert_equal_logits(ours: torch.Tensor, stock: torch.Tensor) -> None:
    """fp32 noise of another order of summation is 1e-6 of the largest logit; any mistake moves them by a tenth."""
    assert (ours - stock).abs().max() <= 2e-5 * stock.abs().max()


class TestLogits:
    @pytest.mark.parametrize("family, tied", TIED + [(family, False) for family in OTHERS])
    def test_seam_equals_stock(self, build, document, family, tied):
        """Catches: a lost window, soft-cap, sink, scale, bias, q/k norm; logits not scaled as the model does."""
        model, (ids, _) = build(family, tie_word_embeddings=tied), document(40)
        stock = eager_logits(model, ids)
        target = Target(model)
        assert_equal_logits(seam_logits(target, ids), stock)
        assert torch.equal(seam_logits(target, ids, plain=True), stock)

    @pytest.mark.parametrize("family", SIX)
    def test_packed_documents_equal_separate_ones(self, build, document, family):
        """Catches: documents of one row that see each other, positions that run on."""
        target, (ids, _) = Target(build(family)), document(50)
        parts = [ids[:17], ids[17:18], ids[18:]]
        positions = torch.cat([torch.arange(len(part)) for part in parts])
        with torch.no_grad():
            packed = target.logits(target.hidden(ids, positions, DenseCausal([len(part) for part in parts])))
        assert_equal_logits(packed, torch.cat([seam_logits(target, part) for part in parts]))

    @pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "cohere2", "phi"])
    def test_logits_of_some_tokens(self, build, document, family):
        """Catches: the teacher's draft-vocab logits without the bias, scale or soft-cap of the whole lm_head."""
        target, (ids, positions) = Target(build(family)), document(6)
        some = torch.tensor([250, 3, 3, 299])
        with torch.no_grad():
            hidden = target.hidden(ids, positions, DenseCausal([6]))
            torch.testing.assert_close(target.logits_of(some)(hidden), target.logits(hidden)[:, some])

    @pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
    def test_embed_is_what_layer_0_reads(self, build, document, family):
        """Catches: Gemma's embedding scale lost by reading the weight."""
        target, (ids, _) = Target(build(family)), document(6)
        with torch.no_grad(), target.stock() as model:
            first = model(ids[None], output_hidden_states=True, use_cache=False).hidden_states[0][0]
            torch.testing.assert_close(target.embed(ids), first)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("family", ["qwen3", "gemma2"])
    def test_half_precision_passes_the_probe(self, build, document, family, dtype):
        """Catches: a probe that only fp32 models pass."""
        target, (ids, positions) = Target(build(family, initializer_range=0.05).to(dtype)), document(30)
        assert target.dtype == dtype
        target.check_teacher(ids, positions)


class TestTeacher:
    @pytest.mark.parametrize("family", SIX + OTHERS)
    def test_rebuilt_teacher_logits_pass(self, build, document, family):
        """Catches: a first-batch check that refuses healthy targets."""
        Target(build(family)).check_teacher(*document(100))

    def test_an_unknown_change_of_the_logits_fails(self, build, document, monkeypatch):
        """Catches: a family that scales its logits by a rule that we do not know."""
        target = Target(build("llama"))
        forward = target.model.forward

        def scaled(*args, **kwargs):
            output = forward(*args, **kwargs)
            output.logits = output.logits * 1.001
            return output

        monkeypatch.setattr(target.model, "forward", scaled)
        with pytest.raises(UnsupportedTargetError, match="rebuilt from the last hidden state differ"):
            target.check_teacher(*document(20))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("family", ["gemma2", "granite", "cohere2"])
    def test_a_missing_logit_rule_fails_the_probe(self, build, monkeypatch, family, dtype):
        """Negative control: without Gemma's cap, Granite's divisor or Cohere's factor the target is refused."""
        model = build(family).to(dtype)
        Target(model)
        monkeypatch.setattr(eagle3.target, "_logit_rules", lambda config: [])
        with pytest.raises(UnsupportedTargetError, match="rebuilt from the last hidden state differ"):
            Target(model)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(
        "family, lost, settings",
        [
            # 50 caps nothing of a tiny model's scores
            ("gemma2", "softcap", {"attn_logit_softcapping": 0.2}),
            ("mistral", "window", {}),
            ("gpt_oss", "sinks", {}),
        ],
    )
    def test_a_dropped_argument_fails_the_probe(self, build, monkeypatch, family, lost, settings, dtype):
        """Negative control: an attention that drops a cap, a window or sinks does not load."""
        model = build(family, **settings).to(dtype)
        Target(model)

        class Forgetful(DenseCausal):
            def _document(self, call, length):
                return super()._document(dataclasses.replace(call, **{lost: None}), length)

        monkeypatch.setattr(eagle3.target, "DenseCausal", Forgetful)
        with pytest.raises(UnsupportedTargetError, match="differ from the model's own"):
            Target(model)


class TestStock:
    def test_generate_in_stock_equals_the_seam(self, build, document):
        """Catches: stock() that leaves the seam in place, or that is not undone."""
        target, (ids, _) = Target(build("qwen3")), document(8)
        with target.stock() as model:
            tokens = model.generate(ids[None], max_new_tokens=10, do_sample=False)[0]
        ours = ids
        for _ in range(10):
            ours = torch.cat([ours, seam_logits(target, ours)[-1:].argmax(-1)])
        assert torch.equal(tokens, ours)

    def test_stock_is_left_after_an_error(self, build, document):
        """Catches: a failed generate after which every seam forward uses HF's attention (and no context)."""
        target, (ids, _) = Target(build("llama")), document(8)
        with pytest.raises(ValueError, match="stop"), target.stock():
            raise ValueError("stop")
        assert target.text_config._attn_implementation == SEAM
        seam_logits(target, ids)

    def test_generate_outside_stock_says_so(self, build, document):
        """Catches: a stray generate() that writes into the last context, or fails without a hint."""
        target, (ids, _) = Target(build("llama")), document(8)
        with pytest.raises(RuntimeError, match=r"Target\.stock\(\)"):
            target.model.generate(ids[None], max_new_tokens=2, do_sample=False)

    def test_a_model_wrapped_twice_keeps_a_stock_attention(self, build, document):
        """Catches: the seam taken for the model's own attention because another Target set it."""
        model, (ids, _) = build("llama"), document(8)
        Target(model)
        with Target(model).stock():
            model.generate(ids[None], max_new_tokens=2, do_sample=False)


def refused(build_model) -> str:
    """The message of the refusal; the model is left as it was."""
    model = build_model()
    before = model.config.get_text_config(decoder=True)._attn_implementation
    with pytest.raises(UnsupportedTargetError) as error:
        Target(model)
    assert model.config.get_text_config(decoder=True)._attn_implementation == before
    return str(error.value)


def make(name: str, config: str, **settings):
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "pad_token_id": None,
    }
    return lambda: getattr(transformers, name)(getattr(transformers, config)(**{**sizes, **settings})).eval()


class TestRefusals:
    @pytest.mark.parametrize(
        "model, kind",
        [
            (
                make(
                    "Qwen3NextForCausalLM",
                    "Qwen3NextConfig",
                    head_dim=16,
                    num_experts=4,
                    num_experts_per_tok=2,
                    moe_intermediate_size=32,
                    shared_expert_intermediate_size=32,
                    linear_num_value_heads=4,
                    linear_num_key_heads=2,
                    linear_key_head_dim=16,
                    linear_value_head_dim=16,
                ),
                r"layer types \['linear_attention'\]",
            ),
            (
                make(
                    "Llama4ForCausalLM",
                    "Llama4TextConfig",
                    head_dim=16,
                    intermediate_size_mlp=96,
                    num_local_experts=2,
                    attention_chunk_size=8,
                ),
                r"layer types \['chunked_attention'\]",
            ),
            (
                make(
                    "FalconH1ForCausalLM",
                    "FalconH1Config",
                    mamba_d_ssm=64,
                    mamba_n_heads=4,
                    mamba_d_head=16,
                    mamba_d_state=16,
                ),
                "recurrent state .*FalconH1Attention, FalconH1MLP, FalconH1Mixer",
            ),
            (
                make(
                    "JambaForCausalLM",
                    "JambaConfig",
                    num_experts=2,
                    num_experts_per_tok=1,
                    mamba_d_state=8,
                    mamba_dt_rank=8,
                    attn_layer_period=2,
                    attn_layer_offset=1,
                    use_mamba_kernels=False,
                ),
                "recurrent state .*JambaMambaMixer",
            ),
            (make("MambaForCausalLM", "MambaConfig", state_size=8), r"recurrent state \(its layers hold MambaMixer\)"),
            (
                make("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", num_key_value_heads=1, head_dim=16),
                "recurrent state .*RecurrentGemmaRecurrentBlock",
            ),
            (make("RwkvForCausalLM", "RwkvConfig", attention_hidden_size=64), "recurrent state .*RwkvSelfAttention"),
            (make("Lfm2ForCausalLM", "Lfm2Config", full_attn_idxs=[1, 3]), r"layer types \['conv'\]"),
            (make("BloomForCausalLM", "BloomConfig", n_layer=2, n_head=4), "of its own with ALiBi"),
            (make("FalconForCausalLM", "FalconConfig", alibi=True), "of its own with ALiBi"),
            (make("FalconForCausalLM", "FalconConfig", alibi=False), "of its own, which ignore"),
            (make("MptForCausalLM", "MptConfig", d_model=64, n_heads=4, n_layers=2), "of its own with ALiBi"),
            (
                make("MptForCausalLM", "MptConfig", d_model=64, n_heads=4, n_layers=2, attn_config={"alibi": False}),
                "of its own, which ignore",
            ),
            (
                make("GPTJForCausalLM", "GPTJConfig", n_embd=64, n_layer=2, n_head=4, rotary_dim=8),
                "attention classes of its own, which ignore transformers' AttentionInterface",
            ),
            (
                make(
                    "PhimoeForCausalLM",
                    "PhimoeConfig",
                    sliding_window=12,
                    num_local_experts=2,
                    num_experts_per_tok=2,
                ),
                "window is in the mask only",
            ),
            (make("DiffLlamaForCausalLM", "DiffLlamaConfig"), "attends twice"),
            (make("DogeForCausalLM", "DogeConfig"), "own mask: True"),
        ],
        ids=[
            *("qwen3_next", "llama4", "falcon_h1", "jamba", "mamba", "recurrent_gemma", "rwkv", "lfm2", "bloom"),
            *("falcon alibi", "falcon", "mpt alibi", "mpt", "gptj", "phimoe", "diffllama", "doge"),
        ],
    )
    def test_kind_is_named(self, model, kind):
        """Catches: a model that runs through the seam and is silently wrong on trees or after a chunk's end."""
        assert re.search(kind, refused(model))

    def test_no_lm_head(self, build):
        """Catches: a bare encoder or decoder without logits."""
        model = build("llama")
        model.set_output_embeddings(None)
        model.get_output_embeddings = lambda: None
        with pytest.raises(UnsupportedTargetError, match="no lm_head"):
            Target(model)

    def test_overflow_names_the_dtype(self, build):
        """Catches: NaN logits of fp16 compared with NaN logits."""
        model = build("llama", tie_word_embeddings=False)
        with torch.no_grad():
            model.lm_head.weight *= 1e5
        with pytest.raises(UnsupportedTargetError, match=r"not finite in torch\.float16"):
            Target(model.half())


class TestTokens:
    def test_every_eos_is_kept(self, build):
        """Catches: a second end-of-turn id of the generation config being ignored."""
        model = build("llama", eos_token_id=7)
        model.generation_config.eos_token_id = [9, 7, 11]
        target = Target(model, tiny_tokenizer())
        assert target.eos_ids == (7, 9, 11, target.tokenizer.eos_token_id)
        assert Target(build("llama")).eos_ids == ()

    @pytest.mark.parametrize("named", ["x", [3, None], 2.0])
    def test_eos_that_is_no_id(self, build, named):
        model = build("llama")
        model.generation_config.eos_token_id = named
        with pytest.raises(ConfigError, match="eos_token_id holds"):
            eos_ids(model.config, model.generation_config)

    def test_eos_ids_need_no_model(self, build):
        """Catches: data tools with another rule for what ends a reply than the target's."""
        model, tokenizer = build("llama", eos_token_id=[7, 3]), tiny_tokenizer()
        assert eos_ids(model.config) == (3, 7)
        target = Target(model, tokenizer)
        assert eos_ids(model.config, model.generation_config, tokenizer) == target.eos_ids

    @pytest.mark.parametrize("rows, usable", [(300, 259), (200, 200)])
    def test_usable_vocab(self, build, rows, usable):
        """Catches: rows of a padded lm_head past the tokenizer being proposed or drawn by the probe."""
        target = Target(build("llama", vocab_size=rows), tiny_tokenizer())
        assert (target.usable_vocab, target.vocab_size, len(target.tokenizer)) == (usable, rows, 259)
        assert Target(build("llama", vocab_size=rows)).usable_vocab == rows


class TestLoad:
    @pytest.mark.parametrize("shard", ["1GB", "60KB"], ids=["single", "sharded"])
    @pytest.mark.parametrize("family, tied", TIED)
    def test_load_equals_memory(self, build, document, tmp_path, family, tied, shard):
        """Catches: tied targets (no lm_head.weight on disk), sharded ones, small ones without an index."""
        model, (ids, _) = build(family, tie_word_embeddings=tied), document(30)
        stock = eager_logits(model, ids)
        model.save_pretrained(tmp_path, max_shard_size=shard)
        files = list(tmp_path.glob("*.safetensors"))
        assert (len(files) > 1) == (tmp_path / "model.safetensors.index.json").exists() == (shard == "60KB")
        assert any("lm_head.weight" in load_file(f) for f in files) != tied
        assert_equal_logits(seam_logits(Target.load(tmp_path, tokenizer=False), ids), stock)

    def test_load_with_tokenizer(self, tmp_path):
        """Catches: tokenizer, end-of-turn id or path lost on loading."""
        target = Target.load(tiny_folder(tmp_path))
        assert target.eos_ids == (target.tokenizer.eos_token_id,)
        assert target.usable_vocab == len(target.tokenizer) < target.vocab_size
        assert target.path == str(tmp_path)

    @pytest.mark.parametrize("name, dtype", [("auto", torch.bfloat16), ("float32", torch.float32)])
    def test_dtype(self, build, tmp_path, name, dtype):
        """Catches: "auto" that is not the checkpoint's dtype."""
        build("llama").bfloat16().save_pretrained(tmp_path)
        assert Target.load(tmp_path, name, tokenizer=False).dtype == dtype

    def test_fingerprint(self, build, tmp_path):
        """Catches: a head's target that is another fine-tune, or the same one in another dtype."""
        build("llama").save_pretrained(tmp_path / "a")
        build("llama", seed=1).save_pretrained(tmp_path / "b")
        prints = [
            Target.load(tmp_path / folder, dtype, tokenizer=False).fingerprint
            for folder, dtype in (("a", "float32"), ("a", "bfloat16"), ("b", "float32"))
        ]
        assert prints[0] == prints[1] != prints[2]

    @pytest.mark.parametrize(
        "family, settings, limit",
        [
            ("phi3", {}, 512),
            ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, 512),
            (
                "phi3",
                {
                    "original_max_position_embeddings": 64,
                    "rope_parameters": {
                        "rope_type": "longrope",
                        "rope_theta": 1e4,
                        "short_factor": [1.0] * 8,
                        "long_factor": [4.0] * 8,
                    },
                },
                64,
            ),
        ],
        ids=["default", "dynamic", "longrope"],
    )
    def test_positions_end_where_rope_switches(self, build, family, settings, limit):
        """Catches: rows long enough to change the angles of every other row of the batch."""
        assert Target(build(family, **settings)).max_positions == limit


class TestLoadErrors:
    @pytest.fixture
    def folder(self, tmp_path) -> Path:
        return tiny_folder(tmp_path / "model")

    def test_paths(self, folder, tmp_path):
        """Catches: a typo in a path asking the hub, or ending in a traceback."""
        for path, words in [
            (tmp_path / "nowhere", "does not exist"),
            ("./nowhere", "does not exist"),
            ("a/b/c", "does not exist"),
            (folder / "config.json", "is a file"),
            (tmp_path, "has no config.json"),
        ]:
            with pytest.raises(ConfigError, match=words):
                Target.load(path)

    @pytest.mark.parametrize(
        "settings, words",
        [
            ({"dtype": "int4"}, "dtype 'int4' is unknown"),
            ({"device": "abacus"}, "device 'abacus' is unknown"),
            ({"device": "cuda:7"}, "torch sees . CUDA GPUs"),
        ],
    )
    def test_settings(self, folder, settings, words):
        """Catches: torch's own errors reaching the user."""
        with pytest.raises(ConfigError, match=words):
            Target.load(folder, **settings)

    @pytest.mark.parametrize(
        "content",
        [
            "{",
            '{"model_type": "abacus"}',
            "{}",
            '{"model_type": "llama", "hidden_size": "wide"}',
            '{"model_type": "llama", "hidden_size": 60, "num_attention_heads": 7}',
            '{"model_type": "llama", "rope_parameters": {"rope_type": "abacus", "rope_theta": 1.0}}',
        ],
    )
    def test_broken_config(self, folder, content):
        """Catches: errors of many lines, or of a type that scripts do not print as one line."""
        (folder / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=r"cannot be loaded: \S") as error:
            Target.load(folder)
        assert "\n" not in str(error.value)

    def test_missing_weight(self, folder):
        """Catches: a weight that is not in the file and stays random, with only a warning."""
        state = load_file(folder / "model.safetensors")
        del state["model.layers.3.mlp.up_proj.weight"]
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=r"lacks 1 weights.*layers\.3\.mlp\.up_proj"):
            Target.load(folder)

    def test_misshaped_weight(self, folder):
        """Catches: the same with a weight of another shape."""
        state = load_file(folder / "model.safetensors")
        state["model.norm.weight"] = torch.ones(65)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match="cannot be loaded"):
            Target.load(folder)

    @pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
    def test_broken_or_missing_file(self, folder, name):
        """Catches: truncated downloads."""
        (folder / name).write_bytes((folder / name).read_bytes()[:100])
        with pytest.raises(ConfigError, match="cannot be loaded"):
            Target.load(folder)
        (folder / name).unlink()
        with pytest.raises(ConfigError, match="cannot be loaded"):
            Target.load(folder)

    def test_missing_shard(self, build, tmp_path):
        """Catches: an index that names a file which is not there."""
        build("llama").save_pretrained(tmp_path, max_shard_size="60KB")
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        (tmp_path / index["weight_map"]["model.norm.weight"]).unlink()
        with pytest.raises(ConfigError, match="cannot be loaded"):
            Target.load(tmp_path, tokenizer=False)
