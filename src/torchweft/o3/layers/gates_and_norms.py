"""Layers that are not linear: activations, gates, norms, layers that divide by norms, dropout.

Activation   z_i = c_i f_i(x_i),  c = <f(t)²>^(-1/2) over normal t
Gate         scalars f(s),  and gated irreps f(g) y
Norm         n_u = √(Σ_m x_um²)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchweft.core.operators.operands import check_tensors, widened
from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.irreps.irreps import (
    Irrep,
    Irreps,
    IrrepsLike,
    MulIr,
    check_rows,
    join,
    parts_of,
    side_by_side,
    split,
)
from torchweft.o3.layers.networks import Function, normalize2mom, on_host
from torchweft.o3.tensor_product.instructions import checked_choice
from torchweft.o3.tensor_product.module import RowLayer
from torchweft.o3.tensor_product.products import paired

__all__ = [
    "Activation",
    "BatchNorm",
    "Dropout",
    "Gate",
    "LayerNorm",
    "Norm",
    "NormActivation",
    "irrep_of",
]


class Activation(RowLayer):
    """z_i = c_i f_i(x_i) for items that are scalars; items without a function stay as they are.

    The constant c_i scales f_i to second moment 1 over normal numbers, see `normalize2mom`.

    Args:
        irreps_in: irreps of x (…, D).
        acts: a function of a tensor, number by number, or None, for each item of irreps_in.
        backend: see `torchweft.o3`.

    Attributes:
        irreps_out: of z: an even function of 0o gives 0e, an odd one 0o.

    Raises:
        ShapeError: a wrong number of functions, a function for an item that is no scalar, or one
            for 0o that is neither even nor odd.

    Source: e3nn's layer of this name, https://github.com/e3nn/e3nn.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> layer = o3.Activation("8x0e+2x1o", [torch.tanh, None])
        >>> layer
        Activation [x ] (8x0e+2x1o -> 8x0e+2x1o)
        >>> layer(torch.randn(10, 14)).shape
        torch.Size([10, 14])
    """

    def __init__(
        self, irreps_in: IrrepsLike, acts: Sequence[Function | None], *, backend: str | None = None
    ) -> None:
        super().__init__(backend=backend)
        self.irreps_in = Irreps(irreps_in)
        if not isinstance(acts, list | tuple) or not all(f is None or callable(f) for f in acts):
            raise DTypeError(
                f"the functions are {acts!r}: they must be a list of functions of a tensor, or "
                "None. Pass, for example, [torch.tanh]."
            )
        if len(acts) != len(self.irreps_in):
            raise ShapeError(
                f"there are {len(acts)} functions but {self.irreps_in or 'no irreps'} has "
                f"{len(self.irreps_in)} items: each needs its own, or None. Pass one an item."
            )
        pairs = list(zip(self.irreps_in, acts, strict=True))
        self.irreps_out = Irreps([(item.mul, irrep_of(item, f)) for item, f in pairs])
        scaled = [None if f is None else normalize2mom(f, backend=backend) for f in acts]
        self.acts = nn.ModuleList(scaled)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        marks = "".join(" " if act is None else "x" for act in self.acts)
        return f"{type(self).__name__} [{marks}] ({self.irreps_in} -> {self.irreps_out})"

    def forward(self, x: Tensor, dim: int = -1) -> Tensor:
        """The activated rows.

        Args:
            x: (…, D).
            dim: the dimension of the irreps.

        Returns:
            A tensor of x's shape and dtype.
        """
        check_rows("x", x.movedim(dim, -1), self.irreps_in, self)
        parts = parts_of(x, [item.dim for item in self.irreps_in], dim)
        values = [
            part if act is None else act(part) for part, act in zip(parts, self.acts, strict=True)
        ]
        return side_by_side(values, dim) if values else x


class Gate(RowLayer):
    """z = (f(s), f(g) · y) of a row x with scalars s, gates g and gated irreps y, in sorted order.

    Args:
        irreps_scalars: irreps of s, scalars.
        act_scalars: a function for each of its items, or None.
        irreps_gates: irreps of g, scalars: one for each copy of y.
        act_gates: a function for each of its items, or None.
        irreps_gated: irreps of y.
        layout: see `torchweft.o3`.
        backend: see `torchweft.o3`.

    Attributes:
        irreps_in: of x (…, D): the three, sorted.
        irreps_out: of z (…, D_out).

    Raises:
        ShapeError: gates or scalars of degree above 0, or another number of gates than irreps.

    Functions are scaled as in Activation.

    Source: e3nn's layer of this name, https://github.com/e3nn/e3nn.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> gate = o3.Gate("8x0e", [torch.tanh], "4x0e", [torch.sigmoid], "4x1o")
        >>> gate.irreps_in, gate.irreps_out
        (12x0e+4x1o, 8x0e+4x1o)
        >>> gate(torch.randn(10, gate.irreps_in.dim)).shape
        torch.Size([10, 20])
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
        self.act_scalars = Activation(scalars, act_scalars, backend=backend)
        self.act_gates = Activation(gates, act_gates, backend=backend)
        pieces = list(paired(self.irreps_gated, self.act_gates.irreps_out.simplify()))
        products = [(y.mul, Irrep(y.ir.l, y.ir.p * g.ir.p)) for y, g in pieces]
        self.irreps_out = self.act_scalars.irreps_out + Irreps(products)
        # x is split into the scalars, the gates, and what one item of gates gates
        gated_items = [y for y, _ in pieces]
        every = Irreps([*self.irreps_scalars, *self.irreps_gates, *gated_items])
        in_order, place, _ = every.sort()
        self.irreps_in = in_order.simplify()
        self._sizes = [[mul for mul, _ in items] for _, items in groupby(in_order, lambda i: i.ir)]
        first, end = len(self.irreps_scalars), len(every) - len(gated_items)
        self._scalars, self._gates, self._gated = place[:first], place[first:end], place[end:]
        self._gated_copies = [y.mul for y in gated_items]

    def __repr__(self) -> str:
        return f"{type(self).__name__} ({self.irreps_in} -> {self.irreps_out})"

    def forward(self, x: Tensor) -> Tensor:
        """The activated scalars and the gated irreps.

        Args:
            x: (…, irreps_in.dim).

        Returns:
            (…, irreps_out.dim) in x's dtype.
        """
        check_rows("x", x, self.irreps_in, self)
        blocks = zip(split(x, self.irreps_in, self.layout), self._sizes, strict=True)
        pieces = [piece for block, sizes in blocks for piece in parts_of(block, sizes, -2)]
        scalars: Tensor = self.act_scalars(_scalars(pieces, self._scalars, x))
        if not self._gated:
            return scalars
        gates = self.act_gates(_scalars(pieces, self._gates, x)).unsqueeze(-1)
        each = parts_of(gates, self._gated_copies, -2)
        gated = [pieces[n] * gate for n, gate in zip(self._gated, each, strict=True)]
        return join([scalars.unsqueeze(-1), *gated], self.layout)


