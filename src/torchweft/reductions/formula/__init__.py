"""Formulas as graphs of vectors: primitives, derivatives, simplification, parsing."""

from torchweft.reductions.formula import primitives as _rows  # noqa: F401  # fills the table
