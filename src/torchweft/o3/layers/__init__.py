"""Equivariant modules and their loaders: linear maps, gates, norms, harmonics, radial functions."""
