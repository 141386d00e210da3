"""The first call of a fresh process with empty caches gives the bits of every later one.

Kernels that are tuned when first called would add into what the caller sees, or sum in another
order.  Seen red with: a gradient that the first call of a process adds twice.
"""

import os
import subprocess
import sys

import pytest
import torch

from tests.conftest import INTERPRETED
from torchweft.testing.contract import assert_same_bits
from torchweft.voxels import SparseTensor, sparse_conv

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(INTERPRETED, reason="a process of its own, natively"),
]

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
LINES = [
    (16, 16, 3, 1, 0, HALF),
    (64, 64, 3, 1, 1, HALF),
    (1, 1, 3, 1, 1, HALF),
    (64, 32, 3, 1, 1, HALF),
    (8, 16, 3, 2, 1, HALF),
    (4, 8, 5, 1, 2, HALF),
    (64, 64, 3, 1, 1, BRAIN),
    (16, 16, 5, 1, 2, BRAIN),
    (64, 32, 3, 1, 1, SINGLE),
    (1, 1, 3, 1, 1, SINGLE),
    (16, 16, 5, 2, 2, SINGLE),
]
"""C_in, C_out, kernel, stride, padding and dtype, of the seed and beside it."""


def results(line):
    """Output and gradients of one call, on the GPU if there is one."""
    c_in, c_out, kernel, stride, padding, dtype = line
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(c_in)
    coords = torch.unique(torch.randint(0, 16, (512, 3), generator=generator), dim=0)
    coords = torch.cat([torch.zeros_like(coords[:, :1]), coords], 1).to(device)
    x = torch.randn(len(coords), c_in, generator=generator).to(device, dtype).requires_grad_()
    w = torch.randn(kernel**3, c_in, c_out, generator=generator).to(device, dtype).requires_grad_()
    tensor = SparseTensor(x, coords, (16, 16, 16), 1)
    y = sparse_conv(tensor, w, kernel, stride=stride, padding=padding, submanifold=False).feats
    y.float().abs().sum().backward()
    return [t.detach().cpu() for t in (y, x.grad, w.grad)]


def keep_two_calls(path):
    torch.save([[results(line) for line in LINES] for _ in range(2)], path)


def test_the_first_call_of_a_fresh_process(tmp_path):
    path = tmp_path / "results.pt"
    code = f"from {__name__} import keep_two_calls; keep_two_calls({str(path)!r})"
    caches = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "TORCHWEFT_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | caches)
    first, second = torch.load(path)
    for line, once, twice in zip(LINES, first, second, strict=True):
        here = results(line)
        for name, a, b, c in zip(("y", "dx", "dw"), once, twice, here, strict=True):
            assert a.isfinite().all()
            assert_same_bits(b, a, f"{name} of {line}, the second call")
            assert_same_bits(c, a, f"{name} of {line}, another process")
