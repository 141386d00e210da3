"""Machine code from disk in a fresh process on a GPU: the same bits, and Triton is not asked."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SECONDS = 300

REDUCTION = """
    from torchweft.reductions import Genred
    f = Genred("Exp(-SqDist(x, y)) * b", ["x = Vi(3)", "y = Vj(3)", "b = Vj(2)"], axis=1)
    x, y, b = (torch.rand(3000, d, device="cuda", requires_grad=True) for d in (3, 3, 2))
    z = f(x, y, b)
    z.square().sum().backward()
    results = [z, x.grad, y.grad, b.grad]
"""
PRODUCT = """
    from torchweft import o3
    paths = [(0, 0, 0, "uvu", True), (1, 1, 0, "uvu", True), (0, 1, 1, "uvu", True)]
    conv = o3.TensorProductConv("16x0e+16x1o", "0e+1o", "16x0e+16x1o", paths).cuda()
    graph = o3.Graph(*torch.randint(0, 50, (2, 700), device="cuda"), 50)
    x = torch.randn(50, conv.irreps_in1.dim, device="cuda", requires_grad=True)
    y = torch.randn(700, conv.irreps_in2.dim, device="cuda", requires_grad=True)
    w = torch.randn(700, conv.weight_numel, device="cuda", requires_grad=True)
    z = conv(x, y, w, graph)
    z.square().sum().backward()
    results = [z, x.grad, y.grad, w.grad]
"""
CONVOLUTION = """
    from torchweft import voxels
    coords = torch.unique(torch.randint(0, 20, (3000, 3), device="cuda"), dim=0)
    coords = torch.cat([coords.new_zeros(len(coords), 1), coords], 1)
    x = torch.randn(len(coords), 32, device="cuda", requires_grad=True)
    w = torch.randn(27, 32, 32, device="cuda", requires_grad=True)
    z = voxels.sparse_conv(voxels.SparseTensor(x, coords, (20, 20, 20), 1), w, 3).feats
    z.square().sum().backward()
    results = [z, x.grad, w.grad]
"""


def process(program, asked, tmp_path):
    """The digest of the results; what it imported tells whether Triton was asked for code."""
    text = "import hashlib, torch\ntorch.manual_seed(0)\n" + textwrap.dedent(program)
    text += textwrap.dedent(f"""
        import sys
        assert ("triton.compiler.compiler" in sys.modules) == {asked}
        whole = torch.cat([r.detach().reshape(-1).cpu() for r in results])
        print(hashlib.sha256(whole.numpy().tobytes()).hexdigest())
    """)
    places = {name: str(tmp_path / name) for name in ("TRITON_CACHE_DIR", "TORCHWEFT_CACHE_DIR")}
    done = subprocess.run(
        [sys.executable, "-c", text],
        env=os.environ | places,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("program", [REDUCTION, PRODUCT, CONVOLUTION])
def test_the_second_process_asks_triton_for_nothing(program, tmp_path):
    first = process(program, True, tmp_path)
    assert process(program, False, tmp_path) == first
    for path in (tmp_path / "TORCHWEFT_CACHE_DIR" / "machine").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    assert process(program, True, tmp_path) == first
