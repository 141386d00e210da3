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
NAMES = NETWORKS


@pytest.mark.parametrize("name", NAMES)
def test_name(name):
    check_values(case(name, NAMES[name]), SETTING)
