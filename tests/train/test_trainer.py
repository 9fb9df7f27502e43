"""train_draft.py end to end on a tiny target on disk: records, resuming after a kill, warm start, features, ranks."""

import json
import runpy
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from eagle3.checkpoint.reference import load_head
from eagle3.target import Target
from eagle3_train import optim as optim_module
from eagle3_train import run as run_module
from eagle3_train.config import DataConfig, TrainConfig
from eagle3_train.prepared import prepare_rows
from eagle3_train.tokenizer import load_tokenizer
from oracles.runs import arguments, check_equal, final, losses, metrics, train, weights
from oracles.script import ENV, SCRIPT, launch

pytestmark = pytest.mark.filterwarnings("ignore:only .* distinct tokens")


@pytest.fixture(scope="module")
def crossing(made, tmp_path_factory):
    """A run on 17 rows in steps of 4: steps 5, 9, 13 and 18 take rows of two epochs."""
    run = train(made, tmp_path_factory.mktemp("crossing") / "run", data__eval_rows=3, eval__every=20)
    assert json.loads((run / "run.json").read_text())["data"]["train_rows"] == 17
    return run


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory):
    """The uninterrupted run of 20 steps that others are compared with."""
    return train(made, tmp_path_factory.mktemp("whole") / "run")


def test_records_of_a_run(whole, made):
    """Scripts that read metrics.jsonl and run.json; a head folder that the runtime cannot load."""
    rows = metrics(whole)
    assert [r["step"] for r in rows] == list(range(1, 21))
    common = {"step", "tokens", "loss", "tau", "accept", "accept_chain", "alpha", "coverage"}
    assert all(r.keys() == common | {"lr", "grad_norm", "tokens_per_second", "peak_memory_bytes"} for r in rows)
    held_out = metrics(whole, "eval")
    assert [r["step"] for r in held_out] == [10, 20]
    assert all(r.keys() == common | {"split"} for r in held_out)
    assert all(len(r["accept"]) == len(r["alpha"]) == 3 for r in rows + held_out)
    assert all(0 < r["coverage"] <= 1 and r["tau"] >= 1 for r in rows + held_out)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["tokens"] == sum(t for t in batch_tokens(made))
    record = json.loads((whole / "run.json").read_text())
    assert {"argv", "versions", "git", "seeds", "hardware", "started", "ended", "seconds"} <= record.keys()
    assert record["config"]["optim"]["lr"] == 3e-3
    assert record["head"]["draft_vocab_size"] == 100
    assert record["data"]["eval_rows"] == 4
    assert record["step"] == 20
    assert record["best_tau"] == max(r["tau"] for r in held_out)
    head = load_head(whole / "best", Target.load(made / "target"))
    assert head.config.trained_length == 512
    assert json.loads((whole / "best/run.json").read_text())["best_step"] == record["best_step"]


def batch_tokens(made):
    """Tokens of 20 batches of 4 of the 16 training rows: five epochs of all of them."""
    record = json.loads((made / "chats.jsonl").read_text().splitlines()[0])
    assert record["temperature"] == 0
    data = DataConfig((str(made / "chats.jsonl"),), eval_rows=4)
    rows = prepare_rows(TrainConfig(data=data), *load_tokenizer(str(made / "target")), made / "rows")
    return [len(ids) for ids in rows.train["input_ids"]] * 5


def test_the_weights_move_and_stay_fp32(whole):
    """bf16 weights stop moving at small learning rates: a norm's weight would still be exactly 1."""
    state = final(whole)
    assert all(x.dtype == torch.float32 for x in state.values() if x.is_floating_point())
    norm = state["head.midlayer.hidden_norm.weight"]
    assert ((norm - 1).abs() > 1e-6).all()
    assert (norm != norm.bfloat16()).any()


