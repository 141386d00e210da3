"""The first call of a converted model is made twice, and leaves nothing of the first behind.

Seen red with: buffers and random numbers of the first, keys added to the caller's data, kinds of
calls that are told apart by the values of tensors.
"""

import pytest
import torch
from torch import nn

from torchweft.core.gpu.ahead import noting
from torchweft.o3.adapters import model_call


class Model(nn.Module):
    """Adds to its data, to a buffer and to the random numbers that were drawn."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))
        self.calls = []

    def forward(self, data, training=False):
        self.calls.append(noting() is not None)
        data["seen"] = True
        with torch.no_grad():
            self.mean += 1
        kept = torch.rand(3)
        return {"energy": (self.weight * data["x"]).sum(), "kept": kept}


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(model_call, "_runs_alone", lambda model: True)
    monkeypatch.setattr("torchweft.core.gpu.ahead.most_workers", lambda: 2)
    made, call = Model(), model_call.Call()
    made.register_forward_pre_hook(call.begin, with_kwargs=True)
    made.register_forward_hook(call.end, always_call=True)
    return made


def test_the_first_call_of_a_kind_is_made_twice(model):
    x = {"x": torch.ones(3)}
    for training, expected in ((False, [1, 0]), (False, [0]), (True, [1, 0]), (True, [0])):
        model.calls.clear()
        model({**x, "x": torch.rand(3)}, training=training)
        assert model.calls == [bool(flag) for flag in expected]
    model.calls.clear()
    model.eval()(x, training=True)
    assert model.calls == [True, False]


def test_nothing_is_left_of_it(model):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    data = {"x": torch.ones(3)}
    found = model(data)
    assert (found["kept"] == expected).all()
    assert (model.mean == 1).all()
    assert model.weight.grad is None
    found["energy"].backward()
    assert (model.weight.grad == 1).all()


def test_a_model_that_was_moved_in_inference_mode(model):
    """Its buffers count no changes; seen red with: no call for the kernels, as torch raises."""
    with torch.inference_mode():
        model.eval().double()
        assert model.mean.is_inference()
        assert model({"x": torch.ones(3)})["energy"] == 3
    assert model.calls == [True, False]


def test_the_data_are_the_callers(model, monkeypatch):
    seen = []
    monkeypatch.setattr(Model, "forward", lambda self, data: seen.append(dict(data)))
    model({"x": 1})
    assert seen == [{"x": 1}, {"x": 1}]


def test_errors_are_those_of_the_second_call(model, monkeypatch):
    def forward(self, data):
        raise RuntimeError("of garbage" if noting() else "of the caller")

    monkeypatch.setattr(Model, "forward", forward)
    with pytest.raises(RuntimeError, match="of the caller"):
        model({})


def test_gradients_are_among_what_a_trained_model_compiles(model):
    grads = []
    model.weight.register_hook(lambda grad: grads.append(noting() is not None))
    model({"x": torch.ones(3)})
    model.eval()({"x": torch.ones(3)})
    assert grads == [True]