def _scalars(pieces: list[Tensor], numbers: Sequence[int], like: Tensor) -> Tensor:
    """(…, n): the pieces with these numbers, side by side."""
    parts = [pieces[n].squeeze(-1) for n in numbers]
    return side_by_side(parts, -1) if parts else like.narrow(-1, 0, 0)


def irrep_of(item: MulIr, f: Function | None) -> Irrep:
    """The irrep of f of these scalars."""
    if f is None:
        return item.ir
    if item.ir.l:
        raise ShapeError(
            f"a function was given for {item}: only scalars have one, of another irrep the result "
            "would not be equivariant. Pass None there, or gate it by a scalar."
        )
    if item.ir.p == 1:
        return item.ir
    t = torch.linspace(0, 10, 256, dtype=torch.float64, device="cpu")
    g = on_host(f) if isinstance(f, nn.Module) else f
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


class _Layer(RowLayer):
    """A layer on rows of irreps, block by block."""

    _shown: ClassVar[tuple[str, ...]] = ()
    """Attributes that the layer's text shows."""

    eps: float
    normalization: str
    weight: nn.Parameter | None
    bias: nn.Parameter | bool | None

    def __init__(self, irreps: IrrepsLike, layout: str, backend: str | None) -> None:
        super().__init__(layout, backend)
        self._irreps = Irreps(irreps)

    def __repr__(self) -> str:
        shown = "".join(f", {name}={getattr(self, name)}" for name in self._shown)
        return f"{type(self).__name__} ({self._irreps}{shown})"

    def _blocks(self, x: Tensor) -> list[Tensor]:
        """(…, mul, 2l+1) in the dtype of sums."""
        check_rows("x", x, self._irreps, self)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return split(wide, self._irreps, self.layout)

    def _rows(self, blocks: list[Tensor], like: Tensor) -> Tensor:
        return join(blocks, self.layout).to(like.dtype) if blocks else like

    def _divided(
        self,
        blocks: list[Tensor],
        mean: Callable[[Tensor, slice], Tensor],
        variance: Callable[[Tensor, slice], Tensor],
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """weight (block − mean) / √(variance + eps) + bias of each block, means and variances.

        Means and biases are those of 0e alone.  `mean` and `variance` take a block and the places
        of its copies in a vector of one number per scalar, or per copy.
        """
        found, means, variances = [], [], []
        first = scalar = 0
        for block, (mul, ir) in zip(blocks, self._irreps, strict=True):
            here, own = slice(first, first + mul), slice(scalar, scalar + mul)
            if ir.is_scalar():
                means.append(mean(block, own))
                block = block - means[-1]
                scalar += mul
            variances.append(variance(block, here))
            scale = (variances[-1] + self.eps).rsqrt()
            block = block * (scale if self.weight is None else scale * self.weight[here, None])
            if ir.is_scalar() and isinstance(self.bias, Tensor):
                block = block + self.bias[own, None]
            found.append(block)
            first += mul
        return found, means, variances

    def _mean_squares(self, block: Tensor) -> Tensor:
        """(…, mul): |x_u|² ("norm"), or its mean over components."""
        squares = block.square()
        return squares.sum(-1) if self.normalization == "norm" else squares.mean(-1)


class Norm(_Layer):
    """n_u = √(Σ_m x_um²): the length of every copy of every irrep.

    Args:
        irreps_in: irreps of x (…, D).
        squared: leave out the root.
        layout: see `torchweft.o3`.
        backend: see `torchweft.o3`.

    Attributes:
        irreps_out: num_irreps scalars.

    The gradient is 0 where the norm is 0.

    Source: e3nn's layer of this name, https://github.com/e3nn/e3nn.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> o3.Norm("0e+1o")(torch.tensor([-2.0, 0.0, 3.0, 4.0]))
        tensor([2., 5.])
    """

    _e3nn_parts = ("tp.",)

    def __init__(
        self,
        irreps_in: IrrepsLike,
        squared: bool = False,
        *,
        layout: str = "mul_ir",
        backend: str | None = None,
    ) -> None:
        super().__init__(irreps_in, layout, backend)
        self.irreps_in = self._irreps.simplify()
        self.irreps_out = Irreps([(item.mul, "0e") for item in self.irreps_in]).simplify()
        self.squared = squared

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.irreps_in})"

    def forward(self, x: Tensor) -> Tensor:
        """The norms.

        Args:
            x: (…, D).

        Returns:
            (…, num_irreps) in x's dtype.
        """
        x = widened(x)
        squares = [block.square().sum(-1) for block in self._blocks(x)]
        if not squares:
            return x
        found = torch.cat(squares, -1)
        # relu stops the infinite slope of the root at 0
        return (found if self.squared else found.relu().sqrt()).to(x.dtype)


