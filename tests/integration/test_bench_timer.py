"""Times on the CPU and, by stand-ins, on a GPU: turns, queues, graphs, kernels, walls, peaks."""

import gc
import importlib
import time

import pytest
import torch

from benchmarks.harness import timer
from benchmarks.harness.timer import busy_us, interleave, peak_mb, walls_ms
from tests.benches import CPU, Peer, measured

pytestmark = pytest.mark.slow


def test_calls_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    timings = interleave(calls, CPU, cold=False, budget_s=0.0)
    rounds = ("ab" if turn % 2 == 0 else "ba" for turn in range(timings["a"].reps))
    assert "".join(order) == "ab" + "".join(rounds)


class Clock:
    """A GPU's clock that knows a call's time, and writes down how it was asked."""

    def __init__(self, device, cold):
        pass

    def ms(self, call):
        return call.ms

    def kernels_ms(self, call):
        return call.kernels


class GpuCall:
    """Asynchronous: between events `ms`, of kernels `kernels`, as a graph `graph`."""

    def __init__(self, ms, kernels=None, graph=None):
        self.ms, self.kernels, self.graph = ms, kernels, graph


@pytest.mark.parametrize(
    ("calls", "hosts", "expected"),
    [
        # the processor is ahead of both
        (
            {"a": GpuCall(2.0, graph=GpuCall(1.9)), "b": GpuCall(3.0)},
            {"a": 100.0, "b": 900.0},
            {"a": ("calls", 2.0), "b": ("calls", 3.0)},
        ),
        # a is short: launches are most of it
        (
            {"a": GpuCall(0.05, graph=GpuCall(0.02)), "b": GpuCall(3.0)},
            {"a": 100.0, "b": 900.0},
            {"a": ("graph replay", 0.02), "b": ("calls", 3.0)},
        ),
        # events around b and c hold the processor's time
        (
            {"a": GpuCall(37.0, graph=GpuCall(36.0)), "b": GpuCall(82.3, 41.0, GpuCall(40.0)),
             "c": GpuCall(90.0, 50.0)},
            {"a": 500.0, "b": 86_400.0, "c": 91_000.0},
            {"a": ("graph replay", 36.0), "b": ("graph replay", 40.0), "c": ("kernels", 50.0)},
        ),
        # without CUPTI
        (
            {"a": GpuCall(90.0, 0.0)},
            {"a": 91_000.0},
            {"a": ("calls with the processor's time", 90.0)},
        ),
    ],
)  # fmt: skip
def test_gpu_times_hold_no_time_of_the_processor(monkeypatch, calls, hosts, expected):
    """Seen red with events around every call: cuEquivariance's training step had 82.3 ms."""
    monkeypatch.setattr(timer, "_Clock", Clock)
    monkeypatch.setattr(timer, "_captured", lambda call: call.graph)
    cuda = torch.device("cuda")
    timings = interleave(calls, cuda, cold=True, budget_s=0.0, hosts=hosts)
    assert {name: (t.how, t.p50) for name, t in timings.items()} == expected


def test_rows_of_a_gpu_have_both_times(monkeypatch):
    runner = importlib.import_module("benchmarks.harness.runner")
    timing = timer.Timing(1.0, 2.0, 3.0, 5, "graph replay")
    monkeypatch.setattr(runner, "interleave", lambda calls, *_, **__: dict.fromkeys(calls, timing))
    monkeypatch.setattr(runner, "host_us", lambda call: 86_400.0)
    monkeypatch.setattr(runner, "walls_ms", lambda calls: dict.fromkeys(calls, 90.0))
    monkeypatch.setattr(runner, "peak_mb", lambda call: 7.0)
    monkeypatch.setattr(runner, "num_kernels", lambda call: 11)
    measure, gpu = runner._measure, torch.device("cuda")
    monkeypatch.setattr(runner, "_measure", lambda calls, device: measure(calls, gpu))
    rows, _ = measured([Peer()])
    found = {(r.peer, r.l2, r.ms_p50, r.wall_ms, r.host_us, r.peak_mb, r.kernels) for r in rows}
    assert found == {
        (peer, l2, 2.0, 90.0, 86_400.0, 7.0, 11)
        for peer in ("torchweft", "peer")
        for l2 in ("cold", "warm")
    }
    assert {row.protocol.split(", ")[-1] for row in rows} == {"graph replay"}


def test_kernels_that_overlap_count_once():
    """Seen red with a sum."""
    assert busy_us([(5.0, 7.0), (0.0, 2.0), (1.0, 4.0), (1.5, 3.0)]) == 6.0
    assert busy_us([]) == 0.0


def test_walls_hold_what_the_processor_waits_for(monkeypatch):
    """Two calls of which one returns at once and is done 2 ms later."""
    monkeypatch.setattr(timer, "WALL_S", 0.01)
    pending = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: [time.sleep(s) for s in pending])
    monkeypatch.setattr(timer, "_back_to_back_ms", _counted(timer._back_to_back_ms, pending))
    walls = walls_ms({"slow": lambda: pending.append(0.002), "quick": lambda: None})
    assert walls["slow"] >= 2.0 > walls["quick"]


def _counted(measure, pending):
    def counted(call, count):
        pending.clear()
        return measure(call, count)

    return counted


def test_peaks_count_what_earlier_calls_left_in_cycles(monkeypatch):
    """Seen red with a peak that does not count what an earlier call left in cycles."""

    class Megabyte:
        alive = most = 0

        def __init__(self):
            self.cycle = self
            Megabyte.alive += 1
            Megabyte.most = max(Megabyte.most, Megabyte.alive)

        def __del__(self):
            Megabyte.alive -= 1

    def reset():
        Megabyte.most = Megabyte.alive

    def call():
        gc.collect()
        Megabyte()

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: Megabyte.alive * 10**6)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: Megabyte.most * 10**6)
    call()
    assert peak_mb(call) == 1
