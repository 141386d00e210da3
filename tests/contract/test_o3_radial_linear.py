"""The contract of products whose weights are h A: values, derivatives, doors, memory, errors.

The cases are in tests.cases.radial_linear.

Seen red with: the rows of a block taken one too early, a block's part of A's gradient stored
instead of added, one of two products of a weight left out, all edges in one block (memory); in
kernels the second edge of a pair taken for the first, columns of another path, a low part left out,
sums that go on from one tile of rows to the next; two parts where few terms are summed.
"""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import torchweft
from tests.cases.channelwise import GRAPHS, STRUCTURES, Edges, make_structure
from tests.cases.o3_workloads import conv
from tests.cases.radial_linear import make_case, suite
from tests.conftest import BACKENDS, INTERPRETED
from torchweft import o3
from torchweft.core.tables import cut
from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.channelwise.calls import read_call
from torchweft.o3.graph import graph_of
from torchweft.o3.radial_linear import operator as blocks
from torchweft.o3.radial_linear.operator import radial_product
from torchweft.o3.radial_linear.source import RadialTiling
from torchweft.testing.contract import (
    BODY_CHECKS,
    Setting,
    assert_same_bits,
    check_subsets,
    check_values,
    judge,
)
from torchweft.testing.doors import DOOR_CHECKS, check_numerical

pytestmark = pytest.mark.kernels

if INTERPRETED:
    from torchweft.o3.radial_linear import launch

SUITE = suite()
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
UVU = STRUCTURES["uvu"]
interpreted = pytest.mark.skipif(not INTERPRETED, reason="kernels run in the interpreter")
native = pytest.mark.skipif(INTERPRETED, reason="kernels run in the interpreter, doors without it")
SETTINGS = [
    pytest.param(
        case, Setting(dtype=dtype, backend=backend, order=order), id=f"{case.name}-{dtype}"
    )
    for backend in BACKENDS
    for i, case in enumerate(SUITE.cases)
    for j, dtype in enumerate(DTYPES)
    if i % len(DTYPES) == j and ("hub" not in case.name or not INTERPRETED)
    for order in [2 if backend == "torch" else 1]
]


# an interpreted program takes a millisecond
@pytest.fixture(params=[2**10] if INTERPRETED else [2**25, 2**10])
def room(request, monkeypatch):
    """Of the weights of a block: of all edges, or of a few."""
    monkeypatch.setitem(blocks.BLOCK_BYTES, "cpu", request.param)


@pytest.mark.parametrize(("case", "setting"), SETTINGS)
@pytest.mark.usefixtures("room")
@pytest.mark.singly  # each item compiles for seconds
def test_values_and_derivatives(case, setting):
    check_values(case, setting)


@pytest.mark.parametrize("case", SUITE.full, ids=lambda case: case.name)
@pytest.mark.parametrize("check", BODY_CHECKS[1:])
@pytest.mark.usefixtures("room")
def test_promises(check, case):
    check(case, Setting(backend=BACKENDS[-1], order=0 if INTERPRETED else 2))


@native
@pytest.mark.parametrize("case", SUITE.doors, ids=lambda case: case.name)
@pytest.mark.parametrize("check", DOOR_CHECKS)
def test_doors(check, case):
    check(case)


@native
@pytest.mark.parametrize("case", SUITE.small, ids=lambda case: case.name)
def test_numerical_gradients(case):
    check_numerical(case)


@native
@pytest.mark.usefixtures("room")
def test_third_derivatives():
    """Sums of several terms, with weights that are sums of products, are differentiated too."""
    case = make_case("third", STRUCTURES["uuu"], GRAPHS["two sets"])
    setting = Setting(backend="torch")
    problem = setting.pose(case)

    def third(function, problem):
        leaves = [t.clone().requires_grad_() for t in problem.inputs]
        total = (function(*leaves, **problem.tables) * problem.cotangent).sum()
        for _ in range(3):
            gradients = torch.autograd.grad(total, leaves, create_graph=True)
            total = sum((g * t).sum() for g, t in zip(gradients, problem.tangents, strict=True))
        return {f"input {i}": g.detach() for i, g in enumerate(gradients)}

    judge(case, problem, third, third(case.call, problem), "third derivatives")


