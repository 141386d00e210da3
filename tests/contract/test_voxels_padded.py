"""Records of networks with room for other clouds: values, training, errors, tables made once.

Replays are those of tests/recorders.py; tests/integration/test_capture_gpu.py has graphs of CUDA.
"""

import copy

import pytest
import torch
from torch import nn

import torchweft
from tests import training_steps as steps
from tests.conftest import INTERPRETED
from tests.contract.test_voxels_jobs import reach
from tests.contract.test_voxels_together import serve
from tests.nearness import same
from tests.recorders import captured
from torchweft import voxels
from torchweft.testing import assert_as_accurate, plain_error
from torchweft.testing.sanitizer import reaching
from torchweft.voxels.convolution import launch
from torchweft.voxels.maps import together
from torchweft.voxels.maps.gpu import jobs, tiles
from torchweft.voxels.norms import functions, torch_path

pytestmark = pytest.mark.kernels

BACKEND = "triton" if INTERPRETED else None
DTYPE = torch.float32 if INTERPRETED else torch.float64
COUNTS = (90, 100, 80, 104, 95)
SHAPE = (9, 9, 9)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """In the interpreter kernels build maps too."""
    if not INTERPRETED:
        yield
        return
    serve(monkeypatch, True)
    with reaching() as tensors:
        reach(monkeypatch, tensors)
        yield


def cloud(count, seed, sort=False):
    made = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 18, (count, 4), generator=made) % torch.tensor([2, *SHAPE])
    coords = torch.unique(drawn, dim=0)
    if not sort:
        coords = coords[torch.randperm(len(coords), generator=made)]
    feats = torch.randn(len(coords), 4, generator=made)
    return voxels.SparseTensor(feats, coords, SHAPE, batch_size=2)


def network(norms=True):
    """Down and up again; on the finest level two layers read one map."""
    torch.manual_seed(0)

    def followed(conv, channels, norm):
        return [conv, norm(channels), nn.ReLU()] if norms else [conv, nn.ReLU()]

    def batch_norm(channels):
        return voxels.SparseBatchNorm(channels, backend=BACKEND)

    ways = {"backend": BACKEND, "bias": not norms}
    return voxels.SparseSequential(
        *followed(voxels.SubMConv3d(4, 16, 3, **ways), 16, batch_norm),
        *followed(voxels.SubMConv3d(16, 16, 3, **ways), 16, nn.BatchNorm1d),
        *followed(voxels.SparseConv3d(16, 8, 2, 2, indice_key="down", **ways), 8, batch_norm),
        voxels.SubMConv3d(8, 8, 3, **ways),
        *([nn.ReLU(), nn.BatchNorm1d(8)] if norms else []),
        voxels.SparseInverseConv3d(8, 3, 2, indice_key="down", backend=BACKEND),
    )


def prepared(net, seed, **options):
    """With tiles or without, in turn."""
    tables_only = seed % 2 > 0
    return voxels.prepare(net, cloud(COUNTS[seed], seed, **options), tables_only=tables_only)


def inference(net):
    def values(tensor):
        with torch.no_grad():
            return net(tensor).F

    return values


def assert_as_plain(found, exact, plain):
    """Results of several calls are as accurate as those of eager calls, each in one tensor."""
    dtype = found[0].dtype
    noise = [plain_error(a, b, dtype).flatten() for a, b in zip(plain, exact, strict=True)]
    own, right = (torch.cat([t.flatten() for t in each]) for each in (found, exact))
    assert_as_accurate(own, right, torch.cat(noise))


@pytest.mark.parametrize(("sort", "thirds"), [(False, False), (True, False), (False, True)])
def test_values(sort, thirds, monkeypatch):
    """Seen red with: an order whose padding names rows twice."""
    if thirds:
        monkeypatch.setattr(launch, "LEAST_IN_THIRDS", 16)
    net = network(norms=False)
    wide = copy.deepcopy(net).double()
    first = prepared(net, 0, sort=sort)
    run, recorder = captured(inference(net), first, sizes=voxels.padded_sizes(first, 1.3))
    clouds = [prepared(net, seed, sort=sort) for seed in range(len(COUNTS))]
    exact = [inference(wide)(tensor.replace(tensor.F.double())) for tensor in clouds]
    assert_as_plain(list(map(run, clouds)), exact, list(map(inference(net), clouds)))
    assert (recorder.records, recorder.replays) == (1, len(COUNTS) - 2)


