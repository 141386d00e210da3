"""Every public name and method of pykeops' torch and numpy modules, and nothing of pykeops itself.

Seen red with: a method left out, a name taken off __all__.
"""

import inspect

import pytest
import torch

from torchweft import reductions
from torchweft.reductions import cluster, numpy

MODULE = (
    "Genred KernelSolve LazyTensor ComplexLazyTensor Vi Vj Pm Var "
    "generic_sum generic_logsumexp generic_argmin generic_argkmin"
)
CLUSTER = (
    "grid_cluster sort_clusters cluster_ranges cluster_centroids cluster_ranges_centroids "
    "from_matrix swap_axes"
)
METHODS = (
    "abs exp log xlogx cos sin sinxdivx sinc asin acos atan atan2 sqrt rsqrt power square sign "
    "step relu clamp ifelse mod round sqnorm2 norm2 norm normalize sqdist weightedsqnorm "
    "weightedsqdist softdtw_sqdist elem extract one_hot bspline concat concatenate cat "
    "matvecmult vecmatmult tensorprod keops_tensordot keops_kron grad diff factorize "
    "auto_factorize grad_matrix trace_operator divergence laplacian sum sum_reduction logsumexp "
    "logsumexp_reduction sumsoftmaxweight sumsoftmaxweight_reduction min min_reduction argmin "
    "argmin_reduction min_argmin min_argmin_reduction max max_reduction argmax argmax_reduction "
    "max_argmax max_argmax_reduction Kmin Kmin_reduction argKmin argKmin_reduction Kmin_argKmin "
    "Kmin_argKmin_reduction t T matvec rmatvec dim nbatchdims shape _shape dtype ranges backend "
    "real2complex imag2complex exp1j reduction solve"
)
OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv or ror abs neg pow eq ne lt gt le ge getitem "
    "matmul"
)
COMPLEX = ("real", "imag", "angle", "conj", "abs", "exp", "sum")


@pytest.mark.parametrize("name", MODULE.split())
def test_names(name):
    for module in (reductions, numpy):
        assert name in module.__all__
        assert getattr(module, name).__doc__


@pytest.mark.parametrize("name", CLUSTER.split())
def test_cluster(name):
    found = getattr(numpy.cluster, name)
    assert (found is getattr(cluster, name)) == (name != "grid_cluster")  # which begins at 0 there
    assert found.__doc__


@pytest.mark.parametrize("module", [reductions, numpy])
def test_methods(module):
    lazy = module.LazyTensor(2.5)
    assert not [name for name in METHODS.split() if not hasattr(lazy, name)]
    assert not [name for name in OPERATORS.split() if not hasattr(type(lazy), f"__{name}__")]
    turned = module.LazyTensor([1j, 2.0])
    assert isinstance(turned, module.ComplexLazyTensor)
    assert not [name for name in COMPLEX if not hasattr(turned, name)]


def test_methods_are_documented():
    public = inspect.getmembers(reductions.LazyTensor, inspect.isfunction)
    assert not [name for name, f in public if not name.startswith("_") and not f.__doc__]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("power", "other"),
        ("clamp", "other1 other2"),
        ("ifelse", "other1 other2"),
        ("round", "other"),
        ("weightedsqnorm", "other"),
        ("weightedsqdist", "g s"),
        ("elem", "i"),
        ("extract", "i d"),
        ("one_hot", "D"),
        ("grad", "other gradin"),
        ("diff", "other diffin"),
        ("factorize", "other"),
        ("grad_matrix", "other"),
        ("trace_operator", "var"),
        ("divergence", "var"),
        ("laplacian", "var"),
        ("mod", "modulus offset"),
        ("bspline", "x k"),
        ("keops_tensordot", "other dimfa dimfb contfa contfb args"),
        ("keops_kron", "other dimfself dimfother"),
        ("softdtw_sqdist", "other gamma"),
        ("solve", "other var call alpha eps options"),
        ("logsumexp", "axis dim weight options"),
        ("sumsoftmaxweight", "weight axis dim options"),
        ("Kmin", "K axis dim options"),
        ("reduction", "reduction_op other opt_arg axis dim call options"),
    ],
)
def test_signature(name, parameters):
    own = list(inspect.signature(getattr(reductions.LazyTensor, name)).parameters)
    assert " ".join(own[1:]) == parameters


def test_signatures_of_static_methods():
    for name, parameters in (("concatenate", "tuple_of_lt axis"), ("cat", "tuple_of_lt dim")):
        own = inspect.signature(getattr(reductions.LazyTensor, name)).parameters
        assert " ".join(own) == parameters


def test_an_object_is_true_and_has_its_inner_shape():
    """Programs ask `if x:` for `is not None`, and tell lazy tensors by `_shape`."""
    x, y = reductions.Vi(torch.ones(5, 3)), reductions.Vj(torch.ones(7, 3))
    assert bool(x == y)
    assert x.sqdist(y).shape == (5, 7)
    assert x.sqdist(y)._shape == (5, 7, 1)
    turned = (x | y).exp1j()  # one complex number, of two components
    assert (turned.shape, turned._shape) == ((5, 7), (5, 7, 2))


def test_what_is_called_later_is_its_callfun():
    x, y, b = reductions.Vi(0, 1), reductions.Vj(1, 1), reductions.Vj(2, 1)
    summed = (x - y).sum(axis=1, call=False)
    solved = (-x.sqdist(y)).exp().solve(b, call=False)
    assert summed.callfun is summed
    assert solved.callfun is solved
