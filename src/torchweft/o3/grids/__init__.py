"""Functions on the sphere and on rotations: by their coefficients, and on grids."""
