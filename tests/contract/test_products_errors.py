"""Bad input raises the right class, names the argument and the offending value, says what to do.

Seen red with: the check of seg's order, of negative indices, of the last bound, of out_size, and of
the channels taken out, one at a time; a plan kept although its table has changed.
"""

import functools
import re

import pytest
import torch

import torchweft
from tests.conftest import BACKENDS
from torchweft import products

pytestmark = [pytest.mark.kernels, pytest.mark.parametrize("backend", BACKENDS)]

X, Y = torch.zeros(3, 5, 8), torch.zeros(3, 4, 8)
INDEX1, INDEX2 = torch.tensor([0, 4, 2, 1, 0, 3]), torch.tensor([3, 0, 1, 2, 2, 0])
TABLES = {"index1": INDEX1, "index2": INDEX2}
SEG = torch.tensor([0, 2, 6])


def call(backend, x=X, y=Y, op="mul", **options):
    function = getattr(products, f"indexed_{op}_scale_gather")
    return function(x, y, **(TABLES | options), backend=backend)


SHAPES = {
    "rank of input1": ({"x": torch.zeros(8)}, r"input1 is \(8,\).*\(N, rows, C\)"),
    "rank of input2": ({"y": torch.zeros(1, 3, 4, 8)}, r"input2 is \(1, 3, 4, 8\)"),
    "batch": ({"y": torch.zeros(2, 4, 8)}, r"input1 has N = 3 and input2 has N = 2"),
    "channels": ({"y": torch.zeros(3, 4, 7)}, r"\(3, 5, 8\).*\(3, 4, 7\).*8 and 7"),
    "one channel": ({"y": torch.zeros(3, 4, 1)}, r"8 and 1 channels differ"),
    "index lengths": ({"index2": INDEX2[:5]}, r"index2 has 5 .* 6 terms"),
    "scale length": ({"scale": torch.zeros(7)}, r"scale has 7 .* 6 terms"),
    "rank of index1": ({"index1": INDEX1[None]}, r"index1 is \(1, 6\)"),
    "rank of scale": ({"scale": torch.zeros(6, 1)}, r"scale is \(6, 1\)"),
    "rank of seg": ({"seg": SEG[None]}, r"seg is \(1, 3\)"),
    "seg without bounds": ({"seg": SEG[:0]}, r"seg is \(0,\).*at least one bound"),
    "gather without seg": ({"gather_index": INDEX1}, r"gather_index \(6 entries\).*without seg"),
    "index_out of terms": ({"index_out": INDEX1[:4]}, r"index_out has 4 .* 6 segments"),
    "index_out of segments": ({"index_out": INDEX1, "seg": SEG}, r"index_out has 6 .* 2 segments"),
    "out_size below segments": ({"seg": SEG, "out_size": 1}, r"out_size is 1 .* 2 segments"),
    "out_size below terms": ({"out_size": 5}, r"out_size is 5 .* 6 segments \(or terms\)"),
    "negative out_size": ({"out_size": -1, "index_out": INDEX1}, r"out_size is -1"),
    "rows below terms": ({"index1": None}, r"input1 has 5 rows .* 6 terms"),
    "rows that differ": ({"index1": None, "index2": None}, r"5 rows and input2 has 4"),
    "out": ({"out": torch.zeros(3, 5, 8)}, r"out is \(3, 5, 8\).*\(3, 6, 8\)"),
}

DTYPES = {
    "two dtypes": ({"y": Y.double()}, r"input1 is torch.float32 and input2 is torch.float64"),
    "integers": ({"x": X.long(), "y": Y.long()}, r"input1 is torch.int64.*float64"),
    "complex": ({"x": X.to(torch.complex64)}, r"input1 is torch.complex64"),
    "float index1": ({"index1": INDEX1.float()}, r"index1 is torch.float32.*index1.long\(\)"),
    "NaN index2": ({"index2": torch.full((6,), float("nan"))}, r"index2 is torch.float32"),
    "bool gather_index": ({"gather_index": INDEX1 > 1, "seg": SEG}, r"gather_index is torch.bool"),
    "int16 seg": ({"seg": SEG.short()}, r"seg is torch.int16"),
    "uint8 index_out": ({"index_out": INDEX1.byte()}, r"index_out is torch.uint8"),
    "scale": ({"scale": torch.zeros(6).half()}, r"scale is torch.float16 and input1 is torch.fl"),
    "integer scale": ({"scale": INDEX1}, r"scale is torch.int64"),
    "list of indices": ({"index1": [0, 1]}, r"index1 is a list.*as_tensor"),
    "input None": ({"y": None}, r"input2 is (None|a NoneType)"),
    "array": ({"x": X.numpy()}, r"input1 is a ndarray.*as_tensor"),
    "out": ({"out": torch.zeros(3, 6, 8).double()}, r"out is torch.float64"),
    "out with gradients": (
        {"x": X.clone().requires_grad_(), "out": torch.zeros(3, 6, 8)},
        r"out= was given to a call that records gradients",
    ),
}

