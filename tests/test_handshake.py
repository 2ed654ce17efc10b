"""Both ends of a connection know the run's secret, and nothing that is said there tells anybody else."""

import contextlib
import random
import secrets
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator

import msgspec
import pytest
from test_letters import FUZZED, KINDS, SECRET, call, correspondents, expect, pull, until

from benchmarks.wiretap import forms
from torrential.comm import handshake, stream, wire
from torrential.comm.admission import Admission
from torrential.comm.post import Contact, Greeting, Post
from torrential.comm.protocol import SERVERS
from torrential.server.messages import Message


class Relay:
    """Stands between callers and a listener, and records what both say."""

    def __init__(self, where: str) -> None:
        beside = f"unix:@torrential-relay-{secrets.token_hex(8)}"
        self._sock, near = stream.listen("tcp:127.0.0.1:0" if where.startswith("tcp:") else beside)
        self.where = stream.challenging(near, bytes.fromhex(where.partition("?")[2]))
        self.said, self.answered = bytearray(), bytearray()
        self._far = call(where)
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            near, _ = self._sock.accept()
            ways = ((near, self._far, self.said), (self._far, near, self.answered))
            self._threads += [threading.Thread(target=self._carry, args=way) for way in ways]
            for thread in self._threads[1:]:
                thread.start()

    def _carry(self, source: socket.socket, to: socket.socket, record: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                record += data
                to.sendall(data)
        wire.close(to)

    def close(self) -> None:
        wire.close(self._sock)
        wire.close(self._far)
        self._threads[0].join(10)
        for thread in self._threads[1:]:
            thread.join(10)


@contextlib.contextmanager
def relay(where: str) -> Iterator[Relay]:
    made = Relay(where)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_said_holds_no_secret_and_is_refused_when_it_is_said_again(kind: str) -> None:
    with correspondents(kind) as c, correspondents(kind) as others, relay(c.server.where) as between:
        c.worker.know({SERVERS: Contact(between.where, 0)})
        c.worker.post(SERVERS, pull(1), [])
        assert expect(c.server).message.seq == 1
        c.server.post(0, pull(2), [])
        assert expect(c.worker).message.seq == 2
        said, answered = bytes(between.said), bytes(between.answered)
        assert all(form not in said and form not in answered for form in forms(SECRET))
        for post in (c.server, others.server):  # both know the secret
            before = post.strangers
            with call(post.where) as sock:
                sock.sendall(said)
                until(post, lambda post=post, before=before: post.strangers == before + 1)
        assert len(c.server._lines) == 1


def test_what_a_process_says_to_the_supervisor_holds_no_secret() -> None:
    listener = Admission(f"unix:@torrential-{secrets.token_hex(8)}", SECRET, Greeting)
    admitted: list[tuple[socket.socket, Greeting]] = []

    def admit() -> None:
        for _ in range(100):
            admitted.extend(listener.poll(0.1))
            if admitted:
                return

    thread = threading.Thread(target=admit)
    thread.start()
    with relay(listener.address) as between:
        line = stream.dial(between.where, SECRET, Greeting(3, 1), 10.0)
        thread.join(10)
        ((sock, greeting),) = admitted
        assert greeting == Greeting(3, 1)
        said, answered = bytes(between.said), bytes(between.answered)
        assert all(form not in said and form not in answered for form in forms(SECRET))
        line.close()
        sock.close()
    listener.close()


class Impostor:
    """Listens where somebody of the run has listened, and answers as given."""

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self._sock, where = stream.listen(f"unix:@torrential-{secrets.token_hex(8)}")
        self.where = stream.challenging(where, bytes(16))
        self._answer, self._lines = answer, list[socket.socket]()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._sock.accept()
                self._lines.append(sock)
                sock.sendall(self._answer(sock.recv(1 << 16)))

    def close(self) -> None:
        wire.close(self._sock)
        self._thread.join(10)
        for sock in self._lines:
            sock.close()


IMPOSTORS: dict[str, Callable[[bytes], bytes]] = {
    "zeros": lambda said: bytes(100),
    "the caller's own proof": lambda said: said[16:48] + bytes(10),
    "what was said": lambda said: said,
    "the proof of another secret": lambda said: handshake.opening(bytes(32), bytes(16), said[68:]).answer,
}


@pytest.mark.parametrize("name", IMPOSTORS)
def test_a_listener_that_does_not_know_the_secret_is_not_believed(name: str) -> None:
    with contextlib.closing(Impostor(IMPOSTORS[name])) as impostor, correspondents("unix") as c:
        with pytest.raises(wire.WireError, match="does not know the secret of this run"):
            stream.dial(impostor.where, SECRET, Greeting(3, 1), 10.0)
        c.worker.know({SERVERS: Contact(impostor.where, 0)})
        c.worker.post(SERVERS, pull(1), [])
        until(c.worker, lambda: c.worker.strangers == 1)
        assert not c.worker._lines and not c.worker._arrived


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_the_last_letters_of_a_role_that_ends_at_once_arrive(kind: str) -> None:
    """It is gone before it is answered, with an answer that nobody has read."""
    with correspondents(kind) as c:
        for number in range(3):
            where = "tcp:127.0.0.1:0" if kind == "tcp" else f"unix:@torrential-{secrets.token_hex(8)}"
            brief = Post(number + 1, 0, where, SECRET, Message)
            brief.know({SERVERS: Contact(c.server.where, 0)})
            brief.post(SERVERS, pull(number), [])
            if number:
                c.server.poll()  # it is answered
            brief.close()
            assert expect(c.server).message.seq == number
        assert c.server.strangers == 0


def test_no_mutation_of_a_greeting_gets_in_or_takes_memory() -> None:
    """TORRENTIAL_FUZZED_FRAMES=100000 for the whole dose. One that gets in would be a way to forge a proof."""
    listener = Admission(f"unix:@torrential-{secrets.token_hex(8)}", SECRET, Greeting)
    family, where = stream.parse(listener.address)
    chance = random.Random(1)
    greeting = msgspec.msgpack.encode(Greeting(7, 0))
    challenge = bytes.fromhex(listener.address.partition("?")[2])
    tracemalloc.start()
    try:
        for number in range(FUZZED):
            said = handshake.opening(SECRET, challenge, greeting).words
            words = bytearray(said)
            match number % 4:
                case 0:
                    words[chance.randrange(len(words))] ^= 1 << chance.randrange(8)
                case 1:
                    del words[chance.randrange(len(words)) :]
                case 2:
                    words[chance.randrange(len(words))] ^= chance.randrange(1, 256)
                    words += chance.randbytes(chance.randrange(2000))
                case 3:
                    words[chance.randrange(len(words)) :] = chance.randbytes(chance.randrange(1, 5000))
            if words[: len(said)] == said:  # by chance it is as it was
                words[0] ^= 1
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.connect(where)
                sock.sendall(words)
                sock.shutdown(socket.SHUT_WR)
                while listener.strangers == number:
                    assert listener.poll(10.0) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        listener.close()
    assert not listener._challenge._used
    assert peak < 1 << 20
