"""Symmetric contraction: a polynomial of the irreps of each channel, with weights by element.

    z[n, L, m, c] = Σ_ν Σ_k w_ν[element n, k, c] f_νk(x[n, :, c])_m,    ν = 1 … correlation

The f_νk are MACE's couplings of ν factors x to the irrep L, sums of independent functions (see
symmetric.program).  On a GPU one kernel evaluates these; else, or where its code would be too long,
or elements are mixtures, channelwise products do, each degree from the one below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchweft.core.operators.call_cache import CallCache, signature
from torchweft.core.operators.operands import check_tensors, same_kind
from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.backends import chosen_backend
from torchweft.o3.channelwise.product import channelwise_product
from torchweft.o3.channelwise.structure import Block, Path, Product, Structure
from torchweft.o3.irreps.irreps import Irreps, IrrepsLike, check_layout, check_rows, steps
from torchweft.o3.mixing.operator import rows_of_elements
from torchweft.o3.symmetric.operator import SymmetricCall, cached_symmetric_call, contracted
from torchweft.o3.symmetric.program import (
    Basis,
    Coupled,
    DegreeOutput,
    expressed,
    fits_one_program,
    symmetric_basis,
    symmetric_key,
    symmetric_program,
    weight_text,
)
from torchweft.products import SparseScaleInfo, sparse_scale

__all__ = ["SymmetricContraction"]

KERNEL_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Dtypes that kernels take."""


class _Contraction(nn.Module):
    """The weights into one irrep, named and shaped as MACE's: (num_elements, products, C) each.

    Args:
        outputs: of the degrees 1 to correlation.
        num_elements: elements.
        channels: C.
    """

    def __init__(self, outputs: Sequence[DegreeOutput], num_elements: int, channels: int) -> None:
        super().__init__()
        counts = [output.weights.shape[1] for output in outputs]
        made = [_weight(num_elements, count, channels) for count in reversed(counts)]
        self.weights_max = made[0]
        self.weights = nn.ParameterList(made[1:])

    def name(self, degree: int) -> str | None:
        """The name in `weights` of the parameter of a degree; None: it is `weights_max`."""
        below = len(self.weights) - degree
        return None if below < 0 else str(below)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # MACE also stores its tables and code
        parameters = {f"{prefix}{name}" for name, _ in self.named_parameters()}
        for entry in [k for k in state_dict if k.startswith(prefix) and k not in parameters]:
            del state_dict[entry]
        super()._load_from_state_dict(state_dict, prefix, *args)


