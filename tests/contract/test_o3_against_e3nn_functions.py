"""Functions of torchweft.o3, and layers that e3nn lacks but can spell, against e3nn 0.6 in float64.

Values, gradients and their gradients as in test_o3_against_e3nn; and that no public name is left
out: each is compared there or here, or says why not.  Rotations begin and end on the group, since
nobody says what they are off it.

Seen red with a factor or a sign in each function: the order of turns, inverses, poles, half the
turns, parities, symbols, generators, scales and components of harmonics, each radial basis,
features, W_i, the direction of an edge, couplings; and with a new public name.
"""

import functools
import math

import e3nn.math
import e3nn.o3
import pytest
import torch

from tests.conftest import INTERPRETED
from tests.contract.test_o3_against_e3nn import LAYERS, SETTING
from tests.contract.test_o3_against_e3nn_names import NAMES
from tests.e3nns import OURS, THEIRS, Twin, alike, case
from tests.maces import contraction
from torchweft import o3
from torchweft.core.default_dtype import default_dtype
from torchweft.testing import assert_within_bound
from torchweft.testing.contract import check_values

if INTERPRETED:
    pytest.skip("what is no kernel is the same natively", allow_module_level=True)

DOUBLE = torch.float64
FORMS = ("angles", "matrix", "axis_angle", "quaternion")
ROWS = 12


def of_angles(library, form, angles):
    """A rotation in a form, as a tuple of tensors."""
    if form == "angles":
        return tuple(angles)
    found = getattr(library, f"angles_to_{form}")(*angles)
    return found if isinstance(found, tuple) else (found,)


def side_by_side(found):
    """A row of all numbers of a rotation."""
    parts = found if isinstance(found, tuple) else (found,)
    return torch.cat([part.reshape(ROWS, -1) for part in parts], -1)


def rotation(name, form, library, count=1):
    """Of Euler angles: a function of rotations of one form, as rows of numbers.

    Away from the poles, where e3nn's arc cosines lose digits.
    """

    def function(*given):
        angles = [1 + a.tanh() / 2 if n % 3 == 1 else a for n, a in enumerate(given)]
        turns = [of_angles(library, form, angles[3 * n : 3 * n + 3]) for n in range(count)]
        return side_by_side(getattr(library, name)(*(t for turn in turns for t in turn)))

    return function


SMALL = 1 / 16
"""So e3nn's matrix exponentials square nothing, which they do more often in float64."""


def turning(irreps, form, library):
    """The matrices of irreps, of small Euler angles, which e3nn takes as they are."""
    given = getattr(library, "Irrep" if irreps.isalnum() else "Irreps")(irreps)
    form = form if library is OURS else "angles"
    function = getattr(given, f"D_from_{form}")
    return lambda *angles: function(*of_angles(library, form, [SMALL * a for a in angles]))


def mirrored(library):
    """Of matrices that invert, too: 1o changes its sign, 2e does not."""
    turned = library.Irreps("1o+2e")
    sign = torch.tensor([-1.0] * 3 + [1.0] * 5, dtype=DOUBLE)
    if library is THEIRS:
        return lambda *angles: turned.D_from_angles(*(SMALL * a for a in angles)) * sign
    matrix = library.angles_to_matrix
    return lambda *angles: turned.D_from_matrix(-matrix(*(SMALL * a for a in angles)))


def wigner(degree, library):
    return lambda *angles: library.wigner_D(degree, *(SMALL * a for a in angles))


def exponentials(irreps, *angles):
    """Of the absolute values of generators, Euler's Y-X-Y: S, the series of e3nn's matrices.

    A number of them errs by the size of its whole matrix, and the generators are products of three
    matrices themselves.
    """
    blocks = []
    for mul, ir in e3nn.o3.Irreps(irreps):
        with default_dtype(DOUBLE):
            about_x, about_y, _ = e3nn.o3.so3_generators(ir.l).abs()
        parts = zip((about_y, about_x, about_y), angles, strict=True)
        a, b, c = (torch.linalg.matrix_exp(SMALL * t[:, None, None] * J) for J, t in parts)
        blocks += mul * [a @ b @ c]
    found = torch.stack([torch.block_diag(*each) for each in zip(*blocks, strict=True)])
    return (found.shape[-1] ** 2 * found.sum((-2, -1), keepdim=True)).expand_as(found)


def of_rotation(build, count=1, irreps=None):
    magnitude = None if irreps is None else functools.partial(exponentials, irreps)
    return alike(build, *((ROWS,),) * (3 * count), magnitude=magnitude)


