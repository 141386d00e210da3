"""Sparse convolution on voxels: out[o] = Σ_k x[in(o, k)] @ w[k]."""
