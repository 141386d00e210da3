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
    """z_j = Σ_(i,k) sign(i,k) · w[path] · x_i · y_k, with e_i e_k = sign(i,k) · e_j.

    Args:
        x: multivectors, (B, batch…, F), float16 to float64.
        y: the right factors, the same layout and dtype; batch and features broadcast.
        algebra: the algebra that defines the product.
        weight: (F, P), one number for each feature and path, in the order of `algebra.paths`; None:
            1.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        The products, (B, batch…, F) in x's dtype; sums are in float32 (float64 for float64).

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    Error: |z − z*| ≤ u|z*| + 4√K·2⁻²⁴·Σ|w x y|, K ≤ B terms, u the unit round-off of the dtype;
    2⁻⁵³ for float64.  Differentiable to any order; the same bits at every call.

    Cost: one kernel that moves three multivector tensors, five more for the gradient.

    Source: the Cayley table, see docs/families/clifford.md.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> space = clifford.Algebra((1, 1, 1))
        >>> x, y = torch.randn(8, 100, 16), torch.randn(8, 100, 16)
        >>> clifford.geometric_product(x, y, space).shape
        torch.Size([8, 100, 16])
        >>> weight = torch.randn(16, len(space.paths))
        >>> clifford.geometric_product(x, y, space, weight).shape
        torch.Size([8, 100, 16])
    """
    words = ("geometric",) if weight is None else ("geometric", "weighted")
    return _product((x, y, weight), algebra, blade_dim, backend, *words)