ROTATIONS = {
    f"{start}_to_{end}": of_rotation(functools.partial(rotation, f"{start}_to_{end}", start))
    for start in FORMS
    for end in FORMS
    if start != end
}
ROTATIONS |= {
    f"inverse_{form}": of_rotation(functools.partial(rotation, f"inverse_{form}", form))
    for form in ("angles", "quaternion")
}
ROTATIONS |= {
    f"compose_{form}": of_rotation(
        functools.partial(rotation, f"compose_{form}", form, count=2), count=2
    )
    for form in ("angles", "axis_angle", "quaternion")
}
ROTATIONS |= {
    f"matrix_{axis}": alike(lambda library, axis=axis: getattr(library, f"matrix_{axis}"), (ROWS,))
    for axis in "xyz"
}
ROTATIONS |= {
    "angles_to_xyz": alike(lambda library: library.angles_to_xyz, (ROWS,), (ROWS,)),
    "xyz_to_angles": alike(
        lambda library: lambda xyz: side_by_side(library.xyz_to_angles(xyz)), (ROWS, 3)
    ),
}
ROTATIONS |= {
    f"{kind}, D_from_{form}": of_rotation(functools.partial(turning, irreps, form), irreps=irreps)
    for kind, irreps in {"Irrep": "3o", "Irreps": "2x0e+1x1o+1x1e+1x4e"}.items()
    for form in FORMS
}
ROTATIONS |= {
    f"wigner_D, {degree}": of_rotation(functools.partial(wigner, degree), irreps=f"{degree}e")
    for degree in (0, 1, 2, 6)
}
ROTATIONS["Irreps, inverted"] = of_rotation(mirrored, irreps="1o+2e")


def harmonics(given, normalize, kind, library):
    irreps = given(library) if callable(given) else given
    return lambda x: library.spherical_harmonics(irreps, x, normalize, kind)


def module_of_harmonics(library, **options):
    return library.SphericalHarmonics("2x0e+1o+3o", True, "norm", irreps_in="1o", **options)


HARMONICS = {
    f"spherical_harmonics, {name}, {kind}, {'unit' if normalize else 'any length'}": alike(
        functools.partial(harmonics, given, normalize, kind), (ROWS, 3)
    )
    for name, given in {
        "to 6": list(range(7)),
        "to 11": [11, 10, 9, 8, 7],
        "one degree": 3,
        "irreps": lambda library: library.Irreps("2x1o+0e+2e"),
    }.items()
    for kind in ("component", "norm", "integral")
    for normalize in (True, False)
}
HARMONICS |= {
    "SphericalHarmonics": alike(module_of_harmonics),
    "SphericalHarmonics, of degrees": alike(
        lambda library: library.SphericalHarmonics([0, 2, 1], False), (ROWS, 3)
    ),
}


def radial(basis, cutoff, library):
    return lambda x: library.soft_one_hot_linspace(x, -1.5, 2.0, 5, basis, cutoff)


def bessel():
    """At positive radii."""
    basis = o3.BesselBasis(2.5, 6)
    return lambda x: basis(x.square().unsqueeze(-1) + 0.1)


RADIAL = {
    f"soft_one_hot_linspace, {basis}, {'cut off' if cutoff else 'not cut off'}": alike(
        functools.partial(radial, basis, cutoff), (60,)
    )
    for basis in ("gaussian", "cosine", "smooth_finite", "fourier", "bessel")
    for cutoff in (True, False)
}
RADIAL["BesselBasis"] = Twin(
    bessel, lambda: lambda x: e3nn.math.bessel(x.square() + 0.1, 6, 2.5), ((60,),)
)

IRREPS = "2x0e+1x1o+2x2e"
SINGLE = [(1, ir) for mul, ir in o3.Irreps(IRREPS) for _ in range(mul)]
INFO = o3.irreps_info(IRREPS)
FEATURES = (4, o3.Irreps(IRREPS).dim, 3)


def by_channel(layer):
    """A layer of rows of irreps, on (N, D, C)."""
    return lambda *inputs: layer(*(x.mT for x in inputs)).mT.contiguous()


def dot():
    return by_channel(e3nn.o3.ElementwiseTensorProduct(IRREPS, IRREPS, ["0e"]))


def gate():
    return by_channel(e3nn.o3.ElementwiseTensorProduct(IRREPS, f"{len(SINGLE)}x0e"))


