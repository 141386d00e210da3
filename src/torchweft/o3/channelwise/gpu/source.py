"""Source of Triton kernels for calls: loads, loops and stores around the arithmetic of paths.

A program owns a row of one slot, z or x, and a block of channels, and loops over the row's edges:

    for the edges of the row:                     # a tile of EDGES edges where channels are few
        load x, y and w of the edge
        for each path: load the row's components (from L1 after the first time), add to the results
        store each result of the edge after the last path that adds to it
    store the results of the row

Where lists are runs of edges that share a row of x (`o3.graph`), each warp takes
one run.  Where no result is summed over the edges of a row, a program takes a range of the lists,
and so of one row after another: many small programs end together, whatever the lengths of rows.
Where every edge is a row of its own, a program owns a tile of rows and has no loop.  What channels
share is summed over those of a program: one part for each block of channels.  Gradients of weights
that all edges share are summed over all rows of a program, and programs are few.

Weights are read once and bypass the cache; x, and the row that is read again for every edge, stay.

Prefetches: a warp computes an edge for microseconds and first waits for its weights.  Few warps can
take turns, since each holds hundreds of numbers.  So it prefetches those of the next edge into L2
(one instruction for 32 lines, a line for each thread, no registers).  Where rows have few edges, it
waits for the row itself, which each path reads in turn, and prefetches the row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torchweft.core.printing.dialect import indented
from torchweft.core.printing.kernel import Frame
from torchweft.o3.channelwise.arithmetic import Arithmetic, value_name
from torchweft.o3.channelwise.gpu.kernel_spec import WARP, RowKernelSpec, ScatteredBlock
from torchweft.o3.channelwise.structure import Block

__all__ = ["kernel_name", "operands", "triton_source"]

BLOCK_NAMES = ("BLOCK", "EDGES", "STAGES")
"""Constants of a kernel: channels, edges and stages of its tiling."""

LINE_NUMBERS = 32
"""Numbers of float32 in a line, which one thread prefetches."""

LANE_NUMBERS = (
    "number = (thread >> 4) & 1 | (thread >> 2) & 2 | thread & 4",  # its bits in reverse
    "number = number | (thread << 2) & 8 | (thread << 4) & 16",
)
"""Which sum of `_lane_sums` ends in each thread."""


def operands(spec: RowKernelSpec) -> tuple[int, ...]:
    """The tensors that a kernel reads, in the order of its first pointers."""
    return tuple(sorted({t for r in spec.call.results for term in r.terms for t in term}))


def kernel_name(spec: RowKernelSpec) -> str:
    """The name of a kernel, in profiles too: the slots of its results."""
    return "channelwise_product_" + "".join(result.slot for result in spec.call.results)


def triton_source(spec: RowKernelSpec, prefetched: str = "") -> str:
    """The module text of a kernel.

    Pointers are those of tensors, of results, then of the lists that there are: indptr, owner,
    edges, index.  Then come numbers: of a divisible kernel, whose owner is the row of every edge,
    `begin` and `end`, the range of a launch, and `span`, that of a program; else `items` (rows, or
    tiles of rows), `rows` and `lanes` (programs for each block of channels).

    Args:
        spec: what the kernel computes.
        prefetched: "edges": y and w of the next edges; "row": the row of the owner's slot; "":
            nothing.  The kernel then calls `fetched`, which `gluon` defines.
    """
    return "\n".join(_KernelWriter(spec, prefetched).module()) + "\n"


class _Fetch(NamedTuple):
    """Lines of a row that one instruction prefetches."""

    tensor: str  # the name of its pointer
    width: int  # numbers in a row
    columns: tuple[int, ...]  # first column of each line
    own: bool  # whether each block of channels has lines of its own


class _LaneSum(NamedTuple):
    """A value to be summed over lanes: its name, pointer to the target row, and column there."""

    name: str
    row: str
    column: int


class _KernelWriter:
    """The lines of one kernel."""

    def __init__(self, spec: RowKernelSpec, prefetched: str) -> None:
        self.spec, self.tiling = spec, spec.tiling
        self.tensors = operands(spec)
        self.frame = Frame(gluon=False, wide=spec.wide)
        self.flat = spec.tiling.edges == 1
        self.halves = spec.tiling.warps == spec.tiling.edges and spec.tiling.block >= WARP
        self.ragged = spec.product.channels % spec.tiling.block != 0
        self.shape = "(BLOCK,)" if self.flat else "(EDGES, BLOCK)"
        self.seen: set[str] = set()
        self.last: dict[tuple[int, int], int] = {}
        self.bodies: list[list[str]] = []
        self.reads: list[set[tuple[int, int]]] = []
        self._compute()
        self.prefetched, self.fetches = prefetched, tuple(self._fetches(prefetched))

    # the arithmetic, path by path

    def _compute(self) -> None:
        """The lines of each path, and the last path that adds to each block of a result."""
        product, call = self.spec.product, self.spec.call
        arithmetic = Arithmetic(product, call, self._add)
        self.lines = arithmetic.lines
        for at, number in enumerate(self.spec.paths):
            path, begin = product.paths[number], len(self.lines)
            arithmetic.path(path)
            self.bodies.append(self.lines[begin:])
            used = {(t, getattr(path, call.slots[t])) for t in self.tensors}
            self.reads.append(used)
            for r, result in enumerate(call.results):
                if result.terms:
                    self.last[r, getattr(path, result.slot)] = at

    def _add(self, result: int, block: int, component: int, terms: str) -> None:
        name = f"r{result}_{block}_{component}"
        if self._carried(result) or name in self.seen:
            self.lines.append(f"{name} = {name} {terms}")
        else:
            self.lines.append(f"{name} = {terms.removeprefix('+ ')}")
        self.seen.add(name)

    def _carried(self, result: int) -> bool:
        """Whether a result is summed over edges or rows."""
        slot = self.spec.call.results[result].slot
        return (slot == self.spec.owner and self.spec.segmented) or (
            slot == "w" and self.spec.looped
        )

    def _components(self, result: int, block: int) -> list[str]:
        """The names of the computed components of a block of a result."""
        size = self.spec.product.blocks(self.spec.call.results[result].slot)[block].components
        names = [f"r{result}_{block}_{c}" for c in range(size)]
        return [name for name in names if name in self.seen]

    # the module

    def module(self) -> Iterator[str]:
        yield "import triton"
        yield "import triton.language as tl"
        if self._together():
            yield "from torchweft.o3.channelwise.gpu.kernels import halved, of_threads, threads"
        counts = ["begin", "end", "span"] if self.spec.divisible else ["items", "rows", "lanes"]
        parameters = [*self._pointers(), *counts, *(f"{b}: tl.constexpr" for b in BLOCK_NAMES)]
        yield from self.frame.function(kernel_name(self.spec), parameters, self._body(), counts)

    def _pointers(self) -> list[str]:
        spec = self.spec
        lists = {
            "indptr": spec.segmented,
            "owner": spec.pieces or spec.divisible or spec.runs,
            "edges": spec.ordered,
            "index": spec.indexed,
        }
        pointers = [f"{spec.call.slots[t]}{t}" for t in self.tensors]
        pointers += [f"out{r}" for r in range(len(spec.call.results))]
        pointers += [name for name, there in lists.items() if there]
        return [f"{name}_ptr" for name in pointers]

    def _body(self) -> Iterator[str]:
        blocks = self.spec.channel_blocks
        yield "pid = tl.program_id(0)"
        yield f"lane = pid // {blocks}" if blocks > 1 else "lane = pid"
        lanes = "tl.arange(0, BLOCK)" if self.flat else "tl.arange(0, BLOCK)[None, :]"
        if blocks > 1:
            yield f"block = pid % {blocks}"
            yield f"u = block * BLOCK + {lanes}"
        else:
            yield f"u = {lanes}"
        if self.ragged:
            yield f"inside = u < {self.spec.product.channels}"
        if self._together() or self.fetches:
            yield "thread = tl.arange(0, 32)" if self.flat else "thread = threads(EDGES)"
        if self._together():
            yield from LANE_NUMBERS
        yield from self._fetch_columns()
        if self.spec.divisible:
            yield from self._share()
            return
        if self.spec.runs:
            yield from self._runs()
            return
        if not self.spec.looped:
            yield "item = lane"
            yield from self._item()
            return
        yield from self._zeros("w")
        stages = "" if self.spec.segmented else ", num_stages=STAGES"
        yield f"for item in tl.range(lane, items, lanes{stages}):"
        yield from indented(self._item())
        yield from self._store_carried("w", "lane")

    def _share(self) -> Iterator[str]:
        """A range of the lists, row after row."""
        edge = "tl.load(edges_ptr + place)" if self.spec.ordered else "place"
        yield "place = begin + tl.cast(lane, end.dtype) * span"
        yield "stop = tl.minimum(place + span, end)"
        yield "while place < stop:"
        yield f"    row = tl.cast(tl.load(owner_ptr + {edge}), tl.int64)"
        yield "    first = place"
        yield "    last = tl.minimum(tl.load(indptr_ptr + row + 1), stop).to(end.dtype)"
        yield from indented(self._edges())
        yield "    place = last"

    def _runs(self) -> Iterator[str]:
        """One run for each warp, edge after edge, as many steps as the longest run has edges.

        A warp whose run is shorter repeats its last edge, loads nothing and stores nothing.  The
        next edge's number is read one step early, since prefetches wait for it.
        """
        yield "item = lane * EDGES + tl.arange(0, EDGES)[:, None]"
        yield "first = tl.load(indptr_ptr + item)"
        yield "last = tl.load(indptr_ptr + item + 1)"
        yield "row = tl.cast(tl.load(owner_ptr + item), tl.int64)"
        yield "ends_ptr = indptr_ptr + lane * EDGES"
        for n in range(self.tiling.edges):
            length = f"tl.load(ends_ptr + {n + 1}) - tl.load(ends_ptr + {n})"
            yield f"steps = {f'tl.maximum(steps, {length})' if n else length}"
        for n in range(2):
            yield from _run_edge(n, f"first + {n}")
        yield from self._zeros(self.spec.owner)
        yield from self._places([t for t in self.tensors if self._owned(t)], "row")
        yield "for step in range(0, steps):"
        yield from indented(self._run_step())
        yield from indented(self._edge("p"))
        if self._stored_after_runs():
            yield from self._store_carried(self.spec.owner, "item")

    def _run_step(self) -> Iterator[str]:
        yield "p = first + step"
        yield "present = p < last"
        yield "e = tl.cast(edge0, tl.int64)"
        yield "other = tl.cast(index0, tl.int64)"
        yield "edge0 = edge1"
        yield "index0 = index1"
        yield from self._prefetch_edge("of_threads(edge0)")
        yield from _run_edge(1, "p + 2")

    def _stored_after_runs(self) -> bool:
        """Whether runs are stored after the loop, not at their last edge.

        A single block, which all paths add to, keeps its registers to the end of an edge anyway.
        """
        return len({self.spec.product.paths[p].x for p in self.spec.paths}) == 1

    def _item(self) -> Iterator[str]:
        if self.spec.segmented:
            yield from self._row()
        elif self.flat:
            yield from self._edge("item")
        else:
            yield "p = item * EDGES + tl.arange(0, EDGES)[:, None]"
            yield "present = p < rows"
            yield from self._edge("p")

    def _row(self) -> Iterator[str]:
        """A row, and all its edges."""
        yield "first = tl.load(indptr_ptr + item)"
        yield "last = tl.load(indptr_ptr + item + 1)"
        number = "tl.load(owner_ptr + item)" if self.spec.pieces else "item"
        yield f"row = tl.cast({number}, tl.int64)"
        yield from self._zeros(self.spec.owner)
        yield from self._edges()
        yield from self._store_carried(self.spec.owner, "item")

    def _edges(self) -> Iterator[str]:
        """The loop over the edges of a row."""
        yield from self._places([t for t in self.tensors if self._owned(t)], "row")
        if self.prefetched == "row":
            yield from self._prefetch("row")
        if self.flat:
            yield "for p in tl.range(first, last, num_stages=STAGES):"
            yield from indented([*self._prefetch_edge("p + 1"), *self._edge("p")])
        else:
            yield "for start in tl.range(first, last, EDGES, num_stages=STAGES):"
            yield "    p = start + tl.arange(0, EDGES)[:, None]"
            yield "    present = p < last"
            ahead = self._prefetch_edge("of_threads(p) + EDGES")
            yield from indented([*ahead, *self._edge("p")])

    def _zeros(self, slot: str) -> Iterator[str]:
        for (r, block), _ in sorted(self.last.items()):
            if self.spec.call.results[r].slot == slot:
                for name in self._components(r, block):
                    yield f"{name} = tl.zeros({self.shape}, {self.frame.number})"

    # an edge

    def _edge(self, at: str) -> Iterator[str]:
        if not self.spec.runs:
            yield from self._numbers(at)
        yield from self._places([t for t in self.tensors if not self._owned(t)], "e")
        first = {key for reads in self.reads for key in reads if not self._late(key[0])}
        for t, block in sorted(first):
            yield from self._load(t, block)
        read: set[tuple[int, int]] = set()
        for at_path, body in enumerate([[], *self.bodies]):
            if at_path < len(self.reads):  # loads of the next path precede the stores of this one
                late = {key for key in self.reads[at_path] if self._late(key[0])} - read
                read |= late
                for t, block in sorted(late):
                    yield from self._load(t, block)
            yield from body
            yield from self._finished(at_path - 1)
        yield from self._store_together()

    def _numbers(self, at: str) -> Iterator[str]:
        """e, the edge, and other, its row in the slot that is not the owner's."""
        mask = "" if self.flat else ", mask=present, other=0"
        edge = f"tl.load(edges_ptr + {at}{mask})" if self.spec.ordered else at
        yield f"e = tl.cast({edge}, tl.int64)"
        if self.spec.indexed:
            yield f"other = tl.cast(tl.load(index_ptr + e{mask}), tl.int64)"

    def _owned(self, tensor: int) -> bool:
        """Whether a tensor's row is that of the program."""
        return self.spec.segmented and self.spec.call.slots[tensor] == self.spec.owner

    def _late(self, tensor: int) -> bool:
        """Whether blocks are loaded as paths need them: long rows, and rows in near caches.

        All others come from memory and are loaded before the first path.
        """
        slot = self.spec.call.slots[tensor]
        return self._owned(tensor) or slot == "z" or (slot == "w" and self.spec.shared)

    def _places(self, tensors: Iterable[int], number: str) -> Iterator[str]:
        """Pointers to rows of tensors."""
        spec = self.spec
        for t in tensors:
            slot = spec.call.slots[t]
            if slot == "w" and spec.shared:
                yield f"w{t}_row = w{t}_ptr"
                continue
            crossed = slot in "xz" and slot != spec.owner and spec.indexed
            place = f"{'other' if crossed else number} * {spec.widths[t]}"
            yield f"{slot}{t}_row = {slot}{t}_ptr + {place}"

    def _load(self, t: int, block: int) -> Iterator[str]:
        slot = self.spec.call.slots[t]
        place = self.spec.product.blocks(slot)[block]
        masks = ["inside"] * (self.ragged and place.channel_step != 0)
        alone = self._owned(t) or (slot == "w" and self.spec.shared)
        masks += ["present"] * (not self.flat and not alone)
        mask = f", mask={' & '.join(masks)}, other=0.0" if masks else ""
        for c in range(place.components):
            name = value_name(slot, t, block, c)
            address, policy = _address(f"{slot}{t}_row", place, c), self._policy(t, place)
            yield f"{name} = tl.load({address}{mask}{policy}).to({self.frame.number})"

    def _policy(self, t: int, place: Block) -> str:
        """Cache policy of what is read once: weights bypass both caches, other edges' rows L1."""
        slot = self.spec.call.slots[t]
        if slot == "w" and not self.spec.shared:
            return ", eviction_policy='evict_first'"
        far = slot in "xz" and not self._owned(t) and place.channel_step == 1
        far = far and not self.spec.runs  # whose warps read the same rows
        return ", cache_modifier='.cg'" if far and self.tiling.stages == 1 else ""

    # prefetches

    def _fetches(self, prefetched: str) -> Iterator[_Fetch]:
        """Lines of the row, or of y and w of an edge where warps take edges in order of numbers.

        In float64 there are no registers left.
        """
        spec, tiling = self.spec, self.tiling
        served = spec.segmented and not spec.wide and not self.ragged
        in_order = spec.runs or prefetched == "row" or not spec.ordered
        served = served and in_order and tiling.warps == tiling.edges
        if not prefetched or not served:
            return
        for t in self.tensors:
            slot = spec.call.slots[t]
            of_edges = slot == "y" or (slot == "w" and not spec.shared)
            if not (self._owned(t) if prefetched == "row" else of_edges):
                continue
            reached = sorted({block for reads in self.reads for n, block in reads if n == t})
            blocks = [spec.product.blocks(slot)[block] for block in reached]
            columns = _lines(blocks, tiling.block)
            own = blocks[0].channel_step == 1 and spec.channel_blocks > 1
            for first in range(0, len(columns), WARP):
                some = columns[first : first + WARP]
                yield _Fetch(f"{slot}{t}_ptr", spec.widths[t], some, own)

    def _fetch_columns(self) -> Iterator[str]:
        """The column of each thread, by its number `thread`."""
        for n, fetch in enumerate(self.fetches):
            yield f"fetch{n} = thread * 0 + {fetch.columns[0]}"
            for thread, column in enumerate(fetch.columns[1:], 1):
                yield f"fetch{n} = tl.where(thread >= {thread}, {column}, fetch{n})"
            if fetch.own:
                yield f"fetch{n} = fetch{n} + block * BLOCK"

    def _prefetch_edge(self, edge: str) -> Iterator[str]:
        """Prefetches of the next edge."""
        if self.prefetched == "edges" and self.fetches:
            edge = edge if self.spec.runs else f"tl.minimum({edge}, last - 1)"
            yield f"ahead = tl.cast({edge}, tl.int64)"
            yield from self._prefetch("ahead")

    def _prefetch(self, row: str) -> Iterator[str]:
        for n, fetch in enumerate(self.fetches):
            yield f"fetched({fetch.tensor} + {row} * {fetch.width} + fetch{n})"

    # results

    def _finished(self, at: int) -> Iterator[str]:
        """Stores of the blocks that no later path of the edge adds to."""
        together = self._together()
        for (r, block), last in sorted(self.last.items()):
            if last == at and not self._carried(r) and (r, block) not in together:
                yield from self._store(r, block, "e", ["present"] * (not self.flat))
            elif (
                last == at and self._carried(r) and self.spec.runs and not self._stored_after_runs()
            ):
                yield from self._store(r, block, "tl.cast(item, tl.int64)", ["(p == last - 1)"])

    def _together(self) -> list[tuple[int, int]]:
        """The blocks of results of an edge that `_lane_sums` sums over channels."""
        return [
            (r, block)
            for r, block in sorted(self.last)
            if self.halves and self._shared(r, block) and not self._carried(r)
        ]

    def _store_together(self) -> Iterator[str]:
        values = []
        if not self.flat and self._together():
            yield "live = of_threads(present)"
        for r, block in self._together():
            target = self.spec.targets[r]
            place = target.blocks[block]
            assert isinstance(place, Block)
            edge = "e" if self.flat else "of_threads(e)"
            yield from self._target_row(f"out{r}_row", r, edge, shared=True)
            for name in self._components(r, block):
                column = place.offset + _component(name) * place.step
                values.append(_LaneSum(name, f"out{r}_row", column))
        yield from _lane_sums(values, self.tiling.block, self.flat)

    def _store_carried(self, slot: str, number: str) -> Iterator[str]:
        """Stores of the results summed over edges."""
        for r, block in sorted(self.last):
            if self.spec.call.results[r].slot == slot:
                yield from self._store(r, block, f"tl.cast({number}, tl.int64)", [])

    def _store(self, r: int, block: int, number: str, masks: list[str]) -> Iterator[str]:
        place, shared = self.spec.targets[r].blocks[block], self._shared(r, block)
        assert place is not None
        masks = masks + ["inside"] * (self.ragged and not shared)
        mask = f", mask={' & '.join(masks)}" if masks else ""
        policy = "" if self._carried(r) else ", cache_modifier='.cs'"
        yield from self._target_row("at", r, number, shared)
        for name in self._components(r, block):
            value = self._summed(name, self._carried(r) and not self.spec.runs, shared)
            yield f"tl.store({_address('at', place, _component(name))}, {value}{mask}{policy})"

    def _target_row(self, name: str, r: int, number: str, shared: bool) -> Iterator[str]:
        target = self.spec.targets[r]
        yield f"{name} = out{r}_ptr + {number} * {target.width}"
        if shared and self.spec.channel_blocks > 1:
            yield f"{name} = {name} + block * {target.part}"

    def _shared(self, r: int, block: int) -> bool:
        """Whether all channels add to a block of a result."""
        slot = self.spec.call.results[r].slot
        return self.spec.product.blocks(slot)[block].channel_step == 0

    def _summed(self, name: str, over_edges: bool, over_channels: bool) -> str:
        """A component summed over edges and channels of the tile."""
        if self.flat:
            return f"tl.sum({name}, 0)" if over_channels else name
        if over_edges:
            return (
                f"tl.sum(tl.sum({name}, 0), 0)" if over_channels else f"tl.sum({name}, 0)[None, :]"
            )
        return f"tl.sum({name}, 1)[:, None]" if over_channels else name


