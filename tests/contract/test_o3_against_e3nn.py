"""torchweft.o3 against e3nn 0.6 in float64: values, two orders of gradients by all inputs and
weights.

Errors are at most twice those of e3nn's float32, by the ratio of the round-offs.

e3nn's NormActivation cannot be built without `normalize`: that stays with test_o3_norms.

Seen red with a factor or a sign in each layer: of norms and variances, a scalar's, a weight's,
pairs of copies, the sizes in squares, path weights in lists that follow from irreps, copies and
features in Linear, biases, activations unscaled or of another seed, gates, roots, running means the
other way round, the largest for the mean, dropped copies, source for target, radial weights, path
weights and biases that loaders take over, scalars that are mixed.
"""

import functools

import e3nn.o3
import pytest
import torch

from tests.conftest import BACKENDS, INTERPRETED
from tests.covering import FULL
from tests.e3nns import THEIRS, Forced, Twin, alike, case
from torchweft import o3
from torchweft.testing.contract import Setting, check_values

pytestmark = pytest.mark.kernels

SETTING = Setting(dtype=torch.float64)
SILU, TANH, SIGMOID = torch.nn.functional.silu, torch.tanh, torch.sigmoid


def tensor_product(copies, mode, library, weighted=True, **options):
    """Six paths of one mode into five items, two of them into one."""
    first, second, out = copies
    items = [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 3), (1, 0, 3), (1, 1, 4)]
    weights = [1, 0.5, 1, 2, 1, 3]
    return library.TensorProduct(
        f"{first}x1o+{first}x0e",
        f"{second}x1o+{second}x2e",
        f"{out}x0e+{out}x1e+{out}x2e+{out}x1o+{out}x2e",
        [(*item, mode, weighted, w) for item, w in zip(items, weights, strict=True)],
        **options,
    )


def mixed_list(library, **options):
    """Every mode in one list, some without weights, some into one item."""
    return library.TensorProduct(
        "2x0e+2x1o",
        "2x0e+2x1o",
        "2x0e+2x1o+4x0e+1x1e",
        [
            (0, 0, 0, "uuu", True),
            (1, 1, 0, "uvu", True, 0.5),
            (0, 1, 1, "uvv", False),
            (1, 0, 1, "uvw", True),
            (0, 0, 2, "uvuv", True),
            (1, 1, 2, "u<vw", True),
            (0, 0, 2, "uuw", True, 2),
            (1, 1, 3, "uvu<v", False),
        ],
        **options,
    )


def several_copies(library, **options):
    """Scalars on each place."""
    return library.FullyConnectedTensorProduct(
        "2x0e+3x1o", "3x0e+2x1o", "2x0e+2x1o+2x2e", **options
    )


