"""Compile Triton kernels for GPUs that are not here, and judge the machine code.

    compiled = compile_for(build, "sm_90")
    stats = statistics(compiled, "sm_90")
    assert not faults(build, compiled, "sm_90", stats) + growth(stats, snapshot)

One `Build` is one specialisation of a kernel: 0.04 to 0.8 s for the cubin (NVIDIA) or the hsaco
(AMD), without GPU or driver.  Keep the statistics in a JSON snapshot, so that growth is an
explicit change.  The compiler cannot tell speed, occupancy, or whether grid and strides are right.
Not in a process with TRITON_INTERPRET=1: interpreter and compiler cannot share one.
"""

from __future__ import annotations

import contextlib
import io
import pathlib
import re
import struct
import subprocess
import tempfile
from dataclasses import dataclass, field
from typing import Any

import triton

from torchweft.core.gpu.launcher import CONTRACTED
from torchweft.core.private_compilers import ASTSource, GluonASTSource, GPUTarget
from torchweft.errors import BackendError

__all__ = ["SHARED_LIMIT", "TARGETS", "Build", "compile_for", "faults", "growth", "statistics"]

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),  # compiled as sm_90a
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
"""The GPUs that every kernel is compiled for."""

SHARED_LIMIT = {"sm_80": 166_912, "sm_90": 232_448, "gfx942": 65_536}
"""Bytes of shared memory that one block may use; the compiler does not check it."""

GROWTH_LIMIT = 1.10
WATCHED = ("registers", "shared", "code")
BINARIES = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTION_BYTES = 16
"""Of NVIDIA's machine code since sm_70."""

SPILL = re.compile(r"\b(?:LDL|STL)\b")
TENSOR_CORES = re.compile(r"\b(?:HGMMA|HMMA|DMMA)\b|v_mfma")
WIDE_LOAD = re.compile(r"(?:LDG\.E|LDGSTS)[.\w]*\.128|\bUTMALDG\b")
INSTRUCTION = re.compile(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s+([^;]*);")
UNIFORM = re.compile(r"(gdesc\[)?\bUR(\d+)")


@dataclass(frozen=True)
class Build:
    """One specialisation of a kernel, and what its machine code must show.

    Args:
        kernel: the jitted function.
        types: of its run-time arguments: "*bf16" a pointer, "i32", "fp32", ...
        constants: its constexpr arguments.
        options: num_warps, num_stages, ...
        multiples_of_16: integer arguments known to be; pointers always are.
        tensor_cores: whether its dots must become tensor-core instructions.
        wide_loads: whether it must move 128 bits at a time (NVIDIA).
        spills: loads and stores of registers that are known to be outside of its loops.
    """

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    multiples_of_16: tuple[str, ...] = ()
    tensor_cores: bool = False
    wide_loads: bool = False
    spills: int = 0


def compile_for(build: Build, target: str) -> Any:
    """The compiled kernel; raises what the compiler or the assembler raises."""
    if triton.knobs.runtime.interpret:
        raise BackendError(
            "this process has TRITON_INTERPRET=1, the compiler needs one without: "
            "compile kernels in a process of their own."
        )
    names = build.kernel.arg_names
    types = {name: build.types.get(name, "constexpr") for name in names}
    aligned = {name for name, kind in build.types.items() if kind.startswith("*")}
    aligned.update(build.multiples_of_16)
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in aligned
    }
    make = GluonASTSource if build.kernel.is_gluon() else ASTSource
    source = make(build.kernel, types, build.constants, attributes)
    with contextlib.redirect_stdout(io.StringIO()):  # a failed assembly prints all of its PTX
        return triton.compile(source, target=TARGETS[target], options=CONTRACTED | build.options)


def statistics(compiled: Any, target: str) -> dict[str, int]:
    """Counts of the machine code: registers, spills, shared bytes, instructions."""
    count = _count_nvidia if target.startswith("sm_") else _count_amd
    return {"shared": int(compiled.metadata.shared), **count(compiled)}


