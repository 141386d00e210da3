"""Distances between clouds under a kernel.

    loss(a, x, b, y) = ½ Σ a_i a_j k(x_i, x_j) + ½ Σ b_i b_j k(y_i, y_j) − Σ a_i b_j k(x_i, y_j)

with the kernel k of a name: energy −|x − y|, gaussian exp(−|x − y|² / 2 blur²), laplacian
exp(−|x − y| / blur); or one of the user's.  Differentiable to any order in weights and points.
Weights may be of any sign and mass; the energy is a distance where the masses of a and b agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchweft.errors import DTypeError
from torchweft.reductions.engine.reduction import reduce
from torchweft.reductions.engine.whole import whole
from torchweft.reductions.formula.node import Node, node, var
from torchweft.reductions.transport.clouds import centred, check_clouds, widened
from torchweft.reductions.transport.softmin import formula_of_points, require_lazy

__all__ = ["LOSS_KERNELS", "kernel_loss", "kernel_potentials"]

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Σ_j k(x_i, y_j) w_j, of x, y and w."""


def _distance(x: Node, y: Node) -> Node:
    return node("sqrt", node("sqdist", x, y))


# points are in units of the blur
LOSS_KERNELS: dict[str, Callable[[Node, Node], Node]] = {
    "energy": lambda x, y: -_distance(x, y),
    "gaussian": lambda x, y: node("exp", -0.5 * node("sqdist", x, y)),
    "laplacian": lambda x, y: node("exp", -_distance(x, y)),
}


def kernel_loss(
    kernel: str | Callable[..., Any],
    a: Tensor,
    x: Tensor,
    b: Tensor,
    y: Tensor,
    *,
    blur: float = 0.05,
    lazily: bool = False,
) -> Tensor:
    """½ ⟨a, K(x, x) a⟩ + ½ ⟨b, K(y, y) b⟩ − ⟨a, K(x, y) b⟩, (*batch)

    Args:
        kernel: a name of LOSS_KERNELS, a formula of X and Y, or a function, see `SamplesLoss`.
        a: (*batch, M) weights.
        x: (*batch, M, D) points.
        b: (*batch, N) weights.
        y: (*batch, N, D) points.
        blur: width of the kernel; the energy distance and formulas have none.
        lazily: whether a function returns lazy tensors.
    """
    check_clouds(a, x, b, y)
    dtype = x.dtype
    a, x, b, y = _placed(kernel, a, x, b, y)
    product = _product(kernel, blur, lazily)
    own = 0.5 * (a * product(x, x, a)).sum(-1) + 0.5 * (b * product(y, y, b)).sum(-1)
    return whole().total(own - (a * product(x, y, b)).sum(-1)).to(dtype)


def kernel_potentials(
    kernel: str | Callable[..., Any],
    a: Tensor,
    x: Tensor,
    b: Tensor,
    y: Tensor,
    *,
    blur: float = 0.05,
    lazily: bool = False,
) -> tuple[Tensor, Tensor]:
    """K(x, x) a − K(x, y) b, (*batch, M), and K(y, y) b − K(y, x) a, (*batch, N).

    They are the derivatives of `kernel_loss`, which has the same arguments, by the weights.
    """
    check_clouds(a, x, b, y)
    dtype = x.dtype
    a, x, b, y = _placed(kernel, a, x, b, y)
    product = _product(kernel, blur, lazily)
    f = product(x, x, a) - product(x, y, b)
    return f.to(dtype), (product(y, y, b) - product(y, x, a)).to(dtype)


def _placed(
    kernel: str | Callable[..., Any], a: Tensor, x: Tensor, b: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is computed with: a kernel of the user's sees the points where they are."""
    a, x, b, y = widened(a, x, b, y)
    if isinstance(kernel, str) and kernel in LOSS_KERNELS:
        x, y, _ = centred(x, y)
    return a, x, b, y


def _product(kernel: str | Callable[..., Any], blur: float, lazily: bool) -> Product:
    if not isinstance(kernel, str):
        return _product_of_function(kernel, blur, lazily)
    named = LOSS_KERNELS.get(kernel)
    scale = 1.0 if named is None or kernel == "energy" else 1 / blur

    def product(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        dim = x.shape[-1]
        if named is None:
            formula = formula_of_points("kernel", kernel, dim)
        else:
            formula = named(var(0, dim, 0), var(1, dim, 1))
        columns = (scale * x, scale * y, weights.unsqueeze(-1))
        result = reduce("Sum", formula * var(2, 1, 1), columns, 1)
        assert isinstance(result, Tensor)
        return result.squeeze(-1)

    return product


def _product_of_function(kernel: Callable[..., Any], blur: float, lazily: bool) -> Product:
    def product(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        flat = [z.reshape(-1, *z.shape[-2:]) for z in (x, y)]
        matrix = kernel(*flat, blur=blur, use_keops=lazily, ranges=None)
        if lazily:
            require_lazy("kernel", matrix)
        elif not isinstance(matrix, Tensor):
            raise DTypeError(
                f"kernel returned a {type(matrix).__name__}: it must return the matrix of all "
                "pairs, a tensor. Pass backend='online' for a function that makes lazy tensors."
            )
        found: Tensor = matrix @ weights.reshape(len(flat[1]), -1, 1)
        return found.reshape(x.shape[:-1])

    return product
