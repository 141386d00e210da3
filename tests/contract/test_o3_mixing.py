"""Weights that mix copies: kernels against float64, in the interpreter; derivatives, layers.

Seen red with: parts of a sum dropped, the factor of a path left out of the gradient of weights,
low parts of float32 left out, blocks that follow each other joined in the wrong order; rows of a
kind that end in the next one's tile, a kind's first part left out, weights of the kind before;
steps of a matrix with kinds inside taken for those of one without, low parts left out where weights
are read as they are.
"""

import pytest
import torch

from tests.conftest import INTERPRETED

if not INTERPRETED:
    pytest.skip("kernels run here in the interpreter alone", allow_module_level=True)

from torchweft import explain, o3
from torchweft.core.recorded import Run
from torchweft.o3.adapters.mace import _ByElement
from torchweft.o3.adapters.model_call import Call
from torchweft.o3.mixing import launch as mixing_launch
from torchweft.o3.mixing import operator as mixing
from torchweft.o3.mixing.blocks import CopyBlock, MatrixPath, Mixing
from torchweft.o3.mixing.operator import by_torch, mix, rows_of_elements
from torchweft.testing import assert_within_bound
from torchweft.testing.contract import assert_same_bits

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]

LAYOUTS = ["mul_ir", "ir_mul"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
RESULTS = {"z": "tw", "t": "zw", "w": "tz"}


@pytest.fixture(params=["prepared", "as they are"])
def weights(request, monkeypatch):
    """How products read weights: rows of tests are many for one processor, and few for 10,000.

    Gradients of weights are sums of parts, or whole.
    """
    few = request.param == "as they are"
    monkeypatch.setattr(mixing_launch, "processors", lambda device: 10_000 if few else 1)
    monkeypatch.setattr(mixing_launch, "WHOLE_OUTER_ROWS", 10_000 if few else 0)
    mixing_launch._recipe.cache_clear()
    yield request.param
    mixing_launch._recipe.cache_clear()


def blocks(items, layout):
    """Blocks (copies, components) side by side, and their width."""
    found, offset = [], 0
    for copies, components in items:
        steps = (1, components) if layout == "mul_ir" else (copies, 1)
        found.append(CopyBlock(offset, components, *steps, copies))
        offset += copies * components
    return tuple(found), offset


def ragged(layout):
    """Blocks without a path, holes between weights, several paths into a block, factors."""
    t, t_width = blocks([(5, 1), (3, 3), (20, 1), (9, 3), (4, 5)], layout)
    z, z_width = blocks([(7, 1), (4, 3), (2, 5)], layout)
    paths, begin = [], 0
    for n, (i, k) in enumerate([(0, 0), (2, 0), (1, 1), (3, 1)]):
        paths.append(MatrixPath(i, k, begin + n, 1.0 + 0.5 * n))
        begin += t[i].copies * z[k].copies
    return Mixing((t_width, z_width, begin + 6), t, z, tuple(paths))


def following(layout):
    """Blocks that go on in the next one: as t of a tensor product, and z of one item cut in two."""
    t = tuple(CopyBlock(12 * n, 3, 36, 1, 12) for n in range(3))
    z, z_width = blocks([(4, 3), (140, 3)], layout)
    paths = tuple(MatrixPath(n, k, (n + 3 * k) * 140 * 12, 0.5) for k in range(2) for n in range(3))
    return Mixing((108, z_width, 6 * 140 * 12), t, z, paths)


def plain(layout):
    """One matrix that takes rows as they are."""
    t, z = (CopyBlock(0, 1, 1, 1, copies) for copies in (9, 20))
    return Mixing((9, 20, 180), (t,), (z,), (MatrixPath(0, 0, 0, 1.5),))


def matrix(block, row):
    """(rows, components, copies) of a block."""
    index = torch.arange(block.components)[:, None] * block.step
    return row[:, block.offset + index + torch.arange(block.copies) * block.copy_step]


def form(mixing, t, w, z, sign=torch.positive):
    """Σ z t w, whose derivatives the operator computes."""
    total = 0 * (t.sum() + w.sum() + z.sum())
    for path in mixing.paths:
        left, right = mixing.t[path.t], mixing.z[path.z]
        part = w[..., path.weight : path.weight + left.copies * right.copies]
        part = part.unflatten(-1, (left.copies, right.copies)) * sign(torch.tensor(path.factor))
        total = total + (matrix(left, t) @ part * matrix(right, z)).sum()
    return total


def tensors(m, rows, shared, dtype):
    made = torch.Generator().manual_seed(0)
    shapes = {"t": (rows, m.width("t")), "z": (rows, m.width("z"))}
    shapes["w"] = (m.width("w"),) if shared else (rows, m.width("w"))
    return {slot: torch.randn(shape, generator=made).to(dtype) for slot, shape in shapes.items()}


def exact(m, values, result, sign=torch.positive):
    wide = {slot: sign(value.double()).requires_grad_() for slot, value in values.items()}
    return torch.autograd.grad(form(m, **wide, sign=sign), wide[result])[0]


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("rows", [0, 1, 150])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [ragged, following, plain])
@pytest.mark.usefixtures("weights")
def test_shared_weights(make, layout, rows, result):
    check(make(layout), rows, True, torch.float32, result)


