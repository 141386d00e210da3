"""Planted bugs of o3: rotations, layers, products, kernels."""

from tests.mutants import Mutant

RADIAL = "tests/contract/test_o3_radial.py"
STATES = "tests/contract/test_o3_states.py"
ADAPTERS = "tests/contract/test_o3_adapters.py -k"
NORMS = "tests/contract/test_o3_norms.py"

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
]
