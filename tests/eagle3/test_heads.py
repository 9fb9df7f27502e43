"""The EAGLE-3 head against its formula, written down once more; what it takes from the target, what it refuses."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.attention import AttentionCall, DenseCausal
from eagle3.config import HeadConfig, HeadOptions
from eagle3.errors import CheckpointError, ConfigError
from eagle3.heads.eagle3 import Eagle3Head, head_config
from eagle3.heads.protocol import DraftHead
from eagle3.target import Target
from eagle3.vocab import VocabMap, build_vocab_map, identity_map

OPTIONS = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True},
    "fc_norm": {"fc_norm": True},
    "qk_norm": {"qk_norm": True},
    "attention_bias": {"attention_bias": True},
    "two layers": {"num_layers": 2},
    "window": {"sliding_window": 5},
    "own heads": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 20, "intermediate_size": 40},
    "one feature": {"capture_layers": (3,)},
    "four features": {"capture_layers": (0, 1, 2, 3)},
    "other width": {"hidden_size": 32},
    "everything": {
        "norm_before_residual": True,
        "norm_output": True,
        "fc_norm": True,
        "qk_norm": True,
        "attention_bias": True,
        "num_layers": 3,
        "sliding_window": 4,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "head_dim": 24,
    },
}


@pytest.fixture(scope="module")
def target(build) -> Target:
    return Target(build("llama", tie_word_embeddings=False))


@pytest.fixture(scope="module")
def vocab_map() -> VocabMap:
    counts = torch.randint(1, 99, (300,), generator=torch.Generator().manual_seed(0))
    return build_vocab_map(counts, 100, [5], 300)


def make_head(target: Target, vocab_map: VocabMap, **options) -> Eagle3Head:
    """A head whose every weight, norms and biases too, is moved off its default."""
    head = Eagle3Head.for_target(target, vocab_map, HeadOptions(**{"capture_layers": (0, 2), **options}))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=draw)
    return head


class Formula:
    """DESIGN section 4 over a document of S rows, in float64, from the state dict."""

    def __init__(self, head: Eagle3Head):
        self.w = {name: x.double() for name, x in head.state_dict().items()}
        self.c = head.config

    def start(self, feature: Tensor) -> Tensor:
        if self.c.fc_norm:
            parts = feature.split(self.c.target_hidden_size, -1)
            feature = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], -1)
        return feature @ self.w["fc.weight"].T

    def step(self, h: Tensor, embeds: Tensor, positions: Tensor) -> Tensor:
        normed = self.norm("midlayer.hidden_norm", h)
        x = torch.cat([self.norm("midlayer.input_layernorm", embeds), normed], -1)
        h = self.layer("midlayer", normed if self.c.norm_before_residual else h, x, positions)
        for i in range(1, self.c.num_layers):
            h = self.layer(f"layers.{i}", h, self.norm(f"layers.{i}.input_layernorm", h), positions)
        return self.norm("norm", h) if self.c.norm_output else h

    def logits(self, h: Tensor) -> Tensor:
        return (h if self.c.norm_output else self.norm("norm", h)) @ self.w["lm_head.weight"].T

    def layer(self, name: str, residual: Tensor, x: Tensor, positions: Tensor) -> Tensor:
        h = residual + self.attention(f"{name}.self_attn", x, positions)
        y = self.norm(f"{name}.post_attention_layernorm", h)
        gate, up = y @ self.w[f"{name}.mlp.gate_proj.weight"].T, y @ self.w[f"{name}.mlp.up_proj.weight"].T
        return h + (gate * torch.sigmoid(gate) * up) @ self.w[f"{name}.mlp.down_proj.weight"].T

    def attention(self, name: str, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (self.heads(f"{name}.{part}_proj", x) for part in "qkv")
        if self.c.qk_norm:
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        q, k = self.turn(q, positions), self.turn(k, positions)
        groups = self.c.num_attention_heads // self.c.num_key_value_heads
        k, v = (z.repeat_interleave(groups, 1) for z in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(self.c.head_dim)
        distance = positions[:, None] - positions
        hidden = (distance < 0) | (distance >= (self.c.sliding_window or len(x)))
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return torch.einsum("hij,jhd->ihd", weights, v).flatten(1) @ self.w[f"{name}.o_proj.weight"].T

    def heads(self, name: str, x: Tensor) -> Tensor:
        return (x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0)).unflatten(-1, (-1, self.c.head_dim))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.c.rms_norm_eps).rsqrt() * self.w[f"{name}.weight"]

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.c.head_dim // 2
        angles = positions[:, None] * self.c.rope_parameters["rope_theta"] ** (-torch.arange(half).double() / half)
        pairs = torch.complex(x[..., :half], x[..., half:])
        turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat([turned.real, turned.imag], -1)


@torch.no_grad()
def two_steps(head: Eagle3Head, feature: Tensor, embeds: Tensor, positions: Tensor) -> list[Tensor]:
    h = head.start(feature)
    first = head.step(h, embeds, positions, DenseCausal([len(h)]))
    second = head.step(first, embeds.flip(0), positions + 1, DenseCausal([len(h)]))
    return [h, first, head.logits(first), second, head.logits(second)]


class TestFormula:
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
    def test_two_steps(self, target, vocab_map, options):
        """Catches: concat order, a normed residual, a post-norm h fed on, lost options, another window or angle."""
        head = make_head(target, vocab_map, **options)
        draw, positions = torch.Generator().manual_seed(2), torch.arange(3, 14)
        feature = torch.randn(11, head.config.feature_size, generator=draw)
        embeds = torch.randn(11, head.config.hidden_size, generator=draw)
        formula = Formula(head)
        h = formula.start(feature.double())
        first = formula.step(h, embeds.double(), positions)
        second = formula.step(first, embeds.flip(0).double(), positions + 1)
        wanted = [h, first, formula.logits(first), second, formula.logits(second)]
        for ours, theirs in zip(two_steps(head, feature, embeds, positions), wanted, strict=True):
            assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()

    @pytest.mark.parametrize("name", ["norm_before_residual", "norm_output", "window"])
    def test_options_without_weights_matter(self, target, vocab_map, name):
        """Negative control: the same weights with the option dropped give something else."""
        head, plain = make_head(target, vocab_map, **OPTIONS[name]), make_head(target, vocab_map)
        plain.load_state_dict(head.state_dict())
        feature, embeds = torch.randn(11, 128), torch.randn(11, 64)
        ours, without = (two_steps(x, feature, embeds, torch.arange(11))[-1] for x in (head, plain))
        assert (ours - without).abs().max() > 0.05

    @pytest.mark.parametrize("options", ["plain", "two layers", "everything"])
    def test_query_rows_are_a_subset(self, target, vocab_map, options):
        """Catches: queries, residual or angles of other rows than those asked for; keys of asked rows only."""
        head = make_head(target, vocab_map, **OPTIONS[options])
        rows, positions = torch.tensor([10, 2, 7]), torch.arange(11)
        h, embeds = torch.randn(11, head.config.hidden_size), torch.randn(11, head.config.hidden_size)

        class Causal:
            def attend(self, call: AttentionCall) -> Tensor:
                asked = positions if call.query_rows is None else positions[call.query_rows]
                distance = asked[:, None] - positions
                visible = (distance >= 0) & (distance < (call.window or 11))
                out = F.scaled_dot_product_attention(
                    call.query[None], call.key[None], call.value[None], visible, scale=call.scaling, enable_gqa=True
                )
                return out[0].transpose(0, 1)

        with torch.no_grad():
            some = head.step(h, embeds, positions, Causal(), rows)
            torch.testing.assert_close(some, head.step(h, embeds, positions, Causal())[rows], rtol=1e-5, atol=1e-5)

    def test_every_weight_learns(self, target, vocab_map):
        """Catches: a weight outside the graph, a frozen or half-precision parameter."""
        head = make_head(target, vocab_map, **OPTIONS["everything"])
        ids = torch.arange(11)
        h = head.start(torch.randn(11, head.config.feature_size))
        h = head.step(h, head.embed(ids, target), ids, DenseCausal([11]))
        head.logits(h).logsumexp(-1).sum().backward()
        assert {x.dtype for x in head.parameters()} == {torch.float32}
        assert [name for name, x in head.named_parameters() if x.grad is None or not x.grad.any()] == []

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, target, vocab_map, dtype):
        """Catches: fp32 embeddings or features that do not meet half-precision weights."""
        head = make_head(target, vocab_map)
        feature, embeds, positions = torch.randn(11, 128), torch.randn(11, 64), torch.arange(200, 211)
        exact = two_steps(head, feature, embeds, positions)[-1]
        rounded = two_steps(head.to(dtype), feature, embeds, positions)[-1]
        assert rounded.dtype == dtype
        assert (rounded.float() - exact).abs().max() < 0.1 * exact.abs().max()


def multiplier(target: Target) -> Tensor:
    """What the target's final norm multiplies by."""
    weight = target.model.model.norm.weight
    return 1 + weight if "gemma" in target.model.config.model_type else weight


