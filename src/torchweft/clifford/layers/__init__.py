"""Modules: parameters, arguments, networks, loaders; the arithmetic is in the other folders."""
