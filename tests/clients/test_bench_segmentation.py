"""Weights trained through the stand-in, in the real spconv: the same classes of voxels.

Seen red with: weights that are not loaded.
"""

import pytest
import torch

pytest.importorskip("spconv")

from benchmarks import train_segmentation
from benchmarks.train_segmentation import PACKAGES
from benchmarks.workloads import segmentation
from tests.clients.agreement import assert_agree

pytestmark = pytest.mark.filterwarnings("ignore")


def test_spconv_predicts_what_was_trained_through_the_stand_in(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    rooms = segmentation.rooms(8, seed=0, density=40)
    ours = PACKAGES["torchweft"]
    steps = [segmentation.join(rooms[n : n + 2]) for n in (0, 2, 4)] * 10
    run = train_segmentation.run_of(ours, train_segmentation.network(ours), len(steps))
    train_segmentation.epoch(run, steps)
    assert run.losses[-1] < run.losses[0] / 2
    given = segmentation.join(rooms[6:])
    scores = {}
    for package in PACKAGES.values():
        for dtype in (torch.float32, torch.float64):
            model = train_segmentation.network(package, dtype)
            model.load_state_dict(run.model.state_dict(), strict=True)
            with torch.no_grad():
                batch = given.to(torch.device("cpu"), dtype)
                found = train_segmentation.scores(package, model.eval(), batch)
            scores[package, dtype] = {"scores": found.double()}
    exact, rounded = (scores["spconv", dtype] for dtype in (torch.float64, torch.float32))
    for dtype in (torch.float64, torch.float32):
        assert_agree(scores[ours, dtype], exact, rounded, dtype)
    best, second = exact["scores"].topk(2).values.unbind(1)
    noise = (rounded["scores"] - exact["scores"]).abs().max()
    unclear = (best - second < 32 * noise).double().mean()  # two scores of two results
    assert unclear < 0.01
    theirs = train_segmentation.run_of("spconv", train_segmentation.network("spconv"), 1)
    runs = {"spconv": theirs, "torchweft": run}
    results = {
        name: train_segmentation.predicted(r.package, r.model, [given]) for name, r in runs.items()
    }
    found = train_segmentation.exchanged(runs, results, [given], given.labels)
    for exchange in found.values():
        assert exchange["same"] >= 1 - unclear
    assert found["torchweft in spconv"]["accuracy"] > found["spconv in torchweft"]["accuracy"]
