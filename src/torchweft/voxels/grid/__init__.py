"""Geometry of grids: kernel offsets, constants, space-filling curves, flags read by the host."""
