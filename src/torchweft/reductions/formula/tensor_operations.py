"""Products of matrices and tensors, whose components lie row after row."""

from __future__ import annotations

import string
from collections.abc import Sequence

from torchweft.errors import ShapeError
from torchweft.reductions.formula.node import Node
from torchweft.reductions.formula.primitives import product

__all__ = ["kron", "matrix_vector", "tensor_product", "tensordot", "vector_matrix"]


def _columns(matrix: Node, vector: Node) -> int:
    """How many vectors of that dimension the matrix holds."""
    if matrix.dim % vector.dim:
        raise ShapeError(
            f"a product of a matrix and a vector is given formulas of dimensions {matrix.dim} and "
            f"{vector.dim}: the first must be a multiple of the second. Extract the components "
            "that match."
        )
    return matrix.dim // vector.dim


def matrix_vector(matrix: Node, vector: Node) -> Node:
    """Σ_l A_kl b_l."""
    rows = _columns(matrix, vector)
    return product(matrix, vector, (rows, vector.dim), "ab", (vector.dim,), "b", "a")


def vector_matrix(vector: Node, matrix: Node) -> Node:
    """Σ_k b_k A_kl."""
    columns = _columns(matrix, vector)
    return product(vector, matrix, (vector.dim,), "a", (vector.dim, columns), "ab", "b")


def tensor_product(f: Node, g: Node) -> Node:
    """f_k g_l."""
    return product(f, g, (f.dim,), "a", (g.dim,), "b", "ab")


def tensordot(
    f: Node,
    g: Node,
    dimfa: Sequence[int],
    dimfb: Sequence[int],
    contfa: Sequence[int],
    contfb: Sequence[int],
    permute: Sequence[int] | None = None,
) -> Node:
    """The product of tensors of shapes dimfa and dimfb, summed over pairs of axes.

    Axis contfa[n] of f is paired with contfb[n] of g.  The axes that remain, f's before g's, go to
    the places that `permute` says.
    """
    rank = len(dimfa) + len(dimfb) - 2 * len(contfa)
    places = list(range(rank) if permute is None else permute)
    if (
        len(contfa) != len(contfb)
        or not set(contfa) <= set(range(len(dimfa)))
        or not set(contfb) <= set(range(len(dimfb)))
        or sorted(places) != list(range(rank))
    ):
        raise ShapeError(
            f"a product of tensors of shapes {tuple(dimfa)} and {tuple(dimfb)} pairs axes "
            f"{tuple(contfa)} with {tuple(contfb)} and permutes by {permute}: it needs axes that "
            f"are there, in pairs, and a permutation of the {rank} that remain. Change the lists."
        )
    labels_a = list(string.ascii_lowercase[: len(dimfa)])
    labels_b = list(string.ascii_uppercase[: len(dimfb)])
    for a, b in zip(contfa, contfb, strict=True):
        labels_b[b] = labels_a[a]
    kept = [label for label in labels_a + labels_b if (labels_a + labels_b).count(label) == 1]
    out = "".join(label for _, label in sorted(zip(places, kept, strict=True)))
    return product(f, g, dimfa, "".join(labels_a), dimfb, "".join(labels_b), out)


def kron(f: Node, g: Node, dimfa: Sequence[int], dimfb: Sequence[int]) -> Node:
    """The Kronecker product of tensors of equal rank."""
    if len(dimfa) != len(dimfb):
        raise ShapeError(
            f"the Kronecker product is given shapes {tuple(dimfa)} and {tuple(dimfb)}: they must "
            "be of one rank. Add axes of length 1."
        )
    rank = len(dimfa)
    places = [*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]
    return tensordot(f, g, dimfa, dimfb, [], [], places)
