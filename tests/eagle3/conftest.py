"""Tiny random models of many families, none of whose parameters sits at its neutral default."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOW = {"sliding_window": 12}
# family -> (model class, config class, what differs)
ZOO: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "mistral": ("MistralForCausalLM", "MistralConfig", WINDOW),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 32}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {"head_dim": 16, **WINDOW}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", WINDOW),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"head_dim": 16, **WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {"embedding_multiplier": 6.0, "logits_scaling": 4.0}),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config", WINDOW),
    # these two drop the keyword that carries the context
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", {}),
    "nemotron": ("NemotronForCausalLM", "NemotronConfig", {}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {"rotary_pct": 0.25}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {}),
    # lm_head with a bias
    "phi": ("PhiForCausalLM", "PhiConfig", {}),
    # keys and values of different widths
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 3,
        },
    ),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {"head_dim": 16, **WINDOW, "num_local_experts": 4}),
}


@pytest.fixture(scope="session")
def build() -> Callable[..., Any]:
    """build(family, seed=0, **changes): a random fp32 model; every norm, bias and sink is moved off its default."""
    transformers.utils.logging.set_verbosity_error()

    def make(family: str, seed: int = 0, **changes: Any) -> Any:
        model_class, config_class, own = ZOO[family]
        # transformers writes into the dicts that it is given
        config = getattr(transformers, config_class)(**deepcopy({**SIZES, **own, **changes}))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = getattr(transformers, model_class)._from_config(config, attn_implementation="eager").float().eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 1:
                        parameter += 0.2 * torch.randn_like(parameter)
        return model

    return make


@pytest.fixture
def document() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """document(n): ids and positions [n] of one random document."""

    def draw(count: int, seed: int = 0, vocab: int = 250) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed))
        return ids, torch.arange(count)

    return draw
