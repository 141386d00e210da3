"""Bad input raises the right class, names the variable, the operation and both shapes.

Seen red with: axes that are no numbers, both axis and dim, sparse tensors and lists of lists
taken as they come; the checks of dtypes, devices, masks, ranges, K and
shared memory taken out, and i and j exchanged in the advice.
"""

import re

import numpy as np
import pytest
import torch

import torchweft
from tests.conftest import INTERPRETED
from torchweft.reductions import Genred, LazyTensor, Pm, Var, Vi, Vj, generic_sum, numpy
from torchweft.reductions.cluster import from_matrix
from torchweft.reductions.engine.reduction import reduce
from torchweft.reductions.formula.node import node, var
from torchweft.reductions.formula.parse import FormulaError

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the front end does not depend on the backend")

X, Y, B = torch.zeros(5, 3), torch.zeros(7, 3), torch.zeros(7, 2)
KERNEL = Vi(X).sqdist(Vj(Y))
DISTANCE = node("sqdist", var(0, 3, 0), var(1, 3, 1))
RANGES = from_matrix(torch.tensor([[0, 5]]), torch.tensor([[0, 7]]), torch.tensor([[True]]))


def with_ranges(lazy, ranges):
    lazy.ranges = ranges
    return lazy


def with_backend(lazy, backend):
    lazy.backend = backend
    return lazy


def genred(*args, formula="SqDist(x, y)", aliases=("x = Vi(3)", "y = Vj(3)"), **options):
    called = {key: options.pop(key) for key in ("out", "ranges", "backend") if key in options}
    return Genred(formula, aliases, axis=1, **options)(*args, **called)


