"""Layers with tables that follow from their arguments, kept as buffers under e3nn's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchweft.errors import DTypeError
from torchweft.o3.irreps.wigner import working_dtype
from torchweft.o3.tensor_product.module import RowLayer

__all__ = ["TableLayer"]


class TableLayer(RowLayer):
    """A layer whose buffers are tables, rounded once from float64 whatever the dtype.

    A subclass returns its tables from `tables` and registers them when its arguments are set.
    After `.to` and its kin, and after a checkpoint, they are filled again; in a module of 16 bits
    they are float32.  A checkpoint with other tables is refused.
    """

    def tables(self) -> Mapping[str, Tensor]:
        """The tables by name, in float64 on the CPU; not to be changed."""
        raise NotImplementedError

    def register_tables(
        self, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        """Make the buffers; None: torch's default dtype and device."""
        like = torch.empty(0, dtype=dtype, device=device)
        for name, table in self.tables().items():
            self.register_buffer(name, _rounded(table, like))

    def as_tables(self, x: Tensor) -> Tensor:
        """The input in the dtype of the tables: 16 bits are widened, others must be the same."""
        dtype = next(self.buffers(recurse=False)).dtype
        if working_dtype(x.dtype) != dtype:
            raise DTypeError(
                f"x is {x.dtype} but {type(self).__name__} has tables in {dtype}: they must be the "
                "same. Call .to(x.dtype) on the layer: its tables are exact in any dtype."
            )
        return x.to(dtype)

    def as_input(self, z: Tensor, x: Tensor) -> Tensor:
        """A result in the dtype of the input, where that was widened."""
        return z if working_dtype(x.dtype) == x.dtype else z.to(x.dtype)

    def _apply(self, *args: Any, **options: Any) -> Any:
        super()._apply(*args, **options)  # type: ignore[no-untyped-call]
        self._fill(self.tables())
        return self

    def _fill(self, tables: Mapping[str, Tensor]) -> None:
        for name, table in tables.items():
            setattr(self, name, _rounded(table, getattr(self, name)))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        tables = self.tables()
        for name, table in tables.items():
            given = state_dict.get(prefix + name)
            if given is not None and given.shape == table.shape and not _alike(given, table):
                args[-1].append(
                    f"{prefix}{name} of the checkpoint is another table than {self!r} has: it was "
                    "saved by a layer with other arguments. Build the layer with those."
                )
        self._fill(tables)


def _rounded(table: Tensor, like: Tensor) -> Tensor:
    return table.to(like.device, working_dtype(like.dtype), copy=True)


def _alike(given: Tensor, table: Tensor) -> bool:
    """Whether a table of a checkpoint is this one, computed in its dtype."""
    if given.is_meta or not table.numel():
        return True
    error = (given.to("cpu", torch.float64) - table).abs().max()
    return bool(error <= torch.finfo(given.dtype).eps ** 0.5 * table.abs().max())
