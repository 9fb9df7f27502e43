"""A small sweep, and commands that are not run: what they would leave on disk is written in their place."""

import json
from pathlib import Path

from eagle3_recipes.results import mode_figures, records

BASE = """
target: tiny
data: {files: [chats.jsonl]}
ttt: {steps: 2}
max_steps: 5
"""
SWEEP = """# Question: does it matter?
extends: base.yaml
set: {optim.lr: 0.002}
variants:
  usual: {}
  more steps: {ttt.steps: 3}
  deep: {evaluate.tree_depth: 3}
seeds: [0, 1]
budget: 2k tokens
evaluate: {mode: [plain, chain], hf: none, max_turns: 1}
"""


class FakeProcess:
    """Ended with a code before it is asked."""

    def __init__(self, code):
        self.code, self.signals = code, []

    def poll(self):
        return self.code

    def send_signal(self, signal):
        self.signals.append(signal)

    def kill(self):
        if self.code is None:
            self.code = -9


class FakeRunner:
    """Notes commands, and writes what trainer and eagle3-infer would; `fail` says of a command how it ends badly.

    tau of a head is that of its flags: 1.5, with three TTT steps 1.6; chains have 0.2 more than their seed's 0.01.
    """

    def __init__(self):
        self.commands = []
        self.fail = lambda command: None

    def __call__(self, command, log, place):
        self.commands.append(list(command))
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write("loading\nstep 1\n")
            if (code := self.fail(command)) is not None:
                file.write("error: it broke\n")
                return FakeProcess(code)
        flags = flags_of(command)
        if "train_draft.py" in command[1]:
            self.train(Path(flags["output"]), int(flags.get("ttt.steps", 2)), flags)
        else:
            self.evaluate(flags)
        return FakeProcess(0)

    def train(self, head, steps, flags):
        for name in ("last", "checkpoints/step-1"):
            (head / name).mkdir(parents=True)
        record = {
            "ended": "now",
            "seconds": 60.0,
            "train_seconds": 48.0,
            "previous": [],
            "step": 5,
            "tokens": 2000,
            "parameters": 7,
        }
        (head / "run.json").write_text(json.dumps(record))
        (head / "last/tau").write_text(str(1.3 + 0.1 * steps + 0.01 * int(flags["seed"])))
        rates = [0.5] * steps
        shown = {"tau": 1.5, "loss": 2.0, "alpha": rates, "accept": rates, "accept_chain": rates, "coverage": 0.9}
        (head / "metrics.jsonl").write_text(json.dumps({"step": 5, "split": "eval", **shown}) + "\n")

    def evaluate(self, flags):
        tau = float((Path(flags["draft"]) / "tau").read_text()) if "draft" in flags else 2.0
        modes = {key: mode(key, tau) for key in flags["mode"].split(",")}
        Path(flags["json"]).write_text(json.dumps({"modes": modes, "outputs": [{"id": "a"}]}))


def mode(key, tau, **settings):
    """One mode of eagle3-infer's report."""
    drafts = {"depth": 2, "top_k": 1, "nodes": 2, "rule": "match", "draft_noise": "none", **settings}
    drafts = {} if key == "plain" else drafts
    tau = 1.0 if key == "plain" else tau
    return {
        "settings": drafts,
        "lossy": False,
        "tau": tau,
        "tau_prompt_mean": tau,
        "tokens": 100,
        "rounds": 50,
        "seconds": 2.0,
        "nodes_per_round": 2.0,
        "utilisation": 0.5,
        "tokens_per_second": 50.0,
        "speedup_vs_plain": tau / 1.25,
        "speedup_vs_hf": None,
        "accepted_by_level": [20, 10] if drafts else [],
        "loops": {"share": 0.0},
    }


def record(key, tau, seed=0, temperature=1.0, variant="a", **settings):
    """A row of a sweep without training."""
    modes = {key: mode_figures(key, mode(key, tau, **settings))}
    [row] = records([result_of(variant, seed, [{"temperature": temperature, "modes": modes}])])
    return row


def result_of(variant, seed, evaluations, training=None):
    place = {"variant": variant, "seed": seed, "settings": {}, "complete": True}
    return {**place, "training": training, "evaluations": evaluations}


def flags_of(command):
    """--name value pairs; a flag without a value is True."""
    flags, words = {}, list(command)
    for i, word in enumerate(words):
        if word.startswith("--"):
            after = words[i + 1] if i + 1 < len(words) else "--"
            flags[word[2:]] = True if after.startswith("--") else after
    return flags
