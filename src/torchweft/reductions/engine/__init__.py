"""Reductions of formulas: operators, gradients, the choice of a backend, nearest neighbours."""
