"""Collects and prints what operators report of a call: kernels, tiles, bytes, operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Explanation", "Launch", "explain", "record", "record_cost", "recording", "si"]


class Launch(NamedTuple):
    """One kernel of a call (or one CPU loop, or one chunked torch pass)."""

    backend: str
    kernel: str
    tile: dict[str, int | str]  # block sizes, warps, stages, precision
    programs: int  # grid size; CPU: parallel blocks
    workspace_bytes: int = 0  # memory beside inputs and outputs


class Explanation(NamedTuple):
    """The launches and costs of one call; `str()` of it is a readable report."""

    name: str
    launches: tuple[Launch, ...]
    bytes_min: int  # each input read once, each output written once
    flops: int

    def __str__(self) -> str:
        lines = [f"{self.name}: at least {si(self.bytes_min)}B moved, {si(self.flops)}FLOP"]
        for launch in self.launches:
            tile = " ".join(f"{key}={value}" for key, value in launch.tile.items())
            room = f", workspace {si(launch.workspace_bytes)}B" if launch.workspace_bytes else ""
            lines.append(
                f"  {launch.backend}: {launch.kernel} [{tile}] x {launch.programs} programs{room}"
            )
        return "\n".join(lines)


class _Recorder:
    """The launches and costs of the call that is being explained, if any."""

    launches: list[Launch] | None = None
    bytes_min = 0
    flops = 0


def recording() -> bool:
    """Whether a call is being explained; checked before a `Launch` is built."""
    return _Recorder.launches is not None


def record(launch: Launch) -> None:
    """Add a launch to the call that is being explained."""
    if _Recorder.launches is not None:
        _Recorder.launches.append(launch)


def record_cost(bytes_min: int, flops: int) -> None:
    """Add the compulsory bytes and the operations of one operation of the call."""
    _Recorder.bytes_min += bytes_min
    _Recorder.flops += flops


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Runs a call once and reports what it launches: kernels, tiles, backends, bytes, operations.

    Args:
        function: a function or module of torchweft, or one that calls them.
        *args: its arguments.
        **kwargs: its arguments by name.

    Returns:
        An `Explanation` with `launches` (backend, kernel, tile, programs, workspace), `bytes_min`,
        each input read once and each output written once, and `flops`; `print` shows it as a
        report.

    Raises:
        RuntimeError: inside another `explain`.

    Cost: one call, whose result is dropped.  Not for use from several threads at once.

    Example:
        >>> import torch, torchweft
        >>> x = torch.randn(8, 100, 16)
        >>> found = torchweft.explain(
        ...     torchweft.clifford.geometric_product, x, x, torchweft.clifford.Algebra((1, 1, 1))
        ... )
        >>> found.bytes_min == 3 * 4 * x.numel()  # x twice, and the result
        True
    """
    if recording():
        raise RuntimeError("explain inside explain: explain the inner call by itself")
    _Recorder.launches, _Recorder.bytes_min, _Recorder.flops = [], 0, 0
    try:
        function(*args, **kwargs)
        launches = tuple(_Recorder.launches)
    finally:
        _Recorder.launches = None
    name = getattr(function, "__name__", type(function).__name__)
    return Explanation(name, launches, _Recorder.bytes_min, _Recorder.flops)


def si(number: float) -> str:
    """Three digits and a prefix, before a unit: "4.1 m"."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0), ("m", 1e-3)):
        if abs(number) >= scale:
            return f"{number / scale:.3g} {prefix}"
    return f"{number * 1e6:.3g} µ" if number else "0 "
