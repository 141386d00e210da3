"""The bodies of the fully connected product: printed kernels around the library's products."""

import contextlib

import pytest
import torch

from torchweft.core.backend import interpreted

if not interpreted() and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or a GPU", allow_module_level=True)

from torchweft import clifford
from torchweft.clifford import reference
from torchweft.clifford.algebra import Algebra
from torchweft.clifford.matrices import fully_connected as fc
from torchweft.clifford.matrices.source import Norm
from torchweft.testing import assert_as_accurate, assert_within_bound

pytestmark = pytest.mark.kernels

DEVICE = "cpu" if interpreted() else "cuda"
METRICS = [(1, 1, -1), (0, 1, 1, 1), (0, 0, 1)]
"""Every blade, sign and zero of the printed code shows in one dtype; dtypes, in one metric."""

KINDS = ["fp64", "fp32", "tf32", "bf16", "fp16"]
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@contextlib.contextmanager
def allow_tf32(allowed):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(params=KINDS)
def kind(request):
    with allow_tf32(request.param == "tf32"):
        yield request.param


@pytest.fixture
def tf32():
    with allow_tf32(True):
        yield


def draw(algebra, kind="fp32", rows=9, f_in=5, f_out=7):
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE, DTYPES[kind])

    x, y = (tensor(algebra.num_blades, rows, f_in) for _ in range(2))
    return x, y, tensor(len(algebra.paths), f_in, f_out), tensor(algebra.num_blades, rows, f_out)


def with_gradients(product, x, y, weight, go):
    """The product and its gradients."""
    leaves = [t.clone().requires_grad_() for t in (x, y, weight)]
    out = product(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, go)]


def unsigned(algebra):
    """The product without signs: of absolute values, the size of all that it sums."""
    table = reference.tables(algebra, torch.float64).abs().to(DEVICE)

    def product(x, y, weight):
        pairs = torch.einsum("pijk,ibn,kbn->pjbn", table, x, y)
        return torch.einsum("pjbn,pnm->jbm", pairs, weight)

    return product


def check_product(algebra, tensors, kind):
    """Every element of the product and its gradients within its bound."""
    x, y, weight, go = tensors
    exact = with_gradients(
        lambda *a: reference.fully_connected(*a, algebra), *(t.double() for t in tensors)
    )
    size = with_gradients(unsigned(algebra), *(t.double().abs() for t in tensors))
    blades, rows, features = x.shape
    counts = [blades * features, *2 * [blades * weight.shape[2]], blades * rows]
    found = [
        *fc.forward(x, y, weight, algebra, False),
        *fc.backward(x, y, weight, (), go, algebra, False),
    ]
    # pairs, or their gradients, are stored in 16 bits on the way
    stored = 1 if kind in ("bf16", "fp16") else 0
    for out, *expected in zip(found, exact, size, counts, strict=True):
        assert_within_bound(out, *expected, tf32=kind == "tf32", stored=stored)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("metric", METRICS)
def test_product_and_gradients(metric):
    algebra = Algebra(metric)
    check_product(algebra, draw(algebra, "fp64"), "fp64")


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("shape", [(1, 1, 1), (40, 33, 16)])
@pytest.mark.singly  # seconds an item in the interpreter
def test_shapes(shape, kind):
    algebra = Algebra((1, 1))
    check_product(algebra, draw(algebra, kind, *shape), kind)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("kind", ["fp32", "fp16"], indirect=True)
def test_rows_in_parts(kind, monkeypatch):
    algebra = Algebra((1, 1))
    monkeypatch.setattr(fc, "MOST_PAIRS", 4 * 14 * 5)
    check_product(algebra, draw(algebra, kind), kind)


@pytest.mark.usefixtures("tf32")
def test_rows_of_any_size():
    """fp16 factors have scales of their own, so that TF32's range is kept."""
    algebra = Algebra((1, 1))
    x, y, weight, go = draw(algebra)
    sizes = torch.logspace(-12, 12, x.shape[1], device=DEVICE)[:, None]
    check_product(algebra, (x * sizes, y, 1e-9 * weight, go / sizes), "tf32")
    zeroed = x.clone()
    zeroed[:, ::2] = 0
    check_product(algebra, (zeroed, y, weight, go), "tf32")


