"""A worker's client of the parameter servers.

    push ──► split by the view's table ──► one request to the head of each range ──► answers ──► the handle is done
                     ▲                                     │
                     └── a new view: again, same number ◄──┘ the head died, or the range has moved

Every call returns a handle at once. `wait` reads letters until all its answers are there; those for others complete
their own handles. Tensors are passed by reference: they are the server's until the handle is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torrential.comm.protocol import Letter, Mail, role_name
from torrential.compression.sparse import Selected
from torrential.errors import RunFailed, WaitedTooLong
from torrential.optim.rates import groups_of
from torrential.params.base import dtype_name
from torrential.server.cutting import Cutter, Pieces, RangeRequest
from torrential.server.encoding import encoded
from torrential.server.messages import (
    LIFE_BITS,
    Add,
    Call,
    Done,
    GiveBack,
    Mark,
    Marking,
    Moved,
    Pull,
    Push,
    Put,
    Refused,
    Request,
    Save,
    Span,
    Take,
    View,
)
from torrential.server.ring import find
from torrential.server.shares import OwnedSpan

AGAIN = 0.25  # the share of the timeout after which a complaint about a server is repeated
LAST = 1 << 32  # the number that the last checkpoints come after
JOINING = -1  # the clock of a worker that has not begun; nothing waits for it, and it waits for nothing


class Answer(NamedTuple):
    """The answer of all servers together."""

    version: int = 0  # updates applied, on the range with the fewest
    clock: int = 0  # clocks that all workers have completed, on the range furthest behind
    dropped: bool = False  # the gradient came too late and was not used (on the first range)
    staleness: int = 0  # updates between the read and the push (on the first range)
    lease: int = 0
    indices: Span = (0, 0)
    epoch: int = 0
    total: int = 0
    finished: bool = False
    tensors: Sequence[Tensor] = ()  # what handlers returned, by range
    ahead: int = 0  # clocks that all workers have completed, on the range furthest ahead
    metadata: Sequence[bytes] = ()  # everything about copies besides vectors, by range: see server/copies.py


class Fellows(Protocol):
    """The workers of a replica, as one of them has them, where each has a part of the parameters."""

    owned: Sequence[OwnedSpan]
    """The keys that this worker's vectors stand for."""

    def agree(self, answer: Answer) -> Answer:
        """What the servers have answered all workers of the replica together, given the answer to this one."""

    def marking(self, message: Marking) -> None:
        """Have all workers of the replica mark a checkpoint, between the same two of their pushes."""

    def check(self) -> None:
        """Raise Regrouped if they are not the same any more: servers do not answer what is left of a replica."""


class PushCompressor(Protocol):
    """What a worker sends of the gradients that it pushes."""

    wire: torch.dtype
    """The precision in which they travel."""

    def select(self, gradient: Tensor, used: Sequence[int] | None) -> Selected | None:
        """What is sent of a gradient of all parameters, of which backward has reached these entries (None: all); the
        rest stays behind. None: all of it is sent."""


class Marked(Protocol):
    """A worker's part in checkpoints, besides what it has pushed."""

    def marked(self, number: int, cut: int) -> None:
        """What was sent so far belongs to a checkpoint, or what is sent before clock `cut`, and nothing after."""


