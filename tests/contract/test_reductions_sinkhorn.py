"""Losses between clouds against dense float64 ones, what must hold of them, and every error.

Seen red with: costs without their 1 / p, potentials replaced and not averaged, sources that are
not held, a cloud against itself counted once, weights of the other cloud, a mask not turned for g,
a kernel in the wrong units, 16-bit potentials, a second derivative let through, each check of
weights and points left out, masses compared to the last bit or over the batch, 1 / N in 16 bits.
"""

import functools
import math

import pytest
import torch

import torchweft
from tests.transports import clouds, distance, transport
from torchweft.reductions import SamplesLoss, sinkhorn_divergence
from torchweft.reductions.transport import sinkhorn
from torchweft.testing import assert_as_accurate, plain_error


def dense_sinkhorn(a, x, b, y, p=2, blur=0.05, scaling=0.5, debias=True):
    points = torch.cat([x, y], -2).detach()
    diameter = float((points.amax(-2) - points.amin(-2)).norm(dim=-1).max())
    count = math.ceil(math.log(blur / diameter) / math.log(scaling))
    lengths = [diameter, *(diameter * scaling**n for n in range(count)), blur]
    f, g = transport(a, x, b, y, lengths, p)
    if debias:
        f = f - transport(a, x, a, x, lengths, p)[0]
        g = g - transport(b, y, b, y, lengths, p)[0]
    return (a * f).sum(-1) + (b * g).sum(-1)


def dense_kernel(a, x, b, y, name, blur):
    kernels = {
        "energy": lambda r: -r,
        "gaussian": lambda r: (-r.square() / (2 * blur**2)).exp(),
        "laplacian": lambda r: (-r / blur).exp(),
    }

    def mean(w, z, v, u):
        return torch.einsum("...i,...ij,...j", w, kernels[name](distance(z, u)), v)

    return (mean(a, x, a, x) + mean(b, y, b, y)) / 2 - mean(a, x, b, y)


def with_gradients(loss, inputs, dtype):
    inputs = [t.detach().to(dtype).requires_grad_() for t in inputs]
    value = loss(*inputs)
    assert value.dtype == dtype
    return value.detach(), *torch.autograd.grad(value.sum(), inputs)


def assert_loss(loss, dense, dtype=torch.float32, **options):
    """Value and gradients no worse than twice the dense ones in float32, on several draws."""
    exact, plain, found = [], [], []
    for seed in range(12):
        inputs = [t.to(dtype) for t in clouds(seed=seed, **options)]
        exact.append(with_gradients(dense, inputs, torch.float64))
        plain.append(with_gradients(dense, inputs, torch.float32))
        found.append(with_gradients(loss, inputs, dtype))
    for n in range(5):  # the value, then each gradient
        one, true, rough = (torch.stack([r[n] for r in runs]) for runs in (found, exact, plain))
        assert_as_accurate(one, true, plain_error(rough, true, torch.float32))


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize(("batch", "dim"), [((), 1), ((), 3), ((2, 3), 2), ((), 10)])
def test_sinkhorn(p, debias, batch, dim):
    options = {"p": p, "debias": debias, "blur": 0.1}
    loss = SamplesLoss(**options)
    dense = functools.partial(dense_sinkhorn, **options)
    assert_loss(loss, dense, torch.float64, batch=batch, dim=dim)


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_clouds_of_one_size(debias, batch):
    """They are reduced together."""
    options = {"debias": debias, "blur": 0.1}
    dense = functools.partial(dense_sinkhorn, **options)
    assert_loss(SamplesLoss(**options), dense, torch.float64, batch=batch, columns=60)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_of_sinkhorn(dtype):
    assert_loss(SamplesLoss(blur=0.2, scaling=0.7), dense_of(0.2, 0.7), dtype)


def dense_of(blur, scaling):
    return functools.partial(dense_sinkhorn, blur=blur, scaling=scaling)


