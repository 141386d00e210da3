"""The contract of channelwise products: modes, layouts, graphs, derivatives, doors, errors.

The cases are in tests.cases.channelwise.

Seen red with: one term of a gradient or a tangent left out, sums in the storage dtype, the last
chunk alone summed, a sum over channels left out, gradients that nobody asked for, w's fake rows of
shared weights, autocast inside a body, shared weights mapped side by side, guards on sizes.
"""

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import torchweft
from tests.cases.channelwise import GRAPHS, STRUCTURES, make_case, make_structure, suite
from tests.conftest import BACKENDS, INTERPRETED
from tests.covering import FULL
from torchweft.errors import BackendError, DeviceError, DTypeError, ShapeError
from torchweft.o3 import reference
from torchweft.o3.channelwise import operator, torch_path
from torchweft.o3.channelwise.product import channelwise_product
from torchweft.o3.channelwise.structure import Structure, read
from torchweft.o3.graph import Graph, graph_of
from torchweft.testing import assert_within_bound
from torchweft.testing.contract import (
    BODY_CHECKS,
    Setting,
    assert_same_bits,
    check_values,
    evaluate,
    judge,
)
from torchweft.testing.doors import DOOR_CHECKS, check_default_device, check_numerical

pytestmark = pytest.mark.kernels

SUITE = suite()
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
UVU = STRUCTURES["uvu"]
native = pytest.mark.skipif(INTERPRETED, reason="the doors are checked without TRITON_INTERPRET")


def dtypes(place, case):
    """A program compiles for seconds in each dtype: in the short suite a case has one."""
    name = case.name.partition(": ")[2]
    if INTERPRETED:  # a program takes a millisecond
        return [] if "hub" in name else [DTYPES[place % len(DTYPES)]]
    if FULL:
        return DTYPES
    if name.startswith("uvu, "):  # those of one program
        return [torch.float32]
    return [torch.float64] if name.startswith("ragged, ") else [DTYPES[place % len(DTYPES)]]


def order(case, dtype, backend):
    """Second in float32; of loops, in the short suite, for edges of one structure."""
    if backend == "numba" and not FULL and ("uvu" not in case.name or "rows" in case.name):
        return 1
    return 2 if dtype == torch.float32 or backend == "torch" else 1


SETTINGS = [
    pytest.param(
        case,
        Setting(dtype=dtype, backend=backend, order=order(case, dtype, backend)),
        id=f"{case.name}-{dtype}-{backend}",
    )
    for backend in BACKENDS
    for i, case in enumerate(SUITE.cases)
    for dtype in (DTYPES if backend == "torch" else dtypes(i, case))
]
SCALARS = make_structure([(3, 0)], [(2, 0)], lmax=0)
LOOPED = [make_case("full scalars, shared", SCALARS, GRAPHS["two sets"], shared=True)]
"""Each set of inputs that require a gradient has loops of its own: here those of scalars."""
PROMISES = [
    pytest.param(check, case, backend, id=f"{check.__name__}-{case.name}-{backend}")
    for check in BODY_CHECKS[1:]
    for backend in BACKENDS
    for case in (
        SUITE.full
        if backend == "torch"
        else LOOPED
        if backend == "numba" and not FULL
        else SUITE.full[1:2]  # seconds a kernel
    )
]


def named(case):
    return case.name


def inputs(structure, rows, edges, dtype=torch.float64, seed=0):
    randn = functools.partial(
        torch.randn, dtype=dtype, generator=torch.Generator().manual_seed(seed)
    )
    wx, wy, _, ww = structure.widths
    return randn(rows, wx), randn(edges, wy), randn(edges, ww)


def random_edges(rows, edges, seed=0):
    return torch.randint(rows, (2, edges), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("case", "setting"), SETTINGS)
def test_values_and_derivatives(case, setting):
    check_values(case, setting)


@pytest.mark.parametrize(("check", "case", "backend"), PROMISES)
def test_promises(check, case, backend):
    check(case, Setting(backend=backend, order=2 if backend == "torch" else 1))