class Client:
    """The client of the parameter servers that a worker has as `ctx.params`."""

    def __init__(
        self,
        comm: Mail,
        numel: int,
        dtype: torch.dtype,
        *,
        timeout: float = 60.0,
        resend: float | None = None,
        overdue: Callable[[int, float], None] | None = None,
        fellows: Fellows | None = None,
        compressor: PushCompressor | None = None,
        parts: Marked | None = None,
    ) -> None:
        """`timeout`: seconds after which a wait fails, naming the server; or, with `overdue`, after which that is told
        the server's address and how long the wait has been, again and again, until it is over. `resend`: seconds of
        silence after which requests are sent again; None where the world loses letters only with whoever dies.
        `fellows`: the worker's replica, where that is of several workers; `compressor`: of what is pushed; `parts`:
        what else the worker gives to checkpoints."""
        self.comm, self.numel, self.dtype, self._fellows = comm, numel, dtype, fellows
        self.timeout, self._resend, self._overdue = timeout, resend, overdue
        self._compressor, self._parts = compressor, parts
        self._cutter = Cutter(comm.view, numel, () if fellows is None else fellows.owned)
        self._seq = comm.view.version << LIFE_BITS  # its next life will have seen a newer view
        self._unanswered: dict[int, PendingRequest] = {}  # by number, in ascending order
        self._versions: dict[int, int] = {}  # versions of the parameters last read, by the start of the range
        self._others: deque[Letter] = deque()  # letters that are not for the client
        self._marked = self._saved = 0  # the newest checkpoint that this worker has marked, and asked for
        self._waited: PendingRequest | None = None  # what the caller waits for, and so cannot be computing on
        self._land()

    # -- parameters -------------------------------------------------------------------------------------------------
    def enter(self) -> int:
        """Begin a worker's first clock: from now on the others wait for it. Returns the clock to begin with."""
        clock = self._read([], JOINING, everywhere=True).wait().ahead
        self._read([], clock, everywhere=True)  # ranges that are behind need not wait for this worker until then
        return clock

    def begin(self, into: Tensor) -> int:
        """Take part, with the current parameters in `into`; returns the clock to begin with."""
        clock = self.enter()
        self.pull(into, clock=clock).wait()  # ranges that are behind are waited for
        return clock

    def push(
        self,
        gradient: Pieces | None,
        *,
        clock: int,
        lr: float,
        scale: float = 1.0,
        used: Sequence[int] | None = None,
        lease: int = 0,
        keys: Tensor | None = None,
    ) -> PendingRequest:
        """Through the server's optimizer, at the end of `clock`. With `keys` (int64) `gradient` holds values for these
        keys only; ascending keys are quickest. None: nothing to add, but the clock is completed."""
        return self._push(gradient, keys, None, clock, lr, scale, used, lease)

    def push_pull(
        self,
        gradient: Pieces | None,
        into: Tensor,
        *,
        clock: int,
        lr: float,
        scale: float = 1.0,
        used: Sequence[int] | None = None,
        lease: int = 0,
    ) -> PendingRequest:
        """A push at the end of `clock` and the read that starts the next, in one round trip. Both are of everything,
        or of the same parts."""
        return self._push(gradient, None, into, clock, lr, scale, used, lease)

    def pull(self, into: Tensor, *, clock: int, start: int | None = None) -> PendingRequest:
        """The read that starts `clock`: all parameters that this worker has, or, from key `start` on, as many as `into`
        has room for."""
        return self._read(into if start is None else [(start, into)], clock)

    def get(self, into: Tensor, *, start: int = 0) -> PendingRequest:
        """Read without waiting for other workers."""
        return self._read([(start, into)], JOINING)

    def put(self, values: Pieces, *, clock: int = JOINING) -> PendingRequest:
        return self._send(Put, {}, self._cutter.split(values), clock)

    def add(self, values: Pieces, *, clock: int = JOINING, keys: Tensor | None = None) -> PendingRequest:
        if keys is None:
            return self._send(Add, {}, self._cutter.split(values), clock)
        return self._send(Add, {"keys": True}, self._cutter.split_keys(values, keys), clock)

    # -- the rest ---------------------------------------------------------------------------------------------------
    def take(self, count: int, *, clock: int = JOINING, after: int = 0) -> PendingRequest:
        """The next samples to train on: Answer.indices of the epoch's order, to be named in the push as `lease`. Waits
        until `after` updates have been applied."""
        return self._send(
            Take,
            {"count": count, "after": after},
            [RangeRequest(self._cutter.view.version, self._cutter.view.table[0])],
            clock,
        )

    def give_back(self, lease: int) -> PendingRequest:
        """Samples that were taken and will not be trained on (0: none), for others to take. What this worker has asked
        for and not been given, it is not given any more."""
        return self._send(
            GiveBack, {"lease": lease}, [RangeRequest(self._cutter.view.version, self._cutter.view.table[0])], JOINING
        )

    def save(self, into: Sequence[Tensor], *, at_once: bool = False) -> PendingRequest:
        """A checkpoint: all parameters, and each of the optimizer's states, as they are at one moment of training, into
        vectors of full length; Answer.metadata has the rest. One worker at a time does this, and no other needs to
        know: what it has sent by the time it hears of it belongs to the checkpoint (server/copies.py). A worker that
        has left asks for the last one; it does not know of those that others have asked for since. `at_once`: as they
        are now, which is the same moment everywhere only if no worker changes them meanwhile."""
        left = self.comm.address not in self.comm.view.workers
        self._saved = max(self._saved, self._marked, LAST if left else 0) + 1
        parts = self._cutter.cut([(0, self.numel)] * len(into), (), into)
        return self._send(Save, {"number": self._saved, "at_once": at_once}, parts, JOINING)

    def look(self) -> PendingRequest:
        """How far the run has come, where samples are dealt: Answer.version, and Answer.finished."""
        return self._send(Pull, {}, [RangeRequest(self._cutter.view.version, self._cutter.view.table[0])], JOINING)

    def mark(self, number: int, cut: int) -> None:
        """Say that all that was sent before belongs to checkpoint `number`, and nothing after."""
        if number > self._marked:
            self._marked = number
            if self._parts is not None:
                self._parts.marked(number, cut)
            self._send(Mark, {"number": number, "cut": cut}, self._cutter.everywhere(), JOINING)

    def complain(self, pending: PendingRequest, waited: float) -> None:
        """Ask the servers whom a request waits for; for callers that poll instead of waiting."""
        self._complain(pending, waited, self._overdue)

    def forget(self, pending: PendingRequest) -> None:
        """Give up a request: its answer is not waited for any more."""
        self._unanswered.pop(pending.seq, None)

    def call(
        self,
        name: str,
        options: Mapping[str, Any] | None = None,
        values: Pieces | None = None,
        *,
        clock: int = JOINING,
    ) -> PendingRequest:
        """Run a handler that the servers know by this name on every range (with `values`: on those they touch)."""
        parts = self._cutter.everywhere() if values is None else self._cutter.split(values)
        return self._send(Call, {"name": name, "options": dict(options or {})}, parts, clock)

    def receive(self, timeout: float | None = None) -> Letter | None:
        """The next letter that is not an answer of a server; None after `timeout` seconds. A new view is one, too."""
        while not self._others:
            letter = self.comm.receive(timeout)
            if letter is None:
                return None
            self._handle(letter)
            if isinstance(letter.message, View):
                return letter
        return self._others.popleft()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for everything that is unanswered."""
        while self._unanswered:
            next(iter(self._unanswered.values())).finish(timeout)

    # -- requests ---------------------------------------------------------------------------------------------------
    def _push(
        self,
        gradient: Pieces | None,
        keys: Tensor | None,
        into: Tensor | None,
        clock: int,
        lr: float,
        scale: float,
        used: Sequence[int] | None,
        lease: int,
    ) -> PendingRequest:
        options: dict[str, Any] = {"lr": float(lr), "scale": scale}
        if rates := groups_of(lr):
            options["rates"] = rates
        if used is not None:
            options["used"] = tuple(used)
        if lease:
            options["lease"] = lease
        if into is not None:
            options["pull"] = True
        if keys is None and isinstance(gradient, Tensor) and self._compressor is not None:
            options["packed"] = dtype_name(self._compressor.wire)
            if (chosen := self._compressor.select(gradient, used)) is not None:
                options["keys"] = True
                parts = self._cutter.cut(
                    [(0, self.numel)], (chosen.values, chosen.places), () if into is None else [into], keys=True
                )
                return self._send(Push, options, parts, clock)
        if keys is not None:
            assert gradient is not None
            options["keys"] = True
            parts = self._cutter.split_keys(gradient, keys, everywhere=True)
        else:
            parts = self._cutter.split(gradient, into)
        return self._send(Push, options, parts, clock)

    def _read(self, wanted: Pieces, clock: int, everywhere: bool = False) -> PendingRequest:
        parts = self._cutter.everywhere() if everywhere else self._cutter.split(wanted, reading=True)
        return self._send(Pull, {}, parts, clock)

    def _send(
        self, kind: type[Request], options: dict[str, Any], parts: list[RangeRequest], clock: int
    ) -> PendingRequest:
        self._seq += 1
        pending = PendingRequest(self, self._seq, kind, options, clock)
        if parts:
            self._unanswered[self._seq] = pending
        for part in parts:
            pending.parts[part.start] = part
            self._post(pending, part)
        return pending

    def _post(self, pending: PendingRequest, part: RangeRequest) -> None:
        options = pending.options
        if pending.kind is Push:
            if part.version is None:
                part.version = self._versions.get(part.start, 0)
            options["version"] = part.version
        part.message = pending.kind(
            seq=pending.seq,
            clock=pending.clock,
            view=part.view,
            spans=part.spans if pending.kind is not Pull or part.into else ((part.start,) * 2, (part.stop,) * 2),
            start=part.start,
            floor=next(iter(self._unanswered)),
            **options,
        )
        part.posted = encoded(part, options["packed"]) if "packed" in options else part.tensors
        self.comm.post(part.server, part.message, part.posted)

    # -- answers ----------------------------------------------------------------------------------------------------
    def _wait(self, pending: PendingRequest, timeout: float | None) -> None:
        self._waited = pending
        try:
            self._read_until(pending, timeout)
        finally:
            self._waited = None
            if pending.parts:
                self._land()

    def _read_until(self, pending: PendingRequest, timeout: float | None) -> None:
        comm, limit = self.comm, self.timeout if timeout is None else timeout
        began = sent = comm.now()
        pause = limit if self._resend is None else min(limit, self._resend)

        def handle(letter: Letter) -> bool:
            self._handle(letter)
            return not pending.parts

        while not comm.read(handle, pause):
            now = comm.now()
            if now - began >= limit:
                self._complain(pending, now - began, self._overdue if timeout is None else None)
                limit += AGAIN * self.timeout
            if self._resend is not None and now - sent >= self._resend:
                self._send_again()
                sent = now
            pause = limit - (now - began)
            if self._resend is not None:
                pause = min(pause, self._resend)

    def _land(self) -> None:
        """Tell the mail where answers are to land; what is coming in by an earlier call lands in memory of its own."""
        if not self.comm.shares_memory:
            self.comm.land(self._place)

    def _place(self, message: Any) -> Sequence[Tensor] | None:
        """Parameters that the caller waits for come straight to where it wants them. Where it goes on meanwhile they
        are copied there as a whole, so that no computation sees half of them."""
        pending = self._waited
        if pending is None or not isinstance(message, Done) or message.seq != pending.seq:
            return None
        part = pending.parts.get(message.start)
        return part.into or None if part is not None and part.view == message.view else None

    def _complain(self, pending: PendingRequest, waited: float, overdue: Callable[[int, float], None] | None) -> None:
        if overdue is None:
            part = next(iter(pending.parts.values()))
            what = f"to answer a {pending.kind.__name__} of parameters from {part.start} on"
            raise WaitedTooLong(role_name(part.server), waited, what)
        for server in sorted({part.server for part in pending.parts.values()}):
            overdue(server, waited)

    def _poll(self) -> None:
        while (letter := self.comm.receive(0.0)) is not None:
            self._handle(letter)

    def _handle(self, letter: Letter) -> None:
        message, tensors = letter.message, letter.tensors
        if isinstance(message, View):
            if message.version > self._cutter.view.version:
                self._adopt(message)
                if self._fellows is not None:
                    self._fellows.check()
            return
        if isinstance(message, Marking):
            self.mark(message.number, message.cut) if self._fellows is None else self._fellows.marking(message)
            return
        if not isinstance(message, Done | Refused | Moved):
            self._others.append(Letter(letter.source, message, [tensor.clone() for tensor in tensors]))
            return
        pending = self._unanswered.get(message.seq)
        part = None if pending is None else pending.parts.get(message.start)
        if pending is None or part is None or part.view != message.view:
            return  # answered before, or addressed anew since
        if isinstance(message, Moved):
            part.moved = True  # the view that says where to is on its way
            return
        if isinstance(message, Refused):
            pending.refused = message.reason
        else:
            assert isinstance(message, Done)
            saved = pending.kind is Save
            for view, tensor in zip(part.into, tensors, strict=bool(part.into) and not saved):
                if tensor is not view and not view.is_meta:  # else it has landed there, or is only a size
                    view.copy_(tensor)
            if part.into and not saved:
                self._versions[part.start] = message.version
            pending.answers.append((message, () if part.into else [tensor.clone() for tensor in tensors]))
        del pending.parts[part.start]
        if not pending.parts:
            del self._unanswered[pending.seq]

    def _adopt(self, view: View) -> None:
        """Send again what went to somebody who does not answer for it any more, in the order it was sent in."""
        before, self._cutter.view = self._cutter.view, view
        known = self._versions
        self._versions = {
            r.start: known[parent]
            for r in view.table
            if (parent := before.table[find(before.table, r.start)].start) in known
        }
        for pending in self._unanswered.values():
            for part in list(pending.parts.values()):
                r = view.table[find(view.table, part.start)]
                if (r.start, r.stop, r.chain[0]) == (part.start, part.stop, part.server) and not part.moved:
                    continue
                if pending is self._waited:
                    self._land()
                del pending.parts[part.start]
                parts = (
                    self._cutter.cut(part.spans, part.tensors, part.into, part.keys)
                    if part.spans
                    else [RangeRequest(view.version, r)]
                )
                for anew in parts:
                    anew.version = part.version
                    pending.parts[anew.start] = anew
                    self._post(pending, anew)

    def _send_again(self) -> None:
        for pending in self._unanswered.values():
            for part in pending.parts.values():
                self.comm.post(part.server, part.message, part.posted)


class PendingRequest:
    """The handle of a request."""

    __slots__ = ("answer", "answers", "client", "clock", "kind", "options", "parts", "refused", "seq")

    def __init__(self, client: Client, seq: int, kind: type[Request], options: dict[str, Any], clock: int) -> None:
        self.client, self.seq, self.kind, self.options, self.clock = client, seq, kind, options, clock
        self.parts: dict[int, RangeRequest] = {}  # unanswered, by the start of the range
        self.answers: list[tuple[Done, Sequence[Tensor]]] = []
        self.answer: Answer | None = None
        self.refused: str | None = None

    def done(self) -> bool:
        if self.parts:
            self.client._poll()
        return not self.parts

    def finish(self, timeout: float | None = None) -> None:
        """Wait for the servers alone: what they have answered this worker's fellows is not asked for."""
        if self.parts:
            self.client._wait(self, timeout)
        if self.refused is not None:
            raise RunFailed(self.refused)

    def wait(self, timeout: float | None = None) -> Answer:
        """Raises WaitedTooLong, or RunFailed with the reason if a server refused it."""
        self.finish(timeout)
        if self.answer is None:
            self.answer = self._joined()
            if self.client._fellows is not None and self.kind in (Push, Pull):
                self.answer = self.client._fellows.agree(self.answer)
        return self.answer

    def _joined(self) -> Answer:
        answers = self.answers
        if not answers:
            return Answer()
        if len(answers) > 1:
            answers.sort(key=lambda answer: answer[0].start)
        first, tensors = answers[0]
        version, clock, ahead, metadata = first.version, first.clock, first.clock, [first.metadata]
        if len(answers) > 1:
            version, clock = min(done.version for done, _ in answers), min(done.clock for done, _ in answers)
            ahead = max(done.clock for done, _ in answers)
            tensors = [tensor for _, tensors in answers for tensor in tensors]
            metadata = [done.metadata for done, _ in answers]
        return Answer(
            version,
            clock,
            first.dropped,
            first.staleness,
            first.lease,
            first.indices,
            first.epoch,
            first.total,
            first.finished,
            tensors,
            ahead,
            metadata if first.metadata else (),
        )
