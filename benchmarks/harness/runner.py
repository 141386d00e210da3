"""Runs cases: check every candidate, time them in turn, write down both; ours only when right."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import torch

from benchmarks.harness.case import Candidate, Case, Peer, Workload
from benchmarks.harness.gate import Exact, Noise, Verdict, expected_results, judge
from benchmarks.harness.phases import cost, cotangents, prepare
from benchmarks.harness.record import Machine, Row, machine
from benchmarks.harness.roofline import floor_ms, gpu_named
from benchmarks.harness.timer import (
    Call,
    Timing,
    host_us,
    interleave,
    num_kernels,
    peak_mb,
    walls_ms,
)
from benchmarks.harness.turns import ALONE, Turns
from torchweft.core.backend import choose

__all__ = ["run"]

BUDGET_S = 0.25
"""Seconds for the timed rounds of one phase: a suite must fit in minutes."""

Say = Callable[[str], None]
Candidates = Mapping[str, Candidate]


class Measured(NamedTuple):
    """What is known of a candidate that was timed; of ours when red, only the cache's state."""

    l2: str
    timing: Timing | None = None
    host_us: float | None = None
    wall_ms: float | None = None
    peak_mb: float | None = None
    kernels: int | None = None


def run(
    suite: str,
    cases: Iterable[Case],
    peers: Sequence[Peer],
    device: torch.device,
    say: Say,
    turns: Turns = ALONE,
    leave_out: Set[str] = frozenset(),
) -> Iterator[list[Row]]:
    """Measure cases one after the other; each yields its rows, none where ours fails.

    Args:
        suite: its name, for the rows.
        cases: what to measure.
        peers: who else is measured, where they can.
        device: where.
        say: takes one line about each peer that is left out, and each red check.
        turns: when calls are checked and timed.
        leave_out: ways of ours and of peers that are not measured: "compiled", "captured".
    """
    here = machine(device)
    serving = []
    for peer in peers:
        if reason := peer.missing():
            say(f"{peer.NAME}: left out: {reason}")
        else:
            serving.append(peer)
    for case in cases:
        torch.compiler.reset()
        rows: list[Row] = []
        try:
            with _stream(device), _tf32(case.tf32):
                rows += _run_case(suite, case, serving, device, here, say, turns, leave_out)
        except RuntimeError as error:
            say(f"{case.name}: failed: {_first_line(error)}")
        _give_back(device)
        yield rows


def _give_back(device: torch.device) -> None:
    """Memory that is not used: some peers, and other runs, allocate by themselves."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A stream of our own: what runs on the default stream cannot be captured as a graph."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Whether float32 matrix products may round their factors, by torch's own switch."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


class _Ready(NamedTuple):
    """A phase that is checked, with calls that have been made before."""

    phase: str
    verdicts: dict[str, Verdict]
    calls: dict[str, Call]


def _run_case(
    suite: str,
    case: Case,
    peers: Sequence[Peer],
    device: torch.device,
    here: Machine,
    say: Say,
    turns: Turns,
    leave_out: Set[str],
) -> Iterator[Row]:
    with turns.checking():
        workload = case.build(device, None)
        candidates = _candidates(case, workload, peers, say, leave_out)
        checks = _checks(case, workload, candidates, peers, device, say, leave_out)
        ready = [_ready(phase, case, checks, candidates, say) for phase in case.phases]
        _give_back(device)
    with turns.timing():
        times = [_measure(of_phase.calls, device) if of_phase.calls else {} for of_phase in ready]
    for (phase, verdicts, calls), measured in zip(ready, times, strict=True):
        unmeasured = [Measured("cold" if device.type == "cuda" else "warm")]
        for name, verdict in verdicts.items():
            if name not in calls and candidates[name].peer != "torchweft":
                continue  # a peer that has no room for the full size
            for found in measured.get(name, unmeasured):
                yield _row(suite, case, phase, workload, candidates[name], verdict, found, here)


def _checks(
    case: Case,
    workload: Workload,
    candidates: Candidates,
    peers: Sequence[Peer],
    device: torch.device,
    say: Say,
    leave_out: Set[str],
) -> tuple[Workload, Candidates]:
    """What is checked: the case itself, or a smaller one with the peers that serve it."""
    if not case.check_batch:
        return workload, candidates
    smaller = case.build(device, case.check_batch)
    found = {f"{c.peer} " for c in candidates.values()}
    serving = [p for p in peers if any(name.startswith(f"{p.NAME} ") for name in found)]
    return smaller, _candidates(case, smaller, serving, say, leave_out)


def _ready(
    phase: str,
    case: Case,
    checks: tuple[Workload, Candidates],
    candidates: Candidates,
    say: Say,
) -> _Ready:
    about = functools.partial(_say_of, say, case, phase)
    verdicts = _check(phase, *checks, case.tf32, about)
    timed = {
        name: candidates[name]
        for name, verdict in verdicts.items()
        if verdict.ratio <= 1 or candidates[name].peer != "torchweft"
    }
    return _Ready(phase, verdicts, _calls(phase, timed, about))


def _say_of(say: Say, case: Case, phase: str, line: str) -> None:
    say(f"{case.name} {phase} {line}")


def _candidates(
    case: Case, workload: Workload, peers: Sequence[Peer], say: Say, leave_out: Set[str]
) -> Candidates:
    """Ours on each backend and in each way, and the peers that have a way and room, by name."""
    device = workload.inputs[0].device.type
    functions = {
        choose(backend, device): lambda *inputs, b=backend: workload.function(*inputs, backend=b)
        for backend in case.backends
    }
    found = [
        Candidate("torchweft", name, function, workload.inputs, workload.oracle)
        for name, function in {**functions, **workload.ways}.items()
    ]
    for peer in peers:
        try:
            adapted = peer.adapt(workload)
        except Exception as error:  # noqa: BLE001 - a peer may fail in any way
            say(f"{case.name} {peer.NAME}: left out: {_first_line(error)}")
        else:
            several = [] if isinstance(adapted, str) else adapted
            found += [several] if isinstance(several, Candidate) else several
    named = {f"{c.peer} {c.backend}": c for c in found}
    return {name: c for name, c in named.items() if leave_out.isdisjoint(name.split())}


def _check(
    phase: str, workload: Workload, candidates: Candidates, tf32: bool, say: Say
) -> dict[str, Verdict]:
    """What each candidate's results are worth; ours is infinitely wrong where it fails."""
    verdicts: dict[str, Verdict] = {}
    known: dict[tuple[int, int], Exact | Noise] = {}  # by inputs and oracle
    for name, candidate in candidates.items():
        key = id(candidate.inputs), id(candidate.oracle)
        try:
            if key not in known:
                known[key] = expected_results(phase, workload, candidate, tf32)
            verdict = verdicts[name] = judge(phase, candidate, known[key])
        except Exception as error:
            ours = candidate.peer == "torchweft"
            if ours and not isinstance(error, RuntimeError):
                raise
            say(f"{name}: {'red' if ours else 'left out'}: {_first_line(error)}")
            if ours:
                verdicts[name] = Verdict(math.inf, 0.0)
        else:
            if verdict.ratio > 1:
                say(f"{name}: red: its error is {verdict.ratio:.3g} times the bound")
    return verdicts


