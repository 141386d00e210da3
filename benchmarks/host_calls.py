"""Host cost of a warm call with gradients, on the CPU: `python -m benchmarks.host_calls`.

For a small call of each family, the median wall time of forward and backward in microseconds, the
fastest of five runs, and how many Python functions of the package the forward call enters.
Tensors are tiny, so what is measured is the host's part.  `--package` names the package to measure
from PYTHONPATH, so that two checkouts can take turns on one machine.
"""

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

REPEATS = 200
RUNS = 5

Call = Callable[[], Tensor]


def calls(package: str) -> dict[str, Call]:
    """A call of each family by name; each has an input that requires a gradient."""
    products, o3, clifford, reductions, voxels = (
        importlib.import_module(f"{package}.{name}")
        for name in ("products", "o3", "clifford", "reductions", "voxels")
    )
    torch.manual_seed(0)
    x, y = torch.randn(10, 8, requires_grad=True), torch.randn(20, 8)
    src, dst = torch.randint(10, (20,)), torch.randint(10, (20,)).sort().values
    info = products.sparse_product_info(index1=src, index2=torch.arange(20), index=dst)
    conv = o3.TensorProductConv(
        "8x0e+8x1o", "0e+1o", "8x0e+8x1o",
        [(0, 0, 0, "uvu", True), (0, 1, 1, "uvu", True), (1, 0, 1, "uvu", True)],
    )  # fmt: skip
    nodes = torch.randn(10, 32, requires_grad=True)
    edges, weights = torch.randn(20, 4), torch.randn(20, conv.weight_numel)
    graph = o3.Graph(src, dst, 10)
    linear, harmonics = o3.Linear("8x0e+8x1o", "8x0e+8x1o"), o3.SphericalHarmonics(range(3), True)
    vectors = torch.randn(20, 3, requires_grad=True)
    algebra = clifford.Algebra((1, 1, 1))
    a, b = torch.randn(8, 4, 8, requires_grad=True), torch.randn(8, 4, 8)
    layer = clifford.CliffordLayer(8, 3)
    points = torch.rand(10, 3, requires_grad=True)
    gaussian = reductions.Genred("Exp(-SqDist(x,y))", ["x=Vi(3)", "y=Vj(3)"], "Sum", axis=1)
    feats = torch.randn(20, 8, requires_grad=True)
    coords = torch.stack([torch.zeros(20), *torch.unravel_index(torch.arange(20), (4, 4, 4))], 1)
    cloud = voxels.SparseTensor(feats, coords.int(), (4, 4, 4), 1)
    block = voxels.SubMConv3d(8, 8, 3)

    def lazy() -> Tensor:
        i, j = reductions.LazyTensor(points[:, None]), reductions.LazyTensor(points[None].detach())
        return (-((i - j) ** 2).sum(-1)).exp().sum(1)

    return {
        "products sparse_mul": lambda: products.sparse_mul(x, y, info),
        "o3 TensorProductConv": lambda: conv(nodes, edges, weights, graph),
        "o3 Linear": lambda: linear(nodes),
        "o3 SphericalHarmonics": lambda: harmonics(vectors),
        "clifford geometric_product": lambda: clifford.geometric_product(a, b, algebra),
        "clifford CliffordLayer": lambda: layer(a),
        "reductions Genred": lambda: gaussian(points, points.detach()),
        "reductions LazyTensor": lazy,
        "voxels SubMConv3d": lambda: block(cloud).feats,
    }


def entered(call: Call, root: str) -> int:
    """How many Python functions under a folder the call enters."""
    count = 0

    def watch(frame, event, argument) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(root)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def microseconds(call: Call) -> float:
    """The median of forward and backward, in the fastest of some runs."""
    medians = []
    for _ in range(RUNS):
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter_ns()
            call().sum().backward()
            times.append(time.perf_counter_ns() - begin)
        medians.append(statistics.median(times))
    return min(medians) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", default="torchweft")
    package = parser.parse_args().package
    torch.set_num_threads(1)
    root = str(Path(str(importlib.import_module(package).__file__)).parent)
    for name, call in calls(package).items():
        for _ in range(5):
            call().sum().backward()
        functions = entered(call, root)
        row = {"call": name, "functions": functions, "us": round(microseconds(call), 1)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
