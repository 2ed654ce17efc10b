"""Words that several sentences about a study have in common."""

from __future__ import annotations

from collections.abc import Sequence


def count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def both(names: Sequence[str]) -> str:
    """One, two, or several: "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
