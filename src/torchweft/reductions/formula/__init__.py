"""Formulas as graphs of vectors: primitives, derivatives, simplification, parsing."""
