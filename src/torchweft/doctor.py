"""What this machine has, what is missing, what to do about it.

Packages are imported in processes of their own, so that one that is missing, broken or crashes
the interpreter is a line of the report.  Standard library only.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torchweft
from torchweft.core import versions

__all__ = ["Finding", "examine"]

OLDEST_PYTHON = (3, 11)
SECONDS = 120


class Finding(NamedTuple):
    """One line of the report."""

    what: str
    state: str  # ok, missing, broken
    text: str
    advice: str = ""
    needed: bool = False  # torchweft cannot be used without it

    @property
    def fatal(self) -> bool:
        """Whether torchweft cannot be used because of it."""
        return self.needed and self.state != "ok"

    def __str__(self) -> str:
        line = f"{self.what:<15} {self.state:<8} {self.text}"
        return f"{line}\n{'':<25}to do: {self.advice}" if self.advice else line


def examine() -> Iterator[Finding]:
    """The findings in a fixed order, each as soon as it is known."""
    ask = functools.partial
    probes = [
        _torchweft,
        _python,
        ask(_package, "torch", _TORCH, f'pip install "torch>={_oldest("torch")}"', needed=True),
        _gpu,
        ask(_package, "triton", _TRITON, f'pip install "triton>={_oldest("triton")}", for GPUs'),
        _launches,
        ask(_package, "numba", _NUMBA, "pip install numba, for the fast CPU path"),
        _interpreter,
        _compiler,
        *(ask(_optional, name, use) for name, use in _OPTIONAL.items()),
        *(ask(_cache, variable) for variable in _CACHES),
        *(ask(_product, backend) for backend in ("torch", "numba", "triton")),
    ]
    with ThreadPoolExecutor(4) as pool:
        yield from pool.map(lambda probe: probe(), probes)


_TORCH = """
import torch
kind = f"CUDA {torch.version.cuda}" if torch.version.cuda else None
kind = kind or (f"HIP {torch.version.hip}" if torch.version.hip else "CPU build")
print(f"{torch.__version__}, {kind}, {torch.get_num_threads()} threads")
"""

NO_TORCH = 4

_WITH_TORCH = f"""
try:
    import torch
except Exception:
    raise SystemExit({NO_TORCH})
"""

_GPUS = """
count = torch.cuda.device_count()
for i in range(count):
    p = torch.cuda.get_device_properties(i)
    print(f"{p.name}, {p.total_memory / 2**30:.0f} GiB, capability {p.major}.{p.minor}")
"""

_TRITON = """
import triton
import triton.language
print(triton.__version__)
"""

_NUMBA = """
import numba
print(f"{numba.__version__}, {numba.config.NUMBA_NUM_THREADS} threads")
"""

_PRODUCT = """
import torchweft
from torchweft import products
device = "cuda" if torch.cuda.is_available() and {backend!r} != "numba" else "cpu"
x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device, requires_grad=True)
try:
    z = products.mul_segment(x, x, torch.tensor([0, 2], device=device), backend={backend!r})
    (gradient,) = torch.autograd.grad(z.sum(), x)
except torchweft.BackendError as error:
    print(str(error).split(": ")[1])  # the reason; what to do stands with the package
    raise SystemExit(3)
if z.tolist() != [[10.0, 20.0]] or gradient.tolist() != [[2.0, 4.0], [6.0, 8.0]]:
    raise SystemExit(f"wrong numbers: {{z.tolist()}}, {{gradient.tolist()}}")
