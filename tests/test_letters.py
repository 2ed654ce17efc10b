"""Letters between roles: in order, by reference where memory is shared, and deaf to strangers. Then real processes."""

import contextlib
import dataclasses
import errno
import os
import random
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from torrential.comm import handshake, stream, wire
from torrential.comm.authority import Authority
from torrential.comm.frames import Frames, TensorHeader, frame, reader_of
from torrential.comm.post import Contact, Greeting, Post, Posted
from torrential.comm.protocol import SERVERS, Letter
from torrential.comm.tls import Tls
from torrential.config import LocalSettings, RunConfig, SimSettings
from torrential.errors import RunFailed, WaitedTooLong
from torrential.records import Event, Record
from torrential.run import Silent
from torrential.server.consistency import Consistency
from torrential.server.messages import Add, Call, Done, Message, Pull, Push, Put, Range, Refused, ShardState, View
from torrential.strategies.base import Strategy
from torrential.strategies.context import Context
from torrential.strategies.roles import Role, Roles, Servers
from torrential.task import Task
from torrential.worlds.base import Job
from torrential.worlds.local.launch import Launch
from torrential.worlds.local.link import Buffers
from torrential.worlds.local.orders import BufferRefused, Granted
from torrential.worlds.local.registry import Registry
from torrential.worlds.local.supervisor import LocalWorld
from torrential.worlds.sim.cluster import make_cluster
from torrential.worlds.sim.world import SimWorld

KINDS = ("shared", "unix", "tcp", "tls")
AUTHORITY = Authority()
SECRET = secrets.token_bytes(handshake.SECRET_BYTES)
FUZZED = int(os.environ.get("TORRENTIAL_FUZZED_FRAMES", 4000))


