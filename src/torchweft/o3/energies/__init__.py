"""Energies of graphs as sums over their nodes."""
