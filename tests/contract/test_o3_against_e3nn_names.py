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

SETTING = Setting(dtype=torch.float64)
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
NAMES = NETWORKS | EXTRACTS | STEPS | REDUCED


@pytest.mark.parametrize("name", NAMES)
def test_name(name):
    check_values(case(name, NAMES[name]), SETTING)
