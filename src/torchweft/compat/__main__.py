"""`python -m torchweft.compat NAME… -- script.py args…`, or `-- -m module args…`.

Runs an unmodified program with the stand-ins of these libraries installed.
"""

import os
import runpy
import sys

from torchweft.compat.installing import install, names
from torchweft.errors import WeftError

USAGE = "python -m torchweft.compat NAME… -- script.py args…   or   … -- -m module args…"


def main(arguments: list[str]) -> None:
    """Install the stand-ins named before `--`, and run the program behind it.

    Raises:
        SystemExit: no name, no `--`, no program, or a name without a stand-in.
    """
    if arguments[:1] in (["-h"], ["--help"]):
        sys.stdout.write(f"{__doc__}\nNames: {', '.join(names())}\n")
        return
    libraries, program = _parts(arguments)
    if arguments and "--" not in arguments:
        raise SystemExit(
            f"{' '.join(arguments)} was given without --, which must stand between the libraries "
            f"and the program. Usage: {USAGE}"
        )
    module = program[:1] == ["-m"]
    program = program[1:] if module else program
    if not libraries or not program:
        raise SystemExit(
            f"{' '.join(arguments) or 'nothing'} was given: a library ({', '.join(names())}) and "
            f"a program are needed. Usage: {USAGE}"
        )
    if not module and not os.path.exists(program[0]):
        raise SystemExit(
            f"{program[0]} was given: it must be the path of a script, and there is no such file. "
            f"Correct it, or write -m before the name of a module. Usage: {USAGE}"
        )
    try:
        install(*libraries)
    except WeftError as error:
        raise SystemExit(str(error)) from None
    sys.argv = program
    if module:
        sys.path[0] = os.getcwd()
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
        runpy.run_path(program[0], run_name="__main__")


def _parts(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return [], []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    main(sys.argv[1:])