@pytest.mark.parametrize("name", ["energy", "gaussian", "laplacian"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_kernels(name, dtype, batch):
    dense = functools.partial(dense_kernel, name=name, blur=0.3)
    assert_loss(SamplesLoss(name, blur=0.3), dense, dtype, batch=batch)


def test_second_gradients_of_kernels():
    def twice(loss, inputs):
        inputs = [t.detach().requires_grad_() for t in inputs]
        (first,) = torch.autograd.grad(loss(*inputs), inputs[1], create_graph=True)
        return torch.autograd.grad(first.square().sum(), inputs)

    inputs = clouds()
    dense = functools.partial(dense_kernel, name="gaussian", blur=0.3)
    rough = twice(dense, [t.float() for t in inputs])
    found = twice(SamplesLoss("gaussian", blur=0.3), inputs)
    for one, true, plain in zip(found, twice(dense, inputs), rough, strict=True):
        assert_as_accurate(one, true, plain_error(plain, true, torch.float32))


@pytest.mark.parametrize("name", ["sinkhorn", "energy", "gaussian", "laplacian"])
@pytest.mark.parametrize("backend", ["online", "multiscale"])
def test_a_cloud_and_itself(name, backend):
    """0, and its gradient is 0, at coincident points too."""
    x = clouds()[1].requires_grad_()
    loss = SamplesLoss(name, backend=backend)(x, x.detach().clone())
    (gradient,) = torch.autograd.grad(loss, x)
    # sums of 60 terms about as large as the diameter, taken off each other
    size = 60**0.5 * torch.finfo(x.dtype).eps * 4
    assert abs(float(loss.detach())) <= size
    assert float(gradient.abs().max()) <= size


@pytest.mark.parametrize("backend", ["online", "multiscale"])
def test_uniform_weights(backend):
    a, x, b, y = clouds()
    loss = SamplesLoss(backend=backend)
    a, b = torch.full_like(a, 1 / 60), torch.full_like(b, 1 / 40)
    torch.testing.assert_close(loss(x, y), loss(a, x, b, y), rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["online", "multiscale"])
def test_weights_of_zero(backend):
    """Also of all points of a cell."""
    a, x, b, y = clouds()
    a[:7], x[:7] = 0, x[:7] + 0.5
    a /= a.sum()
    found = with_gradients(SamplesLoss(backend=backend), (a, x, b, y), torch.float64)
    assert all(bool(t.isfinite().all()) for t in found)
    assert not found[2][:7].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_uniform_weights_of_narrow_points(dtype):
    """They are not rounded to 16 bits, where 1 / 60 and 1 / 40 have sums that differ."""
    _, x, _, y = (t.to(dtype) for t in clouds(batch=(32,)))
    a, b = (torch.full(z.shape[:-1], 1 / z.shape[-2]) for z in (x, y))
    loss = SamplesLoss(debias=False)
    torch.testing.assert_close(loss(x.float(), y.float()).to(dtype), loss(x, y), rtol=0, atol=0)
    torch.testing.assert_close(loss(x, y), loss(a, x, b, y), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_masses_that_rounding_makes_differ(dtype):
    """Of weights rounded to their dtype, or to float32 on the way."""
    _, x, _, y = (t.to(dtype) for t in clouds())
    a, b = (torch.full((len(z),), 1 / len(z)).to(dtype) for z in (x, y))
    assert SamplesLoss()(a, x, b, y).isfinite()


@pytest.mark.parametrize("name", ["gaussian", "laplacian", "energy"])
def test_kernels_take_weights_of_any_sign(name):
    def signed(a, *rest):
        return SamplesLoss(name, blur=0.3)(1 - 50 * a, *rest)

    def dense(a, *rest):
        return dense_kernel(1 - 50 * a, *rest, name=name, blur=0.3)

    assert_loss(signed, dense)


@pytest.mark.parametrize("name", ["sinkhorn", "energy"])
def test_a_batch_of_nothing(name):
    x, y = torch.rand(0, 5, 3, requires_grad=True), torch.rand(0, 4, 3)
    loss = SamplesLoss(name)(x, y)
    assert loss.shape == (0,)
    assert torch.autograd.grad(loss.sum(), x)[0].shape == x.shape


def test_one_point():
    _, x, _, y = clouds()
    alone = SamplesLoss(debias=False)(x[:1], y[:1])
    exact = (x[0] - y[0]).square().sum() / 2
    assert_as_accurate(alone, exact, torch.finfo(torch.float32).eps * exact)
    assert float(SamplesLoss()(x[:1], x[:1])) == 0


def test_a_shifted_cloud():
    """At the maximum the loss is |v|² / 2 and its gradient −v a_i, for any ε."""
    x, v = clouds()[1], torch.tensor([0.5, -0.2, 0.1]).double()
    found, gradient, _ = with_gradients_of_points(SamplesLoss(blur=0.3, scaling=0.95), x, x + v)
    rough, rough_gradient, _ = with_gradients_of_points(SamplesLoss(blur=0.3), x, x + v)
    exact, exact_gradient = v.square().sum() / 2, -v / len(x)
    assert abs(found - exact) < abs(rough - exact) / 4
    error, rough_error = ((g - exact_gradient).norm() for g in (gradient, rough_gradient))
    assert error < rough_error / 4


def with_gradients_of_points(loss, *inputs):
    inputs = [t.detach().requires_grad_() for t in inputs]
    value = loss(*inputs)
    return value.detach(), *torch.autograd.grad(value, inputs)


def test_clouds_far_from_the_origin():
    a, x, b, y = (t.float() for t in clouds())
    x, y = (t.mul(2**12).round() / 2**12 for t in (x, y))  # exact when moved by 2^10
    near, far = SamplesLoss()(a, x, b, y), SamplesLoss()(a, x + 2**10, b, y + 2**10)
    torch.testing.assert_close(near, far, rtol=0, atol=0)


@pytest.mark.parametrize("p", [1, 2])
def test_multiscale_is_as_near_the_maximum(p):
    """Its steps are others: against a slow run, it is no further off than twice the online one."""
    inputs = clouds(rows=500, columns=400)
    exact = with_gradients(SamplesLoss(p=p, scaling=0.97, blur=0.1), inputs, torch.float64)
    errors = {}
    for backend in ("online", "multiscale"):
        loss = SamplesLoss(p=p, blur=0.1, backend=backend)
        value, _, gradient, *_ = with_gradients(loss, inputs, torch.float64)
        true_value, _, true_gradient, *_ = exact
        # sorting does not change whose gradient it is
        errors[backend] = (
            float((gradient - true_gradient).norm()),
            float((value - true_value).abs()),
        )
    assert errors["multiscale"][0] <= 2 * errors["online"][0]
    assert errors["multiscale"][1] <= 2 * errors["online"][1]


def test_auto_takes_clusters_for_many_pairs(monkeypatch):
    _, x, _, y = clouds()
    online, multiscale = (SamplesLoss(backend=name)(x, y) for name in ("online", "multiscale"))
    assert float(SamplesLoss()(x, y)) == float(online) != float(multiscale)
    monkeypatch.setattr(sinkhorn, "LEAST_PAIRS_OF_CLUSTERS", 1000)
    assert float(SamplesLoss()(x, y)) == float(multiscale)
    wide = torch.rand(60, 5), torch.rand(40, 5)
    assert float(SamplesLoss()(*wide)) == float(SamplesLoss(backend="online")(*wide))


def test_repeats_to_the_bit():
    inputs = clouds()
    for backend in ("online", "multiscale"):
        loss = SamplesLoss(backend=backend)
        for one, other in zip(
            *(with_gradients(loss, inputs, torch.float32) for _ in range(2)), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("which", range(4))
def test_second_derivatives_raise(which):
    inputs = [t.requires_grad_() for t in clouds()]
    loss = SamplesLoss()(*inputs)
    (first,) = torch.autograd.grad(loss, inputs[which], create_graph=True)
    with pytest.raises(torchweft.BackendError, match=r"only first derivatives are right.*energy"):
        first.square().sum().backward()


def given(loss="sinkhorn", batch=(), **changed):
    """A loss of clouds some of which are changed by a function."""
    named = dict(zip("axby", clouds(batch=batch), strict=True))
    return SamplesLoss(loss)(*(changed.get(k, lambda t: t)(t) for k, t in named.items()))


def scaled(*factors):
    return lambda w: w * torch.tensor(factors).unsqueeze(-1)


ERRORS = {
    "loss": (
        lambda: SamplesLoss("hausdorff"),
        r"loss is 'hausdorff' and kernel None: geomloss has it for a kernel of yours",
    ),
    "p": (lambda: SamplesLoss(p=3), r"p is 3: it must be one of 1, 2"),
    "backend": (
        lambda: SamplesLoss(backend="gpu"),
        r"backend is 'gpu'.*'auto', 'tensorized', 'online'",
    ),
    "blur": (lambda: SamplesLoss(blur=0.0), r"blur is 0.0 and scaling 0.5: p and blur must be pos"),
    "scaling": (lambda: SamplesLoss(scaling=1.0), r"scaling 1.0.*between 0 and 1"),
    "three": (
        lambda: SamplesLoss()(*clouds()[:3]),
        r"3 tensors are given: x and y, or a, x, b and y, or l_x",
    ),
    "dims": (
        lambda: SamplesLoss()(torch.rand(5, 2), torch.rand(5, 3)),
        r"x is \(5, 2\) but y is \(5, 3\)",
    ),
    "weights": (
        lambda: SamplesLoss()(torch.rand(4), torch.rand(5, 2), torch.rand(5), torch.rand(5, 2)),
        r"a is \(4,\) but its points are \(5, 2\).*Pass a as \(5,\)",
    ),
    "one dimension": (
        lambda: SamplesLoss()(torch.rand(5), torch.rand(5)),
        r"x is \(5,\) but y is \(5,\): both must be \(\*batch, points, D\)",
    ),
    "no points": (
        lambda: SamplesLoss()(torch.rand(0, 2), torch.rand(5, 2)),
        r"x is \(0, 2\): a cloud must have at least one point.*Leave empty clouds out",
    ),
    "no points of a kernel": (
        lambda: SamplesLoss("energy")(torch.rand(5, 2), torch.rand(0, 2)),
        r"y is \(0, 2\): a cloud must have at least one point",
    ),
    "no coordinates": (
        lambda: SamplesLoss()(torch.rand(5, 0), torch.rand(5, 0)),
        r"x is \(5, 0\): a cloud must have .* one coordinate or more",
    ),
    "negative a": (
        lambda: given(a=lambda a: a - 2 * a[0]),
        r"a holds a weight of -.*: the weights of transport must be 0 or more.*loss='gaussian'",
    ),
    "negative b": (lambda: given(b=lambda b: -b), r"b holds a weight of -"),
    "nan": (lambda: given(b=lambda b: b * torch.nan), r"b holds a weight of nan"),
    "masses": (
        lambda: given(a=lambda a: 5 * a, b=lambda b: 7 * b),
        r"mass of a is 5 and that of b 7: transport needs equal ones.*Divide each by its own",
    ),
    "masses of a batch": (
        lambda: given(batch=(2,), a=scaled(5.0, 7.0), b=scaled(7.0, 5.0)),
        r"mass of a is 5 and that of b 7",
    ),
    "another mass in a batch": (
        lambda: given(batch=(3,), a=scaled(1.0, 1.0, 1.0005)),
        r"mass of a is 1\.0005 and that of b 1:",
    ),
    "no mass": (
        lambda: given(a=torch.zeros_like, b=torch.zeros_like),
        r"mass of a is 0 and that of b 0: transport needs equal ones, above 0",
    ),
    "endless mass": (
        lambda: given(a=lambda a: a / 0, b=lambda b: b / 0),
        r"mass of a is inf and that of b inf",
    ),
    "points of nan": (
        lambda: given(x=lambda x: x * torch.nan),
        r"the clouds are nan across: points .* must be finite.*torch\.isfinite",
    ),
    "points far away": (lambda: given(y=lambda y: y / 0), r"the clouds are inf across"),
    "clusters": (
        lambda: SamplesLoss(backend="multiscale")(*scaled_clouds(5, 7)),
        r"mass of a is 5 and that of b 7",
    ),
}


def scaled_clouds(of_a, of_b):
    a, x, b, y = clouds()
    return of_a * a, x, of_b * b, y


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, text = ERRORS[name]
    with pytest.raises(torchweft.ShapeError, match=text):
        call()


@pytest.mark.parametrize("which", range(4))
def test_sinkhorn_divergence_checks_too(which):
    inputs = clouds()
    inputs[which] = inputs[which][:0]
    with pytest.raises(torchweft.ShapeError, match=r"(is|are) \(0, 3\)|is \(0,\)"):
        sinkhorn_divergence(*inputs)


@pytest.mark.parametrize("name", ["sinkhorn", "energy"])
def test_points_are_of_one_floating_dtype(name):
    x = torch.ones(5, 3, dtype=torch.int64)
    with pytest.raises(
        torchweft.DTypeError, match=r"x is torch.int64 and y torch.int64: points must"
    ):
        SamplesLoss(name)(x, x)
    with pytest.raises(
        torchweft.DTypeError, match=r"x is torch.float32 and y torch.float64.*\.to\("
    ):
        SamplesLoss(name)(x.float(), x.double())


@pytest.mark.parametrize("name", ["sinkhorn", "energy"])
@pytest.mark.parametrize("which", ["a", "b"])
def test_weights_are_of_the_points_dtype(name, which):
    x, a = torch.rand(5, 3), torch.full((5,), 0.2)
    weights = {"a": a, "b": a, which: a.double()}
    match = (
        rf"loss of clouds is given weights {which} of torch.float64 at points \w of torch.float32"
    )
    with pytest.raises(torchweft.DTypeError, match=match + rf".*{which}\.to\(torch.float32\)"):
        SamplesLoss(name)(weights["a"], x, weights["b"], x)


def test_values_are_looked_at_in_one_copy(monkeypatch):
    """A GPU is waited for as often as the diameter needs."""
    copies = []
    for name in ("item", "tolist", "__float__", "__bool__"):
        usual = getattr(torch.Tensor, name)

        def counted(self, usual=usual, name=name):
            copies.append(name)
            return usual(self)

        monkeypatch.setattr(torch.Tensor, name, counted)
    diameter = sinkhorn._diameter(*clouds()[::2], torch.ones(()), 0.01)
    assert diameter == 1.0
    assert copies == ["tolist"]


def test_multiscale_needs_few_dimensions():
    with pytest.raises(torchweft.BackendError, match=r"x is \(5, 4\): multiscale needs.*online"):
        sinkhorn_divergence(
            *(torch.rand(5), torch.rand(5, 4), torch.rand(5), torch.rand(5, 4)),
            backend="multiscale",
        )
