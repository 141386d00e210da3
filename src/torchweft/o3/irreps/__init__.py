"""Irreps and their arithmetic: 3j symbols, rotations, layouts, instructions."""
