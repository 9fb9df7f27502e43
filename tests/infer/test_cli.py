"""`eagle3-infer` as a user meets it: whole runs on a tiny model, the report's file, and every way to get it wrong."""

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle3.checkpoint.reference import save_head
from eagle3.target import Target
from eagle3_infer import bench as bench_module
from eagle3_infer import explain as explain_module
from eagle3_infer import replay as replay_module
from eagle3_infer.cli import ended_by_ctrl_c, main
from eagle3_infer.models import random_head
from eagle3_kernels.dispatch import set_kernels

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FAST = ("--max-new-tokens", "12", "--tree-depth", "3", "--tree-top-k", "2", "--tree-nodes", "6")


def byte_tokenizer(template):
    """One id per byte, an EOS, nothing merged."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "<eos>"])}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", chat_template=template)


def save_target(folder, template: str | None = TEMPLATE, hidden=32):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=hidden, intermediate_size=48, num_hidden_layers=7, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=256,
        initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer(template).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def head_folder(target_folder, tmp_path_factory):
    head = random_head(Target.load(target_folder))
    return save_head(tmp_path_factory.mktemp("head") / "head", head, torch.float32)


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [
        {"question_id": 1, "category": "one", "turns": ["Hello", "Again"]},
        {"prompt": "Tell me", "category": "two"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def base(target_folder, prompts_file):
    return ["--target", str(target_folder), "--draft", "random", "--prompts", str(prompts_file), *FAST]


def failing(capsys, *argv):
    """The one line on stderr of a run that must end with exit code 2."""
    code = main(list(map(str, argv)))
    captured = capsys.readouterr()
    assert code == 2, captured
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), captured.err
    return lines[0]


def test_whole_run(base, tmp_path, capsys):
    path = tmp_path / "report.json"
    assert main([*base, "--dtype", "float32", "--verify", "--json", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and "\x1b" not in captured.out
    assert "<|user|>Hello" in captured.out
    assert "outputs: chain == plain, tree == plain, plain == HF generate (3/3 replies)" in captured.out
    report = json.loads(path.read_text())
    assert list(report["modes"]) == ["plain", "chain", "tree", "hf_generate"]
    assert report["verify"]["compared"] == report["verify"]["identical"] == 5 * 3
    assert report["run"]["settings"]["max_new_tokens"] == 12 and not report["run"]["interrupted"]
    environment = report["run"]["environment"]
    assert environment["cores"] >= 1 and environment["cpu"] in captured.out and "load_average" in environment
    assert report["run"]["versions"]["transformers"] and "revision" in (report["run"]["git"] or {"revision": None})
    assert set(report["modes"]["tree"]["by_category"]) == {"one", "two"}
    for row in report["outputs"]:
        assert 1 + sum(row["run_lengths"]) == len(row["token_ids"]) <= 12
    for mode in report["modes"].values():
        assert mode["seconds"] == pytest.approx(sum(mode["seconds_by_stage"].values()))
        assert mode["tau"] >= 1 and mode["peak_memory_bytes"] != 0
    assert report["modes"]["plain"]["tau"] == 1.0
    assert report["modes"]["tree"]["nodes_per_round"] <= 6


def test_every_mode_gets_the_same_prompts(base, tmp_path):
    path = tmp_path / "report.json"
    assert main([*base, "--json", str(path)]) == 0
    lengths = {}
    for row in json.loads(path.read_text())["outputs"]:
        lengths.setdefault(row["mode"], []).append((row["id"], row["turn"], row["prompt_tokens"]))
    assert len(lengths) == 4 and len(set(map(tuple, lengths.values()))) == 1
    # the second turn holds the first one and its reply
    assert lengths["plain"][1][2] > lengths["plain"][0][2] + len("Hello")


def test_template_options_reach_every_prompt(base, tmp_path):
    """Catches: a prompt that is shown as it is not run, or run as it is not shown."""
    target, path = save_target(tmp_path / "target", "{% if brief %}<brief>{% endif %}" + TEMPLATE), tmp_path / "r.json"
    flags = ["--target", str(target), "--template-options", "{brief: true}", "--mode", "plain", "--hf", "none"]
    assert main([*base, *flags, "--max-turns", "1", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    prompts = [f"<brief><|user|>{text}\n<|assistant|>" for text in ("Hello", "Tell me")]
    assert report["run"]["first_prompt"] == prompts[0]
    assert [row["prompt_tokens"] for row in report["outputs"]] == [len(prompt) for prompt in prompts]


def test_sampling_with_a_seed(base, tmp_path, capsys):
    path = tmp_path / "report.json"
    assert main([*base, "--temperature", "1.0", "--top-k", "50", "--seed", "3", "--json", str(path)]) == 0
    assert "chain == plain, tree == plain (3/3 replies)" in capsys.readouterr().out
    assert {pair["reference"] for pair in json.loads(path.read_text())["verify"]["pairs"]} == {"plain"}


def test_lists_run_every_combination(base, tmp_path):
    path = tmp_path / "report.json"
    flags = [
        "--tree-nodes",
        "4,6",
        "--chain-depth",
        "2",
        "--limit",
        "1",
        "--max-turns",
        "1",
        "--repeats",
        "2",
        "--hf",
        "none",
    ]
    assert main([*base, *flags, "--json", str(path)]) == 0
    modes = json.loads(path.read_text())["modes"]
    assert list(modes) == ["plain", "chain", "tree", "tree[d3k2n6]"]
    assert modes["chain"]["settings"] == {
        "depth": 2, "top_k": 1, "nodes": 2, "level_weight": 1.0, "adaptive": False,
        "rule": "match", "draft_noise": "none", "threshold": 0.3, "draft_sharpness": 1.0, "lossless": True,
    }  # fmt: skip
    assert modes["tree"]["settings"]["nodes"] == 4 and modes["tree"]["speedup_vs_hf"] is None
    for name in ("tokens_per_second", "speedup_vs_plain"):
        low, high = modes["tree"][f"{name}_spread"]
        assert low <= modes["tree"][name] <= high


def test_plain_only_needs_no_head(target_folder, prompts_file, capsys):
    argv = ["--target", str(target_folder), "--prompts", str(prompts_file), "--mode", "plain", "--hf", "none", *FAST]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "head     none" in out and "nothing to compare" in out


def test_unused_flags_are_said_once(target_folder, prompts_file, tmp_path, capsys):
    path = tmp_path / "report.json"
    argv = ["--target", str(target_folder), "--prompts", str(prompts_file), "--mode", "plain", "--hf", "none"]
    assert main([*argv, "--max-new-tokens", "12", "--draft", "random", "--json", str(path)]) == 0
    assert capsys.readouterr().out.count("note: --draft changes nothing") == 1
    assert json.loads(path.read_text())["run"]["notes"] == ["--draft changes nothing: no mode drafts"]


def test_the_run_says_that_its_seed_does_not_fix_its_tokens(base, tmp_path, capsys):
    path = tmp_path / "report.json"
    flags = ["--mode", "auto", "--temperature", "1", "--rule", "target_only", "--hf", "none", "--limit", "1"]
    assert main([*base, *flags, "--json", str(path)]) == 0
    assert capsys.readouterr().out.count("note: auto[target_only] draw") == 1
    assert json.loads(path.read_text())["run"]["notes"][0].startswith("auto[target_only] draw")


def test_saved_head(base, head_folder):
    assert main([*base, "--draft", str(head_folder), "--mode", "chain", "--hf", "none", "--limit", "1"]) == 0


def test_warnings_are_notes_of_one_line_each_said_once(base, head_folder, tmp_path, capsys):
    """The head was made for other weights, which loading and every engine tell; its vocabulary is small, too."""
    folder = tmp_path / "head"
    shutil.copytree(head_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    text = json.dumps(config).replace(Target.load(base[1]).fingerprint, "0" * 16)
    (folder / "config.json").write_text(text)
    # loading here shows transformers' progress, unless a run before has turned it off
    capsys.readouterr()
    before = warnings.showwarning
    assert main([*base, "--draft", str(folder), "--tree-top-k", "2,400", "--hf", "none", "--limit", "1"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ")[:2] for line in lines] == [["note:", "the"], ["note:", "tree"]]
    assert "other weights" in lines[0] and "top_k 400 is more than the draft vocabulary" in lines[1]
    assert warnings.showwarning is before


def test_no_template_is_said_once(tmp_path, prompts_file, capsys):
    folder = save_target(tmp_path / "plain", template=None)
    assert main(["--target", str(folder), "--draft", "random", "--prompts", str(prompts_file), *FAST]) == 0
    out = capsys.readouterr().out
    assert "  | Hello\n" in out and out.count("has no chat template") == 1


PENALTIES = (
    "--repetition-penalty", "1.3", "--presence-penalty", "0.5", "--frequency-penalty", "0.2", "--logit-bias", "65=4",
    "--min-tokens", "8", "--bad-word", "A", "--bad-word", "XY",
)  # fmt: skip


@pytest.mark.parametrize("batch", ["1", "3"])
def test_penalties_and_bans_are_the_same_for_every_mode(base, tmp_path, capsys, batch):
    path = tmp_path / "report.json"
    argv = [*base, *PENALTIES, "--dtype", "float32", "--batch", batch, "--verify", "--json", str(path)]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "chain == plain, tree == plain, plain == HF generate (3/3 replies)" in out
    assert "greedy: repetition_penalty 1.3" in out and "bad_words ['A', 'XY']" in out
    report = json.loads(path.read_text())
    for row in report["outputs"]:
        assert "A" not in row["text"] and "XY" not in row["text"]
        assert len(row["token_ids"]) >= 8


def test_a_batch_replies_as_one_prompt_at_a_time(base, tmp_path, capsys):
    path, outputs = tmp_path / "report.json", {}
    for batch in ("1", "3"):
        assert main([*base, "--dtype", "float32", "--batch", batch, "--json", str(path)]) == 0
        report = json.loads(path.read_text())
        assert report["verify"]["identical"] == report["verify"]["compared"] == 5 * 3
        order = sorted(report["outputs"], key=lambda row: (row["mode"], row["id"], row["turn"]))
        outputs[batch] = [(row["mode"], row["id"], row["turn"], row["token_ids"], row["rounds"]) for row in order]
    assert outputs["1"] == outputs["3"]
    assert "Up to 3 prompts at once" in capsys.readouterr().out
    for key, mode in report["modes"].items():
        rows = [row for row in report["outputs"] if row["mode"] == key]
        # all first turns, then the second ones
        assert [(row["id"], row["turn"]) for row in rows] == [("1", 0), ("2", 0), ("1", 1)]
        assert mode["seconds"] == pytest.approx(sum(row["seconds"] for row in rows))
        decoding = mode["seconds"] - mode["seconds_by_stage"]["prefill"]
        assert mode["tokens_per_second"] == pytest.approx((mode["tokens"] - len(rows)) / decoding)


def test_rules_that_draw_other_tokens_are_labelled_and_not_compared(base, tmp_path, capsys):
    path = tmp_path / "report.json"
    flags = ["--temperature", "1", "--rule", "match,rejection,threshold", "--verify", "--json", str(path)]
    assert main([*base, *flags, "--mode", "plain,chain"]) == 0
    out, report = capsys.readouterr().out, json.loads(path.read_text())
    assert list(report["modes"]) == ["plain", "chain", "chain[rejection]", "chain[threshold]", "hf_generate"]
    assert [mode["lossy"] for mode in report["modes"].values()] == [False, False, False, True, False]
    assert report["modes"]["chain[rejection]"]["settings"]["rule"] == "rejection"
    assert not report["modes"]["chain[threshold]"]["settings"]["lossless"]
    apart = {row["mode"] for row in report["verify"]["not_compared"]}
    assert apart == {"chain[rejection]", "chain[threshold]", "hf_generate"}
    assert {(pair["mode"], pair["reference"]) for pair in report["verify"]["pairs"]} == {("chain", "plain")}
    assert "chain threshold LOSSY" in out and "LOSSY: chain[threshold]" in out
    assert "outputs: chain[rejection] not compared: a rule that draws other tokens, of the same law" in out
    assert "outputs: HF generate not compared: transformers draws noise of its own" in out


def test_shared_noise_emits_plains_tokens(base, capsys):
    flags = ["--temperature", "1", "--draft-noise", "none,shared", "--dtype", "float32", "--verify"]
    assert main([*base, *flags]) == 0
    assert "chain[shared] == plain" in capsys.readouterr().out


def test_an_adaptive_run(base, tmp_path, capsys):
    path = tmp_path / "report.json"
    flags = ["--tree-nodes", "6,auto", "--dtype", "float32", "--verify", "--json", str(path)]
    assert main([*base, *flags]) == 0
    report = json.loads(path.read_text())
    assert list(report["modes"]) == ["plain", "chain", "tree", "auto", "hf_generate"]
    assert report["modes"]["auto"]["settings"]["adaptive"] and report["modes"]["auto"]["nodes_per_round"] <= 6
    assert report["verify"]["identical"] == report["verify"]["compared"] == 7 * 3
    assert "<=d3k2n6" in capsys.readouterr().out


def test_logprobs_are_in_the_report(base, tmp_path, capsys):
    path = tmp_path / "report.json"
    argv = [*base, "--dtype", "float32", "--json", str(path)]
    assert main([*argv, "--logprobs"]) == 0
    report = json.loads(path.read_text())
    for row in report["outputs"]:
        if row["mode"] == "hf_generate":
            assert "logprobs" not in row
        else:
            assert len(row["logprobs"]) == len(row["token_ids"]) and max(row["logprobs"]) <= 0
    means = [mode["mean_logprob"] for mode in report["modes"].values()]
    assert means[0] == pytest.approx(means[1], abs=1e-4) == pytest.approx(means[2], abs=1e-4) and means[3] is None
    assert "mean log-prob of a token under the target" in capsys.readouterr().out
    assert main(argv) == 0
    assert all("logprobs" not in row for row in json.loads(path.read_text())["outputs"])


def test_stop_string_ends_every_mode_alike(base, tmp_path, capsys):
    path = tmp_path / "report.json"
    assert main([*base, "--json", str(path)]) == 0
    plain = [row for row in json.loads(path.read_text())["outputs"] if row["mode"] == "plain"]
    place, stop = next(
        ((row["id"], row["turn"]), char)
        for row in plain
        for char in row["text"][2:]
        if char.isascii() and char.isprintable() and char not in row["text"][:2]
    )
    assert main([*base, "--stop", stop, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["verify"]["identical"] == report["verify"]["compared"] > 0
    firsts = [row for row in report["outputs"] if (row["id"], row["turn"]) == place]
    assert {row["finish_reason"] for row in firsts} == {"stop"}


class Stopping(bench_module.Engine):
    """An engine whose user presses Ctrl-C during its fifth run, or as a run's third request ends."""

    calls = 0
    results: int | None = None

    def generate(self, requests, on_result=None):
        Stopping.calls += 1
        if Stopping.calls == 5:
            raise KeyboardInterrupt

        def stop(index, result):
            if on_result is not None:
                on_result(index, result)
            if Stopping.results is not None:
                Stopping.results += 1
                if Stopping.results == 3:
                    raise KeyboardInterrupt

        return super().generate(requests, stop)


