"""Maps between multivectors and scalars by kernels: against the maps by parts, and their launches.

Seen red with: the sign of a term left out, the last blade's scalars added to the scalar, rows of
the last part left out of a weight's gradient, a map's columns those of the first map.
"""

import copy
import itertools

import pytest
import torch
from torch import nn

from tests.conftest import INTERPRETED
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
    "two null vectors": (TWO_NULL, True, [(70, 1)], True, (9,), 0),
    "no batch": (PGA, False, [(2, 1)], True, (), 0),
    "no rows": (PGA, False, [(2, 1)], True, (0,), 0),
}
"""Algebra, pseudoscalar, widths of each map, bias, batch, blade_dim."""


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def built(name, backend):
    algebra, pseudoscalar, widths, bias, batch, blade_dim = CASES[name]
    options = {"bias": bias, "pseudoscalar": pseudoscalar, "blade_dim": blade_dim}
    torch.manual_seed(0)
    maps = nn.ModuleList(
        MixedLinear(5, f, 6, s, algebra, backend=backend, **options) for f, s in widths
    )
    for parameter in maps.parameters():
        nn.init.normal_(parameter)
    x = drawn(algebra.num_blades, *batch, 5).movedim(0, blade_dim)
    return maps, x, drawn(*batch, 6)


def results(maps, x, scalars, dtype):
    """What comes out, and the gradients of a weighted sum of it."""
    maps = copy.deepcopy(maps).to(dtype)
    given = [t.detach().to(dtype).requires_grad_() for t in (x, scalars)]
    out = [t for pair in joined(maps, *given) for t in pair]
    over = [*given, *maps.parameters()]
    weighted = sum((t * drawn(*t.shape).to(dtype)).sum() for t in out)
    return [t.detach() for t in (*out, *torch.autograd.grad(weighted, over))]


def check(found, exact, plain, dtype):
    for a, b, c in zip(found, exact, plain, strict=True):
        assert a.dtype == dtype
        if a.numel():
            noise = plain_error(c, b, dtype)
            assert_as_accurate(a, b, torch.cat([noise.flatten(), NOISE * b.abs().max()[None]]))


NOISE = 2**-22
"""Of a result, relative to the largest: sums of dozens of terms may round in another order."""


if INTERPRETED:

    @pytest.mark.usefixtures("poisoned_memory")
    @pytest.mark.parametrize("name", CASES)
    def test_maps_and_their_gradients(name):
        """Several maps of one input, as their parts compute them in float64."""
        maps, *given = built(name, "triton")
        by_parts, *_ = built(name, "torch")
        plain = results(by_parts, *given, torch.float32)
        exact = results(by_parts, *given, torch.float64)
        check(results(maps, *given, torch.float32), exact, plain, torch.float32)

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
        found = {}
        for backend, dtype in (("triton", torch.float32), ("torch", torch.float64)):
            maps, *given = built("ends", backend)
            maps.to(dtype)
            x, scalars = (t.to(dtype).requires_grad_() for t in given)
            loss = sum(t.pow(3).sum() for pair in joined(maps, x, scalars) for t in pair)
            first = torch.autograd.grad(loss, [x, scalars], create_graph=True)
            over = [x, scalars, *maps.parameters()]
            found[backend] = torch.autograd.grad(sum(g.square().sum() for g in first), over)
        for a, b in zip(*found.values(), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1000 * NOISE, atol=1000 * NOISE)

    def test_calls_repeat():
        maps, *given = built("joined", "triton")
        first, again = (results(maps, *given, torch.float32) for _ in range(2))
        for a, b in zip(first, again, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)

    def test_other_scalars_are_another_input():
        """The keys' multivectors are those of the queries, their scalars are not."""
        x, own, other = drawn(16, 5, 4), drawn(5, 6), drawn(6, 5).mT
        found = []
        for backend in ("triton", "torch"):
            torch.manual_seed(1)
            layer = CrossAttention(4, 6, 4, 6, 2, backend=backend)
            found.append(layer(x, own, x, other))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=64 * NOISE, atol=64 * NOISE)

    def test_numbers_of_another_kind_are_refused():
        maps, x, scalars = built("joined", "triton")
        with pytest.raises(DTypeError, match=r"scalars is torch.float16 but x is torch.float32"):
            joined(maps, x, scalars.half())
        with pytest.raises(ShapeError, match=r"scalars is \(70, 5\): MixedLinear needs"):
            joined(maps, x, scalars[:, :5])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast_narrows_the_products(dtype):
        maps, x, scalars = built("ends", "triton")
        with torch.autocast("cpu", dtype):
            found = [t for pair in joined(maps, x, scalars) for t in pair]
        by_parts, *_ = built("ends", "torch")
        exact = [
            t for pair in joined(by_parts.double(), x.double(), scalars.double()) for t in pair
        ]
        for a, b in zip(found, exact, strict=True):
            assert a.dtype == dtype
            most = 8 * torch.finfo(dtype).eps * float(b.detach().abs().max())
            torch.testing.assert_close(a.detach().double(), b.detach(), rtol=0, atol=most)

    def test_a_layer_that_is_not_plain_is_called():
        """An adapter in place of a linear layer, and a hook, have their say."""
        maps, x, scalars = built("scalars", "triton")
        (of,) = maps
        before = of(x, scalars)[1]
        of.s2s.register_forward_hook(lambda layer, given, out: out * 0)
        assert (of(x, scalars)[1] - before).abs().max() > 0

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
        found = {}
        for backend, dtype in (
            ("triton", torch.float32),
            ("torch", torch.float32),
            ("torch", torch.float64),
        ):
            torch.manual_seed(1)
            layer, inputs, reference = LAYERS[name](backend)
            layer.to(dtype)
            given = [t for i in range(inputs) for t in (drawn(16, 2, 5 + i, 4), drawn(2, 5 + i, 6))]
            given += [drawn(16, 2, 1, 1)] * reference
            given = [t.to(dtype).requires_grad_() for t in given]
            out = layer(*given)
            loss = sum((t * drawn(*t.shape).to(dtype)).sum() for t in out)
            over = [*given, *layer.parameters()]
            grads = torch.autograd.grad(loss, over, allow_unused=True)
            found[backend, dtype] = [*out, *(g for g in grads if g is not None)]
        of_kernels, plain, exact = found.values()
        errors = [
            [float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs]
            for pairs in (zip(of_kernels, exact, strict=True), zip(plain, exact, strict=True))
        ]
        assert max(errors[0]) <= 4 * max(errors[1])
