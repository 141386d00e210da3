"""Planted bugs of o3: rotations, layers, products, kernels."""

from tests.mutants import Mutant

RADIAL = "tests/contract/test_o3_radial.py"
STATES = "tests/contract/test_o3_states.py"
ADAPTERS = "tests/contract/test_o3_adapters.py -k"
NORMS = "tests/contract/test_o3_norms.py"
EDGES = "tests/contract/test_o3_edge_vectors.py"
NEIGHBOURS = "tests/contract/test_o3_neighbours.py"
CALCULATOR = "tests/contract/test_o3_calculator.py"
ACTIVATIONS = "tests/contract/test_o3_activations.py"
RECORDED = "tests/contract/test_o3_calculator_recorded.py"
NAMES = "tests/contract/test_o3_against_e3nn_names.py"
GRIDS = "tests/contract/test_o3_grids.py"
MIXING = "tests/contract/test_o3_mixing.py"
SORTING = "tests/contract/test_o3_sorting.py"
ENERGIES = "tests/contract/test_o3_energies.py"
HIDDEN = "tests/contract/test_o3_hidden_layers.py"
REDUCED = "tests/contract/test_o3_reduced_products.py"
TYPES = "tests/integration/test_user_types.py -k mistake"
DOCSTRINGS = "tests/integration/test_docstrings.py"

