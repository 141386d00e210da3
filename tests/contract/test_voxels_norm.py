"""Norms of sparse tensors: torch's own on the rows of the voxels, sample by sample, rank by rank.

Seen red with: the local count in the mean over ranks, a gradient that stays on its rank, the biased
variance kept, the count of padded instead of active positions, statistics in 16 bits.
"""

import copy
import functools
import itertools
import pickle

import pytest
import torch
from torch import distributed, nn

from tests import clouds
from tests.clouds import DEVICE, permuted, same
from tests.conftest import INTERPRETED
from torchweft.errors import DTypeError, ShapeError
from torchweft.testing import assert_as_accurate, plain_error
from torchweft.voxels.layers.norm import (
    SparseBatchNorm,
    SparseGroupNorm,
    SparseInstanceNorm,
    SparseLayerNorm,
)
from torchweft.voxels.maps.tensor import SparseTensor
from torchweft.voxels.norms.functions import batch_norm, rank_norm

cloud = functools.partial(clouds.cloud, device=DEVICE)
empty = functools.partial(clouds.empty, device=DEVICE)
C = 6
NORMS = {
    "batch": lambda: SparseBatchNorm(C),
    "layer": lambda: SparseLayerNorm(C),
    "group": lambda: SparseGroupNorm(2, C),
    "instance": lambda: SparseInstanceNorm(C, affine=True),
}
OF_SAMPLES = {
    "layer": lambda x, norm: nn.functional.layer_norm(x, (C,), norm.weight, norm.bias),
    "group": lambda x, norm: nn.functional.group_norm(x.T[None], 2, norm.weight, norm.bias)[0].T,
    "instance": lambda x, norm: (
        nn.functional.instance_norm(x.T[None], weight=norm.weight, bias=norm.bias)[0].T
    ),
}
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def built(name, dtype=torch.float32, device=DEVICE):
    """A norm with random parameters."""
    torch.manual_seed(5)
    norm = NORMS[name]()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm.to(device, dtype)


def shifted(**options):
    """A cloud whose channels have means and sizes of their own."""
    tensor = cloud(channels=C, density=0.5, shape=(6, 7, 8), **options)
    channel = torch.arange(C, device=DEVICE)
    feats = tensor.feats.detach() * (channel + 1) + channel
    return tensor.replace(feats.to(tensor.dtype).requires_grad_())


def by_sample(tensor, norm, name):
    """The oracle: torch's norm on the rows of each sample."""
    out = torch.zeros_like(tensor.feats)
    for sample in range(tensor.batch_size):
        rows = tensor.C[:, 0] == sample
        out[rows] = OF_SAMPLES[name](tensor.feats[rows], norm)
    return out


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("name", OF_SAMPLES)
def test_norms_of_samples_are_torchs(name, dtype):
    tensor, norm = shifted(dtype=dtype), built(name, dtype)
    exact_norm = copy.deepcopy(norm).double()
    plain_norm = copy.deepcopy(norm).float()
    wide = tensor.replace(tensor.feats.detach().double().requires_grad_())
    plain = tensor.replace(tensor.feats.detach().float().requires_grad_())
    outs = norm(tensor).feats, by_sample(wide, exact_norm, name), by_sample(plain, plain_norm, name)
    assert outs[0].dtype == dtype
    noise = plain_error(outs[2], outs[1], dtype)
    assert_as_accurate(outs[0], outs[1], noise + noise.max())
    grad = torch.randn(tensor.feats.shape).to(tensor.feats)
    given = (
        (outs[0], [tensor.feats, *norm.parameters()], grad),
        (outs[1], [wide.feats, *exact_norm.parameters()], grad.double()),
        (outs[2], [plain.feats, *plain_norm.parameters()], grad.float()),
    )
    if dtype in (torch.float16, torch.bfloat16) and name == "layer":
        return  # torch's own backward, which rounds in between
    for found, exact, rough in zip(*(torch.autograd.grad(*g) for g in given), strict=True):
        noise = plain_error(rough, exact, dtype)
        assert_as_accurate(found, exact, noise + noise.max())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"track_running_stats": False}])