@native
@pytest.mark.parametrize("case", SUITE.doors, ids=named)
@pytest.mark.parametrize("check", [*DOOR_CHECKS, check_default_device])
@pytest.mark.singly  # cases share their operator
def test_doors(check, case):
    check(case)


@native
@pytest.mark.parametrize("case", SUITE.small, ids=named)
def test_numerical_gradients(case):
    check_numerical(case)


@pytest.mark.parametrize("backend", BACKENDS)
class TestBodies:
    def test_a_convolution_by_hand(self, backend):
        """x = 0e + 1o, y = 1o: z0 = w0 x1·y / √3, z1 = w1 x0 y."""
        structure = read(
            "[[4,3,4,2],[[1,[[0,0,1,1],[1,1,1,1]],[[0,1,1,0]],[[0,0,1,1],[1,1,1,1]],"
            "[[0,0,1,1],[1,0,1,1]],[[1,0,0,0,1.0],[0,0,1,1,1.7320508075688772]]]]]"
        )
        x = torch.tensor([[1.0, 2, 3, 4], [2, 0, 1, 0]], dtype=torch.float64)
        y = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 2]], dtype=torch.float64)
        w = torch.tensor([[1.0, 1], [2, -1], [1, 3]], dtype=torch.float64)
        graph = Graph(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1]))
        z = channelwise_product(structure, x, y, w, graph, backend=backend)
        root = 3**-0.5
        exact = torch.tensor([[2 * root, 0, -2, 0], [2 * root, 1, 0, 12]], dtype=torch.float64)
        assert_within_bound(z, exact, exact.abs(), 2)

    def test_the_backend_that_is_asked_for_serves(self, backend):
        """However small the call."""
        x, y, w = (t.requires_grad_() for t in inputs(UVU, 4, 4, torch.float32))

        def call():
            z = channelwise_product(UVU, x, y, w, backend=backend)
            return torch.autograd.grad(z.sum(), (x, y, w))

        assert {launch.backend for launch in torchweft.explain(call).launches} == {backend}

    def test_no_paths(self, backend):
        structure = Structure((3, 5, 4, 0), ())
        x, y = torch.ones(6, 3, requires_grad=True), torch.ones(6, 5)
        z = channelwise_product(structure, x, y, backend=backend)
        assert z.shape == (6, 4)
        assert not z.any()
        (gradient,) = torch.autograd.grad(z.sum(), x, materialize_grads=True)
        assert not gradient.any()

    @pytest.mark.parametrize("name", ["uvu ragged", "uuu", "11w"])
    @pytest.mark.singly  # each item compiles for seconds
    def test_third_derivatives(self, backend, name):
        """Sums of several terms are differentiated too."""

        def third(function, problem):
            leaves = [t.clone().requires_grad_() for t in problem.inputs]
            total = (function(*leaves, **problem.tables) * problem.cotangent).sum()
            for _ in range(3):
                gradients = torch.autograd.grad(total, leaves, create_graph=True)
                pairs = zip(gradients, problem.tangents, strict=True)
                total = sum((g * t).sum() for g, t in pairs)
            return dict(zip("xyw", gradients, strict=True))

        case = make_case(f"third, {name}", STRUCTURES[name], GRAPHS["two sets"])
        problem = Setting(backend=backend).pose(case)
        found = third(functools.partial(case.call, backend=backend), problem)
        judge(case, problem, third, found, "third derivatives")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_the_order_of_edges_is_rounding(self, backend, dtype):
        case = make_case("permuted", UVU, GRAPHS["empty rows"])
        x, y, w = (t.to(dtype) for t in case.inputs)
        tables = dict(case.tables)
        src, dst, nodes = tables["src"], tables["dst"], tables["num_nodes"]
        order = torch.randperm(len(src), generator=torch.Generator().manual_seed(1))
        graph = Graph(src[order], dst[order], nodes, len(x))
        found = channelwise_product(UVU, x, y[order], w[order], graph, backend=backend)
        wide = [t.double() for t in (x, y, w)]
        exact = case.oracle(*wide, **tables)
        size = case.magnitude(*(t.abs() for t in wide), **tables)
        terms = case.magnitude(*(torch.ones_like(t) for t in wide), **tables)
        assert_within_bound(found, exact, size, terms)

    def test_a_graph_of_whole_rows_is_row_by_row(self, backend):
        x, y, w = inputs(UVU, 9, 9, torch.float32)
        rows = torch.arange(9)
        found = channelwise_product(UVU, x, y, w, Graph(rows, rows), backend=backend)
        assert_same_bits(found, channelwise_product(UVU, x, y, w, backend=backend), "rows")


