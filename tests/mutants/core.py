"""Planted bugs of the core: tables, programs, expressions, loops."""

from tests.mutants import Mutant

PRODUCTS = "tests/contract/test_products.py"
SEGMENTS = "tests/property/test_segments.py"
CLIFFORD = "tests/contract/test_clifford.py"
DOORS = "tests/contract/test_clifford_doors.py"
CHANGED = "tests/regressions/test_changed_tables.py"
HARMONICS = "tests/contract/test_o3_harmonics.py"
WRONG_INPUTS = "tests/contract/test_wrong_inputs.py"
RUNS = "tests/contract/test_recorded_runs.py"
CAPTURE = "tests/contract/test_capture.py"
WRITTEN = "tests/contract/test_capture_kernels.py"
INTERPRETER = "tests/contract/test_interpreter.py"
TYPES = "tests/integration/test_user_types.py -k mistake"

MUTANTS = [
    Mutant(
        "the bound where TF32 is allowed is that of rounded factors",
        "TF32_CUT_OFF = 2.0**-10",
        "TF32_CUT_OFF = 2.0**-11",
        "tests/property/test_bounds.py",
    ),
    Mutant(
        "what ends with a run is not told of its error",
        "self._contexts.__exit__(kind, error, traceback)",
        "self._contexts.close()",
        f"{RUNS} -k error",
    ),
    Mutant(
        "padding of a written leaf begins behind the first word",
        "source_ptr + at % tl.maximum(known, 1), mask=inside",
        "source_ptr + (at + 1) % tl.maximum(known, 1), mask=inside",
        f"{WRITTEN} -k padding",
        kernels=True,
    ),
    Mutant(
        "padding of a written table has the row numbers of its first line",
        "row = word // row_words + line_of_table +",
        "row = word // row_words +",
        f"{WRITTEN} -k numbers",
        kernels=True,
    ),
    Mutant(
        "the second words of entries in written padding are those of the first",
        "% count.to(tl.int32)) >> (word % entry_words * 32)",
        "% count.to(tl.int32)) >> (word * 0)",
        f"{WRITTEN} -k padding",
        kernels=True,
    ),
    Mutant(
        "the memory of a written leaf is taken for its values",
        "    if source.is_contiguous() and not lazy and source.data_ptr() % word == 0:",
        "    if source.is_contiguous() and source.data_ptr() % word == 0:",
        f"{WRITTEN} -k plain",
        kernels=True,
    ),
    Mutant(
        "torch leaves padding of before beside that which is written",
        "(self._writer is not None or lengths != self._filled)",
        "lengths != self._filled",
        f"{WRITTEN} -k padding",
        kernels=True,
    ),
    Mutant(
        "torch is not told that arguments were written to a record's memory",
        "        will_write(self._buffers)\n",
        "",
        f"{WRITTEN} -k plain",
        kernels=True,
    ),
    Mutant(
        "hooks of a backward pass are overlooked",
        "return bool(forward or backward or _any_global_hook())",
        "return bool(forward or _any_global_hook())",
        "tests/contract/test_private.py -k hooks",
    ),
    Mutant(
        "the interpreter gives an operand a type and not its values",
        "if all(type(a) is not tensor or a.dtype.name == b.dtype.name for a, b in pairs):",
        "if True:",
        INTERPRETER,
        kernels=True,
    ),
    Mutant(
        "the interpreter takes a constant for another",
        "if type(operand) is tensor else (type(operand), operand)",
        "if type(operand) is tensor else type(operand)",
        INTERPRETER,
        kernels=True,
    ),
    Mutant(
        "the interpreter forgets the shape of the other operand",
        "return operand if operand.type is to else tensor(operand.handle, to)",
        "return operand",
        INTERPRETER,
        kernels=True,
    ),
    Mutant(
        "type checkers take any name of torchweft",
        '    "voxels",\n]\n\nif not TYPE_CHECKING:',
        '    "voxels",\n]\n\nif True:',
        TYPES,
    ),
    Mutant(
        "a recorded run compares tables with copies of before",
        "    if (run := recorded.Current.run) is not None:\n        every = zip(",
        "    if False:\n        every = zip(",
        RUNS,
    ),
    Mutant(
        "views of a constant are compared with copies of before",
        "            kept.constant or (table.is_cpu and torch.equal",
        "            (table.is_cpu and torch.equal",
        "tests/regressions/test_changed_tables.py -k views_of",
    ),
    Mutant(
        "views of a constant are those of before it was changed",
        "recorded.version(owner) if hasattr(owner, _MARK) else 0",
        "0",
        "tests/regressions/test_changed_tables.py -k views_of",
    ),
    Mutant(
        "rows of a constant are sorted in each run",
        "    if _is_view(table) and (place in _copies or not run.recording):",
        "    if False:",
        f"{RUNS} -k rows_of_a_constant",
    ),
    Mutant(
        "rows of a constant that a recording copied are found by other calls",
        "    if _is_view(table) and (place in _copies or not run.recording):",
        "    if _is_view(table):",
        f"{RUNS} -k rows_of_a_constant",
    ),
    Mutant(
        "the host reads the facts of a graph that a replay changes",
        "        if unreadable(src, dst):\n            return tables",
        "        if False:\n            return tables",
        RUNS,
    ),
    Mutant(
        "a record does not keep what caches may drop",
        "return found if run is None else recorded.keep(found)",
        "return found",
        RUNS,
    ),
    Mutant(
        "numbers of rows hide padding in a result",
        "    if not (value.is_floating_point() or value.is_complex()):\n        return 0.0\n",
        "",
        "tests/contract/test_capture.py -k large_integers",
    ),
    Mutant(
        "torch is left in the state of a capture that failed",
        "            self._recover()\n",
        "            pass\n",
        f"{CAPTURE} -k usable",
    ),
    Mutant(
        "a loss that was detached hides whose gradients a record fills",
        "            found.extend(leaves_of([tensors]",
        "            _ = (leaves_of([tensors]",
        "tests/contract/test_capture.py -k step_outside",
    ),
    Mutant(
        "calls that draw random numbers are compared with these",
        "with random_numbers_fixed() if draws else nullcontext():",
        "with nullcontext():",
        "tests/contract/test_capture.py -k random_numbers",
    ),
    Mutant(
        "numbers that require a gradient are filled as a part of a graph",
        "with torch.no_grad():  # so that a leaf can be filled",
        "with torch.enable_grad():",
        "tests/contract/test_capture.py -k random_numbers",
    ),
    Mutant(
        "a sum that cancels is held to the rounding of one number",
        "rounded = (64 + longest) * max",
        "rounded = 64 * max",
        "tests/contract/test_capture.py -k noise",
    ),
    Mutant(
        "a comparison with fixed numbers leaves its step of training",
        "                with written.undone(), self._gradients.aside():\n"
        "                    plain = self._run",
        "                with self._gradients.aside():\n                    plain = self._run",
        "tests/contract/test_capture.py -k with_dropout",
    ),
    Mutant(
        "padding is zero, so that padded edges have no length",
        "for begin in range(0, count, rows) if rows else ():",
        "for begin in ():",
        CAPTURE,
    ),
    Mutant(
        "padding of before stays where sizes have changed",
        "self._writer is not None or lengths != self._filled)",
        "self._writer is not None or self._filled is None)",
        CAPTURE,
    ),
    Mutant(
        "padded ends of an edge are one row",
        "numbers = first + (entries + lines + fill.table) % count",
        "numbers = first + (entries + lines) % count",
        CAPTURE,
    ),
    Mutant(
        "padding in a result is not seen",
        "if isinstance(b, Tensor) and not _agree(a, b, rounded):",
        "if False:",
        CAPTURE,
    ),
    Mutant(
        "comparing with padding is a step of training",
        "            storage.copy_(before)",
        "            pass",
        CAPTURE,
    ),
    Mutant(
        "a fixed dimension is cut where it has the length of a room",
        "found.append(None if n == shape[dim] else size)",
        "found.append(size)",
        CAPTURE,
    ),
    Mutant(
        "results are memory of the record",
        "copies = [t.clone() if isinstance(t, Tensor) else t for t in results]",
        "copies = list(results)",
        CAPTURE,
    ),
    Mutant(
        "a record adds to gradients that the caller has emptied",
        "grad.zero_() if leaf.grad is None else grad.copy_(leaf.grad)",
        "pass",
        CAPTURE,
    ),
    Mutant(
        "a record that failed leaves gradients that nothing computes",
        "                leaf.grad = was\n            raise",
        "                pass\n            raise",
        CAPTURE,
    ),
    Mutant(
        "a call with padding adds to the gradients of the call",
        "            with written.undone(), self._gradients.aside():\n                padded =",
        "            with written.undone():\n                padded =",
        CAPTURE,
    ),
    Mutant(
        "gradients of buffers add up",
        "            t.grad = None",
        "            pass",
        CAPTURE,
    ),
    Mutant(
        "a cached call takes sparse tensors",
        "if type(tensor) not in PLAIN or tensor.layout is not strided:",
        "if type(tensor) not in PLAIN:",
        WRONG_INPUTS,
    ),
    Mutant(
        "sparse tensors are of one kind with dense ones",
        "if value.layout is not torch.strided or value.is_nested:\n            return False",
        "if value.is_nested:\n            return False",
        WRONG_INPUTS,
    ),
    Mutant(
        "rows are sorted without keeping their order",
        "return torch.argsort(rows, stable=True)",
        "return torch.argsort(rows, stable=True).flip(0)",
        SEGMENTS,
    ),
    Mutant(
        "pieces of long segments overlap",
        "indptr[owner] + rank.to(indptr.dtype) * limit, indptr[-1]",
        "indptr[owner] + rank.to(indptr.dtype) * (limit - 1), indptr[-1]",
        SEGMENTS,
    ),
    Mutant(
        "an empty segment gets no piece",
        ".clamp(min=int(keep_empty))",
        ".clamp(min=0)",
        SEGMENTS,
    ),
    Mutant(
        "entries before the first segment belong to it",
        "return torch.where(rows < 0, indptr.numel() - 1, rows)",
        "return rows.clamp(min=0)",
        SEGMENTS,
    ),
    Mutant(
        "a table without an order of its own counts one entry less",
        ".clamp(max=self.num_entries)\n            return self._narrow(bounds), None",
        ".clamp(max=self.num_entries - 1)\n            return self._narrow(bounds), None",
        PRODUCTS,
    ),
    Mutant(
        "entries that belong to no sum are kept in gradients",
        "rows.masked_fill(index >= self._sizes[self._partial], size)",
        "rows.masked_fill(index > self._sizes[self._partial], size)",
        PRODUCTS,
    ),
    Mutant(
        "programs: a sum of terms leaves the first out",
        "return functools.reduce(operator.add, terms)",
        "return functools.reduce(operator.add, terms[:2])",
        CLIFFORD,
    ),
    Mutant(
        "programs: the value of a product is one factor's",
        "        return operator.mul\n",
        "        return lambda a, b: a * abs(b)\n",
        CLIFFORD,
    ),
    Mutant(
        "straight-line code: differences are turned round",
        "both = self._alike(self._value(left), self._value(right))\n                return getattr",
        "both = self._alike(self._value(right), self._value(left))\n                return getattr",
        "tests/contract/test_straight_line.py",
    ),
    Mutant(
        "machine code: a loop that has no runs has one",
        'builder.cbranch(builder.icmp_signed("<", first, end), body, after)',
        "builder.branch(body)",
        "tests/contract/test_machine_code.py",
    ),
    Mutant(
        "machine code: of tests joined by `or` the last alone counts",
        "(following, no) if both else (yes, following)",
        "(following, no) if both else (following, following)",
        "tests/contract/test_machine_code.py -k while",
    ),
    Mutant(
        "machine code: 2^n of an n that is too small by one",
        "integer(bias << bits)",
        "integer((bias - 1) << bits)",
        "tests/contract/test_machine_code.py -k powers",
    ),
    Mutant(
        "loops: all tasks are a few runs, which no interrupt ends",
        "number = min(tasks, max(least, work // WORK_OF_A_RUN))",
        "number = min(tasks, least)",
        "tests/integration/test_interrupts.py -k 'sums or runs'",
    ),
    Mutant(
        "loops: a part's rows but the first are lost",
        "for k in range(1, height):",
        "for k in range(2, height):",
        "tests/contract/test_clifford_cpu.py tests/contract/test_clifford.py -k 'loops or numba'",
    ),
    Mutant(
        "a tangent's program is the gradient's",
        'turned = vjp(program, given, "1" * len(program.outputs))',
        'turned = vjp(program, given[::-1], "1" * len(program.outputs))',
        DOORS,
    ),
    Mutant(
        "the derivative of the normal distribution has another constant",
        "const(1 / math.sqrt(2 * math.pi)) * apply(",
        "const(1 / math.sqrt(2.1 * math.pi)) * apply(",
        CLIFFORD + " tests/contract/test_clifford_nn.py",
    ),
    Mutant(
        "a changed table keeps its copy",
        "(table.is_cpu and torch.equal(table, kept.table))  # noqa: TID251",
        "(table.is_cpu and table.shape == kept.table.shape)",
        CHANGED,
    ),
    Mutant(
        "a table in private copies is the caller's",
        "copy = table.detach().clone(memory_format=torch.contiguous_format)",
        "copy = table.detach()",
        CHANGED,
    ),
    Mutant(
        "autocast is turned off where it is not on, on devices that it does not know",
        "torch.autocast(x.device.type, enabled=False) if any_autocast() else nullcontext()",
        "torch.autocast(x.device.type, enabled=False)",
        "tests/contract/test_clifford_doors.py -k of_meta",
    ),
    Mutant(
        "every error of a stream is taken for a graph that is alive",
        '"legacy stream", "uncaptured work in another stream"',
        '"stream",',
        "tests/contract/test_capture.py -k what_stopped",
    ),
    Mutant(
        "machine code: rows of an array follow each other without its width",
        'begin = builder.mul(self._index(row), self.widths[name], flags=("nuw", "nsw"))',
        "begin = self._index(row)",
        "tests/contract/test_machine_code.py",
    ),
    Mutant(
        "machine code: what is on disk serves every text",
        '"\\n".join([text, *flags, str(wide), _compiler()]).encode()',
        "_compiler().encode()",
        "tests/contract/test_machine_code.py",
    ),
    Mutant(
        "kernels of a call are compiled in the order of their launches",
        "_Waiting(-work, ",
        "_Waiting(0, ",
        "tests/contract/test_compile_ahead.py",
    ),
    Mutant(
        "code that is compiled under Triton's variables for debugging is kept",
        '        if not name.endswith("_PATH"):\n            raise _UnknownError\n',
        '        if not name.endswith("_PATH"):\n            continue\n',
        "tests/contract/test_fingerprint.py",
    ),
]
