"""A small workload, its case, and a peer that is right or wrong: for tests of the benchmark."""

import torch

from benchmarks.harness import Candidate, Case, Workload, run
from benchmarks.harness.phases import PHASES

CPU = torch.device("cpu")


def dot_workload(device, batch):
    """z[n] = s Σ_c x[n,c] y[n,c], by a function that needs no kernel."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(batch or 64, 8, generator=generator) for _ in range(2))
    scale = torch.tensor(-0.5)

    def function(x, y, backend=None):
        return scale * (x * y).sum(1)

    def oracle(x, y, scale):
        return scale * (x * y).sum(1)

    return Workload(
        "dot", (x, y), {"scale": scale}, function, oracle, 2 * x.numel(), 4 * len(x), "N=64 C=8"
    )


class Peer:
    """Someone else: right, or wrong by a part."""

    def __init__(self, name="peer", error=0.0, reason=None):
        self.NAME, self.error, self.reason = name, error, reason

    def missing(self):
        return self.reason

    def adapt(self, workload):
        def function(x, y):
            z = workload.function(x, y)
            last = torch.arange(len(z)) == len(z) - 1
            return z * (1 + self.error * last)

        return Candidate(self.NAME, "torch", function, workload.inputs, workload.oracle)


DOT = Case("dot", "batched", dot_workload, phases=PHASES, backends=("torch",))


def measured(peers=(), case=DOT):
    said = []
    (rows,) = run("toy", [case], peers, CPU, said.append)
    return rows, said
