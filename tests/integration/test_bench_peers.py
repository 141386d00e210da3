"""Adapters of peers, by stand-ins for libraries that need a GPU: arguments, layouts, what is kept.

The stand-ins take the arguments of the real ones and compute by plain torch.  What the real ones
compute, a benchmark's gate checks on a GPU.
"""

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from benchmarks.harness import Candidate, load_suite
from benchmarks.harness.gate import expected_results, judge
from benchmarks.peers import (
    flash_clifford,
    flashlib,
    flexgemm,
    luna,
    spconv,
    spconv_triton,
    torch_compile,
)
from benchmarks.workloads.formulas import formula_case
from benchmarks.workloads.geometric import chain_case
from benchmarks.workloads.neighbours import neighbours_case
from benchmarks.workloads.sparse import conv_case
from torchweft.voxels import SparseTensor, kernel_map

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture
def package(monkeypatch):
    """Makes a module of a name and content."""

    def made(name, **content):
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return made


def verdicts(case, workload, candidate):
    return [
        judge(phase, candidate, expected_results(phase, workload, candidate, case.tf32))
        for phase in case.phases
    ]


class Sparse:
    """spconv's tensor: pairs by name, which its layers put on the tensor that they return."""

    def __init__(self, features, indices, spatial_shape, batch_size, indice_dict=None):
        self.features, self.indices, self.spatial_shape = features, indices, spatial_shape
        self.batch_size, self.indice_dict = batch_size, indice_dict or {}

    def replace_feature(self, features):
        rest = (self.indices, self.spatial_shape, self.batch_size, self.indice_dict)
        return Sparse(features, *rest)


class SubM(nn.Module):
    built = 0

    def __init__(self, c_in, c_out, size, bias, indice_key, fp32_accum):
        super().__init__()
        self.size, self.key = size, indice_key
        self.weight = nn.Parameter(torch.zeros(c_out, size, size, size, c_in))

    def forward(self, given):
        pairs = dict(given.indice_dict)
        if self.key not in pairs:
            SubM.built += 1
            tensor = SparseTensor(given.features, given.indices, given.spatial_shape, 1)
            pairs[self.key] = kernel_map(tensor, self.size)
        matrices = self.weight.flatten(1, 3).permute(1, 2, 0)
        result = given.features.new_zeros(len(given.features), matrices.shape[2])
        for k, matrix in enumerate(matrices):
            rows, to = pairs[self.key].pairs(k)
            result = result.index_add(0, to, given.features[rows] @ matrix)
        rest = (given.indices, given.spatial_shape, given.batch_size)
        return Sparse(result, *rest, pairs)


@pytest.mark.parametrize(("peer", "name"), [(spconv, "spconv"), (spconv_triton, "spconv_triton")])
def test_convolutions_of_spconv_keep_their_pairs(package, peer, name, monkeypatch):
    """Red before: each timed call made the pairs again."""
    constants = package(f"{name}.constants")
    package(f"{name}.pytorch", SparseConvTensor=Sparse, SubMConv3d=SubM)
    package(name)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    case = conv_case("rand50k", 4, dtype=torch.float32)
    workload = case.build(CPU, 200)
    candidate = peer.adapt(workload)
    SubM.built = 0
    assert all(verdict.ratio <= 1 for verdict in verdicts(case, workload, candidate))
    assert SubM.built == 0
    assert (torch.backends.cuda.matmul.fp32_precision == "tf32") == constants.SPCONV_ALLOW_TF32


FLEX = {
    "kernels/triton/spconv/config.py": "import torch\nTILES_OF = torch.cuda.get_device_name()\n",
    "ops/spconv/submanifold_conv3d.py": """
import torch

class SubMConv3dNeighborCache:
    def __init__(self, **tables):
        self.__dict__.update(tables)

class SubMConv3dFunction:
    @staticmethod
    def apply(feats, coords, shape, cache, weight, bias):
        rows = cache.neighbor_map.view(torch.int32)
        found = torch.where(rows[..., None] >= 0, feats[rows.clamp(min=0)], 0)
        return torch.einsum("nki,oki->no", found, weight.flatten(1, 3)) + bias, cache
""",
}


