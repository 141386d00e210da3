"""The stand-in for MinkowskiEngine against its rules with dictionaries, in float64.

Seen red with: offsets whose last axis is fastest, an even kernel that is centred, a transposed
layer onto all voxels that it reaches though the level is known, a pool of window = stride centred.
"""

import pytest
import torch

from tests import minkowskis
from tests.clients.agreement import assert_agree
from tests.minkowski_reference import package
from torchweft.compat import MinkowskiEngine as ME  # noqa: N817 - its users' own habit

REFERENCE = package()


def agree(build, multiple=16, **options):
    """A network of both modules: the same places, strides, outputs and gradients."""
    found = minkowskis.Run(ME, build, **options)
    exact = minkowskis.Run(REFERENCE, build, found.network, **options)
    rounded = minkowskis.Run(REFERENCE, build, found.network, torch.float32, **options)
    assert found.places == exact.places
    assert found.strides == exact.strides
    if rounded.places != exact.places:  # a score near its threshold, rounded
        rounded = exact
    assert_agree(found.found, exact.found, rounded.found, multiple=multiple)
    return found


NETWORKS = [minkowskis.resnet, minkowskis.unet, minkowskis.completion, minkowskis.detector]


@pytest.mark.parametrize("build", NETWORKS, ids=lambda b: b.__name__)
def test_networks(build):
    agree(build)
