"""Seconds of a round's stages: whose they are, and that timing a device costs one wait per round."""

import pytest
import torch

from eagle3_infer.metrics import HostClock, RequestMetrics, StageClock, clock_for


class FakeDevice:
    """A device that is behind the host: a mark is a number in its queue, and has a time only after `settle`."""

    def __init__(self):
        self.queue, self.settled, self.waits = 0.0, 0.0, 0

    def work(self, seconds):
        self.queue += seconds

    def mark(self):
        return self.queue

    def settle(self):
        self.waits += 1
        self.settled = self.queue

    def between(self, start, end):
        assert end <= self.settled, "asked before the device got there"
        return end - start


def test_stages_and_the_rest_are_all_the_time():
    device = FakeDevice()
    old, new = RequestMetrics(), RequestMetrics()
    clock = StageClock(torch.device("cpu"), device)
    device.work(0.25)
    with clock.stage(("verify", [old], 3), ("prefill", [new], 1)):
        device.work(4.0)
    device.work(0.25)
    with clock.stage(("draft", [old, new], 1)):
        device.work(1.0)
    clock.rest([old, new])
    assert device.waits == 1
    assert {stage: s for stage, s in old.seconds.items() if s} == {"verify": 3.0, "draft": 0.5, "other": 0.25}
    assert {stage: s for stage, s in new.seconds.items() if s} == {"prefill": 1.0, "draft": 0.5, "other": 0.25}
    assert sum(old.seconds.values()) + sum(new.seconds.values()) == device.queue


def test_nothing_is_booked_before_the_device_is_done():
    device, metrics = FakeDevice(), RequestMetrics()
    clock = StageClock(torch.device("cpu"), device)
    with clock.stage(("verify", [metrics], 1)):
        device.work(2.0)
    assert not any(metrics.seconds.values()) and device.waits == 0
    clock.rest([metrics])
    assert metrics.seconds["verify"] == 2.0


def test_a_stage_that_served_nobody_is_part_of_the_rest():
    device, metrics = FakeDevice(), RequestMetrics()
    clock = StageClock(torch.device("cpu"), device)
    with clock.stage(("relocate", [], 1)):
        device.work(1.0)
    clock.rest([metrics])
    assert metrics.seconds["other"] == 1.0


def test_shares_sum_to_the_time_of_the_batch():
    device = FakeDevice()
    everyone = [RequestMetrics() for _ in range(7)]
    for _ in range(5):
        clock = StageClock(torch.device("cpu"), device)
        with clock.stage(("verify", everyone, 1)):
            device.work(1.0)
        clock.rest(everyone)
    assert sum(sum(m.seconds.values()) for m in everyone) == pytest.approx(5.0)


def test_the_host_is_the_clock_of_a_cpu():
    clock = clock_for(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    start = clock.mark()
    clock.settle()
    assert 0 <= clock.between(start, clock.mark()) < 5


def test_a_rounds_seconds_by_stage():
    device, old, new = FakeDevice(), RequestMetrics(), RequestMetrics()
    clock = StageClock(torch.device("cpu"), device)
    with clock.stage(("verify", [old], 3), ("prefill", [new], 1)):
        device.work(4.0)
    device.work(0.5)
    seconds = clock.rest([old, new])
    assert {stage: s for stage, s in seconds.items() if s} == {"verify": 3.0, "prefill": 1.0, "other": 0.5}