def _component(name: str) -> int:
    return int(name.rsplit("_", 1)[1])


def _address(pointer: str, place: Block | ScatteredBlock, component: int) -> str:
    if isinstance(place, ScatteredBlock):
        return f"{pointer} + {place.begins[component]} + u"
    offset = place.offset + component * place.step
    lanes = "" if place.channel_step == 0 else " + u"
    lanes += f" * {place.channel_step}" if place.channel_step > 1 else ""
    return f"{pointer}{f' + {offset}' if offset else ''}{lanes}"


def _run_edge(n: int, place: str) -> Iterator[str]:
    yield f"place{n} = tl.minimum({place}, last - 1)"
    yield f"edge{n} = tl.load(edges_ptr + place{n})"
    yield f"index{n} = tl.load(index_ptr + place{n})"


def _lines(blocks: Sequence[Block], channels: int) -> tuple[int, ...]:
    """First columns of lines that cover `channels` channels of blocks, or what channels share."""
    steps = {block.channel_step for block in blocks}
    begins = [b.offset + c * b.step for b in blocks for c in range(b.components)]
    if steps == {1}:
        return tuple(begin + n for begin in begins for n in range(0, channels, LINE_NUMBERS))
    return tuple(range(begins[0], begins[-1] + 1, LINE_NUMBERS)) if steps == {0} else ()


