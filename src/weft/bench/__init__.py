"""Benchmarks: a gate, a timer, a floor, a row; suites are data in the folder `benchmarks`."""

from weft.bench.case import Candidate, Case, Peer, Workload
from weft.bench.record import machine
from weft.bench.runner import run
from weft.bench.suites import Suite, benchmarks_folder, load_peers, load_suite, suite_names

__all__ = [
    "Candidate",
    "Case",
    "Peer",
    "Suite",
    "Workload",
    "benchmarks_folder",
    "load_peers",
    "load_suite",
    "machine",
    "run",
    "suite_names",
]
