"""Functions of multivectors: products, the fused chain, linear maps, norms, gates, involutions.

    z_j = Σ_(i,k) sign(i,k) · w[path] · x_i · y_k

All take multivectors (B, batch…, F), or (batch…, F, B) with `blade_dim=-1`; batch dimensions and
features of products broadcast.  16-bit numbers are computed in float32.  Source: the Cayley table,
see docs/families/clifford.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from torchweft.clifford.algebra import Algebra
from torchweft.clifford.calls import RowFunction, norm_words, program_rows
from torchweft.clifford.matrices import operators
from torchweft.core.operators.operands import as_given, check_tensors, widened
from torchweft.errors import DTypeError, ShapeError

__all__ = [
    "clifford_layer",
    "conjugate",
    "dual",
    "fully_connected_geometric_product",
    "fused_gelu_fcgp_norm_2d",
    "fused_gelu_fcgp_norm_3d",
    "fused_gelu_sgp_norm_2d",
    "fused_gelu_sgp_norm_3d",
    "gelu",
    "gelu_geometric_product_norm",
    "geometric_product",
    "grade_involution",
    "grade_linear",
    "grade_project",
    "inner",
    "left_contraction",
    "norm",
    "regressive",
    "reverse",
    "right_contraction",
    "rms_norm",
    "silu",
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
        algebra: that defines the product.
        weight: (F, P), one number a feature and path, in the order of `algebra.paths`; None is 1.
        blade_dim: 0, or −1 for blades last.
        backend: None chooses.

    Returns:
        The products, in x's dtype; sums are in float32 (float64 for float64).

    Error: |z − z*| ≤ u|z*| + 4√K·u_acc·Σ|w x y|, K ≤ B terms.  Gradients of any order, in one pass.
    Moves three multivector tensors, five more for the gradient.
    """
    words = ("geometric",) if weight is None else ("geometric", "weighted")
    return _product((x, y, weight), algebra, blade_dim, backend, *words)


