"""Arguments of SamplesLoss that geomloss has: unbalanced transport, potentials, costs, kernels.

Converged numbers are those of dense float64 iterations that run until nothing changes, and their
gradients those of the dual functional, written out, at the potentials found.
Seen red with: updates without damping, or damped at one temperature; the gradient of the dual value
as it is written, with the weight ρ + ε / 2; no constant of the masses in the gradient of a loss
that is not debiased; potentials of multiscale in the order of clusters, or without damping.
"""

import inspect

import pytest
import torch

import torchweft
from tests.transports import clouds, distance
from torchweft.reductions import SamplesLoss
from torchweft.reductions.cluster import grid_cluster
from torchweft.reductions.transport import multiscale
from torchweft.testing import assert_as_accurate

BLUR, REACH = 0.3, 0.5


def uneven(**options):
    """Clouds of the masses 0.8 and 1.5."""
    a, x, b, y = clouds(**{"rows": 12, "columns": 9, "dim": 2, **options})
    return [0.8 * a, x, 1.5 * b, y]


def converged(a, x, b, y, p, blur, reach):
    """Potentials of the maximum, whose plan has the marginals that they say."""
    cost, eps, rho = distance(x, y) ** p / p, blur**p, reach**p
    damping = 1 / (1 + eps / rho)
    f, g = torch.zeros_like(a), torch.zeros_like(b)
    for _ in range(10_000):
        found = (-eps * ((b.log() + g / eps).unsqueeze(-2) - cost / eps).logsumexp(-1)) * damping
        other = (-eps * ((a.log() + f / eps).unsqueeze(-1) - cost / eps).logsumexp(-2)) * damping
        change = float(torch.cat([found - f, other - g], -1).abs().max())
        f, g = (f + found) / 2, (g + other) / 2
        if change <= 8 * torch.finfo(torch.float64).eps * (float(cost.max()) + eps):
            return f, g
    raise AssertionError("the iterations do not end")


def dual(a, x, b, y, p, blur, reach):
    """The dual functional at its maximum: its derivatives are those of its maximum."""
    f, g = (t.detach() for t in converged(*(t.detach() for t in (a, x, b, y)), p, blur, reach))
    cost, eps, rho = distance(x, y) ** p / p, blur**p, reach**p
    plan = ((f.unsqueeze(-1) + g.unsqueeze(-2) - cost) / eps).exp()
    kept = (a * (1 - (-f / rho).exp())).sum(-1) + (b * (1 - (-g / rho).exp())).sum(-1)
    return rho * kept - eps * torch.einsum("...i,...ij,...j", a, plan - 1, b)


def exact_loss(a, x, b, y, p, blur, reach, debias):
    total, eps = dual(a, x, b, y, p, blur, reach), blur**p
    of_a, of_b = a.sum(-1), b.sum(-1)
    if not debias:
        return total - eps * of_a * of_b + eps / 2 * (of_a + of_b)
    own = dual(a, x, a, x, p, blur, reach) + dual(b, y, b, y, p, blur, reach)
    return total - own / 2 + eps / 2 * (of_a - of_b) ** 2


def with_gradients(loss, inputs):
    inputs = [t.detach().requires_grad_() for t in inputs]
    value = loss(*inputs)
    return [value.detach(), *torch.autograd.grad(value.sum(), inputs)]


def errors(found, exact):
    return [float((one - true).norm()) for one, true in zip(found, exact, strict=True)]


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("shape", [{}, {"batch": (2,)}, {"rows": 1, "columns": 1}])
def test_unbalanced(p, debias, shape):
    """Value and gradients come near the converged ones as steps get smaller, each by a factor."""
    inputs, options = uneven(**shape), {"p": p, "blur": BLUR, "reach": REACH, "debias": debias}
    exact = with_gradients(lambda *t: exact_loss(*t, **options), inputs)
    rough, fine = (
        errors(with_gradients(SamplesLoss(scaling=s, **options), inputs), exact)
        for s in (0.5, 0.95)
    )
    slack = 64 * torch.finfo(torch.float64).eps
    for one, other in zip(fine, rough, strict=True):
        assert one <= other / 2 + slack


@pytest.mark.parametrize("p", [1, 2])
def test_potentials(p):
    """f and g, whose plan has the marginals a exp(−f / ρ), or less those of a cloud with itself."""
    a, x, b, y = inputs = uneven()
    options = {"p": p, "blur": BLUR, "reach": REACH}
    f, g = converged(*inputs, **options)
    own = converged(a, x, a, x, **options)[0], converged(b, y, b, y, **options)[0]
    for debias, exact in ((False, (f, g)), (True, (f - own[0], g - own[1]))):
        rough, fine = (
            errors(
                SamplesLoss(**options, debias=debias, potentials=True, scaling=s)(*inputs), exact
            )
            for s in (0.5, 0.95)
        )
        assert all(one <= other / 3 for one, other in zip(fine, rough, strict=True))


