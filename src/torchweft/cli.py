"""The command `torchweft`: doctor, demo, inspect.

Each command imports what it needs when it runs: `torchweft doctor` and the help of every command
work without torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchweft import __version__
from torchweft.demo.data import SUFFIXES
from torchweft.errors import WeftError
from torchweft.progress import say, step

__all__ = ["main"]


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
        say(f"torchweft {options.command}: {error}")
    except ModuleNotFoundError as error:
        say(
            f"torchweft {options.command}: {error}, which this command needs: "
            "run `torchweft doctor`, it says how to get it."
        )
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchweft", description="Sparse kernels for geometric deep learning, for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"torchweft {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")

    def command(name: str, summary: str, more: str = "") -> argparse.ArgumentParser:
        text = f"{summary[0].upper()}{summary[1:]}.{more}"
        return commands.add_parser(name, help=summary, description=text)

    doctor = command(
        "doctor", "what this machine has of what torchweft needs, and how to get the rest"
    )
    doctor.set_defaults(run=_doctor)

    demo = commands.add_parser(
        "demo", help="each family on real data, as a page with pictures and numbers", add_help=False
    )
    demo.set_defaults(run=_demo)

    page = " Writes a page with pairs, tile waste, groups, operations and memory of a layer."
    inspect = command("inspect", "what sparse convolutions of a point cloud cost", page)
    inspect.add_argument("file", type=Path, help=f"points: {SUFFIXES}")
    inspect.add_argument("--key", help="name of the points in an .npz or .pt of several arrays")
    default = "twice the median distance of neighbouring points"
    inspect.add_argument(
        "--size", type=float, help=f"edge of a voxel, in the file's unit; default: {default}"
    )
    inspect.add_argument("--kernel", type=int, default=3, help="size on every axis; default: 3")
    inspect.add_argument("--channels", type=int, default=64, help="in and out; default: 64")
    folder = "folder of the page; default: torchweft-inspect"
    inspect.add_argument("--out", type=Path, default=Path("torchweft-inspect"), help=folder)
    inspect.set_defaults(run=_inspect)

    return parser


def _doctor(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from torchweft.doctor import examine

    findings = []
    for finding in examine():
        print(finding, flush=True)
        findings.append(finding)
    fatal = [finding for finding in findings if finding.fatal]
    print()
    for found in fatal:
        print(
            f"torchweft cannot be used here: {found.what} is {found.state}. To do: {found.advice}"
        )
    if not fatal:
        missing = any(finding.state == "missing" for finding in findings)
        print(f"torchweft is ready{'; what is missing is optional' if missing else ''}")
    return 1 if fatal else 0


def _demo(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from torchweft import demo

    demo.main(rest)
    return 0


def _inspect(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from torchweft.demo.page import require_matplotlib

    require_matplotlib()
    with step("loading torch"):
        from torchweft.demo.inspection import inspect

    given = options.file, options.size, options.kernel, options.channels, options.out
    path = inspect(*given, options.key)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return 0