def test_leading_dimensions_broadcast():
    x, y, w = inputs(UVU, 6, 6)
    x, w = x.view(2, 3, -1), w.view(2, 3, -1)
    found = channelwise_product(UVU, x, y[:3], w)
    exact = reference.channelwise_reference(
        UVU, x.flatten(0, 1), y[:3].repeat(2, 1), w.flatten(0, 1)
    ).view(2, 3, -1)
    assert_within_bound(found, exact, exact.abs() + 1, 9)
    one = channelwise_product(UVU, x[0, 0], y[0], w[0, 0])
    assert_same_bits(one, found[0, 0], "one row")
    empty = channelwise_product(UVU, x[:0], y[:1], w[0, 0])
    assert empty.shape == (0, 3, UVU.width("z"))


@pytest.mark.parametrize("room", [1, 2**12])
@pytest.mark.parametrize("graph", ["unsorted", "sorted", "rows", "empty rows"])
def test_chunks_change_nothing_beyond_rounding(graph, room, monkeypatch):
    """Seen red with: the first or the last row of a chunk off by one."""
    monkeypatch.setitem(torch_path.CHUNK_BYTES, "cpu", room)
    check_values(make_case("chunks", UVU, GRAPHS[graph]), Setting(backend="torch"))


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_stays_in_its_paths(backend, number):
    """Seen red with: all paths at once."""
    x, y, w = inputs(UVU, 8, 8, torch.float32)
    scalars = torch.zeros_like(x, dtype=torch.bool)
    scalars[3, :5] = True
    reached = channelwise_product(UVU, scalars.float(), y, w) != 0
    spoiled = channelwise_product(UVU, x.masked_fill(scalars, number), y, w, backend=backend)
    assert not spoiled[reached].isfinite().any()
    wide = [t.double() for t in (x, y, w)]
    exact = channelwise_product(UVU, *wide)
    size = exact.abs() + exact.abs().max()
    assert_within_bound(spoiled[~reached], exact[~reached], size[~reached], 64)


def test_wide_sums_of_shared_weights(monkeypatch):
    monkeypatch.setitem(torch_path.CHUNK_BYTES, "cpu", 2**12)
    case = make_case("chunks, shared", UVU, GRAPHS["hub"], shared=True)
    check_values(case, Setting(dtype=torch.bfloat16, backend="torch", order=1))


@pytest.fixture
def rounding_products():
    """torch may round the factors of a product of matrices to bfloat16."""
    matmul = torch.backends.mkldnn.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    yield
    matmul.fp32_precision = before


@pytest.mark.usefixtures("rounding_products")
def test_products_of_matrices_keep_their_digits():
    """Sums are then in float64; on most CPUs torch rounds nothing, so their dtype is looked at."""
    assert torch_path._accumulator(torch.ones(2)) == torch.float64
    check_values(make_case("rounded", UVU, GRAPHS["sorted"]), Setting(backend="torch"))


def test_only_gradients_asked_for_are_computed():
    x, y, w = inputs(UVU, 5, 8, torch.float32)
    graph = Graph(*random_edges(5, 8), 5)

    def launched(*needed):
        leaves = [t.clone().requires_grad_(n) for t, n in zip((x, y, w), needed, strict=True)]
        z = channelwise_product(UVU, *leaves, graph, backend="torch")
        over = [leaf for leaf in leaves if leaf.requires_grad]
        told = torchweft.explain(torch.autograd.grad, z.sum(), over)
        return [launch.kernel for launch in told.launches]

    assert launched(True, False, False) == ["contract_x"]
    assert launched(False, True, True) == ["contract_y", "contract_w"]


