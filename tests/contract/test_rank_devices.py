"""Tests of ranks on a device: what they make is there, with the CPU's numbers."""

import torch
from torch import nn

from tests.rank_devices import OnDevice
from torchweft import o3

CPU, META = torch.device("cpu"), torch.device("meta")


def made():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(3, generator=generator, requires_grad=True)
    return [drawn, *nn.Linear(3, 2).parameters(), *o3.Linear("2x0e", "3x0e").parameters()]


def test_numbers_are_those_of_the_cpu():
    expected = made()
    with OnDevice(CPU):
        found = made()
    assert all(ours.equal(other) for ours, other in zip(found, expected, strict=True))
    assert all(ours.is_leaf and ours.requires_grad for ours in found)
    assert not nn.modules.module._global_parameter_registration_hooks


def test_everything_that_a_test_makes_is_on_the_device():
    with OnDevice(META):
        norm = nn.BatchNorm1d(2)
        assert {t.device for t in (*made(), *norm.buffers(), torch.arange(3))} == {META}
        assert torch.zeros(1, device="cpu").device == CPU
        assert o3.wigner_3j(1, 1, 1).device == CPU  # the library's own tables stay
