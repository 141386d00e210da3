"""Loops of a k-d tree in up to 3 dimensions: compiled once by numba, and cached on disk.

Node n has the children 2 n + 1 and 2 n + 2; at depth d there are 2^d, the p-th of which has the
points number p N / 2^d to (p + 1) N / 2^d of the tree's order.  Its box is that of its points.

No operation is reordered or contracted: what rounding makes of the distance of a box is at most
what it makes of the distance of a point in it, since every step is monotonic.
"""

from __future__ import annotations

import numba
import numpy as np

__all__ = ["build", "leaves", "search"]

jit = numba.njit(cache=True, nogil=True, error_model="numpy")


@jit
def select(points, order, begin, end, middle, axis):  # type: ignore[no-untyped-def]
    """Exchange points until none before the middle one has a larger coordinate, none after less."""
    last = end - 1
    while begin < last:
        a, b, c = points[begin, axis], points[(begin + last) // 2, axis], points[last, axis]
        pivot = max(min(a, b), min(max(a, b), c))
        i, j = begin, last
        while i <= j:
            while points[i, axis] < pivot:
                i += 1
            while points[j, axis] > pivot:
                j -= 1
            if i <= j:
                for d in range(3):
                    points[i, d], points[j, d] = points[j, d], points[i, d]
                order[i], order[j] = order[j], order[i]
                i += 1
                j -= 1
        if middle <= j:
            last = j
        elif middle >= i:
            begin = i
        else:
            return


@jit
def build(points, order, boxes, depth):  # type: ignore[no-untyped-def]
    """Sort points (N, 3) and their numbers; write boxes, the (lower, upper) corners of each node.

    A node is split at the median of its longest side.
    """
    count = len(points)
    for level in range(depth + 1):
        for p in range(1 << level):
            begin, end = (p * count) >> level, ((p + 1) * count) >> level
            box = boxes[(1 << level) - 1 + p]
            axis, longest = 0, -np.inf
            for d in range(3):
                low = high = points[begin, d]
                for n in range(begin, end):
                    low, high = min(low, points[n, d]), max(high, points[n, d])
                box[d], box[3 + d] = low, high
                if high - low > longest:
                    axis, longest = d, high - low
            if level < depth:
                middle = ((2 * p + 1) * count) >> (level + 1)
                select(points, order, begin, end, middle, axis)


@jit
def distance(box, x, y, z):  # type: ignore[no-untyped-def]
    """The square of the distance of a point and a box."""
    zero = x - x  # of its dtype, in which all is computed
    a = max(box[0] - x, x - box[3], zero)
    b = max(box[1] - y, y - box[4], zero)
    c = max(box[2] - z, z - box[5], zero)
    return (a * a + b * b) + c * c


@jit
def leaves(queries, boxes, depth, found):  # type: ignore[no-untyped-def]
    """A leaf near each query, so that queries of one leaf can follow each other."""
    for m in range(len(queries)):
        x, y, z = queries[m, 0], queries[m, 1], queries[m, 2]
        n = 0
        for _ in range(depth):
            left, right = distance(boxes[2 * n + 1], x, y, z), distance(boxes[2 * n + 2], x, y, z)
            n = 2 * n + 2 if right < left else 2 * n + 1
        found[m] = n


@jit
def sink(best, index, size, value, number):  # type: ignore[no-untyped-def]
    """Put a pair in place of the root of a heap, whose root is the last in (value, index) order."""
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        other = child + 1
        if other < size and (
            best[other] > best[child]
            or (best[other] == best[child] and index[other] > index[child])
        ):
            child = other
        if value > best[child] or (value == best[child] and number > index[child]):
            break
        best[place], index[place] = best[child], index[child]
        place = child
    best[place], index[place] = value, number


@jit
def search(first, last, rows, queries, points, order, boxes, depth, out):  # type: ignore[no-untyped-def]
    """Write the nearest of the points (3, N) to the queries number rows[first:last], ascending.

    Nodes wait on a stack, the farther of two children behind the nearer, until they are farther
    than the last neighbour found.
    """
    count, k = points.shape[1], out.shape[1]
    best, square = np.empty(k, points.dtype), np.empty(1 + (count >> depth), points.dtype)
    waiting, far = np.empty(depth + 1, np.int64), np.empty(depth + 1, points.dtype)
    start = (1 << depth) - 1
    for m in range(first, last):
        row = rows[m]
        x, y, z = queries[row, 0], queries[row, 1], queries[row, 2]
        best[:] = np.inf
        index = out[row]
        index[:] = count
        waiting[0], far[0] = 0, 0
        size = 1
        while size:
            size -= 1
            node, near = waiting[size], far[size]
            if near > best[0]:
                continue
            while node < start:
                left, right = 2 * node + 1, 2 * node + 2
                to_left = distance(boxes[left], x, y, z)
                to_right = distance(boxes[right], x, y, z)
                node, other, behind = left, right, to_right
                if to_right < to_left:
                    node, other, behind = right, left, to_left
                if behind <= best[0]:
                    waiting[size], far[size] = other, behind
                    size += 1
            p = node - start
            begin, end = (p * count) >> depth, ((p + 1) * count) >> depth
            xs, ys, zs = points[0, begin:end], points[1, begin:end], points[2, begin:end]
            for n in range(end - begin):
                a, b, c = x - xs[n], y - ys[n], z - zs[n]
                square[n] = (a * a + b * b) + c * c
            for n in range(end - begin):
                value = square[n]
                if value <= best[0]:
                    number = order[begin + n]
                    if value < best[0] or number < index[0]:
                        sink(best, index, k, value, number)
        for rest in range(k - 1, 0, -1):  # the last of the heap goes behind it
            value, number = best[rest], index[rest]
            best[rest], index[rest] = best[0], index[0]
            sink(best, index, rest, value, number)
