"""run_ablations.py: a sweep from its command to its table, over runs that fail and are resumed; once for real."""

import csv
import json
import runpy
import signal
import threading
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import pytest

import eagle3_infer.cli
from eagle3.errors import ConfigError
from oracles.sweeps import FakeProcess, flags_of
from oracles.tiny import tiny_chats, tiny_folder

SCRIPT = Path(__file__).parents[2] / "recipes/run_ablations.py"
main = runpy.run_path(str(SCRIPT))["main"]


def run(sweep, *words):
    return main([str(sweep), "--output", str(sweep.parent / "out"), "--threads", "1", *map(str, words)])


def rows(sweep):
    with (sweep.parent / "out/sweep.csv").open() as file:
        return list(csv.DictReader(file))


def test_from_command_to_table(sweep, runner, capsys):
    assert run(sweep) == 0
    # two variants measure one head
    assert sum("train_draft.py" in command[1] for command in runner.commands) == 4
    assert len(runner.commands) == 10
    table = capsys.readouterr().out
    assert "does it matter?" in table
    lines = {line.split("  ")[0]: line for line in table.splitlines() if "±" in line}
    assert "1.505 ±0.005" in lines["usual"]
    assert "1.605 ±0.005" in lines["more steps"]
    assert "no plot: matplotlib is not installed" in table
    assert "~" not in lines["more steps"].split("1.605 ±0.005")[1].split("  ")[0]
    assert "2000 ±0~" not in table
    assert "1.505 ±0.005~" in lines["deep"]
    found = rows(sweep)
    assert {(r["variant"], r["seed"], r["mode"]) for r in found} == {
        (v, s, m) for v in ("usual", "more steps", "deep") for s in "01" for m in ("plain", "chain")
    }
    assert {float(r["tau"]) for r in found if r["variant"] == "more steps" and r["mode"] == "chain"} == {1.6, 1.61}
    result = json.loads(next((sweep.parent / "out/runs").glob("more_steps-s1-*/result.json")).read_text())
    assert result["complete"]
    assert result["training"]["tokens"] == 2000
    assert not list((sweep.parent / "out/runs").rglob("checkpoints"))


def test_what_is_done_is_not_done_again(sweep, runner):
    """A seed more, another evaluation: only what is new is run."""
    assert run(sweep) == 0
    del runner.commands[:]
    assert run(sweep) == 0
    assert runner.commands == []
    assert run(sweep, "--seeds", "0,1,2") == 0
    assert len(runner.commands) == 5
    del runner.commands[:]
    sweep.write_text(sweep.read_text().replace("max_turns: 1", "max_turns: 2"))
    assert run(sweep) == 0
    assert len(runner.commands) == 6
    assert not any("train_draft.py" in command[1] for command in runner.commands)


def test_a_failed_run_is_reported_and_tried_again(sweep, runner, capsys):
    """One failure that ends the sweep, or that the table hides."""
    runner.fail = lambda command: 2 if flags_of(command).get("ttt.steps") == "3" else None
    assert run(sweep) == 1
    told = capsys.readouterr()
    assert "more steps s0: train ended with code 2" in told.err
    assert "  error: it broke" in told.err
    assert "2 of 6 runs are not done" in told.err
    line = next(line for line in told.out.splitlines() if line.startswith("more steps"))
    assert line.endswith("0 of 2")
    assert {r["status"] for r in rows(sweep) if r["variant"] == "more steps"} == {"unfinished"}
    runner.fail = lambda command: None
    del runner.commands[:]
    assert run(sweep) == 0
    assert len(runner.commands) == 4


def test_an_interrupted_sweep_shows_what_it_has(sweep, runner, capsys):
    def stop(command):
        if flags_of(command).get("seed") == "1":
            raise KeyboardInterrupt

    runner.fail = stop
    assert run(sweep) == 130
    told = capsys.readouterr()
    assert "3 of 6 runs are not done; the same command goes on" in told.err
    assert next(line for line in told.out.splitlines() if line.startswith("deep")).endswith("1 of 2")
    runner.fail = lambda command: None
    assert run(sweep) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_sweep_whose_terminal_closes_ends_its_runs(sweep, runner, monkeypatch, number):
    """SIGHUP that leaves trainers without a runner; what is done is shown all the same."""
    # whoever runs the tests may ignore SIGHUP (nohup)
    before = {n: signal.signal(n, signal.SIG_DFL) for n in (signal.SIGTERM, signal.SIGHUP)}
    children = []

    class Endless(FakeProcess):
        def send_signal(self, signal):
            self.code = -signal

    def start(command, log, place):
        if flags_of(command).get("seed") != "1":
            return runner(command, log, place)
        children.append(Endless(None))
        threading.Timer(0.1, signal.raise_signal, [number]).start()
        return children[0]

    monkeypatch.setattr("eagle3_recipes.execute.start_process", start)
    try:
        assert run(sweep, "--only", "usual") == 128 + number
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
    assert [child.code for child in children] == [-signal.SIGTERM]
    assert {r["status"] for r in rows(sweep) if (r["variant"], r["seed"]) == ("usual", "0")} == {"done"}


