"""What is wrong with a rendezvous is said in one line, with the remedy."""

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from torrential.comm import stream
from torrential.comm.admission import Admission
from torrential.comm.authority import Authority
from torrential.comm.handshake import CHALLENGE_BYTES, CLEAR, ENCIPHERED
from torrential.comm.protocol import OBSERVER, SERVERS
from torrential.comm.tls import Tls, call_unknown
from torrential.errors import BadInput, RunFailed
from torrential.worlds.hosts.messages import Come, versions
from torrential.worlds.hosts.rendezvous import SECRET_VARIABLE, join, rendezvous, secret_of_run
from torrential.worlds.placement import Placement, read_wishes

COUNTS = {"worker": 6, "server": 3, "observer": 1}


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "a secret that is long enough")


@pytest.mark.parametrize(
    ("where", "host", "hosts", "said"),
    [
        ("10.0.0.1", 0, 2, r"--rendezvous takes HOST:PORT \(given: '10.0.0.1'\)"),
        ("10.0.0.1:0", 0, 2, r"takes HOST:PORT"),
        ("10.0.0.1:x", 0, 2, r"takes HOST:PORT"),
        ("10.0.0.1:29500", None, 2, r"needs --host-rank as well"),
        ("10.0.0.1:29500", 0, None, r"needs --hosts as well"),
        ("10.0.0.1:29500", -1, 2, r"given: -1 of 2"),
        ("10.0.0.1:29500", 0, 0, r"given: 0 of 0"),
        ("no.such.host.invalid:29500", 0, 2, r"'no.such.host.invalid' is no address that this host knows"),
    ],
)
def test_an_address_or_a_number_that_is_wrong(
    secret: None, where: str, host: int | None, hosts: int | None, said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        rendezvous(where, host, hosts, None)


def test_a_secret_that_is_missing_short_or_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    short = tmp_path / "short"
    short.write_text("abc\n")
    for file, said in (
        (None, "give --secret-file FILE, or TORRENTIAL_SECRET"),
        (tmp_path / "none", "none cannot be read"),
        (short, r"short is too short \(3 characters, at least 16\)"),
    ):
        with pytest.raises(BadInput, match=said):
            rendezvous("127.0.0.1:29500", 0, 2, file)


def test_a_secret_of_a_run_is_that_of_no_other() -> None:
    assert secret_of_run(b"s" * 32, b"1" * 16) != secret_of_run(b"s" * 32, b"2" * 16)


AUTHORITY = Authority()


@contextlib.contextmanager
def listening(secret: bytes, enciphered: bool = False) -> Any:
    """A supervisor's listener, and whom it has admitted."""
    tls = Tls(AUTHORITY.identity("rendezvous"), anybody=True) if enciphered else None
    listener = Admission("tcp:127.0.0.1:0", secret, Come, tls, says_challenge=True)
    admitted: list[Any] = []

    def admit() -> None:
        while not listener.stopped:
            admitted.extend(listener.poll(0.1))

    thread = threading.Thread(target=admit)
    thread.start()
    yield listener, admitted
    listener.stop()
    thread.join(10)
    for sock, _ in admitted:
        sock.close()
    listener.close()


@pytest.mark.parametrize("enciphered", [False, True])
def test_a_host_with_another_secret_is_refused_and_says_so(secret: None, enciphered: bool) -> None:
    with listening(secrets.token_bytes(32), enciphered) as (listener, admitted):
        port = listener.address.partition("?")[0].rpartition(":")[2]
        meeting = rendezvous(f"127.0.0.1:{port}", 1, 2, None)
        with pytest.raises(BadInput, match="knows another secret, or is no supervisor; give all hosts the same"):
            join(meeting, Come(1, "here", versions()), 5.0)
        assert not admitted and listener.strangers == 1


@pytest.mark.parametrize("enciphered", [False, True])
def test_a_host_that_knows_the_secret_is_admitted_and_a_missing_supervisor_is_named(
    secret: None, enciphered: bool
) -> None:
    meeting = rendezvous("127.0.0.1:1", 1, 2, None)
    with listening(meeting.secret, enciphered) as (listener, admitted):
        port = listener.address.partition("?")[0].rpartition(":")[2]
        sock = join(rendezvous(f"127.0.0.1:{port}", 1, 2, None), Come(1, "here", versions()), 5.0)
        sock.close()
        assert [come.host for _, come in admitted] == [1]
    with pytest.raises(RunFailed, match=r"host 0 was not at 127\.0\.0\.1:1 within 0 s .*--host-rank 0"):
        join(meeting, Come(1, "here", versions()), 0.0)


def between(caller: socket.socket, port: int, to_caller: Tls | None, to_listener: bool) -> None:
    """Whoever sits between a host and its supervisor: TLS with either, or none, and what they say is passed on."""
    listener = socket.create_connection(("127.0.0.1", port), 10)
    caller.settimeout(10)
    challenge = listener.recv(1 + CHALLENGE_BYTES, socket.MSG_WAITALL)[1:]
    caller.sendall((CLEAR if to_caller is None else ENCIPHERED) + challenge)
    near: stream.Connected = caller if to_caller is None else to_caller.answer(caller)
    far: stream.Connected = listener
    if to_listener:
        far = call_unknown(listener)
        far.shake_hands(10)
    with contextlib.suppress(OSError):
        for source, to in ((near, far), (far, near)):
            if not (said := source.recv(4096)):
                break
            to.sendall(said)
    for end in (near, far):
        stream.close(end)


@pytest.mark.parametrize(("to_caller", "to_listener"), [(True, True), (False, True), (False, False)])
def test_nobody_sits_between_a_host_and_its_supervisor(secret: None, to_caller: bool, to_listener: bool) -> None:
    """With TLS both ways and a certificate of his own, or having told the host that there is no TLS."""
    known = rendezvous("127.0.0.1:1", 1, 2, None).secret
    with (
        listening(known, enciphered=True) as (listener, admitted),
        socket.create_server(("127.0.0.1", 0)) as waylaid,
        ThreadPoolExecutor(1) as pool,
    ):
        port = int(listener.address.partition("?")[0].rpartition(":")[2])
        own = Tls(Authority("another").identity("rendezvous"), anybody=True) if to_caller else None
        passing = pool.submit(lambda: between(waylaid.accept()[0], port, own, to_listener))
        meeting = rendezvous(f"127.0.0.1:{waylaid.getsockname()[1]}", 1, 2, None)
        with pytest.raises((BadInput, RunFailed)):
            join(meeting, Come(1, "here", versions()), 0.0)
        passing.result(20)
        assert not admitted and listener.strangers == 1


def test_options_of_several_hosts_without_a_rendezvous(run_cli: Callable[..., Any]) -> None:
    for words, said in (
        (("--hosts", 2), "--hosts is for runs on several hosts; give --rendezvous HOST:PORT as well"),
        (("--world", "hosts"), "--world hosts needs --rendezvous HOST:PORT"),
        (("--rendezvous", "127.0.0.1:29500", "--world", "sim"), "--rendezvous is for --world hosts"),
        (("--set", "host_timeout=3"), "host_timeout is for runs on several hosts"),
    ):
        done = run_cli("train", "digits-mlp", *words)
        assert done.returncode == 2 and said in done.stderr, done.stderr


# -- placement --------------------------------------------------------------------------------------------------------
def test_roles_are_where_the_page_says() -> None:
    placement = Placement(3, COUNTS)

    seats = [placement.seat(address, {0, 1, 2}) for address in (*range(6), SERVERS, SERVERS + 1, SERVERS + 2, OBSERVER)]
    assert [seat.host for seat in seats] == [0, 0, 1, 1, 2, 2, 0, 1, 2, 0]
    assert [seat.number for seat in seats[:6]] == [0, 1, 0, 1, 0, 1] and {seat.beside for seat in seats[:6]} == {2}
    assert placement.seat(5, {0, 1, 3}).host == 3  # the spare one has nobody
    assert placement.seat(4, {0, 1}).host == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("observer", "placement takes ROLE-NUMBER:HOST"),
        ("worker:1", "placement takes ROLE-NUMBER:HOST"),
        ("worker-6:1", "the run has no worker-6"),
        ("cook-0:1", "the run has no cook-0"),
        ("server-1:3", "hosts are numbered from 0 to 2"),
    ],
)
def test_wishes_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        read_wishes(text, 3, COUNTS)
    assert read_wishes("observer:2, server-1:0", 3, COUNTS) != {}
