"""Attacks a run that goes on, as those can who do not know its secret, and measures what that costs it. Needs root.

python -m benchmarks.hostile --frames 100000
python -m benchmarks.hostile --frames 100000 --security tls

A run (ssp, two workers, two servers, tcp) trains on a loopback of its own, on which all is recorded from the beginning.
Then each of its listeners, those of roles and the supervisor's, is called again and again:

    strangers     with garbage, other protocols' words, the beginning of a greeting, lengths that are absurd
    wrong tokens  with greetings as they should be, but of another secret; with TLS also of another authority
    replayed      with what callers of the run have said themselves, whole connections of it
    mutated       with the same, changed at random: bits, bytes, lengths, cuts, insertions
    silent        with nothing: so many at once that a process would run out of descriptors

A call is refused when the listener has closed it without an answer (with TLS: without more than its part of a
handshake). Told: how many were refused, of how many; bytes answered at most; the steps that the run took meanwhile, and
the most that a process grew by, beside some time left alone. In the end the run must have lost nobody, and ends by
Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import secrets
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from benchmarks import link
from benchmarks.faults import PATIENCE_SECONDS, Run, steps_taken
from benchmarks.wiretap import Wiretap
from torrential.comm import handshake, stream
from torrential.comm.authority import Authority
from torrential.comm.post import Greeting
from torrential.comm.tls import Tls
from torrential.records import Event

AT_ONCE = 32  # calls
CALL_SECONDS = 30.0
SILENT = 150  # calls to each listener
MOST_REPLAYED = 1 << 18  # bytes of one connection
MOST_MUTATED = 1 << 13
HANDSHAKE_BYTES = 1 << 13  # that a listener in TLS may say to whoever calls
LISTENS = "0A"
LISTENS_UNIX = "00010000"
INTERRUPTED = 130  # the exit status after Ctrl-C
WARM_UP_STEPS = 20
GREETING = msgspec.msgpack.encode(Greeting(0, 0))


@dataclass
class Told:
    """What one kind of calls came to."""

    calls: int = 0
    refused: int = 0
    answered: int = 0  # bytes, at most


@dataclass
class Target:
    """A run, seen from outside."""

    run: Run
    security: str
    memory: dict[str, list[int]] = field(default_factory=dict)  # resident bytes of each process, as looked at

    def listeners(self) -> list[str]:
        """Their addresses; on this loopback nobody else listens."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        found = [f"tcp:127.0.0.1:{int(row[1].rpartition(':')[2], 16)}" for row in rows if row[3] == LISTENS]
        rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
        return found + [f"unix:{row[7]}" for row in rows if row[3] == LISTENS_UNIX and len(row) > 7]

    def look(self) -> None:
        for pid, name in self.run.members().items():
            with contextlib.suppress(psutil.NoSuchProcess):
                if name.startswith("tt-"):
                    self.memory.setdefault(name, []).append(psutil.Process(pid).memory_info().rss)
        self.memory.setdefault("supervisor", []).append(psutil.Process(self.run.process.pid).memory_info().rss)

    def grown(self) -> int:
        """The most that a process has grown by since memory was looked at first; it is forgotten then."""
        looks, self.memory = self.memory, {}
        return max(max(seen) - seen[0] for seen in looks.values())

    def steps(self) -> int:
        return steps_taken(self.run.records())


# -- what is said -----------------------------------------------------------------------------------------------------
def strangers(count: int, chance: random.Random) -> Iterator[bytes]:
    for number in range(count):
        match number % 6:
            case 0:
                yield chance.randbytes(chance.randrange(1, 5000))
            case 1:
                yield b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
            case 2:
                yield b"\x16\x03\x01" + chance.randbytes(chance.randrange(600))  # the beginning of TLS
            case 3:
                yield handshake.opening(bytes(32), bytes(16), GREETING).words[: chance.randrange(60)]
            case 4:
                yield chance.randbytes(48) + b"\xff\xff\xff\xff" + bytes(1000)  # a greeting of 4 GB
            case 5:
                yield b"\x16\x03\x03\xff\xff\x01\xff\xff\xff" + bytes(3000)  # a hello of 16 MB


