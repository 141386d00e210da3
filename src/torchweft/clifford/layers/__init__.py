"""Modules on multivectors, networks made of them, and loaders of their checkpoints."""
