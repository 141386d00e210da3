"""Potentials in motion: neighbour lists, and calculators for molecular dynamics."""
