"""Planted bugs of what runs on several ranks."""

from tests.mutants import Mutant

HALO = "tests/distributed/test_halo.py"
OWNERS = "tests/distributed/test_owners.py"
GRAPHS = "tests/distributed/test_graphs.py"

MUTANTS = [
    Mutant(
        "a halo's rows are left in the order of their owners",
        "sorted_already = bool((order[1:] > order[:-1]).all())",
        "sorted_already = True",
        f"{HALO} -k values",
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
        "if _same((name, described, error and rank), group):",
        "if _same((name, error and rank), group):",
        f"{HALO} -k 'differ or told'",
    ),
    Mutant(
        "a row with two owners goes to the last",
        "claimed_twice)\n",
        "None)\n",
        f"{HALO} -k told",
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
]