def test_ctrl_c_keeps_what_was_finished(base, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_module, "Engine", Stopping)
    monkeypatch.setattr(Stopping, "calls", 0)
    path = tmp_path / "report.json"
    # one warm-up and three plain replies, then the chain's warm-up
    assert main([*base, "--json", str(path)]) == 130
    report = json.loads(path.read_text())
    assert list(report["modes"]) == ["plain"] and len(report["outputs"]) == 3
    assert report["run"]["interrupted"]
    assert "interrupted" in capsys.readouterr().err


def test_ctrl_c_in_a_batch_keeps_the_replies_that_had_ended(base, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_module, "Engine", Stopping)
    monkeypatch.setattr(Stopping, "calls", 0)
    monkeypatch.setattr(Stopping, "results", 0)
    path = tmp_path / "report.json"
    # two prompts warm up; the third result is the first reply that counts
    assert main([*base, "--batch", "2", "--json", str(path)]) == 130
    report = json.loads(path.read_text())
    assert list(report["modes"]) == ["plain"] and len(report["outputs"]) == 1


class Spoilt(bench_module.Engine):
    """An engine whose results are changed as they come."""

    def generate(self, requests, on_result=None):
        def told(index, result):
            self.spoil(result.token_ids)
            if on_result is not None:
                on_result(index, result)

        return super().generate(requests, told)

    def spoil(self, tokens):
        raise NotImplementedError


