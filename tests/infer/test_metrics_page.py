"""Pages of three engines, as they print them: what grew between two of them, and what must not be guessed."""

import pytest

from eagle3_infer.metrics_page import Series, count, parse_page

VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}
vllm:spec_decode_num_drafts_created{{engine="0",model_name="m"}} 1.7646e+09
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {offered}
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} {second}
vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="m"}} {requests}
vllm:request_success_total{{engine="0",finished_reason="length",model_name="m"}} 3.0
"""
SGLANG = """\
sglang:generation_tokens_total{{model_name="m"}} {tokens}
sglang:num_requests_total{{model_name="m"}} {requests}
sglang:spec_verify_calls_total{{model_name="m"}} {verify}
sglang:spec_accept_length{{model_name="m",tp_rank="0"}} 2.5
sglang:spec_accept_length{{model_name="m",tp_rank="1"}} 2.5
"""
TRTLLM = """\
trtllm_generation_tokens_total{{engine_type="trtllm",model_name="m"}} {tokens}
trtllm_request_success_total{{engine_type="trtllm",finished_reason="stop",model_name="m"}} {requests}
trtllm_spec_decode_num_draft_tokens_total{{engine_type="trtllm",model_name="m"}} {offered}
trtllm_spec_decode_num_accepted_tokens_total{{engine_type="trtllm",model_name="m"}} {accepted}
trtllm_spec_decode_acceptance_length{{engine_type="trtllm",model_name="m"}} 1.9
"""


def between(page, before, after, model="m"):
    return count(parse_page(page.format(**before)), parse_page(page.format(**after)), model)


def test_vllm():
    """187 drafts, two accepted at the first place: 1 + 2 / 187; what was there before does not count."""
    before = {"drafts": 1e3, "offered": 3e3, "accepted": 900.0, "first": 500.0, "second": 400.0, "tokens": 2e3}
    grown = {"drafts": 187, "offered": 561, "accepted": 60, "first": 45, "second": 15, "tokens": 250}
    after = {key: before[key] + grown[key] for key in before}
    counted = between(VLLM, before | {"requests": 7}, after | {"requests": 10})
    assert counted is not None
    assert (counted.engine, counted.rounds, counted.offered, counted.accepted) == ("vLLM", 187, 561, 60)
    assert counted.accepted_by_position == [45, 15]
    assert counted.tau == pytest.approx(1 + 60 / 187)
    assert counted.tokens == 250


def test_sglang():
    """Its counter is of verifications; the gauge is of a recent window, and no measurement of this run."""
    counted = between(
        SGLANG, {"tokens": 100, "requests": 5, "verify": 40}, {"tokens": 400, "requests": 9, "verify": 140}
    )
    assert counted is not None
    assert (counted.engine, counted.rounds, counted.offered, counted.accepted) == ("SGLang", 100, None, None)
    # four of the three hundred tokens came from prompts
    assert counted.tau == pytest.approx(296 / 100)
    assert counted.gauges == {"sglang:spec_accept_length": 2.5}


def test_sglang_with_gauges_only():
    page = "\n".join(line for line in SGLANG.splitlines() if "verify" not in line)
    counted = between(page, {"tokens": 0, "requests": 0}, {"tokens": 30, "requests": 1})
    assert counted is not None
    assert (counted.tau, counted.rounds) == (None, None)
    assert counted.gauges == {"sglang:spec_accept_length": 2.5}


def test_tensorrt_llm():
    """It counts no rounds: each emits one token of its own beside those it accepts."""
    before, after = {"tokens": 10, "requests": 1, "offered": 9, "accepted": 2}, {}
    grown = {"tokens": 104, "requests": 4, "offered": 150, "accepted": 50}
    after = {key: before[key] + grown[key] for key in before}
    counted = between(TRTLLM, before, after)
    assert counted is not None
    assert (counted.rounds, counted.offered, counted.accepted) == (50, 150, 50)
    assert counted.tau == pytest.approx(2.0)


def test_counters_that_appear_with_their_first_use_were_zero():
    after = parse_page(SGLANG.format(tokens=50, requests=2, verify=24))
    counted = count([], after)
    assert counted is not None
    assert counted.tau == pytest.approx(48 / 24)


@pytest.mark.parametrize("drop", ["spec_decode", "drafts_total", "accepted_tokens_total"])
def test_no_tau_where_counters_are_missing(drop):
    """Speculation off, or half of the counters: null, not a guess."""
    page = "\n".join(line for line in VLLM.splitlines() if drop not in line or line.startswith("#"))
    zero = dict.fromkeys(("drafts", "offered", "accepted", "first", "second", "tokens", "requests"), 0)
    counted = between(page, zero, zero | {"drafts": 10, "offered": 30, "tokens": 10, "requests": 1, "accepted": 0})
    assert counted is not None
    assert counted.tau is None


def test_no_draft_at_all_is_no_tau():
    zero = dict.fromkeys(("drafts", "offered", "accepted", "first", "second", "tokens", "requests"), 0)
    counted = between(VLLM, zero, zero | {"tokens": 20, "requests": 1})
    assert counted is not None
    assert (counted.tau, counted.rounds) == (None, None)


def test_a_restart_is_no_measurement():
    counted = between(SGLANG, {"tokens": 100, "requests": 5, "verify": 40}, {"tokens": 10, "requests": 1, "verify": 4})
    assert counted is not None
    assert counted.tau is None
    assert "restarted" in counted.how


ZERO = dict.fromkeys(("drafts", "offered", "accepted", "first", "second", "tokens", "requests"), 0)
GROWN = {"drafts": 10, "offered": 20, "accepted": 8, "first": 6, "second": 2, "tokens": 20, "requests": 2}


@pytest.mark.parametrize("key", ["tokens", "offered", "accepted", "first", "second"])
def test_any_counter_that_falls_is_a_restart(key):
    counted = between(VLLM, ZERO | {key: 1000}, GROWN)
    assert counted is not None
    assert "restarted" in counted.how
    assert (counted.tau, counted.rounds, counted.accepted_by_position) == (None, None, [])


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"accepted": 21}, "21 accepted tokens, 20 drafted tokens"),
        ({"accepted": 7}, "8 accepted tokens by position, 7 accepted tokens"),
        ({"tokens": 9}, "10 drafts, 9 generated tokens"),
        ({"second": 11, "accepted": 17}, "11 accepted tokens of one position, 10 drafts"),
    ],
)
def test_counters_that_contradict_each_other_give_no_figure(wrong, said):
    counted = between(VLLM, ZERO, GROWN | wrong)
    assert counted is not None
    assert f"contradict each other: {said}" in counted.how
    assert (counted.tau, counted.rounds, counted.accepted_by_position) == (None, None, [])


def test_replies_that_are_trimmed_are_no_contradiction():
    """Two rounds of four drafts accepted 8, and max_tokens left 3 of them."""
    grown = {"drafts": 2, "offered": 8, "accepted": 8, "first": 2, "second": 2, "tokens": 3, "requests": 1}
    counted = between(VLLM, ZERO, grown)
    assert counted is not None
    assert counted.tau == 5.0


def test_more_accepted_than_generated_where_drafted_tokens_are_not_told():
    page = "\n".join(line for line in VLLM.splitlines() if "draft_tokens" not in line)
    counted = between(page, ZERO, GROWN | {"accepted": 21})
    assert counted is not None
    assert "21 accepted tokens, 20 generated tokens" in counted.how


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-3", "1e300", "1.7e308"])
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_value_that_cannot_be_a_count_is_not_told(value, place):
    """The other counters are; nor is a sum taken without the rank that says it."""
    odd = f'vllm:generation_tokens_total{{engine="1",model_name="m"}} {value}\n' * 2
    pages = {"before": VLLM.format(**ZERO), "after": VLLM.format(**GROWN)}
    pages[place] += odd
    counted = count(parse_page(pages["before"]), parse_page(pages["after"]), "m")
    assert counted is not None
    assert (counted.tokens, counted.rounds, counted.tau) == (None, 10, 1.8)


def test_gauges_of_any_size():
    page = 'sglang:spec_accept_length{{tp_rank="2"}} {}\n'
    finite = SGLANG.format(tokens=1, requests=1, verify=1).replace(" 2.5", " 1.7e308")
    counted = count([], parse_page(finite + page.format("NaN")), "m")
    assert counted is not None
    assert counted.gauges == {"sglang:spec_accept_length": pytest.approx(1.7e308)}


@pytest.mark.parametrize("position", ["\u00b2", "\u0663", "-1", "1.5", "", "9" * 5000])
def test_positions_that_are_no_numbers(position):
    odd = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="{position}"}} 3\n'
    counted = count(parse_page(VLLM.format(**ZERO)), parse_page(VLLM.format(**GROWN) + odd), "m")
    assert counted is not None
    assert counted.accepted_by_position == [6, 2]


def test_a_position_that_cannot_be_told_is_no_zero():
    counted = between(VLLM, ZERO, GROWN | {"first": "NaN"})
    assert counted is not None
    assert (counted.accepted_by_position, counted.tau) == ([], 1.8)


def test_drafts_without_what_they_emitted():
    for wrong in ({"accepted": "NaN", "tokens": "NaN"}, {"drafts": "NaN", "accepted": "NaN"}):
        counted = between(VLLM, ZERO, GROWN | wrong)
        assert counted is not None
        assert (counted.tau, counted.how) == (None, "it counted drafts, and not what they emitted")


def test_other_models_on_the_page():
    mixed = VLLM + VLLM.replace('model_name="m"', 'model_name="other"').replace("{drafts}", "777")
    zero = dict.fromkeys(("drafts", "offered", "accepted", "first", "second", "tokens", "requests"), 0)
    grown = zero | {"drafts": 10, "offered": 20, "accepted": 5, "first": 5, "tokens": 20, "requests": 1}
    counted = between(mixed, zero, grown)
    assert counted is not None
    # the other's counters grow as well, but for its rounds
    assert (counted.rounds, counted.accepted, counted.accepted_by_position) == (10, 5, [5, 0])
    assert counted.tokens == 20
    assert not counted.all_models


def test_what_only_another_model_has_is_not_taken_for_this_ones():
    """This one does not draft; the other does, and has a gauge."""
    other = SGLANG.replace('model_name="m"', 'model_name="other"')
    page = "\n".join(line for line in SGLANG.splitlines() if "spec_" not in line) + "\n" + other
    before, after = {"tokens": 100, "requests": 5, "verify": 40}, {"tokens": 400, "requests": 9, "verify": 140}
    counted = between(page, before, after)
    assert counted is not None
    assert (counted.tokens, counted.rounds, counted.tau, counted.gauges) == (300, None, None, {})
    assert not counted.all_models


def test_a_model_that_appears_during_the_run_was_at_zero():
    """Whatever another one on the page had counted by then, which is neither a start nor a restart."""
    other = VLLM.replace('model_name="m"', 'model_name="other"').format(**GROWN | {"tokens": 900, "drafts": 5})
    counted = count(parse_page(other), parse_page(other + VLLM.format(**GROWN)), "m")
    assert counted is not None
    assert (counted.tokens, counted.rounds, counted.tau, counted.how[:3]) == (20, 10, 1.8, "1 +")


def test_a_page_that_does_not_know_the_model_is_of_all_of_them():
    mixed = VLLM + VLLM.replace('model_name="m"', 'model_name="other"')
    zero = dict.fromkeys(("drafts", "offered", "accepted", "first", "second", "tokens", "requests"), 0)
    before, after = (parse_page(mixed.format(**(zero | grown))) for grown in ({}, {"drafts": 10, "tokens": 20}))
    counted = count(before, after, "alias")
    assert counted is not None
    assert (counted.tokens, counted.all_models) == (40, True)
    # nothing is amiss where models are not told apart, or none was asked for
    for page, name in (([Series(s.name, {}, s.value) for s in after], "alias"), (after, None)):
        found = count(page, page, name)
        assert found is not None
        assert not found.all_models


def test_engines_of_one_server_are_summed():
    two = VLLM + VLLM.replace('engine="0"', 'engine="1"')
    zero = dict.fromkeys(("drafts", "offered", "accepted", "first", "second", "tokens", "requests"), 0)
    grown = zero | {"drafts": 10, "offered": 20, "accepted": 5, "first": 5, "tokens": 20, "requests": 1}
    counted = between(two, zero, grown)
    assert counted is not None
    assert (counted.rounds, counted.accepted, counted.accepted_by_position) == (20, 10, [10, 0])


@pytest.mark.parametrize("page", ["", "<html>not found</html>", "process_cpu_seconds_total 3.0", "# EOF"])
def test_pages_of_no_known_engine(page):
    assert count(parse_page(page), parse_page(page)) is None


def test_odd_lines():
    """Escapes, braces and commas in labels, timestamps, exemplars, exponents, values that are no numbers."""
    page = parse_page(
        'a{x="}, y=\\"q\\"",z="\\\\"} 1e3 1700000000\r\n'
        'b 2 # {trace="t"} 0.5\n'
        "c +Inf\nd NaN\ne nonsense\n{no name} 3\nf{ } -4.5\n"
    )
    assert [(s.name, s.value) for s in page[:3]] == [("a", 1000.0), ("b", 2.0), ("c", float("inf"))]
    assert page[0].labels == {"x": '}, y="q"', "z": "\\"}
    assert [s.name for s in page[3:]] == ["d", "f"]
