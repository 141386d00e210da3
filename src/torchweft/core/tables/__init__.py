"""Index tables that arrive with data: sorted plans, segments, and the cache of what follows."""