def test_batch_norm_is_batch_norm_1d(options, training):
    """By torch; the kernels are held to it in test_voxels_batch_norm.py."""
    tensor = shifted(dtype=torch.float32)
    ours = SparseBatchNorm(C, **options, backend="torch").to(DEVICE)
    theirs = nn.BatchNorm1d(C, **options).to(DEVICE)
    theirs.load_state_dict(ours.state_dict())
    for _ in range(3):
        out, expected = ours(tensor).feats, theirs(tensor.feats)
        same(out, expected)
    ours.train(training), theirs.train(training)
    out, expected = ours(tensor).feats, theirs(tensor.feats)
    same(out, expected)
    same(ours.state_dict(), theirs.state_dict())
    grad = torch.randn_like(out)
    pairs = zip(
        torch.autograd.grad(out, [tensor.feats, *ours.parameters()], grad),
        torch.autograd.grad(expected, [tensor.feats, *theirs.parameters()], grad),
        strict=True,
    )
    for found, exact in pairs:
        same(found, exact)


@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_gradients(name):
    tensor = cloud(2, channels=C, density=0.4, shape=(3, 3))
    norm = built(name, torch.float64)

    def function(feats):
        return norm(tensor.replace(feats)).feats

    assert torch.autograd.gradcheck(function, tensor.feats)
    assert torch.autograd.gradgradcheck(function, tensor.feats)


@pytest.mark.parametrize("name", OF_SAMPLES)
def test_bits_do_not_depend_on_the_order_of_rows(name):
    norm, tensor = built(name), cloud(channels=C, dtype=torch.float32, shape=(9, 9, 9))
    other, order = permuted(tensor)
    first, second = norm(tensor).feats, norm(other).feats
    same(first[order], second)
    grad = torch.randn_like(first)
    (first,) = torch.autograd.grad(first, tensor.feats, grad)
    (second,) = torch.autograd.grad(second, other.feats, grad[order])
    same(first[order], second)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_no_voxel(name, training):
    norm, tensor = NORMS[name]().to(DEVICE).train(training), empty(channels=C)
    before = copy.deepcopy(norm.state_dict())
    out = norm(tensor)
    out.feats.sum().backward()
    assert out.feats.shape == (0, C)
    for gradient in (tensor.feats.grad, *(p.grad for p in norm.parameters())):
        assert not gradient.any()
    if name == "batch":
        same(norm.running_mean, before["running_mean"])
        same(norm.running_var, before["running_var"])


def test_one_voxel_and_empty_samples():
    feats = torch.randn(3, C, device=DEVICE)
    coords = torch.tensor([[3, 1], [1, 0], [1, 5]], device=DEVICE)
    tensor = SparseTensor(feats, coords, (6,), 6)
    norm = SparseInstanceNorm(C)
    same(norm(tensor).feats[0], torch.zeros_like(feats[0]))  # its own mean
    assert not norm(tensor).feats.isnan().any()
    one = SparseTensor(feats[:1], coords[1:2])
    with pytest.raises(ShapeError, match=r"1 voxel .* at least 2, or running.*eval\(\)"):
        SparseBatchNorm(C)(one)
    ours, theirs = (norm(C).to(DEVICE).eval() for norm in (SparseBatchNorm, nn.BatchNorm1d))
    torch.testing.assert_close(ours(one).feats, theirs(feats[:1]))


@pytest.mark.parametrize("name", NORMS)
def test_state_and_pickle(name):
    norm, tensor = built(name).eval(), shifted(dtype=torch.float32)
    expected = norm(tensor).feats
    fresh = NORMS[name]().to(DEVICE).eval()
    fresh.load_state_dict(norm.state_dict())
    for other in (fresh, pickle.loads(pickle.dumps(norm)), copy.deepcopy(norm)):
        same(other(tensor).feats, expected)
    assert {"weight", "bias"} <= set(norm.state_dict())
    assert f"({C}" in repr(SparseInstanceNorm(C))


@pytest.mark.parametrize("name", NORMS)
def test_errors(name):
    norm = NORMS[name]()
    with pytest.raises(ShapeError, match=rf"Norm was built for {C} channels.*Build it for 3"):
        norm(cloud(channels=3, dtype=torch.float32))
    with pytest.raises(DTypeError, match=r"Norm was given a Tensor.*SparseSequential"):
        norm(torch.ones(4, C))


RANKS = {
    "uneven": (50, 13, torch.float32),
    "low precision": (30, 70, torch.bfloat16),
    "one is empty": (40, 0, torch.float32),
    "all are empty": (0, 0, torch.float32),
    "one each": (1, 1, torch.float32),
}