def of_kinds(m, rows, kinds, dtype):
    """Tensors with weights by kind, and the kind of each row; the first and the last have none."""
    made = torch.Generator().manual_seed(1)
    kind = torch.randint(1, kinds - 1, (rows,), generator=made)
    weight = torch.randn(kinds, m.width("w"), generator=made).to(dtype)
    return tensors(m, rows, True, dtype) | {"w": weight}, kind


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("rows", [0, 1, 150])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.usefixtures("weights")
@pytest.mark.singly  # seconds an item in the interpreter
def test_weights_by_kind(inside, rows, result):
    check_kinds(ragged("ir_mul"), rows, 5, torch.float32, result, inside=inside)


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.usefixtures("weights")
def test_weights_by_kind_of_blocks_that_follow_each_other(result):
    check_kinds(following("ir_mul"), 40, 4, torch.float32, result)


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("weights")
@pytest.mark.singly  # seconds an item in the interpreter
def test_weights_by_kind_of_16_bits(dtype, result):
    check_kinds(following("mul_ir"), 20, 3, dtype, result)  # factors are powers of two


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_by_kind_of_torch(dtype, inside, result):
    check_kinds(ragged("mul_ir"), 40, 6, dtype, result, by_torch, inside)


def check_kinds(m, rows, kinds, dtype, result, other=None, inside=False):
    values, kind = of_kinds(m, rows, kinds, dtype)
    table = rows_of_elements(kind, kinds)
    assert rows_of_elements(kind, kinds) is table
    given = values | ({"w": with_kinds_inside(m, values["w"])} if inside else {})
    operands = [given[slot].clone() for slot in RESULTS[result]]

    def run():
        if other is None:
            return mixing_launch.run_mix(m, result, *operands, inside, table)
        return other(m, result, *operands, table, inside).to(dtype)

    found = run()
    assert_same_bits(found, run(), result)
    if inside and result == "w":
        flat, found = found, by_kind(m, found, kinds)
        assert_same_bits(with_kinds_inside(m, found), flat, "order")
    wide, size = (exact_by_kind(m, values, kind, result, s) for s in (torch.positive, torch.abs))
    assert found.dtype == dtype
    assert_within_bound(found, wide, size, max(rows, m.width("t"), m.width("z")))


def pieces(m):
    """Begin, end and shape of each matrix, and of what lies between them."""
    at = 0
    for path in m.paths:
        u, n = m.t[path.t].copies, m.z[path.z].copies
        if path.weight > at:
            yield at, path.weight, (1, path.weight - at)
        yield path.weight, (at := path.weight + u * n), (u, n)
    if m.width("w") > at:
        yield at, m.width("w"), (1, m.width("w") - at)


