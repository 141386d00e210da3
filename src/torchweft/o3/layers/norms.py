"""Norms of irreps, layers that divide by them, and dropout of whole irreps.

n_u = √(Σ_m x_um²)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchweft.core.operators.operands import check_tensors
from torchweft.errors import ShapeError
from torchweft.o3.irreps.instructions import chosen
from torchweft.o3.irreps.irreps import Irreps, IrrepsLike
from torchweft.o3.irreps.layout import check_rows, join, split
from torchweft.o3.tensor_product.module import RowLayer

__all__ = [
    "BatchNorm",
    "Dropout",
    "LayerNorm",
    "Norm",
    "NormActivation",
]


class _Layer(RowLayer):
    """A layer on rows of irreps, block by block."""

    def __init__(self, irreps: IrrepsLike, layout: str, backend: str | None) -> None:
        super().__init__(layout, backend)
        self._irreps = Irreps(irreps)

    def _blocks(self, x: Tensor) -> list[Tensor]:
        """(…, mul, 2l+1) in the dtype of sums."""
        check_rows("x", x, self._irreps, self)
        return split(_wide(x), self._irreps, self.layout)

    def _rows(self, blocks: list[Tensor], like: Tensor) -> Tensor:
        return join(blocks, self.layout).to(like.dtype) if blocks else like


class Norm(_Layer):
    """n_u = √(Σ_m x_um²) for every copy, (…, num_irreps).

    Args:
        irreps_in: of x.
        squared: leave out the root.
        layout: "mul_ir" or "ir_mul", of x.
        backend: "torch" or None, which are the same; another raises BackendError.

    The gradient is 0 where the norm is.
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
        """(…, num_irreps) of x (…, D)."""
        squares = [block.square().sum(-1) for block in self._blocks(x)]
        if not squares:
            return x
        found = torch.cat(squares, -1)
        # relu stops the infinite slope of the root at 0
        return (found if self.squared else found.relu().sqrt()).to(x.dtype)


