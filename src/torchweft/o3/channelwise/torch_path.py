"""Calls in plain torch: available on every device, over chunks of edges.

    result[row(e)] += Σ_terms Σ_paths Σ_abm C[a,b,m] …   with the result's slot left open

Where all channels of a product share one factor, all its paths are computed at once, by a few large
matrix products (`_PackedProduct`):

    M[a,f] = Σ_b K[b,a,f] y_b       for each edge; f: component m of a path p; a, b: of all blocks
    z_m = Σ_f w_p Σ_a M[a,f] x_a    x_a = Σ_f M[a,f] w_p z_m
    w_p = Σ_f z_m Σ_a M[a,f] x_a    y_b = Σ_af K[b,a,f] Σ_u w_p z_m x_a

K is zero where a path does not meet a block.  Without weights, f is a component of z itself.  Where
all channels share x, x and y are exchanged.  Other products are computed path by path; on the CPU
also those of numbers that are not finite, which then affect their own paths only.

Messages of a chunk are added row by row, in the order of the edges and without atomics: results
repeat bit for bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.explain import Launch, record, recording
from torchweft.o3.channelwise.calls import Call, Result, Term
from torchweft.o3.channelwise.structure import (
    SLOTS,
    Block,
    Path,
    Product,
    Structure,
    block_view,
    stores,
)
from torchweft.o3.graph import Tables
from torchweft.o3.irreps.wigner import wigner_3j

__all__ = ["run"]

CHUNK_BYTES = {"cpu": 2**23, "cuda": 2**26}
"""Size of the widest rows of a chunk."""

MAX_PACKED_OPERATIONS = 16
"""Operations of a packed product for each of a product path by path."""


class _Given(NamedTuple):
    """The arguments of a call."""

    structure: Structure
    plans: tuple[_PackedPlan | None, ...]  # one for each product
    tensors: Sequence[Tensor]
    wide: torch.dtype  # of sums
    tables: Tables
    shared: bool


def run(
    structure: Structure, call: Call, tensors: Sequence[Tensor], tables: Tables, shared: bool
) -> list[Tensor]:
    """The results of a call, see `operator.Run`."""
    wide = _accumulator(tensors[0])
    plans = _plans(structure, wide, tensors[0].device)
    several = any(len(product.paths) > 1 for product in structure.products)
    if several and not _finite(tensors, wide):  # times 0 it would affect every path of an edge
        plans = (None,) * len(plans)
    given = _Given(structure, plans, tensors, wide, tables, shared)
    width = max(*structure.widths, *(plan.table.shape[1] for plan in plans if plan))
    room = CHUNK_BYTES.get(tensors[0].device.type, CHUNK_BYTES["cpu"])
    step = max(1, room // (width * wide.itemsize))
    # few edges form one chunk for all results, which share intermediate values
    every = _Edges(given, None, 0, tables.num_edges) if tables.num_edges <= step else None
    return [_result(given, result, every, step) for result in call.results]


def _result(given: _Given, result: Result, every: _Edges | None, step: int) -> Tensor:
    slot, tables, like = result.slot, given.tables, given.tensors[0]
    rows = {"x": tables.num_x, "z": tables.num_z, "w": 1 if given.shared else tables.num_edges}
    shape = (rows.get(slot, tables.num_edges), given.structure.width(slot))
    if not result.terms or not tables.num_edges or 0 in shape:
        return like.new_zeros(shape)
    edges, indptr = {
        "x": (tables.x_edges, tables.x_indptr),
        "z": (tables.z_edges, tables.z_indptr),
    }.get(slot, (None, None))
    chunks = 1
    if every is not None:
        out = every.messages(result)
        if indptr is not None:
            out = _segments(out if edges is None else out.index_select(0, edges), indptr)
    else:
        out = like.new_zeros(shape, dtype=given.wide)
        chunks = _add_chunks(out, given, result, edges, indptr, step)
    if recording():
        size = min(step, tables.num_edges)
        room = size * max(given.structure.widths) * out.element_size()
        record(Launch("torch", f"contract_{slot}", {"edges": size}, chunks, room))
    return out.to(like.dtype)


@functools.lru_cache(maxsize=1024)
def _plans(
    structure: Structure, dtype: torch.dtype, device: torch.device
) -> tuple[_PackedPlan | None, ...]:
    return tuple(_packed_plan(product, dtype, device) for product in structure.products)


def _accumulator(like: Tensor) -> torch.dtype:
    """The dtype of sums: float32, or float64 where torch would round the factors of a product."""
    backends: Any = torch.backends
    matmul = backends.cuda.matmul if like.is_cuda else backends.mkldnn.matmul
    rounds = matmul.fp32_precision not in ("none", "ieee")
    return torch.float64 if rounds else torch.promote_types(like.dtype, torch.float32)


def _finite(tensors: Sequence[Tensor], wide: torch.dtype) -> bool:
    """Whether all numbers are finite; on a GPU True, since the host would have to wait."""
    return all(t.is_cuda or math.isfinite(t.sum(dtype=wide).item()) for t in tensors)


def _add_chunks(
    out: Tensor,
    given: _Given,
    result: Result,
    edges: Tensor | None,
    indptr: Tensor | None,
    step: int,
) -> int:
    """Add the messages of all edges to their rows, chunk by chunk; the number of chunks."""
    count = given.tables.num_edges
    begins = range(0, count, step)
    ends = [*begins[1:], count]
    rows = zip(begins, ends, strict=True)
    if indptr is not None:
        marks = torch.tensor([*begins, count], dtype=indptr.dtype, device=out.device)
        firsts = (torch.searchsorted(indptr, marks, right=True) - 1).tolist()
        lasts = torch.searchsorted(indptr, marks).tolist()
        rows = zip(firsts[:-1], lasts[1:], strict=True)
    one = out.shape[0] < count  # without indptr: one row for all edges
    for begin, end, (first, last) in zip(begins, ends, rows, strict=True):
        messages = _Edges(given, edges, begin, end).messages(result)
        if indptr is not None:
            messages = _segments(messages, indptr[first : last + 1].clamp(begin, end))
        elif one:
            first, last = 0, 1
        out[first:last] += messages
    return len(ends)


def _segments(messages: Tensor, indptr: Tensor) -> Tensor:
    lengths = indptr.diff().long()
    return torch.segment_reduce(messages, "sum", lengths=lengths, axis=0, unsafe=True)


class _Rows:
    """The rows that a chunk of edges reads, gathered on first use."""

    def __init__(self, given: _Given, edges: Tensor | None, begin: int, end: int) -> None:
        self._given, self._range = given, (begin, end - begin)
        self._edges = None if edges is None else edges[begin:end]
        self._gathered: dict[tuple[str, int], Tensor] = {}

    def __call__(self, slot: str, tensor: int) -> Tensor:
        """(edges, width), or one row that all share."""
        found = self._gathered.get((slot, tensor))
        if found is None:
            found = self._gather(slot, self._given.tensors[tensor]).to(self._given.wide)
            self._gathered[slot, tensor] = found
        return found

    def _gather(self, slot: str, tensor: Tensor) -> Tensor:
        given = self._given
        if slot == "w" and given.shared:
            return tensor
        table = {"x": given.tables.src, "z": given.tables.dst}.get(slot)
        index = self._edges
        if table is not None:
            index = table.narrow(0, *self._range) if index is None else table.index_select(0, index)
        if index is not None:
            return tensor.index_select(0, index)
        whole = self._range == (0, tensor.shape[0])
        return tensor if whole else tensor.narrow(0, *self._range)


class _Edges:
    """A chunk of edges and their messages."""

    def __init__(self, given: _Given, edges: Tensor | None, begin: int, end: int) -> None:
        self._given, self._count = given, end - begin
        self._rows = _Rows(given, edges, begin, end)
        self._packed = [plan and _PackedProduct(plan, self._rows) for plan in given.plans]

    def messages(self, result: Result) -> Tensor:
        """(edges, width): what each adds to its row; (1, width) of weights that all share."""
        given, slot = self._given, result.slot
        total = slot == "w" and given.shared
        rows, width = 1 if total else self._count, given.structure.width(slot)
        once = None not in given.plans and stores(given.structure, slot) == (1, 1)
        like = given.tensors[0]
        make = like.new_empty if once else like.new_zeros
        messages = make(rows, width, dtype=given.wide)
        for product, packed in zip(given.structure.products, self._packed, strict=True):
            if packed is not None:
                packed.add(messages, slot, result.terms, total, once)
                continue
            for path in product.paths:
                for term in result.terms:
                    self._add_path(messages, product, path, slot, term)
        return messages

    def _add_path(
        self, messages: Tensor, product: Product, path: Path, slot: str, term: Term
    ) -> None:
        """messages += one path of one term."""
        channels, given = product.channels, dict[str, Tensor]()
        for s, tensor in zip((s for s in SLOTS if s != slot), term, strict=False):
            if s != "w" or path.w >= 0:
                block = product.blocks(s)[getattr(path, s)]
                given[s] = block_view(self._rows(s, tensor), block, channels)
        target = block_view(messages, product.blocks(slot)[getattr(path, slot)], channels)
        degrees, summed = product.degrees(path), target.shape[2] == 1 < channels
        message = _message(slot, given, degrees, path.factor, summed)
        target += message.sum(0, keepdim=True) if len(target) == 1 else message


# path by path


def _message(
    slot: str, given: dict[str, Tensor], degrees: tuple[int, int, int], factor: float, summed: bool
) -> Tensor:
    """Σ c[a,b,m] of the given blocks, open in one slot; (edges, components, channels or 1)."""
    if slot == "w":
        c = _coefficients(degrees, factor, "xyz", given["x"].dtype, given["x"].device)
        terms = _pair(given["x"], given["y"], c) * given["z"]
        return terms.sum(1, keepdim=True)
    first, second = (s for s in "xyz" if s != slot)
    a, b, w = given[first], given[second], given.get("w")
    c = _coefficients(degrees, factor, first + second + slot, a.dtype, a.device)
    if summed:
        return _summed_pair(a, b if w is None else b * w, c)
    if w is None:
        return _pair(a, b, c)
    if a.shape[2] > 1:
        return _pair(a * w, b, c)
    if b.shape[2] > 1:
        return _pair(a, b * w, c)
    return _pair(a, b, c) * w


def _pair(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Σ_ij c[i,j,k] a[e,i,u] b[e,j,u], (e, k, u)."""
    if a.shape[2] == 1 < b.shape[2]:
        return _pair(b, a, c.transpose(0, 1))
    i, j, k = c.shape
    if b.shape[2] == 1:
        matrices = b.squeeze(2) @ c.permute(1, 2, 0).reshape(j, k * i)
        return matrices.view(-1, k, i) @ a
    pairs = (a[:, :, None] * b[:, None]).flatten(1, 2)
    return c.reshape(i * j, k).mT @ pairs


