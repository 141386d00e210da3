"""Kernel maps on a GPU: search, sorting and tiles."""
