"""First calls: in a fresh process, with empty caches and with code from disk.

    python -m benchmarks.first_calls [--out FOLDER]

A call is everything from the first use of a case's function to its last result, gradients
included, and autograd records it from the beginning: imports, of Triton too, and those of torch's
kernels that load when a case first uses them.  Before it come what torch itself takes to start, and
its import of sympy; the bytecode of torchweft and Triton is there, as pip leaves it.  Rows are of
the suite `first_calls`, their phases "forward, no cache" and "forward, from disk"; the conversion
of a MACE model (mace-torch must be there) is a phase of its own.  Measure on a quiet machine:
compiling uses all cores.

Times are of the wall on a GPU.  Without one they are of the processor, which a busy machine changes
less.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness.case import Candidate, Case, Workload
from benchmarks.harness.gate import expected_results, worst_ratio
from benchmarks.harness.record import Row, append, machine
from benchmarks.harness.suites import FOLDER, load_suite

__all__ = ["CASES", "CPU_CASES", "case_of", "first_call", "main"]

CPU_CASES = [("potential", "64 atoms forces", "forward")]
"""(suite, case, phase): those of a CPU."""

CASES = [
    *CPU_CASES,
    ("potential", "64 atoms training", "forward"),
    ("reductions", "gaussian_100k", "forward"),
    ("o3", "W2n sevennet_l3i5", "forward+backward"),
    ("o3", "W2n sevennet_l3i5", "second"),
    ("voxels", "sphere64_map", "forward"),
    ("voxels", "sphere64_c1024_fp16", "forward+backward"),
    ("reductions", "gaussian_100k", "forward+backward"),
    ("reductions", "gaussian_8k_cells", "forward+backward"),
    ("o3", "W1 mace_L2_carbon", "forward"),
    ("o3", "W4 symcon_mace", "second"),
    ("clifford", "op-sgp-cl30-fp32-B4096-F512", "forward+backward"),
    ("products", "P1 graph_sum", "forward+backward"),
]
"""The same with a GPU: potentials, one case of each family, and the largest."""


def first_call(suite: str, name: str, phase: str) -> list[Row]:
    """Of this process, which must have called nothing of torchweft; the check comes behind.

    A row of the call, and of a converted model one of its conversion before.
    """
    device = _device()
    _start(device)
    case = case_of(suite, name)
    workload = case.build(device, None)
    times = {}
    if (ours := workload.tables.get("ours")) is not None:
        times["conversion"] = _milliseconds(device, lambda: ours.made(*workload.inputs))
    times[phase] = _milliseconds(device, lambda: _once(phase, workload.function, workload.inputs))
    small = case.build(device, case.check_batch)
    ratio = _error(case, small, device, phase)
    return [_row(suite, case, workload, device, name, ms, ratio) for name, ms in times.items()]


def _error(case: Case, small: Workload, device: torch.device, phase: str) -> float:
    """The largest error over its bound."""
    own = Candidate("torchweft", _backend(device), small.function, small.inputs, small.oracle)
    return worst_ratio(phase, own, expected_results(phase, small, own, case.tf32))


def _row(
    suite: str, case: Case, workload: Workload, device: torch.device, phase: str, ms: float,
    ratio: float,
) -> Row:  # fmt: skip
    clock, cache = ("wall", "cold") if device.type == "cuda" else ("processor", "warm")
    return Row(
        suite="first_calls", case=f"{suite}: {case.name}", op=workload.op, mode=case.mode,
        phase=phase, peer="torchweft", backend=_backend(device),
        dtype=str(case.dtype).removeprefix("torch."), shape=workload.shape, l2=cache, ms_p20=ms,
        ms_p50=ms, ms_p80=ms, reps=1, host_us=None, bytes_min=0, flops=0, roofline_pct=None,
        peak_mb=None, bound_ratio=ratio,
        protocol=f"one call in a fresh process, sympy imported, bytecode written, {clock} time",
        **asdict(machine(device)),
    )  # fmt: skip


def _backend(device: torch.device) -> str:
    return "triton" if device.type == "cuda" else "numba"


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _seconds(device: torch.device) -> float:
    """Of the wall when a GPU has done its work; of this process's threads on a CPU."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _milliseconds(device: torch.device, call: Callable[[], object]) -> float:
    begin = _seconds(device)
    call()
    return 1e3 * (_seconds(device) - begin)


def _once(phase: str, function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    """A phase and those before it, as the first step of a training does them."""
    if phase == "forward":
        with torch.no_grad():
            function(*inputs)
        return
    second = phase == "second"
    leaves = [a.detach().requires_grad_() for a in inputs]
    z = function(*leaves)
    g = torch.randn_like(z, requires_grad=second)
    first = torch.autograd.grad(z, leaves, g, create_graph=second)
    if second:
        torch.autograd.grad(first, [g, *leaves], [torch.randn_like(f) for f in first])


def case_of(suite: str, name: str) -> Case:
    """The case of a suite with a name."""
    (case,) = (case for case in load_suite(suite).cases if case.name == name)
    return case


def _start(device: torch.device) -> None:
    """What torch does once: its context, its library of products, its engine, its sort."""
    x = torch.randn(64, 64, device=device, requires_grad=True)
    (x @ x).sum().backward()
    torch.autograd.grad(x * 1, x, torch.ones_like(x))  # the first of a matrix imports sympy
    torch.sort(torch.arange(9000, device=device), stable=True)


def _write_bytecode() -> None:
    """As pip does where it installs; else each process compiles the modules that it imports.

    Files are read once too: a disk that has not read Triton yet would be measured.
    """
    specs = [importlib.util.find_spec(name) for name in ("torchweft", "triton")]
    folders = [str(Path(str(spec.origin)).parent) for spec in specs if spec is not None]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *folders], check=False)
    subprocess.run([sys.executable, "-c", "import triton, torchweft"], check=False)


def _in_a_process(case: tuple[str, str, str], home: str) -> list[Row]:
    folders = {name: f"{home}/{name}" for name in ("TRITON_CACHE_DIR", "TORCHWEFT_CACHE_DIR")}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_calls", "--only", *case],
        env=os.environ | folders, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return [Row(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    """Every case twice, each time in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER / "results")
    parser.add_argument("--only", nargs=3, help="this one, in this process, as rows")
    parser.add_argument("--suite", help="cases of this suite alone")
    options = parser.parse_args()
    if options.only:
        print(json.dumps([asdict(row) for row in first_call(*options.only)]))
        return
    _write_bytecode()
    device = _device()
    path = options.out / machine(device).folder / "first_calls.jsonl"
    for case in CASES if device.type == "cuda" else CPU_CASES:
        if options.suite not in (None, case[0]):
            continue
        with tempfile.TemporaryDirectory() as home:
            for state in ("no cache", "from disk"):
                for row in _in_a_process(case, home):
                    fields = asdict(row) | {"phase": f"{row.phase}, {state}"}
                    append(path, [Row(**fields)])
                    print(f"{row.case:<45} {fields['phase']:<28} {row.ms_p50:8.0f} ms", flush=True)


if __name__ == "__main__":
    main()