def test_what_nohup_ignores_stays_ignored(sweep, runner):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run(sweep, "--dry-run") == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_threads_are_of_the_cores_that_may_be_used(sweep, capsys, monkeypatch):
    """Two cores of 64, by taskset or a container: 64 threads each."""
    monkeypatch.setitem(main.__globals__, "usable_cores", lambda: 6)
    assert main([str(sweep), "--output", str(sweep.parent / "out"), "--dry-run", "--jobs", "2"]) == 0
    assert "--threads 3" in capsys.readouterr().out


def test_a_sweep_with_a_dot_in_its_name(sweep, runner):
    """loss-0.5 that writes its table over that of loss-0.3."""
    other = sweep.with_name("loss-0.5.yaml")
    other.write_text("variants: {shipped: {}}\nevaluate: {mode: chain, hf: none}\n")
    assert run(other) == 0
    assert {p.name for p in (sweep.parent / "out").iterdir() if p.is_file()} == {
        f"loss-0.5.{kind}" for kind in ("csv", "txt", "json")
    }


def test_a_report_of_an_interrupted_evaluation_is_not_taken(sweep, runner):
    """eagle3-infer writes what it has on ^C, too."""

    def partial(command):
        if "json" not in flags_of(command):
            return None
        runner.evaluate(flags_of(command))
        return 130

    runner.fail = partial
    assert run(sweep, "--only", "usual", "--seeds", 0) == 1
    runner.fail = lambda command: None
    del runner.commands[:]
    assert run(sweep, "--only", "usual", "--seeds", 0) == 0
    assert len(runner.commands) == 1


def test_only_runs_a_part_and_shows_the_whole(sweep, runner, capsys):
    """One row in place of the sweep's table, judged against itself."""
    assert run(sweep) == 0
    whole = (sweep.parent / "out/sweep.txt").read_text()
    assert run(sweep, "--only", "more steps") == 0
    assert (sweep.parent / "out/sweep.txt").read_text() == whole
    fresh = sweep.parent / "fresh"
    assert main([str(sweep), "--output", str(fresh), "--only", "more steps", "--seeds", "0"]) == 0
    assert "1 runs in" in capsys.readouterr().out
    usual, more, deep = (fresh / "sweep.txt").read_text().splitlines()[4:7]
    assert usual.endswith("  0 of 1")
    assert more.endswith("  1")
    assert deep.endswith("  0 of 1")
    # of the others there is no folder
    assert [path.name.partition("-")[0] for path in (fresh / "runs").iterdir()] == ["more_steps"]


@pytest.mark.parametrize(
    "fault, message",
    [
        ("{init_head: gone}", "gone/config.json: no such file"),
        ("{data.files: [gone.jsonl]}", "gone.jsonl: no such file"),
        ("{ttt.steps: 0}", "ttt.steps is 0"),
    ],
)
def test_only_is_not_refused_for_what_it_leaves_out(sweep, runner, capsys, fault, message):
    """A second variant that starts from a head which is yet to be trained."""
    sweep.write_text(sweep.read_text().replace("{evaluate.tree_depth: 3}", fault))
    assert run(sweep) == 2
    assert message in capsys.readouterr().err
    assert run(sweep, "--only", "usual") == 0
    told = capsys.readouterr()
    assert told.err.count("note: ") == told.err.count("\n") == 1
    assert "variant deep: " in told.err
    assert message in told.err
    assert {r["variant"] for r in rows(sweep)} == {"usual", "more steps"}
    assert run(sweep, "--only", "deep") == 2


def test_only_is_not_refused_for_old_runs_or_doubles(sweep, runner, capsys):
    assert run(sweep, "--only", "more steps", "--seeds", "0") == 0
    kept = next((sweep.parent / "out/runs").glob("more_steps-*/settings.json"))
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"optim.beta2": 0.5}))
    sweep.write_text(sweep.read_text().replace("{evaluate.tree_depth: 3}", "{}"))
    capsys.readouterr()
    assert run(sweep, "--only", "usual", "--seeds", "0") == 0
    told = capsys.readouterr().err
    assert "variant more steps: " in told
    assert "optim.beta2 was 0.5, is 0.95); move it away" in told
    # the same run under two names
    assert {(r["variant"], r["status"]) for r in rows(sweep)} == {("usual", "done"), ("deep", "done")}
    assert run(sweep, "--only", "usual", "--only", "deep") == 2
    assert "deep s0 is the same run as usual s0" in capsys.readouterr().err


