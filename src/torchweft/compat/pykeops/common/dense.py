"""Kernels as dense matrices, for programs that compare with them.

Each takes the functions of `xp`, which is torch or numpy.  With q = |x_i − y_j|² / s²:

    gaussian  exp(−q)      laplacian  exp(−√q)
    cauchy  1 / (1 + q)    inverse_multiquadric  1 / √(1 + q)
"""

from typing import Any

__all__ = ["kernel", "log_kernel", "slope", "squared_distances"]

_LOGARITHMS = {
    "gaussian": lambda xp, q: -q,
    "laplacian": lambda xp, q: -xp.sqrt(q),
    "cauchy": lambda xp, q: -xp.log1p(q),
    "inverse_multiquadric": lambda xp, q: -xp.log1p(q) / 2,
}

_SLOPES = {
    "gaussian": lambda xp, q: -xp.ones_like(q),
    "laplacian": lambda xp, q: -0.5 / xp.sqrt(q),
    "cauchy": lambda xp, q: -1 / (1 + q),
    "inverse_multiquadric": lambda xp, q: -0.5 / (1 + q),
}
"""d log k / dq."""


def squared_distances(xp: Any, x: Any, y: Any) -> Any:
    """(M, N) of (M, D) and (N, D): |x_i|² + |y_j|² − 2 x_i·y_j, at least 0."""
    squares = (x * x).sum(1)[:, None] + (y * y).sum(1)[None, :]
    return xp.clip(squares - 2 * (x @ y.T), 0, None)


def log_kernel(xp: Any, x: Any, y: Any, s: float, name: str) -> Any:
    """log k(x_i, y_j), (M, N)."""
    return _LOGARITHMS[name](xp, squared_distances(xp, x, y) / (s * s))


def kernel(xp: Any, x: Any, y: Any, s: float, name: str) -> Any:
    """k(x_i, y_j), (M, N)."""
    return xp.exp(log_kernel(xp, x, y, s, name))


def slope(xp: Any, x: Any, y: Any, s: float, name: str) -> Any:
    """∂k / ∂|x_i − y_j|², (M, N)."""
    q = squared_distances(xp, x, y) / (s * s)
    return kernel(xp, x, y, s, name) * _SLOPES[name](xp, q) / (s * s)
