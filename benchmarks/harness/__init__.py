"""Benchmarks: a gate, a timer, a floor, a row; suites are data in the folders beside."""

from benchmarks.harness.case import Candidate, Case, Peer, Workload
from benchmarks.harness.record import machine
from benchmarks.harness.runner import run
from benchmarks.harness.suites import FOLDER, Suite, load_peers, load_suite, suite_names

__all__ = [
    "FOLDER",
    "Candidate",
    "Case",
    "Peer",
    "Suite",
    "Workload",
    "load_peers",
    "load_suite",
    "machine",
    "run",
    "suite_names",
]
