"""clifford: an equivariant network learns from simulations where charged bodies go."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from torchweft.demo import Options, page
from torchweft.demo.measure import interleaved
from torchweft.demo.models import forecaster
from torchweft.demo.models.forecaster import (
    AFTER,
    BEFORE,
    Data,
    DenseForecaster,
    Forecaster,
    Systems,
    complete_graphs,
    fit,
    predicted,
    rmse,
    simulated,
    step_of,
    turned,
)
from torchweft.demo.pictures import ACCENT, GREY, curve, forecasts

__all__ = ["chapter"]

OURS, STILL, STRAIGHT = "learned", "staying where it is", "straight on"
FEATURES, LAYERS = 16, 2
ROUNDS = 3
SHOWN = 4  # systems
FEW = 10  # systems: in float64, too few to compile loops for

_FORMULA = (
    "<i>h<sub>i</sub></i> ← <i>h<sub>i</sub></i> + ψ(<i>h<sub>i</sub></i>, mean<sub><i>j</i></sub> "
    "φ(<i>h<sub>i</sub></i> − <i>h<sub>j</sub></i>, <i>q<sub>i</sub>q<sub>j</sub></i>)) &emsp; "
    "φ, ψ: &ensp; <i>x</i> ← (<i>L x</i> + <i>x</i> ∗<sub><i>w</i></sub> <i>R x</i>) / √2"
)


def chapter(options: Options) -> page.Chapter:
    """Learn from some systems, predict others, and turn these to see that nothing changes."""
    data = simulated(options.seed, options.device)
    torch.manual_seed(options.seed)
    model = Forecaster(FEATURES, LAYERS).to(options.device)
    losses = fit(model, data.train, options.seed)
    views = {
        STILL: data.test.position,
        STRAIGHT: data.test.position + _reach(data.train) * data.test.velocity,
        OURS: predicted(model, data.test),
    }
    errors = {name: rmse(positions, data.test) for name, positions in views.items()}
    dense = DenseForecaster(model)
    size = forecaster.BATCH
    times = _times(model, dense, data)
    asymmetry = _asymmetry(model, data.test)
    blocks = (
        *_story(errors, times, asymmetry, len(data.train.charge)),
        page.figure(_picture(data, views), _picture_caption(errors)),
        _errors_table(errors),
        page.figure(
            curve(losses, {name: errors[name] for name in (STILL, STRAIGHT)}, "RMSE"),
            f"Learning: RMSE of each of {len(losses)} steps, {size} systems a step, and over "
            "21 steps together. Dashed: without learning, on the held-out systems.",
        ),
        _exactness_table(model, dense, data.test.of(torch.arange(FEW, device=options.device))),
        _times_table(times),
    )
    return page.Chapter("torchweft.clifford", "A network that knows no direction", blocks)


def _reach(systems: Systems) -> float:
    """How far bodies go along their velocity, by least squares: the best that needs no network."""
    change = systems.target - systems.position
    return float((change * systems.velocity).sum() / systems.velocity.square().sum())


def _asymmetry(model: Forecaster, systems: Systems) -> float:
    """‖f(turned) − turned f‖ / ‖f − x‖, the largest of a body."""
    moved, move = turned(systems, seed=0)
    plain = predicted(model, systems)
    error = (predicted(model, moved) - move(plain)).norm(dim=-1).max()
    return float(error / (plain - systems.position).norm(dim=-1).max())


def _times(model: Forecaster, dense: DenseForecaster, data: Data) -> dict[str, dict[str, float]]:
    """Milliseconds of torchweft and of plain torch, turn by turn."""
    device = data.train.charge.device
    batch = data.train.of(torch.arange(forecaster.BATCH, device=device))
    plan = complete_graphs(*batch.charge.shape).to(device)
    models = {"torchweft": model, "torch": dense}
    steps = {name: step_of(m, batch, plan) for name, m in models.items()}
    passes = {name: partial(predicted, m, data.test) for name, m in models.items()}
    return {
        f"one step of learning, {len(batch.charge)} systems": interleaved(steps, device, ROUNDS),
        f"{len(data.test.charge)} systems predicted": interleaved(passes, device, ROUNDS),
    }


def _story(
    errors: Mapping[str, float],
    times: Mapping[str, Mapping[str, float]],
    asymmetry: float,
    learned_from: int,
) -> list[str]:
    """What was done, with the numbers that matter."""
    text = (
        "Five bodies, each of charge +1 or −1, attract and repel each other in space: the field's "
        f"n-body comparison, simulated just now. From frame {BEFORE} a network predicts frame "
        f"{AFTER}. It has learned from {learned_from} systems; every error below is that of others."
    )
    step = next(iter(times.values()))
    numbers = [
        (f"{errors[STRAIGHT]:.3f}", "RMSE of the best straight line"),
        (f"{step['torch'] / step['torchweft']:.1f} ×", "the speed of plain torch, learning"),
        (f"{asymmetry:.0e}", "error when all is turned, mirrored, moved"),
        (f"{errors[OURS]:.3f}", "RMSE of the network"),
    ]
    meaning = (
        "Charges, positions and velocities are multivectors of Cl(3,0): a scalar and vectors among "
        "numbers that stand for lines, planes and volumes. ∗ is the geometric product, with one "
        "learned weight for each path between grades; L and R are matrices, one a grade. Whatever "
        "the weights, turning the input turns the output. Messages pass over plans of "
        "`torchweft.products`; each product, with the norms around it, is one loop printed from "
        "the "
        "Cayley table, and so are its gradients."
    )
    return [
        page.paragraph(text),
        page.cards(numbers),
        page.formula(_FORMULA),
        page.paragraph(meaning),
    ]


def _picture(data: Data, views: Mapping[str, Tensor]) -> bytes:
    """The first systems of the held-out ones."""
    shown = {
        STRAIGHT: (views[STRAIGHT][:SHOWN].cpu().double(), "x", GREY),
        OURS: (views[OURS][:SHOWN].cpu().double(), "+", ACCENT),
    }
    path = data.frames.position[BEFORE : AFTER + 1, :SHOWN]
    return forecasts(data.frames.charge[:SHOWN], path, shown)


def _picture_caption(errors: Mapping[str, float]) -> str:
    numbers = ", ".join(f"{name} {error:.3f}" for name, error in errors.items())
    return (
        f"Held-out systems, each seen from its flattest side: dots are what is known, lines where "
        f"the bodies went, red for +, blue for −. RMSE of all of them: {numbers}."
    )


def _errors_table(errors: Mapping[str, float]) -> str:
    rows = [(name, f"{error:.4f}", f"{error**2:.5f}") for name, error in errors.items()]
    caption = "Distance to the truth on the held-out systems, a coordinate."
    return page.table(caption, ["", "RMSE", "mean squared error"], rows, len(rows) - 1)


def _exactness_table(model: Forecaster, dense: DenseForecaster, systems: Systems) -> str:
    """Errors against float64, and under a change of the frame of reference."""
    exact_model = Forecaster(FEATURES, LAYERS).to(systems.charge.device, torch.float64)
    exact_model.load_state_dict(model.state_dict())
    wide = systems.to(systems.charge.device, torch.float64)
    exact = predicted(DenseForecaster(exact_model), wide)

    def error(positions: Tensor) -> str:
        change = exact - wide.position
        return f"{float((positions.double() - exact).norm() / change.norm()):.1e}"

    rows = [
        ("torchweft", error(predicted(model, systems)), f"{_asymmetry(model, systems):.1e}"),
        ("plain torch", error(predicted(dense, systems)), "–"),
        ("float64", error(predicted(exact_model, wide)), f"{_asymmetry(exact_model, wide):.1e}"),
    ]
    caption = (
        f"Errors of the trained network on {FEW} systems, as parts of the bodies' displacement: "
        "against plain torch in float64, and between predicting what was turned, mirrored and "
        "moved and turning, mirroring and moving what was predicted."
    )
    return page.table(caption, ["", "against float64", "when turned"], rows)


def _times_table(times: Mapping[str, Mapping[str, float]]) -> str:
    caption = (
        "The same network in torchweft and in plain torch (products by the dense Cayley table, "
        "index_select and index_add for messages), taking turns; medians."
    )
    return page.times(caption, times)
