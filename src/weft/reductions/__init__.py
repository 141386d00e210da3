"""Reductions of formulas over all pairs, or blocks of pairs: out_i = R_j f(x_i, y_j, p).

The matrix of the pairs is never stored.  See docs/families/reductions.md.
"""
