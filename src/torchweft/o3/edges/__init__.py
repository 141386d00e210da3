"""Graphs: sorted edges, and runs of edges that share a source."""
