"""The scripts of docs/migrate: `result` of each, in a dtype, from numbers that are drawn once."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from torchweft.core.default_dtype import default_dtype

__all__ = ["SCRIPTS", "result_of", "results"]

SCRIPTS = Path(__file__).parents[1] / "docs" / "migrate" / "scripts"


def result_of(script: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a script calls `result`, with `dtype` as the default and in the place of "float32"."""
    file = SCRIPTS / f"{script}.py"
    text = file.read_text("utf-8").replace('"float32"', repr(str(dtype).removeprefix("torch.")))
    names: dict[str, object] = {"__name__": "__main__"}
    with default_dtype(dtype), _drawn_in_float64():
        exec(compile(text, str(file), "exec"), names)
    result = names["result"]
    assert isinstance(result, Tensor)
    assert result.dtype == dtype
    return result.detach()


def results(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Of the script after in float32; of the script before in float64 and in float32."""
    exact, plain = result_of(f"{name}_before", torch.float64), result_of(f"{name}_before")
    return result_of(f"{name}_after"), exact, plain


@contextlib.contextmanager
def _drawn_in_float64() -> Iterator[None]:
    """Random numbers are those of float64, rounded: torch draws others in float32."""
    with contextlib.ExitStack() as stack:
        for name in ("rand", "randn"):
            stack.enter_context(patch.object(torch, name, _drawn(getattr(torch, name))))
        for name in ("normal_", "uniform_"):
            fill = _filled(getattr(Tensor, name))
            stack.enter_context(patch.object(Tensor, name, fill))
        yield


def _drawn(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(draw)
    def drawn(*shape: int, dtype: torch.dtype | None = None, **options: object) -> Tensor:
        wide = draw(*shape, dtype=torch.float64, **options)
        return wide.to(dtype or torch.get_default_dtype())

    return drawn


def _filled(fill: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(fill)
    def filled(tensor: Tensor, *given: float, **options: object) -> Tensor:
        return tensor.copy_(fill(tensor.detach().double(), *given, **options))

    return filled
