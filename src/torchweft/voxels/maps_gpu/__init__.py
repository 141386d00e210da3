"""Kernel maps on a GPU: search, sorting, and rows sorted into tiles."""
