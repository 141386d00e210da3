"""Activations: of scalars, and of other irreps through scalars that gate them.

Activation   z_i = c_i f_i(x_i),  c = <f(t)²>^(-1/2) over normal t
Gate         scalars f(s),  and gated irreps f(g) y
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from torchweft.errors import ShapeError
from torchweft.o3.irreps.irreps import Irrep, Irreps, IrrepsLike, MulIr
from torchweft.o3.irreps.layout import check_rows, join, parts_of, side_by_side, split
from torchweft.o3.tensor_product.module import RowLayer
from torchweft.o3.tensor_product.products import paired

__all__ = ["Activation", "Gate", "NormalizedActivation"]

Function = Callable[[Tensor], Tensor]

SAMPLES = 1_000_000
"""Normal numbers that a second moment is estimated from; e3nn's, so that checkpoints agree."""

NEAR_ONE = 1e-4
"""Factors this near to 1 are left out, as e3nn does."""


class NormalizedActivation(nn.Module):
    """c f(x), c = <f(t)²>^(-1/2) over the same million normal numbers as e3nn's.

    Args:
        f: a function of each number by itself.
    """

    def __init__(self, f: Function) -> None:
        super().__init__()
        self.f = f
        factor = _module_factor(f) if isinstance(f, nn.Module) else _factor(f)
        self.cst = 1.0 if abs(factor - 1) < NEAR_ONE else factor

    def forward(self, x: Tensor) -> Tensor:
        """c f(x), in the shape of x."""
        value = self.f(x)
        return value if self.cst == 1.0 else value * self.cst


