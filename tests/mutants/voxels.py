"""Planted bugs of voxels: maps, convolutions, pooling, norms, kernels."""

from tests.mutants import Mutant

POOLING = "tests/contract/test_voxels_pooling.py"
VOXELIZE = "tests/contract/test_voxels_voxelize.py"
NORM = "tests/contract/test_voxels_norm.py"
MAPS = "tests/contract/test_voxels_maps.py"
CHECKPOINTS = "tests/integration/test_voxels_checkpoints.py"
TENSOR = "tests/contract/test_voxels_tensor.py"
CPU = "tests/contract/test_voxels_cpu.py tests/contract/test_voxels.py"
KERNELS = "tests/contract/test_voxels_kernels.py tests/contract/test_voxels.py"

BATCH_NORM = "tests/contract/test_voxels_batch_norm.py"
FOLLOWING = "tests/contract/test_voxels_following.py"

METADATA = "tests/contract/test_voxels_metadata.py"
GEOMETRY = "tests/contract/test_voxels_geometry.py"
PREPARE = "tests/contract/test_voxels_prepare.py"
JOBS = "tests/contract/test_voxels_jobs.py"
FLOORS = "tests/contract/test_voxels_floors.py"
TOGETHER = "tests/contract/test_voxels_together.py"
PADDING = "tests/contract/test_voxels_norm_padding.py"
RECORDS = "tests/distributed/test_records.py"
GRAPHS = "tests/contract/test_voxels_graphs.py"
TREES = "tests/contract/test_voxels_trees.py"
PADDED = "tests/contract/test_voxels_padded.py"
SPCONV_CAPTURED = "tests/contract/test_compat_spconv_capture.py"
DOCSTRINGS = "tests/integration/test_docstrings.py"