def own_matrices(x, weight, scale=1.0):
    """e3nn's Linear with an item for each irrep; its factor is 1/√C, its rows are mul_ir."""
    dims = [ir.dim for _, ir in SINGLE]
    before, after = (
        e3nn.o3.Irreps([(count, str(ir)) for _, ir in SINGLE]) for count in weight.shape[1:]
    )
    paths = [(n, n) for n in range(len(SINGLE))]
    layer = e3nn.o3.Linear(before, after, instructions=paths, internal_weights=False)
    rows = torch.cat([block.mT.flatten(1) for block in x.split(dims, 1)], 1)
    found = layer.to(x.dtype)(rows, scale * weight.flatten())
    blocks = found.split([weight.shape[2] * dim for dim in dims], 1)
    parts = [block.unflatten(1, (-1, dim)).mT for block, dim in zip(blocks, dims, strict=True)]
    return torch.cat(parts, 1)


class OwnMatrices(torch.nn.Module):
    """e3nn's Linear with torchweft's shape of the weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(len(SINGLE), 3, 2))

    def forward(self, x):
        return own_matrices(x, self.weight)


ON_FEATURES = {
    "TensorDot": Twin(lambda: o3.TensorDot(IRREPS), dot, (FEATURES,) * 2),
    "Gating": Twin(lambda: o3.Gating(IRREPS), gate, (FEATURES, (4, len(SINGLE), 3))),
    "IrrepWiseLinear": Twin(lambda: o3.IrrepWiseLinear(IRREPS, 3, 2), OwnMatrices, (FEATURES,)),
    "tensor_dot_uu": Twin(
        lambda: lambda x, y: o3.tensor_dot_uu(x, y, INFO), dot, (FEATURES,) * 2
    ),
    "gating": Twin(
        lambda: lambda x, y: o3.gating(x, y, INFO), gate, (FEATURES, (4, len(SINGLE), 3))
    ),
    "irrep_wise_linear": Twin(
        lambda: lambda x, w: o3.irrep_wise_linear(x, w, INFO),
        lambda: functools.partial(own_matrices, scale=math.sqrt(3)),
        (FEATURES, (len(SINGLE), 3, 2)),
    ),
}  # fmt: skip


def along_edges(l1, l2, l3):
    """SO2Linear with the weights of a path with harmonics, see torchweft.o3.layers.so2."""
    parity = (-1) ** l2
    so2 = o3.SO2Linear([(2, (l1, 1))], [(3, (l3, parity))], internal_weights=False)
    table = math.sqrt(2 * l2 + 1) * o3.wigner_3j(l1, l2, l3, DOUBLE)

    def function(x, edge, w):
        parts = []
        for i in so2.instructions:
            to = l3 - i.order if i.turned else l3 + i.order
            parts.append(w * float(table[l1 + i.order, l2, to] / i.path_weight))
        return so2(x, edge, torch.cat(parts))

    return function


def with_harmonics(l1, l2, l3):
    """A path of uvw with harmonics of the edge, by √2l3+1 3j: e3nn's without its 1/√2."""
    parity = (-1) ** l2
    product = e3nn.o3.TensorProduct(
        [(2, (l1, 1))],
        [(1, (l2, parity))],
        [(3, (l3, parity))],
        [(0, 0, 0, "uvw", True)],
        irrep_normalization="none",
        path_normalization="none",
        internal_weights=False,
        shared_weights=True,
    )

    def function(x, edge, w):
        return product(x, e3nn.o3.spherical_harmonics(l2, edge, True, "component"), w)

    return function


EDGEWISE = {
    f"SO2Linear, {l1} by {l2} to {l3}": Twin(
        functools.partial(along_edges, l1, l2, l3),
        functools.partial(with_harmonics, l1, l2, l3),
        ((7, 2 * (2 * l1 + 1)), (7, 3), (6,)),
    )
    for l1, l2, l3 in ((0, 2, 2), (1, 1, 1), (1, 2, 3), (2, 2, 1), (3, 2, 3))
}
EDGEWISE["edge_rotation, the direction"] = Twin(
    lambda: lambda edge: o3.edge_rotation(edge)[:, 1].contiguous(),
    lambda: lambda edge: e3nn.o3.angles_to_xyz(*e3nn.o3.xyz_to_angles(edge)),
    ((7, 3),),
)
ELEMENT = torch.tensor([0, 2, 1, 2, 2, 0])


def contracted(options):
    """torchweft's layer, its parameters as inputs."""
    layer = o3.SymmetricContraction(*options)
    names = [name for name, _ in layer.named_parameters()]

    def function(x, *weights):
        given = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(layer.to(x.dtype), given, (x, ELEMENT))

    return function


def by_couplings(options, sign=lambda symbol: symbol):
    """MACE's definition with e3nn's symbols, or their absolute values."""
    layer = o3.SymmetricContraction(*options)

    def symbol(*given):
        *degrees, dtype = given
        return sign(e3nn.o3.wigner_3j(*degrees, dtype=dtype))

    return functools.partial(contraction, module=layer, element=ELEMENT, symbol=symbol)


