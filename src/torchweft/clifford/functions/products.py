"""Products of multivectors and the fused chain GELU → product → norm.

    z_j = Σ_(i,k) sign(i,k) · w[path] · x_i · y_k

Every product takes multivectors (B, batch…, F), or (batch…, F, B) with `blade_dim=-1`; batch
dimensions and features broadcast.  Source: the Cayley table, see docs/families/clifford.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchweft.clifford.algebra import Algebra
from torchweft.clifford.functions.checks import (
    backend_for,
    blades_first,
    blades_last,
    check_bias,
    check_weight,
    flat,
    norm_words,
    together,
)
from torchweft.clifford.functions.rows import Validated, run_rows
from torchweft.clifford.matrices.operators import fully_connected, layer, linear
from torchweft.clifford.programs.programs import key
from torchweft.core.operators.operands import same_kind

__all__ = [
    "clifford_layer",
    "fully_connected_geometric_product",
    "fused_gelu_fcgp_norm_2d",
    "fused_gelu_fcgp_norm_3d",
    "fused_gelu_sgp_norm_2d",
    "fused_gelu_sgp_norm_3d",
    "gelu_geometric_product_norm",
    "geometric_product",
    "grade_linear",
    "inner",
    "left_contraction",
    "regressive",
    "right_contraction",
    "wedge",
]


def geometric_product(
    x: Tensor,
    y: Tensor,
    algebra: Algebra,
    weight: Tensor | None = None,
    *,
    blade_dim: int = 0,
    backend: str | None = None,
) -> Tensor:
    """z_j = Σ_(i,k) sign(i,k) · w[path] · x_i · y_k, e_i e_k = sign · e_j.

    Args:
        x: multivectors, (B, batch…, F).
        y: the right factors, the same layout; batch and features broadcast.
        algebra: whose product.
        weight: (F, P), one number a feature and path, in the order of `algebra.paths`; None is 1.
        blade_dim: 0, or −1 for blades last.
        backend: None chooses.

    Returns:
        The products, in x's dtype; sums are in float32 (float64 for float64).

    Error: |z − z*| ≤ u|z*| + 4√K·u_acc·Σ|w x y|, K ≤ B terms.  Gradients of any order, in one pass.
    Moves three multivector tensors, five more for the gradient.
    """
    return _product("geometric", x, y, algebra, weight, blade_dim, backend)


def wedge(
    x: Tensor, y: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x ∧ y: the part of x y whose grade is the sum of theirs.  As `geometric_product`."""
    return _product("wedge", x, y, algebra, None, blade_dim, backend)