class TestFromTarget:
    @pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "phi3"])
    @pytest.mark.parametrize("tied", [True, False])
    def test_starts_as_the_targets_lm_head_and_norm(self, build, vocab_map, family, tied):
        """Catches: Gemma's norm weight without its 1 +, rows of other tokens, weights shared with the target."""
        target = Target(build(family, tie_word_embeddings=tied))
        head = Eagle3Head.for_target(target, vocab_map, HeadOptions(capture_layers=(0,)))
        assert torch.equal(head.lm_head.weight, target.lm_head.weight[vocab_map.target_ids])
        torch.testing.assert_close(head.norm.weight, multiplier(target), rtol=1e-4, atol=1e-5)
        before = target.lm_head.weight.clone()
        with torch.no_grad():
            head.lm_head.weight.zero_()
        assert torch.equal(target.lm_head.weight, before)

    @pytest.mark.parametrize("family", ["gpt2", "cohere2", "gpt_neox", "nemotron"])
    def test_other_norms_start_at_one(self, build, vocab_map, family):
        """Catches: a LayerNorm's weight taken for an RMSNorm's."""
        with pytest.warns(UserWarning, match="no rms_norm_eps; the head takes 1e-05"):
            head = Eagle3Head.for_target(Target(build(family)), vocab_map, HeadOptions(capture_layers=(0,)))
        assert torch.equal(head.norm.weight, torch.ones(64))

    def test_embedding_is_the_targets(self, build, vocab_map):
        """Catches: the target's embedding registered, trained or saved with the head; Gemma's scale lost."""
        target = Target(build("gemma2"))
        head = Eagle3Head.for_target(target, vocab_map, HeadOptions(capture_layers=(0,)))
        ids = torch.tensor([3, 250])
        assert torch.equal(head.embed(ids, target), target.embed(ids))
        assert not [name for name in head.state_dict() if "embed" in name]
        owned = {x.data_ptr() for x in target.model.parameters()}
        assert not owned & {x.data_ptr() for x in head.parameters()}

    def test_another_width_owns_its_embedding(self, target, vocab_map):
        """Catches: a narrow head that reads the target's wide embedding, or does not train or save its own."""
        head = Eagle3Head.for_target(target, vocab_map, HeadOptions(capture_layers=(0,), hidden_size=32))
        assert head.state_dict()["embed_tokens.weight"].shape == (300, 32)
        assert head.embed_tokens.weight.requires_grad
        assert head.embed(torch.tensor([7]), target).shape == (1, 32)
        assert head.config.head_dim == 8

    def test_sizes_come_from_the_target(self, build):
        """Catches: head_dim taken as hidden / heads (Qwen3), KV heads as heads, options that do not win."""
        target = Target(build("qwen3"))
        config = head_config(target, 100, HeadOptions(capture_layers=(2, 0)))
        assert (config.head_dim, config.num_attention_heads, config.num_key_value_heads) == (32, 4, 2)
        assert (config.intermediate_size, config.capture_layers) == (96, (0, 2))
        assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-6, 512)
        assert config.target_fingerprint == target.fingerprint
        chosen = head_config(target, 100, HeadOptions(capture_layers=(0,), head_dim=16, num_key_value_heads=1))
        assert (chosen.head_dim, chosen.num_key_value_heads) == (16, 1)

    def test_default_layers(self, build, target, vocab_map):
        """Catches: defaults that collide on a shallow target; an empty list taken for "default"."""
        deep = Target(build("llama", num_hidden_layers=8))
        assert Eagle3Head.for_target(deep, vocab_map).capture_layers == (1, 3, 4)
        with pytest.raises(ConfigError, match=r"4 layers.*head\.capture_layers"):
            Eagle3Head.for_target(target, vocab_map)
        with pytest.raises(ConfigError, match="capture_layers is empty"):
            Eagle3Head.for_target(deep, vocab_map, HeadOptions(capture_layers=()))

    def test_heads_that_do_not_divide(self, target):
        """Catches: 4 heads over 3 KV heads failing in the first forward."""
        with pytest.raises(ConfigError, match="4 attention heads are not a multiple of 3"):
            head_config(target, 100, HeadOptions(capture_layers=(0,), num_key_value_heads=3))

    def test_seed(self, target, vocab_map):
        """Catches: a head that depends on, or disturbs, the run's random state."""
        options, state = HeadOptions(capture_layers=(0,)), torch.get_rng_state()
        one, same, other = (Eagle3Head.for_target(target, vocab_map, options, seed) for seed in (1, 1, 2))
        assert torch.equal(one.fc.weight, same.fc.weight)
        assert not torch.equal(one.fc.weight, other.fc.weight)
        assert torch.equal(torch.get_rng_state(), state)

    def test_map_of_another_size(self, target, vocab_map):
        """Catches: d2t of another draft vocabulary."""
        config = head_config(target, 99, HeadOptions(capture_layers=(0,)))
        with pytest.raises(ConfigError, match="vocab map of 100 draft and 300 target tokens"):
            Eagle3Head(config, vocab_map)

    def test_protocol(self, target, vocab_map):
        """Catches: attributes that the runtime relies on; draft ids taken for target ids."""
        head = make_head(target, vocab_map, num_layers=2)
        drafts: DraftHead = head
        assert (drafts.num_layers, drafts.draft_vocab_size, drafts.capture_layers) == (2, 100, (0, 2))
        assert drafts.feature_size == 128
        assert torch.equal(head.to_target(torch.arange(100)), vocab_map.t2d.nonzero().flatten())


