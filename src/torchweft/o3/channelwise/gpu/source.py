"""Triton kernels of calls: loads and stores printed around the arithmetic of paths.

A kernel program owns a row of one slot, z or x, and a block of channels, and walks the row's edges:

    for the edges of the row:                     # a tile of EDGES edges where channels are few
        load x, y and w of the edge
        path after path: load the row's components (from L1, but the first time), add to the results
        store the results of the edge as soon as no path is left that adds to them
    store the results of the row

Where the row is one of x and its list a run (`o3.edges.shared_source_runs`), each warp takes one.
Where no result is summed over the edges of a row, a program takes some places of the lists, and so
of one row after another: many small programs end together, whatever the lengths of rows.  Where
every edge is a row of its own, a program owns a tile of rows and there is no loop.  What channels
share is summed over those of a program: one part a block of channels.  Gradients of weights that
all edges share are summed over all rows of a program, and programs are few.

Weights are read once and pass the cache by; x, and the row that is read again for every edge, stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchweft.core.printing.dialect import indented
from torchweft.o3.channelwise.arithmetic import Arithmetic, value_name
from torchweft.o3.channelwise.gpu import lane_sums as across
from torchweft.o3.channelwise.gpu import prefetch as ahead
from torchweft.o3.channelwise.gpu import run_lines as beside
from torchweft.o3.channelwise.gpu.kernel_spec import Job, Spread
from torchweft.o3.channelwise.gpu.prefetch import Fetch
from torchweft.o3.channelwise.structure import Block

__all__ = ["name", "operands", "source"]


def operands(job: Job) -> tuple[int, ...]:
    """The tensors that its kernel reads, in the order of its first pointers."""
    return tuple(sorted({t for r in job.call.results for term in r.terms for t in term}))


def name(job: Job) -> str:
    """What its kernel is called, in profiles too: the slots of its results tell the order."""
    return "channelwise_product_" + "".join(result.slot for result in job.call.results)


def source(job: Job, asked: str = "") -> str:
    """The module text of a job's kernel; it may call `fetched`, as `asked` says.

    "edges": for rows of the next edges; "row": for the row of the owner's slot, before its edges.

    Its pointers are the tensors', the results', then those of the tables that the job has: indptr,
    owner, edges, index.  Then come numbers: of a divisible job, whose owner names the row of every
    edge, `begin` and `end`, the places that a launch takes, and `span`, those of a program; else
    `items` (rows, or tiles of rows), `rows` and `lanes` (programs for each block of channels).
    """
    return "\n".join(_Writer(job, asked).module()) + "\n"


class _Writer:
    """The lines of one kernel."""

    def __init__(self, job: Job, asked: str) -> None:
        self.job, self.tiling = job, job.tiling
        self.tensors = operands(job)
        self.number = "tl.float64" if job.wide else "tl.float32"
        self.flat = job.tiling.edges == 1
        self.halves = job.tiling.warps == job.tiling.edges and job.tiling.block >= across.LANES
        self.ragged = job.product.channels % job.tiling.block != 0
        self.shape = "(BLOCK,)" if self.flat else "(EDGES, BLOCK)"
        self.seen: set[str] = set()
        self.last: dict[tuple[int, int], int] = {}
        self.bodies: list[list[str]] = []
        self.reads: list[set[tuple[int, int]]] = []
        self._compute()
        self.asked, self.ahead = asked, tuple(self._ahead(asked))

    # the arithmetic, path by path

    def _compute(self) -> None:
        """The lines of each path, and which path is the last to add to a block of a result."""
        product, call = self.job.product, self.job.call
        arithmetic = Arithmetic(product, call, self._add)
        self.lines = arithmetic.lines
        for at, number in enumerate(self.job.paths):
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
        """Whether a result is summed over edges."""
        slot = self.job.call.results[result].slot
        return (slot == self.job.owner and self.job.segmented) or (slot == "w" and self.job.looped)

    def _components(self, result: int, block: int) -> list[str]:
        """The names of a block of a result that are computed."""
        size = self.job.product.blocks(self.job.call.results[result].slot)[block].components
        names = [f"r{result}_{block}_{c}" for c in range(size)]
        return [name for name in names if name in self.seen]

    # the module

    def module(self) -> Iterator[str]:
        yield "import triton"
        yield "import triton.language as tl"
        if self._together():
            yield "from torchweft.o3.channelwise.gpu.kernels import halved, of_threads, threads"
        yield ""
        yield ""
        yield f"@triton.jit(do_not_specialize={self._counts()!r})"
        yield f"def {name(self.job)}({', '.join(self._parameters())}):"
        yield from indented(self._body())

    def _parameters(self) -> list[str]:
        job = self.job
        tables = {
            "indptr": job.segmented,
            "owner": job.pieces or job.divisible or job.runs,
            "edges": job.ordered,
            "index": job.indexed,
        }
        pointers = [f"{job.call.slots[t]}{t}" for t in self.tensors]
        pointers += [f"out{r}" for r in range(len(job.call.results))]
        pointers += [name for name, there in tables.items() if there]
        blocks = ["BLOCK: tl.constexpr", "EDGES: tl.constexpr", "STAGES: tl.constexpr"]
        return [*(f"{name}_ptr" for name in pointers), *self._counts(), *blocks]

    def _counts(self) -> list[str]:
        return ["begin", "end", "span"] if self.job.divisible else ["items", "rows", "lanes"]

    def _body(self) -> Iterator[str]:
        blocks = self.job.channel_blocks
        yield "pid = tl.program_id(0)"
        yield f"lane = pid // {blocks}" if blocks > 1 else "lane = pid"
        lanes = "tl.arange(0, BLOCK)" if self.flat else "tl.arange(0, BLOCK)[None, :]"
        if blocks > 1:
            yield f"block = pid % {blocks}"
            yield f"u = block * BLOCK + {lanes}"
        else:
            yield f"u = {lanes}"
        if self.ragged:
            yield f"inside = u < {self.job.product.channels}"
        if self._together() or self.ahead:
            yield "thread = tl.arange(0, 32)" if self.flat else "thread = threads(EDGES)"
        if self._together():
            yield from across.NUMBERS
        if any(target.near for target in self.job.targets):
            yield "origin = tl.cast(begin, tl.int64)"
        yield from ahead.places(self.ahead)
        if self.job.divisible:
            yield from self._share()
            return
        if self.job.runs:
            yield from self._runs()
            return
        if not self.job.looped:
            yield "item = lane"
            yield from self._item()
            return
        yield from self._zeros("w")
        stages = "" if self.job.segmented else ", num_stages=STAGES"
        yield f"for item in tl.range(lane, items, lanes{stages}):"
        yield from indented(self._item())
        yield from self._store_carried("w", "lane")

    def _share(self) -> Iterator[str]:
        """Some places of the lists, row after row."""
        edge = "tl.load(edges_ptr + place)" if self.job.ordered else "place"
        yield "place = begin + tl.cast(lane, end.dtype) * span"
        yield "stop = tl.minimum(place + span, end)"
        yield "while place < stop:"
        yield f"    row = tl.cast(tl.load(owner_ptr + {edge}), tl.int64)"
        yield "    first = place"
        yield "    last = tl.minimum(tl.load(indptr_ptr + row + 1), stop).to(end.dtype)"
        yield from indented(self._edges())
        yield "    place = last"

    def _runs(self) -> Iterator[str]:
        """One run for each warp, edge after edge."""
        yield from beside.begun(self.tiling.edges)
        yield from self._zeros(self.job.owner)
        yield from self._places([t for t in self.tensors if self._owned(t)], "row")
        yield "for step in range(0, steps):"
        yield from indented(beside.stepped(self._next("of_threads(edge0)")))
        yield from indented(self._edge("p"))
        if self._kept():
            yield from self._store_carried(self.job.owner, "item")

    def _kept(self) -> bool:
        """Whether runs are stored after the loop, not at their last edge.

        One block, which all paths add to, keeps its registers to the end of an edge anyway.
        """
        return len({self.job.product.paths[p].x for p in self.job.paths}) == 1

    def _item(self) -> Iterator[str]:
        if self.job.segmented:
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
        number = "tl.load(owner_ptr + item)" if self.job.pieces else "item"
        yield f"row = tl.cast({number}, tl.int64)"
        yield from self._zeros(self.job.owner)
        yield from self._edges()
        yield from self._store_carried(self.job.owner, "item")

    def _edges(self) -> Iterator[str]:
        """The loop over edges of a row."""
        yield from self._places([t for t in self.tensors if self._owned(t)], "row")
        if self.asked == "row":
            yield from ahead.asked(self.ahead, "row")
        if self.flat:
            yield "for p in tl.range(first, last, num_stages=STAGES):"
            yield from indented([*self._next("p + 1"), *self._edge("p")])
        else:
            yield "for start in tl.range(first, last, EDGES, num_stages=STAGES):"
            yield "    p = start + tl.arange(0, EDGES)[:, None]"
            yield "    present = p < last"
            yield from indented([*self._next("of_threads(p) + EDGES"), *self._edge("p")])

    def _next(self, edge: str) -> Iterator[str]:
        """What is asked for of the next edges."""
        if self.asked == "edges" and self.ahead:
            edge = edge if self.job.runs else f"tl.minimum({edge}, last - 1)"
            yield f"ahead = tl.cast({edge}, tl.int64)"
            yield from ahead.asked(self.ahead, "ahead")

    def _zeros(self, slot: str) -> Iterator[str]:
        for (r, block), _ in sorted(self.last.items()):
            if self.job.call.results[r].slot == slot:
                for name in self._components(r, block):
                    yield f"{name} = tl.zeros({self.shape}, {self.number})"

    # an edge

    def _edge(self, at: str) -> Iterator[str]:
        if not self.job.runs:
            yield from self._numbers(at)
        yield from self._places([t for t in self.tensors if not self._owned(t)], "e")
        first = {key for reads in self.reads for key in reads if self._early(key[0])}
        for t, block in sorted(first):
            yield from self._load(t, block)
        read: set[tuple[int, int]] = set()
        for at_path, body in enumerate([[], *self.bodies]):
            if at_path < len(self.reads):  # those of the next path, before this one stores
                late = {key for key in self.reads[at_path] if self._late(key[0])} - read
                read |= late
                for t, block in sorted(late):
                    yield from self._load(t, block)
            yield from body
            yield from self._finished(at_path - 1)
        yield from self._store_together()

    def _ahead(self, asked: str) -> Iterator[Fetch]:
        """Lines of the row, or of y and w of an edge where warps walk edges in order of numbers.

        In float64 there are no registers left.
        """
        job, tiling = self.job, self.tiling
        served = job.segmented and not job.wide and not self.ragged
        in_order = job.runs or asked == "row" or not job.ordered
        served = served and in_order and tiling.warps == tiling.edges
        if not asked or not served:
            return
        for t in self.tensors:
            slot, width = job.call.slots[t], job.widths[t]
            of_edges = slot == "y" or (slot == "w" and not job.shared)
            if not (self._owned(t) if asked == "row" else of_edges):
                continue
            reached = sorted({block for reads in self.reads for n, block in reads if n == t})
            blocks = [job.product.blocks(slot)[block] for block in reached]
            columns = ahead.covered(blocks, tiling.block)
            own = blocks[0].channel_step == 1 and job.channel_blocks > 1
            yield from ahead.fetches(f"{slot}{t}_ptr", width, columns, own)

    def _numbers(self, at: str) -> Iterator[str]:
        """e, the edge, and other, its row of the slot that is not the owner's."""
        mask = "" if self.flat else ", mask=present, other=0"
        edge = f"tl.load(edges_ptr + {at}{mask})" if self.job.ordered else at
        yield f"e = tl.cast({edge}, tl.int64)"
        if self.job.indexed:
            yield f"other = tl.cast(tl.load(index_ptr + e{mask}), tl.int64)"

    def _owned(self, tensor: int) -> bool:
        """Whether a tensor's row is that of the program."""
        return self.job.segmented and self.job.call.slots[tensor] == self.job.owner

    def _early(self, tensor: int) -> bool:
        """Whether a tensor is loaded whole, before the first path: what comes from afar."""
        return not self._owned(tensor) and not self._late(tensor)

    def _late(self, tensor: int) -> bool:
        """Whether a tensor's blocks are loaded as paths need them: long rows, and what is near."""
        slot = self.job.call.slots[tensor]
        return self._owned(tensor) or slot == "z" or (slot == "w" and self.job.shared)

    def _places(self, tensors: Iterable[int], number: str) -> Iterator[str]:
        """The rows of tensors, and of what an edge stores."""
        job = self.job
        for t in tensors:
            slot = job.call.slots[t]
            if slot == "w" and job.shared:
                yield f"w{t}_row = w{t}_ptr"
                continue
            crossed = slot in "xz" and slot != job.owner and job.indexed
            place = f"{'other' if crossed else number} * {job.widths[t]}"
            yield f"{slot}{t}_row = {slot}{t}_ptr + {place}"

    def _load(self, t: int, block: int) -> Iterator[str]:
        slot = self.job.call.slots[t]
        place = self.job.product.blocks(slot)[block]
        masks = ["inside"] * (self.ragged and place.channel_step != 0)
        alone = self._owned(t) or (slot == "w" and self.job.shared)
        masks += ["present"] * (not self.flat and not alone)
        mask = f", mask={' & '.join(masks)}, other=0.0" if masks else ""
        for c in range(place.components):
            name = value_name(slot, t, block, c)
            address = _address(f"{slot}{t}_row", place, c)
            yield f"{name} = tl.load({address}{mask}{self._policy(t, place)}).to({self.number})"

    def _policy(self, t: int, place: Block) -> str:
        """What is read once passes a cache by: weights both, rows of other edges L1."""
        slot = self.job.call.slots[t]
        if slot == "w" and not self.job.shared:
            return ", eviction_policy='evict_first'"
        far = slot in "xz" and not self._owned(t) and place.channel_step == 1
        far = far and not self.job.runs  # whose warps read the same rows
        return ", cache_modifier='.cg'" if far and self.tiling.stages == 1 else ""

    # results

    def _finished(self, at: int) -> Iterator[str]:
        """Stores of what no later path of the edge adds to."""
        together = self._together()
        for (r, block), last in sorted(self.last.items()):
            if last == at and not self._carried(r) and (r, block) not in together:
                yield from self._store(r, block, "e", ["present"] * (not self.flat))
            elif last == at and self._carried(r) and self.job.runs and not self._kept():
                yield from self._store(r, block, "tl.cast(item, tl.int64)", ["(p == last - 1)"])

    def _together(self) -> list[tuple[int, int]]:
        """The blocks of results of an edge that are summed over channels by halves."""
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
            target = self.job.targets[r]
            place = target.blocks[block]
            assert isinstance(place, Block)
            edge = "e" if self.flat else "of_threads(e)"
            yield from self._target_row(f"out{r}_row", r, edge, shared=True)
            for name in self._components(r, block):
                column = place.offset + _component(name) * place.step
                values.append(across.Value(name, f"out{r}_row", column))
        yield from across.summed(values, self.tiling.block, self.flat)

    def _store_carried(self, slot: str, number: str) -> Iterator[str]:
        """Stores of what is summed over edges."""
        for r, block in sorted(self.last):
            if self.job.call.results[r].slot == slot:
                yield from self._store(r, block, f"tl.cast({number}, tl.int64)", [])

    def _store(self, r: int, block: int, number: str, masks: list[str]) -> Iterator[str]:
        place, shared = self.job.targets[r].blocks[block], self._shared(r, block)
        assert place is not None
        masks = masks + ["inside"] * (self.ragged and not shared)
        mask = f", mask={' & '.join(masks)}" if masks else ""
        policy = "" if self._carried(r) else ", cache_modifier='.cs'"
        yield from self._target_row("at", r, number, shared)
        for name in self._components(r, block):
            value = self._summed(name, self._carried(r) and not self.job.runs, shared)
            yield f"tl.store({_address('at', place, _component(name))}, {value}{mask}{policy})"

    def _target_row(self, name: str, r: int, number: str, shared: bool) -> Iterator[str]:
        target = self.job.targets[r]
        number = f"({number} - origin)" if target.near else number
        yield f"{name} = out{r}_ptr + {number} * {target.width}"
        if shared and self.job.channel_blocks > 1:
            yield f"{name} = {name} + block * {target.part}"

    def _shared(self, r: int, block: int) -> bool:
        """Whether all channels add to a block of a result."""
        slot = self.job.call.results[r].slot
        return self.job.product.blocks(slot)[block].channel_step == 0

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


def _address(pointer: str, place: Block | Spread, component: int) -> str:
    if isinstance(place, Spread):
        return f"{pointer} + {place.begins[component]} + u"
    offset = place.offset + component * place.step
    lanes = "" if place.channel_step == 0 else " + u"
    lanes += f" * {place.channel_step}" if place.channel_step > 1 else ""
    return f"{pointer}{f' + {offset}' if offset else ''}{lanes}"
