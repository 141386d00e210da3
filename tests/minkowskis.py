"""Networks as programs write them for MinkowskiEngine, and inputs.

Each takes the module to build from: the stand-in, or `minkowski_reference.package()`.
"""

import torch
from torch import nn

from tests.minkowski_reference import package

REFERENCE = package()

__all__ = [
    "REFERENCE",
    "Run",
    "completion",
    "detector",
    "resnet",
    "rows_of",
    "sample",
    "seeded",
    "unet",
]


def sample(
    engine,
    dim=3,
    channels=3,
    seed=0,
    dtype=torch.float64,
    length=7,
    share=0.2,
    stride=1,
    device="cpu",
):
    """A tensor of two samples on random voxels in random order, negative ones too."""
    generator = torch.Generator().manual_seed(seed)
    voxels = (torch.rand(2, *[length] * dim, generator=generator) < share).nonzero()
    voxels = voxels[torch.randperm(len(voxels), generator=generator)]
    voxels[:, 1:] = (voxels[:, 1:] - length // 2) * stride
    features = torch.randn(len(voxels), channels, generator=generator, dtype=torch.float64)
    features = features.to(device, dtype).requires_grad_()
    return engine.SparseTensor(features, voxels.int().to(device), tensor_stride=stride)


def seeded(engine, build, reference=None, dtype=torch.float64, device="cpu"):
    """A network; its parameters are those of the reference if one is given."""
    torch.manual_seed(0)
    network = build(engine)
    if reference is not None:
        network.load_state_dict(reference.state_dict())
    return network.to(device, dtype)


def rows_of(x):
    """The features by coordinates, ascending."""
    places = x.C.tolist()
    order = sorted(range(len(places)), key=places.__getitem__)
    return [places[n] for n in order], x.F[order]


class Run:
    """What a network computes for a sample: outputs by coordinates, and all gradients."""

    def __init__(self, engine, build, reference=None, dtype=torch.float64, device="cpu", **options):
        self.network = seeded(engine, build, reference, dtype, device)
        x = sample(engine, dtype=dtype, device=device, **options)
        outputs = self.network(x)
        outputs = outputs if isinstance(outputs, list | tuple) else [outputs]
        self.places, rows = zip(*map(rows_of, outputs), strict=True)
        self.strides = [list(y.tensor_stride) for y in outputs]
        generator = torch.Generator().manual_seed(1)
        loss = sum(
            (torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r) * r).sum()
            for r in rows
        )
        named = dict(self.network.named_parameters())
        grads = torch.autograd.grad(loss, [x.F, *named.values()])
        self.found = {f"output {n}": r.detach().double().cpu() for n, r in enumerate(rows)}
        names = ["input", *named]
        self.found |= {n: g.double().cpu() for n, g in zip(names, grads, strict=True)}