@pytest.fixture
def fresh():
    """No kernel is remembered before or after."""
    launch._recipe.cache_clear()
    yield
    launch._recipe.cache_clear()


@interpreted
class TestKernels:
    """Of the forward pass: 32 rows a program, two edges of each at a time."""

    TILINGS = (
        RadialTiling(8, 1),
        RadialTiling(16, 4),
        RadialTiling(8, 2, 1),
        RadialTiling(16, 16),
        RadialTiling(32, 2),
    )

    @pytest.mark.parametrize("tiling", TILINGS, ids=str)
    @pytest.mark.parametrize("carried", [1, 1000])
    def test_tilings_and_groups(self, fresh, monkeypatch, tiling, carried):
        monkeypatch.setattr(launch, "RADIAL_TILING", tiling)
        monkeypatch.setattr(launch, "CARRIED_SUMS", carried)
        for name in ("uvu ragged", "uvu ir_mul"):
            case = make_case(f"{name}, tilings", STRUCTURES[name], GRAPHS["unsorted"])
            check_values(case, Setting(backend="triton", order=0))

    @pytest.mark.parametrize("hidden", [1, 16, 40])
    @pytest.mark.parametrize("name", ["unsorted", "sorted", "empty rows", "nobody"])
    def test_many_channels(self, name, hidden):
        structure = conv(((70, 1), (3, 0)), (0, 1), natural=False)
        case = make_case(f"many channels, {name}", structure, GRAPHS[name], hidden)
        check_values(case, Setting(backend="triton", order=0))

    def test_many_rows(self, fresh, monkeypatch):
        monkeypatch.setattr(launch, "PROGRAMS_PER_PROCESSOR", 1)
        src, dst = torch.randint(70, (2, 150), generator=torch.Generator().manual_seed(0))
        case = make_case("many rows", STRUCTURES["scalars"], Edges(src, dst, 70, 70))
        check_values(case, Setting(backend="triton", order=0))

    def test_frozen_inputs(self):
        """Some derivatives of derivatives are forward calls whose tensors come in another order."""
        structure = make_structure([(3, 0)], [(1, 1)], lmax=1)
        edges = Edges(torch.tensor([0, 1, 1]), torch.tensor([1, 1, 0]), 2, 2)
        case = make_case("frozen", structure, edges)
        check_subsets(case, Setting(backend="triton"))

    def test_parts_and_one_kernel_for_a_group_and_nothing_else(self):
        case = make_case("explained", UVU, GRAPHS["unsorted"])
        setting = Setting(backend="triton", order=0)
        told = torchweft.explain(setting.run, case, setting.pose(case))
        kernels = ["row_parts", "column_parts", "radial_linear"]
        assert [launch.kernel for launch in told.launches] == kernels
        assert told.flops == 2 * 40 * case.inputs[2].shape[1] * UVU.width("w")

    def test_precision(self):
        """In one part h and A have 11 bits."""
        structure = make_structure([(5, 0), (5, 1)], [(1, 0), (1, 1)])
        case = make_case("p", structure, GRAPHS["sorted"])
        x, y, h, a = (t.float() for t in case.inputs)
        edges = GRAPHS["sorted"]
        graph = graph_of(edges.src, edges.dst, edges.num_nodes, edges.num_sources)
        wide = [t.double() for t in (x, y, h, a)]
        exact = case.oracle(*wide, **case.tables)
        size = case.magnitude(*(t.abs() for t in wide), **case.tables)
        worst = {}
        for precision in ("tf32x3", "tf32"):
            found = radial_product(
                structure, x, y, h, a, graph, backend="triton", precision=precision
            )
            worst[precision] = float(((found - exact).abs() / size.clamp_min(1e-9)).max())
        assert worst["tf32x3"] < 2**-21 < 2**-15 < worst["tf32"] < 2**-11

    def test_what_goes_by_blocks(self, monkeypatch):
        """Gradients, float64, factors y of a channel each, rows that are cut, too much of A."""
        tables, like = graph_of(*GRAPHS["sorted"]).tables, torch.zeros(1)
        cut_rows = tables._replace(z_slices=cut(tables.z_indptr, 2))

        def serves(call="xywa|z:0,1,2,3", structure=UVU, like=like, tables=tables, hidden=8):
            return launch.serves(structure, read_call(call), like, tables, hidden, "tf32")

        assert serves()
        assert not serves("xywaz|x:1,4,2,3")
        assert not serves("xywaxa|z:0,1,2,5+4,1,2,3")
        assert not serves(like=like.double())
        assert not serves(structure=STRUCTURES["uuu"])
        assert not serves(tables=cut_rows)
        monkeypatch.setattr(launch, "_room", lambda device: 2**16)
        assert not serves(hidden=512)