def with_kinds_inside(m, rows):
    """Weights (kinds, width) as matrices (copies of t, kinds, copies of z), side by side."""
    found = [rows[:, a:b].view(-1, *shape).transpose(0, 1).flatten() for a, b, shape in pieces(m)]
    return torch.cat(found)


def by_kind(m, flat, kinds):
    """The weights (kinds, width) of such matrices."""
    found = [
        flat[kinds * a : kinds * b].view(u, kinds, n).transpose(0, 1).flatten(1)
        for a, b, (u, n) in pieces(m)
    ]
    return torch.cat(found, 1)


def exact_by_kind(m, values, kind, result, sign):
    """By weights of each row's own, whose gradients its kind adds."""
    own = exact(m, values | {"w": values["w"][kind]}, result, sign)
    if result != "w":
        return own
    return own.new_zeros(values["w"].shape).index_add(0, kind, own)


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("weights")
def test_shared_weights_of_16_bits(dtype, result):
    check(following("mul_ir"), 40, True, dtype, result)  # factors are powers of two


@pytest.fixture
def tf32():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    yield
    matmul.fp32_precision = before


@pytest.mark.parametrize("result", RESULTS)
def test_tf32_where_torch_allows_it(result, tf32, weights):
    m = following("ir_mul")
    values = tensors(m, 5, True, torch.float32)
    operands = [values[slot] for slot in RESULTS[result]]
    rounded = [_tf32(v) for v in operands]
    exactly = exact(m, values | dict(zip(RESULTS[result], rounded, strict=True)), result)
    found = mixing_launch.run_mix(m, result, *operands, True)
    assert_within_bound(found, exactly, exactly.abs() + exactly.abs().max(), 256)


def _tf32(x):
    """The nearest numbers of 11 bits."""
    return ((x.view(torch.int32) + 4096) & -8192).view(torch.float32)


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 7])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_own_weights(layout, rows, dtype, result):
    check(ragged(layout), rows, False, dtype, result)


@pytest.mark.parametrize("result", RESULTS)
def test_own_weights_in_several_tiles(result):
    t, t_width = blocks([(70, 3), (150, 3)], "mul_ir")
    z, z_width = blocks([(130, 3)], "ir_mul")
    paths = (MatrixPath(1, 0, 0, 1.0), MatrixPath(0, 0, 150 * 130, 2.0))
    check(Mixing((t_width, z_width, 220 * 130), t, z, paths), 2, False, torch.float32, result)


def check(m, rows, shared, dtype, result):
    values = tensors(m, rows, shared, dtype)
    operands = [values[slot] for slot in RESULTS[result]]
    found = mixing_launch.run_mix(m, result, *operands, shared)
    assert found.dtype == dtype
    wide = exact(m, values, result)
    size = exact(m, values, result, torch.abs)
    assert_within_bound(found, wide, size, max(rows, m.width("t"), m.width("z")))
    assert_same_bits(found, mixing_launch.run_mix(m, result, *operands, shared), result)


def test_few_rows_take_one_launch_in_each_direction(weights):
    linear = o3.Linear("9x0e+5x1o", "4x0e+7x1o", num_elements=3)
    x, element = torch.randn(6, 24).requires_grad_(), torch.arange(6) % 3

    def names(function):
        return [launch.kernel for launch in explain(function).launches]

    few = weights == "as they are"
    wanted = ["mixing_direct"] if few else ["mixing_prepare", "mixing_product"]
    z = linear(x, element=element).sum()
    assert names(lambda: linear(x, element=element)) == wanted
    assert names(lambda: torch.autograd.grad(z, x, retain_graph=True)) == wanted
    summed = ["mixing_whole_outer"] if few else ["mixing_outer", "mixing_fold"]
    assert names(lambda: torch.autograd.grad(z, linear.weight)) == summed


