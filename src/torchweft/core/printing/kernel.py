"""The frame that printed kernels share: the text around bodies, in Triton or in Gluon.

    frame = Frame(gluon=True, wide=False)
    frame.module(title, frame.function("scale", ["x_ptr", "rows"], body, free=["rows"]))

A family prints the body of a kernel, the frame spells what differs between the two languages.
Gluon names the layout of each tile, which Triton would search for: large kernels compile in seconds
instead of minutes.  Triton serves the interpreter and GPUs of other vendors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torchweft.core.printing.dialect import Dialect, Schedule, indented, reads

__all__ = ["Frame", "load_before_use"]

_IMPORTS = {
    False: "import triton\nimport triton.language as tl",
    True: "from triton.experimental import gluon\n"
    "from triton.experimental.gluon import language as tl",
}


class Frame(NamedTuple):
    """How one kernel is spelled.

    Args:
        gluon: whether the language is Gluon; else Triton.
        wide: whether it computes in float64; else in float32.
    """

    gluon: bool
    wide: bool = False

    @property
    def number(self) -> str:
        """The type that it computes in."""
        return "tl.float64" if self.wide else "tl.float32"

    def module(self, title: str, *parts: Iterable[str], imports: Sequence[str] = ()) -> str:
        """The text of a module: a comment, the imports, then the lines of its functions."""
        lines = [f"# {title}", _IMPORTS[self.gluon], *imports]
        return "\n".join([*lines, *(line for part in parts for line in part)]) + "\n"

    def function(
        self, name: str, parameters: Iterable[str], body: Iterable[str], free: Sequence[str] = ()
    ) -> Iterator[str]:
        """A jitted function.

        Args:
            name: of the function.
            parameters: as they stand in its head.
            body: its lines.
            free: parameters whose values do not specialize the machine code.
        """
        options = f"(do_not_specialize={list(free)})" if free else ""
        yield f"\n\n@{'gluon' if self.gluon else 'triton'}.jit{options}"
        yield f"def {name}({', '.join(parameters)}):"
        yield from indented(body)

    def layout(self, value: str) -> Iterator[str]:
        """The definition of the layout of the kernel's tiles, where the language has layouts."""
        if self.gluon:
            yield f"LAYOUT: tl.constexpr = {value}"

    def sliced(self, axis: int) -> str:
        """The last argument of a range that is expanded at an axis to a tile."""
        return f", tl.SliceLayout({axis}, LAYOUT)" if self.gluon else ""

    def cast(self, text: str, dtype: str = "tl.int64") -> str:
        """A value, also a number that is known at compile time, in another type."""
        return f"tl.to_tensor({text}).to({dtype})" if self.gluon else f"tl.cast({text}, {dtype})"

    def zeros(self, shape: str) -> str:
        """A tile of zeros in the kernel's layout and type."""
        return f"tl.zeros([{shape}], {self.number}{', LAYOUT' * self.gluon})"

    def load(self, address: str, mask: str = "") -> str:
        """What stands at an address, 0 where the mask is false, in the type that is computed in."""
        masked = f", mask={mask}, other=0.0" if mask else ""
        return f"tl.load({address}{masked}).to({self.number})"


def load_before_use(plan: Schedule, dialect: Dialect, loads: Mapping[str, str]) -> Iterator[str]:
    """The steps of a plan, each component loaded right before the first step that reads it.

    Args:
        plan: the steps.
        dialect: their language.
        loads: the text that loads a component, by its name.
    """
    waiting = dict(loads)

    def wanted(names: Sequence[str]) -> Iterator[str]:
        return (f"{name} = {waiting.pop(name)}" for name in names if name in waiting)

    for step in plan.steps:
        yield from wanted(sorted(reads(step)))
        yield from step.lines(dialect)
    yield from wanted([name for result in plan.results for name in result.names if name])