class ToRegistry:
    """A link to an agent in this process."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def ask(self, key: str, size: int) -> Granted | BufferRefused:
        return self._registry.grant(key, size)


class Correspondents:
    """A worker, number 0, and a server, both here; each maps shared memory for itself."""

    def __init__(self, kind: str, known: bool = True) -> None:
        self.registry = Registry()
        name = f"unix:@torrential-{secrets.token_hex(8)}"
        self.posts: list[Post] = []
        self.buffers: list[Buffers] = []
        for address in (0, SERVERS):
            where = "tcp:127.0.0.1:0" if kind in ("tcp", "tls") else f"{name}-{address}"
            tls = Tls(AUTHORITY.identity(f"role {address}")) if kind == "tls" else None
            post = Post(address, 0, where, SECRET, Message, tls)
            self.buffers.append(Buffers(ToRegistry(self.registry), address))
            if kind == "shared":
                post.memory = self.buffers[-1]
            self.posts.append(post)
        self.worker, self.server = self.posts
        self.worker.know({SERVERS: Contact(self.server.where, 0)})
        if known:
            self.server.know({0: Contact(self.worker.where, 0)})

    def close(self) -> None:
        for post in self.posts:
            post.close()
        self.registry.close()


@contextlib.contextmanager
def correspondents(kind: str, known: bool = True) -> Iterator[Correspondents]:
    made = Correspondents(kind, known)
    try:
        yield made
    finally:
        made.close()


def expect(post: Post) -> Letter:
    letter = post.receive(10)
    assert letter is not None, "no letter came"
    return letter


def pull(seq: int) -> Pull:
    return Pull(seq=seq, clock=0, view=1)


# -- letters ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_letters_of_one_role_to_another_arrive_in_order(kind: str) -> None:
    sizes = [0, 3, 200, 500_000, 1, 20_000, 0, 150_000]  # small ones overtake nothing that a thread still writes
    with correspondents(kind) as c:
        registered = c.buffers[0].get("values", 600_000, torch.float32, 0)
        registered.copy_(torch.arange(600_000))
        for seq in range(60):
            numel = sizes[seq % len(sizes)]
            tensor = registered[seq : seq + numel] if seq % 3 else torch.full((numel,), float(seq))
            c.worker.post(SERVERS, pull(seq), [tensor, torch.tensor([seq])])
        for seq in range(60):
            letter = expect(c.server)
            numel = sizes[seq % len(sizes)]
            expected = torch.arange(seq, seq + numel) if seq % 3 else torch.full((numel,), float(seq))
            assert letter.source == 0 and letter.message == pull(seq)
            assert torch.equal(letter.tensors[0], expected.float()) and letter.tensors[1].tolist() == [seq]
            c.server.post(0, Done(seq=seq), [])
        assert [expect(c.worker).message.seq for _ in range(60)] == list(range(60))


def test_memory_is_shared_with_those_of_the_same_host_alone() -> None:
    with correspondents("shared") as c:
        values = c.buffers[0].get("values", 3, torch.float32, 0)
        for post, home in ((c.worker, "here"), (c.server, "here")):
            post.home = home
        for home, lies_there in (("here", True), ("there", False), ("", False)):
            c.worker.know({SERVERS: Contact(c.server.where, 0, home)})
            values.fill_(1)
            c.worker.post(SERVERS, pull(1), [values]).wait(10)
            (came,) = expect(c.server).tensors
            values.fill_(2)
            assert came.tolist() == [2.0 if lies_there else 1.0] * 3, home


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_goes_back_on_the_connection_that_the_letter_came_on(kind: str) -> None:
    with correspondents(kind, known=False) as c:
        c.worker.post(SERVERS, pull(1), [])
        assert expect(c.server) == Letter(0, pull(1), [])
        c.server.post(0, Done(seq=1), [])
        assert expect(c.worker) == Letter(SERVERS, Done(seq=1), [])
        assert len(c.worker._lines) == len(c.server._lines) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_two_that_dial_each_other_at_the_same_moment_keep_their_order(kind: str) -> None:
    with correspondents(kind) as c:
        for seq in range(100):
            c.worker.post(SERVERS, pull(seq), [])
            c.server.post(0, Done(seq=seq), [])
            if seq % 10 == 9:
                assert [expect(c.server).message.seq for _ in range(10)] == list(range(seq - 9, seq + 1))
                assert [expect(c.worker).message.seq for _ in range(10)] == list(range(seq - 9, seq + 1))
        assert len(c.worker._lines) == len(c.server._lines) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_registered_memory_is_read_where_it_lies_and_other_memory_is_not(kind: str) -> None:
    with correspondents(kind) as c:
        registered = c.buffers[0].get("gradient", 1000, torch.float32, 0)
        private = torch.zeros(10)
        c.worker.post(SERVERS, pull(1), [registered[100:110].view(2, 5), private, registered[::100]])
        by_reference, inline, strided = expect(c.server).tensors
        assert by_reference.shape == (2, 5) and strided.shape == (10,)
        registered[100:110] = 7
        private[:] = 7
        assert by_reference.unique().tolist() == [7.0 if kind == "shared" else 0.0]
        assert inline.unique().tolist() == [0.0]
        assert strided.unique().tolist() == [0.0]  # it is no piece of the buffer, so it was copied


def test_what_was_received_can_be_passed_on_by_reference() -> None:
    """A gradient goes from the worker to the head and from there to its replica, and is copied by nobody."""
    with correspondents("shared") as c:
        third = Post(SERVERS + 1, 0, f"unix:@torrential-{secrets.token_hex(8)}", SECRET, Message)
        c.posts.append(third)
        third.memory = Buffers(ToRegistry(c.registry), SERVERS + 1)
        c.server.know({SERVERS + 1: Contact(third.where, 0)})
        gradient = c.buffers[0].get("gradient", 1000, torch.float32, 0)
        c.worker.post(SERVERS, pull(1), [gradient])
        c.server.post(SERVERS + 1, pull(1), [expect(c.server).tensors[0][200:300]])
        (received,) = expect(third).tensors
        gradient[250] = 3
        assert received.sum() == 3


def test_a_large_letter_does_not_block_and_its_handle_says_when_it_is_written() -> None:
    with correspondents("tcp") as c:
        values = torch.arange(8_000_000, dtype=torch.float32)
        handle = c.worker.post(SERVERS, pull(1), [values])
        assert not handle.done()  # nobody reads yet, and the kernel does not take so much
        c.worker.post(SERVERS, pull(2), [])
        letter = expect(c.server)
        assert torch.equal(letter.tensors[0], values)
        assert expect(c.server).message.seq == 2
        handle.wait(10)
        assert handle.done()


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_land_where_they_are_wanted_if_they_fit(kind: str) -> None:
    with correspondents(kind) as c:
        wanted = {1: [torch.zeros(100_000)], 2: [torch.zeros(3)], 3: [torch.zeros(4, dtype=torch.int64)], 4: []}
        c.worker.landing = lambda done: wanted.get(done.seq)
        c.worker.post(SERVERS, pull(0), [])
        expect(c.server)
        for seq in range(1, 6):
            c.server.post(0, Done(seq=seq), [torch.full((100_000 if seq == 1 else 4,), float(seq))])
        for seq in range(1, 6):
            (tensor,) = expect(c.worker).tensors
            assert tensor.unique().tolist() == [seq]
            assert (tensor is wanted[1][0]) == (seq == 1)


def test_every_dtype_and_shape_travels() -> None:
    tensors = [torch.ones(2, 3).to(d) for d in (torch.float32, torch.bfloat16, torch.int64, torch.bool)]
    tensors += [torch.tensor(3.5), torch.empty(0, 4), torch.arange(6).view(2, 3).t()]
    for kind in KINDS:
        with correspondents(kind) as c:
            c.worker.post(SERVERS, Call(seq=1, clock=2, view=3, name="f", options={"a": [1, None]}), tensors)
            letter = expect(c.server)
            assert letter.message.options == {"a": [1, None]}
            assert all(
                a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
                for a, b in zip(letter.tensors, tensors, strict=True)
            )


def test_a_letter_for_nobody_is_lost_without_a_word() -> None:
    with correspondents("unix") as c:
        assert c.worker.post(SERVERS + 9, pull(1), [torch.ones(100_000)]).done()
        c.server.close()
        c.posts.remove(c.server)
        handle = c.worker.post(SERVERS, pull(2), [torch.ones(100_000)])
        handle.wait(10)
        assert c.worker.receive(0) is None


def test_letters_of_one_whose_place_another_has_taken_are_not_delivered() -> None:
    with correspondents("unix") as c:
        reborn = Post(0, 1, f"unix:@torrential-{secrets.token_hex(8)}", SECRET, Message)
        c.posts.append(reborn)
        reborn.know({SERVERS: Contact(c.server.where, 0)})
        c.worker.post(SERVERS, pull(1), [])
        assert expect(c.server).message.seq == 1
        c.server.know({0: Contact(reborn.where, 1)})
        c.worker.post(SERVERS, pull(2), [])
        assert c.server.receive(0.05) is None
        reborn.post(SERVERS, pull(3), [])
        assert expect(c.server).message.seq == 3
        c.server.post(0, Done(seq=3), [])
        assert expect(reborn).message.seq == 3


def test_the_world_can_put_in_a_letter_and_wake_who_waits() -> None:
    with correspondents("unix") as c:
        view = View(1, (0,), (Range(0, 10, (SERVERS,)),))
        timer = threading.Timer(0.02, c.server.announce, [view])
        timer.start()
        assert c.server.receive() == Letter(-1, view, [])
        timer = threading.Timer(0.02, c.server.stop)
        timer.start()
        assert c.server.receive() is None
        c.worker.post(SERVERS, pull(1), [])
        assert expect(c.server).message.seq == 1  # what was sent before is still read
        assert c.server.receive() is None
        timer.join()


# -- strangers and garbage ----------------------------------------------------------------------------------------
def packed(header: Any) -> bytes:
    encoded = msgspec.msgpack.encode(header)
    return struct.pack("<I", len(encoded)) + encoded


GREETING = packed([{"type": "Greeting", "address": 7, "life": 0}, []])
PULL = {"type": "Pull", "seq": 1, "clock": 0, "view": 1, "spans": []}


def opening(post: Post, greeting: bytes | None = None, secret: bytes = SECRET) -> bytes:
    """What a caller says first to this post."""
    said = msgspec.msgpack.encode(Greeting(7, 0)) if greeting is None else greeting
    return handshake.opening(secret, bytes.fromhex(post.where.partition("?")[2]), said).words


LENGTH_AT = handshake.HEAD_BYTES - handshake.LENGTH.size


def lengthened(words: bytes, length: int) -> bytes:
    return words[:LENGTH_AT] + handshake.LENGTH.pack(length) + words[handshake.HEAD_BYTES :]


STRANGERS: dict[str, Callable[[Post], bytes]] = {
    "wrong secret": lambda post: opening(post, secret=bytes(32)),
    "almost the secret": lambda post: opening(post, secret=SECRET[:-1] + bytes([SECRET[-1] ^ 1])),
    "the secret itself": lambda post: SECRET + GREETING,
    "another listener's challenge": lambda post: handshake.opening(SECRET, bytes(16), GREETING).words,
    "a listener's own answer": lambda post: opening(post)[:16] + handshake.opening(SECRET, bytes(16), GREETING).answer,
    "cut short": lambda post: opening(post)[:10],
    "greeting cut short": lambda post: opening(post)[:-3],
    "garbage": lambda post: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(500),
    "garbage that was proved": lambda post: opening(post, b"\xc1" * 100),
    "oversized greeting": lambda post: lengthened(opening(post), handshake.MAX_GREETING + 1) + bytes(5000),
    "empty greeting": lambda post: lengthened(opening(post), 0),
    "no greeting": lambda post: opening(post, msgspec.msgpack.encode(PULL)),
    "unknown message": lambda post: opening(post, msgspec.msgpack.encode({"type": "Exec"})),
    "wrong types": lambda post: opening(post, msgspec.msgpack.encode({"type": "Greeting", "address": "7", "life": 0})),
}
NONSENSE = {
    "garbage": b"\x05\x00\x00\x00" + b"\xff" * 5,
    "a greeting": GREETING,
    "impossible tensor": packed([PULL, [["float32", [1 << 41], "", 0]]]),
    "more than there is": packed([PULL, [["float32", [1 << 39], "", 0]]]),
    "negative tensor": packed([PULL, [["float32", [-1], "", 0]]]),
    "overflowing tensor": packed([PULL, [["float32", [0, 1 << 63], "", 0]]]),
    "unknown dtype": packed([PULL, [["object", [1], "", 0]]]),
    "unknown buffer": packed([PULL, [["float32", [1], "nobody's#3", 0]]]),
    "outside the buffer": packed([PULL, [["float32", [11], "values#0", 0]]]),
    "before the buffer": packed([PULL, [["float32", [1], "values#0", -4]]]),
    "not aligned": packed([PULL, [["float32", [1], "values#0", 3]]]),
    "deep": packed([{"type": "Call", "seq": 1, "clock": 0, "view": 0, "name": "", "options": {"a": 1}}, []])[:-3]
    + b"\x91" * 100_000,
    "cut short": packed([PULL, [["float32", [4], "", 0]]]) + bytes(7),
}


def call(address: str) -> socket.socket:
    family, where = stream.parse(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.settimeout(10)
    sock.connect(where)
    return sock


def say(sock: socket.socket, words: bytes) -> None:
    with contextlib.suppress(OSError):  # it may be shown the door before all is said
        sock.sendall(words)
        sock.shutdown(socket.SHUT_WR)


def until(post: Post, condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        assert post.receive(0.01) is None
    raise AssertionError("waited in vain")


@pytest.mark.parametrize("kind", KINDS)
def test_strangers_are_dropped_and_counted_and_nobody_else_notices(kind: str) -> None:
    with correspondents(kind) as c:
        c.worker.post(SERVERS, pull(1), [])
        assert expect(c.server).message.seq == 1
        for number, (name, words) in enumerate(STRANGERS.items(), start=1):
            with call(c.server.where) as sock:
                say(sock, words(c.server))
                until(c.server, lambda number=number: c.server.strangers == number)
            assert len(c.server._lines) == 1, name
        c.worker.post(SERVERS, pull(2), [torch.ones(5)])
        assert expect(c.server).tensors[0].tolist() == [1] * 5


@pytest.mark.parametrize("name", NONSENSE)
def test_a_peer_that_talks_nonsense_is_dropped_and_the_others_are_not(name: str) -> None:
    with correspondents("shared") as c, call(c.server.where) as sock:
        c.buffers[0].get("values", 10, torch.float32, 0)
        c.worker.post(SERVERS, pull(1), [])
        assert expect(c.server).message.seq == 1
        sock.sendall(opening(c.server) + packed([PULL, []]))
        assert expect(c.server) == Letter(7, pull(1), [])
        say(sock, NONSENSE[name])
        until(c.server, lambda: len(c.server._lines) == 1)
        assert c.server.strangers == (name != "cut short")  # that one was only interrupted
        c.worker.post(SERVERS, pull(2), [])
        assert expect(c.server).message.seq == 2


def test_silent_strangers_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "HANDSHAKE_SECONDS", 0.05)
    with correspondents("unix") as c, call(c.server.where), call(c.server.where) as slow:
        slow.sendall(opening(c.server)[:-1])
        until(c.server, lambda: c.server.strangers == 2)
        assert not c.server._lines


def test_many_silent_strangers_take_no_more_than_so_many_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torrential.comm.admission.MOST_STRANGERS", 5)
    with correspondents("unix") as c, contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(call(c.server.where))
        until(c.server, lambda: c.server.strangers == 15)
        c.worker.post(SERVERS, pull(1), [])
        assert expect(c.server).message.seq == 1


def test_a_stranger_that_speaks_while_it_makes_room_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reported both at once, the next caller and a word of the one that was dropped for it: that word was
    taken for one more caller, and waited for."""
    monkeypatch.setattr("torrential.comm.admission.MOST_STRANGERS", 2)
    with correspondents("tcp") as c, call(c.server.where) as first, call(c.server.where):
        until(c.server, lambda: len(c.server._admission._callers) == 2)
        with call(c.server.where):
            first.sendall(b"x")
            until(c.server, lambda: c.server.strangers == 1)
            c.worker.post(SERVERS, pull(1), [])
            assert expect(c.server).message.seq == 1


