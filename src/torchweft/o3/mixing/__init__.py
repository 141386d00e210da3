"""Tensor products and linear maps whose weights mix channels."""