def test_dry_run_goes_on_behind_a_record_of_another_version(sweep, runner, capsys):
    """The commands of later runs, missing."""
    assert run(sweep, "--only", "usual", "--seeds", "0") == 0
    record = next((sweep.parent / "out/runs").glob("usual-*/head/run.json"))
    record.write_text(json.dumps({"ended": "then"}))
    capsys.readouterr()
    assert run(sweep, "--dry-run", "--only", "usual", "--only", "more steps") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("# usual s0: error: ")
    assert "run.json or metrics.jsonl is not as this version writes it" in lines[0]
    assert lines[1] == "# more steps s0"
    assert sum("train_draft.py" in line for line in lines) == 3


def test_a_record_that_cannot_be_read_leaves_the_others_their_table(sweep, runner, capsys):
    """An I/O error, told as another version: hours of training moved away."""
    assert run(sweep) == 0
    metrics = next((sweep.parent / "out/runs").glob("more_steps-s0-*/head/metrics.jsonl"))
    metrics.unlink()
    metrics.mkdir()
    capsys.readouterr()
    assert run(sweep) == 1
    told = capsys.readouterr()
    assert "more steps s0: train did not start" in told.err
    assert "Is a directory" in told.err
    assert "move" not in told.err + told.out
    assert "1.505 ±0.005" in told.out


def test_dry_run_runs_nothing(sweep, runner, capsys):
    assert run(sweep, "--dry-run", "--only", "more steps") == 0
    assert runner.commands == []
    assert capsys.readouterr().out.count("train_draft.py") == 2
    assert not (sweep.parent / "out").exists()


