"""Parameters that a worker waits for come straight to where it wants them, and nobody ever sees half of them."""

import secrets
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_letters import SECRET, Correspondents

from torrential.comm.frames import Frames, frame, reader_of
from torrential.comm.post import Contact, Post
from torrential.comm.protocol import SERVERS, Letter, Meter, letter_by_letter
from torrential.errors import WaitedTooLong
from torrential.server.client import Client
from torrential.server.messages import Done, Message, Range, View

NUMEL = 50_000  # as much as the kernel takes at once, and more than is read ahead


class Mail:
    """What a client needs, on a bare post."""

    shares_memory, resend = False, None

    def __init__(self, post: Post, view: View) -> None:
        self.address, self._post, self.view, self.meter = 0, post, view, Meter()

    def now(self) -> float:
        return self.meter.clock()

    def post(self, to: int, message: Any, tensors: Any = ()) -> Any:
        return self._post.post(to, message, tensors)

    def land(self, where: Any) -> None:
        self._post.landing = where

    def receive(self, timeout: float | None = None) -> Letter | None:
        return self._post.receive(timeout)

    read = letter_by_letter


class Scene(Correspondents):
    def __init__(self) -> None:
        super().__init__("tcp")
        self.other = Post(SERVERS + 1, 0, f"unix:@torrential-{secrets.token_hex(8)}", SECRET, Message)
        self.posts.append(self.other)
        contacts = {SERVERS + i: Contact(p.where, 0) for i, p in enumerate((self.server, self.other))}
        self.worker.know(contacts)
        self.client = Client(Mail(self.worker, view(1, SERVERS)), NUMEL, torch.float32)

    def answer(self, server: Post, value: float, first: int | None = None) -> None:
        """Or only its first bytes; `the_rest` follows."""
        letter = server.receive(10)
        assert letter is not None
        asked = letter.message
        done = Done(seq=asked.seq, start=asked.start, view=asked.view, version=int(value))
        data = b"".join(bytes(part) for part in frame(done, [torch.full((NUMEL,), value)], None)[0])
        self._sock = server._to[0].sock
        self._sock.sendall(data[:first])
        self._rest = data[first:]

    def the_rest(self) -> None:
        self._sock.sendall(self._rest)

    def read_what_has_come(self) -> None:
        while self.worker._epoll.poll(0.01):
            assert self.worker.receive(0) is None


def view(version: int, server: int) -> View:
    return View(version, (0,), (Range(0, NUMEL, (server,)),))


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    try:
        yield made
    finally:
        made.close()


def test_a_pull_that_is_waited_for_is_not_copied(scene: Scene) -> None:
    into = torch.zeros(NUMEL)
    pending = scene.client.pull(into, clock=0)
    scene.answer(scene.server, 3.0)
    letters: list[Letter] = []
    receive = scene.worker.receive

    def listening(timeout: float | None = None) -> Letter | None:
        letter = receive(timeout)
        letters.extend([letter] if letter is not None else [])
        return letter

    scene.worker.receive = listening  # type: ignore[method-assign]
    assert pending.wait().version == 3
    assert letters[-1].tensors[0].data_ptr() == into.data_ptr()
    assert into.unique().tolist() == [3.0]


def test_a_pull_that_nobody_waits_for_comes_as_a_whole(scene: Scene) -> None:
    into = torch.zeros(NUMEL)
    pending = scene.client.pull(into, clock=0)
    scene.answer(scene.server, 3.0, first=100_000)
    scene.read_what_has_come()
    assert not pending.done() and into.unique().tolist() == [0.0]
    scene.the_rest()
    assert pending.wait().version == 3 and into.unique().tolist() == [3.0]


def test_a_wait_that_is_given_up_leaves_the_rest_to_come_as_a_whole(scene: Scene) -> None:
    into = torch.zeros(NUMEL)
    pending = scene.client.pull(into, clock=0)
    scene.answer(scene.server, 3.0, first=100_000)
    with pytest.raises(WaitedTooLong):
        pending.wait(0.2)
    begun = into.clone()
    assert begun.unique().tolist() == [0.0, 3.0]
    into.fill_(7.0)  # the caller goes on
    scene._rest, last = scene._rest[:-100], scene._rest[-100:]
    scene.the_rest()
    scene.read_what_has_come()
    assert not pending.done() and into.unique().tolist() == [7.0]
    scene._rest = last
    scene.the_rest()
    assert pending.wait().version == 3 and into.unique().tolist() == [3.0]


def test_an_answer_that_another_has_replaced_is_written_nowhere(scene: Scene) -> None:
    """The range moves while its old head's answer is half here: the rest of it must not follow the new head's."""
    into = torch.zeros(NUMEL)
    pending = scene.client.pull(into, clock=0)
    scene.answer(scene.server, 3.0, first=100_000)
    scene.client._waited = pending  # as in wait()
    scene.read_what_has_come()
    assert into.unique().tolist() == [0.0, 3.0]
    scene.client._handle(Letter(-1, view(2, SERVERS + 1), []))
    late = scene._sock, scene._rest
    scene.answer(scene.other, 4.0)
    assert pending.wait().version == 4 and into.unique().tolist() == [4.0]
    scene._sock, scene._rest = late
    scene.the_rest()
    letter = scene.worker.receive(10)
    assert letter is not None and letter.tensors[0].unique().tolist() == [3.0]
    scene.client._handle(letter)
    assert into.unique().tolist() == [4.0]


def test_what_is_diverted_is_complete() -> None:
    wanted = [torch.zeros(100_000), torch.zeros(0), torch.zeros(50_000)]
    sent = [torch.arange(100_000.0), torch.zeros(0), torch.arange(50_000.0)]
    data = b"".join(bytes(part) for part in frame(Done(seq=1), sent, None)[0])
    for cut in (300_000, 400_100, 500_000):
        frames, found, at = Frames(reader_of(Message), None, lambda _: wanted), [], 0
        for stop in (cut, len(data)):
            while at < stop:
                room = frames.room()
                size = min(room.nbytes, stop - at)
                room[:size] = data[at : at + size]
                found += list(frames.filled(size))
                at += size
            frames.divert()
        ((_, tensors),) = found
        assert all(torch.equal(a, b) for a, b in zip(tensors, sent, strict=True))
        assert tensors[0] is not wanted[0] and not torch.equal(wanted[2], sent[2])
        for tensor in wanted:
            tensor.zero_()
