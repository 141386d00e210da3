"""Formulas lowered to scalars: components, inner sums, exponents, printed lines."""
