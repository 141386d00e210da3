"""torchsparse's convolutions by dictionaries of voxels: slow, plain, independent of our maps.

`pairs_of` follows the loops of torchsparse 2.1's GPU code, one voxel and one position at a time:
`build_kernel_map_subm_hashmap` and `build_kernel_map_downsample_hashmap` (by default), or
`spdownsample` and `lookup_coords` (kmap_mode="hashmap").  Sums are torch's, in any dtype.
"""

import itertools
import math

from torchweft.compat.torchsparse import SparseTensor


def positions(number, kernel):
    """The place in the kernel, one number for each axis, of an offset's number."""
    axes = range(3) if math.prod(kernel) % 2 else range(2, -1, -1)
    place = [0, 0, 0]
    for axis in axes:
        place[axis], number = number % kernel[axis], number // kernel[axis]
    return place


def highest(rows, kernel, stride, padding, spatial_range):
    """The highest output on each axis, by the range or by the voxels."""
    tops = [max(r[1 + a] for r in rows) + 1 for a in range(3)]
    sizes = tops if spatial_range is None else spatial_range[1:4]
    axes = zip(sizes, kernel, stride, padding, strict=True)
    return [(n - 1 + 2 * p - (k - 1)) // s for n, k, s, p in axes]


def reached(rows, kernel, stride, padding, spatial_range):
    """(input row, output voxel, offset's number) of a strided layer."""
    if not rows:
        return
    high = highest(rows, kernel, stride, padding, spatial_range)
    last = math.prod(kernel) - 1
    for row, (batch, *voxel) in enumerate(rows):
        for number in range(last + 1):
            place = positions(number, kernel)
            at = [
                c + p + j - (k - 1)
                for c, p, j, k in zip(voxel, padding, place, kernel, strict=True)
            ]
            if any(n % s for n, s in zip(at, stride, strict=True)):
                continue
            out = [n // s for n, s in zip(at, stride, strict=True)]
            if all(0 <= n <= h for n, h in zip(out, high, strict=True)):
                yield row, (batch, *out), last - number


def found(rows, outputs, kernel, stride, begin):
    """(input row, output row, offset's number) of looking inputs up around outputs."""
    place_of = {row: n for n, row in enumerate(rows)}
    for o, (batch, *out) in enumerate(outputs):
        for number in range(math.prod(kernel)):
            place = positions(number, kernel)
            axes = zip(out, stride, place, begin, strict=True)
            voxel = (batch, *(n * s + j - b for n, s, j, b in axes))
            if voxel in place_of:
                yield place_of[voxel], o, number


def pairs_of(rows, kernel, stride, padding, spatial_range, mode="on_the_fly"):
    """The output's voxels, and (input row, output row, offset's number) of all pairs.

    Args:
        rows: tuples (batch, x, y, z).
        kernel: three numbers, as the next two.
        stride: of the layer.
        padding: of the layer.
        spatial_range: (batch, x, y, z) or None.
        mode: "on_the_fly", or of the hash map "spconv" or "minkowski".
    """
    centred = [(k - 1) // 2 for k in kernel]
    if set(stride) == {1}:
        late = mode == "on_the_fly" and math.prod(kernel) % 2 == 0
        return rows, list(found(rows, rows, kernel, stride, [0, 0, 0] if late else centred))
    if mode == "on_the_fly":
        reach = list(reached(rows, kernel, stride, padding, spatial_range))
        outputs = sorted({out for _, out, _ in reach})
        place_of = {out: n for n, out in enumerate(outputs)}
        return outputs, [(row, place_of[out], number) for row, out, number in reach]
    if has_floors(kernel, stride, mode):
        steps = 1, *stride
        outputs = sorted({tuple(c // s for c, s in zip(r, steps, strict=True)) for r in rows})
    else:
        reach = reached(rows, kernel, stride, padding, spatial_range)
        outputs = sorted({out for _, out, _ in reach})
    return outputs, list(found(rows, outputs, kernel, stride, centred))


def has_floors(kernel, stride, mode):
    """Whether the outputs are the voxels ⌊c / stride⌋."""
    partition = all(s in (1, k) for k, s in zip(kernel, stride, strict=True))
    return mode == "minkowski" or (mode == "spconv" and partition)


def convolved(feats, weight, bias, pairs, count):
    """out[o] = bias + Σ feats[i] @ weight[k] over the pairs (i, o, k)."""
    out = feats.new_zeros(count, weight.shape[-1])
    for number, same in itertools.groupby(sorted(pairs, key=lambda p: p[2]), lambda p: p[2]):
        inputs, outputs, _ = (feats.new_tensor(rows).long() for rows in zip(*same, strict=True))
        out = out.index_add(0, outputs, feats[inputs] @ weight[number])
    return out if bias is None else out + bias


def forward(layer, x, mode="on_the_fly"):
    """`nn.Conv3d.forward` by the rules; maps stand in the tensor's `_caches`, as there."""
    weight = layer.kernel if layer.kernel.dim() == 3 else layer.kernel[None]
    kernel, stride = layer.kernel_size, layer.stride
    rules = x._caches.__dict__.setdefault("rules", {})
    key = x.stride, kernel, stride
    if layer.transposed and math.prod(kernel) * math.prod(stride) > 1:
        finer = tuple(a // s for a, s in zip(x.stride, stride, strict=True))
        _, pairs, coords, spatial_range = rules[finer, kernel, stride]
        swapped = [(o, i, k) for i, o, k in pairs]
        y = convolved(x.F, weight, layer.bias, swapped, len(coords))
        return derived(x, y, coords, finer, spatial_range)
    sizes = kernel, stride, layer.padding
    if key not in rules or rules[key][2] is not x.C:
        rows = [tuple(row) for row in x.C.tolist()]
        found = pairs_of(rows, *sizes, x.spatial_range, mode)
        rules[key] = *found, x.C, x.spatial_range
    outputs, pairs, *_ = rules[key]
    y = convolved(x.F, weight, layer.bias, pairs, len(outputs))
    coarser = tuple(a * s for a, s in zip(x.stride, stride, strict=True))
    if set(stride) == {1}:
        return derived(x, y, x.C, x.stride, x.spatial_range and x.spatial_range[:4])
    box = x.spatial_range
    if box is not None:
        axes = zip(box[1:4], *sizes, strict=True)
        floors = has_floors(kernel, stride, mode)  # whose box is ours: torchsparse's may be short
        shape = (-(-n // s) if floors else (n + 2 * p - k) // s + 1 for n, k, s, p in axes)
        box = box[0], *shape
    return derived(x, y, x.C.new_tensor(outputs).view(-1, 4), coarser, box)


def derived(x, feats, coords, stride, spatial_range):
    """A tensor with the caches of another."""
    y = SparseTensor(feats, coords, stride, spatial_range)
    y._caches = x._caches
    return y