@pytest.mark.usefixtures("tf32")
def test_rows_of_any_size_under_the_norm():
    """Row by row as accurate as plain torch: no row's factors leave fp16's range."""
    algebra = Algebra((1, 1))
    x, y, weight, go = draw(algebra)
    sizes = torch.logspace(-6, 6, x.shape[1], device=DEVICE)[:, None]
    tensors = (x * sizes, y * sizes, weight, go)

    def chain(x, y, weight):
        o = reference.fully_connected(x, y, weight, algebra)
        return reference.rms_norm(o, algebra, "euclidean", 1e-6)

    exact = with_gradients(chain, *(t.double() for t in tensors))
    noisy = with_gradients(chain, *(_rounded(t, "tf32") for t in tensors))
    norm = Norm("euclidean", 1e-6)
    saved = fc.forward(*tensors[:3], algebra, False, norm)
    found = [saved[0], *fc.backward(*tensors[:3], saved, go, algebra, False, norm)]
    for out, value, plain in zip(found[:3], exact, noisy, strict=False):
        for row in range(x.shape[1]):
            noise = (plain[:, row].double() - value[:, row]).abs()
            assert_as_accurate(out[:, row], value[:, row], noise)


@pytest.mark.parametrize("kind", ["tf32", "bf16"], indirect=True)
def test_strides(kind):
    algebra = Algebra((1, 1))
    x, y, weight, go = draw(algebra, kind)
    last = x.movedim(0, -1).contiguous().movedim(-1, 0)
    wide = torch.stack([y, y], 2)[:, :, 0]
    expanded = go[:, :1, :1].expand_as(go)
    turned = weight.mT.contiguous().mT
    check_product(algebra, (last, wide, turned, expanded), kind)


# formulas show in one dtype; dtypes, in one formula
CHAINS = [(kind, (0, 1), "euclidean") for kind in KINDS]
CHAINS += [("fp64", (1, -1), "metric"), ("fp64", (0, 1), "metric"), ("fp64", (1, -1), None)]


@pytest.mark.parametrize(("kind", "metric", "norm"), CHAINS, indirect=["kind"])
@pytest.mark.usefixtures("poisoned_memory")
def test_gated_chain_is_as_accurate_as_plain_torch(metric, norm, kind):
    algebra = Algebra(metric)
    tensors = draw(algebra, kind)

    def chain(x, y, weight):
        o = reference.fully_connected(reference.gate(x), reference.gate(y), weight, algebra)
        return o if norm is None else reference.rms_norm(o, algebra, norm, 1e-6)

    exact = with_gradients(chain, *(t.double() for t in tensors))
    noisy = with_gradients(chain, *(_rounded(t, kind) for t in tensors))
    for out, value, plain in zip(_chain(algebra, norm, *tensors), exact, noisy, strict=True):
        assert_as_accurate(out, value, (plain.double() - value).abs())


def _rounded(tensor, kind):
    """Plain PyTorch in fp32 on inputs with as few bits as the factors of matrix products have."""
    if kind == "fp64":
        return tensor.float()
    few = {"tf32": torch.float16, "bf16": torch.bfloat16, "fp16": torch.float16}
    generator = torch.Generator(tensor.device).manual_seed(1)
    if kind == "fp32":
        return tensor
    noise = torch.rand(tensor.shape, generator=generator, device=tensor.device) - 0.5
    return tensor.float() * (1 + 2 * noise * torch.finfo(few[kind]).eps)


def _chain(algebra, norm, x, y, weight, go):
    if norm is None:
        gradients = fc.backward(x, y, weight, (), go, algebra, True)
        return [*fc.forward(x, y, weight, algebra, True), *gradients]
    norm = Norm(norm, 1e-6)
    saved = fc.forward(x, y, weight, algebra, True, norm)
    gradients = fc.backward(x, y, weight, saved, go, algebra, True, norm)
    return [saved[0], *gradients]


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("norm", [None, "euclidean"])
def test_only_what_is_needed_is_computed_and_is_the_same(norm):
    algebra = Algebra((1,))
    x, y, weight, go = draw(algebra)
    _, *every = _chain(algebra, norm, x, y, weight, go)
    for needed in [(True, False, False), (False, True, True), (False, False, True)]:
        if norm is None:
            found = fc.backward(x, y, weight, (), go, algebra, True, None, needed)
        else:
            of = Norm(norm, 1e-6)
            saved = fc.forward(x, y, weight, algebra, True, of)
            found = fc.backward(x, y, weight, saved, go, algebra, True, of, needed)
        for flag, one, same in zip(needed, found, every, strict=True):
            assert (one is not None) == flag
            if flag:
                torch.testing.assert_close(one, same, rtol=0, atol=0)


