"""Times of calls that take turns, so that a change of clock or load meets all of them.

On a GPU there are two times of a call.  `Timing` is the GPU's own, without the time in which it
waits for the processor:

    calls          a pair of events around the call, behind work that clears the L2 cache, enough of
                   it that the processor is ahead
    graph replay   the same around a CUDA graph of the call
    kernels        the time in which the profiler saw a kernel run; where it sees none, since CUPTI
                   is missing, "calls with the processor's time" says what events gave

A short call is replayed where it can be captured, since launches would be most of it.  CUDA's queue
holds some thousand launches, so the processor cannot be ahead by a call of more: a call that takes
the processor longer than `QUEUE_US` is replayed too, or its kernels are profiled.

`wall_ms` is what a program waits for: calls back to back between two synchronisations.
"""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = [
    "Call",
    "Timing",
    "busy_us",
    "events_on_gpu",
    "host_us",
    "interleave",
    "num_kernels",
    "peak_mb",
    "seconds_of",
    "walls_ms",
]

Call = Callable[[], object]

GRAPH_BELOW_MS = 0.1  # shorter calls are replayed as CUDA graphs: launches would be most of them
FLUSH_BYTES = 256 * 2**20  # several times any L2
FEWEST, MOST = 5, 200  # rounds
HOST_CALLS, HOST_S = 20, 0.5  # so many calls of the processor's time, or so many seconds of them
QUEUE_US = 3000  # a call that takes the processor no longer has room in the queue, with its flushes
WALL_ROUNDS, WALL_S, WALL_CALLS = 3, 0.1, 100  # rounds; of each the seconds, and the most calls


class Timing(NamedTuple):
    """Milliseconds of a call: quantiles over `reps` rounds."""

    p20: float
    p50: float
    p80: float
    reps: int
    how: str  # as named above


def interleave(
    calls: Mapping[str, Call],
    device: torch.device,
    *,
    cold: bool,
    budget_s: float,
    hosts: Mapping[str, float] | None = None,
) -> dict[str, Timing]:
    """Time calls in turn: a, b, c, a, b, c, ... for about `budget_s` seconds.

    Args:
        calls: by name; each has been called before (compiled, tuned, plans built).
        device: where they run; on the CPU, `cold` does nothing.
        cold: clear the L2 cache before each; else run the call once more just before.
        budget_s: seconds for all rounds of all calls; at least five rounds are made.
        hosts: each call's `host_us`, on a GPU.
    """
    if device.type != "cuda":
        return _interleave_cpu(calls, budget_s)
    clock = _Clock(device, cold)
    ways = _ways(calls, clock, hosts or {})
    begin = time.perf_counter()
    for _, measure in ways.values():
        measure()
    rounds = _rounds(budget_s, time.perf_counter() - begin)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (_, measure) in ways.items():
            times[name].append(measure())
    return {name: _summary(ms, ways[name][0]) for name, ms in times.items()}


def _ways(
    calls: Mapping[str, Call], clock: _Clock, hosts: Mapping[str, float]
) -> dict[str, tuple[str, Callable[[], float]]]:
    """How each call is timed, and a function that does it once."""
    slow = {name for name in calls if hosts.get(name, 0.0) > QUEUE_US}
    rest = [call for name, call in calls.items() if name not in slow]
    short = any(min(clock.ms(call) for _ in range(3)) < GRAPH_BELOW_MS for call in rest)
    ways: dict[str, tuple[str, Callable[[], float]]] = {}
    for name, call in calls.items():
        graph = _captured(call) if short or slow else None
        if graph is not None:
            ways[name] = "graph replay", functools.partial(clock.ms, graph)
        elif name in slow and clock.kernels_ms(call):
            ways[name] = "kernels", functools.partial(clock.kernels_ms, call)
        elif name in slow:
            ways[name] = "calls with the processor's time", functools.partial(clock.ms, call)
        else:
            ways[name] = "calls", functools.partial(clock.ms, call)
    return ways


def _interleave_cpu(calls: Mapping[str, Call], budget_s: float) -> dict[str, Timing]:
    rounds = _rounds(budget_s, sum(seconds_of(call) for call in calls.values()))
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for begin in range(rounds):  # each comes after each: what one leaves of the heap meets all
        for at in range(len(names)):
            name = names[(begin + at) % len(names)]
            times[name].append(1e3 * seconds_of(calls[name]))
    return {name: _summary(ms, "calls") for name, ms in times.items()}


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


def walls_ms(calls: Mapping[str, Call]) -> dict[str, float]:
    """Milliseconds that a program waits for each of many calls back to back, calls in turn."""
    counts = {name: _count(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(WALL_ROUNDS):
        for name, call in calls.items():
            times[name].append(_back_to_back_ms(call, counts[name]))
    return {name: float(np.median(ms)) for name, ms in times.items()}


def _count(call: Call) -> int:
    """Calls that take a tenth of a second."""
    return max(1, min(WALL_CALLS, int(1e3 * WALL_S / max(_back_to_back_ms(call, 2), 1e-3))))


def _back_to_back_ms(call: Call, count: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin) / count


def peak_mb(call: Call) -> float:
    """Megabytes of device memory that a call takes at its peak, its results included."""
    gc.collect()  # what an earlier call left in cycles would go away under this one
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def num_kernels(call: Call) -> int | None:
    """Kernels that a call runs, copies and fills not counted; None where CUPTI sees none."""
    kernels = [e for e in events_on_gpu(call) if not e.name.startswith(("Memcpy", "Memset"))]
    return len(kernels) or None


def events_on_gpu(call: Call) -> list[Any]:
    """What the profiler saw on the GPU in a call: kernels, copies and fills; CUPTI sees them."""
    torch.cuda.synchronize()
    gpu = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=gpu, acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type.name == "CUDA"]
    return [event for event in events if not event.is_user_annotation]  # spans, not kernels


class _Clock:
    """Times one call on the GPU, with the L2 cache cold or warm."""

    def __init__(self, device: torch.device, cold: bool) -> None:
        self._buffer = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        self._cold = cold
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._passes = 1
        flush_us = 1e3 * min(self.ms(self._buffer.zero_) for _ in range(3))
        self._passes = math.ceil(3 * QUEUE_US / flush_us) + 1

    def ms(self, call: Call) -> float:
        """Between a pair of events; the processor is ahead of the GPU by three `QUEUE_US`."""
        begin, end = self._events
        self._before(call, self._passes)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def kernels_ms(self, call: Call) -> float:
        """While a kernel or a copy of the call ran; 0 without CUPTI, which comes with torch."""
        self._before(call, 1)
        events = events_on_gpu(call)
        return busy_us((e.time_range.start, e.time_range.end) for e in events) / 1e3

    def _before(self, call: Call, passes: int) -> None:
        for _ in range(passes):
            self._buffer.zero_()
        if not self._cold:
            call()


def busy_us(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals: kernels of two streams that overlap count once."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


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


def _summary(ms: list[float], how: str) -> Timing:
    p20, p50, p80 = (float(q) for q in np.percentile(ms, (20, 50, 80)))
    return Timing(p20, p50, p80, len(ms), how)
