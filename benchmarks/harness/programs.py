"""Tables of whole programs: dynamics, training, and programs on several GPUs.

Their results are files of their own: `<machine>/nve.json`, `train_mace.json`, `fresh_clouds.json`
and `train_segmentation.json` are written by the programs of these names in `benchmarks`,
`several_gpus.jsonl` by `benchmarks/several_gpus.py`.  A second run on a machine is kept beside the
first with a remark in its name: `fresh_clouds_on_a_slower_host.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.markdown import short, table

__all__ = ["programs_section", "ranks_table"]

Found = Mapping[str, Any]


def programs_section(folder: Path) -> str:
    """A part of docs/performance.md, from a folder of results; empty without any."""
    parts = [
        f"### {title}, {found['gpu']}{_remark(path, name)}\n\n"
        f"{text}\n{made(found)}\n{_stamp(found)}\n"
        for name, (title, text, made) in _PROGRAMS.items()
        for path in sorted(folder.glob(f"*/{name}*.json"))
        for found in [json.loads(path.read_text(encoding="utf-8"))]
    ]
    ranks = folder / "several_gpus.jsonl"
    text = ranks.read_text(encoding="utf-8") if ranks.exists() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        some = [row for row in rows if row["gpu"] == gpu]
        stamp = _stamp(some[-1])
        parts.append(f"### Several GPUs, {gpu}\n\n{_RANKS}\n{ranks_table(some)}\n{stamp}\n")
    return "\n".join(["## Whole programs\n", *parts]) if parts else ""


def ranks_table(rows: Sequence[Found]) -> str:
    """Efficiency of each program by the number of ranks, from the latest rows of one GPU."""
    programs: dict[tuple[str, str], dict[int, Found]] = {}
    for row in rows:
        programs.setdefault((row["case"], row["kind"]), {})[row["ranks"]] = row
    lines = []
    for (name, kind), of in programs.items():
        fewest = min(of)
        for ranks, row in sorted(of.items()):
            more = ranks / fewest if kind == "strong" else 1
            share = f"{100 * of[fewest]['ms'] / row['ms'] / more:.1f} %"
            if fewest > 1:
                share = "no time on one" if ranks == fewest else f"{share} of {fewest}"
            times = [short(row[n]) if n in row else "" for n in ("busy_ms", "nccl_ms")]
            clock = f"{row['sm_mhz']:.0f}" if "sm_mhz" in row else ""
            numbers = short(row["ms"]), share, *times, clock, f"{row['peak_mb']:.0f}"
            lines.append([name, kind, str(ranks), *numbers])
    head = ["program", "kind", "ranks", "ms", "efficiency", "busy ms", "NCCL ms", "SM MHz"]
    return table([*head, "peak MB"], lines)


def _dynamics(found: Found) -> str:
    runs = found["runs"]
    few, most = (choice(run["steps"] for run in runs.values()) for choice in (min, max))
    lines = []
    for name, run in runs.items():
        first, whole = run[f"drift_of_{few}_steps"], run["drift"]
        drifts = [f"{first['slope_mev_ps']:.3g}"]
        drifts += [f"{whole[of]:.2g}" for of in ("slope_mev_ps", "largest_mev")]
        if run["steps"] < most:  # of other lengths they do not compare
            drifts[1:] = "", ""
        times = short(run["ms_a_step"]), short(run["ns_a_day"])
        lines.append([name, str(run["steps"]), *times, *drifts])
    head = ["calculator", "steps", "ms a step", "ns a day"]
    return table([*head, f"drift of {few} steps", "drift", "largest"], lines)


def _training(found: Found) -> str:
    lines = [
        [
            name, short(found["ms_a_step"][name]), short(median(seconds)),
            f"{found['loss'][name][-1]:.6f}",
            *(f"{found['held_out'][name][of]:.3f}" for of in ("energy", "forces")),
        ]
        for name, seconds in found["seconds"].items()
    ]  # fmt: skip
    return table(["model", "ms a step", "s an epoch", "loss", "energy", "forces"], lines)


def _segmentation(found: Found) -> str:
    shown = ("ms_a_step", short), ("training_s", short), ("last_loss", "{:.4f}".format)
    lines = []
    for name, held in (found["held_out"] | found["exchanged"]).items():
        measured = (show(found[of][name]) if name in found[of] else "" for of, show in shown)
        same = _percent(held["same"]) if "same" in held else ""
        scores = _percent(held["accuracy"]), f"{held['mean_iou']:.4f}", same
        lines.append([name, *measured, *scores])
    if lead := found["lead"]:
        leads = (f"{lead[of]:.2f}" for of in ("ms_a_step", "training_s"))
        lines.append(["spconv / torchweft", *leads, *[""] * 4])
    head = ["network", "ms a step", "training, s", "loss", "accuracy", "mean IoU", "same classes"]
    return table(head, lines) + "\n" + _differences(found["differences"])


def _clouds(found: Found) -> str:
    peers = {name: f"{name} {version}, fresh" for name, version in found["peers"].items()}
    heads = {
        "fresh": "fresh cloud",
        "padded": "fresh, captured",
        "kept": "maps kept",
        "captured": "kept, captured",
    } | peers
    tables = (_network(name, of, heads) for name, of in found["networks"].items())
    return "\n".join([f"{found['voxels']:,} voxels.\n", *tables])


def _network(name: str, found: Found, heads: dict[str, str]) -> str:
    known = {way for ms in found["ms"].values() for way in ms}
    ways = [way for way in heads if way in known]
    rows = found["ms"] | {"kernels of a forward pass": found["kernels"]}
    lines = [
        [what, *(short(row[way]) if way in row else "" for way in ways)]
        for what, row in rows.items()
    ]
    return table([f"{name}, ms", *(heads[way] for way in ways)], lines)


def _differences(found: Found) -> str:
    steps = ["step 1" if n == "1" else f"steps 1 to {n}" for n in next(iter(found.values()))]
    lines = [[name, *(f"{value:.1e}" for value in row.values())] for name, row in found.items()]
    return table(["losses of", *steps], lines)


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _remark(path: Path, name: str) -> str:
    """What the name of a second run's file says of it."""
    return path.stem.removeprefix(name).replace("_", " ")


