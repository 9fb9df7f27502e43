"""`train/export_draft.py` as users run it."""

import json
import runpy
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3.checkpoint.reference import load_head, save_head
from eagle3.config import HeadOptions
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.target import Target
from eagle3.vocab import identity_map
from oracles.tiny import tiny_folder

SCRIPT = Path(__file__).parents[2] / "train/export_draft.py"
SERVES = {
    "vllm": ["vllm", "serve"],
    "sglang": ["python", "-m", "sglang.launch_server"],
    "tensorrt-llm": ["trtllm-serve"],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with `target`, `head` of the plain kind and `odd`, of one that no engine knows."""
    folder = tmp_path_factory.mktemp("made")
    target = Target.load(tiny_folder(folder / "target"))
    for name, options in {"head": HeadOptions(), "odd": HeadOptions(qk_norm=True)}.items():
        save_head(folder / name, Eagle3Head.for_target(target, identity_map(300), options))
    return folder


@pytest.fixture
def run(made, capsys, monkeypatch, tmp_path) -> Callable[..., tuple[int, str, str]]:
    """run(engine=..., draft=...): exit code, stdout, stderr of the script, in the folder `tmp_path`."""
    monkeypatch.chdir(tmp_path)

    def call(**changes: Any) -> tuple[int, str, str]:
        words = {"draft": made / "head", "target": made / "target", "engine": "vllm", "output": "out", **changes}
        capsys.readouterr()
        code = runpy.run_path(str(SCRIPT))["main"]([word for k, v in words.items() for word in (f"--{k}", str(v))])
        told = capsys.readouterr()
        return code, told.out, told.err

    return call


@pytest.mark.parametrize("engine", SERVES)
def test_writes_and_tells_the_command(made, run, tmp_path, engine):
    code, out, _ = run(engine=engine, drafts=5)
    assert code == 0
    target = Target.load(made / "target")
    ours, theirs = load_head(made / "head", target), load_head(tmp_path / "out", target)
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))
    lines = out.splitlines()
    command = shlex.split(lines[next(i for i, line in enumerate(lines) if line.endswith("serve it with")) + 1])
    assert command[: len(SERVES[engine])] == SERVES[engine]
    assert str(made / "target") in command
    assert f"outputs of layers {list(ours.capture_layers)} (from 0)" in out
    assert f"--draft {tmp_path / 'out'} --mode chain --chain-depth 5" in out
    if engine == "vllm":
        settings = json.loads(command[-1])
        assert settings == {"method": "eagle3", "model": str(tmp_path / "out"), "num_speculative_tokens": 5}
    elif engine == "sglang":
        assert command[-6:] == [
            *("--speculative-num-steps", "5", "--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", "6"),
        ]
    else:
        assert Path(command[-1]).read_text().splitlines()[2] == "  max_draft_len: 5"


def test_the_comparison_can_be_pasted(run, tmp_path):
    code, out, _ = run(output="my head")
    words = shlex.split(out.splitlines()[-1])
    assert (code, words[0], words[words.index("--draft") + 1]) == (0, "eagle3-infer", str(tmp_path / "my head"))


def test_dtype(run, tmp_path):
    """Weights stay as they are stored, unless another dtype is asked for."""
    assert run()[0] == 0
    assert run(output="wide", dtype="float32")[0] == 0
    found = {name: load_file(tmp_path / name / "model.safetensors")["fc.weight"].dtype for name in ("out", "wide")}
    assert found == {"out": torch.bfloat16, "wide": torch.float32}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"engine": "vlm"}, "vllm"),
        ({"draft": "nowhere"}, "nowhere"),
        ({"target": "./nowhere"}, "nowhere"),
        ({"drafts": 0}, "drafts is 0"),
        ({"dtype": "int4"}, "int4"),
        ({"output": "taken"}, "is not overwritten"),
        ({"optput": "x"}, "did you mean 'output'"),
    ],
)
def test_bad_input_is_one_line(run, tmp_path, changes, words):
    (tmp_path / "taken").mkdir()
    code, out, err = run(**changes)
    assert (code, out) == (2, "")
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert words in last
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("engine", SERVES)
def test_an_option_unknown_to_the_engine(made, run, tmp_path, engine):
    code, _, err = run(draft=made / "odd", engine=engine)
    assert code == 2
    assert "head.qk_norm (True)" in err
    assert not list(tmp_path.iterdir())


def test_another_target(run, tmp_path):
    wider = tiny_folder(tmp_path / "wider", hidden_size=96)
    code, _, err = run(target=wider)
    assert code == 2
    assert "made for a target of hidden size 64" in err