class SymmetricContraction(nn.Module):
    """z[n, L, c] = Σ over degrees and couplings k of w[element n, k, c] f_k(x[n, :, c])_L.

    The f_k are a basis of the equivariant polynomials of degree 1 … correlation of the irreps of
    one channel c: the product basis of MACE.

    Args:
        irreps_in: irreps of x (N, D), all items with one number of copies: the channels C.
        irreps_out: irreps of z (N, D_out), C copies of each item.
        correlation: the highest degree.
        num_elements: number of elements, each with weights of its own.
        layout: see `torchweft.o3`.
        backend: see `torchweft.o3`.

    Attributes:
        contractions: parameters, with the names of MACE's layer: `contractions.{item}.weights_max`
            (the highest degree) and `contractions.{item}.weights.{n}` (the lower ones), each
            (num_elements, couplings, C).

    Raises:
        ShapeError: items with different numbers of copies, correlation or num_elements below 1.

    Cost: one kernel on a GPU, which reads x and writes z once and reads weights by element.
    Elsewhere degree by degree: degree ν is one channelwise product of x with functions of degree
    ν − 1, the weights of couplings are one matrix product of torch, and those of each node's
    element are gathered.

    Source: Batatia et al.: MACE, NeurIPS 2022; checkpoints of MACE's layer load.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> layer = o3.SymmetricContraction("8x0e+8x1o", "8x0e", correlation=2, num_elements=3)
        >>> layer(torch.randn(10, 32), torch.randint(3, (10,))).shape
        torch.Size([10, 8])
    """

    def __init__(
        self,
        irreps_in: IrrepsLike,
        irreps_out: IrrepsLike,
        correlation: int,
        num_elements: int,
        *,
        layout: str = "mul_ir",
        backend: str | None = None,
    ) -> None:
        super().__init__()
        check_layout(layout)
        self.backend = backend
        self.irreps_in, self.irreps_out = Irreps(irreps_in), Irreps(irreps_out)
        self.channels = _channels(self.irreps_in, self.irreps_out)
        if correlation < 1 or num_elements < 1:
            raise ShapeError(
                f"correlation is {correlation} and num_elements {num_elements}: there must be a "
                "degree and an element. Pass 1 or more for both."
            )
        self.correlation, self.num_elements, self.layout = correlation, num_elements, layout
        basis = self._basis()
        self.contractions = nn.ModuleList(
            _Contraction([degree[n] for degree in basis.outputs], num_elements, self.channels)
            for n in range(len(self.irreps_out))
        )
        self._structures = _structures(basis, self.irreps_in, self.irreps_out, layout)
        self._key = symmetric_key(self.irreps_in, self.irreps_out, correlation)
        self._weigh(basis)
        self.table: Tensor
        self.register_buffer("table", self._exact, persistent=False)

    def take_couplings(self, couplings: Sequence[Sequence[Tensor]]) -> None:
        """Use the couplings U (2l+1, D, …, D, K) of degrees and items in place of MACE's.

        Parameters must then be (num_elements, K, C).

        Raises:
            ShapeError: the couplings are not equivariant.
        """
        given = [[table.detach().cpu().double().numpy() for table in row] for row in couplings]
        items = tuple(item.ir for item in self.irreps_in)
        self._weigh(expressed(self._basis(), items, given))
        self.table = self._exact.to(self.table.device)

    def _weigh(self, basis: Basis) -> None:
        """Keep T of all weights, on a diagonal, and whether one kernel serves.

        It does where all functions have weights and the program is short.
        """
        contractions: list[Any] = list(self.contractions)
        outputs = [
            (degree, own, torch.from_numpy(output.weights))
            for degree, of_degree in enumerate(basis.outputs, 1)
            for own, output in zip(contractions, of_degree, strict=True)
            if output.weights.shape[1]
        ]
        self._products = [
            sum(len(table) for of, _, table in outputs if of == degree)
            for degree in range(1, self.correlation + 1)
        ]
        tables = [table for *_, table in outputs]
        self._exact: Tensor = torch.block_diag(*tables)  # type: ignore[no-untyped-call]
        self._places = [(own, own.name(degree)) for degree, own, _ in outputs]
        sizes = [weight.shape[1] for weight in self._couplings()]
        self._mixed, self._calls = weight_text(self._exact, sizes), CallCache[SymmetricCall]()
        count = symmetric_program(self._key).inputs[1].size
        self._single = 0 < sum(self._products) == count and fits_one_program(self._key)

    def _basis(self) -> Basis:
        items, outs = (
            tuple(item.ir for item in irreps) for irreps in (self.irreps_in, self.irreps_out)
        )
        return symmetric_basis(items, outs, self.correlation)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SymmetricContraction:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.table = self._exact.to(self.table.device)  # a cast must not round it
        return self

    def extra_repr(self) -> str:
        """The irreps and sizes."""
        return (
            f"{self.irreps_in} -> {self.irreps_out}, correlation={self.correlation}, "
            f"num_elements={self.num_elements}"
        )

    def forward(self, x: Tensor, element: Tensor) -> Tensor:
        """The polynomial.

        Args:
            x: (N, D).
            element: (N,) int64 or int32, or (N, num_elements) real, one-hot or any mixture.

        Returns:
            (N, D_out) in the dtype of x.
        """
        given = (x, *self._couplings(), element)
        known = signature(given)
        call = None if known is None else self._calls.get(known)
        if call is None:
            check_rows("x", x, self.irreps_in, self)
            (x,) = same_kind(x=x)
            self._check_element(x, element)
            given = (x, *given[1:])
            if not self._fused(given):
                return self._by_degrees(x, self._weights(x.dtype), element)
            call = cached_symmetric_call(self._key, self.layout, self._mixed, len(given) - 2)
            if known is not None:
                self._calls.keep(known, call)
        x, *parameters, element = given
        return contracted(
            x, parameters, (element, *rows_of_elements(element, self.num_elements)), call
        )

    def _fused(self, given: Sequence[Tensor]) -> bool:
        """Whether one kernel evaluates the polynomial of x, parameters and elements."""
        x, *parameters, element = given
        if not self._single or x.dtype not in KERNEL_DTYPES or element.is_floating_point():
            return False
        (first, *_) = parameters
        alike = all((p.dtype, p.device) == (first.dtype, x.device) for p in parameters)
        return (
            alike
            and first.dtype in KERNEL_DTYPES
            and chosen_backend(self.backend, x.device.type) == "triton"
        )

    def _couplings(self) -> list[Tensor]:
        """The parameters with couplings, or the tensors in their place."""
        try:  # attributes of modules are slow, and every call needs these
            return [
                own._parameters["weights_max"]
                if name is None
                else own._modules["weights"]._parameters[name]
                for own, name in self._places
            ]
        except KeyError:  # tensors in place of parameters
            return [
                own.weights_max if name is None else getattr(own.weights, name)
                for own, name in self._places
            ]

    def _by_degrees(self, x: Tensor, made: Tensor, element: Tensor) -> Tensor:
        """The polynomial by channelwise products, degree by degree."""
        below, z = x.new_ones(x.shape[0], 1), None
        weights = [part.flatten(1) for part in made.split_with_sizes(self._products, 1)]
        for degree, (product, output) in enumerate(self._structures, 1):
            if output is not None:
                own = self._chosen(weights[degree - 1], element)
                part = channelwise_product(output, x, below, own, backend=self.backend)
                z = part if z is None else z + part
            if product is None:
                below = x
            elif product.products:
                below = channelwise_product(product, x, below, backend=self.backend)
        return x.new_zeros(x.shape[0], self.irreps_out.dim) if z is None else z

    def _weights(self, dtype: torch.dtype) -> Tensor:
        """(num_elements, independent products, C), by degree: T w, all by one product."""
        if not self._places:
            return self.table.new_empty(self.num_elements, 0, self.channels, dtype=dtype)
        given = torch.cat(self._couplings(), 1)
        wide = torch.promote_types(given.dtype, torch.float32)
        return (self.table.to(wide) @ given.to(wide)).to(dtype)

    def _chosen(self, table: Tensor, element: Tensor) -> Tensor:
        """The row of each node's element, or its mixture of rows."""
        if element.is_floating_point():
            return element.to(table.dtype) @ table
        return sparse_scale(table, SparseScaleInfo(index=element), backend=self.backend)

    def _check_element(self, x: Tensor, element: Tensor) -> None:
        if x.dim() != 2:
            raise ShapeError(
                f"x is {tuple(x.shape)}: it must be (N, {self.irreps_in.dim}). Flatten the leading "
                "dimensions."
            )
        check_tensors(element=element)
        if not (element.is_floating_point() or element.dtype in (torch.int64, torch.int32)):
            raise DTypeError(
                f"element is {element.dtype}: it must be int64 or int32, or one-hot real numbers. "
                "Pass element.long(), or one_hot.float()."
            )
        rows = x.shape[0]
        shape = (rows, self.num_elements) if element.is_floating_point() else (rows,)
        if element.shape != shape:
            raise ShapeError(
                f"element is {tuple(element.shape)}: it must be ({rows},) integers, or "
                f"({rows}, {self.num_elements}) real numbers. Pass one element a row of x."
            )