def _calls(phase: str, candidates: Candidates, say: Say) -> dict[str, Call]:
    """Each candidate's phase at full size, called before; without the peers that fail."""
    calls: dict[str, Call] = {}
    for name, c in candidates.items():
        try:
            call = prepare(phase, c.function, c.inputs, cotangents(c.function, c.inputs))
            for _ in range(2):
                call()
        except Exception as error:
            if c.peer == "torchweft":
                raise
            say(f"{name}: left out: {_first_line(error)}")
        else:
            calls[name] = call
    return calls


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _measure(calls: Mapping[str, Call], device: torch.device) -> dict[str, list[Measured]]:
    """Each call's times, with the L2 cache cold and warm; on the CPU as it comes."""
    if device.type != "cuda":
        times = interleave(calls, device, cold=False, budget_s=4 * BUDGET_S)
        return {name: [Measured("warm", timing)] for name, timing in times.items()}
    hosts = {name: host_us(call) for name, call in calls.items()}
    walls = walls_ms(calls)
    peaks = {name: peak_mb(call) for name, call in calls.items()}
    kernels = {name: num_kernels(call) for name, call in calls.items()}
    found: dict[str, list[Measured]] = {name: [] for name in calls}
    for l2 in ("cold", "warm"):
        times = interleave(
            calls,
            device,
            cold=l2 == "cold",
            budget_s=BUDGET_S,
            hosts=hosts,
        )
        for name, timing in times.items():
            of_call = (hosts[name], walls[name], peaks[name], kernels[name])
            found[name].append(Measured(l2, timing, *of_call))
    return found


def _row(
    suite: str,
    case: Case,
    phase: str,
    workload: Workload,
    candidate: Candidate,
    verdict: Verdict,
    found: Measured,
    here: Machine,
) -> Row:
    bytes_min, flops = cost(phase, workload)
    dtype = str(case.dtype).removeprefix("torch.")
    timing, gpu, roofline = found.timing, gpu_named(here.gpu), None
    if gpu and timing and flops:
        rate = "tf32" if case.tf32 else dtype
        roofline = 100 * floor_ms(gpu, bytes_min, flops, rate, matrix=case.matrix) / timing.p50
    checked = f"checked at batch {case.check_batch}" if case.check_batch else "checked"
    how = timing.how if timing else "calls"
    how += ", tf32 allowed" if case.tf32 else ""
    return Row(
        suite=suite,
        case=case.name,
        op=workload.op,
        mode=case.mode,
        phase=phase,
        peer=candidate.peer,
        backend=candidate.backend,
        dtype=dtype,
        shape=workload.shape,
        l2=found.l2,
        ms_p20=timing and timing.p20,
        ms_p50=timing and timing.p50,
        ms_p80=timing and timing.p80,
        reps=timing.reps if timing else 0,
        host_us=found.host_us,
        bytes_min=bytes_min,
        flops=flops,
        roofline_pct=roofline,
        peak_mb=found.peak_mb,
        bound_ratio=verdict.ratio,
        right=verdict.right,
        protocol=f"{checked}, interleaved, {how}",
        wall_ms=found.wall_ms,
        kernels=found.kernels,
        **vars(here),
    )