COPIES = {
    "uvw": (3, 2, 4),
    "uvu": (3, 2, 3),
    "uvv": (3, 2, 2),
    "uuw": (3, 3, 4),
    "uuu": (3, 3, 3),
    "uvuv": (3, 2, 6),
    "uvu<v": (4, 4, 6),
    "u<vw": (4, 4, 5),
}
PRODUCTS = {
    f"TensorProduct, {mode}, {'shared' if shared else 'own'}": alike(
        functools.partial(
            tensor_product, copies, mode, internal_weights=False, shared_weights=shared
        )
    )
    for mode, copies in COPIES.items()
    for shared in (True, False)
}
PRODUCTS |= {
    f"TensorProduct, {mode}, without weights": alike(
        functools.partial(tensor_product, COPIES[mode], mode, weighted=False)
    )
    for mode in ("uvu", "uvv", "uuu", "uvuv", "uvu<v")
}
PRODUCTS |= {
    f"TensorProduct, a list, {irreps}, {paths}": alike(
        functools.partial(mixed_list, irrep_normalization=irreps, path_normalization=paths)
    )
    for irreps in ("component", "norm", "none")
    for paths in ("element", "path", "none")
}
PRODUCTS |= {
    "TensorProduct, a list, variances": alike(
        functools.partial(
            mixed_list, in1_var=[2, 0.5], in2_var=[1, 3], out_var=[1, 2, 0.5, 4]
        )
    ),
    "TensorProduct, a list, own": alike(functools.partial(mixed_list, shared_weights=False)),
    "TensorProduct, two dimensions of rows": alike(mixed_list, (2, 1, 8), (3, 8)),
    "TensorProduct, right": Twin(
        lambda: tensor_product(COPIES["uvw"], "uvw", o3, shared_weights=False).right,
        lambda: tensor_product(
            COPIES["uvw"], "uvw", e3nn.o3, shared_weights=False, compile_right=True
        ).right,
        ((5, 16), (5, 144)),
    ),
    "FullyConnectedTensorProduct": alike(
        lambda library: library.FullyConnectedTensorProduct(
            "2x0e+1x1o+2x2e+1x0o", "1x0e+2x1o+1x1e", "3x0e+2x1o+1x3o+2x2e"
        )
    ),
    "FullyConnectedTensorProduct, several copies": alike(several_copies),
    "FullyConnectedTensorProduct, several copies, own": alike(
        functools.partial(several_copies, shared_weights=False)
    ),
    "FullyConnectedTensorProduct, own, by norm": alike(
        lambda library: library.FullyConnectedTensorProduct(
            "2x0e+1x1o", "1x0e+2x1o", "3x0e+2x1e+1x1o", "norm", "path", shared_weights=False
        )
    ),
    "ElementwiseTensorProduct": alike(
        lambda library: library.ElementwiseTensorProduct("3x1o+2x2e", "1x0e+4x1e")
    ),
    "ElementwiseTensorProduct, chosen, by norm": alike(
        lambda library: library.ElementwiseTensorProduct(
            "3x1o+2x2e", "5x1o", ["0e", "1o", "3o"], "norm"
        )
    ),
    "FullTensorProduct": alike(
        lambda library: library.FullTensorProduct("2x1o+1x3e+1x0e", "2x1e+1x0o+1x1o")
    ),
    "FullTensorProduct, chosen, by norm": alike(
        lambda library: library.FullTensorProduct(
            "2x1o+1x2e", "2x1o+1x0e", ["0e", "1e", "2e"], "norm"
        )
    ),
    "TensorSquare": alike(lambda library: library.TensorSquare("3x0e+2x1o+1x2e")),
    "TensorSquare, by norm": alike(
        lambda library: library.TensorSquare("3x0e+2x1o", irrep_normalization="norm")
    ),
    "TensorSquare, chosen": alike(
        lambda library: library.TensorSquare("3x0e+2x1o", filter_ir_out=["0e", "2e"])
    ),
    "TensorSquare, mixed": alike(
        lambda library: library.TensorSquare("3x0e+2x1o", "2x0e+1x1o+2x2e")
    ),
}  # fmt: skip


def linear(irreps, out, library, **options):
    return library.Linear(irreps, out, **options)


SOME = ("2x0e+3x1o+1x1o+2x2e", "3x0e+2x1o+1x2e+1x0o")
LINEAR = {
    "Linear": alike(functools.partial(linear, *SOME)),
    "Linear, own": alike(functools.partial(linear, *SOME, shared_weights=False)),
    "Linear, all biases": alike(functools.partial(linear, *SOME, biases=True)),
    "Linear, one bias": alike(
        functools.partial(linear, "2x0e+1x1o", "2x0e+1x0e+1x1o", biases=[False, True, False])
    ),
    "Linear, chosen, by path": alike(
        functools.partial(
            linear, *SOME, instructions=[(1, 1), (2, 1), (0, 0)], path_normalization="path"
        )
    ),
    "Linear, features": alike(functools.partial(linear, *SOME, f_in=3, f_out=2), lead=(5, 3)),
}