def _lane_sums(values: Sequence[_LaneSum], block: int, flat: bool) -> Iterator[str]:
    """Lines that sum values over `block` channels, a multiple of WARP, and store the sums.

    A sum over 32 threads takes 5 exchanges.  Two sums begin with one: a thread keeps its number of
    one sum and hands over that of the other, which leaves half as many sums over half as many
    threads.  So 16 values take 16 exchanges instead of 80, and one store instead of 16.

    Values have one axis, of channels, if `flat`, else an axis of edges before it; rows and `live`,
    which marks the edges that exist, then have one number for each edge.
    """
    for begin in range(0, len(values), WARP):
        part = values[begin : begin + WARP]
        yield from _halved([value.name for value in part], block // WARP, flat)
        first = 0
        places = [(value.row, value.column - n) for n, value in enumerate(part)]
        for (row, shift), same in itertools.groupby(places):  # adjacent columns of one row
            last = first + len(list(same))
            masks = f"(number >= {first}) & (number < {last}){'' if flat else ' & live'}"
            address = f"{row} + {shift} + number"
            yield f"tl.store({address}, total, mask={masks}, cache_modifier='.cs')"
            first = last


def _halved(names: list[str], each: int, flat: bool) -> Iterator[str]:
    """total: the sum of value `number`, in the threads whose number is that of a value."""
    edges, axis = ("", 0) if flat else ("EDGES, ", 1)
    if each > 1:
        shape = f"({edges}{WARP}, {each})"
        names = [f"tl.sum(tl.reshape({name}, {shape}), {axis + 1})" for name in names]
    bit = WARP // 2
    while len(names) > 1:
        pairs = list(itertools.zip_longest(names[::2], names[1::2]))
        names = [f"c{bit}_{n}" for n in range(len(pairs))]
        for name, (a, b) in zip(names, pairs, strict=True):
            yield f"{name} = halved({a}, {b or a}, thread, {bit}, {axis})"
        bit //= 2
    yield f"total = {names[0]}"
    while bit:
        yield f"total = total + tl.gather(total, thread ^ {bit}, {axis})"
        bit //= 2
