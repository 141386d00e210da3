"""How a call is divided into kernels, and where each of them puts its results.

A kernel is one product (number of channels), one group of its blocks of z, and one order of the
edges: by the row of z, or by that of x.  What several kernels or programs add to is stored in parts
side by side, and folded: no result is read to be written.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from torchweft.o3.channelwise.calls import Call
from torchweft.o3.channelwise.gpu import tilings
from torchweft.o3.channelwise.gpu.borrowed_columns import lend
from torchweft.o3.channelwise.gpu.kernel_spec import Job, Spread, Target, Tiling
from torchweft.o3.channelwise.gpu.tilings import WARP
from torchweft.o3.channelwise.structure import Block, Structure

__all__ = ["Division", "Facts", "Loan", "Output", "divide"]


class Facts(NamedTuple):
    """What kernels must know of tables and tensors.

    Args:
        indexed: slots, of x and z, whose rows edges name by tables.
        ordered: those by which edges are sorted into another order than that of their numbers.
        pieces: those whose long rows are cut.
        shared: whether w has one row.
        wide: whether numbers are float64.
        runs: whether there are runs of edges.
        lends: whether what kernels store of edges may lie in the gradient of weights.
    """

    indexed: str
    ordered: str
    pieces: str
    shared: bool
    wide: bool
    runs: bool = False
    lends: bool = False


class Loan(NamedTuple):
    """Parts of edges in columns that later kernels write, or in memory of their own.

    Args:
        number: the result that they add to.
        jobs: how many kernels have run when they are there.
        host: the gradient of weights that they lie in; None: memory of their own.
        width: numbers in a row of it.
        columns: those of the result that they add to.
        places: where in a row each of them lies.
    """

    number: int
    jobs: int
    host: int | None
    width: int
    columns: tuple[int, ...]
    places: tuple[int, ...]


class Output(NamedTuple):
    """Where a result is stored before it is done.

    Args:
        rows: "final", or what its parts are rows of: "edges" of x or z, "pieces", "runs", "lanes";
            "lent": there are loans.
        width: numbers in a row of parts.
        places: (count, width of the result) which parts add to each column, None: the same column.
        covered: whether every column is written where rows are final and places are None.
    """

    rows: str
    width: int
    places: tuple[tuple[int, ...], ...] | None
    covered: bool

    @property
    def direct(self) -> bool:
        """Whether kernels write the result itself."""
        return self.rows == "final" and self.places is None


class Division(NamedTuple):
    """The kernels of a call.

    Args:
        jobs: each with the numbers of its results in the call.
        outputs: of each result of the call; None: it is zero.
        near: results whose parts are those of one round of edges.
        host: the gradient of weights that has room for them; None: edges are taken at once.
        loans: parts of edges that lie in columns of it which later kernels write.
    """

    jobs: tuple[tuple[Job, tuple[int, ...]], ...]
    outputs: tuple[Output | None, ...]
    near: tuple[int, ...]
    host: int | None
    loans: tuple[Loan, ...] = ()


class _Draft(NamedTuple):
    """A kernel whose results have no place yet."""

    job: Job
    numbers: tuple[int, ...]

    def blocks(self, number: int) -> Iterator[tuple[int, Block]]:
        """The blocks of a result that it adds to."""
        if number not in self.numbers:
            return iter(())
        slot = self.job.call.results[self.numbers.index(number)].slot
        reached = sorted({getattr(self.job.product.paths[p], slot) for p in self.job.paths})
        return ((k, self.job.product.blocks(slot)[k]) for k in reached)

    def parts(self, number: int) -> Iterator[list[int]]:
        """The columns of every component that it adds to, in the order of `blocks`."""
        channels = self.job.product.channels
        for _, block in self.blocks(number):
            columns = list(_columns(block, channels))
            each = len(columns) // block.components
            yield from (columns[c : c + each] for c in range(0, len(columns), each))


@functools.lru_cache(maxsize=1024)
def divide(structure: Structure, call: Call, facts: Facts) -> Division:
    """The kernels of a call."""
    drafts = list(_drafts(structure, call, facts))
    outputs: list[Output | None] = []
    targets: dict[tuple[int, int], Target] = {}
    for number, result in enumerate(call.results):
        mine = [(i, draft) for i, draft in enumerate(drafts) if number in draft.numbers]
        if not mine:
            outputs.append(None)
            continue
        rows = _rows(result.slot, mine[0][1].job, facts)
        output, found = _placed(number, structure.width(result.slot), rows, mine)
        outputs.append(output)
        targets |= {(i, number): target for i, target in found.items()}
    lending = _lending(call, drafts, outputs) if facts.lends else None
    near, host = _in_rounds(call, drafts, outputs) if lending is None else ((), None)
    targets |= {key: t._replace(near=True) for key, t in targets.items() if key[1] in near}
    order, loans, lent = lending or _Lending(tuple(range(len(drafts))), (), {})
    for loan in loans:
        outputs[loan.number] = Output("lent", loan.width, None, True)
    jobs = []
    for i in order:
        job, numbers = drafts[i]
        stored = tuple((targets | lent)[i, n] for n in numbers)
        jobs.append((job._replace(targets=stored), numbers))
    return Division(tuple(jobs), tuple(outputs), near, host, loans)


def _in_rounds(
    call: Call, drafts: list[_Draft], outputs: list[Output | None]
) -> tuple[tuple[int, ...], int | None]:
    """The results whose parts are those of a round, and the gradient that has room for them."""
    there = [(n, output) for n, output in enumerate(outputs) if output is not None]
    near = tuple(n for n, output in there if output.rows == "edges" and output.places is None)
    whole = (n for n, output in there if output.direct and output.covered)
    host = next((n for n in whole if call.results[n].slot == "w"), None)
    if host is None or not near or not all(draft.job.in_turn for draft in drafts):
        return (), None
    return near, host


class _Lending(NamedTuple):
    """The order of kernels, their loans, and where each then stores its parts of a result."""

    order: tuple[int, ...]
    loans: tuple[Loan, ...]
    targets: dict[tuple[int, int], Target]


def _lending(call: Call, drafts: list[_Draft], outputs: list[Output | None]) -> _Lending | None:
    """Loans of all results that wait in parts of edges; None: no kernel finds room."""
    whole = {n: o for n, o in enumerate(outputs) if o and o.places is None and o.covered}
    borrowers = [n for n, output in whole.items() if output.rows == "edges"]
    hosts = [n for n, o in whole.items() if o.rows == "final" and call.results[n].slot == "w"]
    blocks = [b for n in borrowers for draft in drafts for _, b in draft.blocks(n)]
    if not hosts or not borrowers or not all(block.channel_step for block in blocks):
        return None
    sizes = [
        [draft.job.product.channels for n in borrowers for _ in draft.parts(n)] for draft in drafts
    ]
    rooms = lend(sizes, [itertools.chain(*draft.parts(hosts[0])) for draft in drafts])
    if not any(room.lent for room in rooms):
        return None
    own = sum(sum(sizes[room.kernel]) for room in rooms if not room.lent)
    loans, targets = list[Loan](), dict[tuple[int, int], Target]()
    for jobs, (i, begins, lent) in enumerate(rooms, 1):
        draft, left = drafts[i], iter(begins)
        host, width = (hosts[0], whole[hosts[0]].width) if lent else (None, own)
        for n in borrowers:
            spread = {
                k: Spread(tuple(itertools.islice(left, block.components)))
                for k, block in draft.blocks(n)
            }
            if spread:
                targets[i, n] = _target(width, spread, draft.job, n, draft)
                columns = tuple(itertools.chain(*draft.parts(n)))
                channels = range(draft.job.product.channels)
                places = (b + u for s in spread.values() for b in s.begins for u in channels)
                loans.append(Loan(n, jobs, host, width, columns, tuple(places)))
    return _Lending(tuple(room.kernel for room in rooms), tuple(loans), targets)


def _drafts(structure: Structure, call: Call, facts: Facts) -> Iterator[_Draft]:
    for owner, numbers, runs in _owners(structure, call, facts):
        part = Call(call.slots, tuple(call.results[n] for n in numbers))
        widths = tuple(structure.width(slot) for slot in call.slots)
        other = "x" if owner == "z" else "z"
        for product in structure.products:
            if not product.channels:
                continue
            for paths in tilings.groups(product, part, owner, facts.wide):
                job = Job(
                    product,
                    paths,
                    part,
                    (),
                    owner,
                    widths,
                    owner in facts.indexed,
                    owner in facts.pieces,
                    owner in facts.ordered or runs,
                    other in facts.indexed,
                    facts.shared,
                    facts.wide,
                    runs,
                    Tiling(1),
                )
                job = job._replace(pieces=job.pieces and not (job.divisible or runs))
                yield _Draft(job._replace(tiling=tilings.choose(job)), numbers)


def _owners(
    structure: Structure, call: Call, facts: Facts
) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """The order of edges in which each result is computed, and whether in runs."""
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


def _in_runs(structure: Structure, call: Call, facts: Facts) -> bool:
    """Whether warps can take runs: only x is summed over edges, and all threads have channels.

    In float64 there are no registers left, and beside long weights x takes little of the time.
    """
    wide = facts.wide or 2 * structure.width("x") < structure.width("w")
    sums = any(r.slot == "z" for r in call.results if r.terms) or facts.shared
    whole = all(product.channels % WARP == 0 for product in structure.products)
    return facts.runs and whole and not (sums or wide)


GRADIENT_OF_X = "fewer bytes"
""""fewer bytes", "by source" or "by scratch": how results of x are computed on a graph.