def test_best_is_the_step_of_highest_tau(made, tmp_path, monkeypatch):
    """Chosen by loss, or the last one: the exported head is that of the evaluation with the highest tau."""
    script, evaluation = iter([1.2, 1.6, 1.6, 1.4]), run_module.evaluate

    def scripted(*args):
        tally = evaluation(*args)
        tally.rounds, tally.emitted = 10, round(10 * next(script))
        return tally

    monkeypatch.setattr(run_module, "evaluate", scripted)
    main = runpy.run_path(str(SCRIPT))["main"]
    run = tmp_path / "run"
    settings = {"max_steps": 8, "eval.every": 2, "save_every": 4, "log_every": 100}
    assert main(arguments(made, run, **settings)) == 0
    heads = json.loads((run / "run.json").read_text())
    assert (heads["best_tau"], heads["best_step"]) == (1.6, 4)
    checkpoint = load_file(run / "checkpoints/step-00000004/model.safetensors")
    best = weights(run, "best")
    for name in ("fc.weight", "lm_head.weight", "norm.weight"):
        assert torch.equal(best[name], checkpoint[f"head.{name}"].bfloat16())


def test_killed_and_resumed_is_bit_equal(made, whole, tmp_path):
    """Optimiser, data order, schedule or records that do not survive SIGKILL: 10 + kill + 10 must equal 20."""
    run = tmp_path / "run"
    # 5 ms of looking every few steps is enough; a later checkpoint only moves where the run goes on
    process = subprocess.Popen([sys.executable, SCRIPT, *arguments(made, run)], env=ENV, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while not (run / "checkpoints/step-00000010/progress.json").exists():
            assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    assert not (run / "last").exists(), "the kill came too late to test anything"
    # what a kill during a save leaves behind
    shutil.copytree(run / "checkpoints/step-00000010", run / "checkpoints/.step-00000015.part")
    (run / "checkpoints/step-00000016").mkdir()
    shutil.copy(run / "checkpoints/step-00000010/model.safetensors", run / "checkpoints/step-00000016")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 19, "loss": 1')
    train(made, run)
    assert losses(run) == losses(whole)
    check_equal(final(run), final(whole))
    check_equal(weights(run, "best"), weights(whole, "best"))
    record = json.loads((run / "run.json").read_text())
    assert record["resumed_from_step"] in (10, 15)
    assert len(record["previous"]) == 1


def test_noise_on_features_is_trained_with_and_resumes(made, whole, tmp_path):
    """A setting that is recorded and reaches nothing; noise that a resumed run draws anew."""
    run = train(made, tmp_path / "run", ttt__feature_noise=0.5)
    records, trained = losses(run), final(run)
    assert [r["loss"] for r in metrics(run)] != [r["loss"] for r in metrics(whole)]
    shutil.rmtree(run / "checkpoints/step-00000020")
    train(made, run, ttt__feature_noise=0.5)
    assert losses(run) == records
    check_equal(final(run), trained)


def test_resume_takes_the_map_of_the_checkpoint(made, tmp_path):
    """Weights of one vocabulary with the map, or the teacher, of another: data that changed changes the counts."""
    run = train(made, tmp_path / "run", max_steps=10)
    wanted = final(run)["head.d2t"]
    chats = [json.loads(line) for line in (made / "chats.jsonl").read_text().splitlines()]
    for chat in chats:
        chat["messages"][1]["token_ids"] = [255 - i if i < 256 else i for i in chat["messages"][1]["token_ids"]]
    changed = tmp_path / "changed.jsonl"
    changed.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    fresh = train(made, tmp_path / "fresh", data__files=f"[{changed}]", max_steps=1)
    assert not torch.equal(final(fresh)["head.d2t"], wanted), "the test needs data with another map"

    seen = []
    from eagle3_train.ttt import TTTRollout

    forward = TTTRollout.forward

    def spy(self, inputs, counts):
        ids = self.head.to_target(torch.arange(self.head.draft_vocab_size))
        inside = inputs.teacher.in_vocab
        # where the head can propose the teacher's choice, it is the largest of the teacher's draft-vocab logits
        chosen = ids[inputs.teacher.logits[inside].argmax(-1)]
        seen.append(torch.equal(chosen, inputs.teacher.argmax[inside]))
        return forward(self, inputs, counts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TTTRollout, "forward", spy)
        train(made, run, data__files=f"[{changed}]")
    assert torch.equal(final(run)["head.d2t"], wanted)
    assert torch.equal(weights(run)["d2t"], wanted)
    assert seen, "nothing was trained"
    assert all(seen), "the teacher's logits are those of the changed data's map"


def test_resume_tells_what_changed(made, tmp_path, capsys):
    """Another learning rate, or another end of its schedule, taken up in silence."""
    run = train(made, tmp_path / "run", max_steps=2)
    capsys.readouterr()
    train(made, run, max_steps=3, optim__lr=2e-3, log_every=2)
    lines = capsys.readouterr().out.splitlines()
    told = [line.strip() for line in lines if line.startswith("  changed")]
    assert sorted(told) == ["changed: max_steps: 2 -> 3", "changed: optim.lr: 0.003 -> 0.002"]
    assert any(line.startswith("resumed at step 2 from ") for line in lines)


def test_resume_on_other_chats(made, tmp_path, capsys):
    """A file that changed under its name: a best tau of held-out replies that are no longer there, in silence."""
    chats = tmp_path / "chats.jsonl"
    lines = (made / "chats.jsonl").read_text().splitlines(keepends=True)
    chats.write_text("".join(lines))
    files = {"data__files": f"[{chats}]", "eval__every": 2}
    run = train(made, tmp_path / "run", max_steps=2, **files)
    chats.write_text("".join(lines[:-3]))
    capsys.readouterr()
    train(made, run, max_steps=4, **files)
    assert "changed: data: other rows than before" in capsys.readouterr().out
    # the first evaluation on the new rows is the best of them, whatever came before
    assert json.loads((run / "run.json").read_text())["best_step"] == 4


def test_resume_with_another_optimiser_and_loss(made, tmp_path, capsys):
    """Muon's state given to AdamW, which is lost without its step count; a term that left the loss, in silence."""
    run = train(made, tmp_path / "run", max_steps=2, optim__name="muon", loss="{kl: 1.0, tv: 0.5}")
    capsys.readouterr()
    train(made, run, max_steps=2, optim__name="muon", loss="{kl: 1.0, tv: 0.5}", eval__every=3)
    assert "changed: " not in capsys.readouterr().out
    train(made, run, max_steps=3, optim__name="adamw", loss="{kl: 1.0}", log_every=2)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    told = [line.removeprefix("changed: ") for line in lines if line.startswith("changed: ")]
    assert sorted(told) == [
        "loss.tv: 0.5 -> None",
        "max_steps: 2 -> 3",
        "optim.name: muon -> adamw",
        "the optimiser's state is new",
    ]
    assert any(
        name.endswith("q_proj.weight/exp_avg")
        for name in load_file(run / "checkpoints/step-00000003/optimizer.safetensors")
    )


def test_the_target_is_not_trained(made, tmp_path, monkeypatch):
    """Its parameters in the optimiser or the checkpoints (which would be as large as the target), or changed."""
    seen, load_parts, make = {}, run_module.load_parts, optim_module.make_optimizer

    def loading(*args):
        seen["parts"] = load_parts(*args)
        seen["before"] = {k: v.clone() for k, v in seen["parts"].target.model.state_dict().items()}
        return seen["parts"]

    def making(*args):
        seen["optimizer"] = make(*args)
        return seen["optimizer"]

    monkeypatch.setattr(run_module, "load_parts", loading)
    monkeypatch.setattr(optim_module, "make_optimizer", making)
    run = train(made, tmp_path / "run", max_steps=2)
    target, head = seen["parts"].target.model, seen["parts"].head
    after = target.state_dict()
    assert seen["before"].keys() == after.keys()
    assert all(torch.equal(after[k].view(torch.uint8), v.view(torch.uint8)) for k, v in seen["before"].items())
    assert not any(p.requires_grad or p.grad is not None for p in target.parameters())
    optimised = [p for group in seen["optimizer"].param_groups for p in group["params"]]
    assert {id(p) for p in optimised} == {id(p) for p in head.parameters()}
    assert not {p.data_ptr() for p in optimised} & {p.data_ptr() for p in target.parameters()}
    checkpoint = run / "checkpoints/step-00000002"
    assert load_file(checkpoint / "model.safetensors").keys() == {f"head.{k}" for k in head.state_dict()}
    kept = {name.rpartition("/")[0] for name in load_file(checkpoint / "optimizer.safetensors")}
    assert kept == {f"head.{name}" for name, _ in head.named_parameters()}
    # weights, two moments, and the map; with the target's it would be several times that
    mine = sum(p.numel() * 4 for p in optimised)
    files = sum(f.stat().st_size for f in checkpoint.iterdir())
    assert files < 3 * mine + 100_000


def test_end_of_turn_is_always_in_the_draft_vocabulary(made, tmp_path):
    """A template that ends turns with a token that is no EOS, and replies that were cut off before it."""
    folder = tmp_path / "target"
    shutil.copytree(made / "target", folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>", "<|tool|>"))
    tokenizer = Target.load(folder).tokenizer
    end, eos = tokenizer.convert_tokens_to_ids("<|tool|>"), tokenizer.eos_token_id
    assert end != eos
    chats = [json.loads(line) for line in (made / "chats.jsonl").read_text().splitlines()]
    for chat in chats:
        # the model may say it by itself; counted, it needs no forcing
        chat["finished"] = False
        chat["messages"][1]["token_ids"] = [i for i in chat["messages"][1]["token_ids"] if i not in (end, eos)]
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    run = train(made, tmp_path / "run", target=folder, data__files=f"[{cut}]", head__draft_vocab_size=50, max_steps=1)
    d2t = weights(run)["d2t"]
    assert {end, eos} <= set((torch.arange(len(d2t)) + d2t).tolist())


def test_a_finished_run_is_left_as_it_is(made, whole):
    """The same command again trains further, or loses the records."""
    before, state = losses(whole), final(whole)
    train(made, whole)
    assert losses(whole) == before
    check_equal(final(whole), state)


def test_warm_start_keeps_the_map(made, whole, tmp_path):
    """Weights of another vocabulary order; a start in bf16."""
    run = train(made, tmp_path / "run", init_head=whole / "best", max_steps=2, head__draft_vocab_size=50)
    assert torch.equal(weights(run)["d2t"], weights(whole, "best")["d2t"])
    assert metrics(run)[0]["loss"] < metrics(whole)[0]["loss"] - 0.1
    assert all(x.dtype == torch.float32 for x in final(run).values() if x.is_floating_point())


def test_keeping_features_changes_nothing(made, whole, tmp_path):
    """Features of another document; a resumed run that makes them in other batches (hence bit by bit)."""
    kept = train(made, tmp_path / "kept", features__source="memory")
    for found, wanted in zip(losses(kept), losses(whole), strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
    part = train(made, tmp_path / "part", features__source="memory", max_steps=20, save_every=10)
    shutil.rmtree(part / "checkpoints/step-00000020")
    train(made, part, features__source="memory")
    assert losses(part) == losses(kept)


@pytest.mark.parametrize("tokens", [60, 130])
def test_micro_batches_change_nothing(made, crossing, tmp_path, tokens):
    """A mean over micro-batches; N_k of the micro-batch alone; accelerate's own division added; short steps where
    an epoch ends. Chats have about 50 tokens: one or two of four fit a forward."""
    settings = {"tokens_per_batch": tokens, "data__max_length": 60, "data__eval_rows": 3, "eval.every": 20}
    run = train(made, tmp_path / "run", **settings)
    for found, wanted in zip(metrics(run), metrics(crossing), strict=True):
        assert found["tokens"] == wanted["tokens"]
        assert found["loss"] == pytest.approx(wanted["loss"], rel=2e-3)
    first, wanted = metrics(run)[0], metrics(crossing)[0]
    for name in ("loss", "grad_norm", "alpha", "coverage"):
        assert first[name] == pytest.approx(wanted[name], rel=1e-5)


def test_accelerates_own_settings_change_nothing(made, whole, tmp_path, monkeypatch):
    """`accelerate config` may have asked for accumulation or fp16: our settings are the only ones."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    # accelerate reads these once per process
    AcceleratorState._reset_state(reset_partial_state=True)
    run = train(made, tmp_path / "run", max_steps=3)
    schedule_free = [{k: v for k, v in r.items() if k != "lr"} for r in losses(run)[:1]]
    assert schedule_free == [{k: v for k, v in r.items() if k != "lr"} for r in losses(whole)[:1]]


def test_bf16_autocast_trains(made, tmp_path):
    """The default precision: gradients, optimiser state and saved weights stay fp32."""
    run = train(made, tmp_path / "run", autocast="bfloat16", eval__every=20)
    rows = metrics(run)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert all(x.dtype == torch.float32 for x in final(run).values() if x.is_floating_point())


@pytest.mark.parametrize("options", [{"num_layers": 2, "fc_norm": True}, {"hidden_size": 32, "head_dim": 16}])
def test_other_heads_train_and_load(made, tmp_path, options):
    """An option that the trainer, the optimiser or the checkpoint does not know."""
    run = train(made, tmp_path / "run", max_steps=6, eval__every=6, **{f"head__{k}": v for k, v in options.items()})
    assert metrics(run)[-1]["loss"] < metrics(run)[0]["loss"]
    assert load_head(run / "best", Target.load(made / "target")).config.num_layers == options.get("num_layers", 1)


def test_a_run_that_explodes_stops(made, tmp_path, capsys):
    """NaN weights written over the last good checkpoint."""
    main = runpy.run_path(str(SCRIPT))["main"]
    assert main(arguments(made, tmp_path / "run", optim__lr=1e30, save_every=1)) == 2
    assert "error: step 2: the gradients are not finite" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000001"]


def test_wandb_offline(made, tmp_path, monkeypatch):
    """A tracker without network or login; the run id that a resumed run must go on with."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = train(made, tmp_path / "run", log_with="[wandb]", max_steps=4, save_every=2, eval__every=4)
    folders = list((run / "tracking/wandb").glob("offline-run-*"))
    assert len(folders) == 1
    progress = json.loads((run / "checkpoints/step-00000004/progress.json").read_text())
    run_id = progress["state"]["tracker"]["run_id"]
    assert folders[0].name.endswith(run_id)
    train(made, run, log_with="[wandb]", max_steps=6, save_every=2, eval__every=6)
    progress = json.loads((run / "checkpoints/step-00000006/progress.json").read_text())
    assert progress["state"]["tracker"]["run_id"] == run_id


def test_wandb_without_login(made, tmp_path, monkeypatch):
    """The run goes on, offline; accelerate would start the tracker that failed once more."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    start = wandb.init

    def no_login(mode="online", **settings):
        if mode == "online":
            raise RuntimeError("no API key configured")
        return start(mode=mode, **settings)

    monkeypatch.setattr(wandb, "init", no_login)
    run = train(made, tmp_path / "run", log_with="[wandb]", max_steps=2, save_every=2, eval__every=2)
    assert len(list((run / "tracking/wandb").glob("offline-run-*"))) == 1


def test_a_budget_of_tokens(made, tmp_path):
    """A run that stops at the budget with its learning rate still high; one that a resume makes longer."""
    budget = {"max_steps": "null", "max_tokens": 1500, "save_every": 2}
    run = train(made, tmp_path / "run", **budget)
    rows = metrics(run)
    assert rows[-2]["tokens"] < 1500 <= rows[-1]["tokens"]
    assert rows[-1]["lr"] == pytest.approx(3e-3 * 0.02, rel=0.02)
    assert [r["step"] for r in metrics(run, "eval")][-1] == rows[-1]["step"]
    part = train(made, tmp_path / "part", **budget, eval__patience=0)
    last = sorted((part / "checkpoints").iterdir())[-1]
    shutil.rmtree(last)
    assert losses(train(made, part, **budget)) == losses(run)


def test_a_budget_of_minutes(made, tmp_path):
    """Evaluations that count as training; a schedule that knows steps alone."""
    run = train(made, tmp_path / "run", max_steps="null", max_minutes=0.05, save_every=1000, eval__every=1000)
    rows = metrics(run)
    spent = json.loads(next((run / "checkpoints").glob("*/progress.json")).read_text())["state"]["seconds"]
    assert spent >= 3
    assert rows[-1]["lr"] < 0.5 * max(r["lr"] for r in rows)


def test_accelerate_launch(made, whole, tmp_path):
    """The documented command, from a YAML config: the same run as in this process."""
    config = tmp_path / "config.yaml"
    words = arguments(made, tmp_path / "run", max_steps=3)
    pairs = list(zip(words[::2], words[1::2], strict=True))
    config.write_text("".join(f"{name[2:]}: {value}\n" for name, value in pairs if "." not in name))
    dotted = [word for pair in pairs if "." in pair[0] for word in pair]
    command = ["--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no"]
    done = launch(*command, "--dynamo_backend", "no", SCRIPT, "--config", config, *dotted)
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "run")[0]["loss"] == metrics(whole)[0]["loss"]
    assert "held-out tau" in done.stderr
