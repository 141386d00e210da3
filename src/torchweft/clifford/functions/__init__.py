"""Public functions on multivectors: products, norms, involutions, versors, and their checks."""
