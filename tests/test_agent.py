"""The agent of a host: it has no torch in it, keeps memory for its roles alone, and answers them one by one."""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from torrential.comm import handshake, stream
from torrential.comm.protocol import SERVERS, address_of
from torrential.errors import RunFailed
from torrential.worlds.local import registry as registries
from torrential.worlds.local.agent import HostAgent
from torrential.worlds.local.link import AgentLink, Buffers
from torrential.worlds.local.orders import (
    Begin,
    Born,
    BufferRefused,
    End,
    Ended,
    FromNursery,
    Granted,
    Spawn,
    Surroundings,
    ToNursery,
    ending,
)
from torrential.worlds.local.registry import Registry, RegistryService

Link = Callable[..., AgentLink]
SECRET = secrets.token_bytes(handshake.SECRET_BYTES)


@pytest.fixture
def service() -> Iterator[RegistryService]:
    registry = Registry()
    made = RegistryService(registry, f"unix:@torrential-{secrets.token_hex(8)}", SECRET)
    yield made
    made.close()
    registry.close()


@pytest.fixture
def link(service: RegistryService) -> Iterator[Callable[..., AgentLink]]:
    made: list[AgentLink] = []

    def make(rank: int = 0) -> AgentLink:
        around = Surroundings((0, 0, 0), secret=SECRET, memory=service.address)
        made.append(AgentLink(Spawn("worker", rank, 0, around)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_an_agent_needs_no_torch() -> None:
    """One that has loaded it takes seconds to start."""
    program = "import sys, torrential.worlds.local.agent; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_roles_of_a_host_share_memory_that_its_agent_keeps(link: Link) -> None:
    one, other = Buffers(link(0), 0), Buffers(link(1), 1)
    one.get("values", 4, torch.float32, 0).fill_(3)
    assert other.existing("values", 4, torch.float32, 0).tolist() == [3, 3, 3, 3]
    with pytest.raises(RunFailed, match="nobody has registered a buffer 'values#1'"):
        other.existing("values", 4, torch.float32, 1)
    assert os.stat(one.file("file")).st_size == 0


def test_threads_that_ask_at_once_get_their_own_answers(link: Link) -> None:
    """A role asks from the thread that computes, and from the one that reads letters in its place."""
    asked, found = link(), dict[str, int]()

    def ask(key: str, size: int) -> None:
        for _ in range(50):
            answer = asked.ask(key, size)
            assert isinstance(answer, Granted)
            found[key] = os.fstat(answer.fd).st_size

    threads = [threading.Thread(target=ask, args=(str(size), size)) for size in (10, 20, 30, 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {"10": 10, "20": 20, "30": 30, "40": 40}


def test_strangers_get_no_memory_and_hold_up_nobody(
    service: RegistryService, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registries.stream, "HANDSHAKE_SECONDS", 0.2)
    with pytest.raises(stream.WireError, match="does not know the secret"):
        stream.dial(service.address, bytes(handshake.SECRET_BYTES), Begin("worker", 0, 0), 5.0)
    silent = stream.connect(service.address, 5.0)
    assert isinstance(link().ask("values", 8), Granted)
    assert silent.recv(1) == b""  # it was dropped
    silent.close()
    loud = stream.dial(service.address, SECRET, registries.Asker("worker", 9, 0), 5.0)
    loud.sendall(b"\xff\xff\xff\xff nonsense")
    with contextlib.suppress(ConnectionResetError):  # it had more to say than was read
        assert loud.recv(1) == b""
    loud.close()
    assert isinstance(link().ask("values", 8), Granted)


def test_an_agent_begins_and_ends_processes_and_forgets_what_the_one_before_the_last_shared() -> None:
    ours, theirs = socket.socketpair()
    nursery: stream.Plain[ToNursery | FromNursery] = stream.Plain(theirs, ToNursery)
    said, come = list[Born | Ended | None](), threading.Semaphore(0)

    def report(one: Born | Ended | None) -> None:
        said.append(one)
        come.release()

    asked = AgentLink(Spawn("server", 0, 0, Surroundings((0, 0, 0))))
    agent = HostAgent(ours, Surroundings((1, 2, 3), secret=SECRET), report)
    try:
        agent.begin(Begin("server", 0, 0))
        spawn = nursery.receive()
        assert isinstance(spawn, Spawn) and (spawn.role, spawn.life) == ("server", 0)
        address = address_of("server", 0)
        assert address == SERVERS
        key = f"vector{ending(address, 0)}"
        asked = AgentLink(spawn)
        assert isinstance(asked.ask(key, 8), Granted)
        agent.begin(Begin("server", 0, 1))
        assert isinstance(asked.ask(key, 0), Granted)  # it may still be read
        agent.begin(Begin("server", 0, 2))
        assert isinstance(asked.ask(key, 0), BufferRefused)
        agent.end(End("server", 0, 2))
        assert [nursery.receive() for _ in range(3)][-1] == End("server", 0, 2)
        nursery.send(Ended("server", 0, 2, -9))
        theirs.close()
        for _ in range(2):
            assert come.acquire(timeout=10)
        assert said == [Ended("server", 0, 2, -9), None]
        with pytest.raises(RunFailed, match="the process that starts workers is gone"):
            for _ in range(2):
                agent.begin(Begin("server", 0, 3))
    finally:
        asked.close()
        agent.close()
        ours.close()
