"""MACE's symmetric contraction: basis of couplings, polynomial, kernels."""
