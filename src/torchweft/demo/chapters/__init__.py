"""One chapter a family: a module with `chapter(options) -> Chapter`."""

__all__ = ["CHAPTERS"]

CHAPTERS = {"products": 60, "o3": 90, "clifford": 60, "reductions": 60, "voxels": 60}
"""The seconds that each may take on two processors, compilation included."""
