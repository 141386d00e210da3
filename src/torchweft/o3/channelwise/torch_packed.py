"""Products of which all channels share one factor, by a few large products of matrices.

    M[a,f] = Σ_b K[b,a,f] y_b       for each edge; f: component m of a path p; a, b: of all blocks
    z_m = Σ_f w_p Σ_a M[a,f] x_a    x_a = Σ_f M[a,f] w_p z_m
    w_p = Σ_f z_m Σ_a M[a,f] x_a    y_b = Σ_af K[b,a,f] Σ_u w_p z_m x_a

K is zero where a path does not meet a block.  Without weights, f is a component of z itself.  Where
all channels share x, it and y change places.  What results have in common is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.o3.channelwise.calls import Term
from torchweft.o3.channelwise.structure import SLOTS, Block, Product
from torchweft.o3.irreps.wigner import wigner_3j

__all__ = ["Packed", "Plan", "plan_of"]

WASTE = 16
"""Most operations for each that path after path would do."""


class Run(NamedTuple):
    """Blocks of one degree in equal steps.

    Component a of channel u of block n is at offset + n · stride + a · step + u · channel_step.
    """

    offset: int
    blocks: int
    stride: int
    components: int
    step: int
    channel_step: int


class Spread(NamedTuple):
    """The number (f,) of the component that each f belongs to; ones (components, f) there."""

    number: Tensor
    ones: Tensor

    def gather(self, rows: Tensor) -> Tensor:
        """(edges, f, channels) of (edges, components, channels)."""
        return rows.index_select(1, self.number)

    def sum(self, rows: Tensor) -> Tensor:
        """(edges, components, channels) of (edges, f, channels)."""
        if rows.device.type != "cpu":  # where index_add is in no certain order
            return self.ones @ rows
        found = rows.new_zeros(rows.shape[0], len(self.ones), rows.shape[2])
        return found.index_add_(1, self.number, rows)


class Plan(NamedTuple):
    """How a product is evaluated.

    Args:
        channels: of the product.
        shared: the factor that all channels share, "x" or "y".
        deep: the other.
        runs: of each slot, the blocks that paths meet, in the order of their numbers.
        table: (b, a · f), K.
        z, w: of each f; None for z: f is its component; None for w: no weights.
    """

    channels: int
    shared: str
    deep: str
    runs: dict[str, tuple[Run, ...]]
    table: Tensor
    z: Spread | None
    w: Spread | None

    def lanes(self, slot: str) -> int:
        """Numbers of a component."""
        return 1 if slot == self.shared else self.channels


def plan_of(product: Product, dtype: torch.dtype, device: torch.device) -> Plan | None:
    """The plan of a product; None where it has no such factor, or M were mostly zeros."""
    shared = next((s for s in "yx" if _is_shared(product, s)), "")
    if not shared or not product.paths or not product.channels:
        return None
    deep = "yx"[shared == "y"]
    paths = sorted(product.paths, key=lambda p: p.z)
    weighted = paths[0].w >= 0
    used = {s: sorted({getattr(p, s) for p in paths}) for s in SLOTS if s != "w" or weighted}
    first = {s: _firsts(product.blocks(s), numbers) for s, numbers in used.items()}
    ends = {s: sum(product.blocks(s)[b].components for b in used[s]) for s in used}
    begins: list[int] = []
    z: list[int] = []
    w: list[int] = []
    for p in paths:
        components = product.z[p.z].components
        begins.append(len(z) if weighted else first["z"][p.z])
        z += range(first["z"][p.z], first["z"][p.z] + components)
        w += [first["w"][p.w]] * components if weighted else []
    width = len(z) if weighted else ends["z"]
    each = [[2 * degree + 1 for degree in product.degrees(p)] for p in paths]
    n = "xy".index(deep)
    useful = sum(e[2] * (e[0] * e[1] + e[n] * product.channels) for e in each)
    if width * ends[deep] * (ends[shared] + product.channels) > WASTE * useful:
        return None
    table = torch.zeros(ends[shared], ends[deep], width, dtype=torch.float64, device="cpu")
    for p, f in zip(paths, begins, strict=True):
        c = p.factor * wigner_3j(*product.degrees(p), torch.float64, "cpu")
        c = c if shared == "x" else c.transpose(0, 1)
        b, a = first[shared][getattr(p, shared)], first[deep][getattr(p, deep)]
        table[b : b + c.shape[0], a : a + c.shape[1], f : f + c.shape[2]] += c
    runs = {
        s: _runs([product.blocks(s)[b] for b in used[s]], 1 if s == shared else product.channels)
        for s in used
    }
    itself = not weighted or z == list(range(ends["z"]))
    return Plan(
        product.channels,
        shared,
        deep,
        runs,
        table.flatten(1).to(device, dtype),
        None if itself else _spread(z, ends["z"], dtype, device),
        _spread(w, ends["w"], dtype, device) if weighted else None,
    )


def _is_shared(product: Product, slot: str) -> bool:
    """Whether all channels share a factor and nothing else."""
    if product.channels == 1:
        return True
    others = (b for s in SLOTS if s != slot for b in product.blocks(s))
    return all(not b.channel_step for b in product.blocks(slot)) and all(
        b.channel_step for b in others
    )


def _firsts(blocks: Sequence[Block], numbers: Sequence[int]) -> dict[int, int]:
    """Where blocks begin when they lie side by side."""
    ends = accumulate((blocks[b].components for b in numbers), initial=0)
    return dict(zip(numbers, ends, strict=False))


def _spread(numbers: list[int], size: int, dtype: torch.dtype, device: torch.device) -> Spread:
    index = torch.tensor(numbers, device="cpu")
    ones = torch.arange(size, device="cpu")[:, None] == index
    return Spread(index.to(device), ones.to(device, dtype))


def _runs(blocks: Sequence[Block], lanes: int) -> tuple[Run, ...]:
    """Blocks in runs; where channels are neighbours, a component is a block of its own."""
    runs: list[Run] = []
    for offset, degree, step, channel_step in blocks:
        count, components = 1, 2 * degree + 1
        if components == 1 or (step == lanes and (channel_step == 1 or lanes == 1)):
            count, components = components, 1
        for n in range(count):
            run = Run(offset + n * step, 1, 0, components, step, channel_step)
            if components == 1:
                run = run._replace(step=0)
            last = runs[-1] if runs else run
            gap = run.offset - last.offset
            stride = gap if last.blocks == 1 else last.stride
            if last[3:] == run[3:] and gap == last.blocks * stride > 0:
                runs[-1] = last._replace(blocks=last.blocks + 1, stride=stride)
            else:
                runs.append(run)
    return tuple(runs)


def view(rows: Tensor, run: Run, lanes: int) -> Tensor:
    """(rows, blocks, components, lanes) of a run."""
    return rows.as_strided(
        (rows.shape[0], run.blocks, run.components, lanes),
        (rows.stride(0), run.stride, run.step, run.channel_step),
        rows.storage_offset() + run.offset,
    )


class Packed:
    """A product on some edges.

    Args:
        plan: of the product.
        rows: gives those of a slot and a tensor of the call, one an edge or one for all.
    """

    def __init__(self, plan: Plan, rows: Callable[[str, int], Tensor]) -> None:
        self._plan, self._rows = plan, rows
        self._known: dict[tuple[Any, ...], Tensor] = {}

    def add(self, out: Tensor, slot: str, terms: Sequence[Term], total: bool, first: bool) -> None:
        """Add a sum of derivatives to the rows of `out`, or write it there if it is the first."""
        runs, lanes = self._plan.runs[slot], self._plan.lanes(slot)
        sizes = [run.blocks * run.components for run in runs]
        parts = torch.split_with_sizes(self._result(slot, terms, total), sizes, 1)
        for run, part in zip(runs, parts, strict=True):
            target = view(out, run, lanes)
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
            return _products([(self._matrix(t), self._pulled(t)) for t in named])
        if slot == plan.shared:
            pairs = [(self._values(plan.deep, t), self._pulled(t).mT) for t in named]
            return (_products(pairs).flatten(1) @ plan.table.mT).unsqueeze(2)
        if slot == "w":
            assert plan.w is not None
            found = _sum([(self._pushed(t), self._spread("z", t)) for t in named])
            return plan.w.sum(found.sum(0, keepdim=True) if total else found)
        found = _sum([(self._pushed(t), self._spread("w", t)) for t in named])
        return found if plan.z is None else plan.z.sum(found)

    def _pushed(self, term: dict[str, int]) -> Tensor:
        """Σ_a M x_a, (edges, f, channels)."""
        return self._once(
            ("pushed", term["x"], term["y"]),
            lambda: torch.bmm(self._matrix(term).mT, self._values(self._plan.deep, term)),
        )

    def _pulled(self, term: dict[str, int]) -> Tensor:
        """w_p z_m, (edges, f, channels)."""
        z = self._spread("z", term)
        assert z is not None
        w = self._spread("w", term)
        if w is None:
            return z
        return self._once(("pulled", term["z"], term["w"]), lambda: z * w)

    def _matrix(self, term: dict[str, int]) -> Tensor:
        """M, (edges, a, f)."""
        plan, shared = self._plan, self._plan.shared

        def make() -> Tensor:
            rows = self._values(shared, term)
            a = sum(run.blocks * run.components for run in plan.runs[plan.deep])
            return (rows.squeeze(2) @ plan.table).view(-1, a, plan.table.shape[1] // a)

        return self._once(("matrix", term[shared]), make)

    def _spread(self, slot: str, term: dict[str, int]) -> Tensor | None:
        """(edges, f, channels) of z or w; None: no weights."""
        spread = self._plan.z if slot == "z" else self._plan.w
        if spread is None:
            return self._values("z", term) if slot == "z" else None
        return self._once(
            ("spread", slot, term[slot]), lambda: spread.gather(self._values(slot, term))
        )

    def _values(self, slot: str, term: dict[str, int]) -> Tensor:
        """(edges, components, lanes): blocks side by side."""
        runs, lanes = self._plan.runs[slot], self._plan.lanes(slot)

        def make() -> Tensor:
            rows = self._rows(slot, term[slot])
            if len(runs) == 1 and runs[0].components == 1:
                return view(rows, runs[0], lanes).squeeze(2)
            return torch.cat([view(rows, run, lanes).flatten(1, 2) for run in runs], 1)

        return self._once((slot, term[slot]), make)

    def _once(self, key: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor:
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = make()
        return found


def _products(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Σ A B, products of matrices."""
    (a, b), *others = pairs
    found = torch.bmm(a, b)
    for a, b in others:
        found = found.baddbmm_(a, b)
    return found


def _sum(pairs: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """Σ a b, number by number; b None: 1."""
    (a, b), *others = pairs
    found = a if b is None else a * b
    for a, b in others:
        found = found + a if b is None else found.addcmul_(a, b)
    return found