def faults(build: Build, compiled: Any, target: str, stats: dict[str, int]) -> list[str]:
    """The gates that a compiled build fails, in words; empty if none."""
    found = []
    if stats["shared"] > SHARED_LIMIT[target]:
        found.append(f"shared memory {stats['shared']} > {SHARED_LIMIT[target]} bytes")
    if stats["spills"] > build.spills:
        found.append(f"{stats['spills']} register spills")
    wide_loads = build.wide_loads and target.startswith("sm_")
    if not (build.tensor_cores or wide_loads):
        return found
    code = _disassembled(compiled) if target.startswith("sm_") else compiled.asm["amdgcn"]
    if build.tensor_cores and not TENSOR_CORES.search(code):
        found.append("no tensor-core instruction")
    if wide_loads and not WIDE_LOAD.search(code):
        found.append("no 128-bit load")
    if target.startswith("sm_") and (unset := _unset(code)):
        found.append(f"uniform registers {unset} are read before they are set")
    return found


def _unset(code: str) -> list[int]:
    """Uniform registers that an instruction reads before one above has written them.

    The assembler of CUDA 12.8 so lost the addresses of matrices that products read from shared
    memory, where two products of one kernel read matrices of unlike widths.
    """
    written, unset = set[int](), set[int]()
    for name, operands in INSTRUCTION.findall(code):
        first, _, others = operands.partition(",")
        result = re.fullmatch(r"UR(\d+)", first.strip())
        read = UNIFORM.findall(others if result else operands)  # of gdesc, the second factor's
        unset |= {int(n) + 2 * bool(of_product) for of_product, n in read} - written
        if result:
            number = int(result[1])
            written |= {number, number + 1} if re.search(r"\.64|WIDE", name) else {number}
    return sorted(unset)


def growth(stats: dict[str, int], snapshot: dict[str, int]) -> list[str]:
    """What grew by more than 10 % since the snapshot, in words; empty if nothing."""
    return [
        f"{key} grew from {snapshot[key]} to {stats[key]}"
        for key in WATCHED
        if stats[key] > GROWTH_LIMIT * snapshot[key]
    ]


def _run(tool: str, *arguments: str) -> str:
    command = [str(BINARIES / tool), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout + result.stderr


def _count_nvidia(compiled: Any) -> dict[str, int]:
    usage = _told(compiled, "cuobjdump", "-res-usage")
    registers = re.search(r"REG:(\d+)", usage)
    instructions = _bytes_of_code(compiled.asm["cubin"]) // INSTRUCTION_BYTES
    if registers is None or not instructions:
        raise RuntimeError(f"cannot read the cubin: {usage[-200:]}")
    spills = 0
    if any(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage))):  # else there is no room for any
        spills = len(SPILL.findall(_disassembled(compiled)))
    return {"registers": int(registers[1]), "spills": spills, "code": instructions}


def _told(compiled: Any, tool: str, *arguments: str) -> str:
    """What a tool says of the cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return _run(tool, *arguments, file.name)


def _disassembled(compiled: Any) -> str:
    """The instructions of the cubin; this takes as long as to compile a kernel of 200 of them."""
    return _told(compiled, "nvdisasm", "-c")


def _bytes_of_code(cubin: bytes) -> int:
    """The size of all sections of code of an ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, of_names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    names = sections[of_names][4]
    return sum(s[5] for s in sections if cubin.startswith(b".text.", names + s[0]))


def _count_amd(compiled: Any) -> dict[str, int]:
    code = compiled.asm["amdgcn"]

    def metadata(key: str) -> int:
        found = re.search(rf"\.{key}\s*:?\s+(\d+)", code)
        if found is None:
            raise RuntimeError(f"no .{key} in the assembly of {compiled.metadata.name}")
        return int(found[1])

    return {
        "registers": metadata("vgpr_count"),
        "spills": metadata("vgpr_spill_count"),
        "code": code.count("\n"),
    }