def test_lengths_that_agree_by_chance():
    """As many voxels as offsets, as channels and as voxels of another level.

    Seen red with: dimensions told by their length.
    """
    net = voxels.SparseSequential(
        voxels.SubMConv3d(27, 5, 3, backend=BACKEND),
        voxels.SparseConv3d(5, 5, 2, 2, indice_key="down", backend=BACKEND),
        voxels.SparseInverseConv3d(5, 3, 2, indice_key="down", backend=BACKEND),
    )
    every = torch.arange(64) % 2, torch.arange(64) // 2 % 4, torch.arange(64) // 8
    every = 2 * torch.stack([every[0] // 2, *every], 1)  # each in a voxel of its own above

    def of(count):
        feats = torch.randn(count, 27, generator=torch.Generator().manual_seed(count))
        tensor = voxels.SparseTensor(feats, every[:count], (16, 16, 16), 1)
        return voxels.prepare(net, tensor)

    run, _ = captured(inference(net), of(27), sizes=voxels.padded_sizes(of(27), 1.3))
    wide, counts = copy.deepcopy(net).double(), (27, 29, 31, 28)
    tensors = [of(count) for count in counts]
    exact = [inference(wide)(tensor.replace(tensor.F.double())) for tensor in tensors]
    assert_as_plain(list(map(run, tensors)), exact, list(map(inference(net), tensors)))


def training(net):
    return steps.training(net, lambda tensor: tensor.F)


def state(net, loss):
    gradients = [p.grad for p in net.parameters()]
    statistics = [b for name, b in net.named_buffers() if "running" in name]
    return [loss.detach(), *(t.detach().clone() for t in (*gradients, *statistics))]


def test_training():
    """Losses, gradients and running statistics are as accurate as those of eager calls.

    In float64 where loops serve: rounding in float32 may turn a ReLU, whose gradients jump.  These
    are rounded and held to the errors of float32, since those of the reference are float64's too.

    Seen red with: statistics, and gradients of batch norms, that count padding.
    """
    plain = network()
    net, wide = copy.deepcopy(plain).to(DTYPE), copy.deepcopy(plain).double()
    first, labels = prepared(plain, 0), torch.zeros(len(cloud(COUNTS[0], 0)), dtype=torch.int64)
    first = first.replace(first.F.to(DTYPE))
    sizes = voxels.padded_sizes(first, 1.3, labels=-100)
    run, recorder = captured(training(net), first, labels, sizes=sizes)
    found, exact, noisy = [], [], []
    for seed in range(len(COUNTS)):
        tensor = prepared(plain, seed)
        labels = torch.arange(len(tensor)) % 3
        result = run(tensor.replace(tensor.F.to(DTYPE)), labels)
        found.append([t.float() for t in state(net, result)])
        noisy.append(state(plain, training(plain)(tensor, labels)))
        rows = tensor.replace(tensor.F.double())
        exact.append(state(wide, training(wide)(rows, labels)))
    assert recorder.replays == len(COUNTS) - 2
    by_result = (zip(*calls, strict=True) for calls in (found, exact, noisy))
    for result in zip(*by_result, strict=True):
        assert_as_plain(*result)


def test_a_loss_that_counts_padding():
    net = network()
    first, labels = prepared(net, 0), torch.arange(len(cloud(COUNTS[0], 0))) % 3
    run, _ = captured(training(net), first, labels, sizes=voxels.padded_sizes(first, 1.3))
    run(first, labels)
    with pytest.raises(torchweft.CaptureError, match="differs with padding"):
        run(first, labels)


def test_a_tensor_as_a_result():
    """It has the voxels of its argument, and layers run on it; seen red with: those of the room."""
    net = network(norms=False)
    first = prepared(net, 0)
    run, _ = captured(net, first, sizes=voxels.padded_sizes(first, 1.3))
    layer = voxels.SubMConv3d(3, 2, 3, backend=BACKEND)
    wide, wide_layer = (copy.deepcopy(each).double() for each in (net, layer))
    found, exact, plain = [], [], []
    with torch.no_grad():
        for seed in range(len(COUNTS)):
            tensor = prepared(net, seed)
            result, eager = run(tensor), net(tensor)
            same(result.C, eager.C)
            found.append(layer(result).F)
            plain.append(layer(eager).F)
            exact.append(wide_layer(wide(tensor.replace(tensor.F.double()))).F)
    assert_as_plain(found, exact, plain)


@pytest.mark.skipif(not INTERPRETED, reason="tiles are built by kernels")
@pytest.mark.parametrize("sort", [False, True])
def test_a_record_sorts_the_rows_of_a_map_once(sort, monkeypatch):
    """Two layers of one map share its tiles, and tables of one kind share launches.

    Where rows do not ascend, no two of these tables are of one kind.  Seen red with: tiles of each
    layer, and of each table.
    """
    net = network(norms=False)
    first = prepared(net, 0, sort=sort)
    run, _ = captured(inference(net), first, sizes=voxels.padded_sizes(first, 1.3))
    for seed in range(3):
        run(prepared(net, seed, sort=sort))
    tensor = prepared(net, 3, sort=sort)
    alone, make = [], tiles._make_tiles
    together, launch = [], jobs.TilePlan.launch
    monkeypatch.setattr(tiles, "_make_tiles", lambda *given: alone.append(1) or make(*given))
    launched = lambda plan: together.append(len(plan.jobs)) or launch(plan)  # noqa: E731
    monkeypatch.setattr(jobs.TilePlan, "launch", launched)
    run(tensor)
    # of two submanifold maps, and of both directions of the strided one
    assert (len(alone), together) == ((0, [2, 2]) if sort else (4, []))


@pytest.mark.skipif(not INTERPRETED, reason="tiles are built by kernels")
def test_tables_only(monkeypatch):
    """No tiles, and no pairs for gradients; seen red with: either."""
    net = network()
    prepared(net, 0)
    built = []
    for name in ("tiles_together", "pairs_together"):
        plain = getattr(together, name)
        monkeypatch.setattr(together, name, lambda jobs, do=plain: built.extend(jobs) or do(jobs))
    voxels.prepare(net, cloud(90, 1), tables_only=True)
    assert not built
    voxels.prepare(net, cloud(90, 2))
    assert len(built) > 4


@pytest.mark.parametrize("read", ["pool", "dense", "voxels"])
def test_what_needs_voxels_cannot_be_recorded(read):
    net = voxels.SubMConv3d(4, 4, 3, backend=BACKEND)

    def function(tensor):
        made = net(tensor)
        pool = voxels.GlobalPool("sum")
        ways = {"pool": lambda: pool(made), "dense": made.dense, "voxels": lambda: made.C}
        return ways[read]()

    first = prepared(net, 0)
    run, _ = captured(function, first, sizes=voxels.padded_sizes(first))
    with pytest.raises(torchweft.CaptureError, match="padding would count as voxels"):
        run(first)


def test_a_tensor_with_other_maps():
    """Seen red with: the whole structure of both, thousands of characters."""
    net = network()
    first = prepared(net, 0)
    run, _ = captured(inference(net), first, sizes=voxels.padded_sizes(first))
    with pytest.raises(torchweft.ShapeError, match=r"(?s)arguments are .* same maps") as told:
        run(cloud(COUNTS[1], 1))
    assert len(str(told.value)) < 800


def test_tensors_that_a_record_cannot_take():
    net = network()
    coords, feats = cloud(50, 0).C, cloud(50, 0).F
    for tensor in (
        voxels.SparseTensor(feats, coords, SHAPE, 2),
        voxels.prepare(net, voxels.SparseTensor(feats, coords, SHAPE)),
        voxels.prepare(net, voxels.SparseTensor(feats, coords, batch_size=2)),
    ):
        with pytest.raises(torchweft.ShapeError, match=r"maps, the spatial_shape .* batch_size"):
            voxels.padded_sizes(tensor)
    whole = voxels.prepare(net, cloud(50, 0))
    for factor in (0.5, float("nan"), float("inf"), "1.3"):  # red before: capture raised, later
        with pytest.raises(torchweft.ShapeError, match=rf"factor is {factor!r}: .* Pass 1\.25"):
            voxels.padded_sizes(whole, factor)


def test_floors_need_no_box():
    """Seen red with: bounds of each cloud in its structure."""
    torch.manual_seed(0)
    net = voxels.SparseSequential(
        voxels.SubMConv3d(4, 8, 3, backend=BACKEND),
        voxels.SparseConv3d(8, 3, 2, 2, outputs="floor", indice_key="down", backend=BACKEND),
        voxels.SparseInverseConv3d(3, 3, 2, indice_key="down", backend=BACKEND),
    )

    def moved(seed):
        boxed = cloud(COUNTS[seed], seed)
        return voxels.SparseTensor(boxed.F, boxed.C - torch.tensor([0, seed, 3, 2 * seed]))

    first = voxels.prepare(net, moved(0))
    run, recorder = captured(net, first, sizes=voxels.padded_sizes(first, 1.3))
    for seed in range(len(COUNTS)):
        found, right = run(voxels.prepare(net, moved(seed))), net(moved(seed))
        same(found.F, right.F.detach())
        same(found.C, right.C)
        assert found.coordinates.bounds == right.coordinates.bounds
    assert (recorder.records, recorder.replays) == (1, len(COUNTS) - 2)


@pytest.mark.skipif(not INTERPRETED, reason="kernels run in the interpreter or on a GPU")
def test_the_comparison_with_padding_runs_kernels(monkeypatch):
    """Torch's operations of a batch norm take three times the memory.

    Seen red with: statistics by torch where what is written is noted.
    """
    monkeypatch.setattr(functions, "_serving", lambda backend, device: "triton")
    net = network()
    first = prepared(net, 0)
    labels = torch.arange(len(first)) % 3
    run, _ = captured(training(net), first, labels, sizes=voxels.padded_sizes(first, labels=-100))
    run(first, labels)
    monkeypatch.setattr(torch_path, "normalised", None)
    before = copy.deepcopy(net.state_dict())
    run(first, labels)
    for name, kept in net.state_dict().items():
        if name.endswith("num_batches_tracked"):
            same(kept, before[name] + 1)
