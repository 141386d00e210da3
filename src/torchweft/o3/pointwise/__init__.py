"""Functions of one row: spherical harmonics and radial functions, as programs."""
