"""Rotary tables: a head turns by the target's own angles, for every rope type, and knows where they switch."""

import pytest
import torch

from eagle3.config import HeadOptions
from eagle3.errors import ConfigError, UnsupportedTargetError
from eagle3.heads.eagle3 import Eagle3Head, head_config
from eagle3.rope import RopeSpec, check_against_target, cos_sin, position_limit, rotate, target_rope
from eagle3.target import Target
from eagle3.vocab import identity_map

pytestmark = pytest.mark.filterwarnings("ignore:the target's config has no rms_norm_eps")

LINEAR = {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 5e5, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [4.0] * 8,
}
DEFAULT = {"rope_type": "default", "rope_theta": 5e5}
CASES = {
    "default": ("llama", {"rope_parameters": DEFAULT}),
    "own head_dim": ("qwen3", {"rope_parameters": DEFAULT}),
    "linear": ("llama", {"rope_parameters": LINEAR}),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("qwen3", {"rope_parameters": YARN}),
    "longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "partial": ("gpt_neox", {}),
    "partial, half": ("nemotron", {}),
    "partial yarn": ("stablelm", {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}),
    "nested": ("gemma3", {}),
    "nested, scaled": (
        "gemma3",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            }
        },
    ),
}


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def target(request, build) -> Target:
    family, settings = request.param
    return Target(build(family, **settings))


def target_head(target: Target, **options) -> Eagle3Head:
    return Eagle3Head.for_target(
        target, identity_map(target.vocab_size), HeadOptions(capture_layers=(0, 2), draft_vocab_size=None, **options)
    )


def stock_tables(target: Target, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, rotary_dim] that the target's own rotary module computes."""
    owner = next(m for m in target.model.modules() if hasattr(m, "rotary_emb"))
    kind = {"layer_type": "full_attention"} if "full_attention" in target.text_config.rope_parameters else {}
    cos, sin = owner.rotary_emb(torch.zeros(1, 1), positions[None], **kind)
    return cos[0], sin[0]


