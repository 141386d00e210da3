"""Containers and modules on features, with spconv's names."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn

from torchweft.compat.lacking import lacking
from torchweft.compat.spconv.pytorch.core import SparseConvTensor
from torchweft.errors import ShapeError
from torchweft.voxels.convolution.epilogue import Epilogue
from torchweft.voxels.norms.functions import batch_norm
from torchweft.voxels.norms.modules import taken

__all__ = [
    "RemoveGrid",
    "SparseBatchNorm",
    "SparseIdentity",
    "SparseModule",
    "SparseReLU",
    "SparseSequential",
    "SparseSyncBatchNorm",
    "ToDense",
    "assign_name_for_sparse_modules",
    "is_sparse_conv",
    "is_spconv_module",
]


class SparseModule(nn.Module):
    """A module that takes a SparseConvTensor; in SparseSequential others act on its features."""

    convolves = False

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self._sparse_unique_name = ""

    def takes_norm(self) -> bool:
        """Whether `followed` may take less time than the modules one after the other."""
        return False

    def followed(
        self, input: SparseConvTensor, norm: nn.Module | None = None, activation: str | None = None
    ) -> SparseConvTensor:
        """act(norm(self(input))), where the norm is left out of a result without voxels.

        Args:
            input: the voxels.
            norm: torch's BatchNorm1d, or a module with its attributes.
            activation: a name of `voxels.convolution.epilogue.ACTIVATIONS`.
        """
        outputs: SparseConvTensor = self(input)
        return normalised(norm, outputs, activation) if len(outputs.indices) else outputs


class SparseSequential(SparseModule):
    """Modules one after the other: sparse ones take the tensor, all others its features.

    A batch norm and an activation after a convolution run as one pass; in inference the convolution
    computes them in its own.  A module with hooks runs by itself.

    Args:
        *args: modules, or one OrderedDict of them.
        **kwargs: modules by name.

    Raises:
        ShapeError: a name that is taken.
    """

    def __init__(self, *args: Any, **kwargs: nn.Module) -> None:
        super().__init__()
        ordered = len(args) == 1 and isinstance(args[0], OrderedDict)
        named = args[0] if ordered else {str(i): module for i, module in enumerate(args)}
        for name, module in [*named.items(), *kwargs.items()]:
            self.add(module, name)

    def __getitem__(self, index: int) -> nn.Module:
        return list(self._modules.values())[index]  # type: ignore[return-value]

    def __len__(self) -> int:
        return len(self._modules)

    def add(self, module: nn.Module, name: str | None = None) -> None:
        """Append a module; None names it by its place."""
        name = str(len(self)) if name is None else name
        if name in self._modules:
            raise ShapeError(
                f"a second module was named {name!r}: names in SparseSequential must be distinct. "
                "Pass another name."
            )
        self.add_module(name, module)

    def forward(self, input: Any) -> Any:
        """The result of the last module; modules on features are left out where there is none."""
        rest = [module for module in self._modules.values() if module is not None][::-1]
        while rest:
            if not isinstance(input, SparseConvTensor):
                input = rest.pop()(input)
                continue
            given: dict[str, Any] = {}
            if len(input.indices):
                module, given = taken(rest, _takes_norm, (SparseBatchNorm,), (SparseReLU,))
            else:
                module = rest.pop()
            if given and isinstance(module, SparseModule):
                input = module.followed(input, **given)
            elif given:
                input = normalised(module, input, **given)
            elif is_spconv_module(module):
                input = module(input)
            elif len(input.indices):
                input = input.replace_feature(module(input.features))
        return input


def _takes_norm(module: nn.Module) -> bool:
    return isinstance(module, SparseModule) and module.takes_norm()


def normalised(
    norm: nn.Module | None, input: SparseConvTensor, activation: str | None = None
) -> SparseConvTensor:
    """act(norm(input)) as a pass of its own."""
    if norm is None:
        return input.replace_feature(Epilogue(activation=activation)(input.features))
    valid = None if input.kept is None else input.kept.num_unpadded
    feats = batch_norm(norm, input.features, activation=activation, valid=valid)
    return input.replace_feature(feats)


class _OnFeatures:
    """Makes a module of torch take a SparseConvTensor as well."""

    def forward(self, input: Any) -> Any:
        if isinstance(input, SparseConvTensor):
            return input.replace_feature(super().forward(input.features))  # type: ignore[misc]
        return super().forward(input)  # type: ignore[misc]


class SparseBatchNorm(_OnFeatures, nn.BatchNorm1d):
    """torch's BatchNorm1d over all voxels, on a tensor or on features."""


class SparseSyncBatchNorm(_OnFeatures, nn.SyncBatchNorm):
    """torch's SyncBatchNorm, on a tensor or on features."""


class SparseReLU(_OnFeatures, nn.ReLU):
    """torch's ReLU, on a tensor or on features."""


class SparseIdentity(_OnFeatures, nn.Identity):
    """torch's Identity, on a tensor or on features."""


class ToDense(SparseModule):
    """(batch, C, *spatial_shape)."""

    def forward(self, x: SparseConvTensor) -> Any:
        """The dense tensor."""
        return x.dense()


class RemoveGrid(SparseModule):
    """Sets the tensor's grid to None."""

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        """The same tensor."""
        x.grid = None
        return x


def is_spconv_module(module: object) -> bool:
    """Whether SparseSequential gives it the tensor rather than the features."""
    return isinstance(module, SparseModule | SparseBatchNorm | SparseReLU)


def is_sparse_conv(module: object) -> bool:
    """Whether it is a convolution of this stand-in."""
    return isinstance(module, SparseModule) and module.convolves


def assign_name_for_sparse_modules(module: nn.Module) -> None:
    """Give every SparseModule its name in the network."""
    for name, found in module.named_modules():
        if isinstance(found, SparseModule):
            found._sparse_unique_name = name


__getattr__ = lacking(
    __name__,
    dict.fromkeys(("PrintCurrentTime", "PrintTensorMeta"), "Print from a hook of the module."),
)
