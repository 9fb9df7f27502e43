"""Evaluation inside a run: the engine's own tau, best by tau, early stop, the average of weights, what is logged."""

import json
import runpy
import shutil
from types import SimpleNamespace

import pytest
import torch

from eagle3.checkpoint.reference import load_head
from eagle3.target import Target
from eagle3_infer.config import TreeConfig
from eagle3_infer.engine import Engine, Request
from eagle3_infer.prompts import load_prompts, render
from eagle3_train import run as run_module
from eagle3_train.config import DataConfig, EvalConfig, TrainConfig
from eagle3_train.ema import EMA
from eagle3_train.prepared import prepare_rows
from eagle3_train.tokenizer import load_tokenizer
from eagle3_train.trackers import Trackers
from oracles.runs import arguments, check_equal, final, losses, metrics, train, weights
from oracles.script import SCRIPT

EVALUATE = run_module.evaluate
pytestmark = pytest.mark.filterwarnings("ignore:only .* distinct tokens")


@pytest.fixture(scope="module")
def made(made):
    """A folder with `target`, `chats.jsonl`, and in `prompts.jsonl` the chats' own prompts."""
    chats = [json.loads(line) for line in (made / "chats.jsonl").read_text().splitlines()]
    prompts = [json.dumps({"prompt": chat["messages"][0]["content"]}) + "\n" for chat in chats]
    (made / "prompts.jsonl").write_text("".join(prompts))
    return made


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


def test_the_engine_is_tried_with_the_template_options(made):
    """Prompts rendered otherwise than the rows that the head is trained on."""
    tokenizer = Target.load(made / "target").tokenizer
    tokenizer.chat_template = "{% if brief %}<brief>{% endif %}" + tokenizer.chat_template
    data = DataConfig((str(made / "chats.jsonl"),), template_options={"brief": True})
    evaluation = EvalConfig(engine_every=1, prompts=str(made / "prompts.jsonl"), prompt_count=2)
    trial = runpy.run_path(str(SCRIPT))["EngineTrial"](
        TrainConfig(data=data, eval=evaluation), SimpleNamespace(tokenizer=tokenizer)
    )
    texts = [tokenizer.decode(request.prompt_ids) for request in trial.requests]
    assert len(texts) == 2
    assert all(text.startswith("<brief><|im_start|>") for text in texts)


def test_simulated_tau_is_the_engines(made, tmp_path):
    """Held-out rows walked otherwise than the engine answers their prompts: in fp32 the two are one number."""
    chats = [json.loads(line) for line in (made / "chats.jsonl").read_text().splitlines()]
    data = DataConfig((str(made / "chats.jsonl"),), eval_rows=8)
    prepared = prepare_rows(TrainConfig(data=data), *load_tokenizer(str(made / "target")), tmp_path / "rows")
    rows = prepared.held_out["input_ids"]
    tokenizer = Target.load(made / "target").tokenizer
    prompts = [chat["messages"][0] for chat in chats]
    lengths = {p["content"]: render(tokenizer, [p])[1] for p in prompts}
    held_out = [text for text, ids in lengths.items() if any(row[: len(ids)] == ids for row in rows)]
    assert len(held_out) == 8
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in held_out))
    settings = {"data__eval_rows": 8, "eval__engine_every": 40, "eval__prompts": tmp_path / "held_out.jsonl"}
    run = train(made, tmp_path / "run", **settings, eval__new_tokens=24, max_steps=40, eval__every=40, dtype="float32")
    simulated, real = metrics(run, "eval")[-1]["tau"], metrics(run, "engine")[-1]["chain_tau"]
    assert simulated == pytest.approx(real, rel=1e-12)
    assert simulated > 1, "a head that is never right shows nothing"


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


def test_the_average_is_what_is_evaluated_and_exported(made, tmp_path):
    """Raw weights exported, or averages trained on; an average that a resumed run starts anew."""
    settings = {"optim__ema": 0.9, "max_steps": 12, "eval__every": 4, "save_every": 4}
    raw = train(made, tmp_path / "raw", **{**settings, "optim__ema": 0})
    run = train(made, tmp_path / "run", **settings)
    # training itself knows nothing of it
    assert [r for r in losses(run) if "split" not in r] == [r for r in losses(raw) if "split" not in r]
    check_equal(final(run), final(raw))
    assert not torch.equal(weights(run)["fc.weight"], weights(raw)["fc.weight"])
    assert metrics(run, "eval")[-1]["loss"] != metrics(raw, "eval")[-1]["loss"]
    # 8 steps, a kill, 4 more
    part = train(made, tmp_path / "part", **settings)
    shutil.rmtree(part / "checkpoints/step-00000012")
    train(made, part, **settings)
    assert losses(part) == losses(run)
    for name in ("best", "last"):
        check_equal(weights(part, name), weights(run, name))


def test_average_by_hand(made, tmp_path, monkeypatch):
    """Weights before the step counted in, a step left out."""
    start = train(made, tmp_path / "start", optim__lr=1e-30, max_steps=1, eval__every=1, save_every=1)
    seen, update = [], EMA.update

    def spy(self, local, step):
        seen.append((step, {name: x.clone() for name, x in local.items()}))
        update(self, local, step)

    monkeypatch.setattr(EMA, "update", spy)
    run = train(made, tmp_path / "run", optim__ema=0.5, max_steps=3, eval__every=3, save_every=3)
    assert [step for step, _ in seen] == [1, 2, 3]
    assert torch.equal(seen[-1][1]["head.fc.weight"], final(run)["head.fc.weight"])
    average = final(start)["head.fc.weight"]
    for step, local in seen:
        decay = min(0.5, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * local["head.fc.weight"]
    torch.testing.assert_close(weights(run)["fc.weight"].float(), average, rtol=1e-2, atol=1e-6)
    assert not torch.equal(weights(run)["fc.weight"], seen[-1][1]["head.fc.weight"].bfloat16())


def test_muon_trains_and_resumes(made, tmp_path):
    """Momentum that a checkpoint does not hold."""
    settings = {"optim__name": "muon", "max_steps": 10, "eval__every": 10, "save_every": 5}
    run = train(made, tmp_path / "run", **settings)
    assert metrics(run)[-1]["loss"] < metrics(run)[0]["loss"] - 0.5
    part = train(made, tmp_path / "part", **settings)
    shutil.rmtree(part / "checkpoints/step-00000010")
    train(made, part, **settings)
    check_equal(final(part), final(run))


def test_tables_reach_a_tracker(made, tmp_path, monkeypatch):
    """A table per trial of the engine; provenance beside the settings."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    told = {}
    started = Trackers.start

    def start(self, accelerator, config, *others):
        told.update(config)
        started(self, accelerator, config, *others)

    monkeypatch.setattr(Trackers, "start", start)
    settings = {"eval__engine_every": 2, "eval__prompt_count": 1, "eval__new_tokens": 4, "log_with": "[wandb]"}
    run = train(made, tmp_path / "run", **settings, max_steps=2, eval__every=2, save_every=2)
    tables = list((run / "tracking/wandb").glob("offline-run-*/files/media/table/engine/drafts_*.json"))
    assert len(tables) == 2
    table = json.loads(max(tables).read_text())
    assert table["columns"] == ["prompt", "round", "accepted", "rejected", "target"]
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert len(table["data"]) == len([row for row in rows if row["step"] == 2]) > 0
    assert {"argv", "versions", "git", "seeds", "data", "hardware"} <= told["run"].keys()
    assert told["optim"]["name"] == "adamw"
