"""`eagle3-infer tune`: count, measure, predict, time the finalists, and say which command to use."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from eagle3.heads.eagle3 import Eagle3Head
from eagle3.target import Target
from eagle3_infer.bench import Bench
from eagle3_infer.compare import compare_modes
from eagle3_infer.config import TreeConfig
from eagle3_infer.costs import CostModel, row_tiers
from eagle3_infer.describe import describe_run, header_lines
from eagle3_infer.notes import tuning_notes
from eagle3_infer.outputs import deliver, ignoring_ctrl_c
from eagle3_infer.prepare import prepare
from eagle3_infer.prompts import Prompt
from eagle3_infer.report import build_report
from eagle3_infer.settings import EXIT_INTERRUPTED, EXIT_OK, PLAIN, TUNE
from eagle3_infer.table import align, render_report
from eagle3_infer.terminal import Progress, note_lines, print_header
from eagle3_infer.tune_costs import round_costs
from eagle3_infer.tune_counts import count_offers, wide_engine
from eagle3_infer.tune_flags import TuneSettings, command_line, tree_key
from eagle3_infer.tune_shapes import Prediction, around, at_bounds, finalists, predict

SHOWN = 8
# a fixed tree that is so close to the fastest is preferred to an adaptive one, and a smaller one to a larger
CLOSE = 0.99


@torch.inference_mode()
def tune(settings: TuneSettings, argv: Sequence[str]) -> int:
    """Run and print everything; returns the exit code."""
    prepared = prepare(settings)
    prompts, target, head = prepared
    assert head is not None, "tuning drafts"
    most = settings.most.narrowed(head.draft_vocab_size)
    most.check_positions(target.max_positions)
    notes = tuning_notes(settings)
    print_header(header_lines(settings, prepared), notes)
    predictions, cost = predict_shapes(settings, target, head, prompts, most)
    print("\n" + prediction_lines(predictions, cost, settings.batch), flush=True)
    chosen = finalists(predictions, settings.finalists)
    trees = [each.tree for each in chosen] + [around(chosen[0].tree, most)]
    bench = Bench(replace(settings, trees=tuple(trees)), target, head, prompts, Progress())
    bench.prepare()
    bench.run()
    return conclude(bench, argv, notes, predictions, cost, most)


def predict_shapes(
    settings: TuneSettings, target: Target, head: Eagle3Head, prompts: Sequence[Prompt], most: TreeConfig
) -> tuple[list[Prediction], CostModel]:
    """Count what the head offers, measure what rows cost, and predict every shape, fastest first."""
    bench = Bench(settings, target, head, prompts, Progress())
    bench.prepare()
    requests = bench.first_requests()
    bench.progress.show(f"counting what the head offers in {len(requests)} replies")
    engine = wide_engine(target, head, most, settings.rules[0], settings.prefill_rows)
    offers = count_offers(engine, requests)
    bench.progress.show("measuring what rows cost")
    cost = round_costs(engine, most, settings.batch, requests)
    bench.progress.clear()
    return predict(offers, cost, settings.batch, most), cost


def conclude(
    bench: Bench,
    argv: Sequence[str],
    notes: Sequence[str],
    predictions: Sequence[Prediction],
    cost: CostModel,
    most: TreeConfig,
) -> int:
    """Write the report, print the finalists and the answer.

    Args:
        notes: those that were printed before.
    """
    settings: Any = bench.settings
    sampled = settings.sampling.temperature > 0
    with ignoring_ctrl_c(bench.interrupted):
        comparison = compare_modes(bench.modes, None, sampled)
        report = build_report(describe_run(bench, [TUNE, *argv], notes), bench.modes, comparison)
        modes, trees = report["modes"], settings.trees
        tree = fastest(modes, trees)
        report["tune"] = {
            "costs": cost_seconds(cost, settings.batch, most),
            "predicted": [asdict(each.tree) | each._asdict() | {"tree": tree_key(each.tree)} for each in predictions],
            "best": None if tree is None else asdict(tree),
            "command": command_line(argv, tree) if timed(modes, trees) else None,
        }
        said = [*note_lines(bench.notes), "", render_report(report), "", answer_lines(modes, trees, most, argv)]
        if deliver(settings, report, "\n".join(said).lstrip()):
            bench.interrupted = True
    if bench.interrupted:
        print("interrupted: the answer is of what was finished", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_OK


def timed(modes: dict[str, Any], trees: Sequence[TreeConfig]) -> dict[TreeConfig, float]:
    """Speedups over plain decoding, of the trees that have one: an interrupt comes before some or all."""
    gains = {tree: modes.get(tree_key(tree), {}).get("speedup_vs_plain") for tree in trees}
    return {tree: gain for tree, gain in gains.items() if gain is not None}


def fastest(modes: dict[str, Any], trees: Sequence[TreeConfig]) -> TreeConfig | None:
    """The tree to use by its measured speedup over plain decoding; None where none is faster.

    Of those that are as good as the fastest, a fixed one, and the smallest.
    """
    gains = timed(modes, trees)
    best = max(gains.values(), default=0.0)
    if best <= 1.0:
        return None
    close = [tree for tree, gain in gains.items() if gain >= max(CLOSE * best, 1.0)]
    return min(close, key=lambda tree: (tree.adaptive, tree.nodes))


def answer_lines(modes: dict[str, Any], trees: Sequence[TreeConfig], most: TreeConfig, argv: Sequence[str]) -> str:
    """What to use, how fast it was, and the command; neither where no tree was timed."""
    if PLAIN not in modes:
        return "nothing was measured"
    known, tree = timed(modes, trees), fastest(modes, trees)
    if not known:
        return "no tree was timed beside plain decoding: there is no answer"
    if tree is None:
        lines = ["use plain decoding: no tree was faster here"]
    else:
        mode = modes[tree_key(tree)]
        spread = "{:.2f} - {:.2f}".format(*mode["speedup_vs_plain_spread"])
        lines = [
            f"use {tree_key(tree)}: {mode['tokens_per_second']:.1f} tokens/s, {mode['speedup_vs_plain']:.2f}x plain "
            f"decoding ({spread}), tau {mode['tau']:.2f}"
        ]
        if (bounds := at_bounds(tree, most)) and not tree.adaptive:
            flags = ", ".join(f"--tree-{name.replace('_', '-')}" for name in bounds)
            lines.append(f"it is as large as was looked at: a larger {flags} may find a better one")
    if len(known) < len(trees):
        lines.append(f"only {len(known)} of the {len(trees)} trees to be timed were: another may be faster")
    lines += ["", f"  {command_line(argv, tree)}"]
    if tree is not None:
        lines.append(f"  or, in Python: {_constructor(tree)}")
    return "\n".join(lines)


def _constructor(tree: TreeConfig) -> str:
    adaptive = ", adaptive=True" if tree.adaptive else ""
    return f"TreeConfig(depth={tree.depth}, top_k={tree.top_k}, nodes={tree.nodes}{adaptive})"


def prediction_lines(predictions: Sequence[Prediction], cost: CostModel, slots: int) -> str:
    """The best shapes, the best chain, and what they are predicted from."""
    plain = slots / cost.plain(slots)
    best = list(predictions[:SHOWN])
    best += [each for each in predictions if each.tree.top_k == 1 and each not in best][:1]
    rows = [("predicted", "tau", "tok/s", "vs plain")]
    rows += [
        (
            tree_key(each.tree),
            f"{each.tau:.2f}",
            f"{each.tokens_per_second:.1f}",
            f"{each.tokens_per_second / plain:.2f}x",
        )
        for each in best
    ]
    tiers = [n for n in (1, 8, 16, 32, 64) if n <= predictions[0].tree.nodes * 4 + 1]
    seconds = ", ".join(f"{n} rows {1e3 * cost.verify(n * slots):.1f} ms" for n in tiers)
    return (
        f"{align(rows, left=1)}\n{len(predictions)} shapes, from counted acceptance and measured costs; "
        f"the target takes for {seconds}" + (f" (rows of each of {slots} requests)" if slots > 1 else "")
    )


def cost_seconds(cost: CostModel, slots: int, most: TreeConfig) -> dict[str, Any]:
    """Seconds by rows, as predictions take them, and beside all forwards of a round."""
    return {
        "verify": {str(n): cost.verify(n) for n in row_tiers(slots * (most.nodes + 1))},
        "first": {str(n): cost.first(n) for n in row_tiers(slots * (most.depth + 1))},
        "level": {str(n): cost.level(n) for n in row_tiers(slots * most.top_k)},
        "rest": cost.rest(slots, drafted=True),
    }
