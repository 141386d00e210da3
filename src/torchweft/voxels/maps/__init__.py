"""Coordinates, keys and kernel maps: which input voxel meets which output voxel."""
