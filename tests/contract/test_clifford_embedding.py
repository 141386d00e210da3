"""Points, planes, motions, vectors and numbers in multivectors: GATr's and L-GATr's conventions.

Numbers of blades were printed by the originals.
"""

import math

import pytest
import torch

from torchweft import clifford
from torchweft.clifford import PGA, SPACETIME
from torchweft.errors import ShapeError

P = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
N = torch.tensor([[0.0, 0.0, 2.0]], dtype=torch.float64)
Q = torch.tensor([[0.0, 0.0, 0.6, 0.8]], dtype=torch.float64)

# what is embedded, what comes back, and the blades that are not zero
CASES = {
    "point": ((P,), P, {11: -3, 12: 2, 13: -1, 14: 1}),
    "plane": ((N, P), N, {1: -6, 4: 2}),
    "reflection": ((N, P), N, {1: -6, 4: 2}),
    "rotation": ((Q,), Q, {0: 0.8, 8: -0.6}),
    "translation": ((P,), P, {0: 1, 5: -0.5, 6: -1, 7: -1.5}),
    "vector": (
        (torch.cat([P, P[:, :1]], 1),),
        torch.cat([P, P[:, :1]], 1),
        {1: 1, 2: 2, 3: 3, 4: 1},
    ),
    "scalar": ((P[:, :1],), P[:, :1], {0: 1}),
    "pseudoscalar": ((P[:, :1],), P[:, :1], {15: 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_blades_and_back(name):
    given, back, numbers = CASES[name]
    algebra = [SPACETIME] if name in ("vector", "scalar", "pseudoscalar") else []
    embed, extract = (getattr(clifford, f"{way}_{name}") for way in ("embed", "extract"))
    expected = torch.zeros(16, 1, dtype=torch.float64)
    for blade, value in numbers.items():
        expected[blade] = value
    found = embed(*given, *algebra)
    assert found.tolist() == expected.tolist()
    last = embed(*given, *algebra, blade_dim=-1)
    assert last.tolist() == expected.T.tolist()
    assert extract(found, *algebra).tolist() == back.tolist()
    assert extract(last, *algebra, blade_dim=-1).tolist() == back.tolist()


def test_motions_move_points():
    point = clifford.embed_point(P)
    mirror = clifford.embed_reflection(N / 2, torch.zeros_like(P))
    half = math.sqrt(0.5)
    quarter = clifford.embed_rotation(torch.tensor([[0.0, 0.0, half, half]], dtype=torch.float64))
    for motion, expected in (
        (clifford.embed_translation(10 * P), [11, 22, 33]),
        (quarter, [-2, 1, 3]),  # about z
        (mirror, [1, 2, -3]),
    ):
        moved = clifford.extract_point(clifford.sandwich(motion, point, PGA))
        torch.testing.assert_close(moved, torch.tensor([expected], dtype=torch.float64))


def test_points_lie_in_their_planes():
    plane, point = clifford.embed_plane(N, P), clifford.embed_point(P)
    assert not clifford.wedge(plane, point, PGA).any()


def test_points_at_infinity_stay_finite():
    point = torch.zeros(16, 1, dtype=torch.float64)
    point[13] = -1
    assert clifford.extract_point(point).tolist() == [[1e3, 0, 0]]


def test_components_of_another_number_are_refused():
    with pytest.raises(ShapeError, match=r"coordinates is \(3,\): it must be \(batch…, F, 3\)"):
        clifford.embed_point(torch.ones(3))
    with pytest.raises(ShapeError, match=r"vectors is \(2, 3\): it must be \(batch…, F, 4\)"):
        clifford.embed_vector(torch.ones(2, 3), SPACETIME)
