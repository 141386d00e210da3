"""Planted bugs of the command: its help, its doctor, progress, files of points, the demo."""

from tests.mutants import Mutant

CLI = "tests/integration/test_cli.py"
FILES = "tests/integration/test_point_files.py"
PROGRESS = "tests/integration/test_progress.py"
CODE = "tests/integration/test_demo_code.py"

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
        "inspect makes its folder before it reads",
        "    points = read_points(file, key)\n    page.make_folder(out)\n",
        "    page.make_folder(out)\n    points = read_points(file, key)\n",
        "tests/integration/test_inspect.py -k the_command",
    ),
    Mutant(
        "the demo names a page that has moved",
        '"MACE": "migrate/mace"',
        '"MACE": "how-to/use_with_mace"',
        "tests/integration/test_links.py -k demo_names",
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
    Mutant(
        "the demo's pages have pictures for wide screens alone",
        "_data(draw(width)) for width in (WIDE, NARROW)",
        "_data(draw(WIDE)) for width in (WIDE, NARROW)",
        CODE + " -k style",
    ),
    Mutant(
        "code on the demo's pages may not scroll",
        "padding: 16px 20px; overflow-x: auto;",
        "padding: 16px 20px;",
        CODE + " -k style",
    ),
    Mutant(
        "captions of the demo's pages are too light",
        "--soft: #5f6770;",
        "--soft: #8a929b;",
        CODE + " -k style",
    ),
    Mutant(
        "words of the demo's tables are too small on phones",
        "  table { font-size: 14px; }",
        "  table { font-size: 11px; }",
        CODE + " -k style",
    ),
    Mutant(
        "the demo shows imports that its code does not use",
        "names = [alias for alias in node.names if (alias.asname or alias.name) in used]",
        "names = node.names",
        CODE + " -k and_no_more",
    ),
    Mutant(
        "the demo shows docstrings",
        "isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node)",
        "isinstance(node, ast.ClassDef) and ast.get_docstring(node)",
        CODE + " -k code_that_ran",
    ),
    Mutant(
        "the demo's ratios are upside down",
        'return f"{theirs / ours:.{digits}f}',
        'return f"{ours / theirs:.{digits}f}',
        CODE + " -k ratios",
    ),
    Mutant(
        "a cloud's motion may be a mirror image",
        "signs[2] = (u @ v).det()",
        "pass",
        CODE + " -k motion_is_fitted",
    ),
]
