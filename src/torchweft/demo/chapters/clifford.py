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
from torchweft.demo.pictures import GREY, WINDOW, curve, forecasts
from torchweft.demo.snippets import shown

__all__ = ["chapter"]

OURS, STILL, STRAIGHT = "trained network", "constant guess: no movement", "straight line"
FEATURES, LAYERS = 16, 2
ROUNDS = 3
NETWORK = "#2f9e5f"  # the colour of its predictions
FEW = 10  # systems: in float64, too few to compile loops for

_FORMULA = (
    "<span><i>h<sub>i</sub></i> ← <i>h<sub>i</sub></i> + ψ(<i>h<sub>i</sub></i>, "
    "mean<sub><i>j</i></sub> φ(<i>h<sub>i</sub></i> − <i>h<sub>j</sub></i>, "
    "<i>q<sub>i</sub>q<sub>j</sub></i>))</span> "
    "<span>φ, ψ: &ensp; <i>x</i> ← (<i>L x</i> + <i>x</i> ∗<sub><i>w</i></sub> <i>R x</i>) / "
    "√2</span>"
)


def chapter(options: Options) -> page.Chapter:
    """Learn from some systems, predict others, and rotate these to see that nothing changes."""
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
    times = _times(model, dense, data)
    asymmetry = _asymmetry(model, data.test)
    levels = {name: errors[name] for name in (STILL, STRAIGHT)}
    blocks = (
        *_story(errors, times, asymmetry, len(data.train.charge)),
        page.figure(partial(_picture, data, views), _PICTURE),
        _errors_table(errors),
        _times_table(times, data),
        page.figure(partial(curve, losses, levels, "RMS error"), _CURVE),
        page.details(
            "How exact: against float64, and rotated",
            _exactness_table(model, dense, data.test.of(torch.arange(FEW, device=options.device))),
        ),
        page.documentation(
            {"clifford": "families/clifford", "GATr and CEGNN": "migrate/gatr_lgatr_cegnn"}
        ),
    )
    return page.Chapter("torchweft.clifford", "Where charged particles will be", blocks)


_PICTURE = (
    "A held-out system whose paths are rather bent (a straight line is better for three in four of "
    "the others), from its flattest side, and each of its particles from near. A disk is where a "
    "particle is when the prediction is made, the line its true path, the ring its true end. The "
    "closer a mark is to the middle of the ring, the better the prediction."
)
_CURVE = (
    f"Training, on a logarithmic axis. Thin: the error of each step, on {forecaster.BATCH} "
    f"systems. Thick: the median of {WINDOW} steps. Dashed and dotted: errors without training, on "
    "the held-out systems."
)


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
    """Milliseconds of torchweft and of plain torch, in turns."""
    device = data.train.charge.device
    batch = data.train.of(torch.arange(forecaster.BATCH, device=device))
    plan = complete_graphs(*batch.charge.shape).to(device)
    models = {"torchweft": model, "plain torch": dense}
    steps = {name: step_of(m, batch, plan) for name, m in models.items()}
    passes = {name: partial(predicted, m, data.test) for name, m in models.items()}
    return {
        "training step": interleaved(steps, device, ROUNDS),
        "inference": interleaved(passes, device, ROUNDS),
    }


def _story(
    errors: Mapping[str, float],
    times: Mapping[str, Mapping[str, float]],
    asymmetry: float,
    learned_from: int,
) -> list[str]:
    """What was done, with the numbers that matter."""
    text = (
        "Five particles of charge +1 or −1 attract and repel each other in space: the n-body "
        "benchmark of equivariant networks, simulated for this page. From the positions and "
        f"velocities in frame {BEFORE} a network predicts the positions in frame {AFTER}. It is "
        f"trained on {learned_from} systems; every error below is of other, held-out systems."
    )
    numbers = [
        (f"{errors[STILL]:.3f}", "error of the constant guess: no movement"),
        (f"{errors[STRAIGHT]:.3f}", "error of the best straight line"),
        *page.leads(times),
        (f"{asymmetry:.0e}", "relative error under rotation: equivariance"),
        (f"{errors[OURS]:.3f}", "error of the trained network"),
    ]
    meaning = (
        "Charges, positions and velocities are multivectors of the algebra Cl(3,0): scalars and "
        "vectors, next to components for planes and volumes. ∗ is the geometric product, with a "
        "learned weight for each combination of grades; L and R are linear maps of each grade. "
        "Whatever the weights, rotating the input rotates the output. `EGCL` is the layer of "
        "CEGNN: each product, with the norms before and after it, is one generated kernel, and so "
        "is its gradient."
    )
    return [
        page.paragraph(text),
        page.cards(numbers),
        page.formula(_FORMULA),
        page.paragraph(meaning),
        shown(Forecaster),
    ]


def _picture(data: Data, views: Mapping[str, Tensor], width: float) -> bytes:
    """The held-out system that three in four are better than, by a straight line."""
    wrong = (views[STRAIGHT] - data.test.target).square().sum((1, 2))
    row = int(wrong.argsort()[3 * len(wrong) // 4])
    ends = {
        STRAIGHT: (views[STRAIGHT][row].cpu().double(), "x", GREY),
        OURS: (views[OURS][row].cpu().double(), "P", NETWORK),
    }
    path = data.frames.position[BEFORE : AFTER + 1, row]
    return forecasts(data.frames.charge[row], path, ends, width)


def _errors_table(errors: Mapping[str, float]) -> str:
    rows = [(name, f"{error:.4f}", f"{error**2:.5f}") for name, error in errors.items()]
    caption = "Errors of a coordinate on the held-out systems."
    return page.table(caption, ["", "RMS error", "mean squared error"], rows, len(rows) - 1)


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
        f"The trained network on {FEW} systems. Against float64: the difference to plain torch in "
        "float64. When rotated: the difference between predictions for rotated, mirrored and "
        "shifted systems and rotated, mirrored and shifted predictions. Both are relative to the "
        "displacement of the particles."
    )
    return page.table(caption, ["", "against float64", "when rotated"], rows)


def _times_table(times: Mapping[str, Mapping[str, float]], data: Data) -> str:
    caption = (
        "The same network in torchweft and in plain torch: einsum with the dense Cayley table, "
        "index_select and index_add, which is what the code published with CEGNN runs (it is no "
        "package, so it is not timed itself). Medians; the calls alternate. Training step: "
        f"{forecaster.BATCH} systems. Inference: {len(data.test.charge)} systems."
    )
    return page.times(caption, times)