def rank_rows(first, second, dtype):
    """The rows of both ranks, and a gradient for them."""
    torch.manual_seed(7)
    feats = torch.randn(first + second, C) * torch.arange(1, C + 1) + 100
    return feats.to(dtype), torch.randn(first + second, C).to(dtype)


def of_voxels(norm, x):
    coords = torch.stack([torch.zeros(len(x)), torch.arange(len(x))], 1).long()
    return norm(SparseTensor(x, coords)).feats


def of_padded_rows(norm, x):
    """The same of rows before some of padding; no rank knows how many the other has."""
    rows = torch.cat([x, x.new_full((5, C), torch.nan)])
    return rank_norm(norm, rows, backend=norm.backend, valid=torch.tensor(len(x)))[: len(x)]


WAYS = {"voxels": of_voxels, "padded rows": of_padded_rows}


def take_kernels():
    """A norm of this rank alone, with padding and numbers of rows of its own."""
    norm, rows = built("batch", device="cpu"), torch.randn(9, C, requires_grad=True)
    backend = "triton" if INTERPRETED else None
    batch_norm(norm, rows, backend=backend, valid=torch.tensor(5)).sum().backward()


def rank_steps(norm, feats, grad, way="voxels"):
    """Outputs, input gradients and parameter gradients of two training steps."""
    found = []
    for step in range(2):
        x = (feats * (1 + step)).requires_grad_()
        out = WAYS[way](norm, x)
        found.append((out, *torch.autograd.grad(out, [x, *norm.parameters()], grad)))
    return found


def rank_main(rank, folder):
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
    )
    take_kernels()
    results = {}
    for way, (name, (first, second, dtype)) in itertools.product(WAYS, RANKS.items()):
        feats, grad = rank_rows(first, second, dtype)
        rows = slice(first) if rank == 0 else slice(first, None)
        norm = built("batch", device="cpu")
        norm.backend = "triton" if INTERPRETED else None
        steps = rank_steps(norm, feats[rows], grad[rows], way)
        results[name, way] = steps, norm.state_dict()
    torch.save(results, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(rank_main, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.skipif(not distributed.is_available(), reason="torch without distributed")
@pytest.mark.parametrize("name", RANKS)
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_are_one(way, name, ranks):
    (first, state), (second, other_state) = (rank[name, way] for rank in ranks)
    feats, grad = rank_rows(*RANKS[name])
    norm = built("batch", device="cpu")
    for key, value in state.items():
        same(value, other_state[key])
    if not len(feats):
        same(state["running_mean"], norm.running_mean)
        same(state["running_var"], norm.running_var)
        return
    exact_norm, plain_norm = copy.deepcopy(norm).double(), copy.deepcopy(norm)
    whole = rank_steps(exact_norm, feats.double(), grad.double())
    rough = rank_steps(plain_norm, feats.float(), grad.float())
    for a, b, exact, plain in zip(first, second, whole, rough, strict=True):
        found = [torch.cat([a[i], b[i]]) for i in range(2)]  # rows; parameters add up
        found += [x + y for x, y in zip(a[2:], b[2:], strict=True)]
        for one, other, third in zip(found, exact, plain, strict=True):
            noise = plain_error(third, other, one.dtype)
            assert_as_accurate(one, other, noise + noise.max())
    for key in ("running_mean", "running_var"):
        exact = exact_norm.state_dict()[key]
        noise = plain_error(plain_norm.state_dict()[key], exact, torch.float32)
        assert_as_accurate(state[key], exact, noise + noise.max())
    same(state["num_batches_tracked"], torch.tensor(2))


@pytest.mark.parametrize("name", NORMS)
def test_autocast_keeps_float32(name):
    """As torch keeps layer_norm and group_norm; a batch norm returns what it is given.

    Red before: 16 bits stayed 16 bits in all of them.
    """
    norm, tensor = built(name).eval(), cloud(channels=C, dtype=torch.float32)
    expected = norm(tensor).feats
    with torch.autocast(DEVICE, torch.bfloat16):
        same(norm(tensor).feats, expected)
        narrow = norm(tensor.replace(tensor.feats.bfloat16()))
    assert narrow.dtype == (torch.bfloat16 if name == "batch" else torch.float32)