class Wrong(Spoilt):
    """Its drafts change the third token: what --verify is for."""

    def spoil(self, tokens):
        if self.drafter is not None and len(tokens) > 2:
            tokens[2] = (tokens[2] + 1) % 250


@pytest.mark.parametrize("replayed", [False, True], ids=["in the run only", "in the replay too"])
def test_verify_finds_a_bug(base, tmp_path, capsys, monkeypatch, replayed):
    """Also where the replay does not show it: the token that was left led by more than rounding moves."""
    monkeypatch.setattr(bench_module, "Engine", Wrong)
    if replayed:
        monkeypatch.setattr(replay_module, "Engine", Wrong)
    path = tmp_path / "report.json"
    argv = [*base, "--mode", "plain,chain", "--dtype", "float32", "--json", str(path)]
    assert main(argv) == 0
    assert "--verify tells rounding from a bug" in capsys.readouterr().out
    assert main([*argv, "--verify"]) == 1
    assert "BUG: chain against plain, prompt 1, turn 1, token 2" in capsys.readouterr().out
    bugs = json.loads(path.read_text())["verify"]["bugs"]
    assert {(bug["mode"], bug["reference"]) for bug in bugs} == {("chain", "plain"), ("chain", "hf_generate")}
    assert len(bugs) == 6


