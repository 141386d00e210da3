"""The stand-in for pykeops: every public name of the original is there or told, and what programs
compare with has the values of reductions.

Seen red with: a name left out of a module and of what it lacks, a kernel's slope of another kernel,
differences of j and i.
"""

import importlib

import numpy as np
import pytest
import torch

from tests.conftest import INTERPRETED
from torchweft import reductions
from torchweft.compat import keopscore, pykeops
from torchweft.compat.pykeops.common import lazy_tensor
from torchweft.compat.pykeops.common.gpu_utils import get_gpu_number
from torchweft.compat.pykeops.common.utils import axis2cat, cat2axis
from torchweft.compat.pykeops.numpy import utils
from torchweft.compat.pykeops.torch.utils import squared_distances, torch_kernel
from torchweft.errors import ShapeError
from torchweft.reductions import numpy as arrays
from torchweft.testing import assert_as_accurate

pytestmark = pytest.mark.skipif(INTERPRETED, reason="names do not depend on the backend")

REDUCTIONS = (
    "ComplexLazyTensor Genred KernelSolve LazyTensor Pm Vi Vj generic_argkmin generic_argmin "
    "generic_logsumexp generic_sum"
)
GENERIC = "generic_argkmin generic_argmin generic_logsumexp generic_sum"
LAZY = "ComplexLazyTensor LazyTensor Pm Var Vi Vj"
CLUSTER = (
    "cluster_centroids cluster_ranges cluster_ranges_centroids from_matrix grid_cluster "
    "sort_clusters swap_axes"
)
COMPILERS = (
    "pykeops_base pykeops_cpp_name pykeops_cuda pykeops_nvrtc_name pykeops_openmp python_includes"
)
NAMES = {
    "": (
        "clean_pykeops common config default_device_id get_build_folder numpy numpy_found "
        "pykeopsconfig set_build_folder set_verbose test_numpy_bindings test_torch_bindings torch "
        "torch_found verbose __version__",
        "check_health keops_get_build_folder pykeops_nvrtc_name show_cuda_status",
    ),
    "config": ("get_build_folder gpu_available numpy_found torch_found", COMPILERS),
    "torch": (REDUCTIONS, ""),
    "torch.cluster": (CLUSTER, ""),
    "torch.generic.generic_ops": (GENERIC, ""),
    "torch.generic.generic_red": (
        "Genred",
        "GenredAutograd GenredAutograd_base GenredAutograd_fun Genred_parameters "
        "check_AD_supported set_device",
    ),
    "torch.lazytensor.LazyTensor": (LAZY, ""),
    "torch.operations": ("KernelSolve", "KernelSolveAutograd"),
    "torch.utils": ("squared_distances torch_kernel", "is_on_device torchsolve torchtools"),
    "numpy": (REDUCTIONS, "GenredR"),
    "numpy.cluster": (CLUSTER, ""),
    "numpy.generic.generic_ops": (GENERIC, ""),
    "numpy.generic.generic_red": ("Genred", ""),
    "numpy.lazytensor.LazyTensor": (LAZY, ""),
    "numpy.operations": ("KernelSolve", ""),
    "numpy.utils": (
        "IsGpuAvailable WarmUpGpu chain_rules differences grad_np_kernel log_np_kernel "
        "log_sum_exp np_kernel np_kernel_sphere squared_distances",
        "numpytools",
    ),
    "common.gpu_utils": ("get_gpu_number", ""),
    "common.lazy_tensor": (
        "ComplexGenericLazyTensor GenericLazyTensor is_complex_lazytensor",
        "is_scalar_and_equals same_or_one_test",
    ),
    "common.operations": (
        "",
        "ConjugateGradientSolver KernelLinearSolver postprocess preprocess",
    ),
    "common.utils": (
        "axis2cat cat2axis",
        "WarmUpGpu c_type check_broadcasting get_tools max_tuple pyKeOps_Message pyKeOps_Print "
        "pyKeOps_Warning",
    ),
}
"""By module below pykeops: the original's names that are there, and those that are told."""


@pytest.mark.parametrize("module", NAMES)
def test_names_are_there_or_told(module):
    there, told = NAMES[module]
    found = importlib.import_module(f"{pykeops.__name__}.{module}".rstrip("."))
    assert not [name for name in there.split() if not hasattr(found, name)]
    for name in told.split():
        with pytest.raises(NotImplementedError, match=rf"pykeops.*\.{name} is asked for.*\. \w"):
            getattr(found, name)
    with pytest.raises(AttributeError, match="no attribute"):
        _ = found.an_unknown_name


