"""Public functions on multivectors: products, involutions, versors, and their checks."""