def wedge(
    x: Tensor, y: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x ∧ y: the part of x y whose grade is the sum of theirs.  As `geometric_product`."""
    return _product((x, y), algebra, blade_dim, backend, "wedge")


def inner(
    x: Tensor, y: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x · y: the part of x y whose grade is the difference of theirs.  As `geometric_product`."""
    return _product((x, y), algebra, blade_dim, backend, "inner")


def left_contraction(
    x: Tensor, y: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x ⌋ y: the part of x y whose grade is y's less x's.  As `geometric_product`."""
    return _product((x, y), algebra, blade_dim, backend, "left_contraction")


def right_contraction(
    x: Tensor, y: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x ⌊ y: the part of x y whose grade is x's less y's.  As `geometric_product`."""
    return _product((x, y), algebra, blade_dim, backend, "right_contraction")


def regressive(
    x: Tensor, y: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x ∨ y, dual(x ∨ y) = dual(x) ∧ dual(y), in any metric.  As `geometric_product`."""
    return _product((x, y), algebra, blade_dim, backend, "regressive")


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
        algebra: that defines the product.
        blade_dim: 0, or −1 for blades last.
        backend: None chooses.

    Returns:
        (B, batch…, F_out) in x's dtype.  float32 matrix products follow torch's TF32 setting.
    """
    if weight is None:
        check_tensors(weight=weight)
    return _fully_connected((x, y, weight), algebra, blade_dim, backend, False, False)


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
        algebra: that defines the product.
        normalize: whether the norm follows.
        fully_connected: which product.
        eps: as in `rms_norm`.
        norm: as in `rms_norm`.
        blade_dim: 0, or −1 for blades last.
        backend: None chooses.

    Returns:
        Multivectors (B, batch…, F or F_out) in x's dtype, rounded once, whatever the sizes in
        between.

    Moves three multivector tensors, the gradient five; nothing is saved but the inputs.
    """
    call = _fully_connected if fully_connected else _chain
    gated = (True,) if fully_connected else ()
    if weight is None:
        check_tensors(weight=weight)
    tensors = (x, y, weight)
    return call(tensors, algebra, blade_dim, backend, *gated, normalize, norm, float(eps))


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
        algebra: of the multivectors.
        blade_dim: 0, or −1 for blades last.
        backend: None chooses; matrix products are torch's own on every backend.

    Returns:
        (B, batch…, F_out) in x's dtype.
    """
    return _linear((x, weight, bias), algebra, blade_dim, backend)


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
        algebra: of the multivectors.
        normalize: whether the norm follows.
        fully_connected: which product.
        eps: as in `rms_norm`.
        norm: as in `rms_norm`.
        blade_dim: 0, or −1 for blades last.
        backend: None chooses.

    With the weighted product, the linear's gradient is added to the product's without a pass.
    """
    call = _fully_connected_layer if fully_connected else _layer
    tensors = (x, linear_weight, linear_bias, weight)
    return call(tensors, algebra, blade_dim, backend, normalize, norm, float(eps))


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


def norm(x: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None) -> Tensor:
    """√|⟨x̃ x⟩₀| = √|Σ_j q_j x_j²|, q_j the product of the blade's metric entries.

    Shape (1, batch…, F), or (batch…, F, 1); its gradient at 0 is 0.
    """
    return _norm((x,), algebra, blade_dim, backend)


def rms_norm(
    x: Tensor,
    algebra: Algebra,
    *,
    eps: float = 1e-6,
    norm: str = "euclidean",
    blade_dim: int = 0,
    backend: str | None = None,
) -> Tensor:
    """x_j / √(s_g + eps), s_g = mean over the features of Σ_(j∈g) x_j², grade g by grade.

    Args:
        x: multivectors, (B, batch…, F).
        algebra: of the multivectors.
        eps: keeps the root away from 0.
        norm: "euclidean", or "metric": s_g = mean of |Σ_(j∈g) q_j x_j²|, q_j the product of the
            blade's metric entries, invariant under every versor; a grade without a non-null blade
            is then not rescaled.
        blade_dim: 0, or −1 for blades last.
        backend: None chooses.
    """
    return _rms_norm((x,), algebra, blade_dim, backend, True, norm, float(eps))


def gelu(x: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None) -> Tensor:
    """x · Φ(x₀), Φ(t) = ½ (1 + erf(t/√2)): each multivector gated by its own scalar.

    Args:
        x: multivectors, (B, batch…, F).
        algebra: of the multivectors.
        blade_dim: 0, or −1 for blades last.
        backend: None chooses.
    """
    return _gelu((x,), algebra, blade_dim, backend)


def silu(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    algebra: Algebra,
    *,
    blade_dim: int = 0,
    backend: str | None = None,
) -> Tensor:
    """x_j · σ(a[g] t_g + b[g]), t_0 = x₀ and t_g = Σ_(j∈g) q_j x_j²: each grade by its own gate.

    Args:
        x: multivectors, (B, batch…, F).
        a: (n+1, F), a number a grade and feature.
        b: (n+1, F), likewise.
        algebra: of the multivectors; its metric gives q_j, the product of a blade's entries.
        blade_dim: 0, or −1 for blades last.
        backend: None chooses.
    """
    return _silu((x, a, b), algebra, blade_dim, backend)


def reverse(
    x: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x̃: every blade's vectors in the opposite order, (−1)^(g(g−1)/2) on grade g."""
    return _turned((x,), algebra, blade_dim, backend, "reverse")


def grade_involution(
    x: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x̂: every vector turned round, (−1)^g on grade g."""
    return _turned((x,), algebra, blade_dim, backend, "grade_involution")


def conjugate(
    x: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """Clifford conjugation, reverse and grade involution: (−1)^(g(g+1)/2) on grade g."""
    return _turned((x,), algebra, blade_dim, backend, "conjugate")


def grade_project(
    x: Tensor,
    grades: int | Iterable[int],
    algebra: Algebra,
    *,
    blade_dim: int = 0,
    backend: str | None = None,
) -> Tensor:
    """⟨x⟩_grades: the part of one grade or of several, zero elsewhere."""
    if not isinstance(grades, Iterable | int):
        raise DTypeError(
            f"grades is a {type(grades).__name__}: it must be a grade or several. "
            "Use grade_project(x, grades, algebra), say with grades=(0, 2)."
        )
    kept = {grades} if isinstance(grades, int) else set(grades)
    if isinstance(algebra, Algebra) and not kept <= set(range(algebra.n + 1)):
        raise ShapeError(
            f"grades are {sorted(kept)}: {algebra} has grades 0 to {algebra.n}. "
            "Leave out the others."
        )
    return _turned((x,), algebra, blade_dim, backend, "grade_project", *sorted(kept))


def dual(x: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None) -> Tensor:
    """Signed complements: e_A goes to that ±e_B with e_A ∧ (±e_B) = e_1…n, in any metric."""
    return _turned((x,), algebra, blade_dim, backend, "dual")


Rows = Sequence[Tensor]
Compute = Callable[[Rows, Rows], Tensor]


def _prepare_fully_connected(
    algebra: Algebra, backend: str, gated: bool, *norm_options: Any
) -> Compute:
    words = " ".join(norm_words(algebra, *norm_options))
    return lambda rows, parameters: operators.fully_connected(
        *rows, *parameters, algebra=algebra, backend=backend, gated=gated, ending=words
    )


def _prepare_linear(algebra: Algebra, _: str) -> Compute:
    return lambda rows, parameters: operators.linear(
        *rows, *parameters, signature=algebra.signature
    )


def _prepare_layer(algebra: Algebra, backend: str, *norm_options: Any) -> Compute:
    words = " ".join(norm_words(algebra, *norm_options))
    return lambda rows, parameters: operators.layer(
        *rows, *parameters, signature=algebra.signature, ending=words, backend=backend
    )


def _prepare_fully_connected_layer(algebra: Algebra, backend: str, *norm_options: Any) -> Compute:
    product = _prepare_fully_connected(algebra, backend, True, *norm_options)

    def compute(rows: Rows, parameters: Rows) -> Tensor:
        (x,), (linear_weight, bias, weight) = rows, parameters
        # a view of its own: the order in which autograd adds the gradients of x stays the same
        own = x.movedim(0, 0)
        y = operators.linear(own, linear_weight, bias, signature=algebra.signature)
        return product((x, y), (weight,))

    return compute


_SIGNS: dict[str, Callable[[int], int]] = {
    "reverse": lambda g: (-1) ** (g * (g - 1) // 2),
    "grade_involution": lambda g: (-1) ** g,
    "conjugate": lambda g: (-1) ** (g * (g + 1) // 2),
}
"""The sign that an involution gives a blade of grade g."""


def _turned_words(algebra: Algebra, name: str, *kept: int) -> list[str]:
    """The blade that each blade reads, and its sign."""
    if name == "dual":
        back = {place: (i, sign) for i, (place, sign) in enumerate(algebra.duals)}
        read = [back[j] for j in range(algebra.num_blades)]
    else:
        signs = [_SIGNS[name](g) if name in _SIGNS else int(g in kept) for g in algebra.grades]
        read = list(enumerate(signs))
    return [f"{place}:{sign}" for place, sign in read]


_product = RowFunction(program_rows("product", transposed=True), "xy", weight="F P")
_chain = RowFunction(program_rows("chain", norm_words, transposed=True), "xy", weight="F P")
_fully_connected = RowFunction(_prepare_fully_connected, "xy", weight="P F_in F_out")
_linear = RowFunction(_prepare_linear, "x", weight="n+1 F_in F_out", bias="F_out")
_layer = RowFunction(_prepare_layer, "x", linear_weight="n+1 F F", linear_bias="", weight="F P")
_fully_connected_layer = RowFunction(
    _prepare_fully_connected_layer,
    "x",
    linear_weight="n+1 F F",
    linear_bias="F",
    weight="P F F_out",
)
_norm = RowFunction(program_rows("magnitude"), "x", widened)
_rms_norm = RowFunction(program_rows("rms_norm", norm_words), "x", widened)
_gelu = RowFunction(program_rows("gelu"), "x", as_given)
_silu = RowFunction(program_rows("silu"), "x", widened, a="n+1 F", b="n+1 F")
_turned = RowFunction(program_rows("turned", _turned_words), "x", as_given)