def test_the_gradient_of_a_potential_is_a_displacement():
    """Of a potential as a function of its own point: a shift, where one cloud is the other's."""
    x, v = clouds()[1].requires_grad_(), torch.tensor([0.1, 0.3, -0.2]).double()
    f, _ = SamplesLoss(scaling=0.9, potentials=True)(x, (x + v).detach())
    (gradient,) = torch.autograd.grad(f.sum(), x)
    rough = torch.autograd.grad(SamplesLoss(potentials=True)(x, (x + v).detach())[0].sum(), x)[0]
    assert float((gradient + v).norm()) < float((rough + v).norm()) / 4


def test_far_reach_is_balanced_transport():
    """Also in float32, where 1 − exp(−f / ρ) would have lost its digits."""
    inputs = [t.float() for t in clouds()]
    far, kept = (SamplesLoss(reach=reach)(*inputs) for reach in (1e4, None))
    assert_as_accurate(far, kept, 8 * torch.finfo(torch.float32).eps * kept)


@pytest.mark.parametrize("reach", [None, REACH])
@pytest.mark.parametrize("backend", ["online", "multiscale"])
def test_points_of_no_weight(reach, backend):
    """They change nothing but the diameter; potentials there are of the measures all the same."""
    a, x, b, y = clouds(rows=40, columns=30)
    more = torch.cat([a, a.new_zeros(5)]), torch.cat([x, x[:5] + 0.1]), b, y
    options = {"reach": reach, "diameter": 2.0, "backend": backend, "truncate": None}
    one, other = (SamplesLoss(**options)(*t) for t in ((a, x, b, y), more))
    assert_as_accurate(other, one, torch.finfo(torch.float32).eps * one.abs())
    f, g = SamplesLoss(**options, potentials=True)(*more)
    assert f.isfinite().all()
    assert g.shape == b.shape


COSTS = {
    "formula": ({"cost": "(SqDist(X,Y) / IntCst(2))"}, 2),
    "formula, p = 1": ({"cost": "Norm2(X-Y)", "backend": "tensorized"}, 1),
    "lazy": ({"cost": lambda x, y: x.sqdist(y) / 2, "backend": "online"}, 2),
    "matrix": ({"cost": lambda x, y: (x[:, :, None] - y[:, None]).square().sum(-1) / 2}, 2),
}


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("batch", [(), (2, 2)])
def test_costs(name, batch):
    """The usual cost, given as one's own, with values and gradients of the usual one."""
    options, p = COSTS[name]
    inputs = clouds(rows=15, columns=15, batch=batch)
    exact = with_gradients(SamplesLoss(p=p, reach=1.0), inputs)
    found = with_gradients(SamplesLoss(p=p, reach=1.0, **options), inputs)
    for one, true in zip(found, exact, strict=True):
        assert_as_accurate(one, true, torch.finfo(torch.float32).eps * true.abs().mean())


def test_a_cost_sees_points_where_they_are():
    """One that depends on more than differences; and any p is the exponent of the temperature."""
    a, x, b, y = clouds(rows=15, columns=12)
    formula, function = "-(X|Y)", lambda x, y: -(x @ y.mT)
    one, other = (
        SamplesLoss(p=1.5, cost=cost, debias=False)(a, x + 1, b, y) for cost in (formula, function)
    )
    assert_as_accurate(one, other, torch.finfo(torch.float32).eps * other.abs())


def gaussian(x, y, blur, use_keops, ranges):
    if use_keops:
        return (-torchweft.reductions.Vi(x).sqdist(torchweft.reductions.Vj(y)) / 2 / blur**2).exp()
    return (-(x[:, :, None] - y[:, None]).square().sum(-1) / 2 / blur**2).exp()


@pytest.mark.parametrize("batch", [(), (2, 2)])
@pytest.mark.parametrize(
    "options",
    [
        {"loss": "hausdorff", "kernel": gaussian},
        {"loss": "energy", "kernel": gaussian, "backend": "online"},
        {"kernel": "Exp(-SqDist(X, Y) * IntInv(2))", "loss": "laplacian", "blur": 7.0},
    ],
)
def test_kernels_of_ones_own(options, batch):
    """The Gaussian, given as one's own."""
    inputs = clouds(rows=15, columns=12, batch=batch)
    named = with_gradients(SamplesLoss("gaussian", blur=1.0), inputs)
    found = with_gradients(SamplesLoss(**{"blur": 1.0, **options}), inputs)
    for one, true in zip(found, named, strict=True):
        assert_as_accurate(one, true, torch.finfo(torch.float32).eps * true.abs().mean())


