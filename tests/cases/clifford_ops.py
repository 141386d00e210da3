"""The Clifford operations as data: the public function, its arguments, its oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft import clifford
from torchweft.clifford import Algebra, reference

__all__ = ["OPS", "Op", "Unsigned"]


class Unsigned(Algebra):
    """An algebra whose Cayley table has lost its signs: the oracle on it gives magnitudes."""

    def cayley(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The table of absolute values."""
        return super().cayley(dtype).abs()


def _pairing(algebra: Algebra, like: Tensor) -> Tensor:
    """(B, B) [i, j]: e_i ∧ e_j = ± e_1…n; the dual of e_i is row i, whatever the metric."""
    flat = type(algebra)((1,) * algebra.n)
    return flat.cayley(like.dtype)[:, -1].to(like.device)


def _dual(x: Tensor, algebra: Algebra) -> Tensor:
    return torch.einsum("ij,i...->j...", _pairing(algebra, x), x)


def _regressive(x: Tensor, y: Tensor, algebra: Algebra) -> Tensor:
    wedge = reference.product(_dual(x, algebra), _dual(y, algebra), algebra, kind="wedge")
    return torch.einsum("ij,j...->i...", _pairing(algebra, x), wedge)


def _signed(sign: Callable[[int], int], x: Tensor, algebra: Algebra) -> Tensor:
    """Every grade by a sign of its own."""
    signs = torch.tensor([sign(g) for g in algebra.grades]).to(x)
    signs = signs.abs() if isinstance(algebra, Unsigned) else signs
    return torch.einsum("i,i...->i...", signs, x)


_SIGNS: dict[str, Callable[[int], int]] = {
    "reverse": lambda g: (-1) ** (g * (g - 1) // 2),
    "grade_involution": lambda g: (-1) ** g,
    "conjugate": lambda g: (-1) ** (g * (g + 1) // 2),
}


def _project(x: Tensor, algebra: Algebra, grades: tuple[int, ...]) -> Tensor:
    return _signed(lambda g: int(g in grades), x, algebra)


def _sandwich(r: Tensor, x: Tensor, algebra: Algebra) -> Tensor:
    left = reference.product(r, x, algebra)
    return reference.product(left, _signed(_SIGNS["reverse"], r, algebra), algebra)


def _norm(x: Tensor, algebra: Algebra) -> Tensor:
    squares = torch.tensor(algebra.squares).to(x)
    return torch.einsum("i,i...->...", squares, x * x).unsqueeze(0).abs().sqrt()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, algebra: Algebra) -> Tensor:
    out = torch.einsum("i...f,ifg->i...g", x, weight[list(algebra.grades)])
    return out if bias is None else torch.cat([out[:1] + bias, out[1:]])


def _chain(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    algebra: Algebra,
    normalize: bool = True,
    norm: str = "euclidean",
    eps: float = 1e-6,
    fully_connected: bool = False,
) -> Tensor:
    product = reference.fully_connected if fully_connected else _weighted
    out = product(reference.gate(x), reference.gate(y), weight, algebra)
    return reference.rms_norm(out, algebra, norm, eps) if normalize else out


def _weighted(x: Tensor, y: Tensor, weight: Tensor, algebra: Algebra) -> Tensor:
    return reference.product(x, y, algebra, weight)


def _plain(kind: str) -> Callable[..., Tensor]:
    def product(x: Tensor, y: Tensor, algebra: Algebra) -> Tensor:
        return reference.product(x, y, algebra, kind=kind)

    return product


class Op(NamedTuple):
    """A public function and what it must equal.

    Args:
        function: `function(**arguments, algebra=..., **options)`.
        arguments: the names of its differentiable arguments.
        oracle: of the same arguments by position, then algebra and options by name.
        weight: the axes of the weight: (F, G) features in and out, (P) paths, (N) grades.
        polynomial: as in `torchweft.testing.Case`.
        factors: as in `torchweft.testing.Case`.
        options: the mode.
    """

    function: Callable[..., Tensor]
    arguments: tuple[str, ...]
    oracle: Callable[..., Tensor]
    weight: str = "FP"
    polynomial: bool = True
    factors: int = 0
    options: Mapping[str, Any] = {}


def _products() -> dict[str, Op]:
    """The polynomials of the multivectors and of the weight."""
    pair, weighted = ("x", "y"), ("x", "y", "weight")
    kinds = ("wedge", "inner", "left_contraction", "right_contraction")
    fully_connected = clifford.fully_connected_geometric_product
    return {
        "geometric": Op(clifford.geometric_product, pair, _plain("geometric")),
        "weighted": Op(clifford.geometric_product, weighted, _weighted),
        # pairs of blades are factors of a matrix product, rounded for the units that form it
        "fully connected": Op(
            fully_connected, weighted, reference.fully_connected, "PFG", factors=1
        ),
        **{name: Op(getattr(clifford, name), pair, _plain(name)) for name in kinds},
        "regressive": Op(clifford.regressive, pair, _regressive),
        "sandwich": Op(clifford.sandwich, ("r", "x"), _sandwich),
        "grade_linear": Op(clifford.grade_linear, ("x", "weight", "bias"), _linear, "NFG"),
        "dual": Op(clifford.dual, ("x",), _dual),
        "grade_project": Op(clifford.grade_project, ("x",), _project, options={"grades": (0, 1)}),
        **{
            name: Op(getattr(clifford, name), ("x",), functools.partial(_signed, sign))
            for name, sign in _SIGNS.items()
        },
    }


EPS = 1.0
"""Large, so that rounding in no row near zero, and in no near-null vector, outweighs all others."""


def _others() -> dict[str, Op]:
    """What holds a root or the error function."""
    of_one = functools.partial(Op, arguments=("x",), polynomial=False)
    chain = functools.partial(
        Op,
        clifford.gelu_geometric_product_norm,
        ("x", "y", "weight"),
        _chain,
        polynomial=False,
    )
    connected = functools.partial(chain, weight="PFG", factors=1)
    bare, fc = {"normalize": False}, {"fully_connected": True}
    found = {
        "norm": of_one(clifford.norm, oracle=_norm),
        "gelu": of_one(clifford.gelu, oracle=lambda x, algebra: reference.gate(x)),
        "chain": chain(options=bare),
        "chain fully connected": connected(options=bare | fc),
    }
    for norm in ("euclidean", "metric"):
        mode = {"norm": norm, "eps": EPS}
        found[f"rms_norm {norm}"] = of_one(
            clifford.rms_norm, oracle=reference.rms_norm, options=mode
        )
        found[f"chain {norm}"] = chain(options=mode)
        found[f"chain fully connected {norm}"] = connected(options=mode | fc)
    return found


OPS = _products() | _others()
"""Each operation, those with a mode in every mode."""