By source: a kernel of their own takes the edges by their row of x and reads rows of z and w again.
By scratch: the kernel that takes the edges by their row of z stores a row for each, summed by x.
"""


def _by_source(structure: Structure, call: Call, beside: bool, facts: Facts) -> bool:
    if GRADIENT_OF_X != "fewer bytes":
        return GRADIENT_OF_X == "by source"
    results = [r for r in call.results if r.slot == "x" and r.terms]
    used = {t for r in results for term in r.terms for t in term}
    again = [t for t in used if call.slots[t] == "z"]
    again += [t for t in used if call.slots[t] == "w" and beside and not facts.shared]
    return sum(structure.width(call.slots[t]) for t in again) < 2 * len(results) * structure.width(
        "x"
    )


def _rows(slot: str, job: Job, facts: Facts) -> str:
    """What a result's parts are rows of."""
    if slot == job.owner and job.runs:
        return "runs"
    if slot == job.owner:
        return "pieces" if job.pieces else "final"
    if slot == "w":
        return "lanes" if facts.shared else "final"
    return "edges" if slot in "xz" and job.indexed else "final"


def _placed(
    number: int, width: int, rows: str, drafts: list[tuple[int, _Draft]]
) -> tuple[Output, dict[int, Target]]:
    """Where a result is stored, and the target of each kernel."""
    parts = [(i, k, block, draft.job) for i, draft in drafts for k, block in draft.blocks(number)]
    reached = [c for *_, block, job in parts for c in _columns(block, job.product.channels)]
    whole = all(block.channel_step or job.channel_blocks == 1 for *_, block, job in parts)
    covered = len(set(reached)) == width
    if whole and len(set(reached)) == len(reached) and (covered or rows == "final"):
        same = {i: {k: b for j, k, b, _ in parts if j == i} for i, _ in drafts}
        found = {i: _target(width, same[i], draft.job, number, draft) for i, draft in drafts}
        return Output(rows, width, None, covered), found
    return _apart(number, width, rows, drafts)


