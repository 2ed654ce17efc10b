"""Who has which samples, where the data are the clients' own: what strategies such as `fedavg` train on.

Task(..., partition=partition(1000, alpha=0.1))       clients of equal size; labels are uneven, Dirichlet(alpha)
Task(..., partition=partition(100, labels=2))         every client has samples of about two labels
Task(..., partition=partition(100))                   a shuffle in equal parts
Task(..., partition=[[0, 5, 17], [1, 2], ...])        the samples of each client, by index
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torrential.errors import BadInput


@dataclass(frozen=True)
class PartitionRule:
    """A rule by which samples are dealt to clients. Made by `partition()`; carried out by data/clients.py."""

    clients: int
    alpha: float | None = None
    labels: int | None = None

    def __post_init__(self) -> None:
        for role in ("clients", "labels"):
            value = getattr(self, role)
            if value is None and role == "labels":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadInput(f"{role} must be a whole number of at least 1 (got {value!r})")
        if self.alpha is not None and self.labels is not None:
            raise BadInput(f"give alpha or labels, not both (alpha: {self.alpha!r}, labels: {self.labels!r})")
        number = isinstance(self.alpha, int | float) and not isinstance(self.alpha, bool)
        if self.alpha is not None and not (number and math.isfinite(self.alpha) and self.alpha > 0):
            raise BadInput(f"alpha must be a positive number (got {self.alpha!r}); try alpha=1.0")


Given = PartitionRule | Sequence[Sequence[int]]


def partition(clients: int, *, alpha: float | None = None, labels: int | None = None) -> PartitionRule:
    """Deal the training data to so many clients, all with as many samples, give or take one.

    With `alpha` the shares of the labels that a client has are drawn from Dirichlet(alpha, ..., alpha): near 0 it has
    one label, far above 1 it has as many of each. With `labels` a client has about so many labels. Else a shuffle is
    cut into equal parts. Draws are the run's seed's; `alpha` and `labels` need items that are (input, label) pairs.
    """
    return PartitionRule(clients, alpha, labels)


def check_partition(given: object, samples: int | None) -> None:
    """Refuse what is no partition of a data set with so many samples; None: it is a stream."""
    if given is None:
        return
    if samples is None:
        raise BadInput("clients have data that can be indexed, and train is a stream; leave out partition")
    if isinstance(given, PartitionRule):
        if given.clients > samples:
            raise _empty(f"{given.clients} clients, {samples} samples", "use fewer clients")
        return
    if isinstance(given, str | bytes) or not isinstance(given, Sequence) or not all(map(_is_list, given)):
        raise BadInput(
            f"partition must come from partition() or be a list of index lists (got {type(given).__name__}); try "
            "partition=tt.partition(100, alpha=0.5)"
        )
    owners = dict[int, int]()
    for client, indices in enumerate(given):
        if not len(indices):
            raise _empty(f"client: {client}", "leave it out")
        for index in map(int, indices):
            if not 0 <= index < samples:
                raise BadInput(f"client {client} has sample {index}, of {samples} in train; give indices of train")
            if (other := owners.setdefault(index, client)) != client:
                raise BadInput(f"clients {other} and {client} both have sample {index}; give each sample to one client")


def restricted(given: Given | None, kept: Sequence[int]) -> Given | None:
    """The partition of what is left of the data once a validation set is cut from it: `kept`, in this order."""
    if given is None or isinstance(given, PartitionRule):
        return given
    places = {index: place for place, index in enumerate(kept)}
    left = [[places[int(index)] for index in indices if int(index) in places] for indices in given]
    if [] in left:
        raise _empty(f"client: {left.index([])}", "give the task a validation set, which else is cut from train")
    return left


def _is_list(given: object) -> bool:
    return isinstance(given, Collection) and not isinstance(given, str | bytes)


def _empty(what: str, remedy: str) -> BadInput:
    return BadInput(f"the partition leaves a client without samples ({what}); {remedy}")