def contraction_twin(*options):
    layer = o3.SymmetricContraction(*options)
    shapes = [(len(ELEMENT), layer.irreps_in.dim), *(tuple(p.shape) for p in layer.parameters())]
    return Twin(
        functools.partial(contracted, options),
        functools.partial(by_couplings, options),
        tuple(shapes),
        magnitude=by_couplings(options, torch.abs),
    )


CONTRACTIONS = {
    "SymmetricContraction, cubic": contraction_twin("2x0e+2x1o+2x2e", "2x0e+2x1o", 3, 3),
    "SymmetricContraction, quadratic": contraction_twin("2x0e+2x1e+2x1o", "2x0e+2x1e", 2, 3),
}
FUNCTIONS = ROTATIONS | HARMONICS | RADIAL | ON_FEATURES | EDGEWISE | CONTRACTIONS


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    check_values(case(name, FUNCTIONS[name]), SETTING)


def drawn(name, library):
    torch.manual_seed(0)
    found = getattr(library, name)(4, dtype=DOUBLE)
    parts = found if isinstance(found, tuple) else (found,)
    return torch.cat([part.reshape(4, -1) for part in parts], -1)


def zeros(name, library):
    found = getattr(library, name)(4, dtype=DOUBLE)
    return torch.stack(found) if isinstance(found, tuple) else found


def segments(library):
    """Where the components of every irrep begin."""
    if library is OURS:
        return library.irreps_info(IRREPS).irrep_seg
    dims = [ir.dim for mul, ir in library.Irreps(IRREPS) for _ in range(mul)]
    return torch.tensor([0, *dims]).cumsum(0)


CONSTANTS = {f"rand_{form}": functools.partial(drawn, f"rand_{form}") for form in FORMS}
CONSTANTS |= {
    f"identity_{form}": functools.partial(zeros, f"identity_{form}")
    for form in ("angles", "quaternion")
}
CONSTANTS |= {
    f"wigner_3j, {degrees}": lambda library, degrees=degrees: library.wigner_3j(
        *degrees, dtype=DOUBLE
    )
    for degrees in ((0, 0, 0), (1, 1, 1), (2, 3, 4), (6, 6, 6), (8, 11, 5))
}
CONSTANTS |= {
    "so3_generators": lambda library: library.so3_generators(4),
    "su2_generators": lambda library: torch.view_as_real(library.su2_generators(2.5)),
    "change_basis_real_to_complex": lambda library: torch.view_as_real(
        library.change_basis_real_to_complex(5)
    ),
    "irreps_info": segments,
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTANTS)
def test_constant(name):
    """Numbers of size 1, of a few operations."""
    with default_dtype(DOUBLE):
        found, expected = (CONSTANTS[name](library).double() for library in (OURS, THEIRS))
    size = expected.abs().max().clamp(min=1)
    if name == "rand_axis_angle":  # an arc cosine of a trace, in e3nn
        size = size / expected[:, 3].sin().min()
    size = size.expand_as(expected)
    assert_within_bound(found, expected, size, terms=9, stored=9)


UNLIKE = {
    "Graph": "edges sorted once: e3nn takes src and dst; test_o3_graph",
    "Instruction": "what instructions hold, see test_o3_names",
    "IrrepsInfo": "what irreps_info gives",
    "LayerNorm": "e3nn has none; test_o3_norms",
    "NeighbourList": "e3nn takes edges; test_o3_neighbours",
    "PolynomialCutoff": "e3nn has none; test_o3_radial",
    "RadialBasis": "e3nn has none; test_o3_radial",
    "calculator": "of whole potentials; test_o3_calculator",
    "check": "of converted models; tests/clients/test_check",
    "from_allegro": "of models of Allegro; tests/clients/test_allegro",
    "from_mace": "of models of MACE; test_o3_loaders",
    "from_nequip": "of models of NequIP; test_o3_loaders",
    "from_sevennet": "of models of SevenNet; tests/clients/test_sevennet",
    "neighbour_list": "e3nn takes edges; test_o3_neighbours",
    "to_e3nn": "states of converted models; test_o3_states",
}
"""Public names that e3nn has nothing for."""


def test_every_public_name_is_compared():
    compared = {name.partition(",")[0] for name in (*LAYERS, *NAMES, *FUNCTIONS, *CONSTANTS)}
    assert not compared & set(UNLIKE)
    assert compared | set(UNLIKE) == set(o3.__all__)
