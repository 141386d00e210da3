"""CEGNN's published networks and steerable layers with its checkpoints: its own numbers come out.

The expected numbers were printed by the originals, in float64 and with the same parameters.
"""

import pytest
import torch

from tests.integration.test_clifford_checkpoints import filled, same, waves
from torchweft.clifford import (
    O3CGMLP,
    O5CGMLP,
    SPACETIME,
    Algebra,
    ConvexHullCGMLP,
    FullyConnectedSteerableGeometricProduct,
    LorentzCGGNN,
    MultivectorModule,
    SteerableGeometricProduct,
    from_cegnn,
    message_plan,
)
from torchweft.errors import ShapeError

PLANE = Algebra((1, -1))


def as_saved(module):
    """A checkpoint of the original, which saves an algebra's tables with each of its modules."""
    owners, shapes = dict(module.named_modules()), {}
    for name, parameter in module.named_parameters():
        owner, _, leaf = name.rpartition(".")
        kind, shape = type(owners[owner]).__name__, tuple(parameter.shape)
        if isinstance(owners[owner], MultivectorModule) and (leaf, len(shape)) != ("weight", 2):
            shape = shape[::-1]  # features first
        if kind in ("MVSiLU", "MVLayerNorm"):
            shape = (1, *shape)
        elif kind == "MultivectorLinear":
            is_first = owner in ("embedding_x", "gp.0", "net.0")  # one weight for all grades
            shape = (1, *shape, 1) if leaf == "bias" else shape[: 2 if is_first else 3]
        shapes[name] = shape
    state = filled(shapes)
    for owner, part in owners.items():
        if isinstance(part, MultivectorModule):
            state[f"{owner}.algebra.cayley".lstrip(".")] = torch.zeros(())
    return state | {k: v for k, v in module.named_buffers() if "running" in k or "num" in k}


def loaded(module, algebra):
    module = module.double().eval()
    module.load_state_dict(from_cegnn(as_saved(module), algebra, configuration={}))
    return module


def numbers(text):
    return [float(v) for v in text.split()]


def points(*shape):
    """In no plane."""
    count = torch.Size(shape).numel()
    return 4 * torch.arange(count, dtype=torch.float64).square().cos().reshape(shape)


LAYERS = {
    (True, True, 0.0): (
        "1.479714 -.009768 -.267128 .527169 .824328 .178487 -.423687 -.078877 -.130726 "
        ".213394 -.482465 -.466744"
    ),
    (True, True, None): (
        "1.411026 -.009153 -.247119 .593895 .820785 .138927 -.475947 .027842 -.064929 .180491 "
        "-.545127 -.446368"
    ),
    (True, False, None): (
        ".813101 .037573 .028370 .578509 .149712 .278660 -.094841 .096135 -.690911 .189859 "
        "-.105777 -.500047"
    ),
    (False, True, None): "1.165595 -.022060 -.197857 .395539 1.003111 .065390 -.414960 .311383",
    (False, False, 0.0): ".427876 -.046505 .024054 .162003 .473575 .130623 -.029616 .385866",
}
"""Whether fully connected, whether with the first order, and what the normalisation starts at."""


@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_steerable_layers(options):
    """Red before: there was no fully connected layer, and the others had no such options."""
    full, *given = options
    build = FullyConnectedSteerableGeometricProduct if full else SteerableGeometricProduct
    layer = loaded(build(2, *([3] if full else []), PLANE, *given), PLANE)
    same(layer(waves(1, 2, 4).movedim(-1, 0)).movedim(0, -1), numbers(LAYERS[options]))


NETWORKS = {
    "O3": (lambda: O3CGMLP(3, 4, num_layers=3), (2, 3, 3), Algebra.cl(3), ".076655 -.000499"),
    "O5": (O5CGMLP, (2, 2, 5), Algebra.cl(5), "44.834563 44.809944"),
    "hulls": (lambda: ConvexHullCGMLP(6, 4), (2, 6, 5), Algebra.cl(5), ".799535 .756393"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_points(name):
    build, shape, algebra, expected = NETWORKS[name]
    same(loaded(build(), algebra)(points(*shape)), numbers(expected))


TAGGED = "4.363727 .566338 4.403488 .610434"


def test_top_tagging():
    ".810330 .816832Two events of three particles, the last of which is missing in the second."
    network = loaded(LorentzCGGNN(hidden_features_h=4, hidden_features_x=2, n_layers=2), SPACETIME)
    pairs = [(i, j) for i in range(6) for j in range(6) if i // 3 == j // 3 and i != j]
    to, source = torch.tensor([pair for pair in pairs if 5 not in pair]).unbind(1)
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0]], dtype=torch.float64)
    plan = message_plan(source, to, 6)
    same(network(waves(2, 3, 4), waves(2, 3, 2, phase=0.5), plan, mask), numbers(TAGGED))


def test_points_of_another_dimension_are_refused():
    with pytest.raises(ShapeError, match=r"points is \(2, 3, 5\): it must be \(rows, F, 3\)"):
        O3CGMLP()(torch.ones(2, 3, 5))
