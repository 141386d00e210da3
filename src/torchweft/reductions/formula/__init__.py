"""Formulas: the table of primitives, derivatives, simplification, strings, scalar expressions."""

from torchweft.reductions.formula import primitives as _primitives  # noqa: F401  # fills PRIMITIVES