class Activation(RowLayer):
    """z_i = c_i f_i(x_i) for items that are scalars; items without a function stay as they are.

    Args:
        irreps_in: of x.
        acts: a function for each item, or None.
        backend: "torch" or None, which are the same; another raises BackendError.

    Raises:
        ShapeError: another number of functions; a function for what is no scalar; one of 0o that
            is neither even nor odd.

    An even function of 0o gives 0e, an odd one 0o.
    """

    def __init__(
        self,
        irreps_in: IrrepsLike,
        acts: Sequence[Function | None],
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__(backend=backend)
        self.irreps_in = Irreps(irreps_in)
        if len(acts) != len(self.irreps_in):
            raise ShapeError(
                f"there are {len(acts)} functions but {self.irreps_in or 'no irreps'} has "
                f"{len(self.irreps_in)} items: each needs its own, or None. Pass one an item."
            )
        pairs = list(zip(self.irreps_in, acts, strict=True))
        self.irreps_out = Irreps([(item.mul, _irrep_of(item, f)) for item, f in pairs])
        self.acts = nn.ModuleList([None if f is None else NormalizedActivation(f) for f in acts])  # type: ignore[misc]

    def __repr__(self) -> str:
        marks = "".join(" " if act is None else "x" for act in self.acts)
        return f"{type(self).__name__} [{marks}] ({self.irreps_in} -> {self.irreps_out})"

    def forward(self, x: Tensor, dim: int = -1) -> Tensor:
        """The activated x, in its shape; `dim` is the dimension of the irreps."""
        check_rows("x", x.movedim(dim, -1), self.irreps_in, self)
        parts = parts_of(x, [item.dim for item in self.irreps_in], dim)
        values = [
            part if act is None else act(part) for part, act in zip(parts, self.acts, strict=True)
        ]
        return side_by_side(values, dim) if values else x


class Gate(RowLayer):
    """z = (f(s), f(g) · y) of x = (s, g, y) sorted: scalars, gates, and what they gate.

    Args:
        irreps_scalars: of s, scalars.
        act_scalars: a function for each of its items, or None.
        irreps_gates: of g, scalars: one for each copy of y.
        act_gates: a function for each of its items, or None.
        irreps_gated: of y.
        layout: "mul_ir" or "ir_mul", of x and z.
        backend: "torch" or None, which are the same; another raises BackendError.

    Raises:
        ShapeError: gates or scalars that are none, or gates of another number.

    `irreps_in` is the sorted sum of the three, `irreps_out` that of the results; functions are
    scaled as in Activation.
    """

    _e3nn_parts = ("mul.", "sc.")

    def __init__(
        self,
        irreps_scalars: IrrepsLike,
        act_scalars: Sequence[Function | None],
        irreps_gates: IrrepsLike,
        act_gates: Sequence[Function | None],
        irreps_gated: IrrepsLike,
        *,
        layout: str = "mul_ir",
        backend: str | None = None,
    ) -> None:
        super().__init__(layout, backend)
        scalars, gates, gated = map(Irreps, (irreps_scalars, irreps_gates, irreps_gated))
        _check_scalars("irreps_scalars", scalars)
        _check_scalars("irreps_gates", gates)
        if gates.num_irreps != gated.num_irreps:
            raise ShapeError(
                f"irreps_gates {gates} has {gates.num_irreps} scalars and irreps_gated {gated} has "
                f"{gated.num_irreps} irreps: each needs its gate. Pass as many in both."
            )
        self.irreps_scalars, self.irreps_gates = scalars.simplify(), gates.simplify()
        self.irreps_gated = gated.simplify()
        self.act_scalars = Activation(scalars, act_scalars)
        self.act_gates = Activation(gates, act_gates)
        pieces = list(paired(self.irreps_gated, self.act_gates.irreps_out.simplify()))
        products = [(y.mul, Irrep(y.ir.l, y.ir.p * g.ir.p)) for y, g in pieces]
        self.irreps_out = self.act_scalars.irreps_out + Irreps(products)
        parts = (self.irreps_scalars, self.irreps_gates, self.irreps_gated)
        self.irreps_in, (self._scalars, self._gates, places) = _sorted(parts)
        self._gated = list(_cut(places, [y for y, _ in pieces]))
        every = sorted({*self._scalars, *self._gates, *self._gated})
        self._number = {place: n for n, place in enumerate(every)}
        count = len(self.irreps_in)
        self._sizes = [[mul for k, _, mul in every if k == block] for block in range(count)]

    def __repr__(self) -> str:
        return f"{type(self).__name__} ({self.irreps_in} -> {self.irreps_out})"

    def forward(self, x: Tensor) -> Tensor:
        """(…, irreps_out.dim) of x (…, irreps_in.dim)."""
        check_rows("x", x, self.irreps_in, self)
        blocks = zip(split(x, self.irreps_in, self.layout), self._sizes, strict=True)
        pieces = [piece for block, sizes in blocks for piece in parts_of(block, sizes, -2)]
        scalars: Tensor = self.act_scalars(self._side_by_side(pieces, self._scalars, x))
        if not self._gated:
            return scalars
        gates = self.act_gates(self._side_by_side(pieces, self._gates, x)).unsqueeze(-1)
        each = parts_of(gates, [mul for *_, mul in self._gated], -2)
        gated = [
            pieces[self._number[place]] * gate
            for place, gate in zip(self._gated, each, strict=True)
        ]
        return join([scalars.unsqueeze(-1), *gated], self.layout)

    def _side_by_side(self, pieces: list[Tensor], places: list[CopyRange], like: Tensor) -> Tensor:
        """(…, n): scalars."""
        parts = [pieces[self._number[place]].squeeze(-1) for place in places]
        return side_by_side(parts, -1) if parts else like.narrow(-1, 0, 0)


CopyRange = tuple[int, int, int]
"""A block of x, the first of its copies, and how many."""


def _sorted(parts: Sequence[Irreps]) -> tuple[Irreps, list[list[CopyRange]]]:
    """All items sorted and simplified, and where those of each part are."""
    every = Irreps([item for part in parts for item in part])
    irreps, _, inv = every.sort()
    places: dict[int, CopyRange] = {}
    block, end, before = -1, 0, None
    for n, (mul, ir) in zip(inv, irreps, strict=True):
        if ir != before:
            block, end, before = block + 1, 0, ir
        places[n] = (block, end, mul)
        end += mul
    rest = iter(range(len(every)))
    return irreps.simplify(), [[places[next(rest)] for _ in part] for part in parts]


def _cut(places: list[CopyRange], pieces: list[MulIr]) -> Iterator[CopyRange]:
    """The places of the gated items, cut into pieces of one gate item each."""
    rest = list(places)
    for mul, _ in pieces:
        block, first, left = rest.pop(0)
        yield block, first, mul
        if left > mul:
            rest.insert(0, (block, first + mul, left - mul))


def _irrep_of(item: MulIr, f: Function | None) -> Irrep:
    """The irrep of f of these scalars."""
    if f is None:
        return item.ir
    if item.ir.l:
        raise ShapeError(
            f"a function was given for {item}: only scalars have one, another irrep would turn "
            "away from its result. Pass None there, or gate it by a scalar."
        )
    if item.ir.p == 1:
        return item.ir
    t = torch.linspace(0, 10, 256, dtype=torch.float64)
    g = _on_host(f) if isinstance(f, nn.Module) else f
    with torch.no_grad():
        right, left = g(t), g(-t)
    parity = {1: right - left, -1: right + left}
    for p, difference in parity.items():
        if difference.abs().max() < 1e-5:  # e3nn's
            return Irrep(0, p)
    name = getattr(f, "__name__", type(f).__name__)
    raise ShapeError(
        f"{name} was given for {item}, which changes its sign under inversion: its function must "
        "be even or odd. Pass one such as tanh or abs, or make it 0e."
    )


def _check_scalars(name: str, irreps: Irreps) -> None:
    if any(item.ir.l for item in irreps):
        raise ShapeError(
            f"{name} is {irreps}: it must be scalars, 0e or 0o. Put other irreps into irreps_gated."
        )


def _on_host(f: nn.Module) -> nn.Module:
    """A copy on the CPU, in float64."""
    return copy.deepcopy(f).to("cpu", torch.float64)


def _module_factor(f: nn.Module) -> float:
    return _root_of_moment(_on_host(f))


@functools.lru_cache(maxsize=256)
def _factor(f: Function) -> float:
    return _root_of_moment(f)


def _root_of_moment(f: Function) -> float:
    """<f(t)²>^(-1/2)."""
    generator = torch.Generator("cpu").manual_seed(0)
    t = torch.randn(SAMPLES, generator=generator, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        return float(f(t).square().mean().pow(-0.5))
