"""Point-to-point messages between workers over unix or tcp sockets; payloads land where the receiver wants them.

Each pair of workers has one connection: the higher rank dials the lower. A thread per connection reads, another
writes what the kernel does not take at once, so a send never blocks the caller and two large messages crossing each
other never deadlock. Frames carry the generation; those of an earlier one are read and thrown away. On a regrouping
every pair exchanges a marker: once it has come, nothing sent before it can still arrive.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
from torch import Tensor

from torrential.comm import wire
from torrential.comm.admission import Admission
from torrential.comm.outbox import Outbox, Outgoing
from torrential.errors import PeerLost

DIAL_SECONDS = 10.0


class PeerGreeting(msgspec.Struct, frozen=True, tag=True):
    """The first message on a connection: which worker calls."""

    rank: int
    life: int  # which incarnation of that rank is calling


class TensorMessage(msgspec.Struct, frozen=True, tag=True):
    """The message that tensors of one worker for another travel with."""

    generation: int
    tag: str


Key = tuple[int, int, str]  # source, generation, tag


class Peer:
    """The connection to one other worker."""

    def __init__(
        self,
        rank: int,
        life: int,
        connection: wire.Connection[TensorMessage | PeerGreeting],
        on_written: Callable[[], None],
    ) -> None:
        self.rank, self.life, self.connection = rank, life, connection
        self._outbox = Outbox(connection.write, on_written)

    @property
    def lost(self) -> bool:
        return self._outbox.lost

    def send(self, message: TensorMessage, tensors: Sequence[Tensor], outgoing: Outgoing) -> None:
        self._outbox.send(self.connection.frame(message, tensors), sum(t.nbytes for t in tensors), outgoing)

    def lose(self) -> None:
        self._outbox.close()

    def close(self) -> None:
        self.lose()
        self.connection.close()


class Messenger:
    lands = True  # what comes may land where it was expected

    def __init__(self, rank: int, life: int, address: str, token: bytes) -> None:
        self.rank, self.life, self._token = rank, life, token
        self._admission = Admission(address, token, PeerGreeting)
        self.address = self._admission.address
        self.changed = threading.Condition()
        self._news = False
        self.generation = 0
        wire.decoder(TensorMessage | PeerGreeting)  # its types are known before threads begin to read
        self._peers: dict[int, Peer] = {}
        self._known: dict[int, tuple[str, int]] = {}  # address and life of each member
        self._arrived: dict[Key, list[Tensor]] = {}
        self._expected: dict[Key, Sequence[Tensor]] = {}
        self._hearing = self._spawn(self._admit)

    def _spawn(self, target: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        return thread

    # -- connections --------------------------------------------------------------------------------------------
    @property
    def strangers(self) -> int:
        return self._admission.strangers

    def _admit(self) -> None:
        while not self._admission.stopped:
            for sock, greeting in self._admission.poll(math.inf):
                connection: wire.Connection[TensorMessage | PeerGreeting] = wire.Connection(
                    sock, TensorMessage | PeerGreeting
                )
                self._adopt(Peer(greeting.rank, greeting.life, connection, self._told))

    def _adopt(self, peer: Peer) -> None:
        with self.changed:
            before = self._peers.get(peer.rank)
            self._peers[peer.rank] = peer
            self._tell()
        if before is not None:
            before.close()
        self._spawn(self._read, peer)

    def regroup(self, generation: int, peers: dict[int, tuple[str, int]]) -> None:
        """Adopt a new generation: drop peers that left or were reborn, dial lower ranks not yet connected."""
        with self.changed:
            self.generation, self._known = generation, peers
            for key in [k for k in self._arrived if k[1] < generation]:
                del self._arrived[key]
            for key in [k for k in self._expected if k[1] < generation]:
                del self._expected[key]
            for rank, peer in list(self._peers.items()):
                if rank not in peers or peers[rank][1] > peer.life or peer.lost:
                    peer.close()
                    del self._peers[rank]
        for rank in peers:
            self.reach(rank)

    def reach(self, rank: int) -> Peer | None:
        """The connection to a member. Where there is none, or it is lost, lower ranks are dialled; higher ones dial."""
        peer = self._peers.get(rank)
        if peer is not None and not peer.lost:
            return peer
        if rank > self.rank:
            return None
        address, life = self._known[rank]
        try:
            connection = wire.dial(address, self._token, TensorMessage | PeerGreeting, DIAL_SECONDS)
            connection.send(PeerGreeting(self.rank, self.life))
        except (OSError, wire.Closed) as error:
            raise PeerLost(f"worker {rank}") from error
        peer = Peer(rank, life, connection, self._told)
        self._adopt(peer)
        return peer

    def close(self) -> None:
        self._admission.stop()
        self._hearing.join(1.0)
        self._admission.close()
        for peer in self._peers.values():
            peer.close()

    # -- messages -----------------------------------------------------------------------------------------------
    def send(self, to: int, tag: str, tensors: Sequence[Tensor]) -> Outgoing:
        """Queue a message to a connected peer. To a lost one it is dropped: the regrouping to come will void it."""
        outgoing = Outgoing()
        peer = self._peers.get(to)
        if peer is not None and not peer.lost:
            peer.send(TensorMessage(self.generation, tag), tensors, outgoing)
        return outgoing

    def expect(self, source: int, tag: str, into: Sequence[Tensor]) -> None:
        """Say where a message shall land, if it has not begun to arrive."""
        key = (source, self.generation, tag)
        with self.changed:
            if key not in self._arrived:
                self._expected[key] = into

    def arrived(self, source: int, tag: str) -> bool:
        return (source, self.generation, tag) in self._arrived

    def take(self, source: int, tag: str) -> list[Tensor]:
        """A message that has arrived: in the tensors it was expected in, or in fresh ones if it was too early."""
        key = (source, self.generation, tag)
        with self.changed:
            self._expected.pop(key, None)
            return self._arrived.pop(key)

    def pause(self, seconds: float) -> None:
        """Sleep until something has arrived or left; not at all if that was so since the last pause."""
        with self.changed:
            if not self._news:
                self.changed.wait(seconds)
            self._news = False

    def _tell(self) -> None:
        self._news = True
        self.changed.notify_all()

    def _told(self) -> None:
        with self.changed:
            self._tell()

    def _read(self, peer: Peer) -> None:
        def destination(message: TensorMessage | PeerGreeting, shapes: Sequence[wire.Shape]) -> Sequence[Tensor] | None:
            if not isinstance(message, TensorMessage):
                raise wire.WireError("a second greeting")
            with self.changed:
                return self._expected.pop((peer.rank, message.generation, message.tag), None)

        try:
            while True:
                message, tensors = peer.connection.receive(destination)
                assert isinstance(message, TensorMessage)
                with self.changed:
                    if message.generation >= self.generation:
                        self._arrived[(peer.rank, message.generation, message.tag)] = tensors
                        self._tell()
        except (wire.Closed, wire.WireError):
            pass  # whoever waits for this peer is told by the supervisor
        finally:
            peer.lose()


def exchange_markers(messenger: Messenger, members: Sequence[int], check: Callable[[], None], timeout: float) -> None:
    """Exchange markers with every other member: afterwards nothing of an earlier generation can arrive.

    A member that was left out of a generation may find only now that the others have hung up on it; its new
    connection gets the marker that the old one has lost.
    """
    missing = [r for r in members if r != messenger.rank]
    marked: dict[int, Peer] = {}
    deadline = time.monotonic() + timeout
    while True:
        for rank in list(missing):
            came = messenger.arrived(rank, "marker")  # over the connection that is found now, or one before it
            peer = messenger.reach(rank)
            if peer is not None and marked.get(rank) is not peer:
                marked[rank] = peer
                messenger.send(rank, "marker", ())
            if came:
                messenger.take(rank, "marker")
                missing.remove(rank)
        if not missing:
            return
        check()
        if time.monotonic() > deadline:
            raise PeerLost(f"worker {missing[0]}")
        messenger.pause(0.01)
