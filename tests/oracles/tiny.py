"""Tiny random targets of six families, in memory or on disk with a tokenizer and a chat template."""

import json
from collections.abc import Callable
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


def _families() -> dict[str, Callable[..., Any]]:
    import transformers as tf

    return {
        "llama": lambda **k: tf.LlamaForCausalLM(tf.LlamaConfig(**k)),
        "mistral": lambda **k: tf.MistralForCausalLM(tf.MistralConfig(sliding_window=12, **k)),
        "qwen2": lambda **k: tf.Qwen2ForCausalLM(tf.Qwen2Config(**k)),
        "qwen3": lambda **k: tf.Qwen3ForCausalLM(tf.Qwen3Config(head_dim=32, tie_word_embeddings=True, **k)),
        "gemma2": lambda **k: tf.Gemma2ForCausalLM(tf.Gemma2Config(head_dim=16, sliding_window=12, **k)),
        "phi3": lambda **k: tf.Phi3ForCausalLM(tf.Phi3Config(pad_token_id=0, **k)),
    }


FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3")


def tiny_model(family: str = "llama", seed: int = 0, vocab_size: int = VOCAB, **changes: Any) -> Any:
    """A random fp32 transformers model; the same seed gives the same weights. No EOS unless `changes` name one."""
    settings = {**_SIZES, "vocab_size": vocab_size, "eos_token_id": None, "bos_token_id": None, **changes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _families()[family](**settings).float().eval()
        if family == "gemma2":
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