def test_keopscores_flags_are_taken():
    keopscore.auto_factorize = False
    assert (keopscore.__version__, pykeops.__version__) == ("2.3", "2.3")
    with pytest.raises(NotImplementedError, match=r"keopscore\.cuda_config is asked for.*compiler"):
        _ = keopscore.cuda_config


def test_classes_are_those_of_reductions():
    assert pykeops.torch.LazyTensor is reductions.LazyTensor
    assert pykeops.numpy.Genred is arrays.Genred
    for made in (reductions.Vi(torch.ones(2, 1)), arrays.Vi(np.ones((2, 1)))):
        assert isinstance(made, lazy_tensor.GenericLazyTensor)
        assert [lazy_tensor.is_complex_lazytensor(x) for x in (made, made.exp1j())] == [False, True]
    labels = [module.cluster.grid_cluster for module in (pykeops.torch, pykeops.numpy)]
    line = np.array([[0.4], [0.6]])
    assert labels[0](torch.tensor(line), 0.5).tolist() == [0, 0]  # cells begin at min x
    assert labels[1](line, 0.5).tolist() == [0, 1]  # and at 0


def test_settings_and_the_machine(capsys):
    pykeops.test_numpy_bindings()
    pykeops.test_torch_bindings()
    printed = capsys.readouterr().out
    assert printed.splitlines() == [
        f"pyKeOps with {name} bindings is working!" for name in ("numpy", "torch")
    ]
    pykeops.set_verbose(False)
    assert pykeops.verbose is False
    pykeops.set_verbose(True)
    pykeops.clean_pykeops()
    pykeops.set_build_folder("elsewhere")
    utils.WarmUpGpu()
    assert get_gpu_number() == torch.cuda.device_count()
    assert pykeops.config.gpu_available == utils.IsGpuAvailable() == torch.cuda.is_available()
    assert [axis2cat(0), axis2cat(1), cat2axis(0), cat2axis(1)] == [1, 0, 1, 0]
    for wrong, text in ((axis2cat, "axis is 2: it must be 0"), (cat2axis, "cat is 2: it must be")):
        with pytest.raises(ShapeError, match=text):
            wrong(2)


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("gaussian", lambda r: (-(r**2)).exp()),
        ("laplacian", lambda r: (-r).exp()),
        ("cauchy", lambda r: 1 / (1 + r**2)),
        ("inverse_multiquadric", lambda r: (1 + r**2).rsqrt()),
    ],
)
def test_dense_kernels(name, profile):
    """Against the profile of |x − y| / s, and for the slope its derivative, by autograd."""
    torch.manual_seed(0)
    x, y, s = torch.randn(5, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64), 0.8
    q = torch.tensor(utils.squared_distances(x.numpy(), y.numpy()), requires_grad=True)
    exact = profile(q.sqrt() / s)
    (slope,) = torch.autograd.grad(exact.sum(), q)
    noise = torch.finfo(torch.float64).eps * torch.cat([exact, slope])  # a few roundings each
    given = x.numpy(), y.numpy(), s, name
    for found, expected in (
        (utils.np_kernel(*given), exact),
        (utils.log_np_kernel(*given), exact.log()),
        (utils.grad_np_kernel(*given), slope),
        (torch_kernel(x, y, s, name), exact),
        (squared_distances(x, y), q),
        (utils.squared_distances(*given[:2]), torch.cdist(x, y, compute_mode=EXACTLY).square()),
    ):
        scale = expected.detach().abs().max() / exact.detach().abs().max()
        assert_as_accurate(torch.as_tensor(found), expected.detach(), 8 * scale * noise.detach())


EXACTLY = "donot_use_mm_for_euclid_dist"


def test_dense_helpers_on_whole_numbers():
    x, y = np.array([[1.0, 2.0], [3.0, -1.0]]), np.array([[0.0, 1.0], [2.0, 2.0], [1.0, 0.0]])
    difference = utils.differences(x, y)
    assert (difference == np.moveaxis(x[:, None] - y[None], 2, 0)).all()
    weights, q, p = np.arange(6.0).reshape(2, 3), x[:, :1], y[:, 1:]
    expected = np.einsum("dij,ij,iv,jv->id", 2 * difference, weights, q, p)
    assert (utils.chain_rules(q, x, y, weights, p) == expected).all()
    assert (utils.log_sum_exp(np.zeros((2, 4)), axis=1) == np.log([4, 4])).all()
    unit = np.eye(2)
    assert (utils.np_kernel_sphere(unit, unit, 1.0, "binet") == unit).all()
    assert (utils.np_kernel_sphere(unit, -unit, 1.0, "linear") == -unit).all()
    for kernel, opposite in (("gaussian_unoriented", 1.0), ("gaussian_oriented", np.exp(-4.0))):
        assert utils.np_kernel_sphere(unit, -unit, 1.0, kernel)[0, 0] == opposite
