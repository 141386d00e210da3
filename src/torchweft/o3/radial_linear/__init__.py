"""Convolutions whose weights are h A, the last layer of a radial network, never stored."""