VALUES = {
    "index1 past the rows": ({"index1": INDEX1 + 1}, r"index1\[1\] is 5 .* 5 rows of input1"),
    "index2 past the rows": ({"index2": INDEX2 + 2}, r"index2\[0\] is 5 .* 4 rows of input2"),
    "negative index1": ({"index1": INDEX1 - 1}, r"index1\[0\] is -1"),
    "far index": ({"index1": INDEX1 + 2**40}, r"index1\[\d\] is 10995116277\d\d"),
    "seg decreases": ({"seg": torch.tensor([0, 4, 3, 6])}, r"seg\[1\] = 4 to seg\[2\] = 3"),
    "seg past the terms": ({"seg": torch.tensor([0, 7])}, r"seg\[1\] is 7 .* 6 terms"),
    "negative seg": ({"seg": torch.tensor([-1, 6])}, r"seg\[0\] is -1"),
    "seg past gather_index": (
        {"seg": torch.tensor([0, 4]), "gather_index": INDEX1[:3]},
        r"seg\[1\] is 4 .* 3 entries of gather_index",
    ),
    "gather_index past the terms": (
        {"seg": SEG, "gather_index": INDEX1 + 2},
        r"gather_index\[1\] is 6 .* 6 terms",
    ),
    "index_out past out_size": (
        {"index_out": INDEX1, "out_size": 4},
        r"index_out\[1\] is 4 .* 4 output rows",
    ),
    "negative index_out": ({"index_out": INDEX1 - 1}, r"index_out\[0\] is -1"),
}


def raises(error, builtin, pattern):
    assert issubclass(error, torchweft.WeftError)
    assert issubclass(error, builtin)
    return pytest.raises(error, match=re.compile(pattern, re.DOTALL))


@pytest.mark.parametrize(("options", "pattern"), SHAPES.values(), ids=SHAPES)
def test_shapes(options, pattern, backend):
    with raises(torchweft.ShapeError, ValueError, pattern):
        call(backend, **options)


@pytest.mark.parametrize(("options", "pattern"), DTYPES.values(), ids=DTYPES)
def test_dtypes(options, pattern, backend):
    with raises(torchweft.DTypeError, TypeError, pattern):
        call(backend, **options)


def test_a_compiled_call_is_checked_too(backend):
    """Else a loop reads past its inputs."""
    compiled = torch.compile(functools.partial(call, backend), backend="eager")
    with raises(torchweft.ShapeError, ValueError, "8 and 7 channels differ"):
        compiled(y=Y[..., :7])
    with raises(torchweft.DTypeError, TypeError, "input2 is torch.float64"):
        compiled(y=Y.double())
    with raises(torchweft.DTypeError, TypeError, "input2 is None"):
        compiled(y=None)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("options", "pattern"), VALUES.values(), ids=VALUES)
def test_values(options, pattern, dtype, backend):
    if dtype == torch.int32:
        if any(int(t.max()) >= 2**31 for t in options.values() if isinstance(t, torch.Tensor)):
            return
        options = {k: t.int() if isinstance(t, torch.Tensor) else t for k, t in options.items()}
    with raises(torchweft.IndexRangeError, IndexError, pattern):
        call(backend, **options)


def test_values_are_checked_again_after_a_change_in_place(backend):
    index1 = INDEX1.clone()
    call(backend, index1=index1)
    index1[2] = 9
    with raises(torchweft.IndexRangeError, IndexError, r"index1\[2\] is 9"):
        call(backend, index1=index1)
    index1[2] = 0
    call(backend, index1=index1)


@pytest.mark.parametrize("name", ["y", "index1", "scale", "seg"])
def test_devices(name, backend):
    given = {"y": Y, "index1": INDEX1, "scale": torch.zeros(6), "seg": SEG}[name].to("meta")
    public = "input2" if name == "y" else name
    with raises(torchweft.DeviceError, RuntimeError, rf"{public} is on meta and input1 on cpu"):
        call(backend, **{name: given})


