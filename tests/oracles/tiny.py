"""Tiny random targets of many families, in memory or on disk with a tokenizer and a chat template."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from eagle3.target import Target

VOCAB = 300
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # large enough for sharp, varied argmaxes in a random model
    "initializer_range": 0.2,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 12}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# family -> (prefix of its classes, its text config, what differs)
_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "LlamaConfig", {}),
    "mistral": ("Mistral", "MistralConfig", {"sliding_window": 12}),
    "qwen2": ("Qwen2", "Qwen2Config", {}),
    "qwen3": ("Qwen3", "Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", "Gemma2Config", {"head_dim": 16, "sliding_window": 12}),
    "phi3": ("Phi3", "Phi3Config", {"pad_token_id": 0}),
    "gemma3": ("Gemma3", "Gemma3TextConfig", {"head_dim": 16, **_ALTERNATING}),
    "gpt_oss": (
        "GptOss",
        "GptOssConfig",
        {
            **_ALTERNATING,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e5,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    # multi-head latent attention: keys of 8 + 16, values of 16
    "deepseek_v3": (
        "DeepseekV3",
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
            "first_k_dense_replace": 3,
            **_EXPERTS,
        },
    ),
    "qwen3_moe": ("Qwen3Moe", "Qwen3MoeConfig", {"head_dim": 32, "num_experts": 8, **_EXPERTS}),
    # full layers have one K/V head of twice the width; the last two layers use the K/V of earlier ones
    "gemma4": (
        "Gemma4",
        "Gemma4TextConfig",
        {
            **_ALTERNATING,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "num_kv_shared_layers": 2,
        },
    ),
    # windowed layers have sinks and twice the K/V heads; values are narrower than keys
    "mimo_v2_flash": (
        "MiMoV2Flash",
        "MiMoV2FlashConfig",
        {**_ALTERNATING, "head_dim": 24, "v_head_dim": 16, "n_routed_experts": 8, **_EXPERTS},
    ),
    # layers hand on four streams of hidden states
    "gemma3n": (
        "Gemma3n",
        "Gemma3nTextConfig",
        {
            **_ALTERNATING,
            "head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "num_kv_shared_layers": 2,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 8,
        },
    ),
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3")
# sliding windows of layers in turn, sinks, keys wider than values, experts, layers of different K/V heads and widths
UNEVEN_FAMILIES = ("gemma3", "gpt_oss", "deepseek_v3", "qwen3_moe", "gemma4", "mimo_v2_flash")


def tiny_model(family: str = "llama", seed: int = 0, vocab_size: int = VOCAB, **changes: Any) -> Any:
    """A random fp32 transformers model; the same seed gives the same weights. No EOS unless `changes` name one."""
    import transformers

    prefix, config_class, own = _MODELS[family]
    nobody = {"eos_token_id": None, "bos_token_id": None}
    # transformers writes into the lists and dicts that it is given
    settings = deepcopy({**_SIZES, "vocab_size": vocab_size, **nobody, **own, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = getattr(transformers, config_class)(**settings)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).float().eval()
        if family.startswith("gemma"):
            # scaled, tied embeddings make a random model repeat its input for ever: break that
            torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.02)
            torch.nn.init.normal_(model.model.norm.weight, std=2.0)
    return model


def tiny_target(family: str = "llama", seed: int = 0, **changes: Any) -> Target:
    return Target(tiny_model(family, seed, **changes))


def greedy(target: Target, prompt: list[int], new_tokens: int) -> list[int]:
    """transformers' greedy continuation."""
    with target.stock() as stock, torch.inference_mode():
        model: Any = stock
        ids = torch.tensor([prompt])
        # without a mask generate would guess one, and hide the prompt's zeros as padding
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def tiny_tokenizer() -> Any:
    """One token per byte, plus the chat marks; 259 ids in all."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|tool|>"]})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_folder(folder: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """A target on disk, as users have them: weights, config, tokenizer, chat template, an lm_head of padded rows."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(family, seed, eos_token_id=tokenizer.eos_token_id, **changes)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    with torch.no_grad():
        model.get_output_embeddings().weight[len(tokenizer) :] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_chats(file: Path, folder: Path, count: int = 20, new_tokens: int = 24) -> Path:
    """Chats of the target in `folder`: short prompts and its own greedy replies, as JSONL."""
    target = Target.load(folder)
    lines = []
    for i in range(count):
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"{i * i} {chr(97 + i)}"}]
        prompt = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        reply = greedy(target, prompt, new_tokens)
        finished = reply[-1] in target.eos_ids
        ids = reply[:-1] if finished else reply
        messages.append({"role": "assistant", "content": target.tokenizer.decode(ids), "token_ids": ids})
        lines.append(json.dumps({"messages": messages, "temperature": 0, "finished": finished}) + "\n")
    file.write_text("".join(lines), encoding="utf-8")
    return file
