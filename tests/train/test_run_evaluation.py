"""Evaluation inside a run: the engine's own tau, best by tau, early stop, the average of weights, what is logged."""

import json
import runpy

import pytest
import torch

from eagle3.checkpoint.reference import load_head
from eagle3.target import Target
from eagle3_infer.config import TreeConfig
from eagle3_infer.engine import Engine, Request
from eagle3_infer.prompts import load_prompts, render
from eagle3_train import run as run_module
from oracles.runs import arguments, check_equal, final, losses, metrics, train, weights
from oracles.script import SCRIPT
from oracles.tiny import tiny_chats, tiny_folder

EVALUATE = run_module.evaluate
pytestmark = pytest.mark.filterwarnings("ignore:only .* distinct tokens")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with `target`, `chats.jsonl`, and in `prompts.jsonl` the chats' own prompts."""
    folder = tmp_path_factory.mktemp("made")
    tiny_folder(folder / "target")
    tiny_chats(folder / "chats.jsonl", folder / "target")
    chats = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
    prompts = [json.dumps({"prompt": chat["messages"][0]["content"]}) + "\n" for chat in chats]
    (folder / "prompts.jsonl").write_text("".join(prompts))
    return folder


@pytest.fixture(scope="module")
def tried(made, tmp_path_factory):
    """A run that the engine tries at steps 0, 20 and 30."""
    settings = {"eval__engine_every": 20, "eval__prompts": made / "prompts.jsonl", "eval__prompt_count": 5}
    run = tmp_path_factory.mktemp("tried") / "run"
    return train(made, run, **settings, eval__new_tokens=20, max_steps=30, save_every=10, dtype="float32")


def test_the_engine_tells_tau(made, tried):
    """Tau of another head, of other prompts, of plain decoding; a head exported in bf16 is near it."""
    records = metrics(tried, "engine")
    assert [r["step"] for r in records] == [0, 20, 30]
    assert all(r.keys() == {"step", "split", "tokens", "chain_tau", "tree_tau"} for r in records)
    assert records[-1]["chain_tau"] > records[0]["chain_tau"] + 0.05
    target = Target.load(made / "target", "float32")
    # the run's last weights, exactly as they were in fp32
    head = load_head(tried / "last", target)
    state = {k.removeprefix("head."): v for k, v in final(tried).items()}
    head.load_state_dict(state)
    prompts = load_prompts(made / "prompts.jsonl", 5)
    requests = [Request(render(target.tokenizer, p.messages([]))[1], max_new_tokens=20) for p in prompts]
    for name, tree in (("chain_tau", TreeConfig.chain(3)), ("tree_tau", TreeConfig(depth=3))):
        results = Engine(target, head, tree).generate(requests)
        tau = sum(sum(r.run_lengths) for r in results) / sum(r.rounds for r in results)
        assert records[-1][name] == pytest.approx(tau)


def test_every_draft_is_told(made, tried):
    """Rounds of another prompt or step; rows that add up to other replies than the target's."""
    rows = [json.loads(line) for line in (tried / "samples.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {0, 20, 30}
    last = [row for row in rows if row["step"] == 30]
    assert {row["prompt"] for row in last} == set(range(5))
    records = metrics(tried, "engine")
    rounds = len(last)
    # 20 tokens a reply where none ends early, the first of them by the prefill
    assert records[-1]["chain_tau"] == pytest.approx(5 * 19 / rounds, rel=0.15)
    assert any(row["accepted"] for row in last)
    assert any(row["rejected"] for row in last)


def test_trying_the_engine_changes_no_training(made, tried, tmp_path):
    """Random numbers drawn, modes switched, buffers of the target's features overwritten."""
    plain = train(made, tmp_path / "run", max_steps=30, save_every=10, dtype="float32")
    assert [r for r in losses(tried) if r.get("split") != "engine"] == losses(plain)
    check_equal(final(tried), final(plain))
    assert (plain / "samples.jsonl").read_text() == ""


def test_prompts_that_are_none_are_told_before_training(made, tmp_path, capsys):
    main = runpy.run_path(str(SCRIPT))["main"]
    words = arguments(made, tmp_path / "run", eval__engine_every=5, eval__prompts="missing.jsonl")
    assert main(words) == 2
    assert "missing.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "run/metrics.jsonl").exists()
    words = arguments(made, tmp_path / "run", eval__engine_every=5, eval__new_tokens=600)
    assert main(words) == 2
    assert "600" in capsys.readouterr().err
    assert not metrics(tmp_path / "run")


def scripted(monkeypatch, *taus):
    """Evaluations that find these."""
    script = iter(taus)

    def evaluate(*args):
        counts = EVALUATE(*args)
        counts.rounds, counts.emitted = 10, round(10 * next(script))
        return counts

    monkeypatch.setattr(run_module, "evaluate", evaluate)


def test_a_run_stops_when_tau_has_stopped_rising(made, tmp_path, monkeypatch):
    """A count that starts anew after a resume; an end without its records, its checkpoint, or its last/."""
    scripted(monkeypatch, 1.2, 1.5, 1.4, 1.5, 1.3)
    settings = {"max_steps": 40, "eval__every": 2, "save_every": 3, "log_every": 7, "eval__patience": 3}
    run = train(made, tmp_path / "run", **settings)
    assert [r["step"] for r in metrics(run, "eval")] == [2, 4, 6, 8, 10]
    assert metrics(run)[-1]["step"] == 10
    record = json.loads((run / "run.json").read_text())
    assert (record["step"], record["best_step"], record["best_tau"]) == (10, 4, 1.5)
    assert max((run / "checkpoints").iterdir()).name == "step-00000010"
    state = final(run)
    for name in ("fc.weight", "lm_head.weight"):
        assert torch.equal(weights(run)[name], state[f"head.{name}"].bfloat16())
    # the same command does no more; with more patience it goes on
    train(made, run, **settings)
    assert metrics(run)[-1]["step"] == 10
    scripted(monkeypatch, 1.1, 1.1)
    train(made, run, **{**settings, "eval__patience": 5})
    assert metrics(run)[-1]["step"] == 14
