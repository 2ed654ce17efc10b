"""What workers pushed and what servers said to it, from the letters alone; and whether parameters tell the same story.

With plain SGD the order of updates does not matter: parameters are what they were at first, less the rate times every
gradient that was applied. So a push that was lost, doubled, or applied to the wrong range shows in the sum.

    acknowledged on a range   it is in there exactly once
    answered as dropped       it is not in there
    not answered              its worker died: on every range it may be in there once, or not

A checkpoint holds the pushes whose samples its dealer counts as used. Of one that its worker did not live to see
answered everywhere, some ranges may have their part though the first, whose dealer knows the samples, has not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from torrential.server.consistency import Consistency
from torrential.server.dealer import Dealer
from torrential.server.messages import LIFE_BITS, Done, Push, Range, Span

TOLERANCE = 1e-9  # of sums of float64; the smallest gradient that matters is far above it
MOST_UNSURE = 12  # pushes on one range, up to which all combinations are tried

Samples = tuple[int, int, int]  # epoch, first, last


class Pushed:
    """One push of one worker, on all ranges."""

    def __init__(self, worker: int, push: Push, numel: int) -> None:
        self.worker, self.seq, self.lease, self.rate = worker, push.seq, push.lease, push.lr * push.scale
        self.values = torch.full((numel,), torch.nan, dtype=torch.float64)
        self.adds = self.orphaned = False
        self.parts: dict[tuple[int, int], Sequence[Span]] = {}  # by view and start: what was asked of whom
        self.applied = torch.zeros(numel, dtype=torch.bool)
        self.dropped = torch.zeros(numel, dtype=torch.bool)

    def __str__(self) -> str:
        return f"push {self.seq & 0xFFFFFFFF} of worker {self.worker} (lease {self.lease})"

    def unsure(self) -> Tensor:
        return ~(self.applied | self.dropped) & self.carried()

    def carried(self) -> Tensor:
        """The keys that it has values for: of a worker that has a stage of the model, those of its stage."""
        return ~self.values.isnan()


class Ledger:
    def __init__(self, initial: Tensor, consistency: Consistency, complain: Callable[[str], None]) -> None:
        self._initial, self._consistency, self._complain = initial, consistency, complain
        self._pushes: dict[tuple[int, int], Pushed] = {}
        self._lives: dict[int, int] = {}  # by worker: the life in which it pushed last
        self._whole = {0}  # leases whose push was applied at key 0
        self._samples: dict[int, Samples] = {}  # by lease
        self._holders: dict[int, tuple[int, int]] = {}  # by lease: worker and request
        self._reads: dict[tuple[Span, int], bytes] = {}  # by span and version
        self.acknowledged = 0

    # -- letters --------------------------------------------------------------------------------------------------
    def pushed(self, worker: int, push: Push, tensors: Sequence[Tensor]) -> None:
        entry = self._pushes.get((worker, push.seq))
        if self._lives.setdefault(worker, push.seq >> LIFE_BITS) < push.seq >> LIFE_BITS:
            self.died(worker)
            self._lives[worker] = push.seq >> LIFE_BITS
        if entry is None:
            entry = self._pushes[worker, push.seq] = Pushed(worker, push, len(self._initial))
        entry.parts[push.view, push.start] = push.spans
        entry.adds = entry.adds or bool(tensors)
        for (first, last), tensor in zip(push.spans, tensors, strict=bool(tensors)):
            known = entry.values[first:last]
            if not torch.equal(known, tensor):
                if not known.isnan().all():
                    self._complain(f"{entry} was sent again with other values")
                known.copy_(tensor)

    def answered(self, worker: int, done: Done, tensors: Sequence[Tensor]) -> None:
        if done.lease:
            self._dealt(worker, done)
        entry = self._pushes.get((worker, done.seq))
        if entry is None:
            return
        self.acknowledged += 1
        spans = entry.parts[done.view, done.start]
        for first, last in spans:
            said, other = (entry.dropped, entry.applied) if done.dropped else (entry.applied, entry.dropped)
            if other[first:last].any():
                self._complain(f"{entry} was answered as applied and as dropped")
            said[first:last] = True
            if first == 0 and not done.dropped:
                self._whole.add(entry.lease)
        if self._consistency.aggregates:
            if entry.adds and not done.dropped and done.staleness:
                self._complain(f"{entry} was computed on parameters {done.staleness} updates older than those it met")
            self._read(worker, spans, done.version, tensors)

    def _dealt(self, worker: int, done: Done) -> None:
        samples = done.epoch, *done.indices
        if self._samples.setdefault(done.lease, samples) != samples or self._holders.setdefault(
            done.lease, (worker, done.seq)
        ) != (worker, done.seq):
            self._complain(f"lease {done.lease} was given out twice: {self._samples[done.lease]} and {samples}")

    def _read(self, worker: int, spans: Sequence[Span], version: int, tensors: Sequence[Tensor]) -> None:
        """Check that parameters of one version are the same for everybody, where pushes are summed."""
        for span, tensor in zip(spans, tensors, strict=bool(tensors)):
            read = tensor.numpy().tobytes()
            if self._reads.setdefault((span, version), read) != read:
                self._complain(f"worker {worker} read other parameters {span} of version {version} than another did")

    def died(self, worker: int) -> None:
        for (whose, _), push in self._pushes.items():
            push.orphaned = push.orphaned or whose == worker

    def _alone(self, push: Pushed) -> bool:
        """Whether it is a stage's part of a batch of which the stage at key 0 has not heard that its own is applied: a
        worker of the replica died meanwhile."""
        return not push.carried()[0] and push.lease not in self._whole

    # -- sums -----------------------------------------------------------------------------------------------------
    def explain(self, vector: Tensor, table: Iterable[Range], what: str, dealer: Dealer | None = None) -> None:
        """Check that these parameters are what the pushes made them; with `dealer`: those of a checkpoint."""
        pushes = [p for p in self._pushes.values() if p.adds]
        partial: list[Pushed] = []
        if dealer is not None:
            leased = [p for p in pushes if p.lease]
            pushes = [p for p in leased if used(dealer, self._samples[p.lease])]
            others = [p for p in leased if p not in pushes]
            partial = [p for p in others if self._alone(p) or (p.orphaned and not p.applied[p.carried()].all())]
        for r in table:
            here = slice(r.start, r.stop)
            left = self._initial[here] - vector[here]
            unsure = [p.rate * p.values[here] for p in partial if p.carried()[r.start]]
            for push in (p for p in pushes if p.carried()[r.start]):
                moved = push.rate * push.values[here]
                unanswered = push.orphaned or self._alone(push)
                if push.applied[here].all() or not (unanswered or push.dropped[here].any()):
                    left = left - moved
                elif not push.dropped[here].all():
                    unsure.append(moved)
            if not _is_sum(left, unsure):
                most = float(left.abs().max())
                self._complain(f"{what} from {r.start} to {r.stop} are not the sum of what was pushed (off by {most})")

    def versions(self, table: Iterable[Range], found: Callable[[Range], int]) -> None:
        """Check the versions of ranges against the pushes, where every push is an update."""
        pushes = [p for p in self._pushes.values() if p.adds]
        for r in table:
            sure = sum(bool(p.applied[r.start]) for p in pushes)
            perhaps = sum(bool(p.unsure()[r.start]) for p in pushes)
            if not sure <= found(r) <= sure + perhaps:
                self._complain(
                    f"parameters from {r.start} on saw {found(r)} updates; {sure} pushes were acknowledged, "
                    f"{perhaps} were not answered"
                )

    # -- samples --------------------------------------------------------------------------------------------------
    def coverage(self, samples: int, epochs: int, all_of_them: bool) -> None:
        sure, perhaps = torch.zeros(2, epochs, samples, dtype=torch.int64)
        for push in self._pushes.values():
            if push.lease and push.carried()[0] and not push.dropped[0]:
                epoch, first, last = self._samples[push.lease]
                (sure if push.applied[0] else perhaps)[epoch, first:last] += 1
        for wrong, how in ((sure > 1, "twice"), ((sure + perhaps == 0) & all_of_them, "never")):
            if wrong.any():
                epoch, place = wrong.nonzero()[0].tolist()
                self._complain(f"sample {place} of epoch {epoch} was trained on {how}")


def used(dealer: Dealer, samples: Samples) -> bool:
    """Whether a dealer in whose copy nothing is leased has these samples behind it."""
    epoch, first, last = samples
    dealt = (epoch, last) <= (dealer.epoch, dealer.cursor) if epoch == dealer.epoch else epoch < dealer.epoch
    return dealt and not any(h.epoch == epoch and h.first < last and first < h.last for h in dealer.returned)


def _is_sum(left: Tensor, unsure: Sequence[Tensor]) -> bool:
    if float(left.abs().max()) < TOLERANCE:
        return True
    if not unsure or len(unsure) > MOST_UNSURE:
        return len(unsure) > MOST_UNSURE
    choices = torch.tensor(list(itertools.product((0.0, 1.0), repeat=len(unsure))), dtype=torch.float64)
    off = (left - choices @ torch.stack(list(unsure))).abs().amax(dim=1)
    return float(off.min()) < TOLERANCE
