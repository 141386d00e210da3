"""Loops of sparse convolutions around one tile of a matrix product, whose sums are in registers.

Rows that meet are read where they lie: nothing is gathered for the product, and the sums of a chunk
of output rows stay in the cache until the last offset.  The sums of a row do not depend on other
rows, and each is computed by one task, so neither chunks nor threads change a bit.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from torchweft.core.private_compilers import make_array

__all__ = ["convolve"]

ROWS, LANES = 4, 16
"""Rows and columns of a tile: with AVX2, 8 of 16 registers hold its sums in float32."""

DEPTH = 256
"""Terms of a tile's sum: 256 times 16 columns of a matrix fill half of the first cache, and longer
sums of consecutive terms would be less accurate."""

jit = numba.njit(cache=True, nogil=True, error_model="numpy")

_FLAGS = "contract", "nsz"


@intrinsic
def tile(typingctx, left, rows, step, right, at, count, sums, places):  # type: ignore[no-untyped-def]
    """sums[places[r] + l] += Σ_t left[rows[r] + t · step] · right[at + t · LANES + l]

    Arrays have one dimension and one dtype; t = 0 … count − 1, at least one; l = 0 … LANES − 1.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        index = ir.IntType(64)
        vector = ir.VectorType(context.get_value_type(left.dtype), LANES)
        size = left.dtype.bitwidth // 8
        first, second, third = (
            make_array(signature.args[n])(context, builder, args[n]).data for n in (0, 3, 6)
        )

        def lanes(address: Any) -> Any:
            return builder.bitcast(address, vector.as_pointer())

        def everywhere(number: Any) -> Any:
            none, lane = ir.Constant(vector, ir.Undefined), ir.IntType(32)
            zeros = ir.Constant(ir.VectorType(lane, LANES), [lane(0)] * LANES)
            return builder.shuffle_vector(
                builder.insert_element(none, number, lane(0)), none, zeros
            )

        begins = [builder.gep(first, [builder.extract_value(args[1], r)]) for r in range(ROWS)]
        matrix = builder.gep(second, [args[4]])
        before, body = builder.block, builder.append_basic_block("tile")
        builder.branch(body)
        builder.position_at_end(body)
        t = builder.phi(index)
        found = [builder.phi(vector) for _ in range(ROWS)]
        row = builder.load(lanes(builder.gep(matrix, [builder.mul(t, index(LANES))])), align=size)
        place, totals = builder.mul(t, args[2]), []
        for begin, total in zip(begins, found, strict=True):
            factor = everywhere(builder.load(builder.gep(begin, [place])))
            product = builder.fmul(factor, row, flags=_FLAGS)
            totals.append(builder.fadd(total, product, flags=_FLAGS))
        following = builder.add(t, index(1))
        zero = ir.Constant(vector, [vector.element(0.0)] * LANES)
        for phi, start, after in zip(
            (t, *found), (index(0), *[zero] * ROWS), (following, *totals), strict=True
        ):
            phi.add_incoming(start, before)
            phi.add_incoming(after, body)
        end = builder.append_basic_block("tile_end")
        builder.cbranch(builder.icmp_signed("<", following, args[5]), body, end)
        builder.position_at_end(end)
        for r, total in enumerate(totals):
            address = lanes(builder.gep(third, [builder.extract_value(args[7], r)]))
            added = builder.fadd(builder.load(address, align=size), total)
            builder.store(added, address, align=size)
        return context.get_dummy_value()

    return types.none(left, rows, step, right, at, count, sums, places), generate


@jit
def convolve(first, last, chunk, x, inner, weight, flip, table, order, y):  # type: ignore[no-untyped-def]
    """y[order[i]] = Σ_k x[table[k, i]] @ weight[k] for the output rows of chunks first … last − 1.

    Args:
        first: number of the first chunk.
        last: number of the chunk behind the last.
        chunk: output rows of a chunk, in canonical order.
        x: all rows one after the other.
        inner: columns of x.
        weight: (K, inner, outer).
        flip: whether the offsets of the weight are turned round.
        table: (K, N_out) int32, −1 for none.
        order: (N_out,) int32, or of length 0: rows in canonical order.
        y: (N_out, outer).
    """
    num_offsets, outer = weight.shape[0], weight.shape[2]
    width = (outer + LANES - 1) // LANES * LANES
    sources, places = np.empty((2, chunk + ROWS), np.int64)
    sums = np.zeros((chunk + 1) * width, y.dtype)  # the last row is for none
    panel = np.empty(min(inner, DEPTH) * LANES, y.dtype)
    for begin in range(first * chunk, min(last * chunk, y.shape[0]), chunk):
        rows = min(chunk, y.shape[0] - begin)
        sums[: rows * width] = 0
        for k in range(num_offsets):
            pairs = 0
            for i in range(rows):
                source = np.int64(table[k, begin + i])
                sources[pairs], places[pairs] = source * inner, i * width
                pairs += int(source >= 0)
            for r in range(ROWS):
                sources[pairs + r], places[pairs + r] = 0, chunk * width
            matrix = num_offsets - 1 - k if flip else k
            for c in range(0, inner if pairs else 0, DEPTH):
                depth = min(DEPTH, inner - c)
                for d in range(0, outer, LANES):
                    _fill(weight, matrix, c, d, depth, panel)
                    for p in range(0, pairs, ROWS):
                        at = (
                            sources[p] + c,
                            sources[p + 1] + c,
                            sources[p + 2] + c,
                            sources[p + 3] + c,
                        )
                        to = places[p] + d, places[p + 1] + d, places[p + 2] + d, places[p + 3] + d
                        tile(x, at, 1, panel, 0, depth, sums, to)  # type: ignore[call-arg]
        for i in range(rows):
            row = order[begin + i] if order.shape[0] else begin + i
            for d in range(outer):
                y[row, d] = sums[i * width + d]


@jit
def _fill(weight, k, c, d, depth, panel):  # type: ignore[no-untyped-def]
    """Columns d … d + LANES − 1 of rows c … c + depth − 1 of a matrix, zeros behind the last."""
    columns = weight.shape[2] - d
    if columns >= LANES:  # the loop of known length becomes vectors
        for t in range(depth):
            for lane in range(LANES):
                panel[t * LANES + lane] = weight[k, c + t, d + lane]
        return
    panel[: depth * LANES] = 0
    for t in range(depth):
        for lane in range(columns):
            panel[t * LANES + lane] = weight[k, c + t, d + lane]
