"""A pipeline as text: a line for each stage, a column for each moment."""

from __future__ import annotations

from torrential.stages.rehearse import Rehearsal
from torrential.stages.schedules.base import Backward, BackwardInput, BackwardWeight, Forward

LETTERS = {Forward: "F", Backward: "B", BackwardInput: "B", BackwardWeight: "W"}
IDLE = "·"
LEGEND = f"F forward, B backward, {IDLE} idle"
LEGEND_OF_HALVES = f"F forward, B backward for inputs, W backward for weights, {IDLE} idle"


def draw_pipeline(done: Rehearsal, width: int = 72) -> list[str]:
    """One line for each stage; each column is an equal part of the time, and shows what takes most of it."""
    if done.seconds <= 0:
        return ["" for _ in done.busy]
    column = done.seconds / width
    shares: list[list[dict[str, float]]] = [[{} for _ in range(width)] for _ in done.busy]
    for stage, action, begin, end in done.timeline:
        letter = LETTERS.get(type(action))
        if letter is None or end <= begin:
            continue
        for place in range(int(begin / column), min(width, int(end / column) + 1)):
            part = min(end, (place + 1) * column) - max(begin, place * column)
            found = shares[stage][place]
            found[letter] = found.get(letter, 0.0) + max(0.0, part)
    return ["".join(_most(found, column) for found in line) for line in shares]


def _most(found: dict[str, float], column: float) -> str:
    idle = column - sum(found.values())
    return max([*found.items(), (IDLE, idle)], key=lambda item: item[1])[0]
