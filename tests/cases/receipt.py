"""Every contract of a family on one device, and the receipt of it: what `make check` leaves.

Contracts run in blocks.  A receipt names the blocks that are missing, so that a check that ran out
of time goes on where it ended.
"""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.cases import Suite, suites
from torchweft.progress import track
from torchweft.testing.contract import BODY_CHECKS, Case, Setting, check_values
from torchweft.testing.doors import DOOR_CHECKS, check_autocast, check_cuda_graph, check_numerical

__all__ = ["Receipt", "check_family", "read"]

LARGE = "large"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Receipt:
    """What was checked, on what, with what result.

    `worst` gives, by case family and dtype, the largest ratio of an error to its bound.
    """

    machine: Mapping[str, Any]
    checks: int = 0
    worst: dict[str, dict[str, float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # blocks that did not run yet
    left_out: dict[str, str] = field(default_factory=dict)  # tests, and what they need

    def json(self) -> str:
        """The receipt as a JSON document."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    def __str__(self) -> str:
        largest = max((r for of in self.worst.values() for r in of.values()), default=0.0)
        first = (
            f"{self.checks} checks, {len(self.failures)} failed; "
            f"the largest error is {largest:.2f} of its bound"
        )
        rest = f"; {len(self.missing)} blocks are missing" if self.missing else ""
        for reason, count in Counter(self.left_out.values()).items():
            rest += f"; {count} left out: {reason}"
        return "\n".join([first + rest, *self.failures])

    def note(self, kind: str, dtype: str, ratio: float) -> None:
        """Keep the worst ratio of a kind of case."""
        of_kind = self.worst.setdefault(kind, {})
        of_kind[dtype] = max(of_kind.get(dtype, 0.0), float(f"{ratio:.3g}"))


class _Check(NamedTuple):
    """One promise for one case; `run` returns ratios of errors to bounds, or raises."""

    name: str
    kind: str
    dtype: str
    run: Callable[[], Mapping[str, float] | None]
    family: str = ""


class _Result(NamedTuple):
    """What came of a check; `failure` is None where it passed."""

    kind: str
    dtype: str
    ratios: Mapping[str, float]
    failure: str | None


BLOCK = 16
"""Checks that a process takes at a time: neighbours share compiled kernels."""


def check_family(
    family: str,
    device: torch.device,
    machine: Mapping[str, Any],
    begun: Receipt | None = None,
    seconds: float | None = None,
) -> Iterator[Receipt]:
    """Run the contracts of a family on a device; its receipt after each block.

    On a GPU the blocks are shared among as many processes as there are processors, since nearly
    all of their time is the compilation of kernels; the large ones come last, one by one.

    Args:
        family: "products", "o3", ...
        device: "cuda" runs the Triton kernels, "cpu" the numba and torch bodies.
        machine: what the receipt says about where it was made.
        begun: a receipt of the same code, to go on with.
        seconds: after which no block is begun.
    """
    blocks = _blocks(device.type, family)
    receipt = begun or Receipt(dict(machine), missing=list(blocks))
    left = {name: blocks[name] for name in receipt.missing}
    ends = time.monotonic() + (math.inf if seconds is None else seconds)
    yield receipt
    for name, results in _run(device.type, family, left, ends):
        _note(receipt, results)
        receipt.missing.remove(name)
        yield receipt


def read(path: Path, machine: Mapping[str, Any]) -> Receipt | None:
    """The receipt in a file, if it was made there by the same code."""
    if not path.exists():
        return None
    found = Receipt(**json.loads(path.read_text(encoding="utf-8")))
    same = (found.machine.get(key) == machine[key] for key in machine if key != "date")
    return found if all(same) else None


def _blocks(device: str, family: str) -> dict[str, list[int]]:
    """The numbers of checks by the name of their block; each large one is a block of its own."""
    numbered = [(i, c) for i, c in enumerate(_all_checks(device)) if c.family == family]
    small = [i for i, check in numbered if check.kind != LARGE]
    blocks = {f"block {n // BLOCK}": small[n : n + BLOCK] for n in range(0, len(small), BLOCK)}
    return blocks | {check.name: [i] for i, check in numbered if check.kind == LARGE}


def _run(
    device: str, family: str, blocks: Mapping[str, list[int]], ends: float
) -> Iterator[tuple[str, list[_Result]]]:
    """Results of blocks as they come, from several processes on a GPU; late ones do not begin."""
    every = _all_checks(device)
    alone = [name for name, checks in blocks.items() if every[checks[0]].kind == LARGE]
    together = [name for name in blocks if name not in alone]
    if device == "cuda":
        yield from _shared(device, family, {name: blocks[name] for name in together}, ends)
        together = []
    for name in track(together + alone, family):
        if time.monotonic() < ends:
            yield name, _results(device, blocks[name])


def _shared(
    device: str, family: str, blocks: Mapping[str, list[int]], ends: float
) -> Iterator[tuple[str, list[_Result]]]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        names = {pool.submit(_results, device, checks): name for name, checks in blocks.items()}
        for _, future in zip(track(list(names), family), as_completed(names), strict=True):
            if not future.cancelled():
                yield names[future], future.result()
            if time.monotonic() >= ends:
                for other in names:
                    other.cancel()  # those that run are waited for


def _results(device: str, checks: list[int]) -> list[_Result]:
    every = _all_checks(device)
    return [_result(every[i]) for i in checks]


def _result(check: _Check) -> _Result:
    try:
        ratios = check.run() or {}
    except Exception as error:  # noqa: BLE001 - the receipt lists every way to fail
        first = str(error).strip().splitlines() or [""]
        failure = f"{check.name}: {type(error).__name__}: {first[0]}"
        return _Result(check.kind, check.dtype, {}, failure)
    return _Result(check.kind, check.dtype, ratios, None)


def _note(receipt: Receipt, results: list[_Result]) -> None:
    for result in results:
        receipt.checks += 1
        receipt.failures += [result.failure] if result.failure else []
        for ratio in result.ratios.values():
            receipt.note(result.kind, result.dtype, ratio)


@functools.cache
def _all_checks(device: str) -> list[_Check]:
    return [
        check._replace(family=family)
        for family, suite in suites().items()
        for check in _checks(suite, device)
    ]


def _checks(suite: Suite, device: str) -> Iterator[_Check]:
    backends = ("triton",) if device == "cuda" else suite.backends
    for backend in backends:
        for case in suite.cases:
            for dtype in DTYPES:
                # first gradients call every kernel that second ones call: one dtype goes further
                order = 2 if dtype == torch.float32 else 1
                yield _of_body(check_values, case, Setting(device, dtype, backend, order))
        for case in suite.single:
            yield _of_body(check_values, case, Setting(device, torch.float32, backend))
        for case in suite.full:
            for check in BODY_CHECKS[1:]:
                yield _of_body(check, case, Setting(device, torch.float32, backend))
    doors = [door for door in DOOR_CHECKS if suite.autocast or door is not check_autocast]
    doors += [check_cuda_graph] if device == "cuda" else []
    for case in suite.doors:
        for door in doors:
            yield _of_door(door, case, device)
    for case in suite.small:
        yield _of_door(check_numerical, case, device)
    if device == "cuda":
        for large in suite.large:
            yield _Check(large.__name__, LARGE, "float16", functools.partial(large, device))


def _of_body(
    check: Callable[[Case, Setting], dict[str, float]], case: Case, setting: Setting
) -> _Check:
    dtype = str(setting.dtype).removeprefix("torch.")
    name = f"{check.__name__} of {case.name}, {setting.backend} {dtype}"
    return _Check(name, case.name.split(",")[0], dtype, functools.partial(check, case, setting))


def _of_door(check: Callable[..., None], case: Case, device: str) -> _Check:
    run = functools.partial(check, case, device)
    return _Check(f"{check.__name__} of {case.name}", case.name.split(",")[0], "float64", run)
