"""What a CUDA graph may hold and what the runtime puts into one, by oracles/captured.py; no GPU is needed."""

import warnings

import pytest
import torch

from eagle3_infer.graphs import GraphCache
from oracles.captured import FakeGraphs, NotCapturable, Trace, traced


def test_a_key_is_captured_once_and_replayed_from_then_on():
    """Replays run what was captured, on the buffers; what another call brings under the same key is not looked at."""
    total, graphs = torch.zeros(3), GraphCache(backend := FakeGraphs())
    held = graphs.run("double", lambda: total * 2)
    for value in (1.0, 2.0):
        total.fill_(value)
        assert graphs.run("double", lambda: total * 5) is held
        assert held.tolist() == [2 * value] * 3
    graphs.run("other", lambda: None)
    assert (backend.captures, backend.replays) == (2, 4)


def test_without_a_backend_work_is_called():
    graphs = GraphCache(None)
    assert [graphs.run("key", lambda n=n: torch.tensor(n)).item() for n in (1, 2)] == [1, 2]


class Broken:
    """A device that captures the first thing it is given, and nothing after it."""

    def __init__(self):
        self.fake, self.tried = FakeGraphs(), 0

    def capture(self, work):
        self.tried += 1
        if self.tried > 1:
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
        return self.fake.capture(work)


def test_what_cannot_be_captured_runs_as_it_comes_and_says_so_once():
    graphs, buffer = GraphCache(backend := Broken()), torch.zeros(1)
    graphs.run("first", lambda: buffer.add_(0))
    with pytest.warns(UserWarning, match="without CUDA graphs.*second.*not permitted when stream is capturing$"):
        assert graphs.run("second", lambda: torch.ones(1)).item() == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert graphs.run("third", lambda: torch.ones(1)).item() == 1
        # graphs of before are gone too: they may have shared memory with the broken one
        assert graphs.run("first", lambda: torch.full((1,), 7.0)).item() == 7
    assert backend.tried == 2


def test_errors_of_the_work_itself_come_through():
    def work():
        raise RuntimeError("31 rows exceed the capture buffer of 30")

    graphs = GraphCache(FakeGraphs())
    with pytest.warns(UserWarning, match="31 rows"), pytest.raises(RuntimeError, match="31 rows"):
        graphs.run("key", work)


BUFFER = torch.arange(4.0)


@pytest.mark.parametrize(
    "work",
    [
        lambda: BUFFER.tolist(),
        lambda: BUFFER[0].item(),
        lambda: float(BUFFER[1]),
        lambda: bool(BUFFER[0] > 0),
        lambda: BUFFER.cpu(),
        lambda: BUFFER[BUFFER > 1],
        lambda: BUFFER.nonzero(),
        lambda: torch.tensor([1.0, 2.0]),
        lambda: BUFFER + torch.arange(4),
    ],
)
def test_waiting_for_the_device_and_numbers_from_the_host_are_caught(work):
    with torch.inference_mode(), pytest.raises(NotCapturable), traced(()):
        work()


class Changing:
    """Work that looks at Python, in three ways."""

    def __init__(self):
        self.scale, self.rows, self.other = 1.0, 4, torch.ones(4)

    def __call__(self):
        BUFFER[: self.rows].mul_(self.scale).add_(self.other[: self.rows])


@pytest.mark.parametrize("change", [{"scale": 0.5}, {"rows": 3}, {"other": torch.ones(4)}])
def test_what_changes_between_replays_is_caught(change):
    """A number, a shape and an address: a graph would go on with the old ones."""
    work = Changing()
    replay, _ = FakeGraphs(()).capture(work)
    replay()
    work.__dict__.update(change)
    with pytest.raises(NotCapturable, match="when captured"):
        replay()


def test_memory_that_a_run_makes_is_known_by_its_maker():
    """Its address may be another one in each run; that of a buffer may not."""

    def trace() -> Trace:
        with torch.inference_mode(), traced(()) as found:
            x = BUFFER * 2
            (x + BUFFER)[1:].mul_(x[1:])
        return found

    first, spacer = trace(), torch.ones(4)
    second = trace()
    assert first.ops == second.ops
    assert spacer.sum() == 4
