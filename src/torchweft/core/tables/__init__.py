"""Index tables that arrive with data: plans, segments, how long ones are cut, and their cache."""