class NormActivation(_Layer):
    """z_u = f(n_u + b_u) x_u / n_u with the norm n_u of copy u, or f(n_u) x_u without `normalize`.

    Args:
        irreps_in: irreps of x and z (…, D).
        scalar_nonlinearity: f, a function of each number.
        normalize: whether to divide by the norm.
        epsilon: the least norm, with normalize; None: 1e-8.
        bias: whether there is a parameter b (num_irreps,), zeros at first.
        layout: see `torchweft.o3`.
        backend: see `torchweft.o3`.

    Raises:
        ShapeError: an epsilon that is not positive, or one without normalize.

    Source: e3nn's layer of this name, https://github.com/e3nn/e3nn.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> layer = o3.NormActivation("4x0e+2x1o", torch.sigmoid)
        >>> layer(torch.randn(10, 10)).shape
        torch.Size([10, 10])
    """

    _e3nn_parts = ("norm.", "scalar_multiplier.")

    def __init__(
        self,
        irreps_in: IrrepsLike,
        scalar_nonlinearity: Callable[[Tensor], Tensor],
        normalize: bool = True,
        epsilon: float | None = None,
        bias: bool = False,
        *,
        layout: str = "mul_ir",
        backend: str | None = None,
    ) -> None:
        super().__init__(irreps_in, layout, backend)
        if epsilon is not None and not (normalize and epsilon > 0):
            raise ShapeError(
                f"epsilon is {epsilon} and normalize is {normalize}: it is the least norm that is "
                "divided by, and positive. Pass such an epsilon with normalize=True, or none."
            )
        self.irreps_in = self.irreps_out = self._irreps
        self.scalar_nonlinearity = scalar_nonlinearity
        self.normalize, self.bias = normalize, bias
        self.epsilon = 1e-8 if normalize and epsilon is None else epsilon
        if bias:
            self.biases = nn.Parameter(torch.zeros(self._irreps.num_irreps))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.irreps_in})"

    def forward(self, x: Tensor) -> Tensor:
        """The rows with activated norms.

        Args:
            x: (…, D).

        Returns:
            A tensor of x's shape and dtype.
        """
        blocks = self._blocks(x)
        if not blocks:
            return x
        squares = torch.cat([block.square().sum(-1) for block in blocks], -1)
        if self.epsilon is None:
            norms = squares.relu().sqrt()
        else:
            least = self.epsilon**2
            norms = torch.where(squares < least, least, squares).sqrt()
        scale = self.scalar_nonlinearity(norms + self.biases if self.bias else norms)
        scale = (scale / norms if self.normalize else scale).unsqueeze(-1)
        scales = scale.split([item.mul for item in self._irreps], -2)  # type: ignore[no-untyped-call]
        return self._rows([b * s for b, s in zip(blocks, scales, strict=True)], x)


