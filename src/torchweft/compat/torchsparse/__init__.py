"""A stand-in for torchsparse 2.1: its names and conventions over torchweft.voxels.

`SparseTensor`, `PointTensor`, `cat`, `generative_add`; `nn` has convolutions, norms, activations
and pools, `nn.functional` the functions below them and those between points and voxels, `utils`
quantization and collation, `backbones` the two networks.  Parameters have torchsparse's names,
shapes, offset order and initial ranges, so that checkpoints load strictly both ways.

Coordinates are those of 2.1: (batch, x, y, z), each level in its own voxels.  Programs for 2.0 and
1.x, with (x, y, z, batch) in voxels of the finest level and `tensor.cmaps`, need its changes first.

Maps are those of the original's default, `kmap_mode="hashmap_on_the_fly"`, or of "hashmap" with
either `downsample_mode` where a configuration asks for it.  Without a `spatial_range` the box of a
level is [0, max + 1) of its own voxels, and a strided layer drops what no whole window in it
covers, as there.  What only chooses among torchsparse's kernels is taken and has no effect
(`Dataflow`, `tune`, `set_conv_mode`, `backends.benchmark`); sums are in float32 or wider.

It differs where the original would give a wrong or no number:

- `.F`, `.C`, `.feats`, `.coords` may be assigned, and `.coords` written to: no map of before is
  used then; a transposed layer on other voxels than its strided layer wrote is refused;
- `+` and `cat` refuse tensors whose rows are different voxels;
- `spatial_range` of a submanifold layer's output is that of its input, whatever its padding, and
  with floors ⌈range / stride⌉;
- float32 products are exact; `backends.allow_tf32 = True` allows TF32;
- duplicated voxels, and voxels outside of the range, are refused; pools of a sample without voxels
  are 0; it runs on the CPU, in every dtype, with gradients of any order.

Lacking, with an error that says the nearest way: dilation, which 2.1 takes and ignores; generative
layers and negative coordinates, whose bounds it computes wrongly; SparseCrop and the layers to a
bird's-eye view, which take the batch column for x; and the functions on its own tables.
"""

from torchweft.compat.lacking import lacking
from torchweft.compat.torchsparse import backend, backends, nn, operators, tensor, utils
from torchweft.compat.torchsparse.operators import cat, generative_add
from torchweft.compat.torchsparse.tensor import PointTensor, SparseTensor
from torchweft.compat.torchsparse.utils.tune import tune

__all__ = [
    "PointTensor",
    "SparseTensor",
    "__version__",
    "backend",
    "backends",
    "cat",
    "generative_add",
    "nn",
    "operators",
    "tensor",
    "tune",
    "utils",
]

__version__ = "2.1.0"

__getattr__ = lacking(
    __name__,
    {
        "point_tensor": "It is torchsparse 1's: use torchsparse.PointTensor.",
        "sparse_tensor": "It is torchsparse 1's: use torchsparse.SparseTensor.",
    },
)