@pytest.mark.parametrize(
    "words, message",
    [
        (["--only", "x"], "--only names x"),
        (["--seeds", "a"], "--seeds is 'a'"),
        (["--seeds", "0,0"], "--seeds: seeds is [0, 0]"),
        (["--jobs", "0"], "--jobs is 0"),
        (["--budget", "7"], "budget is '7'"),
        (["--gpus", ","], "--gpus: ',' names nothing"),
        (["--files", ""], "--files: '' names nothing"),
        (["--bugdet", "7min"], "unknown argument '--bugdet', did you mean --budget?"),
    ],
)
def test_wrong_words_are_one_line(sweep, capsys, words, message):
    assert run(sweep, *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_jobs_take_gpus_in_turn(sweep, runner, monkeypatch):
    places = []
    start = runner.__call__
    monkeypatch.setattr(
        "eagle3_recipes.execute.start_process", lambda c, log, place: places.append(place) or start(c, log, place)
    )
    assert run(sweep, "--gpus", "2,3", "--only", "usual", "--only", "more steps") == 0
    assert {place["CUDA_VISIBLE_DEVICES"] for place in places} == {"2", "3"}


def test_no_sweep_of_that_name(tmp_path, capsys):
    assert main([str(tmp_path / "nothing")]) == 2
    assert "nothing.yaml' does not exist" in capsys.readouterr().err


def test_a_grid_of_one_head(sweep, runner, capsys):
    """Speeds that a busy machine measured are not shown."""
    sweep.write_text(
        "variants: {shipped: {}}\nseeds: [0, 1]\nevaluate: {mode: [plain, chain], hf: none, temperature: 1}\n"
    )
    assert run(sweep) == 0
    assert not any("train_draft.py" in command[1] for command in runner.commands)
    table = capsys.readouterr().out
    assert "chain d2k1n2  2.000 ±0.000" in table
    assert "tok/s" not in table
    # modes are no variants of the first row's
    assert "~" not in table
    sweep.write_text(sweep.read_text() + "idle: true\n")
    assert run(sweep) == 0
    assert "tok/s" in capsys.readouterr().out
    assert len(runner.commands) == 2


def test_a_result_that_cannot_be_kept_fails_its_run_alone(sweep, runner, capsys):
    """A report without the keys that the table needs: the others were stopped, and no table was written."""
    evaluate, broken = runner.evaluate, []

    def other_version(flags):
        evaluate(flags)
        if flags.get("tree-depth") == "3":
            file = Path(flags["json"])
            report = json.loads(file.read_text())
            del report["modes"]["chain"]["tau"]
            file.write_text(json.dumps(report))
            broken.append(file.with_suffix(".json"))

    runner.evaluate = other_version
    assert run(sweep) == 1
    told = capsys.readouterr()
    assert "deep s0: evaluate ended well, and its result cannot be kept" in told.err
    assert "KeyError: 'tau'" in told.err
    assert "2 of 6 runs are not done" in told.err
    assert "1.605 ±0.005" in told.out
    # nor is it taken the next time
    runner.evaluate = evaluate
    assert run(sweep) == 1
    told = capsys.readouterr().err
    assert "deep s1: evaluate did not start" in told
    for report in broken:
        report.unlink()
    assert run(sweep) == 0


def test_a_picture_is_whole_or_not_there(sweep, runner, monkeypatch, capsys):
    """Half a PNG after ^C; yesterday's beside today's table."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("eagle3_recipes.summary.find_spec", find_spec)
    assert run(sweep) == 0
    picture = sweep.parent / "out/sweep.png"
    whole = picture.read_bytes()
    assert whole.startswith(b"\x89PNG")

    def broken(figure, file, **_):
        (file.write(b"half") if hasattr(file, "write") else Path(file).write_bytes(b"half"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", broken)
        assert run(sweep) == 130
    assert picture.read_bytes() == whole
    # of figures that cannot be drawn, of none, and without matplotlib there is none
    with monkeypatch.context() as patch:
        patch.setattr("eagle3_recipes.summary.draw", lambda *_: (_ for _ in ()).throw(ConfigError("two modes")))
        assert run(sweep) == 0
    assert "no plot: two modes" in capsys.readouterr().out
    assert not picture.exists()
    picture.write_bytes(whole)
    runner.fail = lambda command: 1
    assert run(sweep, "--seeds", "5") == 1
    assert not picture.exists()
    picture.write_bytes(whole)
    monkeypatch.setattr("eagle3_recipes.summary.find_spec", lambda name: None)
    assert run(sweep, "--seeds", "5") == 1
    assert not picture.exists()


def test_failures_are_told_where_no_table_can_be_written(sweep, runner, capsys):
    (sweep.parent / "out/sweep.txt").mkdir(parents=True)
    runner.fail = lambda command: 3
    assert run(sweep) == 2
    told = capsys.readouterr().err
    assert "usual s0: train ended with code 3" in told
    assert "error: " in told


def test_a_plot_is_checked_before_anything_runs(sweep, runner, capsys):
    """A column that nobody has, or two sharpnesses on one line, seen after hours."""
    text = "variants: {shipped: {}}\nevaluate: {mode: chain, hf: none, draft_noise: shared, draft_sharpness: [1, 2]}\n"
    for plot, message in (
        ("{x: dept}", "unknown setting 'dept'; did you mean 'depth'"),
        ("{x: depth, line: [rule, draft_nose]}", "plot.line: unknown setting 'draft_nose'"),
        ("{x: depth, line: rule}", "plot: two modes at depth 4 differ in draft_sharpness"),
    ):
        sweep.write_text(f"{text}plot: {plot}\n")
        assert run(sweep) == 2
        assert message in capsys.readouterr().err
    sweep.write_text(f"{text}plot: {{x: depth, line: draft_sharpness}}\n")
    assert run(sweep) == 0


def in_this_process(command, log, _place):
    """Trainer and eagle3-infer without the seconds that a process of their own takes to load."""
    words = command[command.index("--config") if "--config" in command else command.index("--mode") :]
    trainer = runpy.run_path(command[1])["main"] if command[1].endswith("train_draft.py") else eagle3_infer.cli.main
    with log.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        return FakeProcess(trainer(words))


@pytest.mark.parametrize("start", [in_this_process, pytest.param(None, marks=pytest.mark.full)])
def test_for_real(tmp_path, monkeypatch, capsys, start):
    """Flags that trainer or eagle3-infer do not take; a report that has other keys."""
    monkeypatch.chdir(tmp_path)
    if start is not None:
        monkeypatch.setattr("eagle3_recipes.execute.start_process", start)
    tiny_folder(tmp_path / "target")
    tiny_chats(tmp_path / "chats.jsonl", tmp_path / "target")
    (tmp_path / "base.yaml").write_text(
        "target: target\ndata: {files: [chats.jsonl], eval_rows: 4}\nhead: {draft_vocab_size: 100}\n"
        "ttt: {steps: 2}\nrows_per_step: 4\nautocast: float32\ndevice: cpu\n"
    )
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(
        "extends: base.yaml\nvariants: {usual: {}}\n"
        "evaluate: {mode: [chain, tree], tree_depth: 2, tree_top_k: 2, tree_nodes: 4, limit: 2, max_new_tokens: 8, "
        "hf: none}\n"
    )
    assert run(sweep, "--budget", "800 tokens", "--store", tmp_path / "store") == 0
    [chain, tree] = rows(sweep)
    assert (chain["kind"], tree["kind"], chain["status"]) == ("chain", "tree", "done")
    assert float(tree["tau"]) >= 1
    assert int(chain["train.tokens"]) >= 800
    assert float(chain["train.alpha.1"]) > 0
    assert list((tmp_path / "store").glob("layers-default-*/*.safetensors"))
    capsys.readouterr()
    assert run(sweep, "--budget", "800 tokens", "--store", tmp_path / "store") == 0
    assert "usual s0: done before" in capsys.readouterr().out
