"""Every contract on one device, and the receipt of it: what `make check` runs and leaves."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from tests.cases import Suite, suites
from torchweft.progress import track
from torchweft.testing.contract import BODY_CHECKS, Case, Setting, check_values
from torchweft.testing.doors import DOOR_CHECKS, check_autocast, check_cuda_graph, check_numerical

__all__ = ["Receipt", "check_all"]

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

    def json(self) -> str:
        """The receipt as a JSON document."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    def __str__(self) -> str:
        largest = max((r for of in self.worst.values() for r in of.values()), default=0.0)
        lines = [
            f"{self.checks} checks, {len(self.failures)} failed; "
            f"the largest error is {largest:.2f} of its bound"
        ]
        return "\n".join(lines + self.failures)

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


def check_all(
    device: torch.device, machine: Mapping[str, Any], family: str | None = None
) -> Receipt:
    """Run the contracts of all families, or of one, on a device.

    On a GPU the checks are shared among as many processes as there are processors, since nearly
    all of their time is the compilation of kernels; the large ones come last, one by one.

    Args:
        device: "cuda" runs the Triton kernels, "cpu" the numba and torch bodies.
        machine: what the receipt says about where it was made.
        family: "products", "o3", ...; None is all.
    """
    receipt = Receipt(dict(machine))
    checks = [
        (i, check)
        for i, check in enumerate(_all_checks(device.type))
        if family in (None, check.family)
    ]
    for results in _shared(device.type, [i for i, check in checks if check.kind != LARGE]):
        _note(receipt, results)
    for check in track([check for _, check in checks if check.kind == LARGE], "large contracts"):
        _note(receipt, [_result(check)])
    return receipt


def _shared(device: str, checks: list[int]) -> Iterator[list[_Result]]:
    """Results of checks, block by block, from several processes on a GPU."""
    blocks = [checks[i : i + BLOCK] for i in range(0, len(checks), BLOCK)]
    if device != "cuda":
        for block in track(blocks, "contracts"):
            yield _results(device, block)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        futures = [pool.submit(_results, device, block) for block in blocks]
        for future in track(futures, "contracts"):
            yield future.result()


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
