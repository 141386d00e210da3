"""Measured tiles: shipped with weft for known GPUs, or timed on this machine when asked.

A kernel's default tile is a rule of its family.  A table overrides it: for each kernel and problem
the blocks, warps and stages that were fastest.  Tables are JSON: `tiles/<gpu>.json` beside this
file, and the user's own, which wins, in `~/.cache/weft` or $WEFT_CACHE_DIR.  Nothing is ever timed
unless `tune` is called.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import statistics
from collections.abc import Callable, Iterable

import torch

from weft.core.backend import interpreted
from weft.core.launcher import Tile

__all__ = ["tile", "tune"]

SHIPPED = pathlib.Path(__file__).parent / "tiles"
REPETITIONS = 9
FLUSHED_BYTES = 256 << 20
"""More than any L2 cache holds: written between runs, so that each starts cold."""

Table = dict[str, Tile]


def tile(kernel: str, problem: tuple[int, ...], default: Tile) -> Tile:
    """The tile for a kernel on a problem (its sizes): what was measured, or `default`."""
    if interpreted() or not torch.cuda.is_available():
        return default
    return _table(_gpu()).get(_key(kernel, problem), default)


def tune(
    kernel: str,
    problem: tuple[int, ...],
    candidates: Iterable[Tile],
    make: Callable[[], Callable[[], object]],
) -> Tile:
    """Time the candidates, keep the fastest in the user's table and return it.

    Args:
        kernel: the name that the family looks up.
        problem: the sizes that it looks up.
        candidates: tiles to try; one that does not compile is passed over.
        make: gives a fresh call that launches the kernel on this problem (with a plan of its own,
            since a plan remembers its tiles).
    """
    gpu, key = _gpu(), _key(kernel, problem)
    table = _table(gpu)
    before = table.get(key)
    times: dict[Tile, float] = {}
    try:
        for candidate in candidates:
            table[key] = candidate
            try:
                times[candidate] = _milliseconds(make())
            except (RuntimeError, ValueError):  # too large for this GPU
                continue
    finally:
        if before is None:
            table.pop(key, None)
        else:
            table[key] = before
    best = min(times, key=lambda candidate: times[candidate])
    table[key] = best
    _save(gpu, key, best)
    return best


def _key(kernel: str, problem: tuple[int, ...]) -> str:
    """Sizes enter by their powers of two: neighbours share a tile."""
    return " ".join([kernel, *(str(max(size, 0).bit_length()) for size in problem)])


def _gpu() -> str:
    return torch.cuda.get_device_name().lower().replace(" ", "_")


def _user_file(gpu: str) -> pathlib.Path:
    home = os.environ.get("WEFT_CACHE_DIR") or pathlib.Path.home() / ".cache" / "weft"
    return pathlib.Path(home) / f"{gpu}.json"


@functools.cache
def _table(gpu: str) -> Table:
    return _read(SHIPPED / f"{gpu}.json") | _read(_user_file(gpu))


def _read(path: pathlib.Path) -> Table:
    if not path.exists():
        return {}
    return {
        key: Tile(tuple(blocks), warps, stages)
        for key, (blocks, warps, stages) in json.loads(path.read_text()).items()
    }


def _save(gpu: str, key: str, best: Tile) -> None:
    """Written to a new file and moved: a reader sees the old table or the new one."""
    path = _user_file(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(_read(path) | {key: best}, indent=0, sort_keys=True))
    new.replace(path)


def _milliseconds(call: Callable[[], object]) -> float:
    """Median GPU time of a call that starts with a cold L2 cache."""
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    call()
    times: list[float] = []
    for _ in range(REPETITIONS):
        flushed.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