def test_no_mutation_of_a_frame_does_more_than_close_the_connection() -> None:
    """TORRENTIAL_FUZZED_FRAMES=1000000 for the whole dose."""
    registry = Registry()
    try:
        memory = Buffers(ToRegistry(registry), 0)
        values = memory.get("values", 5000, torch.float32, 0)
        letters: list[tuple[Any, list[torch.Tensor]]] = [
            (pull(3), []),
            (Push(seq=4, clock=1, view=2, spans=((0, 100),), lr=0.1, used=(1, 2)), [values[:100]]),
            (Put(seq=5, clock=1, view=2, spans=((0, 9), (20, 29))), [torch.ones(9), torch.ones(3, 3)]),
            (Add(seq=6, clock=1, view=2, spans=((0, 9),), keys=True), [torch.ones(9), torch.arange(9)]),
            (Call(seq=7, clock=1, view=2, name="f", options={"a": {"b": [1.5, None, "c", b"d"]}}), []),
            (Done(seq=8, finished=True), [torch.ones(30_000)]),
            (Refused(seq=9, reason="for one"), []),
            (
                ShardState(start=0, stop=9, number=4, names=("sum",), metadata=b"123", view=2),
                [values[:9], torch.ones(9)],
            ),
            (View(3, (0, 1), (Range(0, 9, (SERVERS, SERVERS + 1)),)), []),
        ]
        valid = [b"".join(frame(message, tensors, memory)[0]) for message, tensors in letters]
        decoder = reader_of(Message)
        chance = random.Random(1)
        counted = {"read": 0, "refused": 0}
        for _ in range(FUZZED):
            frames = Frames(decoder, memory)
            data = mutate(chance.choice(valid), chance) + chance.choice(valid)
            try:
                counted["read"] += feed(frames, data, chance)
            except wire.WireError:
                counted["refused"] += 1
        assert counted["refused"] > FUZZED / 3 and counted["read"] > FUZZED / 20, counted
        assert not values.any()
    finally:
        registry.close()


