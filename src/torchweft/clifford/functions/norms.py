"""Norms and activations of multivectors: `norm`, `rms_norm`, `gelu`, `silu`.

All take (B, batch…, F), or (batch…, F, B) with `blade_dim=-1`.  Numbers of 16 bits are computed in
float32.
"""

from __future__ import annotations

from torch import Tensor

from torchweft.clifford.algebra import Algebra
from torchweft.clifford.functions.checks import (
    backend_for,
    blades_first,
    check_weight,
    norm_words,
)
from torchweft.clifford.functions.rows import Validated, run_rows
from torchweft.clifford.programs.programs import key
from torchweft.core.operators.operands import same_kind

__all__ = ["gelu", "norm", "rms_norm", "silu"]


def norm(x: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None) -> Tensor:
    """√|⟨x̃ x⟩₀| = √|Σ_j q_j x_j²|, q_j the product of the blade's metric entries.

    Shape (1, batch…, F), or (batch…, F, 1); its gradient at 0 is 0.
    """

    def validate() -> Validated:
        (a,) = blades_first(algebra, blade_dim, x=same_kind(x=x)[0])
        return Validated(key("magnitude", algebra), backend_for(backend, algebra, [a]), (a,))

    return run_rows(("norm",), algebra, blade_dim, backend, (x,), (), validate)


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
        algebra: theirs.
        eps: keeps the root away from 0.
        norm: "euclidean", or "metric": s_g = mean of |Σ_(j∈g) q_j x_j²|, q_j the product of the
            blade's metric entries, invariant under every versor; a grade without a non-null blade
            is then not rescaled.
        blade_dim: 0, or −1 for blades last.
        backend: None chooses.
    """

    def validate() -> Validated:
        (a,) = blades_first(algebra, blade_dim, x=same_kind(x=x)[0])
        program = key("rms_norm", algebra, *norm_words(True, norm, eps))
        return Validated(program, backend_for(backend, algebra, [a]), (a,))

    called = ("rms_norm", norm, float(eps))
    return run_rows(called, algebra, blade_dim, backend, (x,), (), validate)


def gelu(x: Tensor, algebra: Algebra, *, blade_dim: int = 0, backend: str | None = None) -> Tensor:
    """x · Φ(x₀), Φ(t) = ½ (1 + erf(t/√2)): each multivector gated by its own scalar.

    Args:
        x: multivectors, (B, batch…, F).
        algebra: theirs.
        blade_dim: 0, or −1 for blades last.
        backend: None chooses.
    """

    def validate() -> Validated:
        (a,) = blades_first(algebra, blade_dim, x=same_kind(x=x)[0])
        return Validated(key("gelu", algebra), backend_for(backend, algebra, [a]), (a,))

    return run_rows(("gelu",), algebra, blade_dim, backend, (x,), (), validate)


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
        algebra: whose metric gives q_j, the product of a blade's entries.
        blade_dim: 0, or −1 for blades last.
        backend: None chooses.
    """

    def validate() -> Validated:
        first, *gates = same_kind(x=x, a=a, b=b)
        (first,) = blades_first(algebra, blade_dim, x=first)
        for gate in gates:
            check_weight(gate, {"n+1": algebra.n + 1, "F": first.shape[-1]})
        chosen = backend_for(backend, algebra, [first])
        return Validated(key("silu", algebra), chosen, (first,), gates)

    return run_rows(("silu",), algebra, blade_dim, backend, (x,), (a, b), validate, turned=False)
