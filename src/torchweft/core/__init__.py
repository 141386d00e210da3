"""Machinery that knows no family: plans, segments, the operator boundary, backends."""