@pytest.mark.parametrize("asked", ["", "t", "w", "tw"])
def test_a_call_compiles_the_kernels_of_gradients_that_are_asked_for(asked, monkeypatch):
    """Seen red with: kernels of weights' gradients for forces, which ask for none."""
    begun = []
    monkeypatch.setattr(mixing_launch, "compile_together", begun.extend)
    m = ragged("mul_ir")
    values = tensors(m, 5, True, torch.float32)
    t, w = (values[slot].requires_grad_(slot in asked) for slot in "tw")
    mixing_launch.run_mix(m, "z", t, w, True)
    names = [call.kernel._kernel.__name__ for call in begun]
    assert ("mixing_whole_outer" in names) == ("w" in asked)
    assert names.count("mixing_product") == (2 if "t" in asked else 1)


@pytest.mark.parametrize("shared", [True, False])
def test_derivatives_of_second_order(shared):
    m = ragged("mul_ir")
    values = tensors(m, 5, shared, torch.float32)

    def gradients(t, w, z, product):
        """Of all three, of what first gradients are."""
        t, w, z = (v.clone().requires_grad_() for v in (t, w, z))
        first = torch.autograd.grad(product(t, w, z), (t, w), create_graph=True)
        return torch.autograd.grad(sum((g * g).sum() for g in first), (t, w, z))

    found = gradients(*(values[s] for s in "twz"), lambda t, w, z: (mix(m, t, w) * z).sum())
    wide = gradients(*(values[s].double() for s in "twz"), lambda t, w, z: form(m, t, w, z))
    for result, value in zip(found, wide, strict=True):
        size = value.abs() + value.abs().max()
        assert_within_bound(result, value, size, 256)


@pytest.mark.parametrize("kernels", [True, False])
def test_doors_of_kinds(kernels):
    m = ragged("ir_mul")
    v, kind = of_kinds(m, 6, 4, torch.float32)

    def product(t, w):
        return mix(m, t, w, rows_of_elements(kind, 4), kernels=kernels)

    z = product(v["t"], v["w"])
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(v["t"], v["w"]), z, "compiled")
    both = (torch.stack([v["t"], 2 * v["t"]]), torch.stack([v["w"], 2 * v["w"]]))
    near(torch.func.vmap(product)(*both), torch.stack([z, 4 * z]))
    _, moved = torch.func.jvp(product, (v["t"], v["w"]), (v["t"], v["w"]))
    near(moved, 2 * z)
    args = [a.clone().requires_grad_() for a in (v["t"], v["w"])]
    table = rows_of_elements(kind, 4)
    rest = (*table, m.text, "z", False, kernels)
    torch.library.opcheck(torch.ops.torchweft.o3_mix.default, (*args, *rest))


@pytest.mark.parametrize("shared", [True, False])
def test_doors(shared):
    m = ragged("ir_mul")
    v = tensors(m, 6, shared, torch.float32)
    z = mix(m, v["t"], v["w"])
    compiled = torch.compile(lambda t, w: mix(m, t, w), fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(v["t"], v["w"]), z, "compiled")
    each = torch.func.vmap(lambda t: mix(m, t, v["w"]))(torch.stack([v["t"], 2 * v["t"]]))
    near(each, torch.stack([z, 2 * z]))
    both = torch.func.vmap(lambda t, w: mix(m, t, w))(
        torch.stack([v["t"], 2 * v["t"]]), torch.stack([v["w"], 2 * v["w"]])
    )
    near(both, torch.stack([z, 4 * z]))
    _, moved = torch.func.jvp(lambda t, w: mix(m, t, w), (v["t"], v["w"]), (v["t"], v["w"]))
    near(moved, 2 * z)


