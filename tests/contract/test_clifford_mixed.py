"""Maps between multivectors and scalars by kernels: against the maps by parts, and their launches.

Seen red with: the sign of a term left out, the last blade's scalars added to the scalar, rows of
the last part left out of a weight's gradient, a map's columns those of the first map, a bias's
gradient read from a strided gradient as if its features lay side by side, scalars of another batch
read past their end, compiled code of one device used on another, hooks of queries not called.
"""

import itertools

import pytest
import torch
from torch import nn

from tests.conftest import INTERPRETED
from tests.nearness import beside
from torchweft.clifford import (
    LGATR_2,
    PGA,
    SPACETIME,
    Algebra,
    CrossAttention,
    GATr,
    GeometricBilinear,
    LGATr,
    MixedLinear,
    SelfAttention,
)
from torchweft.clifford.layers.equilinear import joined
from torchweft.errors import DTypeError, ShapeError
from torchweft.testing import assert_as_accurate, plain_error

pytestmark = pytest.mark.kernels

TWO_NULL = Algebra((0, 0, 1))
CASES = {
    "scalars": (PGA, False, [(3, 2)], True, (2, 135), 0),
    "joined": (PGA, False, [(3, 2), (1, 0), (2, 5)], True, (70,), -1),
    "ends": (SPACETIME, True, [(4, 3), (2, 3)], False, (5,), 0),
    "multivectors alone": (PGA, False, [(2, 0), (2, 0)], True, (3, 2), 0),
    "strided gradient": (PGA, False, [(3, 0)], True, (7,), -1),
    "two null vectors": (TWO_NULL, True, [(70, 1)], True, (9,), 0),
    "no batch": (PGA, False, [(2, 1)], True, (), 0),
    "no rows": (PGA, False, [(2, 1)], True, (0,), 0),
}
"""Algebra, pseudoscalar, widths of each map, bias, batch, blade_dim."""


DRAWS = 32
BACKENDS = {"kernels": "triton", "plain": "torch", "exact": "torch"}


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + 1000 * seed))


def built(name, backend, seed=0):
    """Maps, and inputs of a draw."""
    algebra, pseudoscalar, widths, bias, batch, blade_dim = CASES[name]
    options = {"bias": bias, "pseudoscalar": pseudoscalar, "blade_dim": blade_dim}
    torch.manual_seed(0)
    maps = nn.ModuleList(
        MixedLinear(5, f, 6, s, algebra, backend=backend, **options) for f, s in widths
    )
    for parameter in maps.parameters():
        nn.init.normal_(parameter)
    x = drawn(algebra.num_blades, *batch, 5, seed=seed).movedim(0, blade_dim)
    return maps, x, drawn(*batch, 6, seed=seed)


def prepared(kind, module, given):
    """The module and its inputs, which require gradients; of "exact", in float64."""
    dtype = torch.float64 if kind == "exact" else torch.float32
    return module.to(dtype), [t.detach().to(dtype).requires_grad_() for t in given]


def with_gradients(out, over, seed):
    """What comes out, and the gradients of a weighted sum of it."""
    weighted = sum((t * drawn(*t.shape, seed=seed).to(t.dtype)).sum() for t in out)
    grads = torch.autograd.grad(weighted, over, allow_unused=True)
    return [t.detach() for t in (*out, *grads) if t is not None]


def check(compute):
    """compute(kind, seed) by kernels is as accurate as by parts in torch, of several draws."""
    exact, plain = ([compute(kind, n) for n in range(DRAWS)] for kind in ("exact", "plain"))
    for n, found in enumerate(compute("kernels", 0)):
        noise = [plain_error(p[n], e[n], found.dtype) for p, e in zip(plain, exact, strict=True)]
        assert_as_accurate(found, exact[0][n], torch.stack(noise))


