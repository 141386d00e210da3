"""Benchmarks: suites of cases as data, peers beside them, the harness, and its rows of results."""