def test_a_matrix_that_does_not_fit_its_vector(backend):
    with raises(torchweft.ShapeError, ValueError, r"vecmat needs .*8 and 7"):
        call(backend, y=torch.zeros(3, 4, 7, 2), op="vecmat")
    with raises(torchweft.ShapeError, ValueError, r"mat_t_vec needs .*7 and 8"):
        call(backend, x=torch.zeros(3, 5, 7, 2), op="mat_t_vec")


def test_every_text_says_what_to_do(backend):
    advice = re.compile(
        r"(Pass|Convert|Reshape|Flatten|Sort|Correct|Move|Drop|Leave|Build|Or pass) .*\.$"
    )
    for options, _ in [*SHAPES.values(), *DTYPES.values(), *VALUES.values()]:
        with pytest.raises(torchweft.WeftError) as caught:
            call(backend, **options)
        assert advice.search(str(caught.value)), str(caught.value)


def test_infos_are_checked_where_they_are_built(backend):
    with raises(torchweft.ShapeError, ValueError, r"index1, index2 and index are all missing"):
        products.sparse_product_info()
    with raises(torchweft.ShapeError, ValueError, r"index2 has 2 entries and index1 has 3"):
        products.sparse_product_info([0, 1, 2], [0, 1])
    with raises(torchweft.ShapeError, ValueError, r"scale has 2 entries"):
        products.sparse_product_info([0, 1, 2], scale=[1.0, 2.0])
    with raises(torchweft.DTypeError, TypeError, r"index1 holds torch.float32"):
        products.sparse_product_info([0.0, 1.0])
    with raises(torchweft.IndexRangeError, IndexError, r"index\[1\] is -1"):
        products.sparse_product_info(index=[0, -1])
    with raises(torchweft.IndexRangeError, IndexError, r"out_size .* is 2 .* 3 rows"):
        products.sparse_product_info(index=[0, 2], out_size=2)
    with raises(torchweft.DTypeError, TypeError, r"info_fwd is a tuple"):
        products.sparse_mul(X, Y, (None, INDEX1, INDEX2))


def test_backends_that_cannot_serve(backend):
    with raises(torchweft.BackendError, RuntimeError, r"backend='cuda'.*there is no such backend"):
        call("cuda")
    if backend != "triton":
        with raises(torchweft.BackendError, RuntimeError, r"backend='triton'.*triton serves GPU"):
            call("triton")


def test_infos_of_gradients_must_fit_their_inputs(backend):
    forward, *_ = products.sparse_product_infos([0, 1], [0, 1], [0, 0], in1_size=2, in2_size=2)
    wrong = products.SparseProductInfo(out_size=X.shape[0])  # N, not the rows of the input
    with raises(
        torchweft.ShapeError, ValueError, r"info_bwd1 gives \d+ rows .* has \d+: the gradient"
    ):
        products.sparse_mul(X, Y, forward, wrong, backend=backend)
    with raises(
        torchweft.ShapeError, ValueError, r"info_bwd2 gives \d+ rows .* has \d+: the gradient"
    ):
        products.sparse_mul(X, Y, forward, None, wrong, backend=backend)


def test_tables_cannot_be_mapped(backend):
    x = torch.ones(3, 4)
    index = torch.tensor([[0, 1], [2, 2]])
    with raises(torchweft.ShapeError, ValueError, r"torch\.vmap.*Pass in_dims=None"):
        torch.vmap(lambda i: products.indexed_mul(x, x, i, i, backend=backend))(index)


INFOS = {
    "text": ({"index1": "ab"}, torchweft.DTypeError, r"index1 is 'ab': it must be a tensor"),
    "sparse index": (
        {"index1": INDEX1.to_sparse()},
        torchweft.DTypeError,
        r"index1 has the layout",
    ),
    "matrix scale": ({"scale": torch.ones(6, 1)}, torchweft.ShapeError, r"scale is \(6, 1\) of"),
    "complex scale": ({"scale": [1j] * 6}, torchweft.ShapeError, r"complex128: .* real numbers"),
    "sparse scale": ({"scale": torch.ones(6).to_sparse()}, torchweft.DTypeError, r"scale has the"),
    "text scale": ({"scale": "ab"}, torchweft.DTypeError, r"scale is .*a list of numbers"),
    "text size": ({"out_size": "6"}, torchweft.DTypeError, r"out_size .* is '6': .* an integer"),
}


@pytest.mark.parametrize("name", INFOS)
def test_wrong_tables_of_an_info(backend, name):
    """Seen red with: bare errors of torch, and complex scales taken, as before."""
    options, error, match = INFOS[name]
    with pytest.raises(error, match=match):
        products.sparse_product_info(**(TABLES | {"index": INDEX1} | options))
