"""Connections in TLS behave as the sockets that they are made of, however one waits, and let no stranger in."""

import contextlib
import hashlib
import os
import select
import selectors
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from authority import EXPIRED, expired, foreign, written
from test_letters import AUTHORITY, SECRET, correspondents, expect, pull, until

from torrential.comm import stream, wire
from torrential.comm.admission import Admission
from torrential.comm.authority import Authority
from torrential.comm.certificates import CertificateFiles, read_identity
from torrential.comm.post import Contact, Greeting, Post
from torrential.comm.protocol import SERVERS
from torrential.comm.tls import PIECE, RECORD, Tls, TlsSocket
from torrential.errors import BadInput
from torrential.server.messages import Message

OURS = Tls(AUTHORITY.identity("worker 0"))
THEIRS = Tls(AUTHORITY.identity("server 0"))
BYTES = torch.randint(0, 255, (5_000_000,), dtype=torch.uint8)


def raw_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(listener.getsockname(), 10)
        answering, _ = listener.accept()
    caller.settimeout(None)
    return caller, answering


@contextlib.contextmanager
def pair(shaken: bool = True) -> Iterator[tuple[TlsSocket, TlsSocket]]:
    """The caller's end and the listener's."""
    raw = raw_pair()
    caller, listener = OURS.call(raw[0]), THEIRS.answer(raw[1])
    try:
        if shaken:
            thread = threading.Thread(target=caller.shake_hands, args=(10,))
            thread.start()
            while not listener.shaken:
                assert select.select([listener], [], [], 10)[0]
                with contextlib.suppress(BlockingIOError):
                    listener.recv(1, socket.MSG_DONTWAIT)
            thread.join(10)
            assert caller.shaken and listener.shaken and not caller.pending()
        yield caller, listener
    finally:
        caller.close()
        listener.close()


def digest(data: bytes | memoryview | torch.Tensor) -> str:
    return hashlib.sha256(data.numpy().data if isinstance(data, torch.Tensor) else data).hexdigest()


# -- every way to wait ------------------------------------------------------------------------------------------------
def blocking(end: TlsSocket, view: memoryview) -> int:
    return end.recv_into(view)


def with_a_timeout(end: TlsSocket, view: memoryview) -> int:
    end.settimeout(10)
    return end.recv_into(view)


def all_at_once(end: TlsSocket, view: memoryview) -> int:
    return end.recv_into(view, 0, socket.MSG_WAITALL)