if INTERPRETED:

    @pytest.mark.usefixtures("poisoned_memory")
    @pytest.mark.parametrize("name", CASES)
    def test_maps_and_their_gradients(name):
        """Several maps of one input, as their parts compute them in float64."""

        def compute(kind, seed):
            maps, *given = built(name, BACKENDS[kind], seed)
            maps, given = prepared(kind, maps, given)
            out = [t for pair in joined(maps, *given) for t in pair]
            return with_gradients(out, [*given, *maps.parameters()], seed)

        check(compute)

    @pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
    def test_infinite_numbers_and_nan():
        """They stay what they are, in rows and in matrices; the NaN is what a GPU computes."""
        out = []
        for backend in ("triton", "torch"):
            maps, x, scalars = built("joined", backend)
            x[3, 0, 2] = torch.inf
            x[5, 0, 1] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
            with torch.no_grad():
                maps[1].mvs2mvs.weight[0, 1, 0] = -torch.inf
                out.append([t for pair in joined(maps, x, scalars) for t in pair])
        assert out[1][0].isinf().any()
        for found, expected in zip(*out, strict=True):
            for kind in (torch.isnan, torch.isposinf, torch.isneginf):
                torch.testing.assert_close(kind(found), kind(expected), rtol=0, atol=0)

    @pytest.mark.parametrize("needed", list(itertools.product((False, True), repeat=3)))
    def test_each_subset_of_gradients(needed):
        maps, *given = built("joined", "triton")
        tensors = [*given, *maps.parameters()]
        flags = [*needed[:2], *[needed[2]] * (len(tensors) - 2)]
        for tensor, flag in zip(tensors, flags, strict=True):
            tensor.requires_grad_(flag)
        out = joined(maps, *given)
        over = [t for t in tensors if t.requires_grad]
        assert out[0][0].requires_grad == bool(over)
        if over:
            found = iter(torch.autograd.grad(sum(t.sum() for pair in out for t in pair), over))
            for tensor in tensors:
                tensor.requires_grad_()
            loss = sum(t.sum() for pair in joined(maps, *given) for t in pair)
            for flag, whole in zip(flags, torch.autograd.grad(loss, tensors), strict=True):
                if flag:
                    torch.testing.assert_close(next(found), whole, rtol=0, atol=0)

    def test_gradients_of_gradients():
        """By the composition, which is torch's own."""

        def compute(kind, seed):
            maps, *given = built("ends", BACKENDS[kind], seed)
            maps, given = prepared(kind, maps, given)
            loss = sum(t.pow(3).sum() for pair in joined(maps, *given) for t in pair)
            first = torch.autograd.grad(loss, given, create_graph=True)
            return with_gradients(first, [*given, *maps.parameters()], seed)

        check(compute)

    def test_an_expanded_gradient():
        (of,), x, scalars = built("strided gradient", "triton")
        of(x, scalars)[0].sum().backward()
        torch.testing.assert_close(of.s2mvs.bias.grad, torch.full((3,), 7.0), rtol=0, atol=0)

    def test_results_may_change_in_place():
        (of,), x, scalars = built("scalars", "triton")
        expected = [t.relu() for t in of(x, scalars)]
        for found, value in zip(of(x, scalars), expected, strict=True):
            torch.testing.assert_close(found.relu_(), value, rtol=0, atol=0)

    def test_second_gradients_of_no_rows():
        maps, *given = built("no rows", "triton")
        maps, given = prepared("kernels", maps, given)
        loss = sum(t.pow(3).sum() for t in joined(maps, *given)[0])
        first = torch.autograd.grad(loss, given, create_graph=True)
        sum(t.square().sum() for t in first).backward()
        assert not maps[0].mvs2mvs.weight.grad.any()

    def test_calls_repeat():
        maps, *given = built("joined", "triton")
        maps, given = prepared("kernels", maps, given)
        over = [*given, *maps.parameters()]
        first, again = (
            with_gradients([t for pair in joined(maps, *given) for t in pair], over, 0)
            for _ in range(2)
        )
        for a, b in zip(first, again, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)

    def test_other_scalars_are_another_input():
        """The keys' multivectors are those of the queries, their scalars are not."""

        def compute(kind, seed):
            shapes = (16, 5, 4), (5, 6), (6, 5)
            torch.manual_seed(1)
            layer = CrossAttention(4, 6, 4, 6, 2, backend=BACKENDS[kind])
            layer, given = prepared(kind, layer, [drawn(*shape, seed=seed) for shape in shapes])
            x, own, other = given
            return [t.detach() for t in layer(x, own, x, other.mT)]

        check(compute)

    def test_numbers_of_another_kind_are_refused():
        maps, x, scalars = built("joined", "triton")
        with pytest.raises(DTypeError, match=r"scalars is torch.float16 but x is torch.float32"):
            joined(maps, x, scalars.half())
        with pytest.raises(DTypeError, match=r"weight is torch.float32 but x is torch.float16"):
            joined(maps, x.half(), scalars.half())
        with pytest.raises(ShapeError, match=r"scalars is \(70, 5\): MixedLinear needs"):
            joined(maps, x, scalars[:, :5])

    @pytest.mark.parametrize("backend", ["triton", "torch"])
    @pytest.mark.parametrize("batch", [(), (1,), (6,), (7, 1), (14,)])
    def test_scalars_of_another_batch_are_refused(backend, batch):
        (of,), x, _ = built("strided gradient", backend)
        with pytest.raises(ShapeError, match=r"x is \(7, 5, 16\): both need the same batch"):
            of(x, drawn(*batch, 6))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast_narrows_the_products(dtype):

        def compute(kind, seed):
            maps, *given = built("ends", BACKENDS[kind], seed)
            maps, given = prepared(kind, maps, given)
            with torch.autocast("cpu", dtype, enabled=kind != "exact"):
                found = [t.detach() for pair in joined(maps, *given) for t in pair]
            assert kind == "exact" or all(t.dtype == dtype for t in found)
            return found

        check(compute)

    def test_a_layer_that_is_not_plain_is_called():
        """An adapter in place of a linear layer, and a hook, have their say."""
        maps, x, scalars = built("scalars", "triton")
        (of,) = maps
        before = of(x, scalars)[1]
        handle = of.s2s.register_forward_hook(lambda layer, given, out: out * 0)
        assert (of(x, scalars)[1] - before).abs().max() > 0
        handle.remove()
        seen = []
        of.s2s.register_full_backward_hook(lambda layer, *grads: seen.append(layer))
        of(x, scalars.requires_grad_())[1].sum().backward()
        assert seen == [of.s2s]

    @pytest.mark.parametrize("name", ["q_linear", "k_linear.mvs2mvs", "v_linear.s2s"])
    def test_hooks_inside_an_attention_are_called(name):
        layer, seen = SelfAttention(4, 6, 2, backend="triton"), []
        layer.get_submodule(name).register_forward_hook(lambda m, given, out: seen.append(m))
        layer(drawn(16, 5, 4), drawn(5, 6))
        assert seen == [layer.get_submodule(name)]

    def test_an_adapter_in_place_of_a_map_is_called():
        class Adapter(nn.Module):
            def forward(self, x, scalars):
                return x.new_zeros(*x.shape[:-1], 4), scalars.new_ones(len(scalars), 12)

        layer = SelfAttention(4, 6, 2, multi_query=False, backend="triton")
        layer.q_linear = Adapter()
        x, scalars = layer._mapped(*[(drawn(16, 5, 4), drawn(5, 6))] * 3)[0]
        assert not x.any()
        assert (scalars == 1).all()

    def test_code_belongs_to_a_device():
        """Each device has a launcher of its own, which keeps its compiled code."""
        from torchweft.clifford.matrices.launch import launched

        made = []

        def build(variant, numbers):
            made.append(variant)
            return lambda operands, workspace: None

        for device in ("cpu", "meta", "cpu"):
            launched(build, ("kernel",), (1,), [torch.empty(1, device=device)])
        assert made == [("kernel",)] * 2

    LAYERS = {
        "self attention": lambda b: (SelfAttention(4, 6, 2, backend=b), 1, False),
        "cross attention": lambda b: (CrossAttention(4, 6, 4, 6, 2, backend=b), 2, False),
        "bilinear": lambda b: (GeometricBilinear(4, 4, 6, 6, backend=b), 1, True),
        "gatr": lambda b: (GATr(4, 2, 4, 6, 1, 8, 1, 2, backend=b), 1, False),
        "lgatr": lambda b: (LGATr(4, 2, 4, 6, 1, 8, 1, 2, options=LGATR_2, backend=b), 1, False),
    }

    @pytest.mark.parametrize("name", LAYERS)
    def test_layers(name):
        """Layers of joint maps compute what those of parts do, with all gradients."""

        def compute(kind, seed):
            torch.manual_seed(1)
            layer, inputs, reference = LAYERS[name](BACKENDS[kind])
            shapes = [s for i in range(inputs) for s in ((16, 2, 5 + i, 4), (2, 5 + i, 6))]
            shapes += [(16, 2, 1, 1)] * reference
            near = beside([drawn(*shape) for shape in shapes], seed)  # as ill conditioned
            layer, given = prepared(kind, layer, near)
            return with_gradients(layer(*given), [*given, *layer.parameters()], 0)

        check(compute)
