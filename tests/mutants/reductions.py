"""Planted bugs of the reductions: derivatives, values, errors."""

from tests.mutants import Mutant

FORMULA = "tests/contract/test_reductions_formula.py"
EDGES = "tests/contract/test_reductions_edges.py -k nan"
SPARSITY = "tests/contract/test_reductions_sparsity.py"
LAZY = "tests/contract/test_reductions_lazy.py"
GRAPHS = "tests/contract/test_products_graphs.py"
SAMPLES = "tests/contract/test_reductions_samples_loss.py"

SOLVE = "tests/contract/test_reductions_solve.py"
TIES = "tests/contract/test_reductions_knn.py -k ties"
TYPES = "tests/integration/test_user_types.py"

LOWEST = "tests/contract/test_reductions_cpu.py -k"

MUTANTS = [
    Mutant(
        "minima in lanes go to the last of equal values",
        "i = intervals[interval, 1] - 1 - back",
        "i = intervals[interval, 0] + back",
        f"{LOWEST} lowest",
    ),
    Mutant(
        "minima in lanes take intervals as they are listed",
        "data = data._replace(blocks=_ascending(blocks))",
        "pass",
        f"{LOWEST} lowest_of_blocks",
    ),
    Mutant(
        "minima in lanes pass over NaN",
        "nans[0, place + j] = nans[0, place + j] if {0} == {0} else i",
        "nans[0, place + j] = nans[0, place + j]",
        f"{LOWEST} first_nan",
    ),
    Mutant(
        "maxima in lanes are the minima of negatives",
        'values = -values if wanted.ending == "negated" else values',
        "values = values",
        f"{LOWEST} minima_without",
    ),
    Mutant(
        "type checkers take any name of reductions",
        '    "source",\n]\n\nif not TYPE_CHECKING:',
        '    "source",\n]\n\nif True:',
        f"{TYPES} -k mistake",
    ),
    Mutant(
        "type checkers do not know what a sum over j is",
        "        axis: Literal[0, 1],\n",
        "        axis: Literal[0],\n",
        f"{TYPES} -k types_of",
    ),
    Mutant(
        "|z| of complex numbers is complex for type checkers",
        "def abs(self: HasReal[A]) -> A:",
        "def abs(self) -> Self:",
        f"{TYPES} -k types_of",
    ),
    Mutant(
        "a sum takes any keyword for type checkers",
        "        call: bool = True,\n        **options: Unpack[Keywords],\n",
        "        **options: Any,\n",
        f"{TYPES} -k mistake",
    ),
    Mutant(
        "the real part of complex numbers is another",
        'return self._apply("ComplexReal")',
        'return self._apply("ComplexImag")',
        f"{LAZY} -k complex",
    ),
    Mutant(
        "the default ridge ignores the dtype",
        "return least.clamp(min=LEAST_RIDGE)",
        "return torch.full_like(least, LEAST_RIDGE)",
        f"{SOLVE} -k ridge",
    ),
    Mutant(
        "pivots are those of the whole diagonal",
        "left = (left - column.square()).clamp(min=0)",
        "left = left + 0 * column",
        f"{SOLVE} -k by_name",
    ),
    Mutant(
        "bounds of boxes are of another dtype than distances",
        "    zero = x - x  # of its dtype",
        "    zero = x * 0  # of its dtype",
        TIES,
    ),
    Mutant(
        "cells are made of points whose sides are infinite",
        "itertools.chain(*of_x, low, high, sides)",
        "itertools.chain(*of_x, low, high)",
        "tests/contract/test_reductions_knn.py -k wider",
    ),
    Mutant(
        "a GPU numbers cells by products, and the host counts them by quotients",
        "math.floor((high - low) * self.rate)",
        "math.floor((high - low) / size)",
        "tests/contract/test_reductions_knn.py -k counts_the_cells",
    ),
    Mutant(
        "slopes of the branch that is not taken count, times 0",
        'return n.op == "ifelse" and n.args[0].dim == 1',
        'return n.op == "ifelse" and n.args[0].dim == 0',
        "tests/contract/test_reductions_edges.py -k branch_that_is_taken",
    ),
    Mutant(
        "cells of points nearly in one place have no size",
        "least = max(max(sides) / MOST_CELLS, sys.float_info.min)",
        "least = max(sides) / MOST_CELLS",
        "tests/contract/test_reductions_knn.py -k any_size",
    ),
    Mutant(
        "cells two beside a query's are left out",
        "2: (-1, 2)}",
        "2: (-1,)}",
        "tests/contract/test_reductions_knn.py -k uneven",
    ),
    Mutant(
        "boxes at the distance of the last neighbour are left out",
        "if behind <= best[0]:",
        "if behind < best[0]:",
        TIES,
    ),
    Mutant(
        "a minimum passes over NaN",
        "if not first:  # an argmin takes the first NaN",
        "if found.numel():",
        EDGES,
    ),
    Mutant(
        "halves of ranges are not compared",
        "    if not _are_one_mask(ranges, rows, columns):\n",
        "    if False:\n",
        SPARSITY,
    ),
    Mutant(
        "a complex kernel reads a real vector as parts",
        "        made = cls.real_class\n",
        "        made = cls\n",
        LAZY,
    ),
    Mutant(
        "d(a / b) / db has the wrong sign",
        "return share, -(share * n)",
        "return share, share * n",
        FORMULA,
    ),
    Mutant(
        "d atan2 by its first argument",
        "return share * b, -(share * a)",
        "return share * a, -(share * a)",
        FORMULA,
    ),
    Mutant(
        "d|x−y|² lacks its factor",
        "step = 2 * (g * (a - b))",
        "step = g * (a - b)",
        FORMULA,
    ),
    Mutant(
        "the slope of sin x / x by its series",
        "for k in range(14, 0, -1):",
        "for k in range(2, 0, -1):",
        FORMULA,
    ),
    Mutant("d √x", 'g * (0.5 * node("rsqrt", x))', 'g * node("rsqrt", x)', FORMULA),
    Mutant(
        "d acos x has the sign of asin's",
        'g * -node("rsqrt", 1 - x * x)',
        'g * node("rsqrt", 1 - x * x)',
        FORMULA,
    ),
    Mutant(
        "d xⁿ has the exponent n",
        "(g * (n.data * power(n.args[0], n.data - 1)),)",
        "(g * (n.data * power(n.args[0], n.data)),)",
        FORMULA,
    ),
    Mutant(
        "pieces of a concatenation change places",
        "starts.append(starts[-1] + a.dim)",
        "starts.append(starts[-1] + n.args[-1].dim)",
        FORMULA,
    ),
    Mutant(
        "a choice is made for positive numbers alone",
        "torch.where(c >= 0, a, b)",
        "torch.where(c > 0, a, b)",
        FORMULA,
    ),
    Mutant(
        "1 where x is at least 0",
        "lambda x: (x >= 0).to(x.dtype)",
        "lambda x: (x > 0).to(x.dtype)",
        FORMULA,
    ),
    Mutant(
        "a one-hot number is rounded down",
        "((x + 0.5).floor() == torch",
        "(x.floor() == torch",
        FORMULA,
    ),
    Mutant(
        "a product of tensors swaps its factors' labels",
        "product(g, a, shape_out, labels_out, shape_a, labels_a, labels_b),",
        "product(g, a, shape_out, labels_out, shape_a, labels_a, labels_b) * 2,",
        FORMULA,
    ),
    Mutant(
        "x log x has the slope log x",
        'node("log", x) + 1',
        'node("log", x)',
        FORMULA,
    ),
    Mutant(
        "a point that stands with k others has one more neighbour",
        "        there &= there.cumsum(1) <= k  # ",
        "        there &= there.cumsum(1) <= k + 1  # ",
        GRAPHS,
    ),
    Mutant(
        "the cells of two items touch",
        "    key = items\n",
        "    key = items * 0\n",
        GRAPHS,
    ),
    Mutant(
        "edges keep the order of the items",
        "    rows[order] = torch.where(found < 0",
        "    rows[:] = torch.where(found < 0",
        GRAPHS,
    ),
    Mutant(
        "a run of cells ends one too early",
        "keys[:, None] + (steps + 1), right=True)",
        "keys[:, None] + steps, right=True)",
        GRAPHS,
    ),
    Mutant(
        "unbalanced gradients are of the dual value as it is written",
        "return (rho + eps) * total - eps / 2 * held",
        "return (rho + eps / 2) * total",
        f"{SAMPLES} -k unbalanced",
    ),
    Mutant(
        "unbalanced updates keep their size",
        "return 1.0 if self.reach is None else 1 / (1 + (length / self.reach) ** self.p)",
        "return 1.0",
        f"{SAMPLES} -k potentials",
    ),
    Mutant(
        "potentials stay in the order of clusters",
        "return [part.index_select(0, place) for part, place in zip(parts, places, strict=True)]",
        "return [part for part, place in zip(parts, places, strict=True)]",
        f"{SAMPLES} -k clusters",
    ),
]