MUTANTS = [
    Mutant(
        "type checkers take any name of o3",
        "if not TYPE_CHECKING:  # for checkers, only names that are here exist",
        "if True:",
        TYPES,
    ),
    Mutant(
        "a convolution takes any option for type checkers",
        "**options: Unpack[ConvolutionOptions]",
        "**options: Any",
        TYPES,
    ),
    Mutant(
        "the example of matrix_to_angles does not import o3",
        ">>> from torchweft import o3\n"
        "        >>> alpha, beta, gamma = o3.matrix_to_angles(o3.matrix_x(",
        ">>> alpha, beta, gamma = o3.matrix_to_angles(o3.matrix_x(",
        DOCSTRINGS,
    ),
    Mutant(
        "the docstring of Gate does not name the gates",
        "        irreps_gates: irreps of g, scalars: one for each copy of y.\n",
        "",
        DOCSTRINGS,
    ),
    Mutant(
        "the cutoff's polynomial has other constants",
        "total = total * t + (k + 1) * (k + 2) / 2",
        "total = total * t + k * (k + 2) / 2",
        RADIAL,
    ),
    Mutant(
        "the cutoff's power",
        "return ((1 - t) ** 3 * total)",
        "return ((1 - t) ** 2 * total)",
        RADIAL,
    ),
    Mutant(
        "the Gaussian basis is not normalised",
        "return (-t.square()).exp() / 1.12",
        "return (-t.square()).exp() / 1.2",
        RADIAL,
    ),
    Mutant(
        "the smooth bump is not normalised",
        "1.14136 * (2 - 1",
        "1.15136 * (2 - 1",
        RADIAL,
    ),
    Mutant(
        "a Fourier basis has the width of another",
        "math.sqrt(0.25 + number / 2)",
        "math.sqrt(0.5 + number / 2)",
        RADIAL,
    ),
    Mutant(
        "sin x / x by a series without signs",
        "series = torch.addcmul(one, series, square, value=-1 / (2 * k * (2 * k + 1)))",
        "series = torch.addcmul(one, series, square, value=-1 / (2 * k * (2 * k + 2)))",
        RADIAL,
    ),
    Mutant(
        "a batch norm has the mean of squares where the largest is wanted",
        'squares.mean(1) if self.reduce == "mean" else squares.amax(1)',
        "squares.mean(1)",
        "tests/contract/test_o3_against_e3nn.py -k 'largest'",
    ),
    Mutant(
        "a norm's eps is left out",
        "scale = (variances[-1] + self.eps).rsqrt()",
        "scale = variances[-1].rsqrt()",
        NORMS,
    ),
    Mutant(
        "dropout does not scale",
        "kept.bernoulli_(1 - self.p).div_(1 - self.p)",
        "kept.bernoulli_(1 - self.p)",
        NORMS,
    ),
    Mutant(
        "a linear layer's paths are normalised by their width squared",
        "factor = 1 / math.sqrt(f_in * terms) if terms else 1.0",
        "factor = 1 / (f_in * terms) if terms else 1.0",
        "tests/contract/test_o3_linear.py tests/contract/test_o3_against_e3nn.py",
    ),
    Mutant(
        "a gate's parity is its scalar's",
        "Irrep(y.ir.l, y.ir.p * g.ir.p)",
        "Irrep(y.ir.l, y.ir.p)",
        "tests/contract/test_o3_gate.py",
    ),
    Mutant(
        "an activation's parity is forgotten",
        "parity = {1: right - left, -1: right + left}",
        "parity = {1: right + left, -1: right + left}",
        "tests/contract/test_o3_gate.py tests/contract/test_o3_nn.py",
    ),
    Mutant(
        "a neighbour list serves until an atom has moved by the whole skin",
        "moved <= (self.skin / 2) ** 2).all()\n",
        "moved <= self.skin**2).all()\n",
        NEIGHBOURS,
    ),
    Mutant(
        "a neighbour list does not notice another cell",
        "same &= (system.cells == old.cells).all() &",
        "same &=",
        NEIGHBOURS,
    ),
    Mutant(
        "edges as long as the cutoff",
        "self._candidates\n        kept = (lengths2(system, src, dst, shift) <",
        "self._candidates\n        kept = (lengths2(system, src, dst, shift) <=",
        NEIGHBOURS,
    ),
    Mutant(
        "images along what does not repeat are within reach",
        "extent[:, None] + 1.5 * reach",
        "extent[:, None] + 0.5 * reach",
        NEIGHBOURS,
    ),
    Mutant(
        "edges of a batch have the numbers of their structure",
        "flip(1) + start, shift",
        "flip(1), shift",
        NEIGHBOURS,
    ),
    Mutant(
        "a calculator's forces on dst have the sign of those on src",
        "forces.index_add(0, s.dst, -slope)",
        "forces.index_add(0, s.dst, slope)",
        CALCULATOR,
    ),
    Mutant(
        "a calculator's stress is of half the volume",
        "(2 * _volume(s.cell))",
        "_volume(s.cell)",
        CALCULATOR,
    ),
    Mutant(
        "a network leaves out the factor of its last function",
        "x, factor = layer.between(1.0, x, layer.after)",
        "x, factor = layer.between(1.0, x, 1.0)",
        f"{NAMES} -k FullyConnectedNet",
    ),
    Mutant(
        "a function lacks the factor of the matrix behind it",
        "x, factor = layer.between(factor, x, layer.after * following.before)",
        "x, factor = layer.between(factor, x, layer.after)",
        f"{NAMES} -k FullyConnectedNet",
    ),
    Mutant(
        "the kernel of an activation lacks the factor of its argument",
        "t = const(float(before)) * x",
        "t = x",
        f"{ACTIVATIONS} -k values",
        kernels=True,
    ),
    Mutant(
        "tanh by the exponential in both directions",
        "far = tl.where(x < 0, -far, far)",
        "far = tl.where(x < 0, far, far)",
        f"{ACTIVATIONS} -k values",
        kernels=True,
    ),
    Mutant(
        "the kernel of a radial basis has no cutoff",
        "return [function * cutoff for function in _bessel(square, r_max, number)]",
        "return _bessel(square, r_max, number)",
        RADIAL,
        kernels=True,
    ),
    Mutant(
        "a network's variance_out scales the standard deviation",
        "root = math.sqrt(var_out)",
        "root = var_out",
        f"{NAMES} -k FullyConnectedNet",
    ),
    Mutant(
        "an old name of irrep_normalization is dropped",
        "irrep_normalization = _one_normalization(irrep_normalization, normalization)",
        "_one_normalization(irrep_normalization, normalization)",
        "tests/contract/test_o3_names.py -k arguments",
    ),
    Mutant(
        "tables are cast, not computed, in another dtype",
        "        self._fill(self.tables())\n        return self",
        "        return self",
        f"{GRIDS} -k dtype",
    ),
    Mutant(
        "tables of a checkpoint are taken",
        "                )\n        self._fill(tables)",
        "                )",
        f"{GRIDS} -k states",
    ),
    Mutant(
        "a checkpoint of other tables is not refused",
        "if given is not None and given.shape == table.shape and not _alike(given, table):",
        "if False:",
        f"{GRIDS} -k refused",
    ),
    Mutant(
        "couplings are sorted after the last factor only",
        "        found = sorted(coupled, key=lambda coupling: coupling[0])\n    return found",
        "        found = coupled\n    return sorted(found, key=lambda coupling: coupling[0])",
        f"{NAMES} -k ReducedTensorProducts",
    ),
    Mutant(
        "an exchange of indices loses its sign",
        "average += sign * tensors",
        "average += tensors",
        f"{NAMES} -k ReducedTensorProducts",
    ),
    Mutant(
        "quadrature on the sphere has other weights",
        "return 2 / half * torch.sin(odd",
        "return 2 / half * torch.cos(odd",
        f"{GRIDS} -k back",
    ),
    Mutant(
        "a signal comes back by the degrees of the result, not of the input",
        "_factors(normalization, lmax, lmax if lmax_in is None else lmax_in)",
        "_factors(normalization, lmax, lmax)",
        f"{NAMES} -k FromS2Grid",
    ),
    Mutant(
        "a random rotation of a grid is not turned back",
        "return self._activated(turned) @ self.irreps_out.D_from_angles(*angles)",
        "return self._activated(turned) @ self.irreps_out.D_from_angles(*angles).mT",
        f"{NAMES} -k random",
    ),
    Mutant(
        "both grids of peaks have their poles in one place",
        "self.D_from_matrix(turn) @ signal",
        "signal",
        "tests/contract/test_o3_tensors.py -k peaks",
    ),
    Mutant(
        "the step's slope is 0 times infinity near 0",
        "positive = v > 1 / 746",
        "positive = v > 0",
        "tests/contract/test_o3_names.py -k tiny",
    ),
    Mutant(
        "a Linear without paths refuses rows without numbers",
        "if not self.weight_numel and isinstance(x, Tensor) and x.shape[-1:] == (0,):",
        "if False:",
        "tests/contract/test_o3_linear.py -k without_numbers",
    ),
    Mutant(
        "3j symbols have our sign whatever the model has",
        "math.copysign(1.0, float((found[0].cpu().double() * own).sum()))",
        "1.0",
        f"{STATES} -k signs",
    ),
    Mutant(
        "a converted layer forgets the tables of the original",
        "for name, t in module.state_dict().items() if name not in own",
        "for name, t in module.state_dict().items() if name in own",
        f"{STATES} -k own_layers",
    ),
    Mutant(
        "constants of a state are not compared",
        "return not bool(((a - b).abs() > ROUNDED * size).any())",
        "return True",
        f"{ADAPTERS} other_constants",
    ),
    Mutant(
        "mixtures of elements are taken for one-hot rows",
        "if not bool((one_hot == attributes).all()):",
        "if bool((one_hot != one_hot).any()):",
        f"{ADAPTERS} one_hot",
    ),
    Mutant(
        "elements are chosen where attributes need a gradient",
        "transformed() or attributes.requires_grad or not",
        "transformed() or not",
        f"{ADAPTERS} one_hot",
    ),
    Mutant(
        "couplings that cancel are measured by themselves",
        "_fitted(values, functions, size.max(initial=0))",
        "_fitted(values, functions, np.abs(values).max(initial=0))",
        "tests/contract/test_o3_symmetric_contraction.py -k cancel",
    ),
    Mutant(
        "elements are read in a run that a graph replays",
        "        if recorded.Current.run is not None:\n            chosen",
        "        if False:\n            chosen",
        f"{ADAPTERS} replays",
    ),
    Mutant(
        "the launches of a contraction keep the tensors of their first call",
        "        if not steps:",
        "        if not plan.steps:",
        "tests/contract/test_o3_symmetric_kernels.py -k linear",
        kernels=True,
    ),
    Mutant(
        "a chunk of edges keeps its rows in a cycle",
        "self._packed = [plan and _PackedProduct(plan, self._rows) for plan in given.plans]",
        "self._packed = [plan and _PackedProduct(plan, self._rows) for plan in given.plans]; "
        "self._self = self",
        "tests/contract/test_o3_channelwise.py -k chunks_change",
    ),
    Mutant(
        "what fills the room of a calculator's record is within the cutoff",
        "padding * (3 * potential.cutoff / cell[0].norm())",
        "padding * (0 * potential.cutoff / cell[0].norm())",
        f"{RECORDED} -k share",
    ),
    Mutant(
        "nobody looks at the slopes of what fills the room",
        "(padding * found.slope.abs().amax(1)).any()",
        "(0 * padding).any()",
        f"{RECORDED} -k beyond",
    ),
    Mutant(
        "a calculator's record outlives the memory of the weights",
        "tuple(t.data_ptr() for t in tensors if t is not None)",
        "()",
        f"{RECORDED} -k turned",
    ),
    Mutant(
        "edges that leave a node are added to those that reach it",
        "found -= _segment_sums(x, tables.x_indptr",
        "found += _segment_sums(x, tables.x_indptr",
        f"{EDGES} -k values",
    ),
    Mutant(
        "a kernel adds edges that leave a node to those that reach it",
        "total -= _sum_of_node",
        "total += _sum_of_node",
        f"{EDGES} -k values",
        kernels=True,
    ),
    Mutant(
        "the gradient of an edge's shift is left out",
        'if rest[0] == "shifted" and needed[1]:',
        'if rest[0] == "shifted" and False:',
        f"{EDGES} -k values",
    ),
    Mutant(
        "gradients of the first hidden matrix lack its factor",
        'factor = f" * {spec.layers.before!r}" if k == 0 else ""\n    at =',
        'factor = ""\n    at =',
        f"{HIDDEN} -k values",
        kernels=True,
    ),
    Mutant(
        "gradients of hidden matrices leave out the tangent's rows",
        '*[("u", "v", "d")] * second]:',
        "]:",
        f"{HIDDEN} -k values",
        kernels=True,
    ),
    Mutant(
        "third derivatives of hidden layers count those through g twice",
        "every = [t.view_as(t) if t.requires_grad else",
        "every = [t if t.requires_grad else",
        f"{HIDDEN} -k three",
        kernels=True,
    ),
    Mutant(
        "forces sum gradients of hidden matrices",
        "summed = any(used(ctx, ctx.needs_input_grad[1:], inputs)[1:])",
        "summed = any(ctx.needs_input_grad[2:])",
        f"{HIDDEN} -k launches",
        kernels=True,
    ),
    Mutant(
        "energies of graphs take nodes in the order of rows",
        "n = p if order_ptr is None else tl.load(order_ptr + p, mask=live, other=0)",
        "n = p",
        f"{ENERGIES} -k values",
        kernels=True,
    ),
    Mutant(
        "nodes behind the last have a shift",
        "total += tl.where(live, x, 0.0)",
        "total += x",
        f"{ENERGIES} -k values",
        kernels=True,
    ),
    Mutant(
        "the total energy has no gradient",
        "of_graphs = [g for g in (interaction, energy) if g is not None]",
        "of_graphs = [g for g in (interaction,) if g is not None]",
        f"{ENERGIES} -k gradients",
        kernels=True,
    ),
    Mutant(
        "a graph keeps tables of a call without launches",
        "    if noting() is not None:\n        return [sorted_by_torch",
        "    if False:\n        return [sorted_by_torch",
        f"{SORTING} -k left_out",
        kernels=True,
    ),
    Mutant(
        "rows begin behind their own entries",
        "below += (row < first).to(tl.int32)",
        "below += (row <= first).to(tl.int32)",
        f"{SORTING} -k one_list",
        kernels=True,
    ),
    Mutant(
        "entries of one step are stored over those before",
        "        before += tl.sum(one, 0)\n",
        "        before += 0 * tl.sum(one, 0)\n",
        f"{SORTING} -k one_list",
        kernels=True,
    ),
    Mutant(
        "a kernel takes a mixture of elements for its largest",
        "(largest == 1) & (tl.sum(tl.abs(x), 1) == 1)",
        "largest == 1",
        f"{SORTING} -k columns",
        kernels=True,
    ),
    Mutant(
        "a table of a run is not sorted anew where it has changed",
        "        full_key = (key, *((id(t), version(t)) for t in tensors))",
        "        full_key = (key, *((id(t), 0) for t in tensors))",
        f"{SORTING} -k changes_in_place",
        kernels=True,
    ),
    Mutant(
        "each layer of a run gathers its sources",
        'now.value((src, order), "in order", gathered)',
        "gathered()",
        f"{SORTING} -k share_sources",
        kernels=True,
    ),
    Mutant(
        "a record takes a mixture of elements for its largest",
        "(largest == 1) & (x.abs().sum(1, keepdim=True) == 1)",
        "largest == 1",
        f"{ADAPTERS} has_nan_for_others",
    ),
    Mutant(
        "a record chooses elements where nothing marks rows that are not one-hot",
        "chosen = self._marks and self._were_one_hot",
        "chosen = self._were_one_hot",
        f"{ADAPTERS} no_layer_is_marked",
    ),
    Mutant(
        "items without a path are not written by products of weights as they are",
        "in sorted(groups(mixing, result), key=",
        "in sorted([g for g in groups(mixing, result) if g.paths], key=",
        f"{MIXING} -k test_shared_weights",
        kernels=True,
    ),
    Mutant(
        "items without a path are not written by products of prepared weights",
        "for group in merged(mixing, result):\n        factors = [",
        "for group in merged(mixing, result):\n        if not group.paths:\n"
        "            continue\n        factors = [",
        f"{MIXING} -k test_shared_weights",
        kernels=True,
    ),
    Mutant(
        "items without a path are not zero where rows have weights of their own",
        "if group.paths or not paths)",
        "if True)",
        f"{MIXING} -k own_weights",
        kernels=True,
    ),
    Mutant(
        "matrices with elements inside are read in rows that follow each other",
        '+ {_behind(n)}", path.weight * elements, n * elements',
        '+ {_behind(n)}", path.weight * elements, n',
        MIXING,
        kernels=True,
    ),
    Mutant(
        "weights that are read as they are lose their low parts",
        "w_low = whole - w if LOW == 0",
        "w_low = w - w if LOW == 0",
        f"{MIXING} -k 'shared_weights'",
        kernels=True,
    ),
    Mutant(
        "a gradient of few rows lacks the factor of its path",
        "w = (acc * FACTOR).to(",
        "w = acc.to(",
        MIXING,
        kernels=True,
    ),
    Mutant(
        "totals are of the rows as they stand",
        "z_indptr=starts, z_edges=order)",
        "z_indptr=starts)",
        f"{EDGES} -k totals",
    ),
    Mutant(
        "rows behind the last whole tile are left out",
        "        if rest:\n            run(0, 1",
        "        if rest > TILE:\n            run(0, 1",
        "tests/contract/test_o3_harmonics_loops.py -k radial_functions",
    ),
    Mutant(
        "a model that cannot be turned stays half converted",
        "            changed.clear()\n            changed.update(content)\n",
        "            pass\n",
        f"{ADAPTERS} as_it_was",
    ),
    Mutant(
        "hooks of a layer are lost on conversion",
        "        setattr(made, name, getattr(module, name))\n",
        "        pass\n",
        f"{ADAPTERS} hooks",
    ),
    Mutant(
        "a record by types counts them where there is no kernel",
        "        if not self._map.serves(x):\n            table",
        "        if False:\n            table",
        f"{ADAPTERS} record_read_no_types",
    ),
    Mutant(
        "a graph out of range is called an element",
        "rows_of_elements(index, count, GRAPHS)",
        "rows_of_elements(index, count)",
        f"{EDGES} -k out_of_range",
    ),
    Mutant(
        "sums of edges are of those that leave a node",
        "dst=tables.dst, z_indptr=tables.z_indptr, z_edges=tables.z_edges,",
        "dst=tables.src, z_indptr=tables.x_indptr, z_edges=tables.x_edges,",
        f"{EDGES} -k sums_of_edges",
    ),
    Mutant(
        "a loaded graph is of no known kind",
        'self._take(state["tables"])',
        'self._take(state["tables"])\n        self.kind = None',
        "tests/contract/test_o3_graph.py -k saved",
    ),
    Mutant(
        "torch.load refuses graphs",
        "add_safe_globals([Graph, Tables, Runs, Slices])",
        "add_safe_globals([Tables, Runs, Slices])",
        "tests/contract/test_o3_graph.py -k saved",
    ),
    Mutant(
        "torch.load refuses masks",
        "add_safe_globals([BlockSparsity])",
        "add_safe_globals([])",
        "tests/contract/test_reductions_sparsity.py -k saved",
    ),
]
