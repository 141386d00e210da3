"""Planted bugs of the geometric algebras: signs, functions, layers, kernels."""

from tests.mutants import Mutant

ALGEBRA = "tests/contract/test_clifford_algebra.py"
VALUES = "tests/contract/test_clifford.py"
WORKED = "tests/contract/test_clifford_worked_vectors.py"
VERSORS = "tests/contract/test_clifford_versors.py"
LAYERS = "tests/contract/test_clifford_nn.py"
CEGNN = "tests/contract/test_clifford_cegnn.py"
HOST = "tests/contract/test_clifford_host.py"
EMBEDDING = "tests/contract/test_clifford_embedding.py"
GATR = "tests/integration/test_clifford_gatr_layers.py"
CEGNN_NETWORKS = "tests/integration/test_clifford_cegnn_networks.py"
TYPES = "tests/integration/test_user_types.py -k mistake"
DOCSTRINGS = "tests/integration/test_docstrings.py"
CONNECTED = "tests/contract/test_clifford_fc_kernels.py"
MIXED = "tests/contract/test_clifford_mixed.py"
LAUNCHES = "tests/contract/test_clifford_launches.py"

CHECKPOINTS = "tests/integration/test_clifford_checkpoints.py -k refused"

MUTANTS = [
    Mutant(
        "a convolution takes a metric for an algebra",
        "        check_algebra(algebra)\n        self.backend = backend\n",
        "        self.backend = backend\n",
        "tests/contract/test_clifford_errors.py",
    ),
    Mutant(
        "a loader returns a state that is of no layer that it converts",
        "if state and all(converted.get(name) is tensor for name, tensor in state.items()):",
        "if not state:",
        CHECKPOINTS,
    ),
    Mutant(
        "attention takes any option for type checkers",
        "**options: Unpack[SelfAttentionOptions]",
        "**options: Any",
        TYPES,
    ),
    Mutant(
        "the docstring of message_plan does not say what it returns",
        "    Returns:\n        A `MessagePlan` on the device of dst.\n\n",
        "",
        DOCSTRINGS,
    ),
    Mutant(
        "vectors pass each other without a sign",
        "sign = -sign if (high & b).bit_count() & 1 else sign",
        "sign = -sign if (high & b).bit_count() == 1 else sign",
        f"{ALGEBRA} {VALUES}",
    ),
    Mutant("a metric's null vectors square to 1", "sign *= square", "sign *= square or 1", ALGEBRA),
    Mutant(
        "reversion has the period of conjugation",
        "return -1 if grade * (grade - 1) // 2 % 2 else 1",
        "return -1 if grade * (grade + 1) // 2 % 2 else 1",
        ALGEBRA,
    ),
    Mutant(
        "cl() puts null vectors last",
        "return cls((0,) * r + (1,) * p + (-1,) * q)",
        "return cls((1,) * p + (-1,) * q + (0,) * r)",
        ALGEBRA,
    ),
    Mutant(
        "conjugation is reversion",
        '"conjugate": lambda g: (-1) ** (g * (g + 1) // 2)',
        '"conjugate": lambda g: (-1) ** (g * (g - 1) // 2)',
        f"{WORKED} {VALUES} tests/property/test_clifford_identities.py",
    ),
    Mutant(
        "the dual's sign is on the other side",
        "return tuple((self.positions[full ^ a], self.sign(a, full ^ a)) for a in self.blades)",
        "return tuple((self.positions[full ^ a], self.sign(full ^ a, a)) for a in self.blades)",
        f"{ALGEBRA} {WORKED} {VALUES} tests/property/test_clifford_identities.py",
    ),
    Mutant(
        "exp's series ends early",
        "TAYLOR_TERMS = 14",
        "TAYLOR_TERMS = 5",
        VERSORS + " tests/property/test_clifford_identities.py",
    ),
    Mutant(
        "exp squares once too often",
        "result = torch.where(halvings > step, squared, result)",
        "result = torch.where(halvings >= step, squared, result)",
        VERSORS,
    ),
    Mutant(
        "an inverse divides by the wrong blade",
        "y = adjugate / product(wide, adjugate)[:1]",
        "y = adjugate / product(wide, adjugate)[1:2]",
        VERSORS,
    ),
    Mutant(
        "an inverse is right of versors alone",
        "for negative in [{1, 4}, {5}]",
        "for negative in [{5}, {5}]",
        VERSORS,
    ),
    Mutant(
        "norms narrow under autocast",
        'program_rows("rms_norm", norm_words), "x", widened)',
        'program_rows("rms_norm", norm_words), "x")',
        VERSORS,
    ),
    Mutant(
        "a norm squares what it was given",
        "shrinks = epsilon >= LEAST_EPS",
        "shrinks = False",
        "tests/regressions/test_clifford_range.py",
    ),
    Mutant(
        "the sandwich is not turned",
        "return geometric_product(left, turned, algebra, blade_dim=blade_dim, backend=backend)",
        "return geometric_product(left, r, algebra, blade_dim=blade_dim, backend=backend)",
        f"{VERSORS} tests/property/test_clifford_identities.py",
    ),
    Mutant(
        "messages' means count one arrival too many",
        "1 / arrivals[dst], num_nodes",
        "1 / (arrivals[dst] + 1), num_nodes",
        CEGNN,
    ),
    Mutant(
        "a norm over features is a sum",
        ".sqrt().sqrt().mean(-1, keepdim=True)",
        ".sqrt().sqrt().sum(-1, keepdim=True)",
        f"{LAYERS} {CEGNN}",
    ),
    Mutant(
        "calls are cached whatever their dtypes",
        "*ends, known[count::3], known[1::3], known[2::3]",
        "*ends, known[count::3], known[2::3]",
        HOST,
    ),
    Mutant(
        "calls are cached whatever the shapes of their parameters",
        "*ends, known[count::3], known[1::3]",
        "*ends, known[1::3]",
        HOST,
    ),
    Mutant(
        "calls are cached whatever their options",
        "called = (known, backend, options)",
        "called = (known, backend)",
        HOST,
    ),
    Mutant(
        "a call is cached for what is no algebra",
        "    if known is None or type(algebra) is not Algebra or blade_dim not in (0, -1):",
        "    if known is None or blade_dim not in (0, -1):",
        HOST,
    ),
    Mutant(
        "a plane lies on the other side of the origin",
        "return _multivector([1, -distance, *n, 11], blade_dim)",
        "return _multivector([1, distance, *n, 11], blade_dim)",
        EMBEDDING,
    ),
    Mutant(
        "a grid's rows are its columns",
        "in_columns = i % 2",
        "in_columns = (i + 1) % 2",
        GATR,
    ),
    Mutant(
        "gates of grades in the order of features",
        "torch.unflatten(numbers, -1, (-1, self.algebra.n + 1)).movedim(-1, 0)",
        "torch.unflatten(numbers, -1, (self.algebra.n + 1, -1)).movedim(-2, 0)",
        CEGNN_NETWORKS,
    ),
    Mutant(
        "GATr's maps are scaled in float32",
        "dtype=torch.float64,\n    ).sqrt()",
        "dtype=torch.float32,\n    ).sqrt()",
        "tests/integration/test_clifford_checkpoints.py -k factors",
    ),
    Mutant(
        "the layer norm of a metric lets grades cancel",
        'size = add(*(apply("abs", square) for square in _of_grades(x.leaves(), algebra)))',
        "size = add(*_of_grades(x.leaves(), algebra))",
        "tests/integration/test_clifford_checkpoints.py",
    ),
    Mutant(
        "distances in attention have half their mixed terms",
        "found += [-(own * own), -squares, *(const(2) * own * e for e in point)]",
        "found += [-(own * own), -squares, *(own * e for e in point)]",
        f"{LAYERS} -k attention",
    ),
    Mutant(
        "queries of attention forget the metric",
        'const(square if side == "queries" else 1) * e',
        "const(1) * e",
        "tests/integration/test_clifford_checkpoints.py",
    ),
    Mutant(
        "matrices are scaled by the largest of their scales",
        "least = tl.minimum(least, other)",
        "least = tl.minimum(least, 1 / other)",
        CONNECTED,
        kernels=True,
    ),
    Mutant(
        "pairs forget the scale under which the weight's gradient sums",
        "tl.store(pairs_ptr + first + e, tl.div_rn(c, go), mask=mask)",
        "tl.store(pairs_ptr + first + e, tl.div_rn(1.0, go), mask=mask)",
        CONNECTED,
        kernels=True,
    ),
    Mutant(
        "rows without features have scales",
        "if not x.shape[-1]:  # nothing to find a scale of",
        "if x.shape[-1] < 0:",
        f"{CONNECTED} -k features",
        kernels=True,
    ),
    Mutant(
        "the fully connected layer's bias is on every blade",
        "gy[0].sum(0) if gy is not None and of_bias else None",
        "gy.sum((0, 1)) if gy is not None and of_bias else None",
        f"{CONNECTED} -k layer",
        kernels=True,
    ),
    Mutant(
        "the fully connected layer leaves a gradient out where x needs none",
        "(of_x, any(needed[:3]), of_weight)",
        "(of_x, of_x, of_weight)",
        f"{CONNECTED} -k layer",
        kernels=True,
    ),
    Mutant(
        "the fake layer returns no right factors",
        "return [*_product_fake(x, y, weight, signature, True, *ending), y]",
        "return _product_fake(x, y, weight, signature, True, *ending)",
        f"{CONNECTED} -k layer",
        kernels=True,
    ),
    Mutant(
        "pairs are formed in more parts",
        "MOST_PAIRS = 96 << 20",
        "MOST_PAIRS = 96",
        HOST,
    ),
    Mutant(
        "sums in 16 bits stay forbidden after a fully connected product",
        "setattr(matmul, str(reduction), (True, split_k))",
        "setattr(matmul, str(reduction), (False, split_k))",
        HOST,
    ),
    Mutant(
        "terms of a joint map forget their signs",
        "acc += part * sign",
        "acc += part",
        f"{MIXED} -k maps_and",
        kernels=True,
    ),
    Mutant(
        "what a joint map's matrices lose in TF32 is left out",
        "w_low = tl.load(at + MAPS * G * F, mask=inside, other=0.0).T",
        "w_low = 0.0 * w",
        f"{MIXED} -k maps_and",
        kernels=True,
    ),
    Mutant(
        "an infinite number times a low part is infinite too, with another sign",
        'part = tl.where(tl.abs(part) < float("inf"), part, 0.0)',
        "part = part",
        f"{MIXED} -k infinite",
        kernels=True,
    ),
    Mutant(
        "NaN is rounded to zero",
        "high = tl.where(x == x, nearest, x)",
        "high = nearest",
        f"{MIXED} -k infinite",
        kernels=True,
    ),
    Mutant(
        "the gradient of a joint map reads its matrices as the map does",
        "line, at = (of_map * G + g, f) if TURNED else (of_map * F + f, g)",
        "line, at = (of_map * F + f, g)",
        f"{MIXED} -k maps_and",
        kernels=True,
    ),
    Mutant(
        "the norm of scalars keeps their mean",
        "    centred = x.leaves()[0] - each * total(x.leaves()[0], FEATURES)",
        "    centred = x.leaves()[0]",
        "tests/contract/test_clifford_norms.py",
        kernels=True,
    ),
    Mutant(
        "what scalars add to the last blade is what they add to the scalar",
        "place = row * stride_fr + (ENDS * g + (blade > 0))[None, :]",
        "place = row * stride_fr + (ENDS * g)[None, :]",
        f"{MIXED} -k maps_and",
        kernels=True,
    ),
    Mutant(
        "the weights' gradient of a joint map leaves out its last row",
        "end = tl.minimum(begin + tl.cdiv(tl.cdiv(R, PARTS), BLOCK_R) * BLOCK_R, R)",
        "end = tl.minimum(begin + tl.cdiv(tl.cdiv(R, PARTS), BLOCK_R) * BLOCK_R, R - 1)",
        f"{MIXED} -k maps_and",
        kernels=True,
    ),
    Mutant(
        "sums over rows of a joint map's biases take the rows of all parts",
        "acc += tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)\n    tl.store(z_ptr",
        "acc = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)\n    tl.store(z_ptr",
        f"{MIXED} -k maps_and",
        kernels=True,
    ),
    Mutant(
        "a joint map's columns are those of its first map",
        "(lines * begin + column, count)",
        "(column, count)",
        f"{MIXED} -k maps_and",
        kernels=True,
    ),
    Mutant(
        "a joint map overlooks hooks",
        "return type(module) is kind and not is_hooked(module)",
        "return type(module) is kind",
        f"{MIXED} -k plain",
        kernels=True,
    ),
    Mutant(
        "hooks and adapters of queries are not called",
        "if all(_is_bare(of, MixedLinear) for of in maps):",
        "if maps:",
        f"{MIXED} -k 'inside or adapter'",
        kernels=True,
    ),
    Mutant(
        "a joint map reads the gradient of a bias as if features lay side by side",
        "biased = sums.contiguous() if layout.bias else None",
        "biased = sums if layout.bias else None",
        f"{MIXED} -k 'maps_and or expanded'",
        kernels=True,
    ),
    Mutant(
        "scalars of another batch are read past their end",
        "if scalars.shape[:-1] != batch:",
        "if scalars.dim() == 0:",
        f"{MIXED} -k another_batch",
        kernels=True,
    ),
    Mutant(
        "scalars of a joint map may not change in place",
        "t = sums[:, layout.wide :].data",
        "t = sums[:, layout.wide :]",
        f"{MIXED} -k in_place",
        kernels=True,
    ),
    Mutant(
        "code that was loaded on one device runs on another",
        "_cached(build, variant, numbers, device, *dtypes)(operands, workspace)",
        "_cached(build, variant, numbers, None, *dtypes)(operands, workspace)",
        f"{MIXED} -k device",
        kernels=True,
    ),
    Mutant(
        "products of no items have no shape",
        "return torch.cat(found, -1).view(*a.shape[:-1], 2 * a.shape[-1])",
        "return torch.cat(found, -1).view(*a.shape[:-1], -1)",
        f"{LAYERS} -k no_items",
    ),
    Mutant(
        "a symbolic number of features is another one",
        "if fits and (features is None or x.shape[feature_dim] == features):",
        "if fits and features in (None, x.shape[feature_dim]):",
        f"{LAYERS} -k compile_whole",
    ),
    Mutant(
        "the gradient of a fully connected product has factors of the present setting",
        "factors = _factors(x) if norm is None else saved[2].dtype",
        "factors = _factors(x)",
        f"{CONNECTED} -k setting",
        kernels=True,
    ),
    Mutant(
        "L-GATr 1's attention over other items is normalised",
        'options["norm_heads"] = False',
        'options["norm_heads"] = True',
        "tests/integration/test_clifford_checkpoints.py -k other_items",
    ),
    Mutant(
        "the joint operator of products and joins forgets GATr's signs",
        "signs = [(-1) ** g if algebra.n % 2 == 0 else 1 for g in algebra.grades]",
        "signs = [1 for g in algebra.grades]",
        "tests/integration/test_clifford_checkpoints.py",
    ),
    Mutant(
        "the gate of GELU has no cubic term",
        "multiply(const(0.044715), t, t, t)",
        "multiply(const(0.0), t, t, t)",
        f"{MIXED} -k layers",
        kernels=True,
    ),
    Mutant(
        "weights of distances stand head by head",
        "every = weights.to(q.dtype).expand(heads, width).mT.reshape(1, -1)",
        "every = weights.to(q.dtype).expand(heads, width).reshape(1, -1)",
        f"{LAYERS} -k attention",
    ),
    Mutant(
        "queries, keys and values are computed apart",
        "if a is x and b is scalars]",
        "if i == j]",
        LAUNCHES,
        kernels=True,
    ),
]
