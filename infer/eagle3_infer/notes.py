"""What the user must know before a run: what changes nothing, what cannot be reached, what hangs on the clock."""

from collections.abc import Sequence

from eagle3_infer.config import MATCH, NO_NOISE, SHARED_NOISE, THRESHOLD, RuleConfig, SamplingConfig
from eagle3_infer.settings import AUTO, CHAIN, HF_MODES, TREE, RunSettings, flag


def run_notes(settings: RunSettings) -> list[str]:
    """One line each, of a run of this package's engine."""
    return [*unused(settings), *_unreachable(settings), *_untied_to_the_seed(settings), *_one_at_a_time(settings)]


def tuning_notes(settings: RunSettings) -> list[str]:
    """One line each, of `eagle3-infer tune`, which has fewer flags."""
    return [*_unused_when_greedy(settings), *_unreachable(settings)]


def server_notes(settings: RunSettings) -> list[str]:
    """One line each, of a server's measurement, which takes no flags of this package's engine."""
    return [*_unused_by_servers(settings), *_unreachable(settings)]


def unused(settings: RunSettings) -> list[str]:
    """What was asked for and changes nothing, flag by flag."""
    drafts = settings.needs_head
    said = _unused_when_greedy(settings) + _unused_by_shapes(settings)
    if settings.draft is not None and not drafts:
        said.append("--draft changes nothing: no mode drafts")
    if settings.chain_depth is not None and CHAIN not in settings.modes:
        said.append("--chain-depth changes nothing: chain is no mode of this run")
    if settings.rules != [RuleConfig(threshold=settings.threshold)] and not drafts:
        said.append("--rule and --draft-noise change nothing: no mode drafts")
    if _given(settings, ["draft_sharpness"]) and SHARED_NOISE not in settings.draft_noise:
        said.append(f"--draft-sharpness changes nothing: it belongs to --draft-noise {SHARED_NOISE}")
    if _given(settings, ["threshold"]) and THRESHOLD not in settings.rule:
        said.append(f"--threshold changes nothing: it belongs to --rule {THRESHOLD}")
    if settings.assistant is not None and not settings.drafts_assisted:
        said.append("--assistant changes nothing: it drafts for --hf assisted")
    if settings.server_model is not None:
        said.append("--server-model changes nothing without --server")
    if _given(settings, ["html_replies"]) and settings.html is None:
        said.append("--html-replies changes nothing without --html")
    if settings.logprobs and settings.json is None:
        said.append("--logprobs changes nothing without --json: log-probabilities go to the report alone")
    return said


def _unused_by_servers(settings: RunSettings) -> list[str]:
    """Flags of this package's engine and of Hugging Face's decoding, and what a server is not told."""
    names = ["target", "draft", "dtype", "device", "threads", "kernels", "prefill_rows", "graphs", "verify"]
    names += ["tree_depth", "tree_top_k", "tree_nodes", "tree_level_weight", "chain_depth", "rule", "draft_noise"]
    names += ["draft_sharpness", "threshold", "hf", "assistant"]
    flags = ["--mode"] * bool(_given(settings, ["modes"])) + [flag(name) for name in _given(settings, names)]
    said = [f"{name} changes nothing: --server alone is measured" for name in flags]
    if _given(settings, ["html_replies"]):
        said.append("--html-replies changes nothing: a server tells no rounds")
    if settings.sampling.temperature == 0 and settings.sampling.seed != SamplingConfig.seed:
        said.append("--seed changes nothing at temperature 0")
    return said


def _unused_by_shapes(settings: RunSettings) -> list[str]:
    """Flags of trees that no mode grows."""
    kinds = {plan.kind for plan in settings.plans()}
    names = [] if kinds & {TREE, AUTO} else ["tree_top_k", "tree_nodes", "tree_level_weight"]
    if names and (CHAIN not in kinds or settings.chain_depth is not None):
        names.insert(0, "tree_depth")
    said = [f"{flag(name)} changes nothing: no mode of this run has such trees" for name in _given(settings, names)]
    if AUTO in kinds and _given(settings, ["tree_level_weight"]):
        said.append(f"--tree-level-weight changes nothing of {AUTO}: it ranks nodes by learned acceptance")
    return said


def _unused_when_greedy(settings: RunSettings) -> list[str]:
    if settings.sampling.temperature != 0:
        return []
    given, default = settings.sampling, SamplingConfig()
    names = [flag(n) for n in ("top_k", "top_p", "min_p", "seed") if getattr(given, n) != getattr(default, n)]
    if settings.needs_head:
        # greedy requests match, but for the threshold, which takes other drafts of them, too
        rules = [rule for rule in dict.fromkeys(settings.rule) if rule not in (MATCH, THRESHOLD)]
        names += [f"--rule {rule}" for rule in rules]
        if set(settings.draft_noise) != {NO_NOISE}:
            names.append("--draft-noise")
        if _given(settings, ["draft_sharpness"]) and SHARED_NOISE in settings.draft_noise:
            names.append("--draft-sharpness")
    return [f"{name} changes nothing at temperature 0" for name in names]


def _given(settings: RunSettings, names: Sequence[str]) -> list[str]:
    """Those that are not what they are by default."""
    return [name for name in names if getattr(settings, name) != getattr(RunSettings, name)]


def _unreachable(settings: RunSettings) -> list[str]:
    least, most = settings.sampling.min_tokens, settings.max_new_tokens
    if least <= most:
        return []
    return [f"--min-tokens {least} is more than --max-new-tokens {most}: every reply ends at {most} (or --stop)"]


def _untied_to_the_seed(settings: RunSettings) -> list[str]:
    # the threshold gives a greedy request, too, whatever was drafted
    greedy = settings.sampling.temperature == 0
    keys = [
        plan.key
        for plan in settings.plans()
        if plan.kind == AUTO and plan.rule and (plan.rule.rule == THRESHOLD if greedy else not plan.rule.pathwise)
    ]
    if not keys:
        return []
    return [
        f"{', '.join(keys)} draw other tokens with other trees, and adaptive trees follow the machine's speed: "
        "the same seed may give other outputs; --rule match does not have this"
    ]


def _one_at_a_time(settings: RunSettings) -> list[str]:
    names = [name for name in HF_MODES if name in settings.hf and name != "generate"]
    if settings.batch == 1 or not names:
        return []
    return [f"--hf {', '.join(names)}: transformers drafts for one prompt at a time, whatever --batch"]