def inner(
    x: Tensor, y: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x · y: the part of x y whose grade is the difference of theirs.  As `geometric_product`."""
    return _product("inner", x, y, algebra, None, blade_dim, backend)


def left_contraction(
    x: Tensor, y: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x ⌋ y: the part of x y whose grade is y's less x's.  As `geometric_product`."""
    return _product("left_contraction", x, y, algebra, None, blade_dim, backend)


def right_contraction(
    x: Tensor, y: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x ⌊ y: the part of x y whose grade is x's less y's.  As `geometric_product`."""
    return _product("right_contraction", x, y, algebra, None, blade_dim, backend)


def regressive(
    x: Tensor, y: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x ∨ y, dual(x ∨ y) = dual(x) ∧ dual(y), in any metric.  As `geometric_product`."""
    return _product("regressive", x, y, algebra, None, blade_dim, backend)


def _product(
    kind: str,
    x: Tensor,
    y: Tensor,
    algebra: Algebra,
    weight: Tensor | None,
    blade_dim: int,
    backend: str | None,
) -> Tensor:
    def validate() -> Validated:
        a, b, *weights = same_kind(x=x, y=y, weight=weight)
        a, b = together(*blades_first(algebra, blade_dim, x=a, y=b))
        for w in weights:
            check_weight(w, {"F": a.shape[-1], "P": len(algebra.paths)})
        program = key("product", algebra, kind, *["weighted"] * len(weights))
        return Validated(program, backend_for(backend, algebra, [a]), (a, b), weights)

    given = () if weight is None else (weight,)
    return run_rows((kind,), algebra, blade_dim, backend, (x, y), given, validate)


def fully_connected_geometric_product(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    algebra: Algebra,
    *,
    blade_dim: int = 0,
    backend: str | None = None,
) -> Tensor:
    """z_j[m] = Σ_(p,n) W[p,n,m] Σ_(i,k) sign(i,k) · x_i[n] · y_k[n], the pairs of path p.

    Args:
        x: multivectors, (B, batch…, F_in).
        y: the right factors, the same layout.
        weight: (P, F_in, F_out), a matrix a path, in the order of `algebra.paths`.
        algebra: whose product.
        blade_dim: 0, or −1 for blades last.
        backend: None chooses.

    Returns:
        (B, batch…, F_out) in x's dtype.  float32 matrix products follow torch's TF32 setting.
    """
    x, y, weight = same_kind(x=x, y=y, weight=weight)
    x, y = together(*blades_first(algebra, blade_dim, x=x, y=y))
    return blades_last(_fully_connected(x, y, weight, algebra, backend), blade_dim)


def _fully_connected(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    algebra: Algebra,
    backend: str | None,
    gated: bool = False,
    ending: Sequence[str] = (),
) -> Tensor:
    check_weight(weight, {"P": len(algebra.paths), "F_in": x.shape[-1], "F_out": None})
    chosen, words = backend_for(backend, algebra, [x]), " ".join(ending)
    z = fully_connected(flat(x), flat(y), weight, algebra, chosen, gated=gated, ending=words)
    return z.reshape(*x.shape[:-1], weight.shape[-1])


def gelu_geometric_product_norm(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    algebra: Algebra,
    normalize: bool = True,
    fully_connected: bool = False,
    eps: float = 1e-6,
    norm: str = "euclidean",
    *,
    blade_dim: int = 0,
    backend: str | None = None,
) -> Tensor:
    """norm(product(gelu(x), gelu(y))) in one pass: `gelu`, weighted product, `rms_norm`.

    Args:
        x: multivectors, (B, batch…, F).
        y: the right factors, the same layout.
        weight: (F, P), or (P, F_in, F_out) of the fully connected product.
        algebra: whose product.
        normalize: whether the norm follows.
        fully_connected: which product.
        eps: as in `rms_norm`.
        norm: as in `rms_norm`.
        blade_dim: 0, or −1 for blades last.
        backend: None chooses.

    Returns:
        (B, batch…, F or F_out) in x's dtype: rounded once, whatever the sizes in between.

    Moves three multivector tensors, the gradient five; nothing is saved but the inputs.
    """
    if fully_connected:
        x, y, weight = same_kind(x=x, y=y, weight=weight)
        x, y = together(*blades_first(algebra, blade_dim, x=x, y=y))
        ending = norm_words(normalize, norm, eps)
        z = _fully_connected(x, y, weight, algebra, backend, True, ending)
        return blades_last(z, blade_dim)

    def validate() -> Validated:
        a, b, w = same_kind(x=x, y=y, weight=weight)
        a, b = together(*blades_first(algebra, blade_dim, x=a, y=b))
        check_weight(w, {"F": a.shape[-1], "P": len(algebra.paths)})
        program = key("chain", algebra, *norm_words(normalize, norm, eps))
        return Validated(program, backend_for(backend, algebra, [a]), (a, b), (w,))

    called = ("chain", normalize, norm, float(eps))
    return run_rows(called, algebra, blade_dim, backend, (x, y), (weight,), validate)


def grade_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    algebra: Algebra,
    *,
    blade_dim: int = 0,
    backend: str | None = None,
) -> Tensor:
    """z_j = x_j @ W[grade of j], and the bias on the scalar, so that it stays equivariant.

    Args:
        x: multivectors, (B, batch…, F_in).
        weight: (n+1, F_in, F_out), a matrix a grade.
        bias: (F_out,) or None.
        algebra: theirs.
        blade_dim: 0, or −1 for blades last.
        backend: None chooses; matrix products are torch's own on every backend.

    Returns:
        (B, batch…, F_out) in x's dtype.
    """
    x, weight, *biases = same_kind(x=x, weight=weight, bias=bias)
    (x,) = blades_first(algebra, blade_dim, x=x)
    check_weight(weight, {"n+1": algebra.n + 1, "F_in": x.shape[-1], "F_out": None})
    check_bias(biases, weight.shape[-1])
    backend_for(backend, algebra, [x])
    z = linear(flat(x), weight, biases[0] if biases else None, algebra.signature)
    return blades_last(z.reshape(*x.shape[:-1], weight.shape[-1]), blade_dim)


def clifford_layer(
    x: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor,
    weight: Tensor,
    algebra: Algebra,
    normalize: bool = True,
    fully_connected: bool = False,
    eps: float = 1e-6,
    norm: str = "euclidean",
    *,
    blade_dim: int = 0,
    backend: str | None = None,
) -> Tensor:
    """`gelu_geometric_product_norm` of x and y = `grade_linear(x)`.

    Args:
        x: multivectors, (B, batch…, F).
        linear_weight: (n+1, F, F).
        linear_bias: (F,), on the scalar.
        weight: (F, P), or (P, F, F) of the fully connected product.
        algebra: theirs.
        normalize: whether the norm follows.
        fully_connected: which product.
        eps: as in `rms_norm`.
        norm: as in `rms_norm`.
        blade_dim: 0, or −1 for blades last.
        backend: None chooses.

    With the weighted product, the linear's gradient is added to the product's without a pass.
    """
    x, linear_weight, linear_bias, weight = same_kind(
        x=x, linear_weight=linear_weight, linear_bias=linear_bias, weight=weight
    )
    (x,) = blades_first(algebra, blade_dim, x=x)
    features = x.shape[-1]
    check_weight(linear_weight, {"n+1": algebra.n + 1, "F_in": features, "F_out": features})
    if fully_connected:
        y = grade_linear(x, linear_weight, linear_bias, algebra, backend=backend)
        z = gelu_geometric_product_norm(
            x, y, weight, algebra, normalize, True, eps, norm, backend=backend
        )
        return blades_last(z, blade_dim)
    check_weight(weight, {"F": features, "P": len(algebra.paths)})
    ending = " ".join(norm_words(normalize, norm, eps))
    chosen = backend_for(backend, algebra, [x])
    by_path = weight.T.contiguous()
    z = layer(flat(x), linear_weight, linear_bias, by_path, algebra.signature, ending, chosen)
    return blades_last(z.reshape(x.shape), blade_dim)


_PLANE, _SPACE = Algebra((1, 1)), Algebra((1, 1, 1))


def fused_gelu_sgp_norm_2d(x: Tensor, y: Tensor, weight: Tensor, normalize: bool = True) -> Tensor:
    """`gelu_geometric_product_norm` in Cl(2,0), weight (F, 10)."""
    return gelu_geometric_product_norm(x, y, weight, _PLANE, normalize)


def fused_gelu_sgp_norm_3d(x: Tensor, y: Tensor, weight: Tensor, normalize: bool = True) -> Tensor:
    """`gelu_geometric_product_norm` in Cl(3,0), weight (F, 20)."""
    return gelu_geometric_product_norm(x, y, weight, _SPACE, normalize)


def fused_gelu_fcgp_norm_2d(x: Tensor, y: Tensor, weight: Tensor, normalize: bool = True) -> Tensor:
    """`gelu_geometric_product_norm` in Cl(2,0), fully connected, weight (10, F_in, F_out)."""
    return gelu_geometric_product_norm(x, y, weight, _PLANE, normalize, True)


def fused_gelu_fcgp_norm_3d(x: Tensor, y: Tensor, weight: Tensor, normalize: bool = True) -> Tensor:
    """`gelu_geometric_product_norm` in Cl(3,0), fully connected, weight (20, F_in, F_out)."""
    return gelu_geometric_product_norm(x, y, weight, _SPACE, normalize, True)
