"""What users put into requests: other number types become ints, other things are refused by name."""

import json
from typing import Any

import numpy as np
import pytest

from eagle3.errors import ConfigError
from eagle3_infer.config import EngineConfig, SamplingConfig, TreeConfig
from eagle3_infer.engine import Engine, Request
from oracles.invariants import shifted_target


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(shifted_target("llama"))


@pytest.mark.parametrize(
    "bad, told",
    [
        ({"stop": ("fine", "\ud83d")}, "stop is .*lone surrogate"),
        ({"stop": ["\udcff"]}, "lone surrogate"),
        ({"sampling": None}, r"sampling is None \(NoneType\); it must be a SamplingConfig"),
        ({"sampling": {}}, r"sampling is \{\} \(dict\)"),
        ({"processors": print}, r"processors is <built-in .*; it must be a list or tuple"),
        ({"processors": None}, "processors is None"),
        ({"forced": (np.bool_(True),)}, r"forced\[0\] is .*\(bool"),
        ({"prompt_ids": [np.float32(1)]}, r"prompt_ids\[0\] is .*\(float32\)"),
    ],
)
def test_fields_of_another_type(bad, told):
    with pytest.raises(ConfigError, match=told):
        Request(**{"prompt_ids": [1], **bad})


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.int64, np.uint64])
def test_numpys_integers_give_the_same_plain_result(engine, kind):
    """They overflow in the noise's hash, and json takes none of them."""

    half: Any = np.float32(0.5)

    def request(number: Any) -> Request:
        sampling = SamplingConfig(
            1.0,
            top_k=number(40),
            seed=number(9),
            logit_bias=((number(5), half),),
            bad_words=((number(6),), [number(7), number(8)]),  # type: ignore[arg-type]
            min_tokens=number(2),
        )
        prompt, forced = [number(11), number(12), number(13)], (number(4),)
        numbers = {name: number(7) for name in ("max_new_tokens", "prompt_id", "turn", "sample")}
        return Request(prompt, sampling, forced=forced, eos_ids=(number(250),), **numbers)

    assert request(kind) == request(int)
    assert type(request(kind).sampling.logit_bias[0][1]) is float
    result = engine.generate_one(request(kind))
    assert result.token_ids == engine.generate_one(request(int)).token_ids
    json.dumps([result.token_ids, request(kind).forced, vars(request(kind).sampling)])


def test_numpys_integers_do_not_overflow_in_settings():
    small: Any = np.int8
    assert TreeConfig(small(3), small(100), small(120)).candidates == 100 + 2 * 100**2
    assert json.dumps(vars(EngineConfig(slots=small(3), pages=small(100))))


def test_a_request_holds_its_own_lists():
    ids = [1, 2]
    request = Request(ids, forced=[3], eos_ids=[4], stop=("a",))  # type: ignore[arg-type]
    ids.append(3)
    assert (request.prompt_ids, request.forced, request.eos_ids) == ([1, 2], (3,), (4,))


@pytest.mark.parametrize(
    "given, told",
    [
        (Request([1]), r"given Request\(.*; it takes a list of requests"),
        (None, "given None .*a list of requests"),
        ([[1, 2]], r"given \[1, 2\] \(list\) to run; each must be a Request"),
        ("text", "given 't' .*each must be a Request"),
        ([Request([1]), None], "given None .*each must be a Request"),
    ],
)
def test_what_is_no_list_of_requests(engine, given, told):
    with pytest.raises(ConfigError, match=told):
        engine.generate(given)
    assert len(engine.generate_one(Request([1], max_new_tokens=2)).token_ids) == 2
