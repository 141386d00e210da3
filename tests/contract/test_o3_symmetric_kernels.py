"""The contract of symmetric contractions: values, derivatives, one kernel, doors.

The cases are in tests.cases.symmetric.  In the interpreter one kernel evaluates them, else
channelwise products do; the doors of the one kernel's operator are checked with a body of torch.

Seen red with: parts numbered by chunk alone, the last chunk of an element left out, rows in their
own order, the element of an unsorted place, a run that goes on into the next element, sums that do
not begin at zero, the results of two kernels swapped, one weight for all functions that meet.
"""

import copy

import pytest
import torch

from tests.cases.symmetric import suite
from tests.conftest import BACKENDS, INTERPRETED
from torchweft import o3
from torchweft.core.expressions.program import accumulator, evaluate
from torchweft.errors import ShapeError
from torchweft.o3.layers import symmetric_contraction
from torchweft.o3.symmetric import operator as symmetric_operator
from torchweft.o3.symmetric.program import (
    fits_one_program,
    program_parts,
    slots,
    symmetric_key,
    symmetric_program,
    weight_program,
)
from torchweft.testing import assert_within_bound
from torchweft.testing.contract import (
    BODY_CHECKS,
    Setting,
    check_values,
    judge,
)
from torchweft.testing.doors import DOOR_CHECKS, check_numerical

pytestmark = pytest.mark.kernels

SUITE = suite()
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MACE = o3.Irreps("4x0e+4x1o+4x2e+4x3o"), o3.Irreps("4x0e+4x1o")
PAIRS = [
    pytest.param(case, dtype, id=f"{case.name}-{dtype}")
    for i, case in enumerate(SUITE.cases)
    for j, dtype in enumerate(DTYPES)
    if not INTERPRETED or i % len(DTYPES) == j  # an interpreted program takes a millisecond
]
interpreted = pytest.mark.skipif(not INTERPRETED, reason="kernels run in the interpreter")
native = pytest.mark.skipif(INTERPRETED, reason="kernels run in the interpreter, doors without it")


@pytest.mark.parametrize(("case", "dtype"), PAIRS)
def test_values_and_derivatives(case, dtype):
    check_values(case, Setting(dtype=dtype, backend=BACKENDS[-1]))


@native
@pytest.mark.parametrize("case", SUITE.single, ids=lambda case: case.name)
def test_mace(case):
    check_values(case, Setting(backend="torch"))


@pytest.mark.parametrize("check", BODY_CHECKS[1:])
@pytest.mark.parametrize("case", SUITE.full, ids=lambda case: case.name)
def test_promises(case, check):
    check(case, Setting(backend=BACKENDS[-1]))


def third(function, problem):
    leaves = [t.clone().requires_grad_() for t in problem.inputs]
    total = (function(*leaves, **problem.tables) * problem.cotangent).sum()
    for _ in range(3):
        gradients = torch.autograd.grad(total, leaves, create_graph=True, materialize_grads=True)
        total = sum((g * t).sum() for g, t in zip(gradients, problem.tangents, strict=True))
    return {f"input {i}": g.detach() for i, g in enumerate(gradients)}


def test_third_derivatives():
    (case,) = SUITE.full
    setting = Setting(backend=BACKENDS[-1])
    problem = setting.pose(case)

    def call(*inputs, **tables):
        return case.call(*inputs, **tables, backend=setting.backend)

    judge(case, problem, third, third(call, problem), "third derivatives")


@interpreted
@pytest.mark.parametrize(("layout", "programs"), [("mul_ir", 1), ("ir_mul", 3), ("mul_ir", 40)])
def test_one_kernel_is_the_products_by_degrees(layout, programs, monkeypatch):
    """MACE's layer, chunks of rows longer and shorter than elements, second order in parts."""
    for name in ("ROWS_SHAPE", "SUMS_SHAPE"):
        shape = getattr(symmetric_operator, name)._replace(programs=programs)
        monkeypatch.setattr(symmetric_operator, name, shape)
    module = o3.SymmetricContraction(*MACE, 3, 6, layout=layout, backend="triton").double()
    by_degrees = copy.deepcopy(module)
    by_degrees.backend = "torch"
    generator = torch.Generator().manual_seed(0)
    element = torch.tensor([4, 1, 1, 3, 1, 4, 1, 1, 1, 1, 1, 3, 1])  # none of 0, 2, 5
    x = torch.randn(13, MACE[0].dim, dtype=torch.float64, generator=generator)
    found, exact = (derivatives(m, x, element) for m in (module, by_degrees))
    for one, other in zip(found, exact, strict=True):
        size = other.abs().max().expand_as(other)
        assert_within_bound(one, other, size, 16**3)