class NormActivation(_Layer):
    """z_u = f(n_u + b_u) x_u / n_u, or f(n_u) x_u without `normalize`.

    Args:
        irreps_in: of x.
        scalar_nonlinearity: f, a function of each number by itself.
        normalize: whether to divide by the norm.
        epsilon: the least norm, with normalize; None is 1e-8.
        bias: whether there is b (num_irreps,), zeros at first.
        layout: "mul_ir" or "ir_mul".
        backend: "torch" or None, which are the same; another raises BackendError.

    Raises:
        ShapeError: an epsilon that is not positive, or one without normalize.
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
        """(…, D) of x (…, D)."""
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
    """z_u = weight_u (x_u − mean_u) / √(var_u + eps) + bias_u; mean and bias for 0e alone.

    var is the mean over the batch of |x_u|² ("norm") or of its mean over components ("component"),
    the mean being taken off before.

    Args:
        irreps: of x.
        eps: added to the variance.
        momentum: weight of a new value in the running statistics.
        affine: whether there are weight (num_irreps,) and bias (number of 0e,).
        reduce: over the inner dimensions of x, "mean" or "max" of the squares.
        instance: statistics of each entry of the batch, instead of running ones.
        include_bias: with affine, whether there is a bias.
        normalization: "component" or "norm".
        layout: "mul_ir" or "ir_mul".
        backend: "torch" or None, which are the same; another raises BackendError.

    An empty batch leaves the running statistics as they are.
    """

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
        self.reduce = chosen("reduce", reduce, ("mean", "max"))
        self.normalization = chosen("normalization", normalization, ("component", "norm"))
        scalars, every = self._irreps.count("0e"), self._irreps.num_irreps
        self.register_buffer("running_mean", None if instance else torch.zeros(scalars))
        self.register_buffer("running_var", None if instance else torch.ones(every))
        self.weight = nn.Parameter(torch.ones(every)) if affine else None
        self.bias = nn.Parameter(torch.zeros(scalars)) if affine and include_bias else None

    def __repr__(self) -> str:
        return f"{type(self).__name__} ({self.irreps}, eps={self.eps}, momentum={self.momentum})"

    def forward(self, x: Tensor) -> Tensor:
        """(batch, …, D) of x (batch, …, D)."""
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
        found, first, scalar = [], 0, 0
        for block, item in zip(blocks, self._irreps, strict=True):
            here = slice(first, first + item.mul)
            if item.ir.is_scalar():
                mine = slice(scalar, scalar + item.mul)
                means.append(self._mean(block, mine))
                block = block - means[-1]
                scalar += item.mul
            variances.append(self._variance(block, here))
            scale = (variances[-1] + self.eps).rsqrt()
            block = block * (scale if self.weight is None else scale * _column(self.weight, here))
            if item.ir.is_scalar() and self.bias is not None:
                block = block + _column(self.bias, mine)
            found.append(block)
            first += item.mul
        self._track(means, variances)
        return self._rows(found, x).reshape(x.shape)

    def _mean(self, block: Tensor, here: slice) -> Tensor:
        """(1 or batch, 1, mul, 1), as the next."""
        if self.instance:
            return block.mean(1, keepdim=True)
        if self.training or self.running_mean is None:
            return block.mean((0, 1), keepdim=True)
        return _column(self.running_mean, here)

    def _variance(self, block: Tensor, here: slice) -> Tensor:
        if not self.training and self.running_var is not None:
            return _column(self.running_var, here)
        squares = block.square()
        squares = squares.sum(-1) if self.normalization == "norm" else squares.mean(-1)
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
    mean and bias are those of 0e alone, others keep their direction.

    Args:
        irreps: of x.
        eps: added to the variance, so that a block of zeros stays one.
        affine: whether there are weight (num_irreps,) and bias (number of 0e,).
        normalization: "component" or "norm".
        layout: "mul_ir" or "ir_mul".
        backend: "torch" or None, which are the same; another raises BackendError.
    """

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
        self.normalization = chosen("normalization", normalization, ("component", "norm"))
        self.weight = nn.Parameter(torch.ones(self._irreps.num_irreps)) if affine else None
        self.bias = nn.Parameter(torch.zeros(self._irreps.count("0e"))) if affine else None

    def __repr__(self) -> str:
        return f"{type(self).__name__} ({self.irreps}, eps={self.eps})"

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) of x (…, D)."""
        found, first, scalar = [], 0, 0
        for block, (mul, ir) in zip(self._blocks(x), self._irreps, strict=True):
            if ir.is_scalar():
                block = block - block.mean(-2, keepdim=True)
            squares = block.square()
            squares = squares.sum(-1) if self.normalization == "norm" else squares.mean(-1)
            scale = (squares.mean(-1) + self.eps).rsqrt()[..., None, None]
            if self.weight is not None:
                scale = scale * self.weight[first : first + mul, None]
            block = block * scale
            if ir.is_scalar() and self.bias is not None:
                block = block + self.bias[scalar : scalar + mul, None]
                scalar += mul
            found.append(block)
            first += mul
        return self._rows(found, x)


def _wide(x: Tensor) -> Tensor:
    """x in the dtype of sums."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) if isinstance(x, Tensor) else x


def _column(numbers: Tensor, here: slice) -> Tensor:
    """(1, 1, mul, 1)."""
    return numbers[here].view(1, 1, -1, 1)


class Dropout(_Layer):
    """z[b, u] = x[b, u] · k/(1−p), k = 1 with probability 1−p, else 0: one for each copy and b.

    Args:
        irreps: of x.
        p: the probability that a copy is dropped.
        layout: "mul_ir" or "ir_mul".
        backend: "torch" or None, which are the same; another raises BackendError.

    While training; else the identity.  The random numbers are drawn as e3nn draws them.
    """

    def __init__(
        self,
        irreps: IrrepsLike,
        p: float,
        *,
        layout: str = "mul_ir",
        backend: str | None = None,
    ) -> None:
        super().__init__(irreps, layout, backend)
        if not 0 <= p <= 1:
            raise ShapeError(f"p is {p}: a probability must be from 0 to 1. Pass such a p.")
        self.irreps, self.p = self._irreps, p

    def __repr__(self) -> str:
        return f"{type(self).__name__} ({self.irreps}, p={self.p})"

    def forward(self, x: Tensor) -> Tensor:
        """(b, …, D) of x (b, …, D); all inner dimensions have the same copies dropped."""
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
        return x * join(kept, self.layout).view(x.shape[0], *inner, -1)

    def _kept(self, x: Tensor, mul: int) -> Tensor:
        """(batch, mul): 0, or 1/(1−p)."""
        kept = x.new_empty(x.shape[0], mul)
        if self.p == 1:
            return kept.zero_()
        return kept.bernoulli_(1 - self.p).div_(1 - self.p) if self.p else kept.fill_(1)
