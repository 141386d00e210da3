"""Reductions over the rows of all ranks: the context, the ring, masks over ranks."""
