"""Calls on the CPU, by printed loops.

Rows are divided into tasks that depend on the graph alone, so that results do not depend on the
number of threads.  Tensors of 16 bits are computed in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchweft.core.cpu.loops import share
from torchweft.core.cpu.machine_code import machine_code
from torchweft.core.explain import Launch, record, recording
from torchweft.core.tables import Slices
from torchweft.o3.channelwise.calls import Call
from torchweft.o3.channelwise.numba_source import LoopSpec, loop_source
from torchweft.o3.channelwise.numba_table import identity
from torchweft.o3.channelwise.structure import (
    Block,
    Product,
    Structure,
    block_view,
    entry_counts,
    stores,
)
from torchweft.o3.graph import Tables

__all__ = ["run", "serves"]

MAX_TASKS = 64
"""Tasks that rows are divided into: each has a partial sum of weights that all edges share."""

SERIAL_MULTIPLICATIONS = 100_000
"""Multiplications below which one thread is faster."""

MAX_LOOP_TERMS = 6144
"""Terms of a call that compile in half a minute."""

LOOP_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Array = np.ndarray[Any, Any]


def serves(structure: Structure, call: Call, dtype: torch.dtype) -> bool:
    """Whether loops of a call compile in reasonable time."""
    return dtype in LOOP_DTYPES and _terms(structure, call) <= MAX_LOOP_TERMS


def run(
    structure: Structure, call: Call, tensors: Sequence[Tensor], tables: Tables, shared: bool
) -> list[Tensor]:
    """The results of a call, see `operator.Run`."""
    dtype = tensors[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    values = [t.detach().to(wide) for t in tensors]
    found: dict[int, Tensor] = {}
    for owner, numbers in _owners(call, tables) if tables.num_edges else ():
        part = Call(call.slots, tuple(call.results[n] for n in numbers))
        results = _walked(structure, part, values, _walk(tables, owner), shared)
        found |= {n: result.to(dtype) for n, result in zip(numbers, results, strict=True)}
    rows = {"x": tables.num_x, "z": tables.num_z, "y": tables.num_edges}
    rows["w"] = 1 if shared else tables.num_edges
    return [
        found[n] if n in found else tensors[0].new_zeros(rows[slot], structure.width(slot))
        for n, (slot, _) in enumerate(call.results)
    ]


@functools.lru_cache(maxsize=4096)
def _terms(structure: Structure, call: Call, channels: bool = False) -> int:
    """Terms of the formulas, of all channels or of one."""
    terms = sum(len(result.terms) for result in call.results)
    return terms * sum((c if channels else 1) * n for c, n, _ in entry_counts(structure))


def _owners(call: Call, tables: Tables) -> Iterator[tuple[str, list[int]]]:
    """The slot by whose rows a walk takes the edges, and the results that it computes.

    Results of edges are computed with the gradient of x, which shares most with them.
    """
    there = [n for n, result in enumerate(call.results) if result.terms]
    summed = "".join(s for s, index in (("x", tables.src), ("z", tables.dst)) if index is not None)
    if "x" in summed and any(call.results[n].slot == "x" for n in there):
        last = [n for n in there if "z" in summed and call.results[n].slot == "z"]
        yield "x", [n for n in there if n not in last]
        there = last
    if there:
        yield "z", there


class _Walk(NamedTuple):
    """The order in which a kernel takes the edges."""

    owner: str  # the slot whose rows order the edges
    tasks: Tensor  # first row of each task, and the end
    tables: tuple[Tensor, ...]  # rows, indptr, edges, others, see `loop_source`
    slices: Slices | None  # pieces of rows, which are taken as rows; None: rows are whole
    gathered: str  # the slot whose rows several edges read, or ""
    num_edges: int  # number of edges


def _walk(tables: Tables, owner: str) -> _Walk:
    if owner == "z":
        others, indptr, edges, slices = tables.src, tables.z_indptr, tables.z_edges, tables.z_slices
    else:
        others, indptr, edges, slices = tables.dst, tables.x_indptr, tables.x_edges, tables.x_slices
    rows = None
    if slices is not None:
        rows, indptr = slices.owner, slices.indptr
    dtype = next((t.dtype for t in (indptr, others) if t is not None), torch.int32)
    every = identity(max(tables[:3]) + 1, dtype)
    if indptr is None:
        indptr = every[: tables.num_edges + 1]
    found = tuple(every if t is None else t for t in (rows, indptr, edges, others))
    slot, read = ("x", tables.num_x) if owner == "z" else ("z", tables.num_z)
    gathered = slot if others is not None and tables.num_edges > read else ""
    tasks = torch.from_numpy(_tasks(found[1].numpy()))
    return _Walk(owner, tasks, found, slices, gathered, tables.num_edges)


def _tasks(indptr: Array) -> Array:
    """First row of each task, and the end; tasks have about equal numbers of edges and rows."""
    work = indptr + np.arange(indptr.shape[0], dtype=np.int64)
    number = min(MAX_TASKS, indptr.shape[0] - 1)
    found: Array = np.searchsorted(work, work[-1] * np.arange(number + 1) // number)
    return found


def _walked(
    structure: Structure, call: Call, values: Sequence[Tensor], walk: _Walk, shared: bool
) -> list[Tensor]:
    """The results of one walk over the edges, product by product."""
    name = _name(values[0])
    tasks = len(walk.tasks) - 1
    outs, added = [], []
    for slot, _ in call.results:
        most, least = stores(structure, slot)
        added.append(most > 1)
        shape = _rows(slot, walk, shared), structure.width(slot)
        out = _unwritten(shape, name) if most == least == 1 else np.zeros(shape, name)
        outs.append(torch.from_numpy(out))
    for product in structure.products:
        if not product.channels or not product.paths:
            continue
        product, given = _packed(product, call, values, walk)
        indices = tuple(_name(table) for table in walk.tables)
        loop = _loop(LoopSpec(product, call, walk.owner, shared, tuple(added), name, indices))
        run = functools.partial(_run, *loop, (walk.tasks, *walk.tables, *given, *outs))
        work = walk.num_edges * _terms(structure, call, channels=True)
        share(run, tasks, work, SERIAL_MULTIPLICATIONS)
        if recording():
            what = "contract_" + "".join(slot for slot, _ in call.results)
            room = sum(t.nbytes for t, v in zip(given, values, strict=True) if t is not v)
            record(Launch("numba", what, {"channels": product.channels}, tasks, room))
    return [
        _folded(out, slot, walk, shared) for out, (slot, _) in zip(outs, call.results, strict=True)
    ]


def _unwritten(shape: tuple[int, int], name: str) -> Array:
    """Memory of numpy, in huge pages: first writes to torch's take longer than the loop."""
    return np.empty(shape, name)


