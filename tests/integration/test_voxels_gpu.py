"""What only a GPU shows of voxels: steady memory and kernels over changing clouds, graph replay.

Seen red with: tables of maps that somebody keeps.
"""

import pytest
import torch

from weft import voxels
from weft.testing.contract import assert_same_bits
from weft.voxels import launch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def network():
    return voxels.SparseSequential(
        voxels.SubMConv3d(4, 32, 3),
        voxels.SparseBatchNorm(32),
        torch.nn.ReLU(),
        voxels.SparseConv3d(32, 64, 2, stride=2, indice_key="down"),
        voxels.SubMConv3d(64, 64, 3),
        voxels.SparseInverseConv3d(64, 8, 2, indice_key="down"),
    ).cuda()


def cloud(count, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    options = {"generator": generator, "device": "cuda"}
    box = torch.randint(0, 64, (count, 3), **options)
    batch = torch.randint(0, 2, (count, 1), **options)
    coords = torch.unique(torch.cat([batch, box], 1), dim=0)
    feats = torch.randn(len(coords), 4, **options)
    return voxels.SparseTensor(feats, coords, (64, 64, 64), 2)


def test_a_thousand_clouds(monkeypatch, tmp_path):
    """No kernel is compiled after the first clouds, and no memory is kept."""
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    launch._convolver.cache_clear()  # what other tests compiled
    torch.manual_seed(0)

    def compiled_kernels():
        return len(list((tmp_path / "machine").glob("*")))

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(seed):
        tensor = cloud(2000 + (seed * 7919) % 30000, seed)
        optimizer.zero_grad(set_to_none=True)
        model(tensor).feats.square().mean().backward()
        optimizer.step()

    for seed in range(40):
        step(seed)
    optimizer.zero_grad(set_to_none=True)
    kernels_before, bytes_before = compiled_kernels(), torch.cuda.memory_allocated()
    for seed in range(40, 1000):
        step(seed)
    optimizer.zero_grad(set_to_none=True)
    assert kernels_before > 0
    assert compiled_kernels() == kernels_before
    assert torch.cuda.memory_allocated() <= bytes_before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_whole_inference_in_a_graph(dtype):
    """Bias, scale, shift, residual and activation included, on changed features."""
    torch.manual_seed(0)
    tensor = cloud(20000, 0)
    rows = len(tensor.feats)
    draw = [torch.randn(s, device="cuda", dtype=dtype) for s in ((27, 4, 64), (64,), (64,), (64,))]
    weight, bias, scale, shift = draw
    x = torch.randn(rows, 4, device="cuda", dtype=dtype)
    residual = torch.randn(rows, 64, device="cuda", dtype=dtype)

    def run():
        after = {"scale": scale, "shift": shift, "residual": residual, "activation": "relu"}
        return voxels.sparse_conv(tensor.replace(x), weight, 3, bias, **after).feats

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = run()
    x.copy_(torch.randn_like(x))
    residual.copy_(torch.randn_like(residual))
    graph.replay()
    with torch.no_grad():
        assert_same_bits(captured, run(), "replayed")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_training_step_does_not_wait_for_the_gpu():
    """Nothing is read back once the maps are there."""
    model = network()
    tensor = cloud(20000, 1)
    model(tensor).feats.square().mean().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(tensor).feats.square().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
