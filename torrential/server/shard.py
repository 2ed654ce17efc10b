"""The state of one range, as a state machine: operations in, the same state on every replica out.

    ShardOperation ──► apply ──► parameters, optimizer state     (in place, in full-length buffers)
                            └──► who has been answered what, clocks, dealer, counts

An operation, and the record of whose request it carries out, are one step: a request that is sent again, here or to a
replica, is recognised by its number and not carried out twice. Answers are kept until the worker says (`floor`) that it
has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from torrential.optim.rates import Rate
from torrential.server.clocks import RangeClock
from torrential.server.dealer import Dealer
from torrential.server.messages import ShardState, Span
from torrential.server.optimizer import Scalars, Store
from torrential.server.whole import optimizer_of


class RequestInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The worker's request that an operation carries out."""

    worker: int
    seq: int
    floor: int
    clock: int
    version: int = 0  # the version of the parameters that its gradient was computed on
    lease: int = 0


class ShardOperation(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An operation on a shard; applied in the same order on every replica."""

    kind: str  # the method of Shard, less its underscore
    asked: tuple[RequestInfo, ...] = ()
    spans: tuple[Span, ...] = ()
    lr: float = 0.0
    scale: float = 1.0
    used: tuple[int, ...] | None = None
    keys: bool = False
    number: int = 0  # meet, step: the clock; take: samples for each; mark: the checkpoint; forget: the next life
    workers: tuple[int, ...] = ()
    name: str = ""
    options: dict[str, Any] = {}
    rates: tuple[dict[str, float | tuple[float, ...]], ...] = ()  # as in messages.Push

    @property
    def rate(self) -> float:
        return Rate(self.lr, self.rates) if self.rates else self.lr


class Outcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The outcome of a request, with the fields of messages.Done."""

    version: int = 0
    dropped: bool = False
    lease: int = 0
    indices: Span = (0, 0)
    epoch: int = 0
    total: int = 0
    finished: bool = False
    staleness: int = 0


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that a handler returned."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Result = tuple[Outcome, Sequence[Tensor]]
Handler = Callable[["Shard", Mapping[str, Any], Sequence[Tensor]], Sequence[Tensor]]


class ShardMetadata(msgspec.Struct):
    """Everything a shard keeps besides its vectors."""

    version: int
    closed: int
    marked: int
    dropped: int
    staleness: dict[int, int]
    clocks: dict[int, list[tuple[int, int, int]]]
    floors: dict[int, int]
    answers: dict[int, dict[int, tuple[Outcome, list[Packed]]]]
    scalars: Scalars
    dealer: Dealer | None
    lives: dict[int, int] = {}
    notes: dict[str, Any] = {}


@dataclass(frozen=True)
class Initial:
    """The full-length vectors and counts that a run begins with."""

    parameters: Tensor
    states: Mapping[str, Tensor] = field(default_factory=dict)  # those that are missing begin as they do in torch
    scalars: Mapping[int, Mapping[str, float]] = field(default_factory=dict)  # by entry: step counts and the like
    version: int = 0
    clock: int = 0  # the workers' first
    dealer: Dealer | None = None


class Shard:
    """One range of the parameters on one server, with everything that is kept for it."""

    def __init__(
        self, store: Store, start: int, stop: int, handlers: Mapping[str, Handler], metadata: ShardMetadata
    ) -> None:
        self.store, self.start, self.stop, self.handlers = store, start, stop, handlers
        self.number = 0  # operations applied
        self.version, self.closed = metadata.version, metadata.closed
        self.marked, self.dropped = metadata.marked, metadata.dropped
        self.staleness = metadata.staleness  # updates between the read and the push: how often
        self.clocks = {worker: _clock(start, stop, pieces) for worker, pieces in metadata.clocks.items()}
        self.floors, self.lives = metadata.floors, metadata.lives  # by worker; lives before these are over
        self.answers: dict[int, dict[int, Result]] = {
            worker: {seq: (outcome, [_unpack(p) for p in packed]) for seq, (outcome, packed) in answers.items()}
            for worker, answers in metadata.answers.items()
        }
        self.dealer = metadata.dealer
        self.notes = metadata.notes  # what handlers remember besides vectors: plain data, replicated with the range
        self.parameters = store.parameters[start:stop]
        self.states = {name: vector[start:stop] for name, vector in store.states.items()}
        self.optimizer = optimizer_of(store, start, stop, metadata.scalars)

    @classmethod
    def fresh(cls, store: Store, start: int, stop: int, handlers: Mapping[str, Handler], initial: Initial) -> Shard:
        store.clear(start, stop)
        store.parameters[start:stop].copy_(initial.parameters[start:stop])
        for name, vector in initial.states.items():
            store.states[name][start:stop].copy_(vector[start:stop])
        dealer = msgspec.convert(msgspec.to_builtins(initial.dealer), Dealer) if initial.dealer and not start else None
        if dealer is not None:
            dealer.forget(dealer.holders())
        scalars = {entry: dict(values) for entry, values in initial.scalars.items()}
        metadata = ShardMetadata(initial.version, initial.clock, 0, 0, {}, {}, {}, {}, scalars, dealer)
        return cls(store, start, stop, handlers, metadata)

    # -- a copy for another server, or a piece of it -----------------------------------------------------------------
    def state(self, view: int) -> tuple[ShardState, list[Tensor]]:
        names = tuple(self.states)
        metadata = msgspec.msgpack.encode(self.metadata())
        message = ShardState(
            start=self.start, stop=self.stop, number=self.number, names=names, metadata=metadata, view=view
        )
        return message, [tensor.clone() for tensor in self.store.tensors(self.start, self.stop)]

    @classmethod
    def restored(
        cls, store: Store, handlers: Mapping[str, Handler], state: ShardState, tensors: Sequence[Tensor]
    ) -> Shard:
        assert state.names == tuple(store.states), (state.names, tuple(store.states))
        for mine, theirs in zip(store.tensors(state.start, state.stop), tensors, strict=True):
            mine.copy_(theirs)
        metadata = msgspec.msgpack.decode(state.metadata, type=ShardMetadata)
        shard = cls(store, state.start, state.stop, handlers, metadata)
        shard.number = state.number
        return shard

    def part(self, start: int, stop: int) -> Shard:
        """The same shard with fewer keys. The vectors stay where they are; what is counted stays with the first
        piece."""
        metadata = msgspec.msgpack.decode(msgspec.msgpack.encode(self.metadata()), type=ShardMetadata)
        if start != self.start:
            metadata.dealer, metadata.staleness, metadata.dropped = None, {}, 0
            for answers in metadata.answers.values():  # what a handler found in the whole range is said once
                answers.update({seq: (outcome, []) for seq, (outcome, _) in answers.items()})
        piece = Shard(self.store, start, stop, self.handlers, metadata)
        piece.number = self.number
        return piece

    def copied(self, store: Store) -> Shard:
        """The same shard in other memory."""
        for copy, mine in zip(
            store.tensors(self.start, self.stop), self.store.tensors(self.start, self.stop), strict=True
        ):
            copy.copy_(mine)
        metadata = msgspec.msgpack.decode(msgspec.msgpack.encode(self.metadata()), type=ShardMetadata)
        return Shard(store, self.start, self.stop, self.handlers, metadata)

    def metadata(self) -> ShardMetadata:
        return ShardMetadata(
            self.version,
            self.closed,
            self.marked,
            self.dropped,
            self.staleness,
            {worker: clock.pieces() for worker, clock in self.clocks.items()},
            self.floors,
            {
                worker: {seq: (outcome, [_pack(t) for t in tensors]) for seq, (outcome, tensors) in answers.items()}
                for worker, answers in self.answers.items()
            },
            self.optimizer.scalars(),
            self.dealer,
            self.lives,
            self.notes,
        )

    # -- operations --------------------------------------------------------------------------------------------------
    def apply(self, operation: ShardOperation, tensors: Sequence[Tensor]) -> list[Result]:
        """Apply an operation; returns one result for each request it carries out."""
        self.number += 1
        method: Callable[[ShardOperation, Sequence[Tensor]], list[Result]] = getattr(self, f"_{operation.kind}")
        return method(operation, tensors)

    def answered(self, worker: int, seq: int) -> Result | None:
        answers = self.answers.get(worker)
        return None if answers is None else answers.get(seq)

    def _record(self, asked: RequestInfo, outcome: Outcome, tensors: Sequence[Tensor] = ()) -> Result:
        answers = self.answers.setdefault(asked.worker, {})
        if asked.floor > self.floors.get(asked.worker, 0):
            self.floors[asked.worker] = asked.floor
            for seq in [seq for seq in answers if seq < asked.floor]:
                del answers[seq]
        result = answers[asked.seq] = outcome, tensors
        return result

    def _put(self, operation: ShardOperation, tensors: Sequence[Tensor]) -> list[Result]:
        for span, tensor in zip(operation.spans, tensors, strict=True):
            self.store.view(span).copy_(tensor)
        return self._updated(operation)

    def _add(self, operation: ShardOperation, tensors: Sequence[Tensor]) -> list[Result]:
        if operation.keys:
            values, keys = tensors
            self.parameters.scatter_add_(0, keys - self.start if self.start else keys, values)
        else:
            for span, tensor in zip(operation.spans, tensors, strict=True):
                self.store.view(span).add_(tensor)
        return self._updated(operation)

    def _call(self, operation: ShardOperation, tensors: Sequence[Tensor]) -> list[Result]:
        found = [t.clone() for t in self.handlers[operation.name](self, operation.options, tensors)]
        return self._updated(operation, found)

    def _updated(self, operation: ShardOperation, tensors: Sequence[Tensor] = ()) -> list[Result]:
        self.version += 1
        return [self._record(asked, Outcome(self.version), tensors) for asked in operation.asked]

    def _push(self, operation: ShardOperation, tensors: Sequence[Tensor]) -> list[Result]:
        """Apply one worker's gradient, as it comes."""
        (asked,) = operation.asked
        clock = self.clocks.get(asked.worker)
        if clock is not None:
            for first, last in operation.spans:
                clock.set(first, last, asked.clock + 1)
        return self._optimized(operation, tensors)

    def _step(self, operation: ShardOperation, tensors: Sequence[Tensor]) -> list[Result]:
        """Apply the sum of a clock's gradients."""
        self.closed = operation.number + 1
        for asked in operation.asked:
            if asked.worker in self.clocks:
                self.clocks[asked.worker].set(self.start, self.stop, self.closed)
        return self._optimized(operation, tensors)

    def _optimized(self, operation: ShardOperation, tensors: Sequence[Tensor]) -> list[Result]:
        before = self.version
        if tensors:
            for asked in operation.asked:
                late = before - asked.version
                self.staleness[late] = self.staleness.get(late, 0) + 1
            gradients = tensors
            if operation.scale != 1.0:
                gradients = (
                    [tensors[0] * operation.scale, *tensors[1:]]
                    if operation.keys
                    else [t * operation.scale for t in tensors]
                )
            if operation.keys:
                keys, values = coalesced(gradients[1], gradients[0])
                self.optimizer.step_keys(keys, values, operation.rate)
            else:
                self.optimizer.step_spans(operation.spans, gradients, operation.rate, operation.used)
            self.version += 1
        if self.dealer is not None:
            for asked in operation.asked:
                self.dealer.complete(asked.lease)
        return [
            self._record(asked, Outcome(self.version, staleness=before - asked.version)) for asked in operation.asked
        ]

    def _drop(self, operation: ShardOperation, tensors: Sequence[Tensor]) -> list[Result]:
        """Drop a gradient that came too late, and give its samples back."""
        (asked,) = operation.asked
        self.dropped += 1
        if self.dealer is not None:
            self.dealer.give_back(asked.lease)
        return [self._record(asked, Outcome(self.version, dropped=True))]

    def _take(self, operation: ShardOperation, tensors: Sequence[Tensor]) -> list[Result]:
        assert self.dealer is not None
        workers = [asked.worker for asked in operation.asked]
        self.dealer.dealt = max(self.dealer.dealt, operation.asked[0].clock + 1)
        if self.dealer.together:
            leases = self.dealer.deal_together(workers, operation.number)
        else:
            leases = [self.dealer.deal(worker, operation.number) for worker in workers]
        total = sum(samples.last - samples.first for _, samples in leases)
        return [
            self._record(
                asked, Outcome(self.version, False, number, (samples.first, samples.last), samples.epoch, total)
            )
            for asked, (number, samples) in zip(operation.asked, leases, strict=True)
        ]

    def _give_back(self, operation: ShardOperation, tensors: Sequence[Tensor]) -> list[Result]:
        (asked,) = operation.asked
        assert self.dealer is not None
        self.dealer.give_back(asked.lease)
        return [self._record(asked, Outcome(self.version))]

    def _nothing(self, operation: ShardOperation, tensors: Sequence[Tensor]) -> list[Result]:
        """Deal nothing, though there may be samples again in a moment: a request that comes twice must not get them."""
        return [self._record(asked, Outcome(self.version)) for asked in operation.asked]

    def _meet(self, operation: ShardOperation, tensors: Sequence[Tensor]) -> list[Result]:
        """Count a worker's clock from now on: it has sent its first request."""
        for worker in operation.workers:
            self.clocks[worker] = RangeClock(self.start, self.stop, operation.number)
        return []

    def _forget(self, operation: ShardOperation, tensors: Sequence[Tensor]) -> list[Result]:
        """Forget workers that are gone, and refuse what they may still have sent in lives before this one."""
        for worker in operation.workers:
            self.clocks.pop(worker, None)
            self.lives[worker] = max(self.lives.get(worker, 0), operation.number)
        if self.dealer is not None:
            self.dealer.forget(operation.workers)
        return []

    def _mark(self, operation: ShardOperation, tensors: Sequence[Tensor]) -> list[Result]:
        self.marked = operation.number
        return [self._record(asked, Outcome(self.version)) for asked in operation.asked]


def coalesced(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending keys, each once, with the sums of their values."""
    if keys.numel() < 2 or bool((keys[1:] > keys[:-1]).all()):
        return keys, values
    once, place = keys.unique(return_inverse=True)
    return once, values.new_zeros(once.numel()).index_add_(0, place, values)


def _clock(start: int, stop: int, pieces: Sequence[tuple[int, int, int]]) -> RangeClock:
    clock = RangeClock(start, stop)
    for first, last, time in pieces:
        clock.set(first, last, time)
    return clock


def _pack(tensor: Tensor) -> Packed:
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return Packed(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw)


def _unpack(packed: Packed) -> Tensor:
    dtype = getattr(torch, packed.dtype)
    if not packed.data:
        return torch.empty(packed.shape, dtype=dtype)
    return torch.frombuffer(bytearray(packed.data), dtype=dtype).view(packed.shape)