print(f"a product and its gradient are right on {{device}}")
"""

_OPTIONAL = {
    "matplotlib": "the pictures of torchweft demo",
    "rich": "progress bars",
    "ase": "molecules in torchweft demo, and files of atoms",
    "laspy": "point clouds in .las",
    "lazrs": "point clouds in .laz",
    "scipy": "neighbours of points in torchweft demo",
}

_CACHES = {
    "TRITON_CACHE_DIR": "~/.triton",
    "TORCHINDUCTOR_CACHE_DIR": tempfile.gettempdir(),
    "NUMBA_CACHE_DIR": str(Path(__file__).parent),
    "TORCHWEFT_CACHE_DIR": "~/.cache/torchweft",
}
"""Variables that name a folder of compiled code, and the folder where they are not set."""


def _ask(code: str) -> subprocess.CompletedProcess[str]:
    """What a fresh Python answers."""
    command = [sys.executable, "-c", code]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {SECONDS} s")


def _package(what: str, code: str, advice: str, *, needed: bool = False) -> Finding:
    answer = _ask(code)
    if answer.returncode == 0:
        text = answer.stdout.strip()
        return Finding(what, "ok", f"{text}; {_tested(what, text)}", needed=needed)
    reason = _last_line(answer)
    if f"No module named '{what}'" in reason:
        return Finding(what, "missing", "not installed", advice, needed)
    return Finding(what, "broken", reason, f"install it anew: {advice}", needed)


def _oldest(package: str) -> str:
    """The first version that was tested."""
    return ".".join(map(str, versions.RANGES[package][0]))


def _tested(package: str, version: str) -> str:
    """Whether this version was tested, in words."""
    if versions.is_tested(package, version):
        return "tested"
    first, last = (".".join(map(str, v)) for v in versions.RANGES[package])
    return f"not tested ({first} to {last} {'is' if first == last else 'are'})"


def _launches() -> Finding:
    """Whether kernels are compiled and launched by torchweft or by Triton."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return Finding("launches", "missing", "kernels need triton")
    if versions.launches_fast(triton):
        return Finding("launches", "ok", f"fast: machine code of triton {triton} is known")
    known = " ".join(".".join(map(str, v)) for v in versions.FAST_LAUNCH)
    text = f"by triton {triton} itself: the same results, but a process starts its first kernel"
    return Finding(
        "launches",
        "ok",
        f"{text} seconds later and launches cost the host more",
        f"nothing, or install triton {known} if small calls matter",
    )


def _last_line(answer: subprocess.CompletedProcess[str]) -> str:
    lines = answer.stderr.strip().splitlines()
    return lines[-1] if lines else f"ended with code {answer.returncode}"


def _torchweft() -> Finding:
    return Finding("torchweft", "ok", f"{torchweft.__version__}, {Path(__file__).parent}")


def _python() -> Finding:
    text = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    text += f", {os.cpu_count()} processors"
    if sys.version_info[:2] < OLDEST_PYTHON:
        return Finding("python", "missing", text, "use python 3.11 or newer", needed=True)
    return Finding("python", "ok", text, needed=True)


def _optional(name: str, use: str) -> Finding:
    try:
        return Finding(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing", "not installed", f"pip install {name}, for {use}")


def _gpu() -> Finding:
    answer = _ask(_WITH_TORCH + _GPUS)
    if answer.returncode == NO_TORCH:
        return Finding("gpu", "missing", "unknown without torch")
    if answer.returncode:
        return Finding("gpu", "broken", _last_line(answer), "check the driver with nvidia-smi")
    if names := answer.stdout.strip().splitlines():
        return Finding("gpu", "ok", "; ".join(names))
    if shutil.which("nvidia-smi") or shutil.which("rocm-smi"):
        return Finding(
            "gpu",
            "missing",
            "a driver is there, but torch sees no GPU",
            "install a torch built for this GPU: https://pytorch.org/get-started",
        )
    return Finding("gpu", "missing", "none; torchweft runs on the CPU")


def _interpreter() -> Finding:
    on = os.environ.get("TRITON_INTERPRET") == "1"
    return Finding(
        "interpreter",
        "ok",
        "on: Triton kernels run on the CPU, slowly" if on else "off",
        "unset TRITON_INTERPRET for speed" if on else "",
    )


def _compiler() -> Finding:
    found = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if found:
        return Finding("c++", "ok", found)
    return Finding(
        "c++", "missing", "no compiler", "install g++: torch.compile and Triton need a compiler"
    )


def _cache(variable: str) -> Finding:
    folder = Path(os.environ.get(variable, _CACHES[variable])).expanduser()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    what = variable.split("_")[0].lower() + " cache"
    what = what.replace("torchinductor", "inductor")
    if os.access(existing, os.W_OK):
        return Finding(what, "ok", str(folder))
    advice = f"set {variable} to a folder that you may write, else code is compiled every time"
    return Finding(what, "broken", f"{folder} cannot be written", advice)


def _product(backend: str) -> Finding:
    what = f"{backend} path"
    answer = _ask(_WITH_TORCH + _PRODUCT.format(backend=backend))
    if answer.returncode == NO_TORCH:
        return Finding(what, "missing", "unknown without torch")
    if answer.returncode == 0:
        return Finding(what, "ok", answer.stdout.strip(), needed=backend == "torch")
    if answer.returncode == 3:
        return Finding(what, "missing", answer.stdout.strip())
    advice = "report this, with the output of torchweft doctor"
    return Finding(what, "broken", _last_line(answer), advice, needed=backend == "torch")
