"""Atoms over ranks: domains, neighbour lists, molecular dynamics, models."""
