"""Weights h A of edges: fused kernel, blocks of edges, or weights that are formed, in one run.

    python -m benchmarks.radial_linear [--out FOLDER]

Each phase of the cases W1r of the suite o3, all ways checked and timed in turn in one run, with the
peak memory of each.  The ways:

    torchweft     what the library does: forward the fused kernel, derivatives by blocks of edges
    fused, whole  the fused kernel; derivatives in one block, whose weights are formed anew
    blocks        blocks of edges forward too: what is left without the fused kernel
    whole         one block of all edges in each phase; our kernels form h A, which is not kept
    formed        h @ A by torch, kept by autograd, then an ordinary convolution: what is left
                  without the folder radial_linear

Rows are of the suite `radial_linear`.  A way whose `bound_ratio` is above 1 is less exact than the
library promises; "formed" has torch's precision of matrix products.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.harness.case import Candidate, Workload
from benchmarks.harness.record import append, machine
from benchmarks.harness.runner import run
from benchmarks.harness.suites import FOLDER, load_suite
from torchweft.o3 import Graph, TensorProductConv
from torchweft.o3.radial_linear import operator

__all__ = ["WAYS", "Way", "main"]

WAYS = ("fused, whole", "blocks", "whole", "formed")


class Way:
    """A way to compute a radial convolution, measured like another library's.

    Args:
        name: one of WAYS.
        precision: of the convolution.
    """

    def __init__(self, name: str, precision: str) -> None:
        self.NAME, self._precision = name, precision

    def missing(self) -> str | None:
        """Nothing is missing."""
        return None

    def adapt(self, workload: Workload) -> Candidate | str:
        """The candidate for a radial workload of the suite o3."""
        layer, (x, *_) = workload.tables["layer"], workload.inputs
        conv = TensorProductConv(
            layer.x, layer.y, layer.out, layer.instructions, shared_weights=False,
            internal_weights=False, layout="ir_mul", precision=self._precision,
        )  # fmt: skip
        conv.precision += f" {self.NAME}"  # an argument of the operator, so of its derivatives too
        graph = Graph(workload.tables["src"], workload.tables["dst"], len(x), reused=True)

        def function(x: Tensor, y: Tensor, h: Tensor, a: Tensor) -> Tensor:
            if self.NAME == "formed":
                return conv(x, y, h @ a, graph)
            return conv(x, y, src=graph, radial=h, radial_weight=a)

        return Candidate(self.NAME, "triton", function, workload.inputs, workload.oracle)


@contextlib.contextmanager
def _ways() -> Iterator[None]:
    """The operator's body takes the way that stands behind its precision."""
    rule = operator._radial.rule
    body, serves = rule.body, operator._fused

    def by_way(tensors: Sequence[Tensor], *rest: Any) -> list[Tensor]:
        *others, precision = rest
        precision, _, way = precision.partition(" ")
        room = 2**62 if way.endswith("whole") else operator.BLOCK_BYTES["cuda"]
        fused = serves if not way or way.startswith("fused") else lambda *_: None
        with (
            mock.patch.dict(operator.BLOCK_BYTES, cuda=room),
            mock.patch.object(operator, "_fused", fused),
        ):
            return body(tensors, *others, precision)

    with mock.patch.object(rule, "body", by_way):
        yield


def main() -> None:
    """All cases, phase by phase."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER / "results")
    options = parser.parse_args()
    device = torch.device("cuda")
    path = options.out / machine(device).folder / "radial_linear.jsonl"
    for case in load_suite("o3").cases:
        if not case.name.startswith("W1r"):
            continue
        ways = [Way(name, "tf32" if case.tf32 else "tf32x3") for name in WAYS]
        with _ways():
            for rows in run("radial_linear", [case], ways, device, print):
                append(path, rows)
                for row in rows:
                    line = f"{row.case:<45} {row.phase:<17} {row.peer:<12} {row.l2:<5}"
                    print(
                        f"{line} {row.ms_p50:8.3f} ms {row.peak_mb:9.0f} MB"
                        f" error/bound {row.bound_ratio:.2g}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