def test_explain_says_launches_bytes_and_operations():
    structure = STRUCTURES["scalars"]
    x, y, w = inputs(structure, 10, 10, torch.float32)
    told = torchweft.explain(channelwise_product, structure, x, y, w, backend="torch")
    assert [launch.kernel for launch in told.launches] == ["contract_z"]
    assert told.bytes_min == 4 * 10 * sum(structure.widths)
    assert told.flops == 10 * (2 + 1)


@native
class TestDoors:
    @staticmethod
    def product(x, y, w, src, dst):
        rows = x.shape[0]
        return channelwise_product(UVU, x, y, w, graph_of(src, dst, rows, rows))

    @staticmethod
    def data(rows, edges):
        return (*inputs(UVU, rows, edges), *random_edges(rows, edges))

    def forces(self, x, y, w, src, dst):
        energy = self.product(x, y, w, src, dst).pow(3).sum()
        (force,) = torch.autograd.grad(energy, y, create_graph=True)
        return energy, force

    def test_one_compilation_serves_every_graph(self):
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(self.product, fullgraph=True, dynamic=True, backend=counter)
        for rows, edges in ((11, 40), (13, 50), (30, 9)):
            *given, src, dst = self.data(rows, edges)
            leaves = [t.requires_grad_() for t in given]
            for run in (self.product, compiled):
                z = run(*leaves, src, dst)
                results = [z, *torch.autograd.grad(z.sum(), leaves)]
                if run is self.product:
                    expected = results
            for found, exact in zip(results, expected, strict=True):
                assert_same_bits(found, exact, "compiled")
        assert counter.frame_count == 1

    def test_a_graph_made_before_is_an_input_of_the_compiled_call(self):
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")

        def product(x, y, w, graph):
            return channelwise_product(UVU, x, y, w, graph)

        compiled = torch.compile(product, fullgraph=True, dynamic=True, backend=counter)
        for rows, edges in ((11, 40), (13, 50)):
            *given, src, dst = self.data(rows, edges)
            graph = Graph(src, dst, rows)
            assert_same_bits(compiled(*given, graph), product(*given, graph), "compiled")
        assert counter.frame_count == 1

    @torch._dynamo.config.patch(trace_autograd_ops=True)
    def test_force_training_compiles_as_one_graph(self):
        torch.compiler.reset()
        *given, src, dst = self.data(11, 40)
        leaves = [t.requires_grad_() for t in given]
        compiled = torch.compile(self.forces, fullgraph=True, dynamic=True, backend="aot_eager")
        results = []
        for run in (self.forces, compiled):
            energy, force = run(*leaves, src, dst)
            loss = energy + force.square().sum()
            results.append([energy, force, *torch.autograd.grad(loss, leaves)])
        for exact, found in zip(*results, strict=True):
            scale = exact.abs().max().expand_as(exact)
            assert_within_bound(found, exact, scale, exact.numel())

    def test_export_with_any_number_of_edges(self):
        product = self.product

        class Module(torch.nn.Module):
            def forward(self, *given):
                return product(*given)

        rows, edges = torch.export.Dim("rows"), torch.export.Dim("edges")
        shapes = ({0: rows}, *({0: edges} for _ in range(4)))
        example = self.data(11, 40)
        program = torch.export.export(Module(), example, dynamic_shapes=(shapes,))
        for sizes in ((5, 70), (30, 4)):
            given = self.data(*sizes)
            assert_same_bits(program.module()(*given), product(*given), "exported")

    def test_hessian(self):
        x, y, w, src, dst = self.data(4, 6)

        def energy(y):
            return self.product(x, y, w, src, dst).pow(3).sum()

        found = torch.func.hessian(energy)(y)
        exact = torch.autograd.functional.hessian(energy, y)
        assert_within_bound(found, exact, exact.abs().max().expand_as(exact), exact.numel())

    def test_graphs_cannot_be_mapped(self):
        x, y, w, src, dst = self.data(4, 6)
        with pytest.raises(ShapeError, match=r"mapped by torch.vmap"):
            torch.vmap(self.product, (None, None, None, 0, 0))(
                x, y, w, src.expand(2, -1), dst.expand(2, -1)
            )