def _apart(
    number: int, width: int, rows: str, drafts: list[tuple[int, _Draft]]
) -> tuple[Output, dict[int, Target]]:
    """Parts side by side, and the columns that each column of the result is the sum of."""
    places: list[list[int]] = [[] for _ in range(width)]
    found: dict[int, Target] = {}
    begin = 0
    for i, draft in drafts:
        channels, blocks = draft.job.product.channels, dict[int, Block]()
        mine = list(draft.blocks(number))
        shared = [(k, block) for k, block in mine if not block.channel_step]
        part = sum(block.components for _, block in shared)
        for k, block in shared:
            blocks[k] = Block(begin, block.degree, 1, 0)
            for c in range(block.components):
                columns = range(begin + c, begin + c + part * draft.job.channel_blocks, part)
                places[block.offset + c * block.step] += columns
            begin += block.components
        begin += part * (draft.job.channel_blocks - 1)
        for k, block in mine:
            if block.channel_step:
                blocks[k] = Block(begin, block.degree, channels, 1)
                for at, column in enumerate(_columns(block, channels)):
                    places[column].append(begin + at)
                begin += channels * block.components
        found[i] = _target(0, blocks, draft.job, number, draft, part)
    found = {i: target._replace(width=begin) for i, target in found.items()}
    count = max(map(len, places))
    table = tuple(tuple(p[k] if k < len(p) else -1 for p in places) for k in range(count))
    return Output(rows, begin, table, False), found


def _target(
    width: int,
    blocks: Mapping[int, Block | Spread],
    job: Job,
    number: int,
    draft: _Draft,
    part: int = 0,
) -> Target:
    slot = job.call.results[draft.numbers.index(number)].slot
    return Target(width, tuple(map(blocks.get, range(len(job.product.blocks(slot))))), part)


def _columns(block: Block, channels: int) -> Iterable[int]:
    """The place of every channel of every component; of what channels share, of every component."""
    for c in range(block.components):
        for u in range(channels if block.channel_step else 1):
            yield block.offset + c * block.step + u * block.channel_step