def test_bf16_divergences_are_explained(base, tmp_path):
    """Rounding may part the modes; every place is then told, with its gap, and none is a bug."""
    path = tmp_path / "report.json"
    flags = ["--dtype", "bfloat16", "--max-new-tokens", "30", "--verify", "--json", str(path)]
    assert main([*base, *flags]) == 0
    verify = json.loads(path.read_text())["verify"]
    assert verify["unclassified"] == verify["bugs"] == []
    assert verify["identical"] + len(verify["numeric"]) == verify["compared"]
    assert all(row["gap"] < 0.5 for row in verify["numeric"])


def test_plain_decoding_that_parts_from_hf_is_a_bug(base, tmp_path, capsys, monkeypatch):
    """Both replays share this engine's faults; transformers' own fp32 decision does not."""
    monkeypatch.setattr(explain_module, "LARGEST_GAP", {torch.float32: 1e9})
    monkeypatch.setattr(explain_module, "stock_decision", lambda target, request, output: -1)

    class Both(Spoilt):
        def spoil(self, tokens):
            tokens[1] = (tokens[1] + 1) % 250

    monkeypatch.setattr(bench_module, "Engine", Both)
    assert main([*base, "--mode", "plain", "--dtype", "float32", "--verify", "--limit", "1"]) == 1
    assert "-1 in transformers" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, told",
    [
        (["--tree-dept", "3"], "did you mean --tree-depth?"),
        (["--mode", "plain,fast"], "fast"),
        (["--mode", ""], "--mode"),
        (["--dtype", "float8"], "float8"),
        (["--device", "tpu"], "tpu"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--temperature", "warm"], "--temperature"),
        (["--top-p", "1.5"], "top_p"),
        (["--top-p", "0"], "top_p"),
        (["--top-k", "-1"], "top_k"),
        (["--temperature", "1e-45"], "at least 0.0001"),
        (["--min-p", "2"], "min_p"),
        (["--repetition-penalty", "0"], "repetition_penalty"),
        (["--presence-penalty", "nan"], "presence_penalty"),
        (["--logit-bias", "5"], "ID=VALUE"),
        (["--logit-bias", "5=1", "--logit-bias", "5=2"], "twice"),
        (["--logit-bias", "257=1"], "--logit-bias or --bad-word of token id 257; ids are 0 .. 256"),
        (["--logit-bias=-3=1"], "--logit-bias or --bad-word of token id -3; ids are 0 .. 256"),
        (["--bad-word", ""], "--bad-word"),
        (["--min-tokens", "-1"], "min_tokens"),
        (["--rule", "greedy"], "match, target_only, rejection, threshold"),
        (["--rule", ""], "--rule"),
        (["--draft-noise", "loud"], "none, shared"),
        (["--rule", "rejection", "--draft-noise", "shared"], "needs the match rule"),
        (["--threshold", "0"], "threshold"),
        (["--batch", "0"], "--batch"),
        (["--prefill-rows", "0"], "--prefill-rows"),
        (["--tree-nodes", "many"], "'auto' or a comma list"),
        (["--tree-level-weight", "0"], "level_weight"),
        (["--tree-level-weight", "x"], "a number or a comma list"),
        (["--tree-depth", "0"], "depth"),
        (["--chain-depth", "99999999999999999999"], "between 1 and 1024"),
        (["--chain-depth", "300"], "between 1 and 256"),
        (["--tree-top-k", "99999999999999999999"], "between 1 and 1024"),
        (["--tree-top-k", "0"], "top_k"),
        (["--tree-nodes", "900"], "nodes"),
        (["--tree-nodes", "2"], "nodes"),
        (["--tree-nodes", "6,x"], "6,x"),
        (["--chain-depth", "0"], "depth"),
        (["--threads", "0"], "--threads"),
        (["--kernels", "fast"], "--kernels: kernels is 'fast'; it must be one of auto, triton, torch"),
        (["--limit", "0"], "--limit"),
        (["--repeats", "0"], "--repeats"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--max-new-tokens", "300"], "256 positions"),
        (["--stop", ""], "--stop"),
        (["--draft", "no-such-head"], "no-such-head"),
        (["--draft", __file__], "is not a folder"),
        (["--target", "./no-such-model"], "no-such-model"),
        (["--target", __file__], "is a file"),
        (["--prompts", "no-such.jsonl"], "no-such.jsonl"),
        (["--prompts", "."], "is a folder"),
        (["--json", "."], "is a folder"),
        (["--json", "no/such/folder/report.json"], "no/such/folder"),
        (["--json", "/dev/null"], "a device or a pipe"),
        (["--json", "x" * 300], "too long"),
        (["--prompts", "~nobody-here/x"], "no such file"),
        (["--prompts", "x" * 300], "no such file"),
        (["--prompts", ""], "--prompts names nothing"),
        (["--prompts", "humaneval"], "no such file, and $EAGLE3_PROMPTS"),
        (["--hf", "generate,lookup"], "--hf names lookup, expected none, or some of generate,prompt_lookup,assisted"),
        (["--hf", ""], "--hf names nothing"),
        (["--hf", "none,generate"], "--hf is none,generate"),
        (["--hf", "assisted"], "--assistant MODEL"),
        (["--hf", "assisted", "--assistant", "./no-such-model"], "--assistant ./no-such-model cannot be loaded"),
        (["--html", "."], "--html . is a folder"),
        (["--html", "no/such/page.html"], "the folder no/such does not exist"),
        (["--plot", __file__], "is a file, expected a folder"),
        (["--plot", "no/such/folder"], "the folder no/such does not exist"),
        (["--html-replies", "0"], "--html-replies"),
        (["--server", "localhost:8000"], "expected http://"),
        (["--draft", "~nobody-here/x"], "does not exist"),
        (["--draft", "x" * 300], "too long"),
        (["--target", "~nobody-here/x/y"], "does not exist"),
        (["--stop", "\udcff"], "no text"),
        (["--limit"], "--limit"),
        (["stray"], "stray"),
    ],
)
def test_bad_flags(base, capsys, flags, told):
    assert told in failing(capsys, *base, *flags)


def test_triton_needs_a_gpu_or_its_interpreter(base, capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("eagle3_kernels.dispatch.has_triton", lambda: True)
    try:
        assert "--kernels: kernels triton on a cpu tensor" in failing(capsys, *base, "--kernels", "triton")
    finally:
        set_kernels(None)


def test_bad_prompt_line_names_file_and_line(base, tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "fine"}\n{broken\n')
    assert f"{path}:2" in failing(capsys, *base, "--prompts", path)


def test_report_survives_arguments_and_ids_that_are_no_text(base, tmp_path):
    """Bytes outside UTF-8 reach Python as lone surrogates, which no file takes."""
    prompts, report = tmp_path / "odd.jsonl", tmp_path / "\udcff.json"
    prompts.write_text('{"prompt": "a", "id": "\\ud800"}')
    assert main([*base, "--prompts", str(prompts), "--mode", "plain", "--hf", "none", "--json", str(report)]) == 0
    content = json.loads(report.read_text())
    assert content["outputs"][0]["id"] == "\ud800"
    assert content["run"]["argv"][-1] == str(report)


def test_reader_that_leaves_early_is_no_error(target_folder, prompts_file):
    words = ["--target", str(target_folder), "--prompts", str(prompts_file), "--mode", "plain", "--hf", "none"]
    command = [sys.executable, "-u", "-m", "eagle3_infer.cli", *words, "--max-new-tokens", "8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert not {"Traceback", "error:"} & set(process.stderr.read().split())


def test_too_long_prompt_is_named(base, tmp_path, capsys):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "fine"}) + "\n" + json.dumps({"prompt": "x" * 300}))
    assert f"{path}:2" in failing(capsys, *base, "--prompts", path)


def test_a_later_turn_that_grows_too_long_is_left_out(base, tmp_path, capsys):
    path = tmp_path / "turns.jsonl"
    path.write_text(json.dumps({"turns": ["x" * 150, "y" * 150]}))
    assert main([*base, "--prompts", str(path), "--mode", "plain", "--hf", "none"]) == 0
    assert "turn 2 left out" in capsys.readouterr().out


def test_head_for_another_hidden_size(base, tmp_path, head_folder, capsys):
    other = save_target(tmp_path / "wide", hidden=48)
    assert "hidden size" in failing(capsys, *base, "--target", other, "--draft", head_folder)


def test_checkpoint_without_fc(base, tmp_path, head_folder, capsys):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((head_folder / "config.json").read_text())
    weights = load_file(head_folder / "model.safetensors")
    del weights["fc.weight"]
    save_file(weights, broken / "model.safetensors")
    assert "fc.weight" in failing(capsys, *base, "--draft", broken)


def test_shipped_head_is_for_its_own_target(base, capsys):
    argv = [flag for flag in base if flag not in ("--draft", "random")]
    assert "--draft" in failing(capsys, *argv)


def test_help_is_quick_and_imports_nothing_heavy():
    code = (
        "import sys; from eagle3_infer.flags import build_parser; build_parser().format_help(); "
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    paths = ":".join(str(root / part) for part in (".", "infer", "kernels"))
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": paths}
    )
    assert done.stdout.strip() == "[]" and time.perf_counter() - start < 2


class Server(BaseHTTPRequestHandler):
    """Says one word to everybody."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send_error(404)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        events = {"choices": [{"delta": {"content": "Hi"}}]}, {"choices": [], "usage": {"completion_tokens": 1}}
        for event in (*map(json.dumps, events), "[DONE]"):
            self.wfile.write(f"data: {event}\n\n".encode())


@pytest.fixture
def server():
    """The address of one."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_a_server_is_measured_without_torch(server, prompts_file, tmp_path):
    """From the flags to the page: no model is loaded, so what loads them is not waited for."""
    page = tmp_path / "page.html"
    code = (
        "import sys; from eagle3_infer.cli import main; code = main(sys.argv[1:]); "
        "print(code, sorted({'torch', 'transformers', 'tokenizers', 'triton'} & set(sys.modules)))"
    )
    words = ["--server", server, "--server-model", "m", "--prompts", str(prompts_file), "--html", str(page)]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr
    assert "EAGLE-3 report" in page.read_text()


@pytest.mark.parametrize(
    "module, argv",
    [("run", []), ("server_run", ["--server", "http://127.0.0.1:1"]), ("tune", ["tune"])],
)
def test_ctrl_c_during_imports_is_heard_although_a_library_swallows_it(module, argv):
    code = f"""
import signal, sys
from eagle3_infer.cli import ended_by_ctrl_c, main
class Library:
    def find_spec(self, name, path, target=None):
        if name == "eagle3_infer.{module}":
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                raise SystemExit("swallowed")
sys.meta_path.insert(0, Library())
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main({argv!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_ctrl_c_is_as_before_after_imports():
    """Also where it is ignored, as of a job in the background."""
    for handler in (signal.default_int_handler, signal.SIG_IGN):
        before = signal.signal(signal.SIGINT, handler)
        try:
            with ended_by_ctrl_c():
                inside = signal.getsignal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is handler
            assert (inside is handler) == (handler is signal.SIG_IGN)
        finally:
            signal.signal(signal.SIGINT, before)