class Tracked(torch.nn.Module):
    """A BatchNorm's result, and the statistics that it then has."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.irreps = norm, norm.irreps

    def forward(self, x):
        if self.training:
            self.norm.running_mean.zero_()
            self.norm.running_var.fill_(1)
        else:
            self.norm.running_mean.copy_(torch.arange(1.0, 1 + len(self.norm.running_mean)))
            self.norm.running_var.copy_(torch.arange(1.0, 1 + len(self.norm.running_var)))
        z = self.norm(x)
        statistics = self.norm.running_mean.clone(), self.norm.running_var.clone()
        return torch.cat([z.flatten(), *statistics])


class Seeded(torch.nn.Module):
    """A layer whose random numbers are the same in each call."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.irreps = layer, layer.irreps

    def forward(self, x):
        torch.manual_seed(0)
        return self.layer(x)


ITEMS = "3x0e+2x0o+2x1o+1x2e+1x0e"


def norm_activation(f, library, **options):
    return library.NormActivation(library.Irreps(ITEMS), f, **options)


def batch_norm(library, **options):
    return library.BatchNorm(ITEMS, **options)


def tracked(training, library, **options):
    return Tracked(library.BatchNorm(ITEMS, **options)).train(training)


BATCH_NORMS = {
    "training": functools.partial(tracked, True),
    "training, by norm": functools.partial(tracked, True, normalization="norm", momentum=0.3),
    "training, largest": functools.partial(tracked, True, reduce="max", eps=0.1),
    "training, not affine": functools.partial(tracked, True, affine=False),
    "training, without bias": functools.partial(tracked, True, include_bias=False),
    "evaluating": functools.partial(tracked, False),
    "evaluating, not affine": functools.partial(tracked, False, affine=False),
    "instance": functools.partial(batch_norm, instance=True),
    "instance, largest": functools.partial(batch_norm, instance=True, reduce="max"),
}
NONLINEAR = {
    "Activation": alike(
        lambda library: library.Activation(ITEMS, [SILU, TANH, None, None, SIGMOID])
    ),
    "Activation, even of odd": alike(
        lambda library: library.Activation("3x0o+2x0e", [torch.cos, None])
    ),
    "Gate": alike(
        lambda library: library.Gate(
            "3x0e+2x0o", [SILU, TANH], "2x0e+1x0o+2x0e", [SIGMOID, TANH, None], "2x1o+2x2e+1x1e"
        )
    ),
    "Gate, scalars alone": alike(lambda library: library.Gate("3x0e", [SILU], "", [], "")),
    "Norm": alike(lambda library: library.Norm(ITEMS)),
    "Norm, squared": alike(lambda library: library.Norm(ITEMS, squared=True)),
    "NormActivation": alike(functools.partial(norm_activation, SIGMOID)),
    "NormActivation, bias": alike(functools.partial(norm_activation, TANH, bias=True)),
    "NormActivation, a large epsilon": alike(functools.partial(norm_activation, TANH, epsilon=1.5)),
    "Identity": alike(lambda library: library.Identity(ITEMS, ITEMS)),
    "Dropout": alike(lambda library: Seeded(library.Dropout(ITEMS, 0.4)), lead=(6, 2)),
    "Dropout, evaluating": alike(lambda library: library.Dropout(ITEMS, 0.4).eval()),
} | {
    f"BatchNorm, {name}": alike(build, lead=(6, 3)) for name, build in BATCH_NORMS.items()
}  # fmt: skip


NODES, EDGES = 4, 9
SRC = torch.tensor([0, 3, 3, 1, 0, 2, 2, 2, 3])
DST = torch.tensor([2, 0, 2, 2, 2, 3, 0, 3, 3])  # node 1 has none
UVU = [(0, 0, 0, "uvu", True), (1, 1, 0, "uvu", True), (1, 0, 1, "uvu", True),
       (0, 1, 1, "uvu", True), (1, 1, 2, "uvu", False)]  # fmt: skip
