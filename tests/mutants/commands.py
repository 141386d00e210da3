"""Planted bugs of the command: its help, its doctor, progress, files of points."""

from tests.mutants import Mutant

CLI = "tests/integration/test_cli.py"
FILES = "tests/integration/test_point_files.py"
PROGRESS = "tests/integration/test_progress.py"

MUTANTS = [
    Mutant(
        "help of the demo needs its packages",
        "    found = parser.parse_args(arguments)\n    require_matplotlib()\n",
        "    require_matplotlib()\n    found = parser.parse_args(arguments)\n",
        CLI + " -k help_and_version",
    ),
    Mutant(
        "without torch the doctor asks for a report of each path",
        "    if answer.returncode == NO_TORCH:\n        return Finding(what,",
        "    if False:\n        return Finding(what,",
        CLI + " -k without_torch_still",
    ),
    Mutant(
        "the doctor does not say what to install",
        "{found.what} is {found.state}. To do: {found.advice}",
        "see {found.what}",
        CLI + " -k without_torch_still",
    ),
    Mutant(
        "without numba nothing warns",
        'if device == "cpu" and not _installed("numba"):',
        "if False:",
        "tests/contract/test_voxels_loops.py -k not_installed",
    ),
    Mutant(
        "a log has its first line after ten seconds",
        "        with step(what):\n            yield from _logged(items, what)\n",
        "        yield from _logged(items, what)\n",
        PROGRESS,
    ),
    Mutant(
        "a step is named when it is over",
        "        timer.cancel()\n",
        "        pass\n",
        PROGRESS,
    ),
    Mutant(
        "the index column of a table is x",
        "if len(names) == width and named:",
        "if False:",
        FILES + " -k reads_files",
    ),
    Mutant(
        "a comment of as many words as columns is a header",
        '<= set(names) or not line.lstrip().startswith(("#", "/"))',
        "<= set(names) or True",
        FILES + " -k reads_files",
    ),
    Mutant(
        "numbers in quotes are no numbers",
        "        quotechar='\"',\n",
        "",
        FILES + " -k reads_files",
    ),
    Mutant(
        "atoms are lines of text",
        "_atoms(path) if begin[0].isdecimal() and begin[2][:1].isalpha() else _text(path)",
        "_text(path)",
        FILES + " -k reads_files",
    ),
    Mutant(
        "of several structures the first is taken",
        "structures[-1].positions",
        "structures[0].positions",
        FILES + " -k structures",
    ),
    Mutant(
        "columns of numbers are rows",
        "if points.ndim == 2 and points.shape[1] > max(len(points), 3):",
        "if False:",
        FILES + " -k columns",
    ),
    Mutant(
        "colours are points",
        "if points.dtype == np.uint8:",
        "if False:",
        FILES + " -k no_points",
    ),
    Mutant(
        "no finite point is a cloud",
        "    if not finite.any():\n",
        "    if False:\n",
        FILES + " -k no_points",
    ),
    Mutant(
        "an array without points is a cloud",
        "    if not len(points):\n        raise ShapeError(f",
        "    if False:\n        raise ShapeError(f",
        FILES + " -k no_points",
    ),
    Mutant(
        "columns are left out in silence",
        "    if points.shape[1] > 3:\n        say(",
        "    if False:\n        say(",
        FILES + " -k unused",
    ),
    Mutant(
        "tensors in bfloat16 cannot be read",
        "(t.double() if t.is_floating_point() else t).numpy()",
        "t.numpy()",
        FILES + " -k tensors",
    ),
    Mutant(
        "coordinates of LAS files are their integers",
        "laspy.read(path).xyz)",
        "laspy.read(path).points.array[[*'XYZ']].tolist())",
        FILES + " -k lidar",
    ),
]