def test_flexgemm_takes_our_map_and_the_tiles_of_an_h100(tmp_path, monkeypatch):
    """Red before: on an H200, whose name it does not know, it tuned among its few default tiles."""
    for path, text in FLEX.items():
        file = tmp_path / "flex_gemm" / path
        file.parent.mkdir(parents=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    flexgemm._library.cache_clear()
    case = conv_case("rand50k", 4, dtype=torch.float32)
    workload = case.build(CPU, 200)
    assert all(v.ratio <= 1 for v in verdicts(case, workload, flexgemm.adapt(workload)))
    assert flexgemm._library()[0].TILES_OF == "NVIDIA H100"
    flexgemm._library.cache_clear()
    for name in [name for name in sys.modules if name.startswith("flex_gemm")]:
        del sys.modules[name]


CLONE = """
import torch
from torchweft.clifford import Algebra, reference

def chain(dims, fc):
    algebra = Algebra.cl(dims)

    def function(x, y, weight, normalize=True):
        x, y = reference.gate(x), reference.gate(y)
        if fc:
            return reference.rms_norm(reference.fully_connected(x, y, weight, algebra), algebra)
        return reference.rms_norm(reference.product(x, y, algebra, weight), algebra)

    return function

fused_gelu_sgp_norm_2d, fused_gelu_sgp_norm_3d = chain(2, False), chain(3, False)
fused_gelu_fcgp_norm_2d, fused_gelu_fcgp_norm_3d = chain(2, True), chain(3, True)
mv_gelu = mv_rmsnorm_2d = mv_rmsnorm_3d = lambda x: x
sgp_2d, sgp_3d, fcgp_2d, fcgp_3d = chain(2, False), chain(3, False), chain(2, True), chain(3, True)
"""


@pytest.fixture
def _clone(tmp_path, monkeypatch):
    for path in ("ops/__init__.py", "tests/baselines.py"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(CLONE)
    monkeypatch.setenv("TORCHWEFT_FLASH_CLIFFORD", str(tmp_path))
    flash_clifford._module.cache_clear()
    yield
    flash_clifford._module.cache_clear()
    for name in ("flash_clifford_ops", "flash_clifford_tests"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("_clone")
@pytest.mark.parametrize("algebra", ["cl20", "cl30"])
@pytest.mark.parametrize("kind", ["sgp", "fc"])
@pytest.mark.parametrize("what", ["op", "layer"])
def test_flash_clifford_takes_the_layers_of_two_algebras(algebra, kind, what):
    """Seen red with a bias on every blade, as its own layer adds it."""
    case = chain_case(what, kind, algebra, rows=16, features=8)
    workload = case.build(CPU, None)
    *rest, bias = workload.inputs
    if what == "layer":  # zero in the suite, which hides where it is added
        workload = workload._replace(inputs=(*rest, torch.ones_like(bias)))
    function = flash_clifford.reference(workload)
    written = Candidate("reference", "torch", function, workload.inputs, workload.oracle)
    for candidate in (flash_clifford.adapt(workload), written):
        assert all(verdict.ratio <= 1 for verdict in verdicts(case, workload, candidate))


@pytest.mark.usefixtures("_clone")
def test_flash_clifford_lacks_other_algebras():
    workload = chain_case("op", "sgp", "cl13", rows=4, features=4).build(CPU, None)
    assert "no layer of flash-clifford" in flash_clifford.adapt(workload)
    assert flash_clifford.reference(workload) is None


@pytest.mark.usefixtures("_clone")
def test_a_compiler_is_given_the_reference_where_it_is(monkeypatch):
    """Red before: `clifford.pairwise`, of which Inductor makes slower code."""
    given = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: given.append(function))
    workload = chain_case("op", "sgp", "cl30", rows=4, features=4).build(CPU, None)
    for module in ("flash_clifford", "clifford"):
        torch_compile.adapt(workload)
        assert given[-1].__module__ == f"benchmarks.peers.{module}"
        monkeypatch.delenv("TORCHWEFT_FLASH_CLIFFORD", raising=False)


@pytest.mark.parametrize("cells", [True, False])
def test_flashlibs_neighbours_are_put_in_order(package, cells):
    """Its scores are rounded, so that its order is not that of its distances."""

    def flash_knn(x, y, k):
        distances = (x.unsqueeze(1) - y.unsqueeze(0)).square().sum(-1)
        found = distances.topk(k, largest=False)
        return found.values.flip(1), found.indices.flip(1)

    package("flashlib", flash_knn=flash_knn)
    case = neighbours_case("some", 300) if cells else formula_case("some", "nearest", 300, 300)
    workload = case.build(CPU, 50)
    (verdict,) = verdicts(case, workload, flashlib.adapt(workload))
    assert (verdict.ratio <= 1, verdict.right) == (True, 1.0)
    assert "no neighbours" in flashlib.adapt(formula_case("g", "gaussian", 9, 9).build(CPU, None))


class Luna(nn.Module):
    """LunaEquivariance's product and convolution: e3nn's arguments and layout, explicit weights."""

    def __init__(self, *irreps_and_paths, internal_weights, shared_weights, dtype):
        super().__init__()
        from e3nn import o3

        assert not internal_weights
        self.product = o3.TensorProduct(
            *irreps_and_paths, internal_weights=False, shared_weights=shared_weights
        ).to(dtype)

    def forward(self, x, y, w, graph=None):
        if graph is None:
            return self.product(x, y, w)
        src, dst, num_nodes = graph
        messages: Tensor = self.product(x.index_select(0, src), y, w)
        return messages.new_zeros(num_nodes, messages.shape[1]).index_add(0, dst, messages)


@pytest.mark.parametrize("name", ["W1 mace", "W2n", "W3 uvw", "W3s", "W5"])
def test_luna_takes_products_and_sorted_graphs(package, name):
    built = []

    def make_graph(src, dst, num_nodes):
        assert bool((dst.diff() >= 0).all())
        built.append(num_nodes)
        return src, dst, num_nodes

    package("LunaEquivariance", TensorProduct=Luna, TensorProductConv=Luna, make_graph=make_graph)
    (case,) = load_suite("o3", name).cases
    workload = case.build(CPU, 5)
    candidate = luna.adapt(workload)
    case = case._replace(phases=("forward", "forward+backward"))
    assert all(verdict.ratio <= 1 for verdict in verdicts(case, workload, candidate))
    assert built == ([5] if "src" in workload.tables else [])  # once for all calls
