"""The clients of a run: the samples of each, the clients of a round, and the order of their samples.

A client goes through its samples in the order of the epoch (data/deal.py) that it is in by its own count, so one client
with all samples is dealt what plain training is. Everything is a function of the seed, the round, and how many samples
each client has trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torrential.data.batches import targets_of
from torrential.data.deal import Batch, Order, generator
from torrential.errors import BadInput
from torrential.partitions import PartitionRule
from torrential.task import Task, training_samples

_KEPT = 16  # epochs whose order is kept, by client: clients differ in how far they are


class Clients:
    """The clients of a task, and their samples."""

    def __init__(self, owners: Tensor, count: int, order: Order) -> None:
        """`owners`: for each sample the client that has it, or -1."""
        self._owners, self._order = owners, order
        self.sizes: list[int] = owners[owners >= 0].bincount(minlength=count).tolist()
        self._starts = [0, *np.cumsum(self.sizes).tolist()]
        self._epochs: dict[int, tuple[Tensor, ...]] = {}

    def __len__(self) -> int:
        return len(self.sizes)

    def sampled(self, count: int, number: int) -> list[int]:
        """The clients that a round takes, by its number."""
        if count == len(self):
            return list(range(count))
        drawn = torch.randperm(len(self), generator=generator(f"{self._order.seed}/clients/{number}"))
        return sorted(drawn[:count].tolist())

    def batches(self, client: int, seen: int, size: int, steps: int, epochs: int) -> list[Batch]:
        """The next minibatches of a client that has trained on so many samples: of so many steps, or with none of so
        many epochs of its own, the rest of one that it is in included."""
        found = list[Batch]()
        until = (seen // self.sizes[client] + epochs) * self.sizes[client]
        while len(found) < steps if steps else seen < until:
            epoch, cursor = divmod(seen, self.sizes[client])
            own = self._of_epoch(epoch)[client]
            left = len(own) - cursor
            take = left if left == size + 1 > 3 else min(left, size)  # batch norm needs two samples
            found.append(Batch(epoch, self._starts[client] + cursor, own[cursor : cursor + take], take))
            seen += take
        return found

    def _of_epoch(self, epoch: int) -> tuple[Tensor, ...]:
        """The samples of every client in the order of an epoch."""
        if epoch not in self._epochs:
            if len(self._epochs) >= _KEPT:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = self.split(self._order.whole(epoch))
        return self._epochs[epoch]

    def split(self, order: Tensor) -> tuple[Tensor, ...]:
        """The samples of every client, as they follow one another in an order of all."""
        owned = order[self._owners[order] >= 0]
        by_owner = owned[self._owners[owned].argsort(stable=True)]
        return tuple(torch.split(by_owner, self.sizes))


def clients_of(task: Task, seed: int, count: int) -> Clients:
    """The clients of a task: those of its partition, or so many with equal parts of a shuffle."""
    given, samples = task.partition, training_samples(task)
    owners, order = torch.full((samples,), -1), Order(samples, seed)
    if not isinstance(given, PartitionRule | None):
        for client, indices in enumerate(given):
            owners[torch.tensor([int(index) for index in indices])] = client
        return Clients(owners, len(given), order)
    rule = PartitionRule(count) if given is None else given
    sizes = [samples // rule.clients + (client < samples % rule.clients) for client in range(rule.clients)]
    draw = np.random.default_rng([seed, 0xFED])
    dealt: Sequence[Any]  # of lists, or of arrays
    if rule.alpha is not None:
        dealt = _uneven(targets_of(task), sizes, rule.alpha, draw)
    elif rule.labels is not None:
        dealt = _by_label(targets_of(task), sizes, rule.labels, draw)
    else:
        dealt = np.split(draw.permutation(samples), np.cumsum(sizes)[:-1])
    for client, mine in enumerate(dealt):
        owners[torch.from_numpy(np.asarray(mine))] = client
    return Clients(owners, rule.clients, order)


def _uneven(labels: Tensor, sizes: Sequence[int], alpha: float, draw: np.random.Generator) -> list[list[int]]:
    """Equal parts, whose shares of the labels are drawn from a Dirichlet distribution, as long as there are samples of
    the labels left (Hsu, Qi and Brown 2019)."""
    pools = [draw.permutation(np.flatnonzero(labels.numpy() == label)).tolist() for label in labels.unique().tolist()]
    dealt: list[list[int]] = [[] for _ in sizes]
    for client in draw.permutation(len(sizes)):
        shares = draw.dirichlet([alpha] * len(pools))
        while (missing := sizes[client] - len(dealt[client])) > 0:
            left = np.array([len(pool) for pool in pools])
            wanted = np.where(left > 0, shares, 0.0)
            if wanted.sum() <= 1e-12:
                wanted = left.astype(float)  # nothing is left of the labels that were drawn
            for pool, count in zip(pools, draw.multinomial(missing, wanted / wanted.sum()), strict=True):
                taken = min(int(count), len(pool))
                dealt[client] += [pool.pop() for _ in range(taken)]
    return dealt


def _by_label(labels: Tensor, sizes: Sequence[int], each: int, draw: np.random.Generator) -> list[np.ndarray]:
    """Every client has `each` pieces of the samples in the order of their labels (McMahan et al. 2017)."""
    if each > min(sizes):
        raise BadInput(
            f"a client has fewer samples than labels (samples: {min(sizes)}, labels: {each}); use fewer labels"
        )
    shuffled = draw.permutation(len(labels))
    by_label = shuffled[np.argsort(labels.numpy()[shuffled], kind="stable")]
    pieces = np.array_split(by_label, len(sizes) * each)
    chosen = draw.permutation(len(pieces)).reshape(len(sizes), each)
    return [np.concatenate([pieces[piece] for piece in mine]) for mine in chosen]
