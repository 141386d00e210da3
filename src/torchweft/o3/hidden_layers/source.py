"""Printed Triton kernels of the hidden layers of a network, with SiLU as function.

    rows         t_k = h_k W_k,   h_{k+1} = c_k f(t_k),   f(t) = t σ(t);   h_0 = x, result h_n
    back         d_k = g_{k+1} c_k f'(t_k),   result g_0 of g_k = d_k W_k^T
    sums         h_k^T d_k over all rows
    tangent      p_k = u_k W_k,   u_{k+1} = c_k f'(t_k) p_k;   u_0 = v, result u_n
    second       e_k = g_{k+1} c_k f''(t_k) p_k + q_{k+1} c_k f'(t_k),
                 result q_0 of q_k = e_k W_k^T;   q_n = 0
    second sums  h_k^T e_k + u_k^T d_k over all rows

`back` has the gradients of Σ g h_n by x, and `sums` those by W.  u_n is the gradient by g of
Σ v g_0, and `second` and `second sums` have its gradients by x and W: those of a loss that contains
forces.  t, p, d and e are stored where later kernels need them, which is faster than to compute
them again.  A program takes a tile of rows; one of sums takes the tiles of a piece, for one matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torchweft.core.printing.dialect import indented
from torchweft.core.printing.kernel import Frame
from torchweft.products.tiles import LEAST_DOT, power_of_two

__all__ = ["HIDDEN_LAYERS", "HiddenLayers", "KernelSpec", "source"]

HIDDEN_LAYERS = "hidden_layers"
"""Name of the kernels, in profiles too."""

FRAME = Frame(gluon=False)


class HiddenLayers(NamedTuple):
    """A network without its last matrix.

    Args:
        widths: of x, and of each hidden layer.
        before: a factor of the first matrix.
        after: the factors c of each layer.
    """

    widths: tuple[int, ...]
    before: float
    after: tuple[float, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of each matrix."""
        return tuple(a * b for a, b in zip(self.widths, self.widths[1:], strict=False))


class KernelSpec(NamedTuple):
    """All that the source of a kernel depends on.

    Args:
        layers: the network.
        kind: "rows", "back", "sums", "tangent", "second" or "second sums".
        more: whether `rows` stores t, and `back` and `second` what sums are made of.
    """

    layers: HiddenLayers
    kind: str
    more: bool = False

    @property
    def summed(self) -> bool:
        """Whether gradients of the matrices are computed."""
        return self.kind.endswith("sums")

    @property
    def operands(self) -> list[str]:
        """The tensors of the kernel, in order; results come last."""
        layers = range(len(self.layers.after))
        w, t, p, d, e = ([f"{name}{k}" for k in layers] for name in "wtpde")
        match self.kind:
            case "rows":
                return [*w, "x", "h", *(t if self.more else [])]
            case "tangent":
                return [*w, *t, "v", "u", *p]
            case "back":
                return [*w, *t, "g", "gx", *(d if self.more else [])]
            case "second":
                return [*w, *t, *p, "g", "gx", *([*d, *e] if self.more else [])]
            case "sums":
                return [*t[:-1], *d, "x", "sums"]
        return [*t[:-1], *p[:-1], *d, *e, "x", "v", "sums"]


def source(spec: KernelSpec) -> str:
    """Module text; pointers are those of `operands`, then rows, and those of a piece for sums."""
    counts = ["rows", "piece"] if spec.summed else ["rows"]
    parameters = [*(f"{name}_ptr" for name in spec.operands), *counts, "BLOCK: tl.constexpr"]
    kernel = FRAME.function(HIDDEN_LAYERS, parameters, _body(spec), free=counts)
    imports = ["from torchweft.products.kernels import add_product"]
    return FRAME.module(f"{HIDDEN_LAYERS}: {spec.kind}", *_functions(), kernel, imports=imports)


def _functions() -> Iterator[Iterator[str]]:
    """Products of matrices, σ, and f with its derivatives.

    σ is that of `row_functions` with |x|, which loops on a CPU lack: a tenth fewer instructions.
    """
    zeros = "tl.zeros([a.shape[0], b.shape[1]], tl.float32)"
    product = [f'return add_product(a, b, {zeros}, tl.float32, "bf16x6")']
    yield FRAME.function("product", ["a", "b"], product)
    bodies = {
        "sigmoid": [
            "fallen = tl.exp(-tl.abs(x))",
            "return tl.where(x < 0, fallen, 1.0) / (1.0 + fallen)",
        ],
        "silu": ["return x * sigmoid(x)"],
        "slope": ["s = sigmoid(x)", "return s * (1.0 + x * (1.0 - s))"],
        "bend": ["s = sigmoid(x)", "return s * (1.0 - s) * (2.0 + x * (1.0 - 2.0 * s))"],
    }
    for name, body in bodies.items():
        yield FRAME.function(name, ["x"], body)


def _body(spec: KernelSpec) -> Iterator[str]:
    if spec.summed:
        yield from _pieces(spec)
        return
    yield "begin = tl.program_id(0).to(tl.int64) * BLOCK"
    yield "last = rows"
    yield from _forward(spec) if spec.kind in ("rows", "tangent") else _backward(spec)


def _pieces(spec: KernelSpec) -> Iterator[str]:
    """A program sums the gradient of one matrix over one piece of the rows."""
    count = len(spec.layers.after)
    yield f"part = (tl.program_id(0) // {count}).to(tl.int64)"
    yield "first = part * piece"
    yield "last = tl.minimum(first + piece, rows)"
    for k in range(count):
        yield f"if tl.program_id(0) % {count} == {k}:"
        yield from indented(_sums(spec, k))