def test_tables_equal_the_targets(target):
    """Catches: theta, factor, partial width or attention scaling lost between the target's config and the head."""
    head, positions = target_head(target), torch.tensor([0, 1, 7, 47, target.max_positions - 1])
    cos, sin = cos_sin(head.inv_freq, head.rope_scaling, positions, torch.float32)
    stock_cos, stock_sin = stock_tables(target, positions)
    torch.testing.assert_close(cos, stock_cos, rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, stock_sin, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_neox"])
@pytest.mark.parametrize("wrong", ["theta", "scaling"])
def test_wrong_tables_are_detected(build, family, wrong):
    """Negative control: `getattr(config, "rope_theta", 10000)` on transformers 5, or cos and sin left unscaled."""
    target = Target(build(family, **({} if family == "gemma3" else {"rope_parameters": DEFAULT})))
    spec = target_rope(target.text_config, target_head(target).config.head_dim)
    inv_freq, scaling = spec.tables()
    check_against_target(target.model, inv_freq, scaling)
    if wrong == "theta":
        inv_freq, _ = RopeSpec({**spec.parameters, "rope_theta": 1e4}, spec.head_dim, spec.max_positions).tables()
    else:
        scaling = 1.2
    with pytest.raises(UnsupportedTargetError, match=r"rotary tables .*inv_freq"):
        check_against_target(target.model, inv_freq, scaling)


def test_another_width_cannot_be_compared(build):
    """Catches: a refusal of heads whose head_dim is not the target's."""
    target = Target(build("llama", rope_parameters=DEFAULT))
    assert target_head(target, head_dim=32).inv_freq.shape == (16,)


def test_a_target_without_rope_gets_the_default(build):
    """Catches: GPT-2 and other learned positions, which have no theta to copy; a default taken without a word."""
    with pytest.warns(UserWarning, match="no rotary positions.*theta 10000"):
        head = target_head(Target(build("gpt2")))
    torch.testing.assert_close(head.inv_freq, 1e4 ** (-torch.arange(8) / 8))
    assert head.rope_scaling == 1.0


def test_angles_that_the_config_does_not_tell_raise(build):
    """Catches: theta 10000 for a model that turns by tables of its own."""
    target = Target(build("llama", rope_parameters=DEFAULT))
    target.text_config.rope_parameters = None
    with pytest.raises(UnsupportedTargetError, match="has no rope_parameters"):
        target_head(target, head_dim=32)


def test_a_loaded_head_of_other_angles_warns(build):
    """Catches: a head of another theta, or of a target whose rope was changed since, taken in silence."""
    target, other = (Target(build("llama", rope_parameters={**DEFAULT, "rope_theta": t})) for t in (5e5, 1e4))
    target_head(target).check_target(target)
    with pytest.warns(UserWarning, match=r"turns by other angles .*500000"):
        target_head(target).check_target(other)


def test_unknown_type_raises():
    """Catches: a rope type of a newer release computed as plain rope."""
    with pytest.raises(ConfigError, match=r"rope_type 'abacus' is unknown; known: .*llama3"):
        RopeSpec({"rope_type": "abacus", "rope_theta": 1e4}, 16, 512).tables()


@pytest.mark.parametrize("parameters", [{}, {"rope_type": "default"}, {"rope_type": "linear", "rope_theta": 1e4}])
def test_missing_parameters_raise(parameters):
    """Catches: a missing theta or factor taken as a default, or ending in a KeyError."""
    with pytest.raises(ConfigError, match="rope parameters"):
        RopeSpec(parameters, 16, 512).tables()


def test_longrope_of_another_head_dim_raises(build):
    """Catches: torch's shape error where the factors belong to another head_dim."""
    target = Target(build("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64))
    with pytest.raises(ConfigError, match=r"set head\.head_dim"):
        target_head(target, head_dim=32)


def test_layer_types_without_full_attention_raise(build):
    """Catches: the sliding layers' theta used for a head that sees everything."""
    config = build("gemma3").config
    config.rope_parameters = {"sliding_attention": DEFAULT}
    with pytest.raises(UnsupportedTargetError, match="without full_attention"):
        target_rope(config, 16)


@pytest.mark.parametrize(
    "case, limit",
    [("default", 512), ("linear", 512), ("yarn", 512), ("dynamic", 512), ("longrope", 64), ("nested", 512)],
)
def test_position_limit(build, case, limit):
    """Catches: rows past the point where longrope or dynamic NTK would change every row's angles."""
    family, settings = CASES[case]
    assert position_limit(build(family, **settings).config) == limit


def test_rotate_is_the_papers_rotation():
    """Catches: interleaved pairs, a sign, or rotating what lies past the rotary width."""
    x = torch.randn(3, 2, 6)
    angle = torch.tensor([[0.3, 1.1], [2.0, -0.4]])
    cos, sin = (torch.cat((f(angle), f(angle)), -1) for f in (torch.cos, torch.sin))
    out = rotate(x, cos, sin)
    pairs = torch.complex(x[..., :2], x[..., 2:4]) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(out, torch.cat((pairs.real, pairs.imag, x[..., 4:]), -1))


def test_scores_depend_on_distance_only():
    """Catches: angles that are not linear in the position."""
    inv_freq, scaling = RopeSpec(DEFAULT, 16, 512).tables()
    query, key = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(q_position: int, k_position: int) -> torch.Tensor:
        turned = [
            rotate(x, *cos_sin(inv_freq, scaling, torch.tensor([p]), torch.float32))
            for x, p in ((query, q_position), (key, k_position))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(9, 4), score(305, 300), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_table_stays_exact_in_half_precision(build, dtype):
    """Catches: frequencies rounded by head.to(bfloat16): angles off by 0.4 %, 1.9 rad at position 500."""
    head = target_head(Target(build("llama", rope_parameters=DEFAULT)))
    exact = head.inv_freq.clone()
    for cast in (head.to(dtype), head.half(), head.to("cpu", dtype)):
        assert cast.fc.weight.dtype in (dtype, torch.float16)
        assert torch.equal(cast.inv_freq, exact)
    assert head.to("meta").inv_freq.device.type == "meta"


def test_half_precision_target_is_comparable(build):
    """Catches: a model cast as a whole, whose rounded frequencies would be called foreign."""
    target = Target(build("llama", rope_parameters=DEFAULT).bfloat16())
    target_head(target).to(torch.bfloat16).check_target(target)


def test_the_config_keeps_the_targets_parameters(build):
    """Catches: rope parameters that do not survive in the head's config."""
    target = Target(build("llama", rope_parameters=LLAMA3))
    config = head_config(target, 300, HeadOptions(capture_layers=(0,)))
    assert config.rope_parameters == LLAMA3
    assert config.max_position_embeddings == 512