def block(engine, inner, outer, stride=1, dim=3):
    """A basic block; the shortcut of a strided one has kernel size 1."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            options = {"kernel_size": 3, "dimension": dim}
            self.conv1 = engine.MinkowskiConvolution(inner, outer, stride=stride, **options)
            self.norm1 = engine.MinkowskiBatchNorm(outer)
            self.conv2 = engine.MinkowskiConvolution(outer, outer, **options)
            self.norm2 = engine.MinkowskiBatchNorm(outer)
            self.relu = engine.MinkowskiReLU(inplace=True)
            self.downsample = nn.Sequential()
            if stride != 1 or inner != outer:
                shortcut = engine.MinkowskiConvolution(
                    inner, outer, kernel_size=1, stride=stride, dimension=dim
                )
                self.downsample = nn.Sequential(shortcut, engine.MinkowskiBatchNorm(outer))

        def forward(self, x):
            out = self.relu(self.norm1(self.conv1(x)))
            out = self.norm2(self.conv2(out))
            out += self.downsample(x)
            return self.relu(out)

    return Block()


def resnet(engine):
    """A stem with a pool, strided blocks, a global pool and a linear layer."""
    return nn.Sequential(
        engine.MinkowskiConvolution(3, 4, kernel_size=5, bias=True, dimension=3),
        engine.MinkowskiInstanceNorm(4),
        engine.MinkowskiELU(),
        engine.MinkowskiMaxPooling(kernel_size=2, stride=2, dimension=3),
        block(engine, 4, 4),
        block(engine, 4, 6, stride=2),
        engine.MinkowskiGlobalAvgPooling(),
        engine.MinkowskiLinear(6, 5),
    )


class _UNet(nn.Module):
    def __init__(self, engine):
        super().__init__()
        conv, up = engine.MinkowskiConvolution, engine.MinkowskiConvolutionTranspose
        norm, cat = engine.MinkowskiBatchNorm, engine.cat
        self.cat = cat
        self.stem = nn.Sequential(conv(3, 4, kernel_size=3, dimension=3), norm(4))
        self.down1 = nn.Sequential(conv(4, 5, kernel_size=2, stride=2, dimension=3), norm(5))
        self.inner1 = block(engine, 5, 5)
        self.down2 = nn.Sequential(conv(5, 6, kernel_size=3, stride=2, dimension=3), norm(6))
        self.inner2 = conv(6, 6, kernel_size=3, dilation=2, dimension=3)
        self.up2 = up(6, 5, kernel_size=3, stride=2, dimension=3)
        self.outer1 = block(engine, 10, 5)
        self.up1 = up(5, 4, kernel_size=2, stride=2, dimension=3)
        self.final = conv(8, 3, kernel_size=1, bias=True, dimension=3)
        self.relu = engine.MinkowskiReLU()

    def forward(self, x):
        fine = self.relu(self.stem(x))
        middle = self.inner1(self.relu(self.down1(fine)))
        coarse = self.relu(self.inner2(self.down2(middle)))
        middle = self.outer1(self.cat(self.up2(coarse), middle))
        return self.final(self.cat(self.up1(middle), fine))


def unet(engine):
    """Two levels down and up, with skips by cat."""
    return _UNet(engine)


class _Completion(nn.Module):
    """Encoder, generative decoder with sums on unions, classification, pruning by scores."""

    def __init__(self, engine):
        super().__init__()
        conv, make = engine.MinkowskiConvolution, engine.MinkowskiGenerativeConvolutionTranspose
        self.encode1 = conv(3, 4, kernel_size=2, stride=2, dimension=3)
        self.encode2 = conv(4, 5, kernel_size=3, stride=2, dimension=3)
        self.decode2 = make(5, 4, kernel_size=4, stride=2, dimension=3)
        self.decode1 = make(4, 3, kernel_size=2, stride=2, dimension=3)
        self.inner = conv(3, 3, kernel_size=3, dimension=3)
        self.score = conv(4, 1, kernel_size=1, bias=True, dimension=3)
        self.elu, self.pruning = engine.MinkowskiELU(), engine.MinkowskiPruning()

    def forward(self, x):
        middle = self.elu(self.encode1(x))
        coarse = self.elu(self.encode2(middle))
        found = self.elu(self.decode2(coarse)) + middle
        score = self.score(found)
        found = self.pruning(found, (score.F.median() < score.F).squeeze())
        return score, self.inner(self.decode1(found))


def completion(engine):
    """Voxels that a network makes and prunes."""
    return _Completion(engine)


class _Detector(nn.Module):
    """A neck of three levels: interpolated scores of a coarse level prune the next."""

    def __init__(self, engine):
        super().__init__()
        conv, make = engine.MinkowskiConvolution, engine.MinkowskiGenerativeConvolutionTranspose
        self.stem = conv(3, 4, kernel_size=3, stride=2, dimension=3)
        self.layers = nn.ModuleList([block(engine, 4, 4, stride=2), block(engine, 4, 5, stride=2)])
        self.ups = nn.ModuleList(
            [
                make(4, 4, kernel_size=2, stride=2, dimension=3),
                make(5, 4, kernel_size=3, stride=2, dimension=3),
            ]
        )
        self.head = conv(4, 2, kernel_size=3, bias=True, dimension=3)
        self.gelu, self.pruning = engine.MinkowskiGELU(), engine.MinkowskiPruning()

    def forward(self, x):
        levels = [self.stem(x)]
        for layer in self.layers:
            levels.append(layer(levels[-1]))
        out, outputs, score = levels[2], [], None
        for level in (1, 0):
            out = levels[level] + self.gelu(self.ups[level](out))
            if score is not None:
                out = self.pruning(out, self._kept(out, score))
            head = self.head(out)
            score = head
            outputs.append(head)
        return outputs

    @staticmethod
    def _kept(x, score):
        with torch.no_grad():
            values = score.features_at_coordinates(x.C.to(score.F.dtype))[:, 0]
            mask = torch.zeros_like(values, dtype=torch.bool)
            for rows in x.decomposition_permutations:
                best = values[rows]
                mask[rows[best > best.mean()]] = True
        return mask


def detector(engine):
    """As mmdetection3d's FCAF3D and TR3D."""
    return _Detector(engine)
