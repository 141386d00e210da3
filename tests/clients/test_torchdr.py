"""TorchDR on the stand-in for pykeops: affinities as lazy tensors beside its dense ones.

Seen red with: a lazy tensor without a truth, which its checks of inputs ask for.
"""

import pytest
import torch

from tests.clients.stand_ins import import_over

torchdr = import_over("pykeops", "torchdr")
from torchdr.distance import pairwise_distances

from tests.clients.agreement import assert_agree

pytestmark = pytest.mark.filterwarnings("ignore")

AFFINITIES = {
    "NormalizedGaussianAffinity": {},
    "NormalizedStudentAffinity": {},
    "SinkhornAffinity": {"max_iter": 20},
    # its other optimisers write to variables that a lazy matrix still reads
    "SymmetricEntropicAffinity": {"perplexity": 10, "max_iter": 5, "optimizer": "LBFGS"},
}


def points(dtype):
    return torch.randn(50, 4, generator=torch.Generator().manual_seed(0), dtype=dtype)


def marginals(affinity):
    """Sums over rows and over columns, of lazy and of dense matrices."""
    return {str(dim): affinity.sum(dim).detach().reshape(-1).double() for dim in (0, 1)}


@pytest.mark.parametrize("name", AFFINITIES)
def test_affinities(name):
    found, exact, rounded = (
        marginals(
            getattr(torchdr, name)(backend=backend, verbose=False, **AFFINITIES[name])(
                points(dtype)
            )
        )
        for backend, dtype in (
            ("keops", torch.float64),
            (None, torch.float64),
            (None, torch.float32),
        )
    )
    assert_agree(found, exact, rounded, multiple=64)


@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean", "manhattan", "angular"])
def test_nearest_neighbours(metric):
    x = points(torch.float64)
    given = {"metric": metric, "k": 5, "exclude_diag": True, "return_indices": True}
    (found, rows), (exact, expected) = (
        pairwise_distances(x, backend=backend, **given) for backend in ("keops", None)
    )
    assert rows.tolist() == expected.tolist()
    rounded, _ = pairwise_distances(x.float(), backend=None, **given)
    assert_agree({"": found}, {"": exact}, {"": rounded.double()})