MUTANTS = [
    Mutant(
        "loops of a strided layer round offsets toward zero",
        "-(offsets // s), offsets % s",
        "-offsets // s, offsets % s",
        "tests/contract/test_voxels_loops.py",
    ),
    Mutant(
        "a state whose weights are of other modules is returned as it is",
        "if layers and others and not {*layers} & {*owners}:",
        "if not modules:",
        "tests/integration/test_voxels_checkpoints.py -k refused",
    ),
    Mutant(
        "any factor is room for voxels",
        "if not isinstance(factor, int | float) or not 1 <= factor < math.inf:\n        raise",
        "if factor is None:\n        raise",
        "tests/contract/test_voxels_padded.py -k cannot_take",
    ),
    Mutant(
        "voxels of the next batch entry are on the line before",
        "for column in range(last + 1):\n            follows &= ",
        "for column in range(1, last + 1):\n            follows &= ",
        "tests/contract/test_voxels_loops.py -k torch_code",
    ),
    Mutant(
        "the docstring of greedy_group has no example",
        "    Example:\n        >>> from torchweft import voxels\n"
        "        >>> voxels.greedy_group([5, 3, 2]).pos_indices\n",
        "",
        DOCSTRINGS,
    ),
    Mutant(
        "the docstring that others of its kind refer to has no arguments",
        "        stride: 1: a submanifold layer has no other.\n",
        "",
        f"{DOCSTRINGS} -k SubMConv2d",
    ),
    Mutant(
        "the range of a group of one member is that of the first",
        "([g.members[0], g.members[-1]], *g[1:])",
        "([g.members[0], g.members[-1]] if len(g.members) > 1 else [0, 0], *g[1:])",
        METADATA,
    ),
    Mutant(
        "an average counts empty places",
        "count = (found.sources >= 0).sum(0).clamp",
        "count = (found.sources >= -1).sum(0).clamp",
        POOLING,
    ),
    Mutant(
        "a global mean is a sum",
        "rows = rows / count.clamp(min=1).unsqueeze(1)",
        "rows = rows * 1",
        POOLING,
    ),
    Mutant(
        "floors are rounded towards zero",
        'cells = torch.div(rows, divisors, rounding_mode="floor")',
        'cells = torch.div(rows, divisors, rounding_mode="trunc")',
        GEOMETRY,
    ),
    Mutant(
        "an even kernel of a floor layer is centred",
        "(k - 1) // 2 * d if k % 2 else 0 for k, d in axes",
        "k // 2 * d for k, d in axes",
        GEOMETRY,
    ),
    Mutant(
        "layers of one stride have outputs of their own",
        "found = self.tables[shape.stride] = self._divided(shape)",
        "found = self._divided(shape)",
        GEOMETRY,
    ),
    Mutant(
        "a transposed map onto given voxels has its sides exchanged",
        "return (back, table) if shape.transposed else (table, back)",
        "return table, back",
        GEOMETRY,
    ),
    Mutant(
        "a map onto given coordinates is kept by geometry alone",
        "    kept = inputs.onto.get(onto)\n",
        "    kept = next(iter(inputs.onto.values()), None)\n",
        GEOMETRY,
    ),
    Mutant(
        "coordinates of another level are taken",
        "if outputs.stride != stride:",
        "if False:",
        GEOMETRY,
    ),
    Mutant(
        "a pruned tensor keeps its sorted keys",
        "found._keys = found._sorted = None",
        "found._keys = None",
        TENSOR,
    ),
    Mutant(
        "queries of other dtypes are looked up",
        'check_rows(queries, "queries", self.dim)',
        "pass",
        TENSOR,
    ),
    Mutant(
        "hard voxels are numbered by their keys",
        "rank[by_first] = torch.arange",
        "rank[:] = torch.arange",
        VOXELIZE,
    ),
    Mutant(
        "after max_voxels no point joins a voxel",
        "    kept = number < most\n",
        "    kept = (number < most) & (point <= first[:most].max())\n",
        VOXELIZE,
    ),
    Mutant(
        "points below zero are rounded towards it",
        'torch.div(points.detach().double() - corner, edges, rounding_mode="floor")',
        'torch.div(points.detach().double() - corner, edges, rounding_mode="trunc")',
        VOXELIZE,
    ),
    Mutant(
        "results of loops are made on the default device",
        "y = x.new_empty(table.shape[1], outer, dtype=",
        "y = torch.empty(table.shape[1], outer, dtype=",
        "tests/contract/test_voxels_doors.py -k default_device",
    ),
    Mutant(
        "a mean over points is their sum",
        'if reduce == "mean":\n        total = total / lengths(*segments).unsqueeze(1)\n',
        'if reduce == "mean":\n        total = total * 1\n',
        VOXELIZE,
    ),
    Mutant(
        "devoxelize's shares do not sum to 1",
        "return weighted_rows(tensor.feats, rows, shares / total.masked_fill(total == 0, 1))",
        "return weighted_rows(tensor.feats, rows, shares)",
        VOXELIZE,
    ),
    Mutant(
        "devoxelize is half a voxel off",
        "/ edges - 0.5 - low).clamp(0, 1)",
        "/ edges - low).clamp(0, 1)",
        VOXELIZE,
    ),
    Mutant(
        "a running variance is biased",
        "unbiased = var * count / (count - 1).clamp(min=1)",
        "unbiased = var * count / count.clamp(min=1)",
        NORM,
    ),
    Mutant(
        "parts of a batch's variance keep their own means",
        "squares += tl.where(live, square + count * away * away, 0.0)",
        "squares += tl.where(live, square, 0.0)",
        BATCH_NORM,
        kernels=True,
    ),
    Mutant(
        "means of ranks count alike, however many rows these have",
        "        total += rows * mean\n",
        "        total += count * mean\n",
        f"{BATCH_NORM} -k ranks",
        kernels=True,
    ),
    Mutant(
        "rows past the last count in a batch's statistics",
        "        d = tl.where((row < last)[:, None], d, 0.0)\n",
        "",
        BATCH_NORM,
        kernels=True,
    ),
    Mutant(
        "the gradient of a batch norm leaves out the variance's share",
        "g -= normal * (_numbers(sums_ptr + C, c, C, 0.0) / count)[None, :]",
        "pass",
        BATCH_NORM,
        kernels=True,
    ),
    Mutant(
        "a residual's gradient lacks the activation's slope",
        "dresidual = dresidual if dz is None else dz",
        "dresidual = dresidual if dz is None else g",
        BATCH_NORM,
        kernels=True,
    ),
    Mutant(
        "torch does not see running statistics change",
        "    torch.autograd.graph.increment_version(tensors)\n",
        "    pass\n",
        BATCH_NORM,
        kernels=True,
    ),
    Mutant(
        "rows of padding count in a batch's statistics",
        "last = _real(valid_ptr, tl.minimum(first + chunk, rows))",
        "last = tl.minimum(first + chunk, rows)",
        PADDING,
        kernels=True,
    ),
    Mutant(
        "rows of padding have a gradient",
        "        v = tl.where((row < real)[:, None], v, 0.0)\n",
        "        pass\n",
        PADDING,
        kernels=True,
    ),
    Mutant(
        "a residual without an activation takes the gradient of padding",
        "of_z = of_residual and (activation is not None or valid is not None)",
        "of_z = of_residual and activation is not None",
        PADDING,
        kernels=True,
    ),
    Mutant(
        "padding is multiplied by 0",
        "torch.where((row < valid)[:, None], rows, 0.0)",
        "rows * (row < valid)[:, None]",
        PADDING,
    ),
    Mutant(
        "a norm in training is folded into its convolution",
        "        if by_batch(norm):\n            return None\n",
        "",
        FOLLOWING,
    ),
    Mutant(
        "a folded norm leaves out the convolution's bias",
        "            return self._replace(mean=self.mean - bias)\n",
        "            return self\n",
        FOLLOWING,
    ),
    Mutant(
        "a sequence joins modules that have hooks",
        "    if name is None or is_hooked(module) or",
        "    if name is None or",
        FOLLOWING,
    ),
    Mutant(
        "a convolution with a hook takes the norm behind it",
        "first = convolves(module) and not is_hooked(module)",
        "first = convolves(module)",
        FOLLOWING,
    ),
    Mutant(
        "a norm over samples takes another's mean",
        "centred = x - apart(mean_of(x), owner, order)",
        "centred = x - mean_of(x).mean(0)",
        NORM,
    ),
    Mutant(
        "a transposed map keeps its offsets' order",
        "back = self.table.flip(0) if self.back is None else self.back",
        "back = self.table if self.back is None else self.back",
        MAPS + " tests/contract/test_voxels_tensor.py",
    ),
    Mutant(
        "targets of a submanifold map are its sources",
        "return self.sources.flip(0) if self.back is None",
        "return self.sources if self.back is None",
        MAPS + " tests/contract/test_voxels_tensor.py",
    ),
    Mutant(
        "coordinates are kept by reference",
        "return rows.to(torch.int32, copy=True, memory_format=torch.contiguous_format)",
        "return rows.to(torch.int32).contiguous()",
        TENSOR,
    ),
    Mutant(
        "coordinates are handed out by reference",
        "return self.coordinates.rows.clone()",
        "return self.coordinates.rows",
        TENSOR,
    ),
    Mutant(
        "tensors that were built apart are added row by row",
        "return other.feats.index_select(0, rows)",
        "return other.feats",
        TENSOR,
    ),
    Mutant(
        "a loaded network writes all that its kernels reach",
        "        if not same:",
        "        if False:",
        CHECKPOINTS,
    ),
    Mutant(
        "weights that fit two versions of spconv are read as one's",
        "if len(fitting) == 2 and both:",
        "if len(fitting) == 3 and both:",
        CHECKPOINTS,
    ),
    Mutant(
        "groups of channels are in the wrong order in gradients",
        "return matrices.permute(0, 3, 2, 1).flatten(2)",
        "return matrices.permute(0, 3, 2, 1).flip(2).flatten(2)",
        CPU,
    ),
    Mutant(
        "a chunk's pairs end one lane early",
        "part = torch.where(part < 0, len(x) - 1, part).flatten()",
        "part = torch.where(part < 0, 0, part).flatten()",
        CPU,
    ),
    Mutant(
        "inference compares an epilogue with an empty one",
        "    if after is NO_EPILOGUE or observed(x, weight, bias, *after[:5]):\n        if backend",
        "    if after == NO_EPILOGUE or observed(x, weight, bias, *after[:5]):\n        if backend",
        "tests/contract/test_voxels_host.py -k compares",
    ),
    Mutant(
        "kernels: the epilogue forgets the shift",
        "acc += shift[None, :]",
        "acc += 0 * shift[None, :]",
        "tests/contract/test_voxels_epilogue.py",
        kernels=True,
    ),
    Mutant(
        "kernels: the epilogue forgets a norm's mean",
        "shift = -moved if shift is None else shift - moved",
        "shift = moved - moved if shift is None else shift",
        "tests/contract/test_voxels_kernels.py -k epilogue",
        kernels=True,
    ),
    Mutant(
        "kernels: both halves of wide tiles are written to the first columns",
        "        first += acc.shape[1] // 2\n",
        "",
        "tests/contract/test_voxels_kernels.py -k epilogue",
        kernels=True,
    ),
    Mutant(
        "kernels: the epilogue forgets the residual",
        "acc += tl.load(residual_ptr + at, mask=mask, other=0.0).to(acc.dtype)",
        "acc += 0 * tl.load(residual_ptr + at, mask=mask, other=0.0).to(acc.dtype)",
        "tests/contract/test_voxels_epilogue.py",
        kernels=True,
    ),
    Mutant(
        "kernels: channels one by one lose their weight's sign",
        "acc += x.to(ACC) * w.to(ACC)[None, :]",
        "acc += x.to(ACC) * tl.abs(w.to(ACC))[None, :]",
        KERNELS,
        kernels=True,
    ),
    Mutant(
        "kernels: a weight's gradient leaves parts out",
        "        acc += z\n    dw =",
        "        acc = z\n    dw =",
        KERNELS,
        kernels=True,
    ),
    Mutant(
        "kernels: shares inside of an offset skip units of its pairs",
        "step = tl.where(inside, (units - before) // size, 1)",
        "step = tl.where(inside, (units - before) // size + 1, 1)",
        KERNELS,
        kernels=True,
    ),
    Mutant(
        "kernels: channels that do not fill a block are read unmasked",
        "constants += (c % tile.blocks[2] == 0, d % tile.blocks[1] == 0)",
        "constants += (True, d % tile.blocks[1] == 0)",
        KERNELS,
        kernels=True,
    ),
    Mutant(
        "kernels: a weight's gradient reads channels past the last unmasked",
        "even = c % tile.blocks[0] == 0, d % tile.blocks[1] == 0",
        "even = True, True",
        KERNELS,
        kernels=True,
    ),
    Mutant(
        "kernels: too few programs add up the shares of a weight's gradient",
        "c * channels // reduced.blocks[1]",
        "c * channels // 2048",
        f"{KERNELS} -k few_shares",
        kernels=True,
    ),
    Mutant(
        "kernels: rows are masked before their addresses are computed",
        "            x = x_ptr[None, :] + (row.to(INT)[:, None] * stride_xr + ch)\n"
        "            x_mask = (row >= 0)[:, None]\n",
        "            x_mask = (row >= 0)[:, None]\n"
        "            x = x_ptr[None, :] + (row.to(INT)[:, None] * stride_xr + ch)\n",
        "tests/compile/test_voxels.py -k layout",
    ),
    Mutant(
        "kernels: a weight's gradient is not turned",
        "acc = tl.dot(tl.trans(x), g, acc, input_precision=PRECISION, out_dtype=ACC)",
        "acc = tl.dot(tl.abs(tl.trans(x)), g, acc, input_precision=PRECISION, out_dtype=ACC)",
        KERNELS,
        kernels=True,
    ),
    Mutant(
        "a level with more voxels than there is room for is taken as it is",
        "if inputs is None or count > len(level.voxels):",
        "if inputs is None:",
        f"{TOGETHER} -k more_voxels",
        kernels=True,
    ),
    Mutant(
        "rows past the last voxel of a level are voxels",
        "    met &= key >= 0\n",
        "    met &= key >= -1\n",
        f"{TOGETHER} -k unet-boxed",
        kernels=True,
    ),
    Mutant(
        "a network keeps the recipe of its first cloud",
        "_recipes[module] = voxels.asked",
        "_recipes.setdefault(module, voxels.asked)",
        f"{TOGETHER} -k forgotten",
        kernels=True,
    ),
    Mutant(
        "pairs wait for the backward pass of a known network",
        "    if recorded:\n        of = ",
        "    if not cloud:\n        of = ",
        f"{TOGETHER} -k trained",
        kernels=True,
    ),
    Mutant(
        "the pairs of all tables are as many as those of the first",
        "self.flags.read()[self.begin : self.begin + offsets]",
        "self.flags.read()[:offsets]",
        f"{JOBS} -k pairs",
        kernels=True,
    ),
    Mutant(
        "floors are counted from the voxel 0 of a box that begins elsewhere",
        "pads = tuple(-low * s for",
        "pads = tuple(0 * low * s for",
        f"{FLOORS} -k floors_and",
        kernels=True,
    ),
    Mutant(
        "candidates of known voxels are counted from 0",
        "before = [max(0, -(-(",
        "before = [0 * max(0, -(-(",
        f"{FLOORS} -k floors_and",
        kernels=True,
    ),
    Mutant(
        "a map that only a pool reads has tiles",
        "if forward or (inverse and recorded):",
        "if table is not None:",
        f"{TOGETHER} -k floors_are_known",
        kernels=True,
    ),
    Mutant(
        "inference mode builds what gradients read",
        "_build(voxels, recipe, recording() and not tables_only, tables_only)",
        "_build(voxels, recipe, True, tables_only)",
        f"{TOGETHER} -k inference_mode_builds",
        kernels=True,
    ),
    Mutant(
        "who reads a map is forgotten where a cloud is prepared alone",
        "            note_again(inputs, step)\n",
        "",
        f"{TOGETHER} -k alone",
        kernels=True,
    ),
    Mutant(
        "tables that inference mode builds are its tensors",
        "if torch.is_inference_mode_enabled():",
        "if torch.is_inference_mode_enabled() is None:",
        f"{TOGETHER} -k inference",
        kernels=True,
    ),
    Mutant(
        "columns past the last of a table are sorted before others",
        "tl.where(i < N, gray, past)",
        "tl.where(i < N, gray, 0)",
        JOBS,
        kernels=True,
    ),
    Mutant(
        "a panel of a table is counted among those of all",
        "panel -= first * (NEAR // PANEL)",
        "panel -= 0 * first",
        JOBS,
        kernels=True,
    ),
    Mutant(
        "preparing a network moves its statistics",
        "torch.func.functional_call(network, buffers, (tensor,))",
        "network(tensor)",
        PREPARE,
    ),
    Mutant(
        "voxels in a graph are sorted again for each map",
        "found = _known[rows] = Coordinates(rows, spatial_shape, batch_size)",
        "found = Coordinates(rows, spatial_shape, batch_size)",
        GRAPHS,
    ),
    Mutant(
        "voxels in a graph are taken for sorted",
        "            return self._order_in_graph()\n",
        "            return None\n",
        GRAPHS,
    ),
    Mutant(
        "a level in a graph has the box of the level before",
        "grid = inputs.coarse_grid(shape) if floor else _output_grid(inputs, shape)",
        "grid = inputs.grid",
        GRAPHS,
    ),
    Mutant(
        "a level of one voxel is written in a graph",
        "if outputs is not None and len(outputs) < LEAST:",
        "if False:",
        GRAPHS,
    ),
    Mutant(
        "a tree forgets the names of earlier levels",
        "names = tuple([(name, *places[id(found.kept)]) for name, found in named])",
        "names = ()",
        TREES,
    ),
    Mutant(
        "a tree forgets maps onto given voxels",
        "        for outputs in (levels if level.onto else ())\n",
        "        for outputs in ()\n",
        TREES,
    ),
    Mutant(
        "a record copies the tables of a tensor",
        "return hasattr(table, _FIXED)",
        "return False",
        TREES,
    ),
    Mutant(
        "pairs are listed that a record lists too",
        "recording() and not tables_only, tables_only)",
        "recording(), tables_only)",
        f"{PADDED} -k tables_only",
        kernels=True,
    ),
    Mutant(
        "a batch norm over ranks counts padding",
        "rank_norm(self, tensor.feats, *after, group=group, valid=valid)",
        "rank_norm(self, tensor.feats, *after, group=group)",
        f"{RECORDS} -k training",
    ),
    Mutant(
        "the gradient of a batch norm is divided by the number of padded rows",
        "count = real.to(tl.float32) if count_ptr is None",
        "count = rows.to(tl.float32) if count_ptr is None",
        f"{PADDING} -k as_accurate",
        kernels=True,
    ),
    Mutant(
        "batch norms of a rank and of all ranks share a kernel of one count",
        "    tensors = (weight, bias, rest, mean, var, valid, None)\n",
        "    tensors = (weight, bias, rest, mean, var, valid, valid)\n",
        f"{NORM} -k two_ranks",
        kernels=True,
    ),
    Mutant(
        "the rest of half a table has offsets from the first",
        "tl.store(rest_ptr + (HALF - 1 - k) * N",
        "tl.store(rest_ptr + k * N",
        f"{JOBS} -k rest",
        kernels=True,
    ),
    Mutant(
        "keys that sort as 16 bits lack one for the number of a job",
        "if bits <= 15 else",
        "if bits <= 16 else",
        f"{JOBS} -k those_of_each_table",
        kernels=True,
    ),
    Mutant(
        "keys that sort as 32 bits lack one for the number of a job",
        "if bits <= 31 else torch.int64",
        "if bits <= 32 else torch.int64",
        f"{JOBS} -k those_of_each_table",
        kernels=True,
    ),
    Mutant(
        "a record builds the tiles of each table alone",
        "        run.value((), _PLANS, lambda: _launch(notes[_PLANS]))",
        "        pass",
        f"{PADDED} -k sorts_the_rows",
        kernels=True,
    ),
    Mutant(
        "tiles of a record are those of the voxels that were there when it was planned",
        "            plan.launch()\n            plan.keep()",
        "            plan.keep()",
        f"{PADDED} -k test_values",
        kernels=True,
    ),
    Mutant(
        "tiles are built that a record builds too",
        "tiles_together([] if tables_only else later)",
        "tiles_together(later)",
        f"{PADDED} -k tables_only",
        kernels=True,
    ),
    Mutant(
        "dimensions of tables are told by their lengths alone",
        "        for leaf, dims in exact.items():\n",
        "        for leaf, dims in dict(()).items():\n",
        f"{PADDED} -k agree_by_chance",
    ),
    Mutant(
        "padding of an order repeats rows",
        '            padding[i][f"order_{i}", 0] = f"rows_{i}"\n',
        "            pass\n",
        f"{PADDED} -k values",
    ),
    Mutant(
        "statistics that kernels write are no state that a comparison puts back",
        "        observer.note_written(tensors)\n",
        "        pass\n",
        f"{PADDED} -k training",
        kernels=True,
    ),
    Mutant(
        "the comparison with padding takes torch's batch norms",
        "    return watched() == len(Observer.active)\n",
        "    return not watched()\n",
        f"{PADDED} -k runs_kernels",
        kernels=True,
    ),
    Mutant(
        "batch norms count padding",
        'return run.value((rows,), "voxels", lambda: (rows[:, 0] >= 0).sum())',
        'return run.value((rows,), "voxels", lambda: (rows[:, 0] >= -1).sum())',
        f"{PADDED} -k training",
    ),
    Mutant(
        "torch's norms on features count padding",
        "return Replaced({functional.batch_norm: normalised})",
        "return Replaced({})",
        f"{PADDED} -k training",
    ),
    Mutant(
        "norms of a sequence in spconv's layers count padding",
        'given["valid"] = None if input.kept is None else input.kept.num_unpadded',
        'given["valid"] = None',
        f"{SPCONV_CAPTURED} -k training",
        kernels=True,
    ),
    Mutant(
        "the voxels of a prepared SparseConvTensor are nobody's",
        "        self.kept = voxels_of(self.indices, self.batch_size, self.spatial_shape)\n"
        "        return voxels.SparseTensor.on(self._features, self.kept, Maps())",
        "        kept = voxels_of(self.indices, self.batch_size, self.spatial_shape)\n"
        "        return voxels.SparseTensor.on(self._features, kept, Maps())",
        f"{SPCONV_CAPTURED} -k keeps_what",
    ),
    Mutant(
        "the structure of a cloud with maps has its bounds",
        "        grid = _given_grid(level) if built else level.grid\n",
        "        grid = level.grid\n",
        f"{PADDED} -k floors",
    ),
    Mutant(
        "voxels are searched among those of padding",
        '        """(N,) ascending, in the packing\'s dtype; raises as `rows` does."""\n'
        "        self._check_unpadded()\n",
        "",
        "tests/contract/test_compat_captured.py -k not_read",
    ),
    Mutant(
        "an empty level is that above it",
        "note(inputs, shape, inputs if tables[2] is None else tables[2])",
        "note(inputs, shape, tables[2] or inputs)",
        "tests/contract/test_voxels_prepare.py -k without_voxels",
    ),
    Mutant(
        "statistics of no rows are divided by their number",
        "    count = valid.clamp(min=1)  # of no rows, 0 and 0\n",
        "    count = valid\n",
        "tests/contract/test_voxels_norm_padding.py -k empty",
    ),
    Mutant(
        "indices of a record with room are read",
        "        if func not in _WITHOUT_VALUES:\n",
        "        if False:\n",
        f"{SPCONV_CAPTURED} -k not_read",
    ),
    Mutant(
        "each layer of a record sorts the rows of its map",
        "        if (run := recorded.Current.run) is not None and run.varies(tensors):\n",
        "        run = recorded.Current.run\n        if False:\n",
        f"{PADDED} -k sorts_the_rows",
        kernels=True,
    ),
    Mutant(
        "a result fixes the tables of a record with room",
        "    mark_fixed(*[t for t in leaves if varying(t) is None])\n",
        "    mark_fixed(*leaves)\n",
        f"{PADDED} -k tensor_as_a_result",
    ),
    Mutant(
        "padding counts as voxels",
        "        if varying(self._rows) is not None:\n",
        "        if False:\n",
        f"{PADDED} -k what_needs_voxels",
    ),
]
