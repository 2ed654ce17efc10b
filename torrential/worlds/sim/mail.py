"""Letters, memory and the clock for a role of the simulated world."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, TypeVar

import torch
from torch import Tensor

from torrential.comm.protocol import COORDINATORS, SERVERS, Handle, Letter, Meter, letter_by_letter
from torrential.membership import messages as m
from torrential.membership.roles import Who
from torrential.params.base import Finished
from torrential.server.messages import View
from torrential.worlds.sim.cluster import Cluster, Inside
from torrential.worlds.sim.cores import Cores
from torrential.worlds.sim.gradient_pool import GradientPool
from torrential.worlds.sim.kernel import Kernel, SimRole
from torrential.worlds.sim.network import Network
from torrential.worlds.trace import NOTHING, Trace

HEADER = 120  # bytes of a message besides its tensors
TICK = 1e-9  # seconds; a wait is never so short that the clock does not move
COPY = 3  # times that a byte crosses the bus when it is copied: read, fetched to be written, written
ADD = 3  # two are read, one is written
LOOK = 1
RESEND_SECONDS = 1.0  # of virtual silence, where letters are lost

T = TypeVar("T")


SENT = Finished()  # the handle of every letter: it is on its way at once


def as_now(tensors: Sequence[Tensor]) -> tuple[int, list[Tensor]]:
    """The bytes of some tensors, and copies of them as they are now; what has no contents need not be copied."""
    nbytes, copies = 0, []
    for tensor in tensors:
        nbytes += tensor.nbytes
        copies.append(tensor if tensor.is_meta else tensor.clone())
    return nbytes, copies


class Hub:
    """The network, cores and clock that all roles of one simulation share."""

    def __init__(
        self, kernel: Kernel, cluster: Cluster, seed: int, trace: Trace | None = None, memory: str = "cpu"
    ) -> None:
        """`memory`: the device of registered buffers; on "meta" they have a size and no contents."""
        self.kernel, self.cluster, self.seed, self.trace, self.memory = kernel, cluster, seed, trace, memory
        self.network = Network(kernel, cluster.network, trace)
        self.mails: dict[int, SimMail] = {}  # by address; the living
        self.common: dict[int, dict[str, Tensor]] = {}  # by host: memory that all of its roles see, by name
        self.posted: Callable[[int, int, Letter], None] | None = None  # told of every letter, from whom to whom
        self._chance = Random(f"letters {seed}")
        self._held: dict[tuple[int, int], float] = {}  # until when the last letter of a pair was
        accidents = cluster.accidents
        self.lossy = bool(accidents.loss or accidents.duplication)
        self._reliable = not self.lossy and not accidents.delay
        self.shared = cluster.inside.memory is not None
        self.timed = cluster.inside != Inside()
        self._cores: dict[int, Cores] = {}  # by host
        self.pool: GradientPool | None = None
        self.computed: Callable[[float], None] = lambda samples: None  # told when a worker has computed so many

    def cores(self, host: int) -> Cores:
        return self._cores.get(host) or self._cores.setdefault(host, Cores(self.kernel, self.cluster.inside))

    def send(self, sender: SimMail, to: int, letter: Letter, nbytes: int) -> None:
        if self.posted is not None:
            self.posted(sender.address, to, letter)
        receiver = self.mails.get(to)
        if receiver is None:
            return  # gone; whoever is told of it sends again to another
        if self._reliable:
            self.network.send(sender.address, sender.host, to, receiver.host, nbytes, receiver.deliver, letter)
        else:
            self._risk(sender, receiver, letter, nbytes)

    def _risk(self, sender: SimMail, receiver: SimMail, letter: Letter, nbytes: int) -> None:
        accidents, source, to = self.cluster.accidents, sender.address, receiver.address
        times = 1
        if self.lossy and min(source, to) < SERVERS <= max(source, to) < COORDINATORS:
            times -= self._chance.random() < accidents.loss
            times += self._chance.random() < accidents.duplication
        for _ in range(times):
            if accidents.delay:
                held = self.kernel.now + self._chance.random() * accidents.delay
                held = self._held[source, to] = max(held, self._held.get((source, to), 0.0))  # they stay in order
                self.kernel.at(held, self._send, sender, receiver, letter, nbytes)
            else:
                self._send(sender, receiver, letter, nbytes)

    def _send(self, sender: SimMail, receiver: SimMail, letter: Letter, nbytes: int) -> None:
        if self.mails.get(sender.address) is not sender:
            return  # what is held up is lost with the sender
        self.network.send(
            sender.address, sender.host, receiver.address, receiver.host, nbytes, receiver.deliver, letter
        )


class SimMail:
    """Implements comm.protocol.Mail."""

    shares_memory = False

    def __init__(self, hub: Hub, address: int, host: int, life: int = 0) -> None:
        self.hub, self.address, self.host, self.who = hub, address, host, Who(address, life)
        self.role: SimRole  # whose mail this is
        self.meter = Meter(clock=self.now)
        self.view = View(-1, (), ())
        self.lives: dict[int, int] = {}
        self._stop = False
        self.resend = RESEND_SECONDS if hub.lossy else None
        self._inbox: deque[Letter] = deque()
        self._reader: Callable[[Letter], bool | None] | None = None  # is given what comes, as long as the role waits
        self._enough = False  # whether the reader has had enough
        self._failure: Exception | None = None  # what the reader has raised
        self._since = 0.0  # when this wait, or the last letter of it, began
        self._buffers: dict[str, Tensor] = {}
        hub.mails[address] = self

    # -- clock and memory -----------------------------------------------------------------------------------------
    def now(self) -> float:
        return self.hub.kernel.now

    def sleep(self, seconds: float) -> None:
        self.role.sleep(seconds)

    def work(self, seconds: float) -> None:
        """Keep a core busy for so long."""
        if not self.hub.timed:
            self.sleep(seconds)
        elif seconds > 0:
            self.hub.cores(self.host).work(self.role, seconds)

    def work_on(self, nbytes: float) -> None:
        """Read or write so many bytes of the host's memory."""
        self.work(nbytes * (self.hub.cluster.inside.memory or 0.0))

    def _here(self, address: int) -> bool:
        """Whether another role is on this host, and sees the same memory."""
        other = self.hub.mails.get(address)
        return other is not None and other.host == self.host

    @property
    def traced(self) -> bool:
        return self.hub.trace is not None

    def span(self, what: str, began: float, about: Mapping[str, float] = NOTHING) -> None:
        """Put into the trace what this role did until now."""
        if self.hub.trace is not None:
            self.hub.trace.span(self.host, self.address, what, began, self.now(), about)

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.role.wait()

    def buffer(
        self, name: str, numel: int, dtype: torch.dtype, *, common: bool = False, rank: int | None = None
    ) -> Tensor:
        assert rank in (None, self.address), "nobody sees the memory of another role here"
        buffers = self.hub.common.setdefault(self.host, {}) if common else self._buffers
        if name not in buffers:
            counts = common and not dtype.is_floating_point  # which are kept where nothing is computed, too
            buffers[name] = torch.zeros(numel, dtype=dtype, device="cpu" if counts else self.hub.memory)
        return buffers[name]

    # -- letters --------------------------------------------------------------------------------------------------
    def post(self, to: int, message: Any, tensors: Sequence[Tensor] = ()) -> Handle:
        nbytes, copies = as_now(tensors)
        self.meter.bytes_sent += nbytes
        if nbytes and self.hub.shared and self._here(to):
            if self.address < SERVERS:
                self.work_on(COPY * nbytes)  # from where autograd left it to where the others see it
            nbytes = 0
        self.hub.send(self, to, Letter(self.address, message, copies), HEADER + nbytes)
        return SENT

    def hear(self, message: Any) -> None:
        """Take a message of the membership."""
        if isinstance(message, m.Roster):
            self.lives = {address: life for address, _, life in message.contacts}
            self.deliver(Letter(-1, message.view, []))
        elif isinstance(message, m.Stop):
            self._stop = True

    def begin(self) -> None:
        """Wait for the first view: before it no role can be written to."""
        self.until(lambda: self.view.version > 0)

    def land(self, where: Callable[[Any], Sequence[Tensor] | None]) -> None:
        """Do nothing: nothing comes as bytes here."""

    def deliver(self, letter: Letter) -> None:
        if type(letter.message) is View and letter.message.version > self.view.version:
            self.view = letter.message
        if self._reader is None:
            self._inbox.append(letter)
            self.role.wake()
            return
        if self.address < SERVERS:
            self._waited(letter)
        try:
            self._enough = bool(self._reader(letter))
        except Exception as error:
            self._failure = error  # the role's, not the kernel's
        if self._enough or self._failure is not None:
            self.role.wake()
        else:
            self.role.wait_on()

    def read(self, handle: Callable[[Letter], bool | None], timeout: float | None = None) -> bool:
        """Read letters as they come, without waking the role for each."""
        if self.hub.timed:
            return letter_by_letter(self, handle, timeout)  # to read takes the role's time
        while self._inbox:
            if handle(self._inbox.popleft()):
                return True
        self._reader, self._enough, self._since = handle, False, self.now()
        try:
            self.role.wait(timeout and max(timeout, TICK))
        finally:
            self._reader = None
        if (failure := self._failure) is not None:
            self._failure = None
            raise failure
        if not self._enough:
            self._waited(None)
        return self._enough

    def receive(self, timeout: float | None = None) -> Letter | None:
        if self._inbox:
            letter = self._inbox.popleft()
        elif timeout == 0.0:
            return None
        else:
            found = self._await(timeout)
            if found is None:
                return None
            letter = found
        if self.hub.timed and self.address < SERVERS:
            self._read(letter)
        return letter

    def _await(self, timeout: float | None) -> Letter | None:
        self._since = self.now()
        self.role.wait(timeout and max(timeout, TICK))
        letter = self._inbox.popleft() if self._inbox else None
        self._waited(letter)
        return letter

    def _waited(self, letter: Letter | None) -> None:
        """A worker, until this came; what a server waits is of no interest."""
        began = self._since
        now = self._since = self.hub.kernel.now
        if now > began and self.address < SERVERS:
            if self.hub.trace is not None:
                self.span("wait", began)
            waited, handling = now - began, 0.0
            if letter is not None:
                for tensor in letter.tensors:
                    handling += tensor.nbytes * self.hub.cluster.network.handling
                handling = min(waited, handling)
            self.meter.communicate += handling
            self.meter.wait += waited - handling

    def _read(self, letter: Letter) -> None:
        self.work(self.hub.cluster.inside.letter)
        if letter.tensors and self.hub.shared and self._here(letter.source):
            self.work_on(COPY * sum(t.nbytes for t in letter.tensors))

    def stop_requested(self) -> bool:
        return self._stop
