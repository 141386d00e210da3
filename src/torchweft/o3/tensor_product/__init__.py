"""Tensor products as modules, on rows and on graphs, and how uvw weights are multiplied."""
