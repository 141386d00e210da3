"""torchweft.o3's other names of e3nn, against e3nn 0.6 in float64, as in test_o3_against_e3nn.

Seen red with a factor or a sign in each.
"""

import functools

import pytest
import torch

from tests.conftest import INTERPRETED
from tests.e3nns import alike, case
from torchweft.testing.contract import Setting, check_values

if INTERPRETED:
    pytest.skip("what is no kernel is the same natively", allow_module_level=True)

SETTINGS = {
    "float64": Setting(dtype=torch.float64),
    "float32": Setting(dtype=torch.float32, order=1),
}
SILU, TANH = torch.nn.functional.silu, torch.tanh


def network(hs, library, **options):
    return library.FullyConnectedNet(hs, **options)


NETWORKS = {
    f"FullyConnectedNet, {name}": alike(functools.partial(network, hs, **options), (7, hs[0]))
    for name, (hs, options) in {
        "two hidden layers": ([4, 6, 5, 3], {"act": SILU}),
        "variances": ([4, 6, 3], {"act": TANH, "variance_in": 2, "variance_out": 3}),
        "one layer": ([4, 3], {"act": SILU, "variance_in": 2, "variance_out": 3}),
        "linear": ([4, 6, 3], {}),
        "a last function": ([4, 6, 3], {"act": SILU, "variance_out": 3, "out_act": True}),
        "a module": ([4, 6, 3], {"act": torch.nn.SiLU()}),
    }.items()
}
NETWORKS |= {
    "normalize2mom": alike(lambda library: library.normalize2mom(SILU), (7,)),
    "moment": alike(lambda library: lambda x: x * library.moment(TANH, 4, x.dtype, "cpu"), (7,)),
}


class Together(torch.nn.Module):
    """Several results side by side."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.irreps_in = layer, layer.irreps_in

    def forward(self, x):
        return torch.cat(self.layer(x), -1)


ITEMS = "2x0e+1x1o+3x0e+1x2e+2x1o"
EXTRACTS = {
    "Extract": alike(
        lambda library: Together(
            library.Extract(ITEMS, ["3x0e+2x1o", "", "1x2e"], [(2, 4), (), (3,)])
        )
    ),
    "Extract, all": alike(
        lambda library: library.Extract(ITEMS, [ITEMS], [(0, 1, 2, 3, 4)], squeeze_out=True)
    ),
    "ExtractIr": alike(lambda library: library.ExtractIr(ITEMS, "1o")),
}
STEPS = {"soft_unit_step": alike(lambda library: library.soft_unit_step, (60,))}


def reduced(formula, options, library):
    return library.ReducedTensorProducts(formula, **options)


REDUCED = {
    f"ReducedTensorProducts, {formula}, {options}": alike(
        functools.partial(reduced, formula, options), *((4, width) for width in widths)
    )
    for formula, options, widths in (
        ("i", {"i": "1o+0e+1o"}, [7]),
        ("ij", {"i": "1o", "j": "0e+2x1o"}, [3, 7]),
        ("ij=ji", {"i": "2x0e+1o+2e"}, [10, 10]),
        ("ij=-ji", {"i": "5x0e+1e"}, [8, 8]),
        ("ijk=jki", {"i": "1o"}, [3] * 3),
        ("ijk=jik=ikj", {"i": "0e+1o+2e", "filter_ir_mid": ["0e", "1o"]}, [9] * 3),
        ("ijk=-jik=-ikj", {"i": "1o"}, [3] * 3),
        ("ijk=jik", {"k": "1o+0o", "j": "0e+1o", "filter_ir_out": ["1o", "2e"]}, [4, 4, 4]),
        ("ijkl=-jikl=-ijlk=klij", {"l": "1o"}, [3] * 4),
    )
}


def legendre(library):
    """On the circle, where e3nn's polynomials of two variables are those of one."""
    of = library.Legendre([2, 0, 3, 7])
    return lambda beta: of(beta.cos(), beta.sin())


def angular(degrees, kind, library):
    return lambda alpha, beta: library.spherical_harmonics_alpha_beta(
        degrees, alpha, beta, normalization=kind
    )


ANGLES = {
    "spherical_harmonics_alpha": alike(
        lambda library: functools.partial(library.spherical_harmonics_alpha, 3), (12,)
    ),
    "Legendre": alike(legendre, (12,)),
    "SphericalHarmonicsAlphaBeta": alike(
        lambda library: library.SphericalHarmonicsAlphaBeta([0, 2, 1]), (12,), (12,)
    ),
    "spherical_harmonics_alpha_beta, of irreps": alike(
        lambda library: angular(library.Irreps("0e+1e+2x3o"), "norm", library), (12,), (12,)
    ),
} | {
    f"spherical_harmonics_alpha_beta, {degrees}, {kind}": alike(
        functools.partial(angular, degrees, kind), (12,), (12,)
    )
    for degrees in (range(4), [7], 2)
    for kind in ("component", "norm", "integral")
}  # fmt: skip


def factors(library):
    return library.FromS2Grid((8, 9), 2, torch.tensor([1.0, 2.0, 4.0]))


