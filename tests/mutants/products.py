"""Planted bugs of the products: tables, loops, chunks, gradients, checks, kernels."""

from tests.mutants import Mutant

VALUES = "tests/contract/test_products.py"
ERRORS = "tests/contract/test_products_errors.py"
SEGMENTS = "tests/contract/test_products_segments.py"
TYPES = "tests/integration/test_user_types.py"
DOCSTRINGS = "tests/integration/test_docstrings.py"

MUTANTS = [
    Mutant(
        "sums of few channels leave out the last",
        'row += _sums(entry, f"range({few})", "c")',
        'row += _sums(entry, f"range({max(few - 1, 1)})", "c")',
        "tests/contract/test_products_segments.py -x",
    ),
    Mutant(
        "type checkers take any name of products",
        '    "radius_graph",\n]\n\nif not TYPE_CHECKING:',
        '    "radius_graph",\n]\n\nif True:',
        f"{TYPES} -k mistake",
    ),
    Mutant(
        "published functions take any arguments for type checkers",
        "(form: Callable[Concatenate[str, P], Tensor], op: str) -> ProductFunction[P]:",
        "(form: Callable[Concatenate[str, P], Tensor], op: str) -> ProductFunction[...]:",
        f"{TYPES} -k mistake",
    ),
    Mutant(
        "docstrings of products leave input1 out",
        "for p in signature.parameters),\n",
        "for p in [*signature.parameters][1:]),\n",
        f"{DOCSTRINGS} -k mul",
    ),
    Mutant(
        "docstrings of products have no example",
        '            "Example:",\n            *_example(form, op, result),\n',
        "",
        f"{DOCSTRINGS} -k mul",
    ),
    Mutant(
        "the torch path scales no entry",
        "rows[0] = rows[0] * weights.reshape(",
        "rows[0] = rows[0] * weights.abs().reshape(",
        f"{VALUES} -k torch",
    ),
    Mutant(
        "the torch path sums in the storage dtype",
        "_gather(a, index, chunk, int(has_n)).to(wide)",
        "_gather(a, index, chunk, int(has_n)).to(wide).bfloat16().to(wide)",
        f"{VALUES} -k torch",
    ),
    Mutant(
        "a chunk's last row is left out",
        "places = indptr[first : last + 1].clamp(b, e).diff().long()",
        "places = indptr[first : last + 1].clamp(b, e - 1).diff().long()",
        f"{VALUES} -k torch",
    ),
    Mutant(
        "numba's outer product has its channels turned",
        "z[r, c * right + d] += factor * y[j, d]",
        "z[r, d * left + c] += factor * y[j, d]",
        f"{VALUES} -k 'outer and numba'",
    ),
    Mutant(
        "numba's inner product forgets its scale",
        "z[r, 0] += s * total",
        "z[r, 0] += total",
        f"{VALUES} -k 'inner and numba'",
    ),
    Mutant(
        "numba's vecmat leaves the first channel out",
        '"    for d in range(0, width):",\n        "        z[r, d] +=',
        '"    for d in range(1, width):",\n        "        z[r, d] +=',
        f"{VALUES} -k 'vecmat and numba'",
    ),
    Mutant(
        "numba's parts of a sum over n overlap",
        ".mul_(part).clamp_(max=size)",
        ".mul_(part - 1).clamp_(max=size)",
        f"{VALUES} -k numba",
    ),
    Mutant(
        "the scale's gradient is summed in the storage dtype",
        "terms = call(first.to(wide), second, None, *args[3:9]",
        "terms = call(first.to(wide).bfloat16().to(wide), second, None, *args[3:9]",
        VALUES,
    ),
    Mutant(
        "the scale's gradient belongs to rows of z",
        '"inner", f"k{c}t", True, args[12])',
        '"inner", f"k{c}k", True, args[12])',
        VALUES,
    ),
    Mutant(
        "a gradient of an accumulated sum is for the first n alone",
        "result = result.expand(operand.shape[0], *result.shape)",
        "result = result.expand(operand.shape[0], *result.shape).tril()",
        VALUES,
    ),
    Mutant(
        "a gradient's matrix is not turned",
        "return factor.mT if letter.isupper() else factor",
        "return factor.abs().mT if letter.isupper() else factor",
        f"{VALUES} -k vecmat",
    ),
    Mutant(
        "entries of no segment are counted",
        "owner[owner == seg.numel() - 1] = sizes.z",
        "owner[owner == seg.numel() - 1] = 0",
        VALUES,
    ),
    Mutant(
        "gather_index is not followed",
        "    return index[gather.long()]",
        "    return index[gather.long().sort().values]",
        VALUES,
    ),
    Mutant(
        "a table's last row is out of range unnoticed",
        "if low < 0 or high >= limit:\n            value =",
        "if low < 0 or high > limit:\n            value =",
        ERRORS,
    ),
    Mutant(
        "the loop of values alone overlooks NaN",
        "best[c] = new if (new > old) | (new != new) else old",
        "best[c] = new if (new > old) else old",
        SEGMENTS,
    ),
    Mutant(
        "the loop of values alone finds the first row of a segment for its minimum",
        "best[c] = new if (new < old) | (new != new) else old",
        "best[c] = new if (new != new) else old",
        SEGMENTS,
    ),
    Mutant(
        "means have no gradient of their counts",
        "    if needed[1]:\n        mean = ",
        "    if False:\n        mean = ",
        f"{SEGMENTS} -k gradient_of_its_counts",
    ),
    Mutant(
        "decreasing segments are accepted",
        "fault = (seg.diff() < 0).nonzero()",
        "fault = (seg.diff() < -1).nonzero()",
        ERRORS,
    ),
    Mutant(
        "unequal channels are accepted",
        "if shape1[dim1] != shape2[dim2]:",
        "if shape1[dim1] > shape2[dim2]:",
        ERRORS,
    ),
    Mutant(
        "kernels: the row kernel drops a row's last entry",
        "    most = tl.max(tl.where(inside, items, 0))\n",
        "    items -= (items > 1).to(items.dtype)\n    most = tl.max(tl.where(inside, items, 0))\n",
        VALUES,
        kernels=True,
    ),
    Mutant(
        "kernels: the row kernel reads the scale of the entry",
        "weight = _row_of(term_ptr, entry, live)",
        "weight = entry",
        VALUES,
        kernels=True,
    ),
    Mutant(
        "kernels: inner sums one block of channels",
        "for c0 in range(0, C, BLOCK_C):",
        "for c0 in range(0, tl.minimum(C, BLOCK_C), BLOCK_C):",
        f"{VALUES} -k inner",
        kernels=True,
    ),
    Mutant(
        "numba leaves the last channels out of a sum",
        "(width % {CHANNELS} + {CHANNELS - 1}) // {CHANNELS}",
        "(width % {CHANNELS}) // {CHANNELS}",
        f"{VALUES} -k 'mul and numba'",
    ),
    Mutant(
        "numba takes the last of equal rows",
        "better = new > best if largest else new < best",
        "better = new >= best if largest else new <= best",
        f"{SEGMENTS} -k 'equal_rows and numba'",
    ),
    Mutant(
        "the kernel takes a segment of -inf for an empty one",
        "(place == T) | ((x != x)",
        "((x != x)",
        f"{SEGMENTS} -k equal_rows",
        kernels=True,
    ),
    Mutant(
        "the pieces of a long segment are taken for its rows",
        "return [best, *(p.gather(0, q) for p, q in zip(place, piece, strict=True))]",
        "return [best, *piece]",
        f"{SEGMENTS} -k equal_rows",
        kernels=True,
    ),
    Mutant(
        "the torch path loses NaN",
        "found = (x == best.gather(0, where)) | (x != x)",
        "found = x == best.gather(0, where)",
        f"{SEGMENTS} -k 'finite and torch'",
    ),
    Mutant(
        "log Σ exp subtracts infinite maxima",
        "top = top.masked_fill(top.isinf(), 0)",
        "top = top + 0",
        f"{SEGMENTS} -k finite",
    ),
    Mutant(
        "a mean's sum is formed in 16 bits",
        "rows = x.to(counts.dtype)  # no sum leaves the range of 16 bits",
        "rows = x",
        f"{SEGMENTS} -k range_of_its_rows",
    ),
    Mutant(
        "maxima without gradients store their places",
        "launcher([x, values, found[0] if places else None])",
        "launcher([x, values, torch.empty(values.shape, dtype=torch.int64)])",
        f"{SEGMENTS} -k stored_for_gradients",
        kernels=True,
    ),
    Mutant(
        "a GPU divides means by about their number of rows",
        "tl.div_rn(z, count) if z.dtype == tl.float32 else z / count",
        "z / count",
        "tests/compile/test_products.py -k rounded_once",
    ),
    Mutant(
        "extremes of no rows of integers are int64",
        "x.sum(0, dtype=x.dtype)",
        "x.sum(0)",
        f"{SEGMENTS} -k test_integers",
    ),
    Mutant(
        "products on the CPU are views of their sums",
        "    return out.data  # no view",
        "    return out  # no view",
        "tests/contract/test_products_doors.py -k in_place",
    ),
    Mutant(
        "compiled products are not checked",
        "found = (admit.__wrapped__ if compiling else admit)(op, metas(tensors))",
        "shown = tensors[:1] * 2 + tensors[2:] if compiling else tensors\n"
        "    found = (admit.__wrapped__ if compiling else admit)(op, metas(shown))",
        f"{ERRORS} -k compiled",
    ),
    Mutant(
        "a mean of no rows is not 0",
        "count = tl.maximum(items, 1).to(ACC)",
        "count = items.to(ACC)",
        f"{SEGMENTS} -k without_rows",
        kernels=True,
    ),
    Mutant(
        "minima of one column are their first rows",
        "better = (new > best) & largest | (new < best) & least",
        "better = (new > best) & largest",
        SEGMENTS,
    ),
    Mutant(
        "extremes of one column are those of the last of equal rows",
        "better = (new > best) & largest | (new < best) & least",
        "better = (new >= best) & largest | (new <= best) & least",
        SEGMENTS,
    ),
    Mutant(
        "extremes of one column pass over NaN",
        "better |= (new != new) & (best == best)",
        "better |= False",
        SEGMENTS,
    ),
    Mutant(
        "rows of the second batch entry are not computed on a CPU",
        "min(last, b * num_rows + num_rows)",
        "min(last, num_rows)",
        VALUES,
    ),
]
