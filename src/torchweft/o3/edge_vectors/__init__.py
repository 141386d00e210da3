"""Vectors of edges from positions of nodes, and their lengths."""
