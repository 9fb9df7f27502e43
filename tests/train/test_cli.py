"""What users do wrong: one line on stderr, exit code 2, no traceback."""

import json
import runpy
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
import torch

from oracles.script import ENV, ROOT, SCRIPT
from oracles.tiny import tiny_chats, tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore:only .* distinct tokens")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Good parts, that each test spoils one of: `target`, `chats.jsonl`."""
    folder = tmp_path_factory.mktemp("made")
    tiny_folder(folder / "target")
    tiny_chats(folder / "chats.jsonl", folder / "target", count=8, new_tokens=8)
    return folder


@pytest.fixture
def fails(made, tmp_path, capsys):
    """Call main with good settings and the given ones; the one line that it prints."""
    main = runpy.run_path(str(SCRIPT))["main"]

    def call(*words, **changes):
        settings = {
            "target": made / "target",
            "output": tmp_path / "run",
            "data.files": f"[{made / 'chats.jsonl'}]",
            "data.eval_rows": 2,
            "head.draft_vocab_size": 20,
            "max_steps": 1,
            "device": "cpu",
            **{name.replace("__", "."): value for name, value in changes.items()},
        }
        flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        capsys.readouterr()
        assert main([*flags, *map(str, words)]) == 2
        # transformers' progress bar is no message
        lines = capsys.readouterr().err.splitlines()
        error = [line for line in lines if line.strip() and "Loading weights" not in line]
        assert len(error) == 1, error
        assert error[0].startswith("error: ")
        return error[0]

    return call


def test_config_that_is_no_file(fails, tmp_path):
    assert "does not exist" in fails("--config", tmp_path / "none.yaml")
    assert "is a folder" in fails("--config", tmp_path)


@pytest.mark.parametrize(
    "text, found",
    [
        ("optim:\n  lrr: 1.0\n", "optim.lr"),
        ("max_step: 3\n", "max_steps"),
        ("- 1\n", "not a mapping"),
        ("a: [\n", "YAML"),
        ("max_steps: many\n", "max_steps"),
        ("optim: 3\n", "optim"),
        ("data:\n  files: 7\n", "files"),
    ],
)
def test_config_with_a_wrong_key_or_value(fails, tmp_path, text, found):
    """The nearest known key is named."""
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert found in fails("--config", file)


def test_flag_that_nobody_knows(fails):
    assert "'optim.beta" in fails("--optim.beta", "0.9")
    assert "'max_steps'" in fails("--max_stesp", "3")
    assert "max_steps" in fails("--max_steps", "many")