def _run(kernel: Any, scratch: Tensor, arguments: Sequence[Tensor], first: int, last: int) -> None:
    kernel(first, last, torch.zeros_like(scratch), *arguments)


def _packed(
    product: Product, call: Call, values: Sequence[Tensor], walk: _Walk
) -> tuple[Product, Sequence[Tensor]]:
    """The product and tensors with channels side by side in rows that several edges read.

    Such a row is rearranged once, not by each edge.
    """
    slot = walk.gathered
    if not slot or all(block.channel_step < 2 for block in product.blocks(slot)):
        return product, values
    blocks, end = [], 0
    for block in product.blocks(slot):
        width = product.channels if block.channel_step else 1
        blocks.append(Block(end, block.degree, width, min(block.channel_step, 1)))
        end += block.components * width
    given = list(values)
    for t in (t for t, s in enumerate(call.slots) if s == slot):
        given[t] = values[t].new_empty(values[t].shape[0], end)
        for block, place in zip(product.blocks(slot), blocks, strict=True):
            block_view(given[t], place, product.channels).copy_(
                block_view(values[t], block, product.channels)
            )
    packed = tuple(blocks)
    return product._replace(x=packed) if slot == "x" else product._replace(z=packed), given


def _rows(slot: str, walk: _Walk, shared: bool) -> int:
    """Number of rows of a result that a kernel stores."""
    if slot == "w" and shared:
        return len(walk.tasks) - 1
    return int(walk.tasks[-1]) if slot == walk.owner else walk.num_edges


@functools.lru_cache(maxsize=1024)
def _loop(spec: LoopSpec) -> tuple[Any, Tensor]:
    """The kernel of a walk, and a scratch array like those that it needs."""
    text, size = loop_source(spec)
    return machine_code(text), torch.empty(size, dtype=getattr(torch, spec.dtype), device="cpu")


def _name(t: Tensor) -> str:
    """Of the tensor's dtype."""
    return str(t.dtype).removeprefix("torch.")


def _folded(out: Tensor, slot: str, walk: _Walk, shared: bool) -> Tensor:
    """The sum of the rows stored by tasks or for pieces of rows."""
    if slot == "w" and shared:
        return out.sum(0, keepdim=True)
    if slot == walk.owner and walk.slices is not None:
        lengths = walk.slices.owner_indptr.diff().long()
        return torch.segment_reduce(out, "sum", lengths=lengths, axis=0, unsafe=True)
    return out