class BatchNorm(_Layer):
    """z_u = weight_u (x_u − mean_u) / √(var_u + eps) + bias_u; mean and bias for 0e only.

    var is the mean over the batch of |x_u|² ("norm") or of its mean over components ("component"),
    after the mean was subtracted.

    Args:
        irreps: irreps of x and z (batch, …, D).
        eps: added to the variance.
        momentum: the weight of a new value in the running statistics.
        affine: whether there are parameters weight (num_irreps,) and bias (number of 0e,).
        reduce: over the inner dimensions of x, the "mean" or the "max" of the squares.
        instance: statistics of each entry of the batch, in place of running ones.
        include_bias: with affine, whether there is a bias.
        normalization: "component" or "norm".
        layout: see `torchweft.o3`.
        backend: see `torchweft.o3`.

    Raises:
        ShapeError: another reduce or normalization, or x without a batch.

    An empty batch leaves the running statistics as they are.

    Source: e3nn's layer of this name, https://github.com/e3nn/e3nn; its checkpoints load.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> norm = o3.BatchNorm("4x0e+2x1o")
        >>> z = norm(torch.randn(100, 10))
        >>> bool(z[:, :4].mean(0).abs().max() < 1e-6)
        True
    """

    _shown = ("eps", "momentum")

    running_mean: Tensor | None
    running_var: Tensor | None

    def __init__(
        self,
        irreps: IrrepsLike,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        reduce: str = "mean",
        instance: bool = False,
        include_bias: bool = True,
        normalization: str = "component",
        *,
        layout: str = "mul_ir",
        backend: str | None = None,
    ) -> None:
        super().__init__(irreps, layout, backend)
        self.irreps, self.eps, self.momentum = self._irreps, eps, momentum
        self.affine, self.include_bias, self.instance = affine, include_bias, instance
        self.reduce = checked_choice("reduce", reduce, ("mean", "max"))
        self.normalization = checked_choice("normalization", normalization, ("component", "norm"))
        scalars, every = self._irreps.count("0e"), self._irreps.num_irreps
        self.register_buffer("running_mean", None if instance else torch.zeros(scalars))
        self.register_buffer("running_var", None if instance else torch.ones(every))
        self.weight = nn.Parameter(torch.ones(every)) if affine else None
        self.bias = nn.Parameter(torch.zeros(scalars)) if affine and include_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """The normalised rows; in training the running statistics are updated.

        Args:
            x: (batch, …, D).

        Returns:
            A tensor of x's shape and dtype.
        """
        check_tensors(x=x)
        if x.dim() < 2:
            raise ShapeError(
                f"x is {tuple(x.shape)}: it must be (batch, …, {self.irreps.dim}). Pass x[None]."
            )
        check_rows("x", x, self._irreps, self)  # of the shape that was given
        flat = x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
        blocks = self._blocks(flat)
        if not blocks or not x.numel():
            return x
        means: list[Tensor] = []
        variances: list[Tensor] = []
        found, means, variances = self._divided(blocks, self._mean, self._variance)
        self._track(means, variances)
        return self._rows(found, x).reshape(x.shape)

    def _mean(self, block: Tensor, here: slice) -> Tensor:
        """(1 or batch, 1, mul, 1): the mean of each scalar."""
        if self.instance:
            return block.mean(1, keepdim=True)
        if self.training or self.running_mean is None:
            return block.mean((0, 1), keepdim=True)
        return self.running_mean[here].view(1, 1, -1, 1)

    def _variance(self, block: Tensor, here: slice) -> Tensor:
        """(1 or batch, 1, mul, 1): the variance of each copy."""
        if not self.training and self.running_var is not None:
            return self.running_var[here].view(1, 1, -1, 1)
        squares = self._mean_squares(block)
        of_each = squares.mean(1) if self.reduce == "mean" else squares.amax(1)
        if not self.instance:
            of_each = of_each.mean(0, keepdim=True)
        return of_each[:, None, :, None]

    @torch.no_grad()
    def _track(self, means: list[Tensor], variances: list[Tensor]) -> None:
        if not self.training:
            return
        for running, new in ((self.running_mean, means), (self.running_var, variances)):
            if running is not None and new:
                value = torch.cat([part.flatten() for part in new]).to(running.dtype)
                running.copy_((1 - self.momentum) * running + self.momentum * value)