def _weight(num_elements: int, count: int, channels: int) -> nn.Parameter:
    """N(0, 1/count); where there is no coupling one number a channel, unused, as in MACE."""
    if not count:
        return nn.Parameter(torch.zeros(num_elements, 1, channels), requires_grad=False)
    return nn.Parameter(torch.randn(num_elements, count, channels) / count)


def _channels(irreps: Irreps, out: Irreps) -> int:
    muls = {mul for mul, _ in irreps} | {mul for mul, _ in out}
    if len(muls) != 1 or not irreps or not out or 0 in muls:
        raise ShapeError(
            f"irreps_in is {irreps or 'empty'} and irreps_out {out or 'empty'}: all items must "
            "have one number of copies, the channels. Put a Linear in front or behind."
        )
    return muls.pop()


def _structures(
    basis: Basis, irreps: Irreps, out: Irreps, layout: str
) -> tuple[tuple[Structure | None, Structure | None], ...]:
    """For each degree: the product for the next one's functions, and what it adds to z.

    Degree 1 needs no product, its functions are x; nothing reads the product of the highest one.
    """
    channels = irreps[0].mul
    below, width = [Block(0, 0, 1, 0)], 1

    def structure(
        to: Irreps, layout_to: str, terms: list[tuple[int, Coupled]], weights: int
    ) -> Structure:
        paths = tuple(
            Path(term.item, term.left, z, n if weights else -1, term.ir.dim**0.5)
            for n, (z, term) in enumerate(terms)
        )
        w = tuple(Block(n * channels, 0, 1, 1) for n in range(weights))
        blocks = tuple(_blocks(irreps, layout)), tuple(below), tuple(_blocks(to, layout_to)), w
        widths = (irreps.dim, width, to.dim, weights * channels)
        return Structure(widths, (Product(channels, *blocks, paths),))

    found: list[tuple[Structure | None, Structure | None]] = []
    for degree, outputs in enumerate(basis.outputs, 1):
        terms = [(z, term) for z, output in enumerate(outputs) for term in output.products]
        adds = structure(out, layout, terms, len(terms)) if terms else None
        product = None
        if degree == 1:
            below, width = _blocks(irreps, layout), irreps.dim
        elif degree <= len(basis.levels) + 1:
            level = basis.levels[degree - 2]
            functions = Irreps([(channels, term.ir) for term in level])
            product = structure(functions, "ir_mul", list(enumerate(level)), 0)
            below, width = _blocks(functions, "ir_mul"), functions.dim
        found.append((product, adds))
    return tuple(found)


def _blocks(irreps: Irreps, layout: str) -> list[Block]:
    return [
        Block(place.start, item.ir.l, *steps(item, layout))
        for place, item in zip(irreps.slices(), irreps, strict=True)
    ]