GRIDS = {
    f"ToS2Grid, {name}": alike(lambda library, given=given: library.ToS2Grid(*given), (4, width))
    for name, (given, width) in {
        "component": ((3, None), 16),
        "norm": ((2, 10, "norm"), 9),
        "integral, even angles": ((2, (6, 8), "integral"), 9),
        "fewer angles than orders": ((3, (8, 5)), 16),
        "of a resolution": ((None, 8), 16),
        "of angles": ((None, (None, 7)), 16),
    }.items()
}
GRIDS |= {
    f"FromS2Grid, {name}": alike(lambda library, given=given: library.FromS2Grid(*given), shape)
    for name, (given, shape) in {
        "component": ((None, 3), (4, 8, 7)),
        "norm, of a higher degree": (((8, 9), 2, "norm", 3), (4, 8, 9)),
        "integral, even angles": (((6, 8), 2, "integral"), (2, 3, 6, 8)),
    }.items()
}
GRIDS |= {
    "FromS2Grid, factors": alike(factors, (4, 8, 9)),
    "s2_grid": alike(lambda library: lambda x: x * library.s2_grid(4, 5, x.dtype)[0], (4,)),
    "spherical_harmonics_s2_grid": alike(
        lambda library: lambda x: x @ library.spherical_harmonics_s2_grid(3, 8, 5, x.dtype)[2],
        (4, 8),
    ),
    "SO3Grid, there": alike(lambda library: library.SO3Grid(2, 3).to_grid, (3, 35)),
    "SO3Grid, back": alike(
        lambda library: library.SO3Grid(2, 3, aspect_ratio=1.5).from_grid, (3, 9, 6, 9)
    ),
}


def on_sphere(irreps, act, library, **options):
    return library.S2Activation(irreps, act, 12, **options)


def seeded(library):
    layer = on_sphere("0e+1o+2e", SILU, library, random_rot=True)

    def function(x):
        torch.manual_seed(0)
        return layer(x)

    return function


ACTIVATIONS = {
    f"S2Activation, {irreps}, {name}": alike(functools.partial(on_sphere, irreps, act, **options))
    for name, (irreps, act, options) in {
        "component": ("0e+1o+2e", SILU, {}),
        "one parity": ("0e+1e+2e", SILU, {"normalization": "norm", "lmax_out": 1}),
        "odd": ("0o+1e+2o", TANH, {"lmax_out": 3}),
        "even of odd": ("0o+1o", torch.cos, {"normalization": "integral"}),
        "scalar": ("0e", SILU, {}),
    }.items()
}
ACTIVATIONS |= {
    "S2Activation, a random rotation": alike(seeded, (5, 9)),
    "SO3Activation": alike(lambda library: library.SO3Activation(1, 2, TANH, 3), (4, 10)),
}


def signal(call, library):
    """Of a signal to degree 3."""
    irreps = library.SphericalTensor(3, 1, -1)
    return lambda *given: call(irreps, *given)


def cartesian(formula, method, library):
    return getattr(library.CartesianTensor(formula), method)


CENTER = (1.0, 2.0, 3.0)
POINTS = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
SIGNALS = {
    f"SphericalTensor, {name}": alike(functools.partial(signal, call), *shapes)
    for name, (call, *shapes) in {
        "values": (lambda s, a, r: s.signal_xyz(a, r), (2, 16), (3, 4, 3)),
        "norms": (lambda s, a: s.norms(a), (2, 16)),
        "diracs": (lambda s, r, v: s.sum_of_diracs(r, v), (2, 5, 3), (2, 5)),
        "diracs of shared points": (lambda s, r, v: s.sum_of_diracs(r, v), (5, 3), (2, 5)),
        "peaks": (lambda s, r: s.with_peaks_at(r), (4, 3)),
        "peaks of values": (lambda s, r, v: s.with_peaks_at(r, v), (4, 3), (4,)),
        "samples": (lambda s, v: s.from_samples_on_s2(POINTS.to(v.dtype), v, 12), (2, 7)),
        "surface": (
            lambda s, a: s.plot(a, torch.tensor(CENTER, dtype=a.dtype), 10)[0].contiguous(),
            (16,),
        ),
        "values on a surface": (
            lambda s, a: s.plot(a, None, 10, radius=False)[1].contiguous(),
            (16,),
        ),
    }.items()
}
CARTESIAN = {
    f"CartesianTensor, {formula}, {method}": alike(
        functools.partial(cartesian, formula, method), *shapes
    )
    for formula, method, *shapes in (
        ("ij=ji", "from_cartesian", (2, 4, 3, 3)),
        ("ij=ji", "to_cartesian", (2, 4, 6)),
        ("ij=ji", "from_vectors", (4, 3), (4, 3)),
        ("ijk=jik", "from_cartesian", (4, 3, 3, 3)),
        ("ijk=-jik", "to_cartesian", (4, 9)),
    )
}
NAMES = NETWORKS | EXTRACTS | STEPS | REDUCED | ANGLES | GRIDS | ACTIVATIONS
NAMES |= SIGNALS | CARTESIAN


@pytest.mark.parametrize("dtype", SETTINGS)
@pytest.mark.parametrize("name", NAMES)
def test_name(name, dtype):
    check_values(case(name, NAMES[name]), SETTINGS[dtype])
