"""Deals samples to workers: one global order per epoch, dealt out step by step to the current members.

    epoch's order   7 2 9 4 | 0 8 5 | 1 3 6        cursor moves by what each step takes
    members         2 x 2   | 1 x 3 | 3 x 1        and may change between steps: nothing is lost or seen twice

Every member computes the same order from (seed, epoch), so no message is needed, and (epoch, cursor) is the whole
state. The order is a shuffle; or one in which neighbours have like lengths; or that of a stream.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from torrential.config import RunConfig
from torrential.errors import BadInput
from torrential.task import Lengths, Task, is_stream

MOST_GROUPED = 50  # batches that are sorted by length together


@dataclass(frozen=True)
class Order:
    """The order in which the samples of each epoch are dealt out: a function of the seed and the epoch."""

    samples: int
    seed: int
    lengths: Lengths | None = None  # of all samples, where those of like length are grouped
    group: int = 1  # samples that are grouped: those of one update
    stream: bool = False
    window: int = 0  # samples of a stream that are shuffled among themselves

    def whole(self, epoch: int) -> Tensor:
        if self.stream:
            return self.between(epoch, 0, self.samples)
        if self.lengths is not None:
            return grouped_order(self.samples, self.seed, epoch, self.lengths, self.group)
        return order(self.samples, self.seed, epoch)

    def between(self, epoch: int, first: int, last: int) -> Tensor:
        """The samples at the places from `first` to before `last`."""
        if not self.stream:
            return self.whole(epoch)[first:last]
        if self.window <= 1:
            return torch.arange(first, last)
        windows = range(first // self.window, -(-last // self.window))
        start = windows.start * self.window
        pieces = [_window_order(self, epoch, window) for window in windows]
        return torch.cat([torch.empty(0, dtype=torch.int64), *pieces])[first - start : last - start]


def order_of(task: Task, config: RunConfig) -> Order:
    """The order of a run's training data."""
    lengths = task.length if isinstance(task.length, Lengths) else None
    stream = is_stream(task.train)
    return Order(config.samples, config.seed, lengths, config.samples_per_step, stream, task.shuffle_buffer)


@dataclass(frozen=True)
class Batch:
    """Samples that are trained on together."""

    epoch: int
    first: int  # the place of the first of them in the epoch's order
    indices: Tensor
    total: int  # samples of all workers together, where they are dealt one joined batch; else of this one
    weight: float = 1.0  # the weight of its mean loss in the gradient
    lease: int = 0  # the lease to name in the push, where servers deal samples

    def __len__(self) -> int:
        return self.indices.numel()

    @property
    def stop(self) -> int:
        return self.first + len(self.indices)

    def weighted(self, weight: float) -> Batch:
        return replace(self, weight=weight)

    def split(self, size: int) -> list[Batch]:
        """The same samples in minibatches; one of nothing if there are none."""
        pieces = self.indices.split(size) if len(self.indices) > size else (self.indices,)
        firsts = range(self.first, self.first + max(1, len(self.indices)), size)
        return [
            replace(self, first=first, indices=piece, total=len(piece))
            for first, piece in zip(firsts, pieces, strict=True)
        ]


@dataclass(frozen=True)
class Share:
    """The samples that one member takes in one step."""

    batches: list[Batch]  # weighted by their part of the joined batch; empty when there are fewer samples than members
    total: int  # samples of all members together

    @property
    def samples(self) -> int:
        return sum(len(batch) for batch in self.batches)

    @property
    def indices(self) -> Tensor:
        return torch.cat([torch.empty(0, dtype=torch.int64), *(batch.indices for batch in self.batches)])


class Deal:
    def __init__(self, samples: int, seed: int, epoch: int = 0, cursor: int = 0, order: Order | None = None) -> None:
        if samples < 1:
            raise BadInput(f"there is nothing to deal out (samples: {samples}); give the task a data set with samples")
        if epoch < 0 or not 0 <= cursor < samples:
            raise BadInput(f"no such place in the data (epoch: {epoch}, cursor: {cursor}, samples: {samples})")
        self.samples, self.seed, self.epoch, self.cursor = samples, seed, epoch, cursor
        self.order = Order(samples, seed) if order is None else order

    def share(self, member: int, members: int, batch_size: int, accumulate: int = 1) -> Share:
        """The samples that `member` of `members` takes in the step at the cursor; the cursor stays.

        With `accumulate` it takes the parts of so many members, of as many times more: cut as each would have it."""
        assert 0 <= member < members, (member, members)
        pieces = members * accumulate
        take = min(self.samples - self.cursor, pieces * batch_size)
        mine = range(member * accumulate, (member + 1) * accumulate)
        parts = [part(take, number, pieces, batch_size) for number in mine]
        joined = self.order.between(self.epoch, self.cursor, self.cursor + take)
        batches = [
            Batch(self.epoch, self.cursor + first, joined[first:last], take, (last - first) / take)
            for first, last in parts
            if first < last
        ]
        return Share(batches, take)

    def advance(self, taken: int) -> None:
        """Moves past a step that took `taken` samples (its share's total); past the last sample a new epoch begins."""
        assert taken >= 0, taken
        epochs, self.cursor = divmod(self.cursor + taken, self.samples)
        self.epoch += epochs


def part(take: int, member: int, members: int, batch_size: int) -> tuple[int, int]:
    """The first and the last (exclusive) of the next `take` samples that a member gets."""
    # The last samples of an epoch go to fewer members rather than one to each: batch norm needs two.
    hands = members if take >= 2 * members or batch_size < 3 else max(1, take // 2)
    return min(member, hands) * take // hands, min(member + 1, hands) * take // hands


@lru_cache(maxsize=4)  # shared by all deals of a process: a simulated world has thousands
def order(samples: int, seed: int, epoch: int) -> Tensor:
    """The epoch's global shuffle."""
    return torch.randperm(samples, generator=generator(f"{seed}/{epoch}"))


@lru_cache(maxsize=4)
def grouped_order(samples: int, seed: int, epoch: int, lengths: Lengths, group: int) -> Tensor:
    """A shuffle in which groups of neighbours have like lengths: the samples of each of a few dozen groups are sorted
    by length, cut into groups again, and the groups are shuffled. A last group that is short stays the last."""
    shuffled, many = order(samples, seed, epoch), max(1, min(MOST_GROUPED, samples // (4 * group)))
    pieces = [piece[lengths.values[piece].argsort(stable=True)] for piece in shuffled.split(many * group)]
    groups = [*torch.cat(pieces).split(group)]
    last = [groups.pop()] if len(groups[-1]) < group else []
    mixed = torch.randperm(len(groups), generator=generator(f"{seed}/{epoch}/groups")).tolist()
    return torch.cat([*(groups[i] for i in mixed), *last])


@lru_cache(maxsize=64)
def _window_order(stream: Order, epoch: int, window: int) -> Tensor:
    """The places in a stream of the samples of one window."""
    start = window * stream.window
    count = min(stream.window, stream.samples - start)
    return start + torch.randperm(count, generator=generator(f"{stream.seed}/{epoch}/{window}"))


def generator(place: str) -> torch.Generator:
    """Draws that depend on a text alone, which names the seed and a place in the run."""
    mixed = hashlib.blake2b(place.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(mixed, "little") >> 1)