def mutate(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        at = chance.randrange(min(len(changed), 300)) if changed else 0
        match chance.randrange(6):
            case 0:
                changed[at : at + 1] = bytes([changed[at] ^ 1 << chance.randrange(8)]) if changed else b""
            case 1:
                changed[at : at + 1] = chance.randbytes(1)
            case 2:
                changed[at:at] = chance.randbytes(chance.randrange(1, 9))
            case 3:
                del changed[at : at + chance.randrange(1, 9)]
            case 4:
                changed[at : at + 9] = chance.choice(
                    (b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7), b"\xcb" + bytes(8))
                )
            case 5:
                changed[:4] = struct.pack("<I", chance.randrange(1 << chance.randrange(1, 33)))
    return bytes(changed)


def feed(frames: Frames, data: bytes, chance: random.Random) -> int:
    """In pieces, as a socket would; how many letters came out."""
    count = 0
    while data:
        room = frames.room()
        size = min(room.nbytes, len(data), chance.choice((1, 3, 100, 1 << 20)))
        assert size > 0
        room[:size] = data[:size]
        data = data[size:]
        count += len(list(frames.filled(size)))
    return count


def test_a_header_larger_than_what_is_read_at_once_is_read_all_the_same() -> None:
    message = Call(seq=1, clock=0, view=1, name="f", options={"text": "x" * 300_000})
    parts = frame(message, [torch.arange(100)], None)[0] * 3
    frames, found = Frames(reader_of(Message), None), []
    data = b"".join(parts)
    while data:
        room = frames.room()
        size = min(room.nbytes, len(data))
        room[:size] = data[:size]
        data = data[size:]
        found += list(frames.filled(size))
    assert [letter[0] for letter in found] == [message] * 3
    assert all(letter[1][0].tolist() == list(range(100)) for letter in found)


