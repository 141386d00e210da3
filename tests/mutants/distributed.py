"""Planted bugs of what runs on several ranks."""

from tests.mutants import Mutant

HALO = "tests/distributed/test_halo.py"
RECORDS = "tests/distributed/test_records.py"
CALLS = "tests/distributed/test_calls.py"
COST = "tests/distributed/test_cost.py"
DOMAINS = "tests/distributed/test_domains.py"
DYNAMICS = "tests/distributed/test_dynamics.py"
GRAPHS = "tests/distributed/test_graphs.py"
PAIRS = "tests/distributed/test_pairs.py -k 3-"
ALL_PAIRS = "tests/distributed/test_all_pairs.py"
OWNERS = "tests/distributed/test_owners.py"
SCENES = "tests/distributed/test_scenes.py"
SCENE_COSTS = "tests/distributed/test_scene_costs.py"
POTENTIALS = "tests/distributed/test_potentials.py"

MUTANTS = [
    Mutant(
        "a process of torchrun without a group reduces over its own rows alone",
        "if size > 1 and not begun and distributed.is_torchelastic_launched():",
        "if size < 1:",
        "tests/distributed/test_one_rank.py",
    ),
    Mutant(
        "a halo's rows are left in the order of their owners",
        "if not bool((order[1:] > order[:-1]).all()):",
        "if False:",
        f"{HALO} -k values",
    ),
    Mutant(
        "padding in a result of another rank is not told",
        "        if not everywhere(True, self._groups):\n",
        "        if not everywhere(True, self._groups) and False:\n",
        f"{RECORDS} -k result_of_one",
    ),
    Mutant(
        "the answer of the first group's ranks is forgotten",
        "        answer = not largest(no, group).item()\n    return answer\n",
        "        answer = not largest(no, group).item() or answer\n    return answer\n",
        f"{RECORDS} -k some_groups",
    ),
    Mutant(
        "the gradient that finish sends back is another",
        "        there.back.start(grads[0].detach())\n        return None, grads[0]",
        "        there.back.start(grads[0].detach().abs())\n        return None, grads[0]",
        f"{HALO} -k orders",
    ),
    Mutant(
        "the gradient of a total is summed over the copies",
        "        return None, _Parts.apply(ctx.group, grads[0])",
        "        return None, total(grads[0], ctx.group)",
        f"{HALO} -k totals",
    ),
    Mutant(
        "ranks compare the names of calls alone",
        "every = said.name, said.described, said.error and rank, beside",
        "every = said.name, said.error and rank, beside",
        f"{HALO} -k 'differ or told'",
    ),
    Mutant(
        "calls inside one that was compared are compared too",
        "if always or not self._as_before:\n",
        "if True:\n",
        f"{CALLS} -k steps",
    ),
    Mutant(
        "a call that is not the one before is not compared",
        "made, self._as_before = Made(name, said.facts, repr((name, said.described))), False",
        "made = Made(name, said.facts, repr((name, said.described)))",
        f"{CALLS} -k changed",
    ),
    Mutant(
        "a row with two owners goes to the last",
        "claimed_twice)\n",
        "None)\n",
        f"{HALO} -k told",
    ),
    Mutant(
        "a rank sees the voxels beside its box on one side alone",
        "(end[axis] - 1) * s + last + 1",
        "(end[axis] - 1) * s + 1",
        f"{SCENES} -k layers",
    ),
    Mutant(
        "the owner of a coarse voxel does not see its children",
        "first, last = min(first, 0), max(last, s - 1)",
        "pass",
        f"{SCENES} -k layers",
    ),
    Mutant(
        "a single row is viewed with the stride that it has",
        "return rows.clone(memory_format=torch.contiguous_format).view(torch.uint8)",
        "return rows.contiguous().view(torch.uint8)",
        f"{DOMAINS} -k single",
    ),
    Mutant(
        "an inverse map that reads no voxels of other ranks is the map itself",
        "return *tables_between(inputs, onto, shape, inverse), None, None",
        "return *tables_between(inputs, onto, shape, False), None, None",
        f"{SCENES} -k layers",
    ),
    Mutant(
        "layers whose ranks read no voxels of another exchange features",
        "if self._slabs.shared((inputs.stride, asked.stride), shape, inverse):",
        "if True:",
        SCENE_COSTS,
    ),
    Mutant(
        "a rank sends its first voxels, not those beside a cut",
        "return order[:count] % max(flags.shape[1], 1)",
        "return torch.arange(count, device=order.device) % max(flags.shape[1], 1)",
        f"{SCENES} -k layers",
    ),
    Mutant(
        "the host counts the rows of a halo at every call",
        "found = self._exchanged(x, False)",
        "assert torch.ones(1).item()\n        found = self._exchanged(x, False)",
        SCENE_COSTS,
    ),
    Mutant(
        "a scene keeps its message to other ranks",
        "        del self._work  # which nobody can copy\n",
        "",
        f"{SCENES} -k copied",
    ),
    Mutant(
        "calls of layers are compared on every scene",
        'Calls("shard_voxels", describe, group, last.calls)',
        'Calls("shard_voxels", describe, group)',
        SCENE_COSTS,
    ),
    Mutant(
        "maps across the cuts are built one by one",
        "if inputs.asked is self.asked and not self.asked and self._calls.foreseen:",
        "if False:",
        SCENE_COSTS,
    ),
    Mutant(
        "maps are foreseen where ranks know of other calls",
        "if inputs.asked is self.asked and not self.asked and self._calls.foreseen:",
        "if inputs.asked is self.asked and not self.asked:",
        f"{SCENE_COSTS} -k nothing",
    ),
    Mutant(
        "a scene is cut again where its first cut was",
        "places.append(4 * (every * owner + place) + sides)",
        "places.append(4 * place + sides)",
        f"{SCENES} -k boxes",
    ),
    Mutant(
        "a row of a halo that two ranks read has the gradient of the last",
        "own.index_add_(0, rows, part)",
        "own.index_copy_(0, rows, part)",
        f"{HALO} -k values",
    ),
    Mutant(
        "ranks keep outputs that are another's",
        "outputs = found.select(own.nonzero().squeeze(1))",
        "outputs = found",
        f"{SCENES} -k layers",
    ),
    Mutant(
        "a gathered maximum is of the lowest rank, not of the first voxel",
        "keys = torch.cat([~value.isnan(), -numbers, where], -1)",
        "keys = torch.cat([~value.isnan(), -numbers], -1)",
        f"{SCENES} -k layers",
    ),
    Mutant(
        "means of samples are those of a rank",
        "return part if shards is None else all_sum(part, shards.group)",
        "return part",
        f"{SCENES} -k layers",
    ),
    Mutant(
        "a box is cut below the atoms in the middle, however many they are",
        "torch.where(wanted - lower < upper - wanted, low, low + width)",
        "low",
        f"{DOMAINS} -k planes",
    ),
    Mutant(
        "migrated atoms stay in the order in which they arrive",
        "by_id = found[0].argsort()",
        "by_id = torch.arange(len(found[0]))",
        f"{DOMAINS} -k move",
    ),
    Mutant(
        "shifts of edges forget where dst was wrapped",
        "shift = images.offset[dst] - images.offset[src]",
        "shift = -images.offset[src]",
        f"{DOMAINS} -k process",
    ),
    Mutant(
        "an atom's own images are no neighbours",
        "if other == rank and not any(move):",
        "if other == rank:",
        f"{DOMAINS} -k process",
    ),
    Mutant(
        "candidates over ranks have no skin",
        "reach = self.cutoff * (1 + ROUNDING) + self.skin\n        images",
        "reach = self.cutoff * (1 + ROUNDING)\n        images",
        f"{DOMAINS} -k anew",
    ),
    Mutant(
        "atoms over ranks may move by the whole skin",
        "same = (moved <= (self.skin / 2) ** 2).all() & (ids",
        "same = (moved <= self.skin**2).all() & (ids",
        f"{DOMAINS} -k anew",
    ),
    Mutant(
        "the rows left over go to the last part",
        "left * (rows // parts) + min(left, rows % parts)",
        "left * (rows // parts)",
        f"{OWNERS} -k one_row",
    ),
    Mutant(
        "rows outside the cell are cut where they lie",
        "(along - along.floor())",
        "along",
        f"{OWNERS} -k cell",
    ),
    Mutant(
        "a cut is even in rows alone",
        "loads = [share, before / before[-1]]",
        "loads = [share, share]",
        f"{OWNERS} -k weights",
    ),
    Mutant(
        "a part has the edges that begin at its rows",
        "edges = own[dst].nonzero()",
        "edges = own[src].nonzero()",
        f"{GRAPHS} -k once",
    ),
    Mutant(
        "a block of the ring is taken for the next rank's",
        "        yield source, _unpacked(block, shapes, counts[source])",
        "        yield (source + 1) % size, _unpacked(block, shapes, counts[source])",
        PAIRS,
    ),
    Mutant(
        "gradients in all_pairs have a thread of their own on a GPU",
        "set_multithreading_enabled(False), rows_of_one",
        "set_multithreading_enabled(True), rows_of_one",
        f"{ALL_PAIRS} -k before",
    ),
    Mutant(
        "forces over ranks have a thread of their own on a GPU",
        "        torch.autograd.set_multithreading_enabled(False),\n        calls_inside",
        "        torch.autograd.set_multithreading_enabled(True),\n        calls_inside",
        f"{CALLS} -k thread",
    ),
    Mutant(
        "calls of a ring that are alike have one number",
        "return (*rest, private.group_name(self._group), self._call)",
        "return (*rest, private.group_name(self._group), 0)",
        f"{ALL_PAIRS} -k another_order",
    ),
    Mutant(
        "equal values come in the order of the ring",
        "        columns, order = columns.sort(2)\n        values = values.gather(2, order)\n",
        "",
        f"{PAIRS} or neighbours",
    ),
    Mutant(
        "gathered points come in the order of the ring",
        "every = exchange(y.repeat(size, 1), [len(y)] * size, counts, self.group)",
        "every = torch.cat([t[0] for _, (t,) in ring.hops([y[None]], counts, self.group)])",
        f"{ALL_PAIRS} -k 'one_process and gathered'",
    ),
    Mutant(
        "neighbours of a block count from its first point",
        "at = torch.where(index < 0, -1, index + sum(counts[:source]))",
        "at = index",
        f"{ALL_PAIRS} -k 'one_process and ring'",
    ),
    Mutant(
        "columns that were found are fetched without a gradient",
        "found = exchange(flat[rows], asked.receive, asked.send, self._group)",
        "found = exchange(flat[rows].detach(), asked.receive, asked.send, self._group)",
        PAIRS,
    ),
    Mutant(
        "the masks that ranks have for others stay where they are",
        "    return own, _exchanged(sent, group)",
        "    return own, sent",
        "tests/distributed/test_pairs.py -k True",
    ),
    Mutant(
        "conjugate gradients take the dot products of a rank's rows",
        "return self.whole.total((u * v).sum(dims, keepdim=True) if dims else u * v)",
        "return (u * v).sum(dims, keepdim=True) if dims else u * v",
        f"{ALL_PAIRS} -k solutions",
    ),
    Mutant(
        "points weigh one over the number of a rank's",
        "count = max(1, whole().number(points.shape[-2:-1].numel()))",
        "count = max(1, points.shape[-2:-1].numel())",
        f"{ALL_PAIRS} -k losses",
    ),
    Mutant(
        "an error of one rank in a reduction is raised there alone",
        "        if error is not self._told:\n            self.agree",
        "        if False:\n            self.agree",
        f"{ALL_PAIRS} -k between",
    ),
    Mutant(
        "the value of a row that ranks share is that of a rank",
        "        return total(found.where(own, 0), self._group)",
        "        return found.where(own, 0)",
        f"{ALL_PAIRS} -k one_row",
    ),
    Mutant(
        "forces on atoms of other ranks stay behind",
        "x = halo(positions)\n            vectors",
        "x = torch.cat([positions, halo(positions.detach())[len(positions) :]])\n"
        "            vectors",
        f"{DYNAMICS} -k 'process and 2'",
    ),
    Mutant(
        "atoms migrate with the velocities of others",
        "domains.migrate(ids, positions, numbers, velocities, masses)",
        "domains.migrate(ids, positions, numbers, velocities.roll(1, 0), masses)",
        f"{DYNAMICS} -k 'process and 2'",
    ),
    Mutant(
        "a row that several edges read is counted for each",
        "read = torch.unique(reader[across] * len(owner) + src[across])",
        "read = reader[across] * len(owner) + src[across]",
        f"{COST} -k 'halos and 2'",
    ),
    Mutant(
        "messages are counted for each row",
        "links = torch.unique(reader * parts + sender) // parts",
        "links = reader",
        f"{COST} -k 'halos and 2'",
    ),
    Mutant(
        "a converted model adds to the rows of others too",
        "return x.shape[0] if sources is None else sources.num_rows",
        "return x.shape[0]",
        f"{POTENTIALS} -k extended",
    ),
    Mutant(
        "a rank leaves the block while another raises",
        "        watch.wait_for_others()\n",
        "",
        "tests/distributed/test_faults.py -k all_leave",
    ),
    Mutant(
        "NumPy's view pins the storage of an operand",
        "    memory: Any = _Memory.from_address(t.data_ptr())\n",
        "    return t.numpy()\n",
        "tests/regressions/test_resized_parameters.py -k reduction",
    ),
    Mutant(
        "a group of one rank compares its calls",
        "        if self._size > 1:\n            every",
        "        if self._size > 0:\n            every",
        "tests/distributed/test_one_rank.py",
    ),
]
