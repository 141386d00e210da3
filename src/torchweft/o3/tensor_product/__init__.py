"""Tensor products as modules, on rows and on graphs."""