def wrong_tokens(count: int) -> Iterator[bytes]:
    for _ in range(count):
        opened = handshake.opening(secrets.token_bytes(32), secrets.token_bytes(16), GREETING)
        yield opened.words + b"\x05\x00\x00\x00" + bytes(100)


def mutated(count: int, valid: list[bytes], chance: random.Random) -> Iterator[bytes]:
    for _ in range(count):
        said = bytearray(chance.choice(valid)[: chance.randrange(1, MOST_MUTATED)])
        for _ in range(chance.choice((1, 1, 2, 5, 20))):
            at = chance.randrange(len(said) + 1)
            match chance.randrange(5):
                case 0 if at < len(said):
                    said[at] ^= 1 << chance.randrange(8)
                case 1:
                    said[at:at] = chance.randbytes(chance.randrange(1, 9))
                case 2:
                    del said[at : at + chance.randrange(1, 9)]
                case 3:
                    said[at : at + 4] = chance.randrange(1 << chance.randrange(1, 33)).to_bytes(4, "little")
                case _:
                    said[at:] = chance.randbytes(chance.randrange(100))
        yield bytes(said)


# -- calling ----------------------------------------------------------------------------------------------------------
class Call:
    """One connection that says something and then nothing."""

    def __init__(self, address: str, words: bytes) -> None:
        family, where = stream.parse(address)
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        self.sock.settimeout(CALL_SECONDS)
        self.answered = 0
        self.sock.connect(where)
        with contextlib.suppress(OSError):  # shown the door before all was said
            self.sock.sendall(words)
            self.sock.shutdown(socket.SHUT_WR)

    def over(self) -> bool:
        """Read what has come; whether the listener has closed."""
        try:
            while said := self.sock.recv(1 << 16, socket.MSG_DONTWAIT):
                self.answered += len(said)
        except BlockingIOError:
            return False
        except ConnectionError:
            pass
        return True


def call(told: Told, addresses: list[str], words: Iterable[bytes], security: str, each: Callable[[], None]) -> None:
    """Say each of these to the next listener, several at once."""
    allowed, pending, words = HANDSHAKE_BYTES if security == "tls" else 0, list[Call](), iter(words)
    more = True
    while more or pending:
        while more and len(pending) < AT_ONCE:
            if (said := next(words, None)) is None:
                more = False
            else:
                pending.append(Call(addresses[told.calls % len(addresses)], said))
                told.calls += 1
                if told.calls % 1000 == 0:
                    each()
        heard, _, _ = select.select([one.sock for one in pending], [], [], CALL_SECONDS)
        if not heard:
            return  # what is pending was not refused
        for one in [one for one in pending if one.sock in heard and one.over()]:
            told.refused += one.answered <= allowed
            told.answered = max(told.answered, one.answered)
            one.sock.close()
            pending.remove(one)


def foreigners(told: Told, addresses: list[str], count: int) -> None:
    """Callers in TLS that know how, with certificates of another authority."""
    tls = Tls(Authority("another run").identity("worker 0"))
    for number in range(count):
        told.calls += 1
        address = stream.challenging(addresses[number % len(addresses)], secrets.token_bytes(16))
        try:
            stream.dial(address, secrets.token_bytes(32), Greeting(0, 0), CALL_SECONDS, tls).close()
        except (stream.WireError, OSError):
            told.refused += 1


def silence(told: Told, target: Target, addresses: list[str]) -> int:
    """Callers that say nothing; the most descriptors that a process had open meanwhile."""
    most, calls = 0, list[socket.socket]()
    for address in addresses:
        family, where = stream.parse(address)
        for _ in range(SILENT):
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.settimeout(CALL_SECONDS)
            sock.connect(where)
            calls.append(sock)
        told.calls += SILENT
        target.look()
        for pid in target.run.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                most = max(most, psutil.Process(pid).num_fds())
    deadline = time.monotonic() + CALL_SECONDS
    for sock in calls:
        sock.settimeout(max(0.1, deadline - time.monotonic()))
        with contextlib.suppress(ConnectionError):
            if sock.recv(1):
                continue
        told.refused += 1
        sock.close()
    return most