def _backward(spec: KernelSpec) -> Iterator[str]:
    layers = range(len(spec.layers.after))
    yield _load(spec, "g", "g", len(layers))
    for k in reversed(layers):
        yield from _back(spec, k)
    yield _store_rows(spec, "gx", "q" if spec.kind == "second" else "g", 0)


def _forward(spec: KernelSpec) -> Iterator[str]:
    count, rows = len(spec.layers.after), spec.kind == "rows"
    name, given, made = ("h", "x", "t") if rows else ("u", "v", "p")
    yield _load(spec, name, given, 0)
    for k in range(count):
        yield from _matrix(spec, k)
        yield f"{made} = product({name}, w)"
        if not rows:
            yield _load(spec, "t", f"t{k}", k + 1)
        if not rows or spec.more:
            yield _store_rows(spec, f"{made}{k}", made, k + 1)
        yield _following(spec, name, k)
    yield _store_rows(spec, name, name, count)


def _following(spec: KernelSpec, name: str, k: int) -> str:
    """h_{k+1} or u_{k+1} of t_k and p_k."""
    value = "silu(t)" if name == "h" else "slope(t) * p"
    return f"{name} = {spec.layers.after[k]!r} * {value}"


def _back(spec: KernelSpec, k: int) -> Iterator[str]:
    """From gradients of the rows of layer k + 1 to those of layer k."""
    second, factor = spec.kind == "second", repr(spec.layers.after[k])
    yield _load(spec, "t", f"t{k}", k + 1)
    yield f"c = {factor} * slope(t)"
    if second:
        yield _load(spec, "p", f"p{k}", k + 1)
        bent = f"{factor} * bend(t) * p * g"
        yield f"e = {bent}" if k == len(spec.layers.after) - 1 else f"e = {bent} + q * c"
    yield "d = g * c"
    for name in ("d", "e")[: second + 1] if spec.more else ():
        yield _store_rows(spec, f"{name}{k}", name, k + 1)
    yield from _matrix(spec, k, turned=True)
    if second:
        yield "q = product(e, w)"
    if k or not second:
        yield "g = product(d, w)"


def _sums(spec: KernelSpec, k: int) -> Iterator[str]:
    """The gradient of matrix k, over the rows of a piece."""
    height, width = spec.layers.widths[k : k + 2]
    yield f"total = tl.zeros([{_padded(height)}, {_padded(width)}], tl.float32)"
    yield "for begin in range(first, last, BLOCK):"
    yield from indented(_summands(spec, k))
    yield from _places(spec, k)
    factor = f" * {spec.layers.before!r}" if k == 0 else ""
    at = f"part * {sum(spec.layers.sizes)} + {sum(spec.layers.sizes[:k])} + k * {width} + n"
    yield f"tl.store(sums_ptr + {at}, total{factor}, mask=(k < {height}) & (n < {width}))"


def _summands(spec: KernelSpec, k: int) -> Iterator[str]:
    second = spec.kind == "second sums"
    for name, given, gradient in [("h", "x", "e" if second else "d"), *[("u", "v", "d")] * second]:
        yield from _before(spec, name, given, k)
        yield _load(spec, "y", f"{gradient}{k}", k + 1)
        yield f"total += product({name}, y)"


def _before(spec: KernelSpec, name: str, given: str, k: int) -> Iterator[str]:
    """The transpose of h_k or u_k, which are x and v where k is 0."""
    if k == 0:
        yield _load(spec, name, given, 0, turned=True)
        return
    yield _load(spec, "t", f"t{k - 1}", k, turned=True)
    if name == "u":
        yield _load(spec, "p", f"p{k - 1}", k, turned=True)
    yield _following(spec, name, k - 1)


def _padded(width: int) -> int:
    return max(LEAST_DOT, power_of_two(width))


def _places(spec: KernelSpec, k: int, turned: bool = False) -> Iterator[str]:
    """Numbers of the rows and columns of matrix k, or of its transpose."""
    height, width = map(_padded, spec.layers.widths[k : k + 2])
    row, column = ("[None, :]", "[:, None]") if turned else ("[:, None]", "[None, :]")
    yield f"k = tl.arange(0, {height}){row}"
    yield f"n = tl.arange(0, {width}){column}"


def _matrix(spec: KernelSpec, k: int, turned: bool = False) -> Iterator[str]:
    """Load matrix k or its transpose."""
    yield from _places(spec, k, turned)
    height, width = spec.layers.widths[k : k + 2]
    factor = f" * {spec.layers.before!r}" if k == 0 else ""
    at, mask = f"w{k}_ptr + k * {width} + n", f"(k < {height}) & (n < {width})"
    yield f"w = tl.load({at}, mask={mask}, other=0.0){factor}"


def _numbers(spec: KernelSpec, k: int, turned: bool = False) -> tuple[str, str]:
    """Places of the numbers of layer k, or of their transpose, and which of them there are."""
    width, across = spec.layers.widths[k], "[:, None]" if turned else "[None, :]"
    row = f"(begin + tl.arange(0, BLOCK)){'[None, :]' if turned else '[:, None]'}"
    column = f"tl.arange(0, {_padded(width)}){across}"
    return f"{row} * {width} + {column}", f"({row} < last) & ({column} < {width})"


def _load(spec: KernelSpec, name: str, tensor: str, k: int, turned: bool = False) -> str:
    at, mask = _numbers(spec, k, turned)
    return f"{name} = tl.load({tensor}_ptr + {at}, mask={mask}, other=0.0)"


def _store_rows(spec: KernelSpec, tensor: str, value: str, k: int) -> str:
    at, mask = _numbers(spec, k)
    return f"tl.store({tensor}_ptr + {at}, {value}, mask={mask})"