UVW = [(*path, "uvw", True) for *path, _, _ in UVU]
OPERANDS = ("3x0e+3x1o", "1x0e+1x1o", "3x0e+3x1o+3x2e")


def convolution(instructions, library, **options):
    return library.TensorProductConv(*OPERANDS, instructions, **options)


def convolved(instructions, shared, library=o3):
    """torchweft's convolution."""
    conv = convolution(instructions, library, shared_weights=shared, internal_weights=False)
    return lambda x, y, w: conv(x, y, w, SRC, DST, NODES)


def convolved_radially():
    conv = convolution(UVU, o3)
    return lambda x, y, h, a: conv(
        x, y, None, SRC, DST, NODES, radial=h, radial_weight=a
    )  # fmt: skip


def summed(instructions, shared):
    """e3nn's product of gathered rows, added where they belong."""
    product = e3nn.o3.TensorProduct(
        *OPERANDS, instructions, shared_weights=shared, internal_weights=False
    )

    def function(x, y, w):
        messages = product(x[SRC], y, w)
        return messages.new_zeros(NODES, messages.shape[1]).index_add(0, DST, messages)

    return function


def summed_radially():
    function = summed(UVU, False)
    return lambda x, y, h, a: function(x, y, h @ a)


def conv_twin(instructions, shared, weights, library=o3):
    lead = () if shared else (EDGES,)
    return Twin(
        functools.partial(convolved, instructions, shared, library),
        functools.partial(summed, instructions, shared),
        ((NODES, 12), (EDGES, 4), (*lead, weights)),
    )


CONVOLUTIONS = {
    "TensorProductConv, uvu, own": conv_twin(UVU, False, 12),
    "TensorProductConv, uvu, shared": conv_twin(UVU, True, 12),
    "TensorProductConv, uvw, own": conv_twin(UVW, False, 45),
    "TensorProductConv, uvw, shared": conv_twin(UVW, True, 45),
    "TensorProductConv, radial": Twin(
        convolved_radially, summed_radially, ((NODES, 12), (EDGES, 4), (EDGES, 5), (5, 12))
    ),
}


def loaded(build, *shapes):
    """torchweft's layer made of e3nn's, beside e3nn's."""
    ours = lambda: o3.from_e3nn(build(THEIRS))  # noqa: E731
    return Twin(ours, functools.partial(build, THEIRS), shapes or None)


LOADED = {
    "product": functools.partial(mixed_list, path_normalization="path"),
    "own weights": functools.partial(mixed_list, shared_weights=False),
    "fully connected": lambda library: library.FullyConnectedTensorProduct(*SOME, "2x1o+1x2e"),
    "linear": functools.partial(linear, *SOME, biases=True),
    "activation": lambda library: library.Activation("2x0e+1x1o", [SILU, None]),
    "gate": lambda library: library.Gate("2x0e", [SILU], "3x0e", [SIGMOID], "2x1o+1x2e"),
    "norm": lambda library: library.Norm(ITEMS),
    "norm activation": functools.partial(norm_activation, SILU, bias=True),
    "batch norm": batch_norm,
}


def model(library):
    return torch.nn.Sequential(library.Linear("2x0e+1x1o", "3x0e+2x1o"), library.Norm("3x0e+2x1o"))


LAYERS = PRODUCTS | LINEAR | NONLINEAR | CONVOLUTIONS
LAYERS |= {f"from_e3nn, {name}": loaded(build) for name, build in LOADED.items()}
LAYERS["from_e3nn, a model"] = loaded(model, (5, 5))


@pytest.mark.skipif(INTERPRETED, reason="what is no kernel is the same natively")
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name):
    check_values(case(name, LAYERS[name]), SETTING)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends(backend):
    """Few rows go by operators of torch; these do not."""
    twin = conv_twin(UVU[1:3], False, 6, Forced(backend))
    order = SETTING.order if FULL or backend != "numba" else 1  # loops compile for seconds
    check_values(case("convolution", twin), SETTING._replace(order=order))
