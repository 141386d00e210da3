"""Stand-ins by the names of their originals: install, uninstall, and the command for programs.

Each runs in a process of its own, where nothing was imported before.
Seen red with: a finder behind the path's, modules run twice, sys.argv left as the command's.
"""

import re
import subprocess
import sys
import textwrap

import pytest

import torchweft
from torchweft.compat.__main__ import main
from torchweft.errors import WeftError


def run(*arguments, cwd=None, returncode=0):
    result = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=cwd
    )
    assert result.returncode == returncode, result.stderr
    return result.stdout + result.stderr


def run_code(code, returncode=0):
    return run("-c", textwrap.dedent(code), returncode=returncode)


def test_the_names_that_there_are():
    names = torchweft.compat.names()
    assert {"MinkowskiEngine", "spconv", "torchsparse"} <= set(names)
    listed = re.escape(", ".join(names))
    with pytest.raises(WeftError, match=rf"'spcnov' has no stand-in: there are {listed}\. Pass"):
        torchweft.compat.install("spcnov")
    with pytest.raises(WeftError, match="'torch' has no stand-in"):
        torchweft.compat.uninstall("torch")


def test_installed_names_are_the_same_modules():
    printed = run_code(
        """
        import sys, torchweft
        assert not [n for n in sys.modules if n.startswith("torchweft.compat")]
        torchweft.compat.install("spconv")
        assert "torchweft.compat.spconv" not in sys.modules
        import spconv, spconv.pytorch as sp, cumm.tensorview as tv
        from spconv.pytorch.utils import gather_features_by_pc_voxel_id
        import torchweft.compat.spconv.pytorch as own
        assert sp is own is torchweft.compat.spconv.pytorch is spconv.pytorch
        assert sp.__name__ == sp.__spec__.name == "torchweft.compat.spconv.pytorch"
        assert sys.modules["spconv.pytorch"] is sys.modules["torchweft.compat.spconv.pytorch"]
        assert sp.SubMConv3d is own.conv.SubMConv3d
        torchweft.compat.install("spconv")  # again changes nothing
        assert len([f for f in sys.meta_path if type(f).__module__.startswith("torchweft")]) == 1
        import numpy
        assert tv.from_numpy(numpy.ones(3)).numpy().sum() == 3
        try:
            import spconv.pytorch.hash
        except ImportError as error:
            print(error)
        torchweft.compat.uninstall("spconv")
        import importlib.util
        assert not [n for n in sys.modules if n.split(".")[0] in ("spconv", "cumm")]
        assert not [f for f in sys.meta_path if type(f).__module__.startswith("torchweft")]
        assert own.SubMConv3d(1, 1, 1) is not None
        """
    )
    assert "has no module spconv.pytorch.hash" in printed
    assert "uninstall('spconv') for the original" in printed


def test_torchsparses_paths():
    """By which programs import; names below them are the modules'."""
    run_code(
        """
        import torchweft
        torchweft.compat.install("torchsparse")
        import torchsparse, torchsparse.nn as spnn, torchsparse.nn.functional as F
        from torchsparse import PointTensor, SparseTensor, backends
        from torchsparse.backbones import SparseResNet21D, SparseResUNet42
        from torchsparse.nn.functional.devoxelize import calc_ti_weights
        from torchsparse.nn.utils import fapply, get_kernel_offsets
        from torchsparse.tensor import SparseTensor as same
        from torchsparse.utils import make_ntuple, make_tensor
        from torchsparse.utils.collate import sparse_collate, sparse_collate_fn
        from torchsparse.utils.quantize import sparse_quantize
        from torchsparse.utils.tensor_cache import TensorCache, clear_global_tensor_cache
        import torchweft.compat.torchsparse.nn as own
        assert same is SparseTensor is torchsparse.SparseTensor
        assert spnn.Conv3d is own.Conv3d and F.calc_ti_weights is calc_ti_weights
        assert F.conv_config.get_default_conv_config() is F.get_default_conv_config()
        assert isinstance(SparseTensor(None, None)._caches, TensorCache)
        assert torchsparse.__version__ == "2.1.0"
        """
    )


def test_an_original_that_was_imported_is_not_replaced(tmp_path):
    (tmp_path / "spconv.py").write_text("ORIGINAL = True\n")
    printed = run_code(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import torchweft
        torchweft.compat.install("spconv")
        import spconv
        assert not hasattr(spconv, "ORIGINAL")  # the stand-in, though the original is on the path
        torchweft.compat.uninstall("spconv")
        import spconv
        assert spconv.ORIGINAL
        torchweft.compat.install("spconv")
        """,
        returncode=1,
    )
    assert "WeftError: spconv was imported already, from" in printed
    assert "before the first `import spconv`" in printed


SCRIPT = """
import sys
import helper
import spconv.pytorch as spconv
print(__name__, sys.argv[1:], helper.__file__ is not None, spconv.__name__)
"""


@pytest.mark.parametrize("module", [False, True])
def test_programs_run_unmodified(module, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("")
    program = ["-m", "script"] if module else [str(tmp_path / "script.py")]
    cwd = tmp_path if module else None
    printed = run("-m", "torchweft.compat", "spconv", "--", *program, "--epochs", "3", cwd=cwd)
    assert printed.strip() == ("__main__ ['--epochs', '3'] True torchweft.compat.spconv.pytorch")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], f"nothing was given: a library ({', '.join(torchweft.compat.names())}) and a program"),
        (["spconv"], "spconv was given without --, which must stand between"),
        (["spconv", "a.py"], "spconv a.py was given without --"),
        (["spconv", "--"], "spconv -- was given: a library"),
        (["spconv", "--", "nofile.py"], "nofile.py was given: it must be the path of a script"),
        (["--", "script.py"], "-- script.py was given"),
        (["spcnov", "--", __file__], "'spcnov' has no stand-in"),
    ],
)
def test_the_command_says_what_it_needs(arguments, text):
    with pytest.raises(SystemExit, match=re.escape(text)):
        main(arguments)