CASES = {
    # what a lazy tensor is made of
    "no axis": (
        lambda: LazyTensor(X),
        torchweft.ShapeError,
        r"x is \(5, 3\) without an axis.*Vi or Vj",
    ),
    "wrong axis": (lambda: LazyTensor(X, axis=3), torchweft.ShapeError, r"axis is 3.*0.*1.*2"),
    "axis of a vector": (
        lambda: LazyTensor(X[0], axis=0),
        torchweft.ShapeError,
        r"\(3,\) with axis=0",
    ),
    "axis of a number": (
        lambda: LazyTensor(2.5, axis=1),
        torchweft.ShapeError,
        r"x is 2.5 with axis=1",
    ),
    "axis and dimensions": (
        lambda: LazyTensor(X[:, None], axis=0),
        torchweft.ShapeError,
        r"\(5, 1, 3\) with axis=0.*Leave out axis, or use Vi",
    ),
    "neither i nor j": (
        lambda: LazyTensor(torch.zeros(5, 7, 3)),
        torchweft.ShapeError,
        r"\(5, 7, 3\).*\(\.\.\., M, 1, D\).*\(\.\.\., 1, N, D\)",
    ),
    "a vector of i": (lambda: Vi(X[0]), torchweft.ShapeError, r"x is \(3,\).*\(\.\.\., M, D\)"),
    "integers": (
        lambda: Vi(torch.zeros(5, 3, dtype=torch.int64)),
        torchweft.DTypeError,
        r"x is torch.int64.*float64, float32, float16, bfloat16.*\.to\(torch.float32\)",
    ),
    "a string": (lambda: LazyTensor("x"), torchweft.DTypeError, r"x is a str.*tensor"),
    "an array": (
        lambda: LazyTensor(np.zeros((5, 3)), axis=0),
        torchweft.DTypeError,
        r"x is a ndarray.*torch.from_numpy, or take torchweft.reductions.numpy",
    ),
    "an argument that is an array": (
        lambda: genred(np.zeros((5, 3)), Y),
        torchweft.DTypeError,
        r"argument 0 is a ndarray.*torchweft.reductions.numpy",
    ),
    "a list of lists": (
        lambda: LazyTensor([[1.0, 2.0]]),
        torchweft.DTypeError,
        r"x is a list.*numbers",
    ),
    "a list of tensors": (  # which would lose their gradients
        lambda: LazyTensor([torch.ones((), requires_grad=True)]),
        torchweft.DTypeError,
        r"x is a list",
    ),
    "a sparse tensor": (
        lambda: Vi(X.to_sparse()),
        torchweft.DTypeError,
        r"x has the layout torch.sparse_coo: it must be a strided .* Pass x\.to_dense\(\)",
    ),
    "a sparse tensor with an axis": (
        lambda: LazyTensor(X.to_sparse(), axis=0),
        torchweft.DTypeError,
        r"to_dense",
    ),
    "a sparse argument": (lambda: genred(X.to_sparse(), Y), torchweft.DTypeError, r"to_dense"),
    # what a lazy tensor is asked
    "a name for an axis": (
        lambda: KERNEL.sum("j"),
        torchweft.ShapeError,
        r"axis j.*0 \(over i\) or 1",
    ),
    "two axes": (
        lambda: KERNEL.sum((0, 1)),
        torchweft.ShapeError,
        r"axis \(0, 1\).*Pass axis or dim",
    ),
    "an axis and another dim": (
        lambda: KERNEL.sum(axis=1, dim=0),
        torchweft.ShapeError,
        r"axis 1 and dim 0.*Pass axis or dim",
    ),
    "an axis and another dim of logsumexp": (
        lambda: KERNEL.logsumexp(axis=1, dim=0),
        torchweft.ShapeError,
        r"axis 1 and dim 0",
    ),
    "a symbol": (
        lambda: Var(0, 3, 5),
        torchweft.ShapeError,
        r"\(0, 3, 5\).*category 0.*Vi\(index, dim\)",
    ),
    "a pair": (
        lambda: LazyTensor((0, 3)),
        torchweft.ShapeError,
        r"\(0, 3\).*\(index, dim, category\)",
    ),
    # operations
    "i for j": (
        lambda: LazyTensor(X[:, None]) - LazyTensor(Y[:, None]),
        torchweft.ShapeError,
        r"- joins lazy tensors of shapes \(5, 1, 3\) and \(7, 1, 3\), which have 5 and 7 rows of i"
        r".*varies with j instead, make it of x\[None, :, :\], not of x\[:, None, :\]",
    ),
    "j for i": (
        lambda: Vj(X).sqdist(Vj(Y)),
        torchweft.ShapeError,
        r"SqDist joins.*\(1, 5, 3\) and \(1, 7, 3\), which have 5 and 7 rows of j.*varies with i "
        r"instead, make it of x\[:, None, :\]",
    ),
    "components": (
        lambda: Vi(X) + Vj(B),
        torchweft.ShapeError,
        r"\+ of \(5, 1, 3\) and \(1, 7, 2\): .*dimensions 3 and 2: they must be equal, or 1",
    ),
    "batches": (
        lambda: Vi(X.expand(2, 5, 3)) - Vj(Y.expand(4, 7, 3)),
        torchweft.ShapeError,
        r"\(2, 5, 1, 3\) and \(4, 1, 7, 3\).*batch dimensions are \(2,\) and \(4,\).*Unsqueeze",
    ),
    "dtypes": (
        lambda: Vi(X) - Vj(Y.double()),
        torchweft.DTypeError,
        r"- joins.*\(5, 1, 3\) and \(1, 7, 3\), of torch.float32 and torch.float64.*one dtype"
        r".*\.to\(torch.float32\)",
    ),
    "devices": (
        lambda: Vi(X) - Vj(Y.to("meta")),
        torchweft.DeviceError,
        r"on cpu and meta: a formula has one device.*\.to\('cpu'\)",
    ),
    "an index": (
        lambda: Vi(X)[3],
        torchweft.IndexRangeError,
        r"component 3 is taken of 3.*\[0, 3\)",
    ),
    "an element": (lambda: Vi(X).elem(4), torchweft.IndexRangeError, r"4.*3"),
    "a step": (
        lambda: Vi(X)[::2],
        torchweft.ShapeError,
        r"slice\(None, None, 2\).*slice of step 1",
    ),
    "rows": (lambda: Vi(X)[0, :, :], torchweft.ShapeError, r"3 entries: only the last"),
    "norm of i": (
        lambda: Vi(X).norm(0),
        torchweft.ShapeError,
        r"norm is asked for axis 0 of 3.*Pass -1",
    ),
    "nothing to join": (
        lambda: LazyTensor.cat((), -1),
        torchweft.ShapeError,
        r"concatenate is given \(\)",
    ),
    "a weight's norm": (
        lambda: Vi(X).weightedsqnorm([1.0, 2.0]),
        torchweft.ShapeError,
        r"WeightedSqNorm of \(1, 1, 2\) and \(5, 1, 3\).*1, D = 3 or D·D = 9",
    ),
    "complex order": (
        lambda: LazyTensor(X[:, None] * 1j).relu(),
        torchweft.DTypeError,
        r"ReLU is applied to a ComplexLazyTensor.*Take real",
    ),
    "complex beside real": (
        lambda: Vi(X).concat(Vj(Y * 1j)),
        torchweft.DTypeError,
        r"Concat is given a ComplexLazyTensor beside a real one.*Take real",
    ),
    "complex weight": (
        lambda: KERNEL.logsumexp(1, weight=Vj(B * 1j)),
        torchweft.DTypeError,
        r"LogSumExp is given a ComplexLazyTensor beside a real one.*Take real",
    ),
    "complex sum into real memory": (
        lambda: (Vi(X) * 1j).sum(1, out=torch.empty(5, 3)),
        torchweft.ShapeError,
        r"out is \(5, 3\) of torch.float32.*contiguous complex memory.*Pass torch.empty",
    ),
    "complex unknown": (
        lambda: KERNEL.solve(B[:5] * 1j, var=Vj(0, 2)),
        torchweft.DTypeError,
        r"var is real but the right-hand side is complex.*is_complex=True",
    ),
    "complex minimum": (
        lambda: LazyTensor(X[:, None] * 1j).min_argmin(dim=0),
        torchweft.DTypeError,
        r"Min_ArgMin is asked of a ComplexLazyTensor",
    ),
    "backends": (
        lambda: with_backend(Vi(X), "torch") - with_backend(Vj(Y), "numba"),
        torchweft.BackendError,
        r"backends 'torch' and 'numba'.*has one",
    ),
    "masks": (
        lambda: with_ranges(Vi(X), RANGES) - with_ranges(Vj(Y), tuple(r + 1 for r in RANGES)),
        torchweft.ShapeError,
        r"different ranges.*one mask",
    ),
    # reductions
    "no axis to reduce": (
        lambda: KERNEL.logsumexp(),
        torchweft.ShapeError,
        r"LogSumExp is asked for axis None of a lazy tensor of shape \(5, 7\).*0 \(over i\) or 1",
    ),
    "batch axis": (
        lambda: Vi(X[None]).sqdist(Vj(Y)).sum(0),
        torchweft.ShapeError,
        r"Sum is asked for axis 0.*1 \(over i\) or 2 \(over j\)",
    ),
    "no weight": (
        lambda: KERNEL.reduction("SumSoftMaxWeight", axis=1),
        torchweft.ShapeError,
        r"SumSoftMaxWeight is given no weight.*needs it",
    ),
    "a weight": (
        lambda: KERNEL.reduction("Min", other=Vj(B), axis=1),
        torchweft.ShapeError,
        r"Min is given a weight.*multiply the formula",
    ),
    "weight's rows": (
        lambda: KERNEL.logsumexp(1, weight=Vj(X)),
        torchweft.ShapeError,
        r"LogSumExp joins.*\(5, 7\) and \(1, 5, 3\), which have 7 and 5 rows of j",
    ),
    "a name": (
        lambda: KERNEL.reduction("Mean", axis=1),
        torchweft.ShapeError,
        r"reduction is 'Mean'.*Sum",
    ),
    "K of 0": (
        lambda: KERNEL.argKmin(0, dim=1),
        torchweft.ShapeError,
        r"ArgKMin is given K = 0.*1 or more",
    ),
    "K of 2.5": (
        lambda: KERNEL.Kmin(2.5, dim=1),
        torchweft.ShapeError,
        r"KMin is given K = 2.5.*integer",
    ),
    "precision": (
        lambda: KERNEL.sum(1, precision="fp8"),
        torchweft.DTypeError,
        r"precision is 'fp8'.*'ieee'",
    ),
    "scheme": (
        lambda: KERNEL.sum(1, sum_scheme="tree"),
        torchweft.DTypeError,
        r"sum_scheme is 'tree'",
    ),
    "accumulator": (
        lambda: KERNEL.sum(1, dtype_acc="int8"),
        torchweft.DTypeError,
        r"dtype_acc is 'int8'",
    ),
    "two accumulators": (
        lambda: KERNEL.sum(1, dtype_acc="float32", use_double_acc=True),
        torchweft.DTypeError,
        r"use_double_acc is given with dtype_acc='float32'",
    ),
    "backend": (
        lambda: KERNEL.sum(1, backend="TPU"),
        torchweft.BackendError,
        r"backend is 'TPU'.*GPU_1D",
    ),
    "components of K": (
        lambda: Vi(X) @ Y,
        torchweft.ShapeError,
        r"K @ v is asked of a lazy tensor of shape \(5, 1, 3\).*sum\(-1\)",
    ),
    "rows of v": (
        lambda: KERNEL @ torch.zeros(4, 2),
        torchweft.ShapeError,
        r"\* joins.*\(5, 7\) and \(1, 4, 2\), which have 7 and 4 rows of j",
    ),
    "three ranges": (
        lambda: KERNEL.sum(1, ranges=RANGES[:3]),
        torchweft.ShapeError,
        r"(six|6).*arrays|arrays.*(six|6)",
    ),
    "ranges outside": (
        lambda: Vi(X[:4]).sqdist(Vj(Y)).sum(1, ranges=RANGES),
        torchweft.IndexRangeError,
        r"5.*4",
    ),
    # what is called later
    "arguments": (
        lambda: Vi(0, 3).sqdist(Vj(1, 3)).sum(1)(X),
        torchweft.ShapeError,
        r"called with 1 arguments: it has 2 symbolic",
    ),
    "an argument's shape": (
        lambda: Vi(0, 3).sqdist(Vj(1, 3)).sum(1)(X, B),
        torchweft.ShapeError,
        r"argument 1 is \(7, 2\) but declared Vj\(3\).*\(\.\.\., N, 3\)",
    ),
    "an argument's rows": (
        lambda: (Vi(X) + Vi(0, 3)).sum(1)(Y),
        torchweft.ShapeError,
        r"argument 0 of shape \(7, 3\) beside the others, which have 5 and 7 rows of i",
    ),
    "an argument's type": (
        lambda: Vi(0, 3).sum(1)([1.0]),
        torchweft.DTypeError,
        r"argument 0 is a list: it must be a tensor",
    ),
    "one index, two symbols": (
        lambda: Vi(0, 3) + Vj(0, 3),
        torchweft.ShapeError,
        r"argument 0 is Vi\(0, 3\) and Vj\(0, 3\)",
    ),
    "a reduction as operand": (
        lambda: Vi(X) + Vi(0, 3).sum(0),
        torchweft.ShapeError,
        r"operand is a reduction that was not called.*Call it",
    ),
    "a system's arguments": (
        lambda: Vi(0, 3).sqdist(Vj(1, 3)).solve(X[:, :1])(),
        torchweft.ShapeError,
        r"system is called with 0 arguments: it has 2",
    ),
    # Genred
    "genred's arguments": (
        lambda: genred(X),
        torchweft.ShapeError,
        r"Genred is called with 1.*2, x, y",
    ),
    "genred's shape": (
        lambda: genred(X, B),
        torchweft.ShapeError,
        r"y is \(7, 2\) but declared Vj\(3\): it must be \(\.\.\., N, 3\)",
    ),
    "a vector": (
        lambda: genred(X[:, 0], Y, aliases=["x = Vi(1)", "y = Vj(3)"], formula="x * y"),
        torchweft.ShapeError,
        r"x is \(5,\) but declared Vi\(1\).*x\[:, None\]",
    ),
    "genred's dtypes": (
        lambda: genred(X, Y.double()),
        torchweft.DTypeError,
        r"Genred is given y of shape \(7, 3\).*torch.float32 and torch.float64",
    ),
    "genred's rows": (
        lambda: genred(
            X, Y, Y[:6], formula="SqDist(x, y) * z", aliases=["x=Vi(3)", "y=Vj(3)", "z=Vj(3)"]
        ),
        torchweft.ShapeError,
        r"Genred is given z of shape \(6, 3\).*7 and 6 rows of j",
    ),
    "genred's reduction": (
        lambda: Genred("x", ["x = Vi(3)"], "Average"),
        torchweft.ShapeError,
        r"reduction is 'Average'",
    ),
    "genred's axis": (
        lambda: Genred("x", ["x = Vi(3)"], axis=2),
        torchweft.ShapeError,
        r"axis 2.*0.*1",
    ),
    "genred's K": (
        lambda: Genred("x", ["x = Vi(1)"], "ArgKMin"),
        torchweft.ShapeError,
        r"K = None",
    ),
    "syntax": (
        lambda: Genred("x +", ["x = Vi(3)"]),
        FormulaError,
        r"position 3 of the formula 'x \+'",
    ),
    "an alias": (lambda: Genred("x", ["x = Vk(3)"]), FormulaError, r"'x = Vk\(3\)'.*Vi"),
    "output": (
        lambda: generic_sum("x", "a = Pm(3)", "x = Vi(3)"),
        torchweft.ShapeError,
        r"'a = Pm\(3\)'",
    ),
    # out
    "out's shape": (
        lambda: genred(X, Y, out=torch.zeros(5, 2)),
        torchweft.ShapeError,
        r"out is \(5, 2\): it must be contiguous, of shape \(5, 1\)",
    ),
    "out's layout": (
        lambda: genred(X, Y, out=torch.zeros(5, 2)[:, :1]),
        torchweft.ShapeError,
        r"out is \(5, 1\), not contiguous",
    ),
    "out's dtype": (
        lambda: genred(X, Y, out=torch.zeros(5, 1).double()),
        torchweft.DTypeError,
        r"out is torch.float64 but the result torch.float32",
    ),
    "out's device": (
        lambda: genred(X, Y, out=torch.zeros(5, 1, device="meta")),
        torchweft.DeviceError,
        r"out is on meta but the result on cpu",
    ),
    "out's memory": (
        lambda: genred(X, Y, out=X.view(-1)[5:10].view(5, 1)),
        torchweft.ShapeError,
        r"out shares memory with an input",
    ),
    "dtypes of a reduction": (
        lambda: reduce("Sum", DISTANCE, (X, Y.double()), 1),
        torchweft.DTypeError,
        r"Sum is given variable 0 of torch.float32 and variable 1 of torch.float64.*to\(torch",
    ),
    "devices of a reduction": (
        lambda: reduce("Min", DISTANCE, (X, Y.to("meta")), 1),
        torchweft.DeviceError,
        r"Min is given variable 0 on cpu and variable 1 on meta.*\.to\('cpu'\)",
    ),
    "out of a pair": (
        lambda: KERNEL.min_argmin(1, out=torch.zeros(5, 1)),
        torchweft.ShapeError,
        r"out is given to Min_ArgMin, which returns 2",
    ),
}
BUILT_IN = {
    torchweft.ShapeError: ValueError,
    torchweft.DTypeError: TypeError,
    torchweft.DeviceError: RuntimeError,
    torchweft.IndexRangeError: IndexError,
    torchweft.BackendError: RuntimeError,
    FormulaError: ValueError,
}