@native
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_of_all_edges_are_never_in_memory(backend, monkeypatch):
    """Nothing that torch allocates, in bodies too, is as large; forward and both derivatives."""
    monkeypatch.setitem(blocks.BLOCK_BYTES, "cpu", 2**20)
    conv = o3.TensorProductConv(
        "160x0e", "0e+1o", "160x0e+160x1o", [(0, 0, 0, "uvu", True), (0, 1, 1, "uvu", True)] * 2,
        backend=backend,
    )  # fmt: skip
    edges, generator = 4000, torch.Generator().manual_seed(0)
    src, dst = torch.randint(40, (2, edges), generator=generator)
    sizes = ((40, 160), (edges, 4), (edges, 8), (8, conv.weight_numel))
    leaves = [torch.randn(s, generator=generator).requires_grad_() for s in sizes]
    x, y, h, a = leaves
    graph = o3.Graph(src, dst, 40)
    cpu = [ProfilerActivity.CPU]
    with profile(activities=cpu, profile_memory=True, acc_events=True) as profiled:
        z = conv(x, y, None, graph, radial=h, radial_weight=a)
        first = torch.autograd.grad(z.square().sum(), leaves, create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    events = profiled.profiler.kineto_results.events()
    largest = max(event.nbytes() for event in events if event.name() == "[memory]")
    assert 2**19 < largest < edges * conv.weight_numel  # a quarter of their bytes


@native
class TestConvolution:
    @staticmethod
    def layer(modes="uvu", **options):
        paths = [(0, 0, 0, modes, True), (0, 1, 1, "uvu", True), (1, 1, 0, "uvu", False)]
        return o3.TensorProductConv("4x0e+4x1o", "0e+1o", "4x0e+4x1o", paths, **options).double()

    @staticmethod
    def data(conv):
        generator = torch.Generator().manual_seed(0)
        src, dst = torch.randint(6, (2, 20), generator=generator)
        sizes = ((6, 16), (20, 4), (20, 3), (3, conv.weight_numel))
        tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes]
        return *tensors, o3.Graph(src, dst, 6)

    @pytest.mark.parametrize("modes", ["uvu", "uvw"])
    def test_paths_without_weights_and_modes_that_mix(self, modes):
        conv = self.layer(modes)
        x, y, h, a, graph = self.data(conv)
        found = conv(x, y, None, graph, radial=h, radial_weight=a)
        assert_same_bits(found, conv(x, y, h @ a, graph), modes)

    def test_errors(self):
        conv = self.layer()
        x, y, h, a, graph = self.data(conv)
        with pytest.raises(ShapeError, match=r"radial is \(5, 3\) but the graph has 20 edges"):
            conv(x, y, None, graph, radial=h[:5], radial_weight=a)
        with pytest.raises(DTypeError, match=r"radial_weight is torch.float32"):
            conv(x, y, None, graph, radial=h, radial_weight=a.float())
        with pytest.raises(DTypeError, match="precision is 'bf16': it must be one of tf32x3, tf32"):
            self.layer(precision="bf16")

    def test_graphs_cannot_be_mapped(self):
        conv = self.layer()
        x, y, h, a, graph = self.data(conv)

        def run(src):
            return conv(x, y, None, src, graph.dst.long(), 6, radial=h, radial_weight=a)

        with pytest.raises(ShapeError, match=r"mapped by torch.vmap|given to torch.vmap"):
            torch.vmap(run)(graph.src.long().expand(2, -1))
