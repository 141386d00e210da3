"""Modules on multivectors, equivariant under every versor of their algebra.

Layout (B, batch…, F), or (batch…, F, B) with blade_dim=-1: B blades, F features.  A versor u acts
as x ↦ u x̂ u⁻¹ (x̂ the grade involution of x if u is odd, else x): any weight a path or a grade is
equivariant, a bias on the scalar alone, a norm only if it comes from the metric.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from torchweft.clifford import functions
from torchweft.clifford.algebra import Algebra
from torchweft.clifford.calls import backend_for, check_algebra
from torchweft.core.operators.operands import check_tensors, widened
from torchweft.errors import DTypeError, ShapeError

__all__ = [
    "CliffordLayer",
    "FullyConnectedGeometricProduct",
    "GeometricProduct",
    "MVLayerNorm",
    "MVSiLU",
    "MultivectorGELU",
    "MultivectorLinear",
    "MultivectorModule",
    "MultivectorRMSNorm",
]


class MultivectorModule(nn.Module):
    """A base class of modules that take multivectors of one algebra in one layout.

    Args:
        algebra: the algebra of the multivectors.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
        backend: of the module's operations: "triton", "numba" or "torch"; None: the fastest that
            can serve.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> class Twice(clifford.MultivectorModule):
        ...     def forward(self, x):
        ...         self.check(x)
        ...         return 2 * x
        >>> Twice(clifford.Algebra((1, 1)))(torch.ones(4, 1)).flatten()
        tensor([2., 2., 2., 2.])
    """

    def __init__(self, algebra: Algebra, blade_dim: int = 0, backend: str | None = None) -> None:
        super().__init__()
        check_algebra(algebra)
        if blade_dim not in (0, -1):
            raise ShapeError(
                f"blade_dim is {blade_dim}: it must be 0, for (B, batch…, F), or -1, for "
                "(batch…, F, B). Move the blades first or last."
            )
        self.algebra = algebra
        self.blade_dim = blade_dim
        self.backend = backend
        # for a definite metric both norms are the same, and this one takes fewer steps
        self.norm = "euclidean" if algebra.is_definite else "metric"

    @property
    def _options(self) -> dict[str, Any]:
        return {"blade_dim": self.blade_dim, "backend": self.backend}

    def check(self, x: Tensor, features: int | None = None, name: str = "x") -> None:
        """Raise ShapeError unless x has the algebra's blades and, if given, the features."""
        if not isinstance(x, Tensor) or x.is_nested:  # what else is wrong is found by the call
            check_tensors(**{name: x})
        blades = len(self.algebra.grades)
        feature_dim = -1 if self.blade_dim == 0 else -2
        fits = x.dim() >= 2 and x.shape[self.blade_dim] == blades
        # torch.compile finds no symbolic size by `in`
        if fits and (features is None or x.shape[feature_dim] == features):
            return
        count = "F" if features is None else features
        order = f"({blades}, batch…, {count})" if self.blade_dim == 0 else f"(…, {count}, {blades})"
        raise ShapeError(
            f"{name} is {tuple(x.shape)}: {type(self).__name__} of {self.algebra} needs {order}. "
            "Give it these blades and features, or set blade_dim (0: blades first, -1: last)."
        )

    def blades_first(self, x: Tensor) -> Tensor:
        """x as (B, batch…, F), a view."""
        return x.movedim(self.blade_dim, 0)

    def blades_back(self, x: Tensor) -> Tensor:
        """(B, batch…, F) in this module's layout, a view."""
        return x.movedim(0, self.blade_dim)

    def grade_squares(self, x: Tensor) -> Tensor:
        """t_g = Σ_(j∈g) q_j x_j², (n+1, batch…, F) for x (B, batch…, F), at least in float32.

        q_j is the product of the blade's metric entries: every t_g is invariant under versors.
        """
        parts = x.to(torch.promote_types(x.dtype, torch.float32)).square().unbind(0)
        zeros, q = torch.zeros_like(parts[0]), self.algebra.squares
        grades = []
        for blades in self.algebra.of_grade:
            squares = ([parts[j] for j in blades if q[j] == sign] for sign in (1, -1))
            plus, minus = (functools.reduce(torch.add, of) if of else zeros for of in squares)
            grades.append(plus if minus is zeros else plus - minus)
        return torch.stack(grades)

    def extra_repr(self) -> str:
        """The algebra and the shapes of the parameters."""
        shapes = [f"{name}={tuple(p.shape)}" for name, p in self.named_parameters(recurse=False)]
        layout = ["blade_dim=-1"] if self.blade_dim else []
        return ", ".join([str(self.algebra), *shapes, *layout])