# -- the campaign -----------------------------------------------------------------------------------------------------
def said_to(listeners: list[str], tap: Wiretap) -> list[bytes]:
    """What callers of the run have said to its listeners, connection by connection."""
    ports = {int(address.rpartition(":")[2]) for address in listeners if address.startswith("tcp:")}
    recorded = [bytes(said[:MOST_REPLAYED]) for way, said in list(tap.said.items()) if way.to in ports and said]
    assert recorded, "nothing was recorded"
    return recorded


def campaign(target: Target, frames: int, chance: random.Random, tap: Wiretap) -> dict[str, Told]:
    addresses = target.listeners()
    recorded = said_to(addresses, tap)
    tcp = [address for address in addresses if address.startswith("tcp:")]
    told: dict[str, Told] = {}

    def volley(name: str, words: Iterable[bytes]) -> None:
        told[name] = Told()
        began, before = time.monotonic(), target.steps()
        target.look()
        call(told[name], addresses, words, target.security, target.look)
        target.look()
        show(name, told[name], target, time.monotonic() - began, before)

    print(f"{len(addresses)} listeners, {len(recorded)} connections recorded", flush=True)
    volley("strangers", strangers(max(60, frames // 20), chance))
    volley("wrong tokens", wrong_tokens(max(60, frames // 20)))
    volley("replayed", (said for said in recorded for _ in range(2 * len(addresses))))
    volley("mutated", mutated(frames, recorded, chance))
    if target.security == "tls":
        began, before = time.monotonic(), target.steps()
        target.look()
        foreigners(told.setdefault("another authority's", Told()), tcp, max(40, frames // 100))
        target.look()
        show("another authority's", told["another authority's"], target, time.monotonic() - began, before)
    began, before = time.monotonic(), target.steps()
    target.look()
    most = silence(told.setdefault("silent", Told()), target, addresses)
    show("silent", told["silent"], target, time.monotonic() - began, before)
    print(f"descriptors of one process at most: {most}", flush=True)
    return told


def show(name: str, told: Told, target: Target, seconds: float, before: int) -> None:
    steps, grown = (target.steps() - before) / seconds, target.grown() / 1e6
    print(f"{name:20} {told.refused:7} of {told.calls:7} refused, {told.answered:5} bytes answered at most; "
          f"{seconds:6.1f} s, {steps:6.1f} steps/s, grown by {grown:5.1f} MB", flush=True)  # fmt: skip


def alone(target: Target, seconds: float) -> None:
    before = target.steps()
    target.look()
    time.sleep(seconds)
    target.look()
    show("left alone", Told(), target, seconds, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--security", choices=["token", "tls"], default="token")
    parser.add_argument("--alone", type=float, default=10.0, help="Seconds left alone, before and after.")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    link.own_loopback("a recording")
    directory = Path(tempfile.mkdtemp(prefix="hostile-"))
    wrong: list[str] = []
    with Wiretap() as tap:
        run = Run(
            directory / "run", "digits-mlp", "--strategy", "ssp", "--workers", "2", "--servers", "2",
            "--epochs", "1000000", "--out", str(directory / "run"), "--set", "transport=tcp",
            "--set", f"security={given.security}",
        )  # fmt: skip
        target = Target(run, given.security)
        try:
            if not run.until(lambda records: steps_taken(records) >= WARM_UP_STEPS):
                raise SystemExit(f"the run ended before the attack; see {run.log}")
            tap.stop()
            alone(target, given.alone)
            told = campaign(target, given.frames, random.Random(given.seed), tap)
            alone(target, given.alone)
            before = target.steps()
            run.until(lambda records: steps_taken(records) > before)
            run.process.send_signal(signal.SIGINT)
            status = run.process.wait(PATIENCE_SECONDS)
        finally:
            run.kill_all()
    lost = [record.event for record in run.records() if isinstance(record, Event) and record.event.endswith("_lost")]
    wrong += [f"{name}: {one.calls - one.refused} not refused" for name, one in told.items() if one.refused < one.calls]
    wrong += lost + ([] if status == INTERRUPTED else [f"exit status {status}"])
    print(json.dumps({"wrong": wrong, **{name: vars(one) for name, one in told.items()}}))
    if wrong:
        sys.exit(f"see {directory}")
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
