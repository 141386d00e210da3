"""Planted bugs of o3: rotations, layers, products, kernels."""

from tests.mutants import Mutant

RADIAL = "tests/contract/test_o3_radial.py"
NORMS = "tests/contract/test_o3_norms.py"
NEIGHBOURS = "tests/contract/test_o3_neighbours.py"
CALCULATOR = "tests/contract/test_o3_calculator.py"

MUTANTS = [
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
        "series = 1 - series * square / (2 * k * (2 * k + 1))",
        "series = 1 - series * square / (2 * k * (2 * k + 2))",
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
        "moved <= (self.skin / 2) ** 2",
        "moved <= self.skin**2",
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
        "< self.cutoff**2",
        "<= self.cutoff**2",
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
        "(2 * s.cell.det().abs())",
        "s.cell.det().abs()",
        CALCULATOR,
    ),
]
