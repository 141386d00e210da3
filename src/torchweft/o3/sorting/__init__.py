"""Entries sorted by their row: the edges of each node, the nodes of each element."""