def test_small_calls_on_the_cpu_compile_no_loop_of_their_own(monkeypatch):
    x, y, w = inputs(UVU, 3, 3, torch.float32)
    if INTERPRETED:
        pytest.skip("the CPU's choice is checked without TRITON_INTERPRET")

    def kernels():
        told = torchweft.explain(channelwise_product, UVU, x, y, w)
        return [(launch.backend, launch.kernel) for launch in told.launches]

    monkeypatch.setattr(operator, "LOOP_PRODUCTS", 0)
    assert kernels() == [("numba", "few_z")]


class TestErrors:
    x, y, w = inputs(UVU, 4, 6, torch.float32)
    graph = Graph(*random_edges(4, 6), 4)

    def fails(self, kind, match, **changed):
        given = {"x": self.x, "y": self.y, "weight": self.w, "graph": self.graph} | changed
        structure = given.pop("structure", UVU)
        with pytest.raises(kind, match=match):
            channelwise_product(structure, **given)

    def test_widths(self):
        self.fails(ShapeError, r"x is \(4, 19\): its rows must have 20 numbers", x=self.x[:, 1:])
        self.fails(ShapeError, r"y is \(6, 3\): its rows must have 4", y=self.y[:, 1:])
        self.fails(ShapeError, r"weight is \(24,\): its rows must have 25", weight=self.w[0, 1:])
        self.fails(ShapeError, r"Structure\(5 paths, widths \(20, 4, 61, 25\)\)", x=self.x.sum())

    def test_weights(self):
        self.fails(ShapeError, r"weight is None .* must be \(E, 25\), or \(25,\)", weight=None)
        unweighted = make_structure([(5, 0), (5, 1)], [(1, 0), (1, 1)], weighted=False)
        self.fails(ShapeError, r"weight is \(6, 25\) but no path", structure=unweighted)

    def test_rows(self):
        self.fails(ShapeError, r"x is \(3, 20\) but the graph reads 4 rows", x=self.x[1:])
        self.fails(ShapeError, r"y is \(5, 4\) but the graph has 6 edges", y=self.y[1:])
        self.fails(ShapeError, r"weight is \(1, 25\) but the graph has 6", weight=self.w[:1])
        self.fails(ShapeError, r"leading dimensions of x \(4, 20\), y \(6, 4\)", graph=None)

    def test_kinds(self):
        self.fails(DTypeError, "graph is a tuple: it must be a Graph", graph=(1, 2))
        self.fails(DTypeError, "x is a list", x=[1.0])
        self.fails(DTypeError, r"y is torch.float64 but x is torch.float32", y=self.y.double())
        self.fails(DTypeError, r"x is torch.int64", x=self.x.long())
        self.fails(DeviceError, r"y is on meta but x is on cpu", y=self.y.to("meta"))
        meta = {"x": self.x.to("meta"), "y": self.y.to("meta"), "weight": self.w.to("meta")}
        self.fails(DeviceError, r"the graph is on cpu and x on meta.*graph.to\('meta'\)", **meta)

    def test_backends(self):
        missing = "triton" if not INTERPRETED else "cuda"
        with pytest.raises(BackendError, match=f"backend='{missing}' was asked for"):
            channelwise_product(UVU, self.x, self.y, self.w, self.graph, backend=missing)


def test_evaluate_gives_every_derivative():
    """The contract reaches second gradients in every pair of inputs and the cotangent."""
    setting = Setting(backend=BACKENDS[-1])
    case = SUITE.full[0]
    found = evaluate(functools.partial(case.call, backend=setting.backend), setting.pose(case))
    assert len(found) == 1 + 3 + 3 * 4