class LayerNorm(_Layer):
    """z_u = weight_u (x_u − mean) / √(var + eps) + bias_u, mean and var over the copies of an item.

    var is the mean over copies of |x_u|² ("norm") or of its mean over components ("component");
    mean and bias exist for 0e only, other irreps keep their direction.

    Args:
        irreps: irreps of x and z (…, D).
        eps: added to the variance, so that a block of zeros stays zero.
        affine: whether there are parameters weight (num_irreps,) and bias (number of 0e,).
        normalization: "component" or "norm".
        layout: see `torchweft.o3`.
        backend: see `torchweft.o3`.

    Raises:
        ShapeError: another normalization.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> o3.LayerNorm("4x0e+2x1o")(torch.randn(10, 10)).shape
        torch.Size([10, 10])
    """

    _shown = ("eps",)

    def __init__(
        self,
        irreps: IrrepsLike,
        eps: float = 1e-5,
        affine: bool = True,
        normalization: str = "component",
        *,
        layout: str = "mul_ir",
        backend: str | None = None,
    ) -> None:
        super().__init__(irreps, layout, backend)
        self.irreps, self.eps, self.affine = self._irreps, eps, affine
        self.normalization = checked_choice("normalization", normalization, ("component", "norm"))
        self.weight = nn.Parameter(torch.ones(self._irreps.num_irreps)) if affine else None
        self.bias = nn.Parameter(torch.zeros(self._irreps.count("0e"))) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """The normalised rows.

        Args:
            x: (…, D).

        Returns:
            A tensor of x's shape and dtype.
        """
        x = widened(x)
        found, *_ = self._divided(
            self._blocks(x),
            lambda block, _: block.mean(-2, keepdim=True),
            lambda block, _: self._mean_squares(block).mean(-1)[..., None, None],
        )
        return self._rows(found, x)


class Dropout(_Layer):
    """z[b, u] = x[b, u] · k/(1−p), k = 1 with probability 1−p, else 0: one k for each copy u and b.

    All components of a copy are kept or dropped together, so the layer is equivariant.

    Args:
        irreps: irreps of x and z (b, …, D).
        p: the probability that a copy is dropped.
        layout: see `torchweft.o3`.
        backend: see `torchweft.o3`.

    Raises:
        ShapeError: a p that is no probability, or x without a batch.

    The identity in evaluation mode.  The random numbers are drawn as e3nn draws them.

    Source: e3nn's layer of this name, https://github.com/e3nn/e3nn.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> x = torch.ones(2, 7)
        >>> torch.equal(o3.Dropout("4x0e+1x1o", 0.5).eval()(x), x)
        True
    """

    _shown = ("p",)

    def __init__(
        self, irreps: IrrepsLike, p: float, *, layout: str = "mul_ir", backend: str | None = None
    ) -> None:
        super().__init__(irreps, layout, backend)
        if not 0 <= p <= 1:
            raise ShapeError(f"p is {p}: a probability must be from 0 to 1. Pass such a p.")
        self.irreps, self.p = self._irreps, p

    def forward(self, x: Tensor) -> Tensor:
        """The rows with copies dropped at random, the same ones for all inner dimensions.

        Args:
            x: (b, …, D).

        Returns:
            A tensor of x's shape and dtype.
        """
        check_rows("x", x, self.irreps, self)
        if not self.training or not self.irreps:
            return x
        if x.dim() < 2:
            raise ShapeError(
                f"x is {tuple(x.shape)}: it must be (batch, …, {self.irreps.dim}), each row of the "
                "batch drops copies of its own. Pass x[None]."
            )
        kept = [self._kept(x, mul).unsqueeze(2).expand(-1, -1, ir.dim) for mul, ir in self.irreps]
        inner = (1,) * (x.dim() - 2)
        return x * join(kept, self.layout).view(x.shape[0], *inner, self.irreps.dim)

    def _kept(self, x: Tensor, mul: int) -> Tensor:
        """(batch, mul): 0, or 1/(1−p)."""
        kept = x.new_empty(x.shape[0], mul)
        if self.p == 1:
            return kept.zero_()
        return kept.bernoulli_(1 - self.p).div_(1 - self.p) if self.p else kept.fill_(1)
