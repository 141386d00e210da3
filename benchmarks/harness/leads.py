"""By how much torchweft is ahead of other libraries, and what bounds it where that is little."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.harness.markdown import short, table
from benchmarks.harness.record import Row

__all__ = [
    "Lead",
    "chip",
    "fastest",
    "gpu_time",
    "leads_of",
    "peers_of",
    "ratio_to_best",
    "shown_lead",
    "small_leads",
    "state_shown",
    "waited",
    "wall_time",
]

SMALL = 1.3
"""A lead below this is explained."""

APART = ("radial_linear", "sizes")
"""Suites that compare ways of torchweft, or hold kernels of a few microseconds."""

NEAR = 60
"""Percent of the floor from which the machine bounds a line."""

WAITING = 1.5
"""Wall time over GPU time from which the host bounds a line."""

KNOWN = {
    ("products", "W5 uuu_seed"): "written with products alone; TensorProductConv is in suite o3",
    ("products", "P5 small"): "the launch of one kernel of 5 µs",
    ("voxels", "sphere64_map"): "short kernels, one after the other",
    ("o3_cpu", "fully_connected_200"): "operators of torch, a few µs each",
    ("o3_cpu", "linear_l2_200"): "operators of torch, a few µs each",
    ("o3_cpu", "linear_scalars_200"): "operators of torch, a few µs each",
}
"""What bounds a case, where neither its rows nor hardware counters tell."""

_EXPLAINED = """## Where the lead is small

Each line on the machine that ran it last, by the fastest backend of torchweft, whose lead by GPU
time or wall time is below {small}. *host*: the CPU, which launches the kernels, takes longer than
they run; `torchweft.capture` removes that. *floor*: what the bytes or operations allow is near.
Else hardware counters tell how busy the machine is: in the first kernel of a forward pass, in the
longest kernel of both passes.

{table}
Suites {apart} are left out: they compare ways of torchweft, or kernels of a few microseconds.
"""


Busy = Mapping[tuple[str, str, str], Mapping[str, str]]


class Lead(NamedTuple):
    """How many times as long the fastest right peer takes, by GPU time and by wall time."""

    label: str
    gpu: float
    wall: float | None


def state_shown(row: Row) -> str:
    """The state of the cache that tables show."""
    return "warm" if row.driver == "none" else "cold"


WAYS = (" captured", " compiled")
"""Ends of the names of peers that are recorded as a CUDA graph or compiled; ours are backends."""


def peers_of(ours: Row, rows: Sequence[Row]) -> list[Row]:
    """What others did of the same; eager calls of ours are compared with eager calls."""
    same = (ours.case, ours.phase, ours.dtype)
    peers = [r for r in rows if r.peer != "torchweft" and (r.case, r.phase, r.dtype) == same]
    eager = not f" {ours.backend}".endswith(WAYS)
    return [r for r in peers if not (eager and r.peer.endswith(WAYS))]


def fastest(rows: Sequence[Row], time: Callable[[Row], float | None]) -> Row | None:
    """The fastest of those that are right and have a time."""
    right = [row for row in rows if row.bound_ratio <= 1 and time(row) is not None]
    return min(right, key=lambda row: time(row) or 0.0, default=None)


def gpu_time(row: Row) -> float | None:
    return row.ms_p50


def wall_time(row: Row) -> float | None:
    return row.wall_ms


def waited(row: Row) -> float | None:
    return row.ms_p50 if row.wall_ms is None else row.wall_ms


def ratio_to_best(
    ours: Row, rows: Sequence[Row], time: Callable[[Row], float | None]
) -> float | None:
    """The time of the fastest right peer over ours."""
    best, mine = fastest(peers_of(ours, rows), time), time(ours)
    return None if best is None or mine is None else (time(best) or 0.0) / mine


def leads_of(rows: Sequence[Row]) -> list[Lead]:
    """Of the lines that have one."""
    found = []
    for ours in (row for row in rows if row.peer == "torchweft"):
        gpu, wall = (ratio_to_best(ours, rows, time) for time in (gpu_time, wall_time))
        if gpu is not None:
            found.append(Lead(f"{ours.case}, {ours.phase}, {ours.backend}", gpu, wall))
    return found


def chip(gpu: str) -> str:
    """H200, of "NVIDIA H200"."""
    return next((word for word in gpu.split() if word[0] in "HAB" and word[1:].isdigit()), gpu)


def shown_lead(ours: Row, rows: Sequence[Row]) -> list[str]:
    """2.5 / 2.4, and whose time that is: by GPU time; by wall time too where that is another."""
    ratios = [ratio_to_best(ours, rows, time) for time in (gpu_time, wall_time)]
    best = [fastest(peers_of(ours, rows), time) for time in (gpu_time, wall_time)]
    shown = " / ".join(f"{ratio:.3g}" for ratio in ratios if ratio is not None)
    names = dict.fromkeys(row.peer for row in best if row is not None)
    return [shown, " / ".join(names) if shown else ""]


def small_leads(rows: Sequence[Row], busy: Busy) -> str:
    """The section on lines whose lead is small, empty where there is none.

    Args:
        rows: of all machines.
        busy: what hardware counters tell, see `counters.busy`.
    """
    ours = [row for row in rows if row.peer == "torchweft" and row.suite not in APART]
    shown = [row for row in ours if row.l2 == state_shown(row) and row.ms_p50 is not None]
    lines = []
    for suite, case, phase in dict.fromkeys((r.suite, r.case, r.phase) for r in shown):
        same = [row for row in shown if (row.suite, row.case, row.phase) == (suite, case, phase)]
        last = max(same, key=lambda row: row.date).gpu
        best = fastest([row for row in same if row.gpu == last], waited)
        beside = [row for row in rows if (row.gpu, row.suite) == (last, suite)]
        beside = [row for row in beside if row.l2 == state_shown(row)]
        if best is None:
            continue
        ratios = [ratio_to_best(best, beside, time) for time in (gpu_time, wall_time)]
        if any(ratio is not None and ratio < SMALL for ratio in ratios):
            lead = shown_lead(best, beside)
            counted = busy.get((last, suite, case), {}).get(phase)
            lines.append([suite, case, phase, chip(last), *lead, _bound(best, ratios[0], counted)])
    if not lines:
        return ""
    found = table(["suite", "case", "phase", "on", "lead", "fastest right", "bound by"], lines)
    return _EXPLAINED.format(small=SMALL, table=found, apart=" and ".join(APART))


def _bound(row: Row, lead: float | None, counted: str | None) -> str:
    """What keeps the time of a line where it is, as far as the row and hardware counters tell."""
    gpu, wall, share = row.ms_p50 or 0.0, row.wall_ms, row.roofline_pct or 0.0
    if wall is not None and wall > WAITING * gpu and (lead is None or lead >= SMALL):
        return f"host: kernels run {short(gpu)} of {short(wall)} ms"
    if share >= NEAR:
        return f"floor: {share:.0f} % of what the machine allows"
    if (row.suite, row.case) in KNOWN:
        return KNOWN[row.suite, row.case]
    if counted is not None:
        return counted
    return "not known" if row.roofline_pct is None else f"not known, {share:.0f} % of the floor"