@pytest.fixture
def by_torch(monkeypatch):
    """The one kernel's operator, with a body of torch."""

    def prepared(like, rest):
        def body(given):
            *floats, element, order, _ = given
            found = results(*rest, floats, element, order.long())
            return tuple([g.to(floats["xwz".index(s) % 2].dtype, copy=True) for s, g in found])

        return body

    def prepared_weights(like, rest):
        program = weight_program(rest[0])

        def body(given):
            leaves = {o.name: t.transpose(0, 1) for o, t in zip(program.inputs, given, strict=True)}
            zero = torch.zeros_like(given[0][:, 0])
            every = [evaluate(output.components, leaves, {}) for output in program.outputs]
            return tuple([torch.stack([v + zero for v in values], 1) for values in every])

        return body

    monkeypatch.setattr(symmetric_operator, "prepared", prepared)
    monkeypatch.setattr(symmetric_operator, "prepared_weights", prepared_weights)
    monkeypatch.setattr(symmetric_contraction, "chosen_backend", lambda backend, device: "triton")


def results(name, layout, tensors, element, order):
    """Slots and values of a program."""
    found = symmetric_program(name)
    places = dict(symmetric_operator.columns(name, layout, tensors[1].shape[2]))
    channels, wide = tensors[1].shape[2], accumulator(tensors[0].dtype)
    index = {
        slot: torch.tensor(
            [[c.offset + n * c.step for n in range(channels)] for c in columns],
            device=element.device,
        )
        for slot, columns in places.items()
    }
    leaves = {
        operand.name: (
            tensor[element].transpose(0, 1)
            if slot == "w"
            else tensor[:, index[slot]].transpose(0, 1)
        ).to(wide)
        for operand, tensor, slot in zip(found.inputs, tensors, slots(name).inputs, strict=True)
    }
    for output, slot in zip(found.outputs, slots(name).outputs, strict=True):
        values = evaluate(output.components, leaves, {})
        like = leaves["x"][0]
        stacked = torch.stack([v + torch.zeros_like(like) for v in values], 1)  # (N, size, C)
        if slot == "w":
            result = tensors[1].new_zeros(tensors[1].shape, dtype=wide)
            result.index_add_(0, element[order], stacked[order])
        else:
            result = stacked.new_empty(len(stacked), len(places[slot]) * channels)
            result[:, index[slot]] = stacked
        yield slot, result


@native
@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("case", SUITE.doors, ids=lambda case: case.name)
@pytest.mark.parametrize("check", DOOR_CHECKS)
@pytest.mark.singly  # cases share their operator
def test_doors(check, case):
    check(case)


@native
@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("case", SUITE.small, ids=lambda case: case.name)
def test_numerical_gradients(case):
    check_numerical(case)


@native
def test_elements_are_not_mapped(by_torch):
    module = o3.SymmetricContraction("2x0e+2x1o", "2x0e", 2, 3)
    x, element = torch.randn(2, 4, 8), torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(ShapeError, match=r"an index tensor of shape .* is mapped by torch\.vmap"):
        torch.vmap(module)(x, element)


def test_few_outputs_need_one_kernel():
    """What a thread keeps decides, and long code is left to the products by degrees."""
    root = symmetric_key(*MACE, 3)
    assert len(program_parts(f"{root} | vjp 11 1")) == 1
    second = f"{root} | vjp 11 1 | vjp 111 11"
    assert [numbers for _, numbers in program_parts(second)] == [(0,), (1, 2)]
    assert [slots(name).outputs for name, _ in program_parts(second)] == ["x", "wz"]
    assert fits_one_program(root)
    every = o3.Irreps("0e+1o+2e+3o")
    assert not fits_one_program(symmetric_key(every, every, 3))
    assert not o3.SymmetricContraction(every, every, 3, 2)._single


def derivatives(module, x, element):
    """z, and its first and second derivatives along fixed directions."""
    x = x.clone().requires_grad_()
    weights = [p for p in module.parameters() if p.requires_grad]
    z = module(x, element)
    cotangent = direction(z).requires_grad_()
    first = torch.autograd.grad(z, [x, *weights], cotangent, create_graph=True)
    second = torch.autograd.grad(first, [x, cotangent, *weights], [*map(direction, first)])
    return [t.detach() for t in (z, *first, *second)]


def direction(tensor):
    return torch.arange(1, 1 + tensor.numel(), dtype=tensor.dtype).sin().view_as(tensor)
