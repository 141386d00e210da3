"""The command `weft`: doctor, demo, inspect, bench, check, tune.

Each command imports what it needs when it runs, so that `weft doctor` works where torch does not.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import WeftError
from weft.progress import say, track

if TYPE_CHECKING:
    import torch

    from weft.bench.case import Case

__all__ = ["main"]

FAMILIES = ("products", "o3", "clifford", "reductions", "voxels")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 is good, 1 is a failure, 2 a wrong call."""
    options, rest = _parser().parse_known_args(arguments)
    if options.command is None:
        _parser().print_help(sys.stderr)
        return 2
    if rest and options.command != "demo":
        _parser().error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return int(options.run(options, rest))
    except (WeftError, OSError) as error:
        say(f"weft {options.command}: {error}")
    except ModuleNotFoundError as error:
        say(
            f"weft {options.command}: {error}, which this command needs: "
            "run `weft doctor`, it says how to get it."
        )
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="weft", description="Sums over structured sets of pairs.")
    commands = parser.add_subparsers(dest="command", metavar="command")

    def command(name: str, summary: str, more: str = "") -> argparse.ArgumentParser:
        text = f"{summary[0].upper()}{summary[1:]}.{more}"
        return commands.add_parser(name, help=summary, description=text)

    doctor = command("doctor", "what this machine has, lacks, and what to do")
    doctor.set_defaults(run=_doctor)

    demo = commands.add_parser("demo", help="the main job on real data", add_help=False)
    demo.set_defaults(run=_demo)

    page = " Leaves a page with pairs, tile waste, groups, operations and memory of a layer."
    inspect = command("inspect", "what a point cloud costs as voxels", page)
    inspect.add_argument("file", type=Path, help="points: .npy .npz .xyz .bin (KITTI) .ply .pcd")
    default = "twice the median distance of neighbouring points"
    inspect.add_argument(
        "--size", type=float, help=f"edge of a voxel, in the file's unit; default: {default}"
    )
    inspect.add_argument("--kernel", type=int, default=3, help="of every axis; default: 3")
    inspect.add_argument("--channels", type=int, default=64, help="in and out; default: 64")
    folder = "folder of the page; default: weft-inspect"
    inspect.add_argument("--out", type=Path, default=Path("weft-inspect"), help=folder)
    inspect.set_defaults(run=_inspect)

    rows = " Each measurement is a line of JSON; run it in the root of a clone."
    bench = command("bench", "measure, next to plain torch and peers", rows)
    which = "a file of benchmarks/suites; default: products (on a CPU: cpu)"
    bench.add_argument("suite", nargs="?", help=which)
    bench.add_argument("--case", help="only cases with this in their name")
    bench.add_argument("--device", help="cpu or cuda; default: cuda where there is one")
    bench.add_argument("--out", type=Path, help="folder of rows; default: benchmarks/results")
    bench.set_defaults(run=_bench)

    receipt = " Leaves a receipt: what was checked, the worst errors, what failed."
    check = command("check", "run every contract on this machine", receipt)
    check.add_argument("family", nargs="?", choices=FAMILIES, help="default: all of them")
    check.add_argument("--device", help="cpu or cuda; default: cuda where there is one")
    check.add_argument("--out", type=Path, help="folder of receipts; default: benchmarks/results")
    check.set_defaults(run=_check)

    tune = command("tune", "find the best tiles for this GPU", " Run it in the root of a clone.")
    tune.add_argument("suite", nargs="?", help="a file of benchmarks/suites; default: products")
    tune.add_argument("--case", help="only cases with this in their name")
    tune.set_defaults(run=_tune)
    return parser


def _doctor(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from weft.doctor import examine

    fatal = []
    for finding in examine():
        print(finding, flush=True)
        fatal += [finding.what] if finding.fatal else []
    print(f"\nweft cannot be used here: see {', '.join(fatal)}" if fatal else "\nweft is ready")
    return 1 if fatal else 0


def _demo(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from weft import demo

    demo.main(rest)
    return 0


def _inspect(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from weft.demo.inspection import inspect

    path = inspect(options.file, options.size, options.kernel, options.channels, options.out)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return 0


def _bench(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from weft import bench
    from weft.bench import tables
    from weft.bench.record import append
    from weft.device import device_of

    device = device_of(options.device)
    suite = bench.load_suite(options.suite or _default_suite(device), options.case)
    out = options.out or bench.benchmarks_folder() / "results"
    path = out / bench.machine(device).folder / f"{suite.family}.jsonl"
    measured = bench.run(suite.name, suite.cases, bench.load_peers(), device, say)
    num_red = 0  # of ours
    for _, rows in zip(track(suite.cases, suite.name), measured, strict=True):
        append(path, rows)
        print(*map(tables.line, rows), sep="\n", flush=True)
        num_red += sum(row.peer == "weft" and row.ms_p50 is None for row in rows)
    if options.out is None:
        tables.update(bench.benchmarks_folder().parent)
    return 1 if num_red else 0


def _check(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from weft import bench
    from weft.device import device_of
    from weft.testing.receipt import check_all

    device = device_of(options.device)
    here = bench.machine(device)
    receipt = check_all(device, vars(here), options.family)
    folder = options.out or Path("benchmarks") / "results"
    name = f"receipt_{options.family}" if options.family else "receipt"
    path = folder / here.folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(receipt.json(), encoding="utf-8")
    print(receipt)
    print(f"receipt: {path}")
    return 1 if receipt.failures else 0


def _tune(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from weft import bench
    from weft.core import tuning
    from weft.device import device_of

    device = device_of(None)
    suite = bench.load_suite(options.suite or "products", options.case)
    for case in track(suite.cases, "tune"):
        for key, tile in tuning.tune(functools.partial(_forward, case, device)).items():
            print(f"{case.name}: {key}: {tile}", flush=True)
    return 0


def _forward(case: Case, device: torch.device) -> Callable[[], object]:
    """The forward pass of a case, with new tables and so a new plan."""
    workload = case.build(device, None)
    return functools.partial(workload.function, *workload.inputs)


def _default_suite(device: torch.device) -> str:
    return "products" if device.type == "cuda" else "cpu"
