"""Launches of products that are mixed by weights of each row's own: the kernels of a call.

Terms of z that share w, and of w that share z, are one kernel's, two pairs (x, y) at a time; so are
those of x and of y that share w and z.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.explain import record_cost, recording
from torchweft.core.gpu.launcher import Launcher, Queued, Tile, current_device, launch_all
from torchweft.core.printing.modules import printed
from torchweft.o3.channelwise.calls import Call
from torchweft.o3.channelwise.structure import Structure
from torchweft.o3.mixing import rows_source as generator
from torchweft.o3.mixing.blocks import Mixing, uncovered

__all__ = ["run"]


class Layout(NamedTuple):
    """How a kernel is laid out.

    Args:
        height: copies u of a tile of weights.
        warps: of a program.
    """

    height: int
    warps: int


LAYOUTS = {"z": Layout(8, 1), "w": Layout(16, 4), "x": Layout(16, 2), "y": Layout(16, 2)}
"""Of kernels by the first slot of their result: the fastest of some ten each on an H200.

Weights that are copied into shared memory ahead took a third longer.
"""

PAIRS = 2
"""Of x and y in a kernel, at most."""


class _Job(NamedTuple):
    """A kernel's work.

    Args:
        result: slots of what it computes.
        read: the call's tensors by operand, some to be added.
        to: the numbers of the call's results, one for each slot.
    """

    result: str
    read: Mapping[str, tuple[int, ...]]
    to: tuple[int, ...]


def run(
    structure: Structure, mixing: Mixing, call: Call, tensors: Sequence[Tensor]
) -> list[Tensor]:
    """The results of a call, of contiguous tensors (rows, width)."""
    like, found = tensors[0], dict[int, Tensor]()
    rows, more = like.shape[0], list[tuple[int, Tensor]]()
    widths = dict(zip("xyzw", structure.widths[:2] + mixing.widths[1:], strict=True))
    queue = []
    for job in _jobs(call) if rows else ():
        values = {
            name: functools.reduce(torch.add, [tensors[t] for t in which])
            for name, which in job.read.items()
        }
        for slot, k in zip(job.result, job.to, strict=True):
            empty = _filled(structure, mixing, slot)
            to = (like.new_zeros if empty else like.new_empty)(rows, widths[slot])
            values[slot if job.result in "zw" else f"g{slot}"] = to
            if found.setdefault(k, to) is not to:
                more.append((k, to))
        pairs = sum(name[0] == "x" for name in job.read) if job.result in "zw" else 1
        launcher = _launcher(structure, mixing, job.result, pairs, rows, like.dtype, like.device)
        names = generator.operands(job.result, pairs)
        queue.append(Queued(launcher, [values[name] for name in names]))
    with current_device(like):
        launch_all(queue)
    for k, part in more:
        found[k] += part
    if recording():
        moved = sum(t.nbytes for launch in queue for t in launch.operands if t is not None)
        record_cost(moved, 2 * len(queue) * rows * _products(mixing))
    return [
        found[k] if k in found else like.new_zeros(rows, widths[slot])
        for k, (slot, _) in enumerate(call.results)
    ]


@functools.lru_cache(maxsize=1024)
def _jobs(call: Call) -> tuple[_Job, ...]:
    return (*_sums(call), *_gradients(call))


def _sums(call: Call) -> Iterator[_Job]:
    """Of z and w."""
    for k, (slot, terms) in enumerate(call.results):
        if slot not in "zw":
            continue
        shared: dict[int, list[tuple[int, ...]]] = {}
        for *pair, other in terms:
            shared.setdefault(other, []).append(tuple(pair))
        for other, every in shared.items():
            for first in range(0, len(every), PAIRS):
                pairs = enumerate(every[first : first + PAIRS])
                read = {
                    f"{s}{i}": (t,) for i, pair in pairs for s, t in zip("xy", pair, strict=True)
                }
                yield _Job(slot, read | {"w" if slot == "z" else "z": (other,)}, (k,))


def _gradients(call: Call) -> Iterator[_Job]:
    """Of x and y: of all results in these slots, one of each at a time."""
    jobs: dict[tuple[int, int, int], dict[str, tuple[int, list[int]]]] = {}
    for k, (slot, terms) in enumerate(call.results):
        if slot in "xy":
            nth = sum(result.slot == slot for result in call.results[:k])
            for factor, z, w in terms:
                jobs.setdefault((z, w, nth), {}).setdefault(slot, (k, []))[1].append(factor)
    for (z, w, _), wanted in jobs.items():
        slots = "".join(s for s in "xy" if s in wanted)
        read = {f"{'yx'['xy'.index(s)]}0": tuple(wanted[s][1]) for s in slots}
        yield _Job(slots, read | {"z": (z,), "w": (w,)}, tuple(wanted[s][0] for s in slots))


@functools.lru_cache(maxsize=1024)
def _launcher(
    structure: Structure,
    mixing: Mixing,
    result: str,
    pairs: int,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Launcher:
    """A launcher keeps compiled code, so that the dtype is part of what it is known by."""
    layout = LAYOUTS[result[0]]
    source = generator.source(structure, mixing, result, pairs, layout.height)
    tile = Tile((layout.warps,), layout.warps, 1)
    kernel = printed("o3_mixed", source, generator.NAME)
    return Launcher(kernel, rows, (), (), (), tile)


@functools.lru_cache(maxsize=1024)
def _filled(structure: Structure, mixing: Mixing, slot: str) -> bool:
    """Whether some numbers of a row belong to no path."""
    if slot in "zw":
        return uncovered(mixing, slot)
    return generator.reached(structure, mixing, slot) < structure.width(slot)


def _products(mixing: Mixing) -> int:
    """Of numbers, in a row."""
    return sum(
        mixing.t[path.t].components * mixing.t[path.t].copies * mixing.z[path.z].copies
        for path in mixing.paths
    )
