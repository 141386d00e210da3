"""MACE's training program with models by torchweft.

    python -m torchweft.o3.adapters.mace_run_train --name=… --train_file=…

Arguments, files and results are those of mace_run_train.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn

from torchweft.errors import BackendError, WeftError
from torchweft.o3.adapters.mace import from_mace

__all__ = ["main"]

REFUSED = ("enable_cueq", "only_cueq", "enable_oeq", "lora")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as mace_run_train does; the model that trains is from_mace's.

    Args:
        arguments: of mace_run_train; None: those of the command line.

    Raises:
        BackendError: MACE is not installed, or too old to convert a model before it trains.
        WeftError: an argument that would convert the model to another library, or `lora`.

    MACE turns a model before training and back before it is saved where OpenEquivariance is asked
    for; torchweft's conversion stands there, so MACE's log says "OEQ".  Models and checkpoints that
    are written hold MACE's own modules and names: what reads those of mace_run_train reads them.
    """
    run_train = _run_train()
    args = run_train.tools.build_default_arg_parser().parse_args(arguments)
    given = [f"--{name}" for name in REFUSED if getattr(args, name, False)]
    if given:
        raise WeftError(
            f"mace_run_train was given {', '.join(given)}: torchweft converts models with e3nn's "
            "layers, not those that another library has converted. Leave these arguments out."
        )
    args.enable_oeq = True
    conversion = _Conversion()
    settings = run_train.extract_config_mace_model  # reads attributes of e3nn's layers
    with mock.patch.multiple(
        run_train,
        run_e3nn_to_oeq=conversion.there,
        run_oeq_to_e3nn=conversion.back,
        extract_config_mace_model=lambda model: settings(conversion.back(model)),
    ):
        run_train.run(args)


def _run_train() -> Any:
    try:
        from mace.cli import run_train
    except ImportError as error:
        raise BackendError(
            f"mace_run_train needs MACE, which cannot be imported ({error}): "
            "pip install 'mace-torch>=0.3.16'."
        ) from error
    if not hasattr(run_train, "run_oeq_to_e3nn"):
        raise BackendError(
            "this version of MACE does not convert models in mace_run_train: version 0.3.16 does. "
            "pip install 'mace-torch>=0.3.16'."
        )
    return run_train


class _Conversion:
    """A model's conversion, and the original with the values of the converted model."""

    def there(self, model: nn.Module, device: object) -> nn.Module:
        """The model by torchweft; the original stays as it was built."""
        self._original = model
        return from_mace(copy.deepcopy(model))

    def back(self, model: nn.Module, device: object = None) -> nn.Module:
        """The original with the parameters of a converted model, which have the same names."""
        values = dict(model.named_parameters())
        with torch.no_grad():
            for name, parameter in self._original.named_parameters():
                parameter.copy_(values[name])
        return self._original


if __name__ == "__main__":
    main()
