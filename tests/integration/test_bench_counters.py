"""Hardware counters: what ncu prints becomes a file, a table, and what bounds a line."""

import dataclasses
import json

import pytest
import torch

from benchmarks import counters
from benchmarks.harness import tables
from benchmarks.harness.counters import METRICS, kernels_of
from benchmarks.harness.record import append, machine
from tests.benches import measured
from torchweft.errors import WeftError

pytestmark = pytest.mark.slow

GPU = "NVIDIA H200"


def printed(*kernels):
    """What ncu prints: lines of the program and its own, names, units, and a row a kernel."""
    names = [metric.name for metric in METRICS.values()]
    rows = [["ID", "Kernel Name", *names], ["", "", *["unit"] * len(names)]]
    rows += [[str(i), name, *values] for i, (name, *values) in enumerate(kernels)]
    table = ["".join(f',"{cell}"' for cell in row)[1:] for row in rows]
    return "\n".join(["==PROF== Connected", "a line of the program", *table, "==PROF== left", ""])


KERNELS = [
    ("convolve_kernel", "1,000,000", "65", "61", "37", "7,000,000,000", "2000000000", "1500000000"),
    ("fill", "1000", "0", "1", "2", "3", "4", "1900000000"),
    ("gradient_kernel", "2000000", "39", "51", "68", "6700000000", "3850000000", "1700000000"),
]


def test_kernels_are_read_in_the_units_of_tables():
    """Those that take little time are left out.  Seen red with the line of units as a kernel."""
    first, second = kernels_of(printed(*KERNELS))
    assert (first["kernel"], second["kernel"]) == ("convolve_kernel", "gradient_kernel")
    assert list(first.values())[1:] == [1000, 65, 61, 37, 7, 2, 1.5]
    with pytest.raises(WeftError, match="no table of counters, but:\n==ERROR== refused"):
        kernels_of("==ERROR== refused")


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """A program of this name that prints kernels and notes its arguments; and a GPU's name."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "printed").write_text(printed(*KERNELS))
    program = tmp_path / "bin" / "ncu"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncat {tmp_path}/printed\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    here = dataclasses.replace(machine(torch.device("cpu")), gpu=GPU, driver="1")
    monkeypatch.setattr(counters, "machine", lambda device: here)
    return tmp_path


def test_cases_are_counted_and_shown(ncu):
    """Also beside a line whose lead is small: a phase has the kernel that matters in it."""
    call = ["products", "--case", "P1", "--out", str(ncu / "results")]
    assert counters.main(call) == counters.main(call) == 0
    asked = (ncu / "asked").read_text().splitlines()
    assert len(asked) == 2
    assert asked[0].endswith("-m benchmarks.counters products --case P1 graph_sum --inside")
    (path,) = (ncu / "results").glob("*/counters.json")
    (case,) = json.loads(path.read_text())["cases"].values()
    assert (case["suite"], case["case"], len(case["kernels"])) == ("products", "P1 graph_sum", 2)

    (row, *_), _ = measured()
    ours = dataclasses.replace(
        row, gpu=GPU, driver="1", l2="cold", roofline_pct=10.0, suite="products",
        case="P1 graph_sum", ms_p50=1.0, wall_ms=1.0,
    )  # fmt: skip
    for phase in ("forward", "forward+backward"):
        mine = dataclasses.replace(ours, phase=phase)
        peer = dataclasses.replace(mine, peer="a peer", ms_p50=1.1)
        append(path.parent / "products.jsonl", [mine, peer])
    page = tables.performance_page(ncu / "results")
    assert "| 1.1 / 1 | a peer | convolve_kernel: tensor cores 65 %, L2 61 %, DRAM 37 % |" in page
    assert "| 1.1 / 1 | a peer | gradient_kernel: tensor cores 39 %, L2 51 %, DRAM 68 % |" in page
    assert "| P1 graph_sum | gradient_kernel | 2000 | 39 | 51 | 68 | 6.7 | 3.85 | 1.7 |" in page


def test_errors_say_what_to_do(ncu, monkeypatch, capsys):
    (ncu / "printed").unlink()
    call = ["products", "--case", "P1", "--out", str(ncu / "results")]
    assert counters.main(call) == 1
    assert "ncu failed on P1 graph_sum" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nowhere")
    assert counters.main(call) == 1
    assert "install Nsight Compute" in capsys.readouterr().err