class CliffordLayer(MultivectorModule):
    """norm(gelu(x) · gelu(y)), y = linear(x): a weighted or fully connected geometric product.

    y_j[m] = Σ_n x_j[n] · linear_weight[grade j, n, m], plus linear_bias[m] on the scalar.

    Args:
        n_features: number of features F.
        dims: d for the algebra Cl(d, 0), 1 to 5; or give `algebra`.
        algebra: any algebra, instead of `dims`.
        normalize: whether the layer ends with the RMS norm by grade.
        use_fc: whether the product is fully connected.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Attributes:
        gp_weight: the parameter (F, P), or (P, F, F) fully connected.
        linear_weight: the parameter (n+1, F, F).
        linear_bias: the parameter (1, 1, F).

    Raises:
        ShapeError: both dims and algebra are given, or none, or dims is not 1 to 5.

    Cost: the linear map, and one kernel for the rest, see `gelu_geometric_product_norm`.

    Source: the layer of flash-clifford, https://github.com/maxxxzdn/flash-clifford.  Its
    checkpoints load as they are; it adds its bias to all blades, so results differ where that bias
    is not zero.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> layer = clifford.CliffordLayer(16, dims=3)
        >>> layer(torch.randn(8, 100, 16)).shape
        torch.Size([8, 100, 16])
    """

    def __init__(
        self,
        n_features: int,
        dims: int | None = None,
        algebra: Algebra | None = None,
        normalize: bool = True,
        use_fc: bool = False,
        *,
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__(_chosen(dims, algebra), blade_dim, backend)
        self.n_features = _positive("n_features", n_features)
        self.normalize = normalize
        self.use_fc = use_fc
        paths, grades = len(self.algebra.paths), self.algebra.n + 1
        gp = (paths, n_features, n_features) if use_fc else (n_features, paths)
        self.gp_weight = nn.Parameter(torch.empty(gp))
        self.linear_weight = nn.Parameter(torch.empty(grades, n_features, n_features))
        self.linear_bias = nn.Parameter(torch.empty(1, 1, n_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random weights that keep the scale of the features, whatever F; no bias."""
        _init_product(self.gp_weight, self.algebra, self.n_features if self.use_fc else 1)
        nn.init.normal_(self.linear_weight, std=1 / math.sqrt(self.n_features))
        nn.init.zeros_(self.linear_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps multivectors x (B, batch…, F) to multivectors of the same shape."""
        self.check(x, self.n_features)
        return functions.clifford_layer(
            x,
            self.linear_weight,
            self.linear_bias.flatten(),
            self.gp_weight,
            self.algebra,
            self.normalize,
            self.use_fc,
            norm=self.norm,
            **self._options,
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # flash-clifford keeps its table of grades as a buffer
        state_dict.pop(f"{prefix}weight_expansion", None)
        super()._load_from_state_dict(state_dict, prefix, *args)


class MultivectorLinear(MultivectorModule):
    """y_j[m] = Σ_n x_j[n] · weight[grade j, n, m], plus bias[m] on the scalar: equivariant.

    Args:
        in_features: number of input features F_in.
        out_features: number of output features F_out.
        algebra: the algebra of the multivectors.
        bias: whether there is a bias.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Attributes:
        weight: the parameter (n+1, F_in, F_out).
        bias: the parameter (F_out,), or None.

    Raises:
        ShapeError: a number of features that is not positive; from a call, multivectors of another
            layout or number of features.

    Cost: one matrix product for each grade.

    Source: MVLinear of Ruhe, Brandstetter, Forré: Clifford group equivariant neural networks,
    NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> layer = clifford.MultivectorLinear(16, 32, clifford.Algebra((1, 1, 1)))
        >>> layer(torch.randn(8, 100, 16)).shape
        torch.Size([8, 100, 32])
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        algebra: Algebra,
        bias: bool = True,
        *,
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__(algebra, blade_dim, backend)
        self.in_features = _positive("in_features", in_features)
        self.out_features = _positive("out_features", out_features)
        self.weight = nn.Parameter(torch.empty(algebra.n + 1, in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 1/√F_in), no bias: the scale of the features is kept."""
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.in_features))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps multivectors x (B, batch…, F_in) to (B, batch…, F_out)."""
        self.check(x, self.in_features)
        return functions.grade_linear(x, self.weight, self.bias, self.algebra, **self._options)


class MultivectorRMSNorm(MultivectorModule):
    """z_j = x_j / √(s_g + eps), s_g = mean over features of |Σ_(j∈g) q_j x_j²|, for each grade g.

    q_j is the product of the metric entries of blade j; a grade of null blades is not rescaled.

    Args:
        algebra: the algebra of the multivectors.
        eps: added to the mean squares.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> norm = clifford.MultivectorRMSNorm(clifford.Algebra((1, 1, 1)))
        >>> norm(torch.randn(8, 100, 16)).shape
        torch.Size([8, 100, 16])
    """

    def __init__(
        self, algebra: Algebra, eps: float = 1e-6, *, blade_dim: int = 0, backend: str | None = None
    ) -> None:
        super().__init__(algebra, blade_dim, backend)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Maps multivectors x (B, batch…, F) to multivectors of the same shape."""
        self.check(x)
        return functions.rms_norm(
            x,
            self.algebra,
            eps=self.eps,
            norm=self.norm,
            **self._options,
        )


class MultivectorGELU(nn.Module):
    """x · Φ(x₀), Φ(t) = ½ (1 + erf(t/√2)): the whole multivector gated by its own scalar.

    Args:
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> x = torch.tensor([0.0, 3.0, 4.0, 0.0])[:, None]
        >>> clifford.MultivectorGELU()(x).flatten()  # Φ(0) = ½
        tensor([0.0000, 1.5000, 2.0000, 0.0000])
    """

    def __init__(self, *, blade_dim: int = 0, backend: str | None = None) -> None:
        super().__init__()
        self.blade_dim, self.backend = blade_dim, backend

    def forward(self, x: Tensor) -> Tensor:
        """Maps multivectors x (B, batch…, F) of any algebra to the same shape."""
        blades = x.shape[self.blade_dim]
        # the gate reads the scalar alone: any algebra of as many blades is the same
        algebra = Algebra((1,) * (blades.bit_length() - 1))
        return functions.gelu(x, algebra, blade_dim=self.blade_dim, backend=self.backend)


class GeometricProduct(MultivectorModule):
    """z_j[f] = Σ_(i,k) sign(i,k) · weight[f, path] · x_i[f] · y_k[f], see `geometric_product`.

    Args:
        features: number of features F.
        algebra: the algebra of the multivectors.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Attributes:
        weight: the parameter (F, P), in the order of `algebra.paths`.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> product = clifford.GeometricProduct(16, clifford.Algebra((1, 1, 1)))
        >>> product(torch.randn(8, 100, 16), torch.randn(8, 100, 16)).shape
        torch.Size([8, 100, 16])
    """

    def __init__(
        self, features: int, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
    ) -> None:
        super().__init__(algebra, blade_dim, backend)
        self.features = _positive("features", features)
        self.weight = nn.Parameter(torch.empty(features, len(algebra.paths)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 1/√(n+1)): the scale of the features is kept."""
        _init_product(self.weight, self.algebra, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The products of x and y, both (B, batch…, F), in the same shape."""
        self.check(x, self.features)
        self.check(y, self.features, "y")
        return functions.geometric_product(x, y, self.algebra, self.weight, **self._options)


class FullyConnectedGeometricProduct(MultivectorModule):
    """z_j[m] = Σ_(p,n) weight[p,n,m] Σ_((i,k) ∈ p) sign(i,k) · x_i[n] · y_k[n], as a module.

    See `fully_connected_geometric_product`.

    Args:
        in_features: number of input features F_in.
        out_features: number of output features F_out.
        algebra: the algebra of the multivectors.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Attributes:
        weight: the parameter (P, F_in, F_out), in the order of `algebra.paths`.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> product = clifford.FullyConnectedGeometricProduct(16, 32, clifford.Algebra((1, 1, 1)))
        >>> product(torch.randn(8, 100, 16), torch.randn(8, 100, 16)).shape
        torch.Size([8, 100, 32])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        algebra: Algebra,
        *,
        blade_dim: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__(algebra, blade_dim, backend)
        self.in_features = _positive("in_features", in_features)
        self.out_features = _positive("out_features", out_features)
        self.weight = nn.Parameter(torch.empty(len(algebra.paths), in_features, out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 1/√(F_in·(n+1))): the scale of the features is kept."""
        _init_product(self.weight, self.algebra, self.in_features)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The products (B, batch…, F_out) of x and y, both (B, batch…, F_in)."""
        self.check(x, self.in_features)
        self.check(y, self.in_features, "y")
        return functions.fully_connected_geometric_product(
            x, y, self.weight, self.algebra, **self._options
        )


class MVSiLU(MultivectorModule):
    """x_j · σ(a[g] t_g + b[g]), t_0 = x₀ and t_g = Σ_(j∈g) q_j x_j²: CEGNN's gate by grade.

    Args:
        features: number of features F.
        algebra: the algebra of the multivectors; q_j is the product of the metric entries of blade
            j.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Attributes:
        a: the parameter (n+1, F), ones at first.
        b: the parameter (n+1, F), zeros at first.

    Source: Ruhe, Brandstetter, Forré: Clifford group equivariant neural networks, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> clifford.MVSiLU(16, clifford.Algebra((1, 1, 1)))(torch.randn(8, 100, 16)).shape
        torch.Size([8, 100, 16])
    """

    def __init__(
        self, features: int, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
    ) -> None:
        super().__init__(algebra, blade_dim, backend)
        self.features = _positive("features", features)
        self.a = nn.Parameter(torch.ones(algebra.n + 1, features))
        self.b = nn.Parameter(torch.zeros(algebra.n + 1, features))

    def forward(self, x: Tensor) -> Tensor:
        """Maps multivectors x (B, batch…, F) to multivectors of the same shape."""
        self.check(x, self.features)
        return functions.silu(x, self.a, self.b, self.algebra, **self._options)


class MVLayerNorm(MultivectorModule):
    """a · x / (mean over features of |⟨x̃x⟩₀|^½ + 1e-6): CEGNN's norm of whole multivectors.

    The root is smooth at 0: (q² + 1e-16)^¼ for q = ⟨x̃x⟩₀, as CEGNN's is.

    Args:
        features: number of features F.
        algebra: the algebra of the multivectors.
        blade_dim: 0 for (B, batch…, F), −1 for (batch…, F, B).
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Attributes:
        a: the parameter (F,), ones at first.

    Source: Ruhe, Brandstetter, Forré: Clifford group equivariant neural networks, NeurIPS 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> clifford.MVLayerNorm(16, clifford.Algebra((1, 1, 1)))(torch.randn(8, 100, 16)).shape
        torch.Size([8, 100, 16])
    """

    def __init__(
        self, features: int, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None
    ) -> None:
        super().__init__(algebra, blade_dim, backend)
        self.features = _positive("features", features)
        self.a = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        """Maps multivectors x (B, batch…, F) to multivectors of the same shape."""
        self.check(x, self.features)
        backend_for(self.backend, self.algebra, [x])
        first = self.blades_first(x := widened(x))
        square = self.grade_squares(first).sum(0, keepdim=True)
        size = (square * square + 1e-16).sqrt().sqrt().mean(-1, keepdim=True)
        return self.blades_back(self.a * first / (size + 1e-6)).to(x.dtype)


def _chosen(dims: int | None, algebra: Algebra | None) -> Algebra:
    if algebra is not None and dims is None:
        return algebra
    if algebra is not None or dims is None:
        given = "both dims and algebra are given" if dims else "neither dims nor algebra is given"
        raise ShapeError(f"{given}: one says which algebra. Pass dims=3, or algebra=Algebra(…).")
    if dims not in range(1, 6):
        raise ShapeError(
            f"dims is {dims}: Cl(dims, 0) needs 1 to 5. Pass one of them, or algebra=Algebra(…)."
        )
    return Algebra.cl(dims)


def _positive(name: str, count: int) -> int:
    if not hasattr(count, "__index__"):
        raise DTypeError(
            f"{name} is {count!r}: it must be an integer. Give the number of features."
        )
    if count < 1:
        raise ShapeError(f"{name} is {count}: it must be at least 1. Give the number of features.")
    return count


def _init_product(weight: Tensor, algebra: Algebra, summed: int) -> None:
    """N(0, 1/√(summed·(n+1))): about n+1 paths meet in a grade, each summing `summed` features."""
    nn.init.normal_(weight, std=1 / math.sqrt(summed * (algebra.n + 1)))
