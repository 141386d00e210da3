"""Rows of two folders side by side: `python -m benchmarks.compare OLD NEW`.

Compares the median of each kind of row of torchweft that both folders have, prints those that
changed by more than the limit, and exits with 1 where one became slower by more than it.
"""

import argparse
import statistics
import sys
from pathlib import Path

from benchmarks.harness.record import Row, read


def ours(folder: Path) -> dict[tuple[str, ...], Row]:
    """The latest row of each kind of torchweft that has a time."""
    rows = [row for path in sorted(folder.glob("*.jsonl")) for row in read(path)]
    return {row.key: row for row in rows if row.peer == "torchweft" and row.ms_p50 is not None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--limit", type=float, default=0.05, help="a change to show; default: 0.05")
    options = parser.parse_args()
    old, new = ours(options.old), ours(options.new)
    ratios = {key: new[key].ms_p50 / old[key].ms_p50 for key in new if key in old}
    for key, ratio in sorted(ratios.items(), key=lambda item: -item[1]):
        if abs(ratio - 1) > options.limit:
            before, after = old[key].ms_p50, new[key].ms_p50
            print(f"{ratio:5.2f}  {before:8.4g} -> {after:8.4g} ms  {' '.join(key)}")
    slower = sum(ratio > 1 + options.limit for ratio in ratios.values())
    median = statistics.median(ratios.values()) if ratios else 1.0
    print(
        f"{len(ratios)} kinds compared, median ratio {median:.3f}, {slower} slower by more than "
        f"{options.limit:.0%}; {len(old.keys() - new.keys())} of the old have no new row"
    )
    return 1 if slower or not ratios else 0


if __name__ == "__main__":
    sys.exit(main())