class TestCheckTarget:
    @pytest.mark.parametrize(
        "change, words",
        [
            ({"hidden_size": 96, "head_dim": 16}, "hidden size 64; .* has 96"),
            ({"vocab_size": 320}, "vocabulary 300; .* has 320"),
            ({"num_hidden_layers": 2}, r"reads layers \[0, 2\]; .* has 2 layers"),
        ],
    )
    def test_another_target_is_refused(self, build, target, vocab_map, change, words):
        """Catches: a head run on a target of another size: shape errors, or features of the wrong layers."""
        with pytest.raises(CheckpointError, match=words):
            make_head(target, vocab_map).check_target(Target(build("llama", **change)))

    def test_other_weights_warn(self, build, target, vocab_map):
        """Catches: a head for another fine-tune, which runs at tau 1.0 without a word."""
        with pytest.warns(UserWarning, match="other weights"):
            make_head(target, vocab_map).check_target(Target(build("llama", seed=9)))

    def test_the_right_target_passes_in_silence(self, target, vocab_map):
        """Catches: warnings that users learn to ignore."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            make_head(target, vocab_map).check_target(target)
            unknown = make_head(target, vocab_map)
            unknown.config = replace(unknown.config, target_fingerprint=None)
            unknown.check_target(target)


def test_whole_vocabulary(target):
    """Catches: identity maps that are treated as reduced."""
    head = make_head(target, identity_map(300))
    assert isinstance(head.config, HeadConfig)
    assert torch.equal(head.to_target(torch.arange(300)), torch.arange(300))