@pytest.mark.parametrize("name", ["energy", "gaussian"])
def test_potentials_of_kernels_are_derivatives_by_weights(name):
    inputs = clouds()
    of_a, of_b = (with_gradients(SamplesLoss(name, blur=0.3), inputs)[n] for n in (1, 3))
    for one, true in zip(
        SamplesLoss(name, blur=0.3, potentials=True)(*inputs), (of_a, of_b), strict=True
    ):
        assert_as_accurate(one, true, torch.finfo(torch.float32).eps * true.abs().mean())


@pytest.mark.parametrize("name", ["sinkhorn", "gaussian"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_and_dtypes_of_potentials(name, dtype):
    """Those of the weights, but for a last dimension of 1, which weights may have."""
    _, x, _, y = (t.to(dtype) for t in clouds(batch=(2,), rows=6, columns=5))
    a, b = (torch.full(z.shape[:-1], 1 / z.shape[-2], dtype=dtype) for z in (x, y))
    loss = SamplesLoss(name, potentials=True, reach=1.0)
    for given in ((x, y), (a, x, b, y), (a[..., None], x, b[..., None], y)):
        found = loss(*given)
        assert [t.shape for t in found] == [a.shape, b.shape]
        assert all(t.dtype == dtype for t in found)


# clusters


CLUSTERS = {
    "labels": {"labels": True},
    "labels of many dimensions": {"labels": True, "dim": 4},
    "scale": {"cluster_scale": 0.5},
    "unbalanced": {"reach": REACH},
    "unbalanced, p = 1": {"reach": REACH, "p": 1},
    "no truncation": {"truncate": None, "debias": False},
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_clusters(monkeypatch, name):
    """No further from the converged loss and potentials than twice the online ones."""
    monkeypatch.setattr(multiscale, "BRICK", 8)
    options = {"blur": 0.2, **CLUSTERS[name]}
    a, x, b, y = given = clouds(rows=100, columns=80, dim=options.pop("dim", 2))
    labels = [grid_cluster(z, 0.3) for z in (x, y)] if options.pop("labels", False) else None
    args = (labels[0], a, x, labels[1][:, None], b, y) if labels else given

    def found(*args, **changed):
        kept = {**options, **changed}
        f, g = SamplesLoss(**kept, potentials=True)(*args)
        # balanced ones may be moved by a constant
        return [SamplesLoss(**kept)(*args), f - f.mean(), g - g.mean()]

    exact = found(*given, scaling=0.95, backend="online")
    ours = errors(found(*args, backend="multiscale"), exact)
    online = errors(found(*given, backend="online"), exact)
    assert all(one <= 2 * other for one, other in zip(ours, online, strict=True))


def test_a_batch_of_one_cloud_goes_through_clusters():
    a, x, b, y = clouds()
    loss = SamplesLoss(backend="multiscale", potentials=True)
    one, many = loss(a, x, b, y), loss(a[None], x[None], b[None], y[None])
    for single, batched in zip(one, many, strict=True):
        torch.testing.assert_close(batched, single[None], rtol=0, atol=0)


def test_what_multiscale_tells(capsys):
    _, x, _, y = clouds(rows=200, columns=100)
    SamplesLoss(backend="multiscale", verbose=True)(x, y)
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("4 x 2 clusters of 64 points at most, edge ")
    assert all("% of all pairs kept" in line for line in others)
    SamplesLoss(backend="multiscale")(x, y)
    assert not capsys.readouterr().out


@pytest.mark.parametrize(("scale", "count"), [(None, 63), (0.0, 63), (0.5, 8), (2.0, 1)])
def test_clusters_are_about_as_large_as_asked(scale, count):
    assert len(multiscale._cut(clouds(rows=4000)[1], None, scale).counts) == count


# errors


def given(*args, **options):
    return lambda: SamplesLoss(**options)(*(args or clouds(rows=6, columns=5)))


A, X, B, Y = clouds(rows=6, columns=5)
L_X, L_Y = torch.arange(6), torch.arange(5)
SHAPE, DTYPE, BACKEND = torchweft.ShapeError, torchweft.DTypeError, torchweft.BackendError
ERRORS = {
    "reach": (given(reach=-1.0), SHAPE, r"reach is -1.0: it must be positive and finite, or None"),
    "truncate": (given(truncate=0), SHAPE, r"truncate is 0: it must be positive"),
    "scale": (given(cluster_scale=-1.0), SHAPE, r"cluster_scale is -1.0: it must be a finite len"),
    "a cost": (given(cost=3), SHAPE, r"cost is a int: it must be a formula of X and Y, such as"),
    "cost and clusters": (
        given(cost="Norm2(X-Y)", backend="multiscale"),
        BACKEND,
        r"multiscale transport is asked for with a cost: .* Pass backend='online'",
    ),
    "a cost of a kernel": (
        given(loss="energy", cost="Norm2(X-Y)"),
        SHAPE,
        r"cost is given to loss='energy', which does not read it: it takes a kernel",
    ),
    "a kernel of transport": (
        given(kernel=gaussian),
        SHAPE,
        r"kernel is given to loss='sinkhorn', which does not read it: it takes a cost",
    ),
    "components": (
        given(cost="X-Y"),
        SHAPE,
        r"cost 'X-Y' has 3 components at points of 3 coordinates: it must be one number",
    ),
    "names": (given(cost="Norm2(x-y)"), torchweft.WeftError, r"unknown name 'x'.*write 'X'"),
    "shape of a matrix": (
        given(cost=lambda x, y: x.sum(-1)),
        SHAPE,
        r"cost returned \(1, 6\) for x \(1, 6, 3\) and y \(1, 5, 3\).*Return \(1, 6, 5\)",
    ),
    "no matrix": (
        given(cost=lambda x, y: 0.0),
        DTYPE,
        r"cost returned a float for tensors x and y: .*backend='online'",
    ),
    "no lazy cost": (
        given(cost=lambda x, y: 0.0, backend="online"),
        DTYPE,
        r"cost returned a float under backend='online': .*backend='tensorized'",
    ),
    "no lazy kernel": (
        given(loss="energy", kernel=lambda x, y, **_: x @ y.mT, backend="online"),
        DTYPE,
        r"kernel returned a Tensor under backend='online': it must return a LazyTensor",
    ),
    "no kernel matrix": (
        given(loss="energy", kernel=lambda x, y, **_: 0.0),
        DTYPE,
        r"kernel returned a float: it must return the matrix of all pairs",
    ),
    "no mass": (
        given(A, X, 0 * B, Y, reach=1.0),
        SHAPE,
        r"mass of a is 1 and that of b 0: unbalanced transport needs finite ones, above 0",
    ),
    "masses": (given(A, X, 2 * B, Y), SHAPE, r"that of b 2: transport needs equal ones.*reach="),
    "labels": (
        given(L_X.float(), A, X, L_Y, B, Y),
        DTYPE,
        r"l_x is torch.float32: labels must be integers",
    ),
    "number of labels": (
        given(L_X, A, X, L_X, B, Y),
        SHAPE,
        r"l_y is \(6,\) but its points are \(5, 3\): each point has one label. .* as \(5,\)",
    ),
    "labels online": (
        given(L_X, A, X, L_Y, B, Y, backend="online"),
        BACKEND,
        r"labels are given to backend='online'.* Pass backend='multiscale' and no cost",
    ),
    "labels of a batch": (
        given(*(torch.stack([t, t]) for t in (L_X, A, X, L_Y, B, Y))),
        BACKEND,
        r"x is \(2, 6, 3\): multiscale needs one cloud",
    ),
    "assigned": (
        lambda: setattr(loss := SamplesLoss(), "blur", -1.0) or loss(X, Y),
        SHAPE,
        r"blur is -1.0 and scaling 0.5: p and blur must be positive",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, kind, text = ERRORS[name]
    with pytest.raises(kind, match=text):
        call()


def test_a_map_of_transport_is_told_of_the_batch():
    clouds, y = torch.rand(2, 5, 3), torch.rand(4, 3)
    with pytest.raises(
        torchweft.ShapeError, match=r"x is mapped by torch.vmap: .* Pass clouds as a batch"
    ):
        torch.vmap(SamplesLoss(blur=0.2), in_dims=(0, None))(clouds, y)
    losses = torch.vmap(SamplesLoss("gaussian", blur=0.2), in_dims=(0, None))(clouds, y)
    assert losses.shape == (2,)


def test_order_of_arguments():
    """That of geomloss, since scripts give some by their place."""
    assert list(inspect.signature(SamplesLoss).parameters) == [
        *("loss", "p", "blur", "reach", "diameter", "scaling", "truncate", "cost", "kernel"),
        *("cluster_scale", "debias", "potentials", "verbose", "backend"),
    ]
