"""Measured tiles: shipped with torchweft for known GPUs, or timed on this machine when asked.

A kernel's default tile is a rule of its family.  A table overrides it: for each kernel and problem
the blocks, warps and stages that were fastest.  Tables are JSON: `tiles/<gpu>.json` beside this
file, and the user's own, which wins, in `~/.cache/torchweft` or $TORCHWEFT_CACHE_DIR.  Nothing is
ever timed unless `tune` is called.
"""

from __future__ import annotations

import functools
import json
import pathlib
import statistics
from collections.abc import Callable, Iterator

import torch

from torchweft.core.backend import interpreted
from torchweft.core.files import home, write
from torchweft.core.gpu.launcher import Tile
from torchweft.errors import BackendError

__all__ = ["tile", "tune"]

SHIPPED = pathlib.Path(__file__).parent / "tiles"
REPETITIONS = 9
GAIN = 0.97
"""A tile is changed for one that takes at most this part of its time."""

FLUSHED_BYTES = 256 << 20
"""More than any L2 cache holds: written between runs, so that each starts cold."""

Table = dict[str, Tile]


def tile(kernel: str, problem: tuple[int, ...], default: Tile) -> Tile:
    """The tile for a kernel on a problem (its sizes): what was measured, or `default`."""
    if interpreted() or not torch.cuda.is_available():
        return default
    key = _key(kernel, problem)
    found = _table(_gpu()).get(key, default)
    if _Watch.seen is not None:
        _Watch.seen[key] = found
    return found


class _Watch:
    """The tiles that a call under tuning asks for, by key."""

    seen: Table | None = None


def tune(make: Callable[[], Callable[[], object]]) -> dict[str, Tile]:
    """Time tiles around those that a call uses, keep the fastest in the user's table.

    Args:
        make: gives a fresh call to tune, with a plan of its own: a plan remembers its tiles.

    Returns:
        The tiles that were changed, by kernel and problem.

    Raises:
        BackendError: there is no GPU here.
    """
    if interpreted() or not torch.cuda.is_available():
        raise BackendError(
            "tuning was asked for without a GPU: tiles are timed on the GPU that they are for. "
            "Run `torchweft tune` on a machine with one; the CPU paths need no tuning."
        )
    gpu, changed = _gpu(), {}
    for key, best in _tiles_of(make).items():
        found = _best(_table(gpu), key, best, make)
        if found != best:
            _save(gpu, key, found)
            changed[key] = found
    return changed


def _tiles_of(make: Callable[[], Callable[[], object]]) -> Table:
    _Watch.seen = {}
    try:
        make()()
        return _Watch.seen
    finally:
        _Watch.seen = None


def _best(table: Table, key: str, start: Tile, make: Callable[[], Callable[[], object]]) -> Tile:
    """The fastest of a tile and its neighbours; the table holds it afterwards."""
    from triton.errors import TritonError

    times: dict[Tile, float] = {}
    for candidate in (start, *_neighbours(start)):
        table[key] = candidate
        try:
            times[candidate] = _milliseconds(make())
        except (TritonError, RuntimeError, ValueError):  # too large for this GPU
            continue
    fastest = min(times, key=lambda candidate: times[candidate])
    if times[fastest] > GAIN * times[start]:
        fastest = start  # within the noise
    table[key] = fastest
    return fastest


def _neighbours(start: Tile) -> Iterator[Tile]:
    """One block, the warps or the stages twice or half as large."""
    for i, block in enumerate(start.blocks):
        for size in (block // 2, 2 * block):
            if size:
                yield start._replace(blocks=(*start.blocks[:i], size, *start.blocks[i + 1 :]))
    for warps in (start.num_warps // 2, 2 * start.num_warps):
        if 1 <= warps <= 16:
            yield start._replace(num_warps=warps)
    for stages in (start.num_stages - 1, start.num_stages + 1):
        if stages:
            yield start._replace(num_stages=stages)


def _key(kernel: str, problem: tuple[int, ...]) -> str:
    """Sizes enter by their powers of two: neighbours share a tile."""
    return " ".join([kernel, *(str(max(size, 0).bit_length()) for size in problem)])


def _gpu() -> str:
    return torch.cuda.get_device_name().lower().replace(" ", "_")


def _user_file(gpu: str) -> pathlib.Path:
    return home() / f"{gpu}.json"


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
    write(path, json.dumps(_read(path) | {key: best}, indent=0, sort_keys=True).encode())


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
