"""What only a GPU shows of voxels: steady memory and kernels over changing clouds, graph replay.

Seen red with: tables of maps that somebody keeps.  A map takes less than 249 bytes a voxel, which
are those of spconv: seen at 450 with pairs of all offsets and room for all of them.
"""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from torchweft import voxels
from torchweft.capturing.graphs import waiting_raises
from torchweft.errors import IndexRangeError
from torchweft.testing.bounds import assert_as_accurate, plain_error
from torchweft.testing.contract import assert_same_bits
from torchweft.voxels.convolution import launch
from torchweft.voxels.grid import whole
from torchweft.voxels.maps.coordinates import Coordinates
from torchweft.voxels.maps.gpu.tiles import Flags

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


def floor_network():
    return voxels.SparseSequential(
        voxels.SubMConv3d(4, 8, 3),
        voxels.SparseConv3d(8, 8, 3, stride=2, outputs="floor"),
        voxels.SparseMaxPool(2, outputs="floor"),
        voxels.SubMConv3d(8, 8, 3),
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
    monkeypatch.setenv("TORCHWEFT_CACHE_DIR", str(tmp_path))
    launch._convolvers.clear()  # what other tests compiled
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


def test_a_training_step_does_not_wait_for_the_gpu():
    """Nothing is read back once the maps are there."""
    model = network()
    tensor = cloud(20000, 1)
    model(tensor).feats.square().mean().backward()
    with waiting_raises():
        model(tensor).feats.square().mean().backward()


def tables_of(tensor, network):
    """The maps that the layers of a network read, of both sides."""
    voxels.prepare(network, tensor)
    found, level = [], [tensor.coordinates]
    while level:
        at = level.pop()
        for shape, tables in at.tables.items():
            if isinstance(tables, Coordinates):
                continue
            table, back, outputs = tables
            written = outputs or at
            found += [whole(table, written.order, shape.num_offsets), written.rows]
            found += [] if back is None else [back]
            level += [] if outputs is None else [outputs]
    return found


@pytest.mark.parametrize("build", [network, floor_network])
@pytest.mark.parametrize("shuffled", [False, True])
def test_maps_built_at_once_are_those_of_the_cpu(shuffled, build):
    """Of clouds of changing size: more than one launch of each kernel, and levels without room."""
    model, host = build(), build().cpu()
    for seed, count in enumerate((3000, 20000, 200, 30000)):
        tensor = cloud(count, seed)
        rows = torch.arange(len(tensor), device="cuda")
        if shuffled:
            rows = rows[torch.randperm(len(rows), device="cuda")]
        tensor = voxels.SparseTensor(tensor.F[rows], tensor.C[rows], (64, 64, 64), 2)
        other = voxels.SparseTensor(tensor.F.cpu(), tensor.C.cpu(), (64, 64, 64), 2)
        pairs = zip(tables_of(tensor, model), tables_of(other, host), strict=True)
        for ours, exact in pairs:
            assert_same_bits(ours.cpu(), exact, f"cloud {seed}")


def test_a_known_network_gives_the_bits_of_a_new_one():
    """Values and gradients, through tiles that several tables shared launches for."""
    torch.manual_seed(0)
    model = network()
    for seed, count in enumerate((3000, 20000, 200, 30000)):
        found, new = [], copy.deepcopy(model)  # which knows no cloud
        for net in (model, new):
            tensor = cloud(count, seed)
            tensor.feats.requires_grad_()
            y = net(tensor).feats
            y.square().sum().backward()
            found.append([y, tensor.feats.grad, *(p.grad for p in net.parameters())])
            net.zero_grad(set_to_none=True)
        for n, (ours, exact) in enumerate(zip(*found, strict=True)):
            assert_same_bits(ours, exact, f"cloud {seed}, tensor {n}")


@pytest.fixture
def waits(monkeypatch):
    """What the host waits for."""
    found, plain = [], Flags.read

    def read(flags):
        if not flags._waited:
            found.append(flags)
        return plain(flags)

    monkeypatch.setattr(Flags, "read", read)
    return found


@pytest.mark.parametrize("build", [network, floor_network])
def test_a_fresh_cloud_waits_once_for_all_levels(waits, build):
    """And for what was assumed of its rows; torch itself never waits."""
    model = build().eval()
    clouds = [cloud(20000, seed) for seed in range(3)]
    with torch.no_grad():
        for tensor in clouds[:2]:
            model(tensor)
        del waits[:]
        with waiting_raises():
            model(clouds[2])
    assert len(waits) == 2


def test_a_fresh_training_step_waits_once_more_for_all_pairs(waits):
    """In the forward pass; the backward pass never waits."""
    model = network()
    clouds = [cloud(20000, seed) for seed in range(3)]
    for tensor in clouds[:2]:
        model(tensor).feats.square().mean().backward()
    del waits[:]
    with waiting_raises():
        loss = model(clouds[2]).feats.square().mean()
        assert len(waits) == 3
        loss.backward()
    assert len(waits) == 3


@pytest.mark.parametrize("boxed", [False, True])
def test_floors_and_given_voxels_are_those_of_the_cpu(boxed):
    """Maps, look-ups and pruned voxels have the same bits, with negative coordinates too."""
    base = cloud(20000, 3)
    mixed = torch.randperm(len(base), generator=torch.Generator().manual_seed(0)).cuda()
    low = torch.tensor([0, 0, 0, 0] if boxed else [0, 7, 33, 64], device="cuda")
    coords = base.C[mixed] - low
    x = voxels.SparseTensor(base.F, coords, *(((64, 64, 64), 2) if boxed else ()))
    host = voxels.SparseTensor(x.F.cpu(), coords.cpu(), *(((64, 64, 64), 2) if boxed else ()))
    rows = torch.unique(coords[::3] + torch.tensor([0, 1, 0, 0], device="cuda"), dim=0).flip(0)
    mask = x.F[:, 0] > 0
    pairs = [(x.prune(mask), host.prune(mask.cpu()))]
    for a, b in [(x, host), *pairs]:
        floor = {"submanifold": False, "outputs": "floor"}
        calls = [((kernel, stride), floor) for kernel, stride in ((3, 2), (2, 2), ((4, 1, 3), 3))]
        for args, options in [*calls, ((3,), {"coordinates": rows})]:
            there = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
            ours, exact = (
                voxels.kernel_map(a, *args, **options),
                voxels.kernel_map(b, *args, **there),
            )
            found = ours.outputs.rows, ours.sources, ours.targets
            expected = exact.outputs.rows, exact.sources, exact.targets
            for one, another in zip(found, expected, strict=True):
                assert_same_bits(one.cpu(), another, str(args))
        assert_same_bits(a.find(rows).cpu(), b.find(rows.cpu()), "found")
        assert_same_bits(a.C.cpu(), b.C, "rows")


def test_hard_voxels_are_those_of_the_cpu():
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(200000, 5, generator=generator)
    box = (-1.0, -2.0, -0.5, 1.0, 2.0, 0.5)
    for limits in ((5, 4000), (1, 10**6), (32, 100)):
        ours = voxels.point_to_voxel(points.cuda(), (0.1, 0.05, 0.25), box, *limits)
        exact = voxels.point_to_voxel(points, (0.1, 0.05, 0.25), box, *limits)
        for one, another in zip(ours, exact, strict=True):
            assert_same_bits(one.cpu(), another, str(limits))


@pytest.mark.parametrize("shuffled", [False, True])
def test_the_memory_of_a_map(shuffled):
    """Voxels, a table and lists of 27 offsets, what sorting leaves; half of the table then goes.

    In this cloud a voxel has 18 neighbours, so the pairs, which come then, may take more than it.
    """
    place = torch.arange(2**20, device="cuda")
    coords = torch.stack([0 * place, place // 2**14, place // 2**7 % 2**7, place % 2**7], 1).int()
    coords = coords[coords.sum(1) % 3 > 0]
    if shuffled:
        coords = coords[torch.randperm(len(coords), device="cuda")]
    feats = torch.ones(len(coords), 1, device="cuda")

    def build():
        tensor = voxels.SparseTensor(feats, coords, (2**6, 2**7, 2**7), 1)
        found = voxels.kernel_map(tensor, 3)
        launch.prepare(found, gradient=True)
        return found

    build()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = build()
    taken = torch.cuda.max_memory_allocated() - before
    kept = torch.cuda.memory_allocated() - before
    pairs = (int(found.counts.sum()) + len(coords)) // 2
    rounding = 4 * 2**20
    most = (14 + 27 + 6 + 4) * 4 * len(coords) + 2 * 4 * pairs
    assert taken <= max(249 * len(coords), most) + rounding
    assert kept <= most + rounding


def test_compiled_networks_on_fresh_clouds():
    """Two graphs, as accurate as eager calls, and tables of half a submanifold map, as theirs.

    Norms are joined with what follows in eager calls alone: bits differ.
    """
    torch.compiler.reset()
    counter, model = CompileCounterWithBackend("aot_eager"), network()
    eager, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for seed, count in enumerate((3000, 9000, 40_000)):
        given = cloud(count, seed)
        outputs = compiled(given), eager(cloud(count, seed)), wide(given.replace(given.F.double()))
        assert_same_bits(outputs[0].C, outputs[1].C, "voxels")
        results = [
            (out.F, *torch.autograd.grad(out.F.square().mean(), net.parameters()))
            for out, net in zip(outputs, (model, eager, wide), strict=True)
        ]
        for found, plain, exact in zip(*results, strict=True):
            assert_as_accurate(found, exact, plain_error(plain, exact, plain.dtype))
    assert counter.frame_count <= 2
    tensor = cloud(9000, 5)
    compiled(tensor)
    eager = cloud(9000, 5)
    for shape in ({"kernel_size": 3}, {"kernel_size": 2, "stride": 2, "submanifold": False}):
        one, other = voxels.kernel_map(tensor, **shape), voxels.kernel_map(eager, **shape)
        assert_same_bits(one.kept, other.kept, str(shape))


def test_unread_voxels_in_a_graph():
    """Of a tensor whose rows nobody has checked: wrong ones raise, mixed ones are sorted."""
    torch.compiler.reset()
    compiled = torch.compile(voxels.SubMConv3d(4, 8, 3).cuda(), fullgraph=True, backend="eager")
    base = cloud(4000, 0)
    for order in (torch.arange(len(base)), torch.randperm(len(base))):
        rows, feats = base.C[order.cuda()], base.F[order.cuda()]
        tensors = [voxels.SparseTensor(feats, rows, (64, 64, 64), 2) for _ in range(2)]
        found, exact = compiled(tensors[0]), compiled._orig_mod(tensors[1])
        assert_same_bits(found.F.detach(), exact.F.detach(), "features")
    rows = base.C
    rows[7, 2] = 64
    with pytest.raises(IndexRangeError, match=r"value 64 but spatial_shape\[1\] is 64"):
        compiled(voxels.SparseTensor(base.F, rows, (64, 64, 64), 2))


def test_a_program_with_maps_as_inputs():
    """Exported on this device: half tables and orders are its inputs."""
    model = network().eval()

    class Features(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tensor):
            return self.model(tensor).F

    shapes, tensors = torch.export.AdditionalInputs(), [cloud(n, n) for n in (3000, 9000, 20_000)]
    for tensor in tensors:
        model(tensor)
        shapes.add((tensor,))
    program = torch.export.export(Features(), (tensors[0],), dynamic_shapes=shapes)
    wide = copy.deepcopy(model).double()
    for tensor in tensors:
        found, plain = program.module()(tensor).detach(), model(tensor).F.detach()
        exact = wide(tensor.replace(tensor.F.double())).F.detach()  # norms are not joined in graphs
        assert_as_accurate(found, exact, plain_error(plain, exact, plain.dtype))
