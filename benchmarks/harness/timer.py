"""Times of calls that take turns, so that a change of clock or load meets all of them.

On a GPU each call is timed by a pair of events.  Work that clears the L2 cache is queued before
it, enough of it that the processor is always ahead: an event pair then holds no launch gaps.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

__all__ = ["Call", "Timing", "host_us", "interleave", "peak_mb", "seconds_of"]

Call = Callable[[], object]

GRAPH_BELOW_MS = 0.1  # shorter calls are replayed as CUDA graphs: launches would be most of them
FLUSH_BYTES = 256 * 2**20  # several times any L2
FEWEST, MOST = 5, 200  # rounds
HOST_CALLS, HOST_S = 20, 0.5  # so many calls of the processor's time, or so many seconds of them
AHEAD_US = 200_000  # the processor is ahead by this at most: slower calls wait for the GPU


class Timing(NamedTuple):
    """Milliseconds of a call: quantiles over `reps` rounds."""

    p20: float
    p50: float
    p80: float
    reps: int
    graph: bool  # replayed as a CUDA graph


def interleave(
    calls: Mapping[str, Call],
    device: torch.device,
    *,
    cold: bool,
    budget_s: float,
    ahead_us: float = 0,
) -> dict[str, Timing]:
    """Time calls in turn: a, b, c, a, b, c, ... for about `budget_s` seconds.

    Args:
        calls: by name; each has been called before (compiled, tuned, plans built).
        device: where they run; on the CPU, `cold` does nothing.
        cold: clear the L2 cache before each; else run the call once more just before.
        budget_s: seconds for all rounds of all calls; at least five rounds are made.
        ahead_us: the slowest call's `host_us`, by which the processor must be ahead of a GPU.
    """
    if device.type != "cuda":
        return _interleave_cpu(calls, budget_s)
    clock = _Clock(device, cold, ahead_us)
    tries = 3 if ahead_us < AHEAD_US else 1
    quickest = min(clock.ms(call) for call in calls.values() for _ in range(tries))
    graphs: dict[str, Call] = {}
    if quickest < GRAPH_BELOW_MS:
        graphs = {name: graph for name, call in calls.items() if (graph := _captured(call))}
    ready = {**calls, **graphs}
    begin = time.perf_counter()
    for call in ready.values():
        clock.ms(call)
    rounds = _rounds(budget_s, time.perf_counter() - begin)
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(rounds):
        for name, call in ready.items():
            times[name].append(clock.ms(call))
    return {name: _summary(ms, graph=name in graphs) for name, ms in times.items()}


def _interleave_cpu(calls: Mapping[str, Call], budget_s: float) -> dict[str, Timing]:
    rounds = _rounds(budget_s, sum(seconds_of(call) for call in calls.values()))
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for begin in range(rounds):  # each comes after each: what one leaves of the heap meets all
        for at in range(len(names)):
            name = names[(begin + at) % len(names)]
            times[name].append(1e3 * seconds_of(calls[name]))
    return {name: _summary(ms, graph=False) for name, ms in times.items()}


def seconds_of(call: Call) -> float:
    """Seconds until one call returns."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def host_us(call: Call) -> float:
    """Microseconds of the processor until an asynchronous call returns: the median of many."""
    begin = time.perf_counter()
    seconds: list[float] = []
    while len(seconds) < HOST_CALLS and time.perf_counter() - begin < HOST_S:
        torch.cuda.synchronize()  # a queue of slow calls could fill up
        seconds.append(seconds_of(call))
    torch.cuda.synchronize()
    return 1e6 * float(np.median(seconds))


def peak_mb(call: Call) -> float:
    """Megabytes of device memory that a call takes at its peak, its results included."""
    gc.collect()  # what an earlier call left in cycles would go away under this one
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


class _Clock:
    """Times one call on the GPU, with the L2 cache cold or warm."""

    def __init__(self, device: torch.device, cold: bool, host_us: float) -> None:
        self._buffer = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        self._cold = cold
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._passes = 1
        flush_us = 1e3 * min(self.ms(self._buffer.zero_) for _ in range(3))
        self._passes = math.ceil(min(3 * host_us + 500, AHEAD_US) / flush_us) + 1

    def ms(self, call: Call) -> float:
        begin, end = self._events
        for _ in range(self._passes):
            self._buffer.zero_()
        if not self._cold:
            call()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


def _captured(call: Call) -> Call | None:
    """Replays the call as a CUDA graph; None where it cannot be captured (it synchronises)."""
    stream = torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


def _rounds(budget_s: float, round_s: float) -> int:
    return min(MOST, max(FEWEST, int(budget_s / max(round_s, 1e-6))))


def _summary(ms: list[float], *, graph: bool) -> Timing:
    p20, p50, p80 = (float(q) for q in np.percentile(ms, (20, 50, 80)))
    return Timing(p20, p50, p80, len(ms), graph)