def test_a_piece_says_where_it_lies() -> None:
    with correspondents("shared") as c:
        values = c.buffers[0].get("values", 100, torch.int64, 0)
        (header,), nbytes = frame(pull(1), [values[10:20]], c.buffers[0])
        sealed = reader_of(Message).decode(header[4:])
        assert sealed.pieces == [TensorHeader("int64", [10], "values#0", 80)] and nbytes == 0


# -- real processes -----------------------------------------------------------------------------------------------
class Watching(Strategy, frozen=True, kw_only=True):
    """A worker that reports every view it hears of, until it has heard of one as it should be in the end."""

    name: ClassVar[str] = "watching"
    summary: ClassVar[str] = "tells what it sees"

    until: int  # the version of the last view to wait for

    def roles(self, workers: int, servers: int) -> Roles:
        return Role("worker", workers, self.worker, "view"), Servers(servers, Consistency(None))

    def worker(self, ctx: Context) -> None:
        view = ctx.comm.view
        while True:
            detail = msgspec.json.encode(view).decode()
            ctx.progress.note("viewed", detail)
            if view.version >= self.until:
                return ctx.comm.leave()
            letter = ctx.comm.receive(20)
            assert letter is not None and letter.source == -1
            view = letter.message
            assert ctx.comm.view.version >= view.version


