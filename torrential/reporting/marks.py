"""What all figures share: colours, legends, names, numbers as plotly.js takes them."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torrential.progress import number
from torrential.study.results import Run, Study, unit_of_time

Figure = dict[str, Any]
Trace = dict[str, Any]

# Okabe and Ito's, less the yellow, which is hard to see on white; grey stands for black, which is not on black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
STROKES = {
    "solid": "none",
    "dash": "9 4",
    "dot": "3 3",
    "dashdot": "9 3 3 3",
    "longdash": "13 4",
    "longdashdot": "13 3 3 3",
}
DASHES = tuple(STROKES)


@dataclass(frozen=True)
class Key:
    """One item of a legend: what it shows and hides, and how it looks."""

    key: str
    name: str
    colour: str
    dash: str

    @property
    def strokes(self) -> str:
        """The dash as SVG has it."""
        return STROKES[self.dash]


def keys(names: Iterable[str], prefix: str) -> list[Key]:
    """Seven colours and six dashes have no common factor: 42 items before two look alike."""
    return [Key(f"{prefix}{i}", name, COLOURS[i % 7], DASHES[i % 6]) for i, name in enumerate(names)]


def entry_keys(study: Study) -> list[Key]:
    return keys((entry.name for entry in study.entries), "e")


def time_name(study: Study) -> str:
    worlds = {entry.world for entry in study.entries}
    if "sim" not in worlds:
        return "seconds"
    return "virtual seconds" if len(worlds) == 1 else "seconds (sim: virtual)"


def outcome(run: Run) -> str:
    """The outcome of a trial that had a target, in words."""
    if run.time_to_target is not None:
        return f"{number(run.time_to_target)} {unit_of_time(run.config.get('world', ''))}"
    return "diverged" if run.diverged else "missed" if run.finished else "failed" if run.failed else "not ended"


def samples_per_second(run: Run) -> float | None:
    if run.summary is None or not run.summary.seconds > 0:
        return None
    return run.summary.samples / run.summary.seconds


def safe(text: str) -> str:
    """Plotly reads a little HTML in its texts, and entities."""
    return html.escape(text, quote=False)


def short(values: Iterable[float]) -> list[float | None]:
    """Six significant digits; None, which draws nothing, for what is not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def unbroken(text: str) -> str:
    """Stays on one line where the page wraps a label."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")