def _summed_pair(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Σ_u Σ_ij c[i,j,k] a[e,i,u] b[e,j,u], (e, k, 1)."""
    if a.shape[2] != b.shape[2]:
        a, b = (t if t.shape[2] == 1 else t.sum(2, keepdim=True) for t in (a, b))
    pairs = (a @ b.mT).flatten(1)
    return (pairs @ c.reshape(-1, c.shape[2])).unsqueeze(2)


@functools.lru_cache(maxsize=4096)
def _coefficients(
    degrees: tuple[int, int, int],
    factor: float,
    order: str,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """factor · C with its axes in the order of three slots."""
    c = factor * wigner_3j(*degrees, torch.float64, "cpu")
    return c.permute(*("xyz".index(s) for s in order)).contiguous().to(device, dtype)


# all paths at once


class _BlockRun(NamedTuple):
    """Blocks of one degree in equal steps.

    Component a of channel u of block n is at offset + n · stride + a · step + u · channel_step.
    """

    offset: int
    blocks: int
    stride: int
    components: int
    step: int
    channel_step: int

    def view(self, rows: Tensor, lanes: int) -> Tensor:
        """(rows, blocks, components, lanes)."""
        return rows.as_strided(
            (rows.shape[0], self.blocks, self.components, lanes),
            (rows.stride(0), self.stride, self.step, self.channel_step),
            rows.storage_offset() + self.offset,
        )


class _Expansion(NamedTuple):
    """The number (f,) of the component that each f belongs to; ones (components, f) there."""

    number: Tensor
    ones: Tensor

    def gather(self, rows: Tensor) -> Tensor:
        """(edges, f, channels) of (edges, components, channels)."""
        return rows.index_select(1, self.number)

    def sum(self, rows: Tensor) -> Tensor:
        """(edges, components, channels) of (edges, f, channels)."""
        if rows.device.type != "cpu":  # where the order of index_add is not deterministic
            return self.ones @ rows
        found = rows.new_zeros(rows.shape[0], len(self.ones), rows.shape[2])
        return found.index_add_(1, self.number, rows)


class _PackedPlan(NamedTuple):
    """How all paths of a product are computed at once."""

    channels: int
    shared: str  # the factor that all channels share, "x" or "y"
    deep: str  # the other factor
    runs: dict[str, tuple[_BlockRun, ...]]  # of each slot, the blocks of paths by their numbers
    table: Tensor  # (b, a · f), K
    z: _Expansion | None  # of each f; None: f is its component
    w: _Expansion | None  # of each f; None: no weights

    def lanes(self, slot: str) -> int:
        """Numbers of a component."""
        return 1 if slot == self.shared else self.channels


def _packed_plan(product: Product, dtype: torch.dtype, device: torch.device) -> _PackedPlan | None:
    """The plan of a product; None where no factor is shared, or M would be mostly zeros."""
    shared = next((s for s in "yx" if _is_shared(product, s)), "")
    if not shared or not product.paths or not product.channels:
        return None
    deep = "yx"[shared == "y"]
    paths = sorted(product.paths, key=lambda p: p.z)
    weighted = paths[0].w >= 0
    used = {s: sorted({getattr(p, s) for p in paths}) for s in SLOTS if s != "w" or weighted}
    first, ends = _first_components(product, used)
    of_paths, z, w = list[int](), list[int](), list[int]()
    for p in paths:
        components = product.z[p.z].components
        of_paths.append(len(z) if weighted else first["z"][p.z])
        z += range(first["z"][p.z], first["z"][p.z] + components)
        w += [first["w"][p.w]] * components if weighted else []
    width = len(z) if weighted else ends["z"]
    n, each = "xy".index(deep), [[2 * degree + 1 for degree in product.degrees(p)] for p in paths]
    useful = sum(e[2] * (e[0] * e[1] + e[n] * product.channels) for e in each)
    if width * ends[deep] * (ends[shared] + product.channels) > MAX_PACKED_OPERATIONS * useful:
        return None
    table = torch.zeros(ends[shared], ends[deep], width, dtype=torch.float64, device="cpu")
    for p, f in zip(paths, of_paths, strict=True):
        c = p.factor * wigner_3j(*product.degrees(p), torch.float64, "cpu")
        c = c if shared == "x" else c.transpose(0, 1)
        b, a = first[shared][getattr(p, shared)], first[deep][getattr(p, deep)]
        table[b : b + c.shape[0], a : a + c.shape[1], f : f + c.shape[2]] += c
    lanes = {s: 1 if s == shared else product.channels for s in used}
    runs = {s: _runs([product.blocks(s)[b] for b in used[s]], lanes[s]) for s in used}
    itself = not weighted or z == list(range(ends["z"]))
    z_of_f = None if itself else _expansion(z, ends["z"], dtype, device)
    w_of_f = _expansion(w, ends["w"], dtype, device) if weighted else None
    table = table.flatten(1).to(device, dtype)
    return _PackedPlan(product.channels, shared, deep, runs, table, z_of_f, w_of_f)


def _first_components(
    product: Product, used: dict[str, list[int]]
) -> tuple[dict[str, dict[int, int]], dict[str, int]]:
    """For each slot, the first component of each block in a row of these blocks, and their sum."""
    first, ends = dict[str, dict[int, int]](), dict[str, int]()
    for s, numbers in used.items():
        *begins, ends[s] = accumulate((product.blocks(s)[b].components for b in numbers), initial=0)
        first[s] = dict(zip(numbers, begins, strict=True))
    return first, ends


def _is_shared(product: Product, slot: str) -> bool:
    """Whether all channels share a factor and nothing else."""
    if product.channels == 1:
        return True
    others = (b for s in SLOTS if s != slot for b in product.blocks(s))
    return all(not b.channel_step for b in product.blocks(slot)) and all(
        b.channel_step for b in others
    )


def _expansion(
    numbers: list[int], size: int, dtype: torch.dtype, device: torch.device
) -> _Expansion:
    index = torch.tensor(numbers, device="cpu")
    ones = torch.arange(size, device="cpu")[:, None] == index
    return _Expansion(index.to(device), ones.to(device, dtype))


def _runs(blocks: Sequence[Block], lanes: int) -> tuple[_BlockRun, ...]:
    """Blocks in runs; where channels are adjacent, a component is a block of its own."""
    runs: list[_BlockRun] = []
    for offset, degree, step, channel_step in blocks:
        count, components = 1, 2 * degree + 1
        if components == 1 or (step == lanes and (channel_step == 1 or lanes == 1)):
            count, components = components, 1
        for n in range(count):
            own_step = 0 if components == 1 else step
            run = _BlockRun(offset + n * step, 1, 0, components, own_step, channel_step)
            last = runs[-1] if runs else run
            gap = run.offset - last.offset
            stride = gap if last.blocks == 1 else last.stride
            if last[3:] == run[3:] and gap == last.blocks * stride > 0:
                runs[-1] = last._replace(blocks=last.blocks + 1, stride=stride)
            else:
                runs.append(run)
    return tuple(runs)


class _PackedProduct:
    """All paths of a product on a chunk of edges; common factors of results are computed once.

    Args:
        plan: of the product.
        rows: gives those of a slot and a tensor of the call, one for each edge or one for all.
    """

    def __init__(self, plan: _PackedPlan, rows: Callable[[str, int], Tensor]) -> None:
        self._plan, self._rows = plan, rows
        self._known: dict[tuple[Any, ...], Tensor] = {}

    def add(self, out: Tensor, slot: str, terms: Sequence[Term], total: bool, first: bool) -> None:
        """Add a sum of derivatives to the rows of `out`, or write it there if `first`."""
        runs, lanes = self._plan.runs[slot], self._plan.lanes(slot)
        sizes = [run.blocks * run.components for run in runs]
        parts = torch.split_with_sizes(self._result(slot, terms, total), sizes, 1)
        for run, part in zip(runs, parts, strict=True):
            target = run.view(out, lanes)
            part = part.view(target.shape)
            if first:
                target.copy_(part)
            else:
                target += part

    def _result(self, slot: str, terms: Sequence[Term], total: bool) -> Tensor:
        """(edges, components, lanes) of a sum of derivatives; over all edges too if `total`."""
        plan = self._plan
        letters = [s for s in SLOTS if s != slot]
        named = [dict(zip(letters, term, strict=False)) for term in terms]
        if slot == plan.deep:
            return _matrix_products([(self._matrix(t), self._pulled(t)) for t in named])
        if slot == plan.shared:
            pairs = [(self._values(plan.deep, t), self._pulled(t).mT) for t in named]
            return (_matrix_products(pairs).flatten(1) @ plan.table.mT).unsqueeze(2)
        if slot == "w":
            assert plan.w is not None
            found = _products([(self._pushed(t), self._expanded("z", t)) for t in named])
            return plan.w.sum(found.sum(0, keepdim=True) if total else found)
        found = _products([(self._pushed(t), self._expanded("w", t)) for t in named])
        return found if plan.z is None else plan.z.sum(found)

    def _pushed(self, term: dict[str, int]) -> Tensor:
        """Σ_a M x_a, (edges, f, channels)."""
        return self._once(
            ("pushed", term["x"], term["y"]),
            lambda: torch.bmm(self._matrix(term).mT, self._values(self._plan.deep, term)),
        )

    def _pulled(self, term: dict[str, int]) -> Tensor:
        """w_p z_m, (edges, f, channels)."""
        z, w = self._expanded("z", term), self._expanded("w", term)
        assert z is not None
        return z if w is None else self._once(("pulled", term["z"], term["w"]), lambda: z * w)

    def _matrix(self, term: dict[str, int]) -> Tensor:
        """M, (edges, a, f)."""
        plan, shared = self._plan, self._plan.shared

        def make() -> Tensor:
            rows = self._values(shared, term)
            a = sum(run.blocks * run.components for run in plan.runs[plan.deep])
            return (rows.squeeze(2) @ plan.table).view(-1, a, plan.table.shape[1] // a)

        return self._once(("matrix", term[shared]), make)

    def _expanded(self, slot: str, term: dict[str, int]) -> Tensor | None:
        """(edges, f, channels) of z or w; None: no weights."""
        expansion = self._plan.z if slot == "z" else self._plan.w
        if expansion is None:
            return self._values("z", term) if slot == "z" else None
        return self._once(
            ("expanded", slot, term[slot]), lambda: expansion.gather(self._values(slot, term))
        )

    def _values(self, slot: str, term: dict[str, int]) -> Tensor:
        """(edges, components, lanes): blocks side by side."""
        runs, lanes = self._plan.runs[slot], self._plan.lanes(slot)

        def make() -> Tensor:
            rows = self._rows(slot, term[slot])
            if len(runs) == 1 and runs[0].components == 1:
                return runs[0].view(rows, lanes).squeeze(2)
            return torch.cat([run.view(rows, lanes).flatten(1, 2) for run in runs], 1)

        return self._once((slot, term[slot]), make)

    def _once(self, key: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


def _matrix_products(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Σ A B, products of matrices."""
    (a, b), *others = pairs
    found = torch.bmm(a, b)
    for a, b in others:
        found = found.baddbmm_(a, b)
    return found


def _products(pairs: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """Σ a b, number by number; b None: 1."""
    (a, b), *others = pairs
    found = a if b is None else a * b
    for a, b in others:
        found = found + a if b is None else found.addcmul_(a, b)
    return found