@pytest.mark.parametrize("norm", [None, "metric"])
def test_no_rows(norm, kind):
    algebra = Algebra((1, 1))
    x, y, weight, go = draw(algebra, kind, rows=0)
    out, gx, gy, gw = _chain(algebra, norm, x, y, weight, go)
    assert out.shape == go.shape
    assert gx.shape == gy.shape == x.shape
    torch.testing.assert_close(gw, torch.zeros_like(weight), rtol=0, atol=0)


@pytest.mark.parametrize(("f_in", "f_out", "norm"), [(0, 3, None), (0, 3, "metric"), (3, 0, None)])
def test_no_features(f_in, f_out, norm, kind):
    """Red before for factors with scales: the largest of no numbers."""
    algebra = Algebra((1, 1))
    tensors = draw(algebra, kind, f_in=f_in, f_out=f_out)
    for found in _chain(algebra, norm, *tensors):
        torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=0)


@pytest.mark.parametrize("normalize", [False, True])
def test_layer_and_two_orders_of_gradients(normalize):
    algebra = Algebra((1, -1))
    x, linear, weight, go = draw(algebra, "fp64", rows=3, f_in=4, f_out=4)
    bias, linear = linear[0, 0], weight[: algebra.n + 1] / 2
    leaves = (x, linear, bias, weight)

    def layer(*tensors):
        return clifford.clifford_layer(*tensors, algebra, normalize, True, backend="triton")

    def plain(x, linear, bias, weight):
        y = torch.einsum("jbf,jfm->jbm", x, linear[list(algebra.grades)])
        y = torch.cat([y[:1] + bias, y[1:]])
        o = reference.fully_connected(reference.gate(x), reference.gate(y), weight, algebra)
        return reference.rms_norm(o, algebra, "euclidean", 1e-6) if normalize else o

    found = _two_orders(layer, leaves, go)
    exact = _two_orders(plain, leaves, go)
    noisy = _two_orders(plain, [t.float() for t in leaves], go.float())
    for out, value, other in zip(found, exact, noisy, strict=True):
        assert_as_accurate(out, value, (other.double() - value).abs())
    for i, same in enumerate(found[1:5]):
        one = [t.clone().requires_grad_(j == i) for j, t in enumerate(leaves)]
        (alone,) = torch.autograd.grad(layer(*one), one[i], go)
        torch.testing.assert_close(alone, same, rtol=0, atol=0)


def _two_orders(function, tensors, go):
    """The result, its gradients, and those of the sum of their squares."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    fused = torch.autograd.grad(out, leaves, go, retain_graph=True)
    first = torch.autograd.grad(out, leaves, go, create_graph=True)
    total = sum(g.square().sum() for g in first)
    return [out.detach(), *fused, *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize("ending", ["", "euclidean 0x1p-20"])
@pytest.mark.parametrize("kind", ["tf32", "bf16"], indirect=True)
def test_fake_tensors_of_a_layer(ending, kind):
    algebra = Algebra((1, 1))
    x, linear, weight, _ = draw(algebra, kind, rows=3, f_in=4, f_out=4)
    args = (x, weight[:3], linear[0, 0], weight, algebra.signature, ending, "triton")
    op = torch.ops.torchweft.clifford_fully_connected_layer.default
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


def test_products_beyond_the_range_of_fp16_stay_finite_under_the_norm():
    algebra = Algebra((1, 1))
    x, y, weight, go = draw(algebra, "fp16")
    for out in _chain(algebra, "euclidean", 300 * x, 300 * y, weight, go):
        assert out.isfinite().all()


@pytest.mark.parametrize("allowed", [False, True])
def test_the_setting_may_change_before_the_gradient(allowed):
    """Red before: factors of the gradient were of another dtype than those that were saved."""
    layer = clifford.CliffordLayer(4, 3, use_fc=True, backend="triton").to(DEVICE)
    x = torch.randn(8, 5, 4, device=DEVICE, requires_grad=True)
    over = [x, *layer.parameters()]
    with allow_tf32(allowed):
        loss = layer(x).square().sum()
    with allow_tf32(not allowed):
        found = torch.autograd.grad(loss, over)
    for gradient, tensor in zip(found, over, strict=True):
        assert gradient.shape == tensor.shape
        assert gradient.isfinite().all()