class Writing(Strategy, frozen=True, kw_only=True):
    """Workers that regroup write to one another, too."""

    name: ClassVar[str] = "writing"
    summary: ClassVar[str] = "writes to all others"

    def worker(self, ctx: Context) -> None:
        ctx.comm.regroup(lambda: 0)
        others = {rank for rank in ctx.comm.view.workers if rank != ctx.comm.rank}
        for rank in sorted(others):
            ctx.comm.post(rank, pull(ctx.comm.rank), [torch.full((3,), float(ctx.comm.rank))])
        heard: dict[int, float] = {}
        while heard.keys() != others:
            letter = ctx.comm.receive(20)
            assert letter is not None
            if letter.source >= 0:
                heard[letter.source] = float(letter.tensors[0].sum())
        ctx.progress.note("written", str(sorted(heard.items())))
        ctx.leave()


def watched(transport: str, until: int, workers: int, servers: int, **settings: Any) -> Job:
    data = TensorDataset(torch.zeros(8, 4), torch.zeros(8, 1))
    task = Task(
        model=lambda: nn.Linear(4, 1000), loss=functional.mse_loss, train=data, test=data, validation=data, name="none"
    )
    config = RunConfig(
        task="none", source=None, strategy="watching", options={}, world="local", workers=workers, servers=servers,
        epochs=1, steps=None, target=None, samples=8, batch_size=1, lr=task.optimizer.lr,
        optimizer=task.optimizer.describe(), seed=0, device="cpu", samples_per_step=workers,
        settings=LocalSettings(transport=transport, **settings),
    )  # fmt: skip
    return Job(config, task, Watching(until=until), Path(os.devnull))


