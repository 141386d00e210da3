"""Scenes of voxels over ranks: boxes, and maps that read the voxels beside them."""
