"""A picture of leads: a bar of GPU time and one of wall time for each line of a table."""

from __future__ import annotations

import io
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from benchmarks.harness.leads import Lead

__all__ = ["picture"]

COLOURS = {"GPU": "#2a7fba", "wall": "#e0a030"}
GREY = "#777777"  # legible on light and on dark
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "leads",
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
}


BARS = {"GPU": 0.02, "wall": 0.3}
"""Where the bars of a line stand, in lines; its label stands above them."""


def picture(leads: Sequence[Lead]) -> str:
    """An SVG with a logarithmic axis, legible on a phone; the same text for the same leads."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.4, 0.7 + 0.5 * len(leads)), layout="constrained")
        axes = figure.subplots()
        axes.set_xscale("log", base=2)
        for n, lead in enumerate(leads):
            axes.text(0, n - 0.3, lead.label, va="center", transform=axes.get_yaxis_transform())
        for kind, offset in BARS.items():
            found = [(n, lead.gpu if kind == "GPU" else lead.wall) for n, lead in enumerate(leads)]
            shown = [(n + offset, value - 1, value) for n, value in found if value is not None]
            if shown:
                places, widths, values = zip(*shown, strict=True)
                bars = axes.barh(places, widths, 0.28, left=1, color=COLOURS[kind], label=kind)
                axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=3, fontsize=8)
        lines = np.arange(len(leads))
        axes.vlines([1] * len(leads), lines - 0.12, lines + 0.44, color=GREY)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(yticks=[], ylim=(len(leads) - 0.4, -0.6))
        axes.margins(x=0.12)
        axes.spines[:].set_visible(False)
        figure.legend(loc="outside upper left", ncols=2, frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return text.getvalue()