def processes() -> dict[str, psutil.Process]:
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            name = Path(f"/proc/{process.pid}/comm").read_text().strip()
            if name.startswith("tt-"):
                found[name] = process
    return found


class Witness:
    """Writes records down, and does something when all workers have reported a view of a version."""

    def __init__(self, workers: int, deeds: dict[int, Callable[[], None]]) -> None:
        self._workers, self._deeds = workers, deeds
        self.events: list[Event] = []
        self.views: dict[int, dict[int, View]] = {}  # by version and worker

    def __call__(self, record: Record) -> None:
        assert isinstance(record, Event), record
        self.events.append(record)
        if record.event == "viewed":
            view = msgspec.json.decode(record.detail, type=View)
            seen = self.views.setdefault(view.version, {})
            seen[record.worker] = view
            if len(seen) == self._workers and view.version in self._deeds:
                self._deeds.pop(view.version)()

    def of(self, name: str) -> list[Event]:
        return [e for e in self.events if e.event == name]


def witness(job: Job, deeds: dict[int, Callable[[], None]]) -> Witness:
    seen = Witness(job.config.workers, deeds)
    launch = Launch()
    try:
        LocalWorld(launch).run(job, seen, Silent())
    finally:
        launch.close()
    return seen


def kill(name: str) -> None:
    processes()[name].send_signal(signal.SIGKILL)


def test_a_killed_server_is_news_and_its_replacement_too() -> None:
    seen = witness(watched("shared", 3, workers=2, servers=2), {1: lambda: kill("tt-server-0")})
    first, second, third = (seen.views[version][0] for version in (1, 2, 3))
    assert [seen.views[v][1] for v in (1, 2, 3)] == [first, second, third]
    assert [r.chain for r in first.table] == [(SERVERS, SERVERS + 1), (SERVERS + 1, SERVERS)]
    assert {r.chain for r in second.table} == {(SERVERS + 1,)}
    assert all(r.chain[0] == SERVERS + 1 for r in third.table) and third.servers() == (SERVERS, SERVERS + 1)
    assert all(view.workers == (0, 1) for view in (first, second, third))
    assert [e.detail for e in seen.of("server_lost")] == ["server 0; its ranges go to server 1"]
    (joined,) = seen.of("server_joined")
    assert joined.detail.startswith("server 0, ") and joined.detail.endswith(" s after it was lost")


@pytest.mark.parametrize("where", ["shared", "unix", "tcp", "sim"])
def test_workers_that_regroup_have_letters_and_a_view(where: str) -> None:
    job = watched("shared" if where == "sim" else where, 0, workers=3, servers=0)
    job = dataclasses.replace(job, strategy=Writing())
    if where == "sim":
        seen = Witness(3, {})
        job = dataclasses.replace(job, config=msgspec.structs.replace(job.config, settings=SimSettings(), world="sim"))
        SimWorld(make_cluster({"compute": {"seconds_per_sample": 1e-3}})).run(job, seen, Silent())
    else:
        seen = witness(job, {})
    others = {0: "[(1, 3.0), (2, 6.0)]", 1: "[(0, 0.0), (2, 6.0)]", 2: "[(0, 0.0), (1, 3.0)]"}
    assert {e.worker: e.detail for e in seen.of("written")} == others


def test_a_server_is_not_replaced_where_that_is_not_wanted() -> None:
    seen = witness(watched("tcp", 2, workers=1, servers=2, restart_servers=False), {1: lambda: kill("tt-server-1")})
    assert seen.views[2][0].servers() == (SERVERS,) and not seen.of("server_joined")


