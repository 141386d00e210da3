"""Planted bugs of the stand-ins: the hook, the originals' conventions, voxels written to."""

from tests.mutants import Mutant

HOOK = "tests/contract/test_compat.py"
SPCONV = "tests/contract/test_compat_spconv.py"
TORCHSPARSE = "tests/contract/test_compat_torchsparse.py"
PYKEOPS = "tests/contract/test_compat_pykeops.py"
MINKOWSKI = "tests/contract/test_compat_minkowski.py"
SCATTER = "tests/contract/test_compat_torch_scatter.py"
MINKOWSKI_TENSORS = "tests/contract/test_compat_minkowski_tensors.py"
CAPTURED = "tests/contract/test_compat_captured.py"
TYPES = "tests/integration/test_user_types.py -k mistake"

MUTANTS = [
    Mutant(
        "the voxels of a prepared torchsparse.SparseTensor are nobody's",
        "        self.kept = voxels_of(coords, *box)\n"
        "        return voxels.SparseTensor.on(self.feats, self.kept, Maps())",
        "        return voxels.SparseTensor.on(self.feats, voxels_of(coords, *box), Maps())",
        f"{CAPTURED} -k keeps_what",
    ),
    Mutant(
        "a strided layer of MinkowskiEngine is given its floors, so prepare builds no map",
        "Region(fine.level, None if floors is coarse.level else coarse.level, shape)",
        "Region(fine.level, coarse.level, shape)",
        f"{CAPTURED} -k training",
    ),
    Mutant(
        "a record takes a tensor whose finer level it does not know",
        "    if not manager.is_first(key):\n",
        "    if False:\n",
        f"{CAPTURED} -k decoder",
    ),
    Mutant(
        "a layer that derives from spconv's is replaced by its base",
        "        return type(self).forward is SparseConvolution.forward",
        "        return True",
        f"{SPCONV} -k what_follows",
    ),
    Mutant(
        "a convolution of spconv's leaves out the norm that it takes",
        "after = epilogue_of(norm, operands, activation=activation)",
        "after = epilogue_of(None, operands, activation=activation)",
        f"{SPCONV} -k what_follows",
    ),
    Mutant(
        "an inverse convolution of spconv's leaves out what it takes",
        "        operands = tensor.feats, self._matrices(), self.bias, after\n"
        "        found = conv_undone",
        "        operands = tensor.feats, self._matrices(), self.bias, NO_EPILOGUE\n"
        "        found = conv_undone",
        f"{SPCONV} -k what_follows",
    ),
    Mutant(
        "an index of many dimensions must have numbers",
        "    index = index.reshape(lead, index.shape[dim], rest)\n",
        "    index = index.reshape(lead, -1, rest)\n",
        f"{SCATTER} -k without_numbers",
    ),
    Mutant(
        "type checkers take any name of compat",
        '"uninstall"]\n\nif not TYPE_CHECKING:',
        '"uninstall"]\n\nif True:',
        TYPES,
    ),
    Mutant(
        "the hook stands behind the path's",
        "sys.meta_path.insert(0, _finder)",
        "sys.meta_path.append(_finder)",
        HOOK,
    ),
    Mutant(
        "a module keeps the hook's description",
        "module.__spec__ = spec.loader_state",
        "pass",
        HOOK,
    ),
    Mutant(
        "a kernel of one position is read as (C_out, C_in)",
        "weight = self.weight.view(self.in_channels, self.out_channels)  # the memory, see above",
        "weight = self.weight.view(self.out_channels, self.in_channels).T",
        SPCONV,
    ),
    Mutant(
        "maps are kept though indices were written to",
        "        return self.version == indices._version",
        "        return True",
        SPCONV,
    ),
    Mutant(
        "rows of tensors of inference mode are not compared",
        "            return same_rows(coordinates.rows, indices)",
        "            return True",
        SPCONV,
    ),
    Mutant(
        "an inverse layer writes the voxels of its input",
        "outputs.indices, outputs.spatial_shape = data.indices, list(data.spatial_shape)",
        "outputs.spatial_shape = list(data.spatial_shape)",
        SPCONV,
    ),
    Mutant(
        "pairs are left in the dictionary of the input",
        "outputs.indice_dict = inputs.indice_dict.copy()",
        "outputs.indice_dict = inputs.indice_dict",
        SPCONV,
    ),
    Mutant(
        "rows are added whatever their voxels",
        "if a != b or not same_rows(first.indices, other.indices):",
        "if a != b:",
        SPCONV,
    ),
    Mutant(
        "indices of points stay in the order x, y, z",
        "return found, coords[:, 1:].flip(1), counts.int()",
        "return found, coords[:, 1:], counts.int()",
        SPCONV,
    ),
    Mutant(
        "offsets of torchsparse's odd kernels have the last axis fastest",
        "    if math.prod(kernel) % 2:\n        weight = row_major(weight, kernel)\n",
        "",
        TORCHSPARSE,
    ),
    Mutant(
        "torchsparse's even submanifold kernels are centred",
        'if mode == "hashmap" or math.prod(kernel) % 2 or max(kernel) == 2:',
        "if True:",
        TORCHSPARSE,
    ),
    Mutant(
        "a level of torchsparse has the box of the level above",
        "        outputs = Coordinates(pairs.outputs.rows)  # whose box is that of its own voxels",
        "        outputs = pairs.outputs",
        TORCHSPARSE,
    ),
    Mutant(
        "a transposed layer of torchsparse takes any voxels",
        "    if level is None or not level.unwritten(input.coords):",
        "    if level is None:",
        TORCHSPARSE,
    ),
    Mutant(
        "torchsparse's coords that were written to are handed out again",
        "known.pairs.kept is pairs.kept and known.unwritten(known.coords):",
        "known.pairs.kept is pairs.kept:",
        TORCHSPARSE,
    ),
    Mutant(
        "the corners of torchsparse's voxels count x fastest",
        'torch.einsum("ni,nj,nk->nijk", x, y, z)',
        'torch.einsum("ni,nj,nk->nkji", x, y, z)',
        TORCHSPARSE,
    ),
    Mutant(
        "the last axis of MinkowskiEngine's offsets is fastest",
        "    return torch.cat((rows[:, :1], rows[:, 1:].flip(1)), 1)",
        "    return rows.clone()",
        MINKOWSKI,
    ),
    Mutant(
        "voxels of different strides are joined as those of neighbouring levels",
        "    if counted and all(a * s == b for a, s, b in joined):",
        "    if counted:",
        MINKOWSKI,
    ),
    Mutant(
        "a transposed layer writes all voxels in reach though the level is known",
        "            if known.pair in self._maps:",
        "            if False:",
        MINKOWSKI,
    ),
    Mutant(
        "a window as large as the stride is centred in MinkowskiEngine's pools",
        "        if window.kernel_size != window.stride:\n",
        "        if True:\n",
        MINKOWSKI,
    ),
    Mutant(
        "features of one voxel alone are combined with 0",
        "        met = function(total.index_select(0, others[1]), other.F)\n",
        "        met = function(total.index_select(0, others[1]), other.F)\n"
        "        total = function(total, torch.zeros_like(total))\n",
        MINKOWSKI,
    ),
    Mutant(
        "rows with one voxel are merged in sorted order",
        "    first, order = torch.sort(first)\n    return first, torch.argsort(order)[voxel]",
        "    return first, voxel",
        MINKOWSKI_TENSORS,
    ),
    Mutant(
        "samples without voxels are left out of lists",
        "        count = int(samples.max()) + 1 if len(samples) else 0",
        "        count = 0",
        MINKOWSKI_TENSORS,
    ),
    Mutant(
        "cells of NumPy's grids begin at the least coordinates",
        "return points.grid_cluster(x, size, origin=0.0)",
        "return points.grid_cluster(x, size)",
        PYKEOPS,
    ),
    Mutant(
        "the slope of a Laplacian kernel is another's",
        '"laplacian": lambda xp, q: -0.5 / xp.sqrt(q)',
        '"laplacian": lambda xp, q: -0.5 / (1 + q)',
        PYKEOPS,
    ),
    Mutant(
        "places are numbers of the joined table",
        "(place // self.inner % max(count, 1)).masked_fill(none, count)",
        "place.masked_fill(none, count)",
        f"{SCATTER} -k every_shape",
    ),
    Mutant(
        "lists of bounds have one offset",
        "torch.arange(len(bounds), device=indptr.device).unsqueeze(1) * count",
        "torch.arange(len(bounds), device=indptr.device).unsqueeze(1) * 0",
        f"{SCATTER} -k sorted_rows",
    ),
    Mutant(
        "means of integers are rounded to zero",
        'total.div_(number, rounding_mode="floor")',
        'total.div_(number, rounding_mode="trunc")',
        f"{SCATTER} -k out_holds",
    ),
]
