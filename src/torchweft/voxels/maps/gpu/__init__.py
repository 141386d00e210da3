"""Coordinates and kernel maps by Triton kernels, and the tiles and pairs that convolutions read."""