def wedge(
    x: Tensor, y: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x ∧ y, the exterior product: of grades g and h, the part of x y of grade g + h.

    Args:
        x: multivectors, (B, batch…, F), float16 to float64.
        y: the right factors, the same layout and dtype; batch and features broadcast.
        algebra: the algebra that defines the product.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors (B, batch…, F) in x's dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    Error and cost: see `geometric_product`.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> plane = clifford.Algebra((1, 1))  # blades 1, e1, e2, e12
        >>> e1, e2 = torch.eye(4)[1:3, :, None]
        >>> clifford.wedge(e1, e2, plane).flatten()  # e12
        tensor([0., 0., 0., 1.])
    """
    return _product((x, y), algebra, blade_dim, backend, "wedge")


def inner(
    x: Tensor, y: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x · y, the inner product: of grades g and h, the part of x y of grade |g − h|.

    Args:
        x: multivectors, (B, batch…, F), float16 to float64.
        y: the right factors, the same layout and dtype; batch and features broadcast.
        algebra: the algebra that defines the product.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors (B, batch…, F) in x's dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    Error and cost: see `geometric_product`.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> plane = clifford.Algebra((1, 1))  # blades 1, e1, e2, e12
        >>> e1 = torch.eye(4)[1, :, None]
        >>> clifford.inner(e1, e1, plane).flatten()  # 1
        tensor([1., 0., 0., 0.])
    """
    return _product((x, y), algebra, blade_dim, backend, "inner")


def left_contraction(
    x: Tensor, y: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x ⌋ y, left contraction: of grades g and h, the part of x y of grade h − g; 0 where g > h.

    Args:
        x: multivectors, (B, batch…, F), float16 to float64.
        y: the right factors, the same layout and dtype; batch and features broadcast.
        algebra: the algebra that defines the product.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors (B, batch…, F) in x's dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    Error and cost: see `geometric_product`.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> plane = clifford.Algebra((1, 1))  # blades 1, e1, e2, e12
        >>> e1, e12 = torch.eye(4)[[1, 3], :, None]
        >>> clifford.left_contraction(e1, e12, plane).flatten()  # e2
        tensor([0., 0., 1., 0.])
    """
    return _product((x, y), algebra, blade_dim, backend, "left_contraction")


def right_contraction(
    x: Tensor, y: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x ⌊ y, right contraction: of grades g and h, the part of x y of grade g − h; 0 where g < h.

    Args:
        x: multivectors, (B, batch…, F), float16 to float64.
        y: the right factors, the same layout and dtype; batch and features broadcast.
        algebra: the algebra that defines the product.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors (B, batch…, F) in x's dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    Error and cost: see `geometric_product`.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> plane = clifford.Algebra((1, 1))  # blades 1, e1, e2, e12
        >>> e2, e12 = torch.eye(4)[[2, 3], :, None]
        >>> clifford.right_contraction(e12, e2, plane).flatten()  # e1
        tensor([0., 1., 0., 0.])
    """
    return _product((x, y), algebra, blade_dim, backend, "right_contraction")


def regressive(
    x: Tensor, y: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x ∨ y, the regressive product: dual(x ∨ y) = dual(x) ∧ dual(y), in any metric.

    Args:
        x: multivectors, (B, batch…, F), float16 to float64.
        y: the right factors, the same layout and dtype; batch and features broadcast.
        algebra: the algebra that defines the product.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors (B, batch…, F) in x's dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    Error and cost: see `geometric_product`.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> plane = clifford.Algebra((1, 1))  # blades 1, e1, e2, e12
        >>> e1, e12 = torch.eye(4)[[1, 3], :, None]
        >>> clifford.regressive(e12, e1, plane).flatten()  # e1: e12 is the unit
        tensor([0., 1., 0., 0.])
    """
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
    """z_j[m] = Σ_(p,n) W[p,n,m] Σ_((i,k) ∈ p) sign(i,k) · x_i[n] · y_k[n]: mixes features as well.

    Args:
        x: multivectors, (B, batch…, F_in), float16 to float64.
        y: the right factors, the same layout and dtype.
        weight: (P, F_in, F_out), a matrix for each path p, in the order of `algebra.paths`.
        algebra: the algebra that defines the product.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        (B, batch…, F_out) in x's dtype.  float32 matrix products follow torch's TF32 setting.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    Error: |z − z*| ≤ u|z*| + 4√K·2⁻²⁴·Σ|W x y|, K terms per number; where torch allows TF32, 2⁻⁹
    of the sum more.

    Cost: P matrix products (batch, F_in) @ (F_in, F_out).

    Source: Ruhe, Brandstetter, Forré: Clifford group equivariant neural networks, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> space = clifford.Algebra((1, 1, 1))
        >>> x, y = torch.randn(8, 100, 16), torch.randn(8, 100, 16)
        >>> weight = torch.randn(len(space.paths), 16, 32)
        >>> clifford.fully_connected_geometric_product(x, y, weight, space).shape
        torch.Size([8, 100, 32])
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
        x: multivectors, (B, batch…, F), float16 to float64.
        y: the right factors, the same layout and dtype.
        weight: (F, P), or (P, F_in, F_out) of the fully connected product.
        algebra: the algebra of the multivectors.
        normalize: whether the norm follows the product.
        fully_connected: whether the product is `fully_connected_geometric_product`.
        eps: see `rms_norm`.
        norm: "euclidean" or "metric", see `rms_norm`.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors (B, batch…, F or F_out) in x's dtype, rounded once.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    Error: at most twice that of the same formula in plain PyTorch at that dtype.  Differentiable to
    any order.

    Cost: moves three multivector tensors, the gradient five; only the inputs are saved for it.

    Source: the layer of flash-clifford, https://github.com/maxxxzdn/flash-clifford.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> space = clifford.Algebra((1, 1, 1))
        >>> x, y = torch.randn(8, 100, 16), torch.randn(8, 100, 16)
        >>> weight = torch.randn(16, len(space.paths))
        >>> clifford.gelu_geometric_product_norm(x, y, weight, space).shape
        torch.Size([8, 100, 16])
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
    """z_j = x_j @ W[grade of j], and a bias on the scalar only, so that the map is equivariant.

    Args:
        x: multivectors, (B, batch…, F_in), float16 to float64.
        weight: (n+1, F_in, F_out), a matrix for each grade.
        bias: (F_out,) or None.
        algebra: the algebra of the multivectors.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba", "torch" or None; matrix products are torch's own on every
            backend.

    Returns:
        (B, batch…, F_out) in x's dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> space = clifford.Algebra((1, 1, 1))
        >>> x, weight = torch.randn(8, 100, 16), torch.randn(4, 16, 32)
        >>> clifford.grade_linear(x, weight, None, space).shape
        torch.Size([8, 100, 32])
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
        x: multivectors, (B, batch…, F), float16 to float64.
        linear_weight: (n+1, F, F), of the linear map.
        linear_bias: (F,), on the scalar.
        weight: (F, P), or (P, F, F) of the fully connected product.
        algebra: the algebra of the multivectors.
        normalize: whether the norm follows the product.
        fully_connected: whether the product is `fully_connected_geometric_product`.
        eps: see `rms_norm`.
        norm: "euclidean" or "metric", see `rms_norm`.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors (B, batch…, F) in x's dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    The linear map's gradient is added to the product's without a pass of its own.  `CliffordLayer`
    is the module.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> space = clifford.Algebra((1, 1, 1))
        >>> x, weight = torch.randn(8, 100, 16), torch.randn(16, len(space.paths))
        >>> linear, bias = torch.randn(4, 16, 16) / 4, torch.zeros(16)
        >>> clifford.clifford_layer(x, linear, bias, weight, space).shape
        torch.Size([8, 100, 16])
    """
    call = _fully_connected_layer if fully_connected else _layer
    tensors = (x, linear_weight, linear_bias, weight)
    return call(tensors, algebra, blade_dim, backend, normalize, norm, float(eps))


_PLANE, _SPACE = Algebra((1, 1)), Algebra((1, 1, 1))


def fused_gelu_sgp_norm_2d(x: Tensor, y: Tensor, weight: Tensor, normalize: bool = True) -> Tensor:
    """`gelu_geometric_product_norm` in Cl(2,0) with the weighted product.

    Args:
        x: multivectors, (4, batch…, F).
        y: the right factors, the same layout.
        weight: (F, 10).
        normalize: whether the norm follows the product.

    Returns:
        Multivectors (4, batch…, F) in x's dtype.

    Source: the name is flash-clifford's, https://github.com/maxxxzdn/flash-clifford.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> x, y, weight = torch.randn(4, 100, 16), torch.randn(4, 100, 16), torch.randn(16, 10)
        >>> clifford.fused_gelu_sgp_norm_2d(x, y, weight).shape
        torch.Size([4, 100, 16])
    """
    return gelu_geometric_product_norm(x, y, weight, _PLANE, normalize)


def fused_gelu_sgp_norm_3d(x: Tensor, y: Tensor, weight: Tensor, normalize: bool = True) -> Tensor:
    """`gelu_geometric_product_norm` in Cl(3,0) with the weighted product.

    Args:
        x: multivectors, (8, batch…, F).
        y: the right factors, the same layout.
        weight: (F, 20).
        normalize: whether the norm follows the product.

    Returns:
        Multivectors (8, batch…, F) in x's dtype.

    Source: the name is flash-clifford's, https://github.com/maxxxzdn/flash-clifford.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> x, y, weight = torch.randn(8, 100, 16), torch.randn(8, 100, 16), torch.randn(16, 20)
        >>> clifford.fused_gelu_sgp_norm_3d(x, y, weight).shape
        torch.Size([8, 100, 16])
    """
    return gelu_geometric_product_norm(x, y, weight, _SPACE, normalize)


def fused_gelu_fcgp_norm_2d(x: Tensor, y: Tensor, weight: Tensor, normalize: bool = True) -> Tensor:
    """`gelu_geometric_product_norm` in Cl(2,0) with the fully connected product.

    Args:
        x: multivectors, (4, batch…, F_in).
        y: the right factors, the same layout.
        weight: (10, F_in, F_out).
        normalize: whether the norm follows the product.

    Returns:
        Multivectors (4, batch…, F_out) in x's dtype.

    Source: the name is flash-clifford's, https://github.com/maxxxzdn/flash-clifford.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> x, y, weight = torch.randn(4, 100, 16), torch.randn(4, 100, 16), torch.randn(10, 16, 32)
        >>> clifford.fused_gelu_fcgp_norm_2d(x, y, weight).shape
        torch.Size([4, 100, 32])
    """
    return gelu_geometric_product_norm(x, y, weight, _PLANE, normalize, True)


def fused_gelu_fcgp_norm_3d(x: Tensor, y: Tensor, weight: Tensor, normalize: bool = True) -> Tensor:
    """`gelu_geometric_product_norm` in Cl(3,0) with the fully connected product.

    Args:
        x: multivectors, (8, batch…, F_in).
        y: the right factors, the same layout.
        weight: (20, F_in, F_out).
        normalize: whether the norm follows the product.

    Returns:
        Multivectors (8, batch…, F_out) in x's dtype.

    Source: the name is flash-clifford's, https://github.com/maxxxzdn/flash-clifford.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> x, y, weight = torch.randn(8, 100, 16), torch.randn(8, 100, 16), torch.randn(20, 16, 32)
        >>> clifford.fused_gelu_fcgp_norm_3d(x, y, weight).shape
        torch.Size([8, 100, 32])
    """
    return gelu_geometric_product_norm(x, y, weight, _SPACE, normalize, True)


def norm(x: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None) -> Tensor:
    """√|⟨x̃ x⟩₀| = √|Σ_j q_j x_j²|, q_j the product of the metric entries of blade j.

    Args:
        x: multivectors, (B, batch…, F), float16 to float64.
        algebra: the algebra of the multivectors.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        (1, batch…, F), or (batch…, F, 1), in x's dtype; the gradient at 0 is 0.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> vector = torch.tensor([0.0, 3.0, 4.0, 0.0])[:, None]
        >>> clifford.norm(vector, clifford.Algebra((1, 1)))
        tensor([[5.]])
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
    """x_j / √(s_g + eps), s_g = mean over the features of Σ_(j∈g) x_j², for each grade g.

    Args:
        x: multivectors, (B, batch…, F), float16 to float64.
        algebra: the algebra of the multivectors.
        eps: added to the mean squares.
        norm: "euclidean", or "metric": s_g = mean of |Σ_(j∈g) q_j x_j²|, q_j the product of the
            metric entries of blade j, invariant under every versor; a grade of null blades only is
            then not rescaled.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors of x's shape and dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> x = torch.randn(4, 100, 16)
        >>> z = clifford.rms_norm(x, clifford.Algebra((1, 1)))
        >>> bool((z[0].square().mean(-1) - 1).abs().max() < 1e-4)  # grade 0
        True
    """
    return _rms_norm((x,), algebra, blade_dim, backend, True, norm, float(eps))


def gelu(x: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None) -> Tensor:
    """x · Φ(x₀), Φ(t) = ½ (1 + erf(t/√2)): each multivector gated by its own scalar.

    Args:
        x: multivectors, (B, batch…, F), float16 to float64.
        algebra: the algebra of the multivectors.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors of x's shape and dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> x = torch.tensor([0.0, 3.0, 4.0, 0.0])[:, None]
        >>> clifford.gelu(x, clifford.Algebra((1, 1))).flatten()  # Φ(0) = ½
        tensor([0.0000, 1.5000, 2.0000, 0.0000])
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
    """x_j · σ(a[g] t_g + b[g]), t_0 = x₀ and t_g = Σ_(j∈g) q_j x_j²: a gate for each grade g.

    Args:
        x: multivectors, (B, batch…, F), float16 to float64.
        a: (n+1, F), a number for each grade and feature.
        b: (n+1, F), likewise.
        algebra: the algebra of the multivectors; q_j is the product of the metric entries of blade
            j.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors of x's shape and dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    Source: MVSiLU of Ruhe, Brandstetter, Forré: Clifford group equivariant neural networks,
    NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> x, a, b = torch.randn(4, 100, 16), torch.ones(3, 16), torch.zeros(3, 16)
        >>> clifford.silu(x, a, b, clifford.Algebra((1, 1))).shape
        torch.Size([4, 100, 16])
    """
    return _silu((x, a, b), algebra, blade_dim, backend)


def reverse(
    x: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x̃, the reverse: the vectors of every blade in the opposite order, (−1)^(g(g−1)/2) on grade g.

    Args:
        x: multivectors, (B, batch…, F), float16 to float64.
        algebra: the algebra of the multivectors.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors of x's shape and dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> clifford.reverse(torch.ones(4, 1), clifford.Algebra((1, 1))).flatten()
        tensor([ 1.,  1.,  1., -1.])
    """
    return _turned((x,), algebra, blade_dim, backend, "reverse")


def grade_involution(
    x: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """x̂, the grade involution: every vector times −1, (−1)^g on grade g.

    Args:
        x: multivectors, (B, batch…, F), float16 to float64.
        algebra: the algebra of the multivectors.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors of x's shape and dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> clifford.grade_involution(torch.ones(4, 1), clifford.Algebra((1, 1))).flatten()
        tensor([ 1., -1., -1.,  1.])
    """
    return _turned((x,), algebra, blade_dim, backend, "grade_involution")


def conjugate(
    x: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
) -> Tensor:
    """Clifford conjugation, reverse and grade involution: (−1)^(g(g+1)/2) on grade g.

    Args:
        x: multivectors, (B, batch…, F), float16 to float64.
        algebra: the algebra of the multivectors.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors of x's shape and dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> clifford.conjugate(torch.ones(4, 1), clifford.Algebra((1, 1))).flatten()
        tensor([ 1., -1., -1., -1.])
    """
    return _turned((x,), algebra, blade_dim, backend, "conjugate")


def grade_project(
    x: Tensor,
    grades: int | Iterable[int],
    algebra: Algebra,
    *,
    blade_dim: int = 0,
    backend: str | None = None,
) -> Tensor:
    """⟨x⟩_grades: the part of one grade or of several, zero elsewhere.

    Args:
        x: multivectors, (B, batch…, F), float16 to float64.
        grades: a grade, or several, 0 to n.
        algebra: the algebra of the multivectors.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors of x's shape and dtype.

    Raises:
        ShapeError: a grade that the algebra does not have, or multivectors of another layout.
        DTypeError: grades is neither an integer nor several, or x is not floating-point.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> clifford.grade_project(torch.ones(4, 1), (0, 2), clifford.Algebra((1, 1))).flatten()
        tensor([1., 0., 0., 1.])
    """
    if not isinstance(grades, Iterable | int):
        raise DTypeError(
            f"grades is a {type(grades).__name__}: it must be a grade or several. "
            "Use grade_project(x, grades, algebra), for example with grades=(0, 2)."
        )
    kept = {grades} if isinstance(grades, int) else set(grades)
    if isinstance(algebra, Algebra) and not kept <= set(range(algebra.n + 1)):
        raise ShapeError(
            f"grades are {sorted(kept)}: {algebra} has grades 0 to {algebra.n}. "
            "Leave out the others."
        )
    return _turned((x,), algebra, blade_dim, backend, "grade_project", *sorted(kept))


def dual(x: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None) -> Tensor:
    """Signed complements: e_A becomes that ±e_B with e_A ∧ (±e_B) = e_1…n, in any metric.

    Args:
        x: multivectors, (B, batch…, F), float16 to float64.
        algebra: the algebra of the multivectors.
        blade_dim: the dimension of the blades: 0, or −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        Multivectors of x's shape and dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: tensors that do not fit the algebra or each other.
        BackendError: a backend was requested and cannot serve.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> e2 = torch.eye(4)[2, :, None]
        >>> clifford.dual(e2, clifford.Algebra((1, 1))).flatten()  # −e1: e2 ∧ (−e1) = e12
        tensor([ 0., -1.,  0.,  0.])
    """
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
    words = " ".join(norm_words(algebra, *norm_options))
    return lambda rows, parameters: operators.fully_connected_layer(
        *rows, *parameters, algebra=algebra, ending=words, backend=backend
    )


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
