"""Split of a call into kernels, and where each stores its results.

A kernel computes one product (number of channels), one group of its blocks of z, in one order of
the edges: by row of z, or by row of x.  What several kernels or programs add to is stored in parts
side by side and added up after: no kernel reads a result in order to write it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torchweft.o3.channelwise.calls import Call
from torchweft.o3.channelwise.gpu.kernel_spec import (
    WARP,
    ResultTarget,
    RowKernelSpec,
    RowTiling,
    ScatteredBlock,
    choose_tiling,
    path_groups,
)
from torchweft.o3.channelwise.structure import Block, Structure

__all__ = [
    "ColumnLoan",
    "ColumnRoom",
    "GraphFacts",
    "KernelSplit",
    "ResultStorage",
    "lend_columns",
    "split_call",
]


class GraphFacts(NamedTuple):
    """What kernels depend on of tables and tensors."""

    indexed: str  # slots, of x and z, whose row each edge reads from a table
    ordered: str  # slots whose lists hold edge numbers, since edges are not sorted by them
    pieces: str  # slots whose long rows are cut
    shared: bool  # whether w has one row
    wide: bool  # whether numbers are float64
    runs: bool = False  # whether there are runs of edges
    lends: bool = False  # whether partial sums of edges may lie in the gradient of weights


class ColumnLoan(NamedTuple):
    """Partial sums of edges in columns that later kernels write, or in scratch memory."""

    result: int  # the result that they add to
    host: int | None  # the gradient of weights that they lie in; None: scratch memory
    width: int  # numbers in a row of the host
    columns: tuple[int, ...]  # columns of the result that they add to
    places: tuple[int, ...]  # their columns in the host


class ResultStorage(NamedTuple):
    """Where a result is stored before it is complete.

    Rows are "final", or those of "edges" of x or z, "pieces", "runs" or "lanes"; "lent": in loans.
    places (count, width of the result) are the parts that add to each column, None: the same one.
    """

    rows: str
    width: int  # numbers in a row of parts
    places: tuple[tuple[int, ...], ...] | None
    covered: bool  # whether every column is written where rows are final and places are None

    @property
    def direct(self) -> bool:
        """Whether kernels write the result itself."""
        return self.rows == "final" and self.places is None


class KernelSplit(NamedTuple):
    """The kernels of a call.

    Args:
        kernels: each with the numbers of its results in the call, and its loan.
        outputs: storage of each result of the call; None: the result is zero.
    """

    kernels: tuple[tuple[RowKernelSpec, tuple[int, ...], ColumnLoan | None], ...]
    outputs: tuple[ResultStorage | None, ...]


class _Draft(NamedTuple):
    """A kernel whose results have no place yet."""

    spec: RowKernelSpec
    numbers: tuple[int, ...]

    def blocks(self, number: int) -> list[tuple[int, Block]]:
        """The blocks of a result that it adds to."""
        if number not in self.numbers:
            return []
        product, slot = self.spec.product, self.slot(number)
        reached = sorted({getattr(product.paths[p], slot) for p in self.spec.paths})
        return [(k, product.blocks(slot)[k]) for k in reached]

    def slot(self, number: int) -> str:
        """The slot of a result."""
        return self.spec.call.results[self.numbers.index(number)].slot

    def components(self, number: int) -> Iterator[list[int]]:
        """The columns of every component that it adds to, in the order of `blocks`."""
        for _, block in self.blocks(number):
            columns = _columns(block, self.spec.product.channels)
            each = len(columns) // block.components
            yield from (columns[c : c + each] for c in range(0, len(columns), each))

    def target(
        self, number: int, width: int, blocks: Mapping[int, Block | ScatteredBlock], part: int = 0
    ) -> ResultTarget:
        """The target of a result whose blocks lie here."""
        count = len(self.spec.product.blocks(self.slot(number)))
        return ResultTarget(width, tuple(map(blocks.get, range(count))), part)


_Targets = dict[tuple[int, int], ResultTarget]
"""Targets by number of the draft and of the result."""


@functools.lru_cache(maxsize=1024)
def split_call(structure: Structure, call: Call, facts: GraphFacts) -> KernelSplit:
    """The kernels of a call."""
    drafts = list(_drafts(structure, call, facts))
    outputs: list[ResultStorage | None] = []
    targets: _Targets = {}
    for number, result in enumerate(call.results):
        mine = {i: draft for i, draft in enumerate(drafts) if number in draft.numbers}
        if not mine:
            outputs.append(None)
            continue
        rows = _stored_rows(result.slot, next(iter(mine.values())).spec, facts)
        output, found = _placed(number, structure.width(result.slot), rows, mine)
        outputs.append(output)
        targets |= found
    order: list[tuple[int, ColumnLoan | None]] = [(i, None) for i in range(len(drafts))]
    if facts.lends:
        order = _lend(call, drafts, outputs, targets) or order
    kernels = []
    for i, loan in order:
        spec, numbers = drafts[i]
        stored = tuple(targets[i, n] for n in numbers)
        kernels.append((spec._replace(targets=stored), numbers, loan))
    return KernelSplit(tuple(kernels), tuple(outputs))


def _drafts(structure: Structure, call: Call, facts: GraphFacts) -> Iterator[_Draft]:
    widths = tuple(structure.width(slot) for slot in call.slots)
    for owner, numbers, runs in _owners(structure, call, facts):
        part = Call(call.slots, tuple(call.results[n] for n in numbers))
        for product in structure.products:
            if not product.channels:
                continue
            for paths in path_groups(product, part, owner, facts.wide):
                spec = RowKernelSpec(
                    product,
                    paths,
                    part,
                    targets=(),
                    owner=owner,
                    widths=widths,
                    segmented=owner in facts.indexed,
                    pieces=False,
                    ordered=owner in facts.ordered or runs,
                    indexed=("x" if owner == "z" else "z") in facts.indexed,
                    shared=facts.shared,
                    wide=facts.wide,
                    runs=runs,
                    tiling=RowTiling(1),
                )
                pieces = owner in facts.pieces and not (spec.divisible or runs)
                spec = spec._replace(pieces=pieces)
                yield _Draft(spec._replace(tiling=choose_tiling(spec)), numbers)


def _owners(
    structure: Structure, call: Call, facts: GraphFacts
) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """The slot by whose rows each result is computed, and whether in runs."""
    there = [n for n, result in enumerate(call.results) if result.terms]
    of_x = [n for n in there if call.results[n].slot == "x"]
    rest = [n for n in there if n not in of_x]
    if of_x and "x" in facts.indexed and _by_source(structure, call, bool(rest), facts):
        yield "x", tuple(of_x), False
    elif of_x and _in_runs(structure, call, facts):
        yield "x", tuple(there), True
        return
    else:
        rest = there
    if rest:
        yield "z", tuple(rest), False


def _in_runs(structure: Structure, call: Call, facts: GraphFacts) -> bool:
    """Whether warps can take runs: only x is summed over edges, and all threads have channels.

    In float64 there are no registers left, and with long weights x takes little of the time.
    """
    wide = facts.wide or 2 * structure.width("x") < structure.width("w")
    sums = any(r.slot == "z" for r in call.results if r.terms) or facts.shared
    whole = all(product.channels % WARP == 0 for product in structure.products)
    return facts.runs and whole and not (sums or wide)


def _by_source(structure: Structure, call: Call, with_others: bool, facts: GraphFacts) -> bool:
    """Whether results of x have a kernel of their own, which then moves fewer bytes.

    That kernel takes edges by row of x and reads rows of z and w again.  Otherwise the kernel that
    takes edges by row of z stores a row of x for each edge, and these rows are added up.
    """
    results = [result for result in call.results if result.slot == "x" and result.terms]
    used = {t for result in results for term in result.terms for t in term}
    again = [t for t in used if call.slots[t] == "z"]
    again += [t for t in used if call.slots[t] == "w" and with_others and not facts.shared]
    read = sum(structure.width(call.slots[t]) for t in again)
    return read < 2 * len(results) * structure.width("x")


def _stored_rows(slot: str, spec: RowKernelSpec, facts: GraphFacts) -> str:
    """What the stored rows of a result are rows of."""
    if slot == spec.owner and spec.runs:
        return "runs"
    if slot == spec.owner:
        return "pieces" if spec.pieces else "final"
    if slot == "w":
        return "lanes" if facts.shared else "final"
    return "edges" if slot in "xz" and spec.indexed else "final"


def _placed(
    number: int, width: int, rows: str, drafts: Mapping[int, _Draft]
) -> tuple[ResultStorage, _Targets]:
    """Where a result is stored, and the target of each kernel."""
    own = {i: draft.blocks(number) for i, draft in drafts.items()}
    reached = [c for i in own for columns in drafts[i].components(number) for c in columns]
    whole = all(
        block.channel_step or drafts[i].spec.channel_blocks == 1
        for i, blocks in own.items()
        for _, block in blocks
    )
    covered = len(set(reached)) == width
    if whole and len(set(reached)) == len(reached) and (covered or rows == "final"):
        found = {(i, number): d.target(number, width, dict(own[i])) for i, d in drafts.items()}
        return ResultStorage(rows, width, None, covered), found
    return _side_by_side(number, width, rows, drafts)


def _side_by_side(
    number: int, width: int, rows: str, drafts: Mapping[int, _Draft]
) -> tuple[ResultStorage, _Targets]:
    """Parts side by side, and the columns that each column of the result is the sum of."""
    places: list[list[int]] = [[] for _ in range(width)]
    found: _Targets = {}
    begin = 0
    for i, draft in drafts.items():
        channels, blocks = draft.spec.product.channels, dict[int, Block]()
        mine = draft.blocks(number)
        shared = [(k, block) for k, block in mine if not block.channel_step]
        part = sum(block.components for _, block in shared)
        for k, block in shared:
            blocks[k] = Block(begin, block.degree, 1, 0)
            for c in range(block.components):
                columns = range(begin + c, begin + c + part * draft.spec.channel_blocks, part)
                places[block.offset + c * block.step] += columns
            begin += block.components
        begin += part * (draft.spec.channel_blocks - 1)
        for k, block in mine:
            if block.channel_step:
                blocks[k] = Block(begin, block.degree, channels, 1)
                for at, column in enumerate(_columns(block, channels)):
                    places[column].append(begin + at)
                begin += channels * block.components
        found[i, number] = draft.target(number, 0, blocks, part)
    found = {key: target._replace(width=begin) for key, target in found.items()}
    table = tuple(itertools.zip_longest(*places, fillvalue=-1))
    return ResultStorage(rows, begin, table, False), found


def _columns(block: Block, channels: int) -> list[int]:
    """The column of every channel of every component; of shared components, one each."""
    return [
        block.offset + c * block.step + u * block.channel_step
        for c in range(block.components)
        for u in range(channels if block.channel_step else 1)
    ]


# loans
#
# A row of x for each edge waits in memory until it is added up.  Where several kernels share the
# paths, each writes columns of its own in the gradient of weights: until the last kernel has run,
# some of them are free and hold such rows.


class ColumnRoom(NamedTuple):
    """Where the parts of a kernel lie."""

    kernel: int  # its number
    begins: tuple[int, ...]  # first column of each part
    lent: bool  # whether they are columns of the gradient of weights, not of scratch memory


def lend_columns(
    wanted: Sequence[Sequence[int]], given: Sequence[Iterable[int]]
) -> list[ColumnRoom]:
    """The rooms of kernels in the order in which they run, those in scratch memory last.

    Args:
        wanted: for each kernel, the number of adjacent columns of each of its parts.
        given: for each, the columns that it writes.
    """
    columns = [frozenset(own) for own in given]
    left = list(range(len(wanted)))
    found: list[ColumnRoom] = []
    while left:
        rooms = []
        for n in left:
            begins = _fitted(wanted[n], (c for k in left if k != n for c in columns[k]))
            rooms += [] if begins is None else [ColumnRoom(n, begins, True)]
        if not rooms:
            break
        found.append(max(rooms, key=lambda room: sum(wanted[room.kernel])))
        left.remove(found[-1].kernel)
    end = 0
    for n in left:
        *starts, end = itertools.accumulate(wanted[n], initial=end)
        found.append(ColumnRoom(n, tuple(starts), False))
    return found


def _fitted(sizes: Iterable[int], free: Iterable[int]) -> tuple[int, ...] | None:
    """Where parts begin in free columns; None: they do not all fit."""
    rooms = []
    for _, same in itertools.groupby(enumerate(sorted(free)), lambda item: item[1] - item[0]):
        run = [column for _, column in same]
        rooms.append((run[0], run[-1] + 1))
    begins = []
    for size in sizes:
        at = next((i for i, (begin, end) in enumerate(rooms) if end - begin >= size), None)
        if at is None:
            return None
        begin, end = rooms[at]
        begins.append(begin)
        rooms[at] = begin + size, end
    return tuple(begins)


def _lend(
    call: Call, drafts: Sequence[_Draft], outputs: list[ResultStorage | None], targets: _Targets
) -> list[tuple[int, ColumnLoan | None]]:
    """The kernels in the order in which they run, each with its loan; none where none fits.

    The storage and the targets of the borrowed result are changed accordingly.
    """
    whole = {n: o for n, o in enumerate(outputs) if o and o.places is None and o.covered}
    hosts = [n for n, o in whole.items() if o.rows == "final" and call.results[n].slot == "w"]
    borrowers = [n for n, output in whole.items() if output.rows == "edges"]
    if not hosts or len(borrowers) != 1:
        return []
    (n,), host = borrowers, hosts[0]
    if not all(block.channel_step for draft in drafts for _, block in draft.blocks(n)):
        return []
    sizes = [[len(columns) for columns in draft.components(n)] for draft in drafts]
    rooms = lend_columns(sizes, [itertools.chain(*d.components(host)) for d in drafts])
    if not any(room.lent for room in rooms):
        return []
    own = sum(sum(sizes[room.kernel]) for room in rooms if not room.lent)
    found: list[tuple[int, ColumnLoan | None]] = []
    for i, begins, lent in rooms:
        draft, left = drafts[i], iter(begins)
        width = whole[host].width if lent else own
        blocks = {
            k: ScatteredBlock(tuple(itertools.islice(left, block.components)))
            for k, block in draft.blocks(n)
        }
        targets[i, n] = draft.target(n, width, blocks)
        columns = tuple(itertools.chain(*draft.components(n)))
        places = tuple(b + u for b in begins for u in range(draft.spec.product.channels))
        found.append((i, ColumnLoan(n, host if lent else None, width, columns, places)))
    outputs[n] = ResultStorage("lent", own, None, True)
    return found
