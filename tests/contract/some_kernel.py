"""A kernel that only tests know, in a process that has a disk of its own and no GPU."""

import importlib
import os
import pathlib
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import torch

import torchweft
from tests.contract.absent_gpu import Driver, stand_in
from torchweft.core import files
from torchweft.core.gpu import binaries
from torchweft.core.printing import modules as generated

HELPERS = """
import triton
import triton.language as tl

FACTOR = tl.constexpr(2)


@triton.jit
def scaled(x):
    return x * FACTOR


@triton.jit
def changed(x):
    return scaled(x) + 1
"""

KERNEL = """
import triton
import triton.language as tl

from torchweft.helpers_of_a_test import changed


@triton.jit
def some_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(y_ptr + i, changed(x), mask=i < n)
"""


def a_process(monkeypatch: Any, tmp_path: pathlib.Path) -> Iterator[Driver]:
    """For a fixture: folders of its own, none of Triton's variables, a GPU that is not there."""
    monkeypatch.setenv("TORCHWEFT_CACHE_DIR", str(tmp_path / "torchweft"))
    for name in [name for name in binaries.os.environ if name.startswith("TRITON_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(torchweft, "__path__", [*torchweft.__path__, str(tmp_path / "more")])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it is known by size and second alone
    binaries._versions.cache_clear()
    yield stand_in(monkeypatch)
    binaries._versions.cache_clear()
    forget()


def forget():
    """As in a process of its own."""
    for name in ("torchweft.helpers_of_a_test", "torchweft.kernel_of_a_test"):
        sys.modules.pop(name, None)
        generated.as_loaded.pop(name, None)
    generated.load.cache_clear()
    importlib.invalidate_caches()


def save(name, text):
    path = pathlib.Path(torchweft.__path__[1]) / f"{name}.py"
    files.write(path, text.encode())
    second = zlib.crc32(text.encode())  # that of the text: machine code holds it
    os.utime(path, (second, second))


def printed(helpers=HELPERS, kernel=KERNEL):
    """A function of a generated module."""
    forget()
    save("helpers_of_a_test", helpers)
    return generated.Jitted(
        "some_kernel", lambda: kernel, lambda: generated.load("kernel_of_a_test", kernel)
    )


def written(helpers=HELPERS, kernel=KERNEL):
    """A function of a module that was not imported."""
    forget()
    save("helpers_of_a_test", helpers)
    save("kernel_of_a_test", kernel)
    return generated.written.__wrapped__("torchweft.kernel_of_a_test", "some_kernel")


def live(helpers=HELPERS, kernel=KERNEL):
    """A function that Triton has made."""
    return written(helpers, kernel).function()


def arguments(n=100, dtype=torch.float32, shift=0, block=128):
    x = torch.zeros(64 + shift, dtype=dtype)
    return x[shift:], torch.zeros(64), n, block