@pytest.mark.parametrize(
    "changes, found",
    [
        ({"max_steps": 0}, "max_steps is 0"),
        ({"optim__lr": -1}, "optim.lr"),
        ({"ttt__steps": 0}, "ttt.steps is 0"),
        ({"ttt__decay": 1.5}, "ttt.decay is 1.5"),
        ({"autocast": "float64"}, "autocast is 'float64'"),
        ({"dtype": "float8"}, "dtype 'float8'"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"resume": "maybe"}, "resume is 'maybe'"),
        ({"log_with": "[carrier_pigeon]"}, "unknown tracker 'carrier_pigeon'"),
        ({"head__draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ({"head__draft_vocab_size": 301}, "draft_vocab_size 301"),
        ({"head__draft_vocab_size": 270}, "in [1, 259]"),
        ({"head__capture_layers": "[1, 8]"}, "[0, 7]"),
        ({"head__capture_layers": "[3, 3]"}, "distinct"),
        ({"head__capture_layers": "[]"}, "capture_layers"),
        ({"head__num_key_value_heads": 3}, "not a multiple"),
        ({"data__max_length": 513}, "512 positions"),
        ({"data__max_length": 2}, "data.max_length is 2"),
        ({"data__eval_rows": 0}, "data.eval_rows is 0"),
        ({"data__eval_rows": 8}, "only 8 rows"),
        ({"data__eval_rows": 99}, "only 8 rows"),
        ({"data__files": "[]"}, "no data files"),
        ({"data__files": "[missing.jsonl]"}, "missing.jsonl: no such file"),
        ({"data__files": f"[{ROOT / 'train'}]"}, "no file of this folder ends in .jsonl"),
        ({"data__max_length": 8}, "0 of 8 chats kept"),
        ({"init_head": "nowhere"}, "'nowhere' does not exist"),
        ({"init_head": "~/nowhere"}, f"{Path.home()}/nowhere"),
        ({"data__files": "[~/missing.jsonl]"}, f"{Path.home()}/missing.jsonl: no such file"),
        ({"target": "~nobody-here/x/y"}, "does not exist"),
        ({"seed": 2**70}, "64 bits"),
        ({"optim__final_ratio": -5}, "optim.final_ratio is -5"),
        ({"optim__name": "lion"}, "optim.name is 'lion'; use adamw, muon or adamw8bit"),
        ({"optim__ema": 1.0}, "optim.ema must be in [0, 1)"),
        ({"data__streaming": "true", "data__workers": 2}, "data.workers is 2, but each process renders a stream"),
        ({"init_head": "x", "data__vocab_map": "y"}, "init_head brings its own vocabulary map"),
        ({"eval__every": 0}, "eval.every is 0"),
        ({"eval__patience": -1}, "eval.patience is -1"),
        ({"eval__engine_every": 5, "features__source": "offline", "features__store": "x"}, "eval.engine_every: 0"),
    ],
)
def test_setting_out_of_range(fails, changes, found):
    assert found in fails(**changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_gpu_that_is_not_there(fails):
    assert "CUDA" in fails(device="cuda")


def test_broken_line_is_named(fails, tmp_path, made):
    file = tmp_path / "broken.jsonl"
    file.write_text((made / "chats.jsonl").read_text() + "{oops\n")
    assert f"{file}:9: not valid JSON" in fails(data__files=f"[{file}]")
    file.write_text("")
    assert "no chats in" in fails(data__files=f"[{file}]")


def test_wrong_data_is_told_before_the_target_is_loaded(fails, tmp_path, monkeypatch):
    """A large target loads for minutes."""
    monkeypatch.setattr("eagle3.target.Target.load", lambda *_: pytest.fail("loaded"))
    assert "no such file" in fails(data__files="[missing.jsonl]")


def test_target_that_is_none(fails, tmp_path, made):
    assert "nowhere" in fails(target=tmp_path / "nowhere")
    assert "no config.json" in fails(target=tmp_path)
    assert "is a file" in fails(target=made / "chats.jsonl")
    (tmp_path / "config.json").write_text("{}")
    assert "cannot be loaded" in fails(target=tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "cannot be loaded" in fails(target=tmp_path)


def spoiled(made, folder, name, text=None, **settings):
    """A copy of the target with one file replaced, changed, or (no text, no settings) missing."""
    folder.mkdir()
    for file in (made / "target").iterdir():
        if file.name != name:
            (folder / file.name).symlink_to(file)
        elif settings:
            (folder / name).write_text(json.dumps({**json.loads(file.read_text()), **settings}))
        elif text is not None:
            (folder / name).write_text(text)
    return folder


def test_target_with_a_spoiled_file(fails, tmp_path, made):
    """Weights missing or cut short, a model that is no causal LM, no chat template."""
    missing = spoiled(made, tmp_path / "missing", "model.safetensors")
    assert "cannot be loaded" in fails(target=missing)
    cut = spoiled(made, tmp_path / "cut", "model.safetensors", text="abc")
    assert "cannot be loaded" in fails(target=cut)
    encoder = spoiled(made, tmp_path / "encoder", "config.json", model_type="vit")
    assert "cannot be loaded" in fails(target=encoder)
    plain = spoiled(made, tmp_path / "plain", "chat_template.jinja")
    assert "no chat template" in fails(target=plain)


def test_output_that_cannot_be_written(fails, tmp_path, made):
    assert "is a file" in fails(output=made / "chats.jsonl")
    assert "cannot be written" in fails(output=made / "chats.jsonl/run")
    assert "cannot be written" in fails(output="/proc/run")


def test_output_of_another_run(fails, tmp_path, made):
    """Weights of one architecture loaded into another; a run overwritten."""
    main = runpy.run_path(str(SCRIPT))["main"]
    words = ["--target", made / "target", "--output", tmp_path / "run", "--data.files", f"[{made / 'chats.jsonl'}]"]
    words += ["--data.eval_rows", 2, "--head.draft_vocab_size", 20, "--max_steps", 1, "--device", "cpu"]
    assert main([str(word) for word in words]) == 0
    assert "resume is never" in fails(resume="never")
    assert "other draft_vocab_size" in fails(head__draft_vocab_size=30, max_steps=2)
    assert "other qk_norm" in fails(head__qk_norm="true", max_steps=2)
    progress = tmp_path / "run/checkpoints/step-00000001/progress.json"
    whole = {file: file.read_bytes() for file in progress.parent.iterdir()}
    for name, content in [
        *(("progress.json", text) for text in (b"{", b"[3]", b"\xff")),
        *((name, data) for name in ("model.safetensors", "optimizer.safetensors") for data in (b"", b"PK", None)),
    ]:
        for file, data in whole.items():
            file.write_bytes(data)
        file = progress.with_name(name)
        file.write_bytes(whole[file][: len(whole[file]) // 2] if content is None else content)
        assert f"{file} is missing or damaged" in fails(max_steps=2), (name, content)


def test_help_is_quick(made):
    """The settings are shown without loading torch."""
    code = "import sys, runpy; sys.argv = ['x', '--help']; m = runpy.run_path(sys.argv[0] and %r)['main']\n"
    code += "try: m(['--help'])\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code % str(SCRIPT)], env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--optim.lr" in done.stdout
    assert "    accelerate launch train/train_draft.py --config recipes/base/smollm2-135m.yaml\n" in done.stdout
    if util.find_spec("docstring_parser"):
        assert "peak learning rate" in done.stdout


def test_accelerate_launch_shows_the_line(tmp_path):
    """The launcher's own traceback hides ours, or it exits with 0."""
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "1"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += [SCRIPT, "--config", tmp_path / "none.yaml"]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"error: config {str(tmp_path / 'none.yaml')!r} does not exist" in done.stderr
    assert 'train_draft.py", line' not in done.stderr


@pytest.mark.parametrize(
    "name", ["build_vocab_map", "dump_features", "export_draft", "prepare_data", "regenerate", "train_draft"]
)
def test_an_error_of_the_system_is_one_line(name, monkeypatch, capsys):
    """Also where a library tells it in several."""
    spec = util.spec_from_file_location(name, ROOT / f"train/{name}.py")
    assert spec and spec.loader
    script = util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def full(*_, **__):
        raise OSError("no space left:\n  free some")

    monkeypatch.setattr(script, "load_config", full)
    assert script.main([]) == 2
    assert capsys.readouterr().err == "error: no space left: free some\n"