@pytest.mark.parametrize("name", CASES)
def test_error(name):
    call, error, pattern = CASES[name]
    assert issubclass(error, BUILT_IN[error])
    with pytest.raises(error, match=re.compile(pattern, re.DOTALL)) as caught:
        call()
    text = str(caught.value)
    assert ": " in text
    assert text.endswith(".")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("options", [{"backend": "GPU"}, {"backend": "GPU_1D"}, {"device_id": 0}])
def test_a_gpu_that_is_not_there(options):
    with pytest.raises(torchweft.BackendError, match=r"needs a GPU, and there is none here"):
        KERNEL.sum(1, **options)


def test_unknown_keywords():
    asked = r"Sum is given the keyword 'speed': it takes .*precision.*backend.*\. Leave it out"
    with pytest.raises(TypeError, match=asked):
        KERNEL.sum(1, speed=3)
    with pytest.raises(TypeError, match=r"'speed': it takes backend, .*\. Leave it out"):
        KERNEL.sum(1, call=False)(speed=3)


def test_empty_sides():
    nothing = torch.zeros(0, 3)
    assert Vi(nothing).sqdist(Vj(Y)).sum(1).shape == (0, 1)
    empty = Vi(X).sqdist(Vj(nothing))
    assert empty.shape == (5, 0)
    assert (empty.sum(1) == 0).all()
    assert (empty.logsumexp(1) == -torch.inf).all()
    values, indices = empty.Kmin_argKmin(2, 1)
    assert (values == torch.inf).all()
    assert (indices == -1).all()
    assert (genred(X, nothing, reduction_op="ArgMin") == -1).all()
    assert (numpy.Vi(X.numpy()) - numpy.Vj(nothing.numpy())).sum(1).shape == (5, 3)
    assert (Pm(X[0]) * Vj(nothing)).sum(1).shape == (1, 3)