def all_within_a_moment(end: TlsSocket, view: memoryview) -> int:
    """As a post reads what its owner waits for."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 1000))
    while True:
        with contextlib.suppress(BlockingIOError):
            return end.recv_into(view, 0, socket.MSG_WAITALL)


def watched(wait: Callable[[TlsSocket], object]) -> Callable[[TlsSocket, memoryview], int]:
    def read(end: TlsSocket, view: memoryview) -> int:
        while True:
            if not end.pending():  # else nobody tells of it
                assert wait(end), "nothing has come"
            with contextlib.suppress(BlockingIOError):
                return end.recv_into(view, 0, socket.MSG_DONTWAIT)

    return read


def selector(end: TlsSocket) -> object:
    with selectors.DefaultSelector() as found:
        found.register(end, selectors.EVENT_READ)
        return found.select(10)


def polled(end: TlsSocket) -> object:
    found = select.poll()
    found.register(end, select.POLLIN)
    return found.poll(10_000)


WAYS = {
    "blocking": blocking,
    "timeout": with_a_timeout,
    "all": all_at_once,
    "moment": all_within_a_moment,
    "selector": watched(selector),
    "poll": watched(polled),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("room", [1, 100, RECORD, 1_000_000])
def test_all_that_is_written_is_read_however_one_waits(way: str, room: int) -> None:
    count = min(len(BYTES), 2000 * room)
    with pair() as ends:
        for writer, reader in (ends, ends[::-1]):
            frame = [wire.raw(piece) for piece in BYTES[:count].split(max(room, 999))]
            thread = threading.Thread(target=writer.write, args=(frame, True))
            thread.start()
            got = bytearray()
            view = memoryview(bytearray(room))
            while len(got) < count:
                several = WAYS[way](reader, view[: count - len(got)])
                assert several > 0
                got += view[:several]
            thread.join(10)
            assert not frame and digest(got) == digest(BYTES[:count])


def test_waiting_has_an_end() -> None:
    with pair() as (caller, listener):
        caller.settimeout(0.05)
        with pytest.raises(TimeoutError):
            caller.recv(1)
        with pytest.raises(BlockingIOError):
            listener.recv(1, socket.MSG_DONTWAIT)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 1000))
        with pytest.raises(BlockingIOError):
            listener.recv(1, socket.MSG_WAITALL)


@pytest.mark.parametrize("count", [1, 100, RECORD - 1, RECORD, RECORD + 1, PIECE, PIECE + 1, 1_000_003])
def test_whoever_waits_for_all_of_it_waits_for_no_more(count: int) -> None:
    """One byte too many asked of the kernel would be waited for as long as nobody writes more."""
    with pair() as (caller, listener):
        for pieces in ([count], [count // 2, count - count // 2], [1] * min(count, 50) + [count - min(count, 50)]):
            frame = [wire.raw(piece) for piece in BYTES[:count].split(pieces)]
            thread = threading.Thread(target=caller.write, args=([f for f in frame if f.nbytes], True))
            thread.start()
            listener.settimeout(10)
            got = bytearray()
            while len(got) < count:
                got += listener.recv(count - len(got), socket.MSG_WAITALL)
            thread.join(10)
            assert digest(got) == digest(BYTES[:count])


# -- stalls -----------------------------------------------------------------------------------------------------------
def test_a_writer_that_must_not_wait_goes_on_where_it_stopped() -> None:
    with pair() as (caller, listener):
        frame = [wire.raw(BYTES)]
        refused, got = 0, bytearray()
        while frame:
            frame = caller.write(frame, False)
            if frame:
                refused += 1
                got += listener.recv(1 << 20)
        listener.settimeout(10)
        while len(got) < len(BYTES):
            got += listener.recv(1 << 20)
        assert refused and digest(got) == digest(BYTES)


def test_the_last_of_a_frame_is_not_done_before_the_kernel_has_it() -> None:
    with pair() as (caller, listener):
        frames = 1
        while not (left := caller.write([wire.raw(BYTES[:1000])], False)):
            frames += 1
        assert sum(piece.nbytes for piece in left) in (0, 1000)
        assert caller.write(left, False)  # still not
        thread = threading.Thread(target=caller.write, args=(left, True))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        listener.settimeout(10)
        count = 0
        while count < 1000 * frames:
            count += len(listener.recv(1 << 20))
        thread.join(10)
        assert not thread.is_alive() and count == 1000 * frames


def test_both_directions_at_once() -> None:
    with pair() as ends:
        got: dict[int, bytearray] = {0: bytearray(), 1: bytearray()}

        def read(number: int) -> None:
            while len(got[number]) < len(BYTES):
                got[number] += ends[number].recv(300_000)

        threads = [threading.Thread(target=read, args=(number,)) for number in (0, 1)]
        threads += [threading.Thread(target=end.write, args=([wire.raw(BYTES)], True)) for end in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert digest(got[0]) == digest(got[1]) == digest(BYTES)


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x03\x00\x7a\x02\x00"], ids=["nothing", "a little"])
def test_a_caller_does_not_wait_for_ever_for_hands_to_be_shaken(said: bytes) -> None:
    ends = raw_pair()
    with contextlib.closing(OURS.call(ends[0])) as caller, ends[1]:
        ends[1].sendall(said)
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="no handshake within"):
            caller.shake_hands(0.2)
        assert 0.1 < time.monotonic() - began < 5


def test_bytes_that_come_one_by_one_are_a_handshake_too() -> None:
    with pair(shaken=False) as (caller, listener):
        behind, relayed = raw_pair()
        slow = THEIRS.answer(behind)
        thread = threading.Thread(target=caller.shake_hands, args=(10,))
        thread.start()
        stop = threading.Event()

        def trickle() -> None:
            while not stop.is_set():
                for source, to in ((listener._sock, relayed), (relayed, listener._sock)):
                    with contextlib.suppress(BlockingIOError):
                        to.sendall(source.recv(1, socket.MSG_DONTWAIT))

        carrier = threading.Thread(target=trickle)
        carrier.start()
        with contextlib.closing(slow), relayed:
            while not slow.shaken:
                with contextlib.suppress(BlockingIOError):
                    slow.recv(1, socket.MSG_DONTWAIT)
            thread.join(10)
            caller.sendall(b"through")
            slow.settimeout(10)
            assert slow.recv(7, socket.MSG_WAITALL) == b"through"
            stop.set()
            carrier.join(10)


# -- ends -------------------------------------------------------------------------------------------------------------
def test_one_side_may_have_said_all_and_still_listen() -> None:
    with pair() as (caller, listener):
        caller.sendall(b"last words")
        caller.shutdown(socket.SHUT_WR)
        assert listener.recv(100) == b"last words"
        assert listener.recv(100) == b""
        listener.sendall(b"answer")
        assert caller.recv(100) == b"answer"


def test_a_connection_that_is_cut_in_the_middle_of_a_record_has_ended() -> None:
    with pair() as (caller, listener):
        caller._encipher([memoryview(b"x" * 1000)])
        caller._sock.sendall(caller._unsent[:500])
        caller.shutdown(socket.SHUT_WR)
        assert listener.recv(100) == b""


def test_a_goodbye_is_an_end() -> None:
    with pair() as (caller, listener):
        with contextlib.suppress(ssl.SSLWantReadError):
            caller._cipher.unwrap()
        caller._sock.sendall(caller._outgoing.read())
        listener.settimeout(10)
        assert listener.recv(100) == b""


def test_what_was_changed_on_the_way_is_noticed() -> None:
    with pair() as (caller, listener):
        caller._encipher([memoryview(b"x" * 1000)])
        changed = bytearray(caller._unsent)
        changed[700] ^= 1
        caller._sock.sendall(changed)
        with pytest.raises(ssl.SSLError, match="bad record mac"):
            listener.recv(100)


# -- who is let in ----------------------------------------------------------------------------------------------------
def old(protocol: int) -> Tls:
    """One that speaks TLS 1.2 only, with the right certificate."""
    made = Tls(AUTHORITY.identity("old"))
    for context in (made._calling, made._listening):
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    return made


STRANGERS: dict[str, Callable[[], Tls | None]] = {
    "another authority's": lambda: foreign(AUTHORITY),
    "expired": lambda: expired(AUTHORITY),
    "an older TLS": lambda: old(ssl.PROTOCOL_TLS_CLIENT),
    "in clear": lambda: None,
}


@pytest.mark.parametrize("name", STRANGERS)
def test_callers_without_a_certificate_of_the_run_are_dropped_though_they_know_the_secret(name: str) -> None:
    with correspondents("tls") as c:
        c.worker.post(SERVERS, pull(1), [])
        assert expect(c.server).message.seq == 1
        stranger = Post(7, 0, "tcp:127.0.0.1:0", SECRET, Message, STRANGERS[name]())
        stranger.know({SERVERS: Contact(c.server.where, 0)})
        with contextlib.closing(stranger):
            stranger.post(SERVERS, pull(2), [])
            until(c.server, lambda: c.server.strangers == 1)
            until(stranger, lambda: not stranger._lines)
        c.worker.post(SERVERS, pull(3), [])
        assert expect(c.server).message.seq == 3


@pytest.mark.parametrize("name", STRANGERS)
def test_listeners_without_a_certificate_of_the_run_are_not_believed_though_they_know_the_secret(name: str) -> None:
    with correspondents("tls") as c:
        impostor = Post(SERVERS + 1, 0, "tcp:127.0.0.1:0", SECRET, Message, STRANGERS[name]())
        c.worker.know({SERVERS: Contact(c.server.where, 0), SERVERS + 1: Contact(impostor.where, 0)})
        with contextlib.closing(impostor):
            c.worker.post(SERVERS + 1, pull(1), [torch.ones(9)])
            for _ in range(1000):
                impostor.poll()
                c.worker.poll()
                if not c.worker._lines and impostor.strangers:
                    break
                time.sleep(0.005)
            assert not c.worker._lines and not impostor._arrived
            c.worker.post(SERVERS, pull(2), [])
            assert expect(c.server).message.seq == 2


@pytest.mark.parametrize("name", STRANGERS)
def test_dialling_says_whose_certificate_is_wrong(name: str) -> None:
    listener = Admission("tcp:127.0.0.1:0", SECRET, Greeting, STRANGERS[name]())
    ended = threading.Event()

    def admit() -> None:
        while not ended.is_set():
            for sock, _ in listener.poll(0.05):
                sock.close()

    thread = threading.Thread(target=admit)
    thread.start()
    try:
        with pytest.raises((wire.WireError, OSError)) as caught:
            stream.dial(listener.address, SECRET, Greeting(3, 1), 5.0, OURS).close()
        if name != "in clear":
            assert listener.address in str(caught.value) and "certificate" in str(caught.value)
    finally:
        ended.set()
        thread.join(10)
        listener.close()


# -- letters ----------------------------------------------------------------------------------------------------------
def test_a_first_letter_arrives_though_its_writer_does_not_look_again() -> None:
    """Hands are shaken by a thread, not by whoever reads next."""
    with correspondents("tls") as c:
        c.worker.post(SERVERS, pull(1), [torch.ones(1_000_000)])
        letter = expect(c.server)
        assert letter.message.seq == 1 and letter.tensors[0].sum() == 1_000_000


def test_a_listener_that_computes_is_waited_for_and_nobody_is_held_up() -> None:
    with correspondents("tls") as c:
        began = time.monotonic()
        letters = [c.worker.post(SERVERS, pull(seq), []) for seq in range(20)]
        assert time.monotonic() - began < 0.5
        time.sleep(0.3)
        assert not any(letter.done() for letter in letters)
        assert [expect(c.server).message.seq for _ in range(20)] == list(range(20))
        letters[-1].wait(10)


def test_a_post_that_closes_while_hands_are_shaken_leaves_no_thread() -> None:
    before = threading.active_count()
    with correspondents("tls") as c:
        c.worker.post(SERVERS, pull(1), [])
    deadline = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


def test_letters_that_came_together_are_all_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has nothing left that would tell of the later ones."""
    monkeypatch.setattr("torrential.comm.post.READS", 1)
    with correspondents("tls") as c:
        c.worker.post(SERVERS, pull(0), [])
        assert expect(c.server).message.seq == 0
        for seq in range(1, 3001):
            c.worker.post(SERVERS, pull(seq), [torch.ones(200)])
        assert [expect(c.server).message.seq for _ in range(3000)] == list(range(1, 3001))


# -- files ------------------------------------------------------------------------------------------------------------
def test_certificates_are_read_and_tried(tmp_path: Path) -> None:
    identity = AUTHORITY.identity("anybody")
    files = CertificateFiles(**written(identity, tmp_path))
    assert read_identity(files) == identity
    other = written(Authority("another").identity("other"), tmp_path / "other")
    for wrong, said in (
        (files._replace(key=other["key"]), "KEY_VALUES_MISMATCH"),
        (files._replace(certificate=str(tmp_path / "nowhere")), "certificate=.*cannot be read: No such file"),
        (files._replace(key=os.devnull), "key=/dev/null cannot be read: it is no regular file"),
        (files._replace(authority=other["authority"]), "is not accepted by authority .*unable to get local issuer"),
        (files._replace(authority=files.key), "do not make a certificate to show"),
        (
            CertificateFiles(**written(AUTHORITY.identity("late", EXPIRED), tmp_path / "late")),
            "certificate has expired",
        ),
    ):
        with pytest.raises(BadInput, match=said) as caught:
            read_identity(wrong)
        assert "\n" not in str(caught.value)
