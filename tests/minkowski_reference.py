"""MinkowskiEngine's rules with dictionaries: a slow package of its names, independent of voxels.

Networks take it where they take the stand-in.  A map is a list of coordinates (batch, x0, …) in
voxels of the finest level; which rows meet is looked up in a dictionary, one offset at a time, the
first axis of offsets fastest.  All else is torch's autograd.
"""

import itertools
import types

import torch
from torch import nn

__all__ = ["package"]


def axes(number, dim):
    return tuple(int(n) for n in number) if hasattr(number, "__len__") else (int(number),) * dim


def offsets(sizes, cross=False):
    """Multiples of dilation and tensor stride, in the original's order."""
    if cross:
        found = [(0,) * len(sizes)]
        for axis, k in enumerate(sizes):
            steps = [*range(1, k // 2 + 1), *range(-(k // 2), 0)]
            found += [tuple(s if a == axis else 0 for a in range(len(sizes))) for s in steps]
        return found
    ranges = [range(-(k // 2), k // 2 + 1) if k % 2 else range(k) for k in sizes]
    return [place[::-1] for place in itertools.product(*ranges[::-1])]


def moved(place, offset, steps):
    return (place[0], *(x + o * s for x, o, s in zip(place[1:], offset, steps, strict=True)))


def floored(place, stride):
    cells = (x // s * s if s else 0 for x, s in zip(place[1:], stride, strict=True))
    return (place[0], *cells)


class CoordinateMapKey:
    def __init__(self, stride, name=""):
        self.stride, self.name = tuple(stride), name

    def __eq__(self, other):
        return (self.stride, self.name) == (other.stride, other.name)

    def __hash__(self):
        return hash((self.stride, self.name))

    def get_tensor_stride(self):
        return list(self.stride)


class Manager:
    def __init__(self, dim):
        self.D, self.maps = dim, {}

    def insert(self, places, stride, name="", always=True):
        key = CoordinateMapKey(stride, name)
        while key in self.maps and always:
            key = CoordinateMapKey(stride, f"{name}+{len(self.maps)}")
        if key not in self.maps:
            self.maps[key] = list(dict.fromkeys(places))
        return key

    def insert_and_map(self, coordinates, tensor_stride=1, string_id=""):
        places = [tuple(row) for row in coordinates.tolist()]
        key = self.insert(places, axes(tensor_stride, self.D), string_id)
        first, rows = self.maps[key], {}
        for row, place in enumerate(places):
            rows.setdefault(place, row)
        unique = torch.tensor([rows[place] for place in first])
        number = {place: n for n, place in enumerate(first)}
        return key, (unique, torch.tensor([number[place] for place in places]))

    def stride(self, key, stride):
        new = [t * s for t, s in zip(key.stride, axes(stride, self.D), strict=True)]
        places = [floored(place, new) for place in self.maps[key]]
        return self.insert(places, new, key.name, always=False)

    def origin(self):
        places = [(b, *[0] * self.D) for b in sorted({p[0] for m in self.maps.values() for p in m})]
        return self.insert(places, [0] * self.D, always=False)

    def pairs(self, fine, coarse, generator):
        """By offset, (fine rows, coarse rows): the fine voxel is the coarse one plus the offset."""
        rows = {place: row for row, place in enumerate(self.maps[fine])}
        steps = [d * t for d, t in zip(generator.kernel_dilation, fine.stride, strict=True)]
        found = []
        for offset in generator.offsets():
            met = [(rows.get(moved(p, offset, steps)), r) for r, p in enumerate(self.maps[coarse])]
            met = [pair for pair in met if pair[0] is not None]
            found.append(torch.tensor(met, dtype=torch.int64).view(-1, 2).T)
        return found

    def kernel_map(self, in_key, out_key, stride=1, kernel_size=3, dilation=1, region_type=0, **_):
        generator = KernelGenerator(
            kernel_size, stride, dilation, region_type=region_type, dimension=self.D
        )
        return dict(enumerate(self.pairs(in_key, out_key, generator)))


class SparseTensor:
    def __init__(
        self,
        features,
        coordinates=None,
        tensor_stride=1,
        coordinate_map_key=None,
        coordinate_manager=None,
        **_,
    ):
        manager = coordinate_manager
        if coordinates is not None:
            manager = manager or Manager(coordinates.shape[1] - 1)
            coordinate_map_key, maps = manager.insert_and_map(coordinates, tensor_stride)
            features = features[maps[0]]
        self.F, self.coordinate_map_key, self.coordinate_manager = (
            features,
            coordinate_map_key,
            manager,
        )

    @property
    def places(self):
        return self.coordinate_manager.maps[self.coordinate_map_key]

    @property
    def C(self):  # noqa: N802
        return torch.tensor(self.places, dtype=torch.int32)

    features = property(lambda self: self.F)
    D = property(lambda self: self.coordinate_manager.D)
    shape = property(lambda self: self.F.shape)
    device = property(lambda self: self.F.device)
    tensor_stride = property(lambda self: list(self.coordinate_map_key.stride))

    def __len__(self):
        return len(self.F)

    @property
    def decomposition_permutations(self):
        count = 1 + max(
            p[0] for p in self.coordinate_manager.maps[self.coordinate_manager.origin()]
        )
        batch = torch.tensor([p[0] for p in self.places], dtype=torch.int64)
        return [(batch == b).nonzero().squeeze(1) for b in range(count)]

    @property
    def decomposed_coordinates(self):
        return [self.C[rows, 1:] for rows in self.decomposition_permutations]

    def on(self, features, key=None):
        key = key or self.coordinate_map_key
        return SparseTensor(
            features, coordinate_map_key=key, coordinate_manager=self.coordinate_manager
        )

    def combined(self, other, function):
        if not isinstance(other, SparseTensor):
            return self.on(function(self.F, other))
        if self.coordinate_map_key == other.coordinate_map_key:
            return self.on(function(self.F, other.F))
        stride = [min(n) for n in zip(self.tensor_stride, other.tensor_stride, strict=True)]
        key = self.coordinate_manager.insert(self.places + other.places, stride, "merge")
        number = {place: n for n, place in enumerate(self.coordinate_manager.maps[key])}
        own, others = ([number[p] for p in x.places] for x in (self, other))
        empty = self.F.new_zeros(len(number), self.shape[1])
        total = empty.index_copy(0, torch.tensor(own), self.F)
        met = function(total[others], other.F)
        return self.on(total.index_copy(0, torch.tensor(others), met), key)

    def __add__(self, other):
        return self.combined(other, torch.add)

    def __sub__(self, other):
        return self.combined(other, torch.sub)

    def __mul__(self, other):
        return self.combined(other, torch.mul)

    def __truediv__(self, other):
        return self.combined(other, torch.div)

    __iadd__ = __add__

    def features_at_coordinates(self, points):
        rows = {place: row for row, place in enumerate(self.places)}
        out = []
        for batch, *point in points.tolist():
            total = torch.zeros_like(self.F[0])
            low = [x // t * t for x, t in zip(point, self.tensor_stride, strict=True)]
            for corner in itertools.product((0, 1), repeat=self.D):
                steps = zip(low, corner, self.tensor_stride, strict=True)
                place = [a + c * t for a, c, t in steps]
                row = rows.get((int(batch), *map(int, place)))
                weight = 1.0
                for x, v, t in zip(point, place, self.tensor_stride, strict=True):
                    weight *= 1 - abs(x - v) / t
                total = total if row is None else total + weight * self.F[row]
            out.append(total)
        return torch.stack(out)


class KernelGenerator:
    def __init__(
        self,
        kernel_size,
        stride=1,
        dilation=1,
        is_transpose=False,
        region_type=0,
        region_offsets=None,
        expand_coordinates=False,
        axis_types=None,
        dimension=3,
    ):
        self.kernel_size, self.kernel_stride = axes(kernel_size, dimension), axes(stride, dimension)
        self.kernel_dilation, self.cross = axes(dilation, dimension), int(region_type) == 1
        self.expand_coordinates = expand_coordinates

    def offsets(self):
        return offsets(self.kernel_size, self.cross)


class Window(nn.Module):
    """A layer with a kernel: which map it writes, and the pairs of rows."""

    transposed = generative = False

    def prepare(self, kernel_size, stride, dilation, kernel_generator, dimension):
        self.generator = kernel_generator or KernelGenerator(
            kernel_size, stride, dilation, dimension=dimension
        )

    def out_key(self, x, given):
        manager, key, steps = x.coordinate_manager, x.coordinate_map_key, self.generator
        strides = steps.kernel_stride
        if given is not None:
            return given.coordinate_map_key
        if not self.transposed and not self.generative:
            return manager.stride(key, strides)
        pairs = zip(key.stride, strides, strict=True)
        new = [t // s for t, s in pairs] if self.transposed else [t * s for t, s in pairs]
        if not self.generative and CoordinateMapKey(new) in manager.maps:
            return CoordinateMapKey(new)
        unit = new if self.transposed else key.stride
        unit = [d * t for d, t in zip(steps.kernel_dilation, unit, strict=True)]
        places = [moved(p, o, unit) for p in x.places for o in steps.offsets()]
        if not self.transposed:
            places = [p for p in places if floored(p, new) == p]
        return manager.insert(places, new)

    def met(self, x, key):
        """By offset, (input rows, output rows)."""
        manager, own = x.coordinate_manager, x.coordinate_map_key
        if self.transposed:
            return [p.flip(0) for p in manager.pairs(key, own, self.generator)]
        return manager.pairs(own, key, self.generator)


class Convolution(Window):
    def __init__(
        self,
        in_channels,
        out_channels,
        kernel_size=-1,
        stride=1,
        dilation=1,
        bias=False,
        kernel_generator=None,
        expand_coordinates=False,
        convolution_mode=0,
        dimension=None,
    ):
        super().__init__()
        self.prepare(kernel_size, stride, dilation, kernel_generator, dimension)
        self.generative = self.generative or expand_coordinates
        volume = len(self.generator.offsets())
        self.matrix = volume == 1 and set(self.generator.kernel_stride) == {1}
        shape = () if self.matrix else (volume,)
        self.kernel = nn.Parameter(torch.randn(*shape, in_channels, out_channels))
        self.bias = nn.Parameter(torch.randn(1, out_channels)) if bias else None

    def forward(self, x, coordinates=None):
        bias = 0 if self.bias is None else self.bias
        if self.matrix:
            return x.on(x.F @ self.kernel + bias)
        key = self.out_key(x, coordinates)
        out = x.F.new_zeros(len(x.coordinate_manager.maps[key]), self.kernel.shape[2])
        for weight, (rows, outs) in zip(self.kernel, self.met(x, key), strict=True):
            out = out.index_add(0, outs, x.F[rows] @ weight)
        return x.on(out + bias, key)


class ConvolutionTranspose(Convolution):
    transposed = True


class GenerativeConvolutionTranspose(Convolution):
    transposed = generative = True


class ChannelwiseConvolution(Window):
    def __init__(self, in_channels, kernel_size=-1, stride=1, dilation=1, bias=False, **options):
        super().__init__()
        dimension, generator = options["dimension"], options.get("kernel_generator")
        self.prepare(kernel_size, stride, dilation, generator, dimension)
        self.kernel = nn.Parameter(torch.randn(len(self.generator.offsets()), in_channels))
        self.bias = nn.Parameter(torch.randn(1, in_channels)) if bias else None

    def forward(self, x):
        key = self.out_key(x, None)
        out = x.F.new_zeros(len(x.coordinate_manager.maps[key]), x.shape[1])
        for weight, (rows, outs) in zip(self.kernel, self.met(x, key), strict=True):
            out = out.index_add(0, outs, x.F[rows] * weight)
        return x.on(out if self.bias is None else out + self.bias, key)


def combined_rows(features, groups, mode):
    """(len(groups), C): the sum, mean or maximum of the rows of each group."""
    zero = torch.zeros_like(features[0])
    reduce = {
        "sum": lambda rows: rows.sum(0),
        "avg": lambda rows: rows.mean(0),
        "max": lambda rows: rows.amax(0),
    }[mode]
    return torch.stack([reduce(features[rows]) if rows else zero for rows in groups])


def pooling(mode, transposed=False):
    class Pooling(Window):
        def __init__(self, kernel_size=-1, stride=1, dilation=1, kernel_generator=None, **options):
            super().__init__()
            self.transposed = transposed
            self.prepare(kernel_size, stride, dilation, kernel_generator, options["dimension"])

        def forward(self, x, coordinates=None):
            key = self.out_key(x, coordinates)
            places = x.coordinate_manager.maps[key]
            groups = [[] for _ in places]
            if self.generator.kernel_size == self.generator.kernel_stride:
                numbers = {p: n for n, p in enumerate(x.places if transposed else places)}
                stride = x.tensor_stride if transposed else key.stride
                for row, place in enumerate(places if transposed else x.places):
                    cell = numbers[floored(place, stride)]
                    groups[row if transposed else cell].append(cell if transposed else row)
            else:
                for rows, outs in self.met(x, key):
                    for row, out in zip(rows.tolist(), outs.tolist(), strict=True):
                        groups[out].append(row)
            return x.on(combined_rows(x.F, groups, mode), key)

    return Pooling


def global_pooling(mode):
    class GlobalPooling(nn.Module):
        def forward(self, x):
            key = x.coordinate_manager.origin()
            samples = [p[0] for p in x.coordinate_manager.maps[key]]
            groups = [[r for r, p in enumerate(x.places) if p[0] == b] for b in samples]
            return x.on(combined_rows(x.F, groups, mode), key)

    return GlobalPooling


class InstanceNorm(nn.Module):
    def __init__(self, num_features):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, num_features))
        self.bias = nn.Parameter(torch.zeros(1, num_features))

    def forward(self, x):
        out = torch.zeros_like(x.F)
        for rows in x.decomposition_permutations:
            centred = x.F[rows] - x.F[rows].mean(0)
            out = out.index_copy(0, rows, centred / (centred.square().mean(0) + 1e-8).sqrt())
        return x.on(out * self.weight + self.bias)


def on_features(build, name):
    """A module of torch, under the original's name of its attribute."""

    class OnFeatures(nn.Module):
        def __init__(self, *args, **kwargs):
            super().__init__()
            self.add_module(name, build(*args, **kwargs))

        def forward(self, x):
            return x.on(getattr(self, name)(x.F))

    return OnFeatures


class Pruning(nn.Module):
    def forward(self, x, mask):
        rows = mask.nonzero().squeeze(1)
        places = [x.places[row] for row in rows.tolist()]
        return x.on(x.F[rows], x.coordinate_manager.insert(places, x.tensor_stride, "pruned"))


class Union(nn.Module):
    def forward(self, first, *others):
        for other in others:
            first = first + other
        return first


def broadcast(join):
    class Broadcast(nn.Module):
        def forward(self, x, pooled):
            rows = {place: row for row, place in enumerate(pooled.places)}
            samples = torch.tensor([rows[p[0], *[0] * x.D] for p in x.places])
            return x.on(join(x.F, pooled.F[samples]))

    return Broadcast


class Network(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.D = dim


def package():
    """A module with MinkowskiEngine's names."""
    found = types.ModuleType("MinkowskiEngine")
    names = {
        "BatchNorm": on_features(nn.BatchNorm1d, "bn"),
        "InstanceNorm": InstanceNorm,
        "Linear": on_features(nn.Linear, "linear"),
        "Pruning": Pruning,
        "Union": Union,
        "Network": Network,
        "Convolution": Convolution,
        "ConvolutionTranspose": ConvolutionTranspose,
        "GenerativeConvolutionTranspose": GenerativeConvolutionTranspose,
        "ChannelwiseConvolution": ChannelwiseConvolution,
        "PoolingTranspose": pooling("sum", transposed=True),
        "GlobalPooling": global_pooling("avg"),
        "BroadcastAddition": broadcast(torch.add),
        "BroadcastMultiplication": broadcast(torch.mul),
        "BroadcastConcatenation": broadcast(lambda a, b: torch.cat((a, b), 1)),
        "Broadcast": broadcast(lambda _, b: b),
    }
    for mode in ("sum", "avg", "max"):
        names[f"{mode.title()}Pooling"] = pooling(mode)
        names[f"Global{mode.title()}Pooling"] = global_pooling(mode)
    for name in ("ReLU", "ELU", "LeakyReLU", "GELU", "Sigmoid", "Dropout"):
        names[name] = on_features(getattr(nn, name), "module")
    found.__dict__.update({f"Minkowski{name}": part for name, part in names.items()})
    found.SparseTensor, found.KernelGenerator = SparseTensor, KernelGenerator
    found.CoordinateMapKey, found.RegionType = CoordinateMapKey, types.SimpleNamespace()
    found.RegionType.__dict__.update(HYPER_CUBE=0, HYPER_CROSS=1, CUSTOM=2)
    found.cat = lambda *xs: xs[0].on(torch.cat([x.F for x in xs], 1))
    return found
