"""o3.check of real NequIP and SevenNet: energies, forces and stress under their names."""

import pytest
import torch

pytest.importorskip("nequip")
pytest.importorskip("sevenn")

from sevenn import _keys as KEY  # noqa: N812

from tests.clients import test_nequip as nequip
from tests.clients import test_sevennet as sevennet
from tests.clients.agreement import default_dtype
from torchweft import o3

pytestmark = pytest.mark.filterwarnings("ignore")


def judged(report, turned):
    """Errors of ours are at most some times the original's where it is float32, else rounding."""
    assert [c.name for c in report.comparisons] == ["energy", "forces", "stress"]
    for c in report.comparisons:
        assert c.error_torchweft <= 16 * c.error_original or c.relative < 1e3 * EPS, c
    assert any(turned in module.torchweft for module in report.turned)


EPS = torch.finfo(torch.float64).eps


def test_nequip_in_float32():
    with default_dtype(torch.float64):
        nequip.set_global_state(allow_tf32=False)
        report = o3.check(nequip.original("float32"), nequip.batch())
    assert all(c.error_original > 0 for c in report.comparisons)
    judged(report, "torchweft.")


def test_sevennet_in_float64():
    given = sevennet.data(torch.float64)
    given[KEY.EDGE_VEC].requires_grad_()
    judged(o3.check(sevennet.original(), given), "torchweft.")
