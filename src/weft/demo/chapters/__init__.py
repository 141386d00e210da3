"""One chapter a family: a module with `chapter(options) -> Chapter`."""

__all__ = ["CHAPTERS"]

CHAPTERS = ("products", "o3", "clifford", "reductions", "voxels")