def near(found, value):
    value = value.double()
    assert_within_bound(found, value, value.abs() + value.abs().max(), 64)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_is_not_finite_shows():
    t, _ = blocks([(4, 1)], "mul_ir")
    m = Mixing((4, 4, 16), t, t, (MatrixPath(0, 0, 0, 1.0),))
    x = torch.tensor([[float("inf"), 1, 2, 3], [float("nan"), 1, 2, 3], [1, 2, 3, 4]])
    found = mix(m, x, torch.ones(16))
    assert not found[:2].isfinite().any()
    assert found[2].eq(10).all()


MODULES = {
    "linear": lambda layout, shared: o3.Linear(
        "5x0e+3x1o+2x0e", "4x1o+6x0e+1x2e", biases=shared, shared_weights=shared, layout=layout
    ),
    "fully connected": lambda layout, shared: o3.FullyConnectedTensorProduct(
        "3x0e+4x1o", "0e+1o", "5x0e+3x1o+2x1e", shared_weights=shared, layout=layout
    ),
}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_modules_compile(name, shared):
    module = MODULES[name]("mul_ir", shared)
    irreps = module.irreps_in if name == "linear" else module.irreps_in1
    inputs = [torch.randn(4, irreps.dim)]
    if name != "linear":
        inputs.append(torch.randn(4, module.irreps_in2.dim))
    inputs.append(None if shared else torch.randn(4, module.weight_numel))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(*inputs), module(*inputs), name)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODULES)
def test_modules_give_what_torch_gives(name, layout, shared, monkeypatch):
    module = MODULES[name](layout, shared)
    if shared and name == "linear":
        torch.nn.init.normal_(module.bias)
    irreps = module.irreps_in if name == "linear" else module.irreps_in1
    inputs = [torch.randn(2, 9, irreps.dim)]
    if name != "linear":
        inputs.append(torch.randn(2, 9, module.irreps_in2.dim))
    weight = None if shared else torch.randn(2, 9, module.weight_numel)
    found = module(*inputs, weight)
    monkeypatch.setattr(mixing, "_INTERPRETED", False)
    wide = None if weight is None else weight.double()
    value = module.double()(*(x.double() for x in inputs), wide)
    assert_within_bound(
        found.detach(), value.detach(), value.detach().abs() + value.detach().abs().max(), 64
    )


def by_element(layout):
    """A layer of converted models of MACE, and e3nn's product with its weight."""
    irreps, paths = "5x0e+3x1o", [(0, 0, 0, "uvw", True), (1, 0, 1, "uvw", True)]
    layer = _ByElement(irreps, "3x0e", irreps, paths, layout=layout)
    layer.call = Call()
    plain = o3.TensorProduct(irreps, "3x0e", irreps, paths, layout=layout, backend="torch")
    plain.load_state_dict(layer.state_dict())
    return layer, plain.double(), torch.randn(7, 14)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_record_chooses_matrices_by_element(layout):
    """Seen red with: elements of the call before."""
    layer, plain, x = by_element(layout)
    layer.call.mark([torch.nn.Identity()])
    attributes = torch.eye(3)[[0, 2, 2, 1, 0, 1, 1]]
    layer(x, attributes)
    rows = attributes.flip(0)
    with Run():
        found = layer(x, rows).detach()
    near(found, plain(x.double(), rows.double()).detach())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_of_a_product_are_read_as_they_are(layout, weights):
    """In both directions, and where the gradient is summed."""
    layer, plain, x = by_element(layout)
    attributes, found = torch.eye(3)[[0, 2, 2, 1, 0, 1, 1]], []
    for module, dtype in ((layer, torch.float32), (plain, torch.float64)):
        leaf = x.to(dtype).requires_grad_()
        z = module(leaf, attributes.to(dtype))
        first = torch.autograd.grad(z.square().sum(), (leaf, module.weight), create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), (leaf, module.weight))
        found.append([v.detach() for v in (z, *first, *second)])
    for ours, exact in zip(*found, strict=True):
        near(ours, exact)
