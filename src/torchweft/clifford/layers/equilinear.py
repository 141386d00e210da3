"""Equivariant linear maps of GATr and L-GATr, and their layer norm."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchweft.clifford import functions
from torchweft.clifford.algebra import PGA, Algebra
from torchweft.clifford.calls import RowFunction, backend_for, backend_on, program_rows
from torchweft.clifford.layers.basic import MultivectorModule
from torchweft.clifford.matrices import mixed
from torchweft.clifford.matrices.terms import Map, moves
from torchweft.core.operators.operands import narrowed, same_kind, widened
from torchweft.core.private import is_hooked
from torchweft.errors import ShapeError

__all__ = ["EquiLayerNorm", "EquiLinear", "GradeDropout", "MixedLinear"]

Pair = tuple[Tensor, Tensor]
"""Multivectors and scalars."""


class EquiLinear(MultivectorModule):
    """y = Σ_a φ_a(x) · weight[a], plus bias on the scalar, with the equivariant maps φ_a of GATr.

    The maps, in order: the n+1 projections ⟨x⟩_g; for each null vector e, e⟨x⟩_g for g < n (nine
    maps in PGA, as in GATr); with `pseudoscalar`, the n+1 products ⟨x⟩_g e_1…n.

    Args:
        in_features: number of input features F_in.
        out_features: number of output features F_out.
        algebra: the algebra of the multivectors.
        bias: whether there is a bias.
        pseudoscalar: whether those maps are added, as L-GATr does by default; the layer is then
            equivariant under even versors, and not under reflections.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Attributes:
        weight: the parameter (maps, F_in, F_out).
        bias: the parameter (F_out,), or None.

    Raises:
        ShapeError: a number of features that is not positive; from a call, multivectors of another
            layout or number of features.

    Cost: one matrix product for each grade, and one for each further map.

    Source: Brehmer et al.: Geometric algebra transformer, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> layer = clifford.EquiLinear(8, 16)  # in PGA
        >>> layer(torch.randn(16, 100, 8)).shape
        torch.Size([16, 100, 16])
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        algebra: Algebra = PGA,
        bias: bool = True,
        *,
        pseudoscalar: bool = False,
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__(algebra, blade_dim, backend)
        if min(in_features, out_features) < 1:
            raise ShapeError(
                f"in_features is {in_features}, out_features {out_features}: both must be at "
                "least 1. Give the numbers of multivectors in and out."
            )
        self.in_features, self.out_features = in_features, out_features
        self.pseudoscalar = pseudoscalar
        moved = moves(algebra, pseudoscalar)
        for k, move in enumerate(moved):
            for name, table in zip(("source", "target", "signs"), _tables(move), strict=True):
                self.register_buffer(f"_{name}{k}", table, persistent=False)
        self._maps = [algebra.n + 1, *map(len, moved)]
        self._moved = sum(len(of) for move in moved for of in move)
        self.weight = nn.Parameter(torch.empty(sum(self._maps), in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random weights that keep the mean square of the features, no bias."""
        into_a_blade = 1 + self._moved / self.algebra.num_blades
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.in_features * into_a_blade))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps multivectors x (B, batch…, F_in) to (B, batch…, F_out)."""
        self.check(x, self.in_features)
        return self.blades_back(self.of_blades(self.blades_first(x)))

    def of_blades(self, x: Tensor) -> Tensor:
        """`forward` of (B, batch…, F_in), blades first whatever `blade_dim`."""
        of_grades, *of_moves = torch.split(self.weight, self._maps)
        out = functions.grade_linear(x, of_grades, self.bias, self.algebra, backend=self.backend)
        for k, weight in enumerate(of_moves):
            source, target, signs = (
                getattr(self, f"_{t}{k}") for t in ("source", "target", "signs")
            )
            matrices = (signs.to(weight.dtype) @ weight.flatten(1)).unflatten(1, weight.shape[1:])
            rows = len(source), math.prod(x.shape[1:-1]), self.in_features
            moved = x.index_select(0, source).view(rows) @ matrices
            # the targets of one move differ, so the order of additions is fixed
            out = out.index_add(0, target, moved.to(out.dtype).view(len(source), *out.shape[1:]))
        return out


class MixedLinear(nn.Module):
    """`EquiLinear` between multivectors, with plain scalars mixed in and out.

    y = φ(x), plus s2mvs(s) on the scalar blade;  t = mvs2s(x₀) + s2s(s).  With `pseudoscalar` both
    ends are pairs, x₀ and the last blade, interleaved as in L-GATr.

    Args:
        in_features: number of input features F_in.
        out_features: number of output features F_out.
        in_scalars: S_in; 0 for none, and a bias is then that of φ.
        out_scalars: S_out; 0 for none.
        algebra: the algebra of the multivectors.
        bias: whether there is one, of the scalar blade and of the scalars.
        pseudoscalar: see `EquiLinear`.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Cost: on a GPU, with scalars, up to 256 features in and out and except in float64: two matrix
    products and two kernels, the gradient four and four.  Elsewhere, and where a linear layer
    inside has hooks or an adapter in its place: that of its parts.

    Source: Brehmer et al.: Geometric algebra transformer, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> layer = clifford.MixedLinear(8, 16, in_scalars=4, out_scalars=2)
        >>> x, scalars = layer(torch.randn(16, 100, 8), torch.randn(100, 4))
        >>> x.shape, scalars.shape
        (torch.Size([16, 100, 16]), torch.Size([100, 2]))
    """

    _ends: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        in_scalars: int,
        out_scalars: int = 0,
        algebra: Algebra = PGA,
        *,
        bias: bool = True,
        pseudoscalar: bool = False,
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.in_scalars, self.out_scalars = in_scalars, out_scalars
        self.blade_dim = blade_dim
        self.mvs2mvs = EquiLinear(
            in_features,
            out_features,
            algebra,
            bias=bias and not in_scalars,
            pseudoscalar=pseudoscalar,
            blade_dim=blade_dim,
            backend=backend,
        )
        ends = (0, algebra.num_blades - 1) if pseudoscalar else (0,)
        self.register_buffer("_ends", torch.tensor(ends), persistent=False)
        if in_scalars:
            self.s2mvs = nn.Linear(in_scalars, len(ends) * out_features, bias=bias)
        if out_scalars:
            self.mvs2s = nn.Linear(len(ends) * in_features, out_scalars, bias=bias)
        if in_scalars and out_scalars:
            self.s2s = nn.Linear(in_scalars, out_scalars, bias=False)

    def forward(self, x: Tensor, scalars: Tensor) -> tuple[Tensor, Tensor]:
        """The linear map of both kinds of features.

        Args:
            x: multivectors (B, batch…, F_in).
            scalars: (batch…, S_in).

        Returns:
            (B, batch…, F_out) and (batch…, S_out).
        """
        return _of_one_input((self,), x, scalars)[0]

    def _check(self, x: Tensor, scalars: Tensor) -> None:
        """Raise ShapeError unless both have the layout, the numbers of features, one batch."""
        if scalars.shape[-1] != self.in_scalars:
            raise ShapeError(
                f"scalars is {tuple(scalars.shape)}: MixedLinear needs (batch…, "
                f"{self.in_scalars}). Pass that many, or build it with "
                f"in_scalars={scalars.shape[-1]}."
            )
        self.mvs2mvs.check(x, self.mvs2mvs.in_features)
        batch = x.shape[1:-1] if self.blade_dim == 0 else x.shape[:-2]
        if scalars.shape[:-1] != batch:
            raise ShapeError(
                f"scalars is {tuple(scalars.shape)} and x is {tuple(x.shape)}: both need the same "
                f"batch dimensions. Pass scalars {(*batch, self.in_scalars)}; expand them to it "
                "where the same ones belong to several items."
            )

    def _by_parts(self, x: Tensor, scalars: Tensor) -> Pair:
        """`forward`, by the layers that it is made of."""
        first = x.movedim(self.blade_dim, 0)
        y = self.mvs2mvs(x).movedim(self.blade_dim, 0)
        if self.in_scalars:
            added = self.s2mvs(scalars).unflatten(-1, (-1, len(self._ends))).movedim(-1, 0)
            y = y.index_add(0, self._ends, added.to(y.dtype))
        y = y.movedim(0, self.blade_dim)
        if not self.out_scalars:
            return y, scalars[..., :0]
        t = self.mvs2s(first.index_select(0, self._ends).movedim(0, -1).flatten(-2))
        return y, t + self.s2s(scalars) if self.in_scalars else t

    def _linear_layers(self) -> dict[str, Any]:
        """Those that scalars take part in, by their names."""
        return {name: m for name, m in self.named_children() if name != "mvs2mvs"}

    def start_near_one(self) -> None:
        """The scalar's bias is 1: a product with the result reaches its other factor."""
        bias = self.s2mvs.bias if self.in_scalars else self.mvs2mvs.bias
        if bias is not None:
            with torch.no_grad():
                bias.view(self.mvs2mvs.out_features, -1)[:, 0] = 1

    def scalars_of(self, x: Tensor, scalars: Tensor | None) -> Tensor:
        """The scalars beside multivectors x; where None were given, none."""
        if scalars is not None:
            return scalars
        first = x.movedim(self.blade_dim, 0)
        return first.new_zeros(*first.shape[1:-1], 0)


def joined(maps: Sequence[MixedLinear], x: Tensor, scalars: Tensor) -> list[Pair]:
    """The results of several maps of one input; on a GPU, of one operator.

    Where a map has hooks, or an adapter is in its place, each is called.

    Args:
        maps: of one algebra, layout and backend, with the same numbers of features and scalars in.
        x: multivectors (B, batch…, F_in).
        scalars: (batch…, S_in).
    """
    if all(_is_bare(of, MixedLinear) for of in maps):
        return _of_one_input(maps, x, scalars)
    return [of(x, scalars) for of in maps]


def _of_one_input(maps: Sequence[MixedLinear], x: Tensor, scalars: Tensor) -> list[Pair]:
    """`joined`, of maps whose hooks were called."""
    for of in maps:
        of._check(x, scalars)
    first = maps[0]
    features = [of.mvs2mvs.out_features for of in maps]
    if not (all(map(_is_plain, maps)) and _by_kernels(first, x, sum(features))):
        return [of._by_parts(x, scalars) for of in maps]
    row = torch.cat([p.reshape(-1) for p in _parameters(maps)])
    given = {"x": x.movedim(first.blade_dim, 0), "scalars": scalars, "weight": row}
    x, scalars, row = same_kind(narrowed, **given)
    widths = [of.out_scalars for of in maps]
    y, t = mixed.mixed(
        x.flatten(1, -2) if x.dim() > 2 else x.unsqueeze(1),
        scalars.reshape(-1, scalars.shape[-1]),
        row,
        algebra=first.mvs2mvs.algebra,
        pseudoscalar=first.mvs2mvs.pseudoscalar,
        features=features,
        s_out=sum(widths),
        bias=first.s2mvs.bias is not None,
    )
    batch = x.shape[1:-1]
    return [
        (
            y.view(len(y), *batch, y.shape[-1]).movedim(0, first.blade_dim),
            t.view(*batch, t.shape[-1]),
        )
        for y, t in zip(_parted(y, features), _parted(t, widths), strict=True)
    ]


def _parted(x: Tensor, widths: list[int]) -> Sequence[Tensor]:
    return (x,) if len(widths) == 1 else torch.split(x, widths, -1)


def _parameters(maps: Sequence[MixedLinear]) -> Iterator[Tensor]:
    """The parameters in the order of a row of `mixed`."""
    yield from (of.mvs2mvs.weight for of in maps)
    layers = [of._linear_layers() for of in maps]
    for name in ("s2mvs", "mvs2s"):
        biases = (of[name].bias for of in layers if name in of)
        yield from (bias for bias in biases if bias is not None)
    for name in ("s2mvs", "s2s", "mvs2s"):
        yield from (of[name].weight for of in layers if name in of)


def _is_plain(of: MixedLinear) -> bool:
    """Whether its layers are nothing but their parameters."""
    layers = of._linear_layers().values()
    return _is_bare(of.mvs2mvs, EquiLinear) and all(_is_bare(m, nn.Linear) for m in layers)


def _is_bare(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is of a kind itself, with no adapter in its place, and has no hook."""
    return type(module) is kind and not is_hooked(module)


def _by_kernels(of: MixedLinear, x: Tensor, features: int) -> bool:
    """Whether the joint operator computes a map, and others, to so many features."""
    inner = of.mvs2mvs
    served = of.in_scalars > 0 and mixed.serves(x, inner.in_features, features)
    return served and backend_for(inner.backend, inner.algebra, (x,)) == "triton"


class EquiLayerNorm(MultivectorModule):
    """x / √max(eps, mean over features of Σ_g |Σ_(j∈g) q_j x_j²|), and layer norm of the scalars.

    Args:
        algebra: the algebra of the multivectors.
        eps: the least mean square that is divided by.
        gains: (F, S): after the norm, multiply by parameters weight (n+1, F), one for each grade,
            and scalar_weight (S,), as in blocks of L-GATr 2; None: no parameters.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
        backend: "triton", "numba", "torch" or None; torch norms the scalars, except for "triton".

    Source: Brehmer et al.: Geometric algebra transformer, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> x, scalars = clifford.EquiLayerNorm()(torch.randn(16, 100, 8), torch.randn(100, 4))
        >>> x.shape, scalars.shape
        (torch.Size([16, 100, 8]), torch.Size([100, 4]))
    """

    weight: nn.Parameter | None
    scalar_weight: nn.Parameter | None

    def __init__(
        self,
        algebra: Algebra = PGA,
        eps: float = 0.01,
        *,
        gains: tuple[int, int] | None = None,
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__(algebra, blade_dim, backend)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(algebra.n + 1, gains[0])) if gains else None
        self.scalar_weight = nn.Parameter(torch.ones(gains[1])) if gains else None

    def forward(self, x: Tensor, scalars: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised features.

        Args:
            x: multivectors (B, batch…, F).
            scalars: (batch…, S).

        Returns:
            Tensors of the shapes of x and scalars.
        """
        self.check(x)
        given = (x, self.weight), self.algebra, self.blade_dim, self.backend
        y = _layer_norm(*given, self.eps, self.weight is not None).to(x.dtype)
        return y, self._of_scalars(scalars) if scalars.shape[-1] else scalars

    def _of_scalars(self, scalars: Tensor) -> Tensor:
        """Layer norm, on a GPU by a program: torch's kernel has a block of threads for each row."""
        own = self.scalar_weight
        gains = None if own is None else own.to(scalars.dtype)
        if backend_on(self.backend, scalars.device.type) != "triton":
            return functional.layer_norm(scalars, scalars.shape[-1:], gains)
        weight = None if gains is None else gains.unsqueeze(0)
        given = (scalars.unsqueeze(0), weight), _SCALARS, 0, "triton"
        return _scalar_norm(*given, _SCALAR_EPS, gains is not None).squeeze(0)


_SCALARS = Algebra(())
"""The algebra whose multivectors are scalars."""

_SCALAR_EPS = 1e-5
"""Of torch's layer norm."""


def _norm_words(algebra: Algebra, eps: float, gains: bool) -> tuple[str, ...]:
    return (float(eps).hex(), *(["gains"] if gains else []))


_layer_norm = RowFunction(program_rows("layer_norm", _norm_words), "x", widened, weight="n+1 F")
_scalar_norm = RowFunction(program_rows("scalar_norm", _norm_words), "x", widened, weight="1 F")


class GradeDropout(MultivectorModule):
    """In training, each grade of each multivector is 0 with probability p, else times 1/(1 − p).

    Scalars are dropped one by one, as in torch's dropout.

    Args:
        p: probability.
        algebra: the algebra of the multivectors.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
        backend: "triton", "numba", "torch" or None; dropout is torch's own on every backend.

    Source: Brehmer et al.: Geometric algebra transformer, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> x, scalars = clifford.GradeDropout(0.1)(torch.randn(16, 100, 8), torch.randn(100, 4))
        >>> x.shape, scalars.shape
        (torch.Size([16, 100, 8]), torch.Size([100, 4]))
    """

    _grades: Tensor

    def __init__(
        self,
        p: float = 0.5,
        algebra: Algebra = PGA,
        *,
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__(algebra, blade_dim, backend)
        if not 0 <= p < 1:
            raise ShapeError(
                f"p is {p}: it is the probability that a grade is dropped, at least 0 and below "
                "1. Pass p=0.1, for example, or 0 for no dropout."
            )
        self.p = p
        self.register_buffer("_grades", torch.tensor(algebra.grades), persistent=False)

    def forward(self, x: Tensor, scalars: Tensor) -> tuple[Tensor, Tensor]:
        """The features with grades dropped at random, in training.

        Args:
            x: multivectors (B, batch…, F).
            scalars: (batch…, S).

        Returns:
            Tensors of the shapes of x and scalars.
        """
        self.check(x)
        if not self.training or not self.p:
            return x, scalars
        first = self.blades_first(x)
        kept = functional.dropout(first.new_ones(*first.shape[1:], self.algebra.n + 1), self.p)
        factors = kept.index_select(-1, self._grades).movedim(-1, 0)
        return self.blades_back(first * factors), functional.dropout(scalars, self.p)


def _tables(move: tuple[Map, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Sources and targets of a move's terms, and their signs: (terms, maps), one a row."""
    terms = torch.tensor([(*term, k) for k, of in enumerate(move) for term in of])
    source, target, sign, of_map = terms.unbind(1)
    signs = functional.one_hot(of_map, len(move)) * sign.unsqueeze(1)
    return source, target, signs.to(torch.get_default_dtype())


def linear_maps(
    algebra: Algebra, pseudoscalar: bool, blade_dim: int, backend: str | None
) -> Callable[..., MixedLinear]:
    """(in_features, out_features, in_scalars, out_scalars=0, bias=True) -> a network's map."""
    return functools.partial(
        MixedLinear,
        algebra=algebra,
        pseudoscalar=pseudoscalar,
        blade_dim=blade_dim,
        backend=backend,
    )