def _stamp(found: Found) -> str:
    names = "torch", "triton", "commit"
    return ", ".join(f"{n} {found[n]}" for n in names) + f", {found['date'][:10]}.\n"


_PROGRAMS: dict[str, tuple[str, str, Callable[[Found], str]]] = {
    "nve": (
        "Dynamics without a thermostat",
        "216 atoms of shaken diamond with a model of MACE, steps of 1 fs. *drift* is the slope of "
        "the total energy in meV an atom and ps, *largest* its largest deviation in meV an atom. "
        "Over few steps the slope is that of a fluctuation: compare drifts over equal numbers of "
        "steps. `e3nn` is the model as it is, with torchweft's calculator, which records it.\n",
        _dynamics,
    ),
    "train_mace": (
        "Training",
        "MACE on shaken molecules of G2 with labels of GFN2-xTB, from the same weights. *loss* is "
        "that of the last epoch, *energy* and *forces* are root mean squares of the errors on "
        "held-out molecules, in meV an atom and meV/Å.\n",
        _training,
    ),
    "fresh_clouds": (
        "Networks on a LiDAR frame",
        "Wall time in milliseconds: of a cloud that the network has not seen, whose *maps* it "
        "builds; of that with its maps built before a CUDA graph with room for other clouds; of a "
        "cloud whose maps are kept; and of that as a CUDA graph. Where a pass is longer than as a "
        "graph, the host is what it waits for. A *training step* is one of AdamW with weights in "
        "float32. SpUNet is written for spconv. Hosts differ in speed: compare times of one run.\n",
        _clouds,
    ),
    "train_segmentation": (
        "Training in spconv's layers",
        "A UNet of 42 sparse convolutions labels the voxels of generated rooms, through spconv and "
        "through torchweft's stand-in: float32 without TF32, the same weights at first and the "
        "same batches. *training* is the whole of it with the first calls, *accuracy* and *mean "
        "IoU* are those of held-out rooms, *loss* is the mean of the last epoch. *A in B*: weights "
        "that A trained in the layers of B, and the share of voxels that have the same class as "
        "in A. The second table has the largest relative differences of the losses of single "
        "steps. Rounding, which training magnifies, explains a difference of spconv and torchweft "
        "that is no larger than theirs from float64. spconv's wheel cannot train on a CPU.\n",
        _segmentation,
    ),
}

_RANKS = (
    "Strong: one problem over all ranks; weak: a problem for each rank. *efficiency* is the time "
    "on one GPU over that on all, for strong ones over their number too; *of 2* stands where there "
    "is no time on one, for lack of room say, and it is relative to two. *ms* is the wall time of "
    "the slowest rank, *NCCL ms* the time in kernels of NCCL, *busy ms* that in all others: the "
    "rest is waiting, or time of the host. *SM MHz* is the least clock while calls ran, *peak MB* "
    "the memory of the fullest rank.\n"
)