def test_the_last_copy_of_a_range_cannot_be_lost_unnoticed() -> None:
    with pytest.raises(RunFailed, match=r"parameters 0 to 5\d\d\d are lost: server 0 held the only copy"):
        witness(watched("shared", 9, workers=1, servers=1), {1: lambda: kill("tt-server-0")})


def test_deaths_of_workers_interrupt_nobody_and_a_replacement_gets_the_newest_view() -> None:
    seen = witness(watched("shared", 3, workers=2, servers=1, restart=True), {1: lambda: kill("tt-worker-1")})
    assert [seen.views[v][0].workers for v in (1, 2, 3)] == [(0, 1), (0,), (0, 1)]
    assert any(1 in by for version, by in seen.views.items() if version >= 3)  # the other may have left by then: a 4th
    assert [e.worker for e in seen.of("worker_lost")] == [1] == [e.worker for e in seen.of("worker_joined")]
    assert not seen.of("regrouped")


SUPERVISED = """
import os, msgspec, test_letters as t
def tell():
    os.write(1, msgspec.json.encode([p.pid for p in t.processes().values()]))
t.witness(t.watched("shared", 9, workers=1, servers=2), {1: tell})
"""


def test_servers_end_with_a_killed_supervisor() -> None:
    path = os.pathsep.join(map(str, [Path(__file__).parent, Path(__file__).parents[1]]))
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISED], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}
    ) as supervisor:
        assert supervisor.stdout is not None
        try:
            family = [psutil.Process(pid) for pid in msgspec.json.decode(os.read(supervisor.stdout.fileno(), 4096))]
        finally:
            supervisor.kill()
    assert len(family) == 4  # a worker, two servers, the observer
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def test_whoever_was_not_read_from_for_long_is_no_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A role computes for longer than a handshake may take; what has come meanwhile has come in time."""
    monkeypatch.setattr(stream, "HANDSHAKE_SECONDS", 0.05)
    name = secrets.token_hex(8)
    near, far = (Post(i, 0, f"unix:@torrential-{name}-{i}", SECRET, Message) for i in (0, 1))
    try:
        near.know({1: Contact(far.where, 0)})
        near.post(1, Done(seq=1), ())
        letter = far.receive(0.0)  # takes the call, and perhaps the letter
        time.sleep(0.1)
        letter = letter or far.receive(5.0)
        assert letter is not None and letter.source == 0 and letter.message.seq == 1 and far.strangers == 0
    finally:
        near.close()
        far.close()


def test_a_letter_that_nobody_takes_names_the_role_and_no_address():
    posted = Posted(SERVERS + 1, SimpleNamespace(pause=time.sleep))
    with pytest.raises(WaitedTooLong, match=r"^waited 0\.0 s for server 1 \(to take a letter\)$"):
        posted.wait(0.01)


def test_what_nobody_has_registered_cannot_be_looked_at() -> None:
    """A new buffer has zeros in it: an observer that was on another host than a snapshot evaluated those."""
    with correspondents("shared") as c:
        owner, reader = c.buffers
        with pytest.raises(RunFailed, match=r"nobody has registered a buffer 'snapshot0/values#0'"):
            reader.existing("snapshot0/values", 3, torch.float32, 0)
        owner.get("snapshot0/values", 3, torch.float32, 0).fill_(2)
        assert reader.existing("snapshot0/values", 3, torch.float32, 0).tolist() == [2, 2, 2]
        other = Buffers(ToRegistry(c.registry), 5)
        with pytest.raises(RunFailed, match=r"has 3 elements where 4 were expected"):
            other.existing("snapshot0/values", 4, torch.float32, 0)


def test_a_peer_that_answers_no_call_holds_up_nobody() -> None:
    """As of a host that is lost: the queue of a listener is full, so nothing comes back."""
    with socket.socket() as full, contextlib.ExitStack() as stack, correspondents("tcp") as c:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        assert waiting.connect_ex(full.getsockname()) == errno.EALREADY
        where = f"{stream.tcp_address(*full.getsockname())}?{bytes(16).hex()}"
        c.worker.know({SERVERS: Contact(where, 0)})
        posted = c.worker.post(SERVERS, pull(1), [torch.ones(1000)])
        assert not posted.done() and c.worker._lines  # it goes on being connected
