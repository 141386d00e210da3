"""Programs as numba loops: their source, what they call, and how they run on threads."""
