"""What TLS costs: messages and all-reduces between two processes in TLS, beside the same in clear.

python -m benchmarks.tls
python -m benchmarks.tls --rounds 9 --sizes 1MB,100MB

    letters     one process sends the other letters of 16 MB, one after the other; and small ones there and back
    allreduce   `torrential bench allreduce` over tcp and over tls, in turns

In every round both are measured one after the other, so that a ratio is of the same noise; told are medians over the
rounds, with the least and the most. A ratio is the rate in TLS over that in clear: above 0.3 is what TLS shall keep.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from multiprocessing.connection import Connection
from statistics import median
from typing import NamedTuple

import torch

from torrential.bench.allreduce import ask, measure
from torrential.comm.authority import Authority
from torrential.comm.channel import TensorLetter
from torrential.comm.post import Contact, Post
from torrential.comm.tls import Identity, Tls
from torrential.run import Silent

SECRET = bytes(32)
LARGE, LARGE_LETTERS = 16 << 20, 16  # bytes of a letter, letters of a round
SMALL_LETTERS = 500
ALGORITHM = "ring"
GOAL = 0.3


class Letters(NamedTuple):
    """What one round came to."""

    rate: float  # bytes per second
    there_and_back: float  # seconds of a small letter and its answer
    cpu: float  # seconds of both processes for 100 MB


def processor() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def post(number: int, identity: Identity | None) -> Post:
    return Post(number, 0, "tcp:127.0.0.1:0", SECRET, TensorLetter, None if identity is None else Tls(identity))


def receive(pipe: Connection, identity: Identity | None) -> None:
    """The other process: takes in what comes, and answers the last large letter and all small ones."""
    mine = post(1, identity)
    pipe.send(mine.where)
    mine.know({0: Contact(pipe.recv(), 0)})
    into = torch.empty(LARGE, dtype=torch.uint8)
    mine.landing = lambda letter: [into] if letter.name == "large" else None
    for number in range(1, LARGE_LETTERS + SMALL_LETTERS + 2):
        letter = mine.receive(60)
        assert letter is not None, "no letter came"
        if number == 1:
            before = processor()
        if number == LARGE_LETTERS + 1:
            pipe.send(processor() - before)
        if number > LARGE_LETTERS:
            mine.post(0, TensorLetter(0, "answer"), [])
    pipe.recv()
    mine.close()


def letters(identity: Identity | None) -> Letters:
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("fork").Process(target=receive, args=(theirs, identity), daemon=True)
    other.start()
    mine = post(0, identity)
    mine.know({1: Contact(ours.recv(), 0)})
    ours.send(mine.where)
    large = torch.ones(LARGE, dtype=torch.uint8)
    mine.post(1, TensorLetter(0, "large"), [large]).wait(60)  # hands are shaken by then
    began, before = time.perf_counter(), processor()
    sent = [mine.post(1, TensorLetter(0, "large"), [large]) for _ in range(LARGE_LETTERS - 1)]
    for one in sent:
        one.wait(60)
    mine.post(1, TensorLetter(0, "small"), [])
    assert mine.receive(60) is not None
    seconds, used = time.perf_counter() - began, processor() - before
    used += ours.recv()
    began = time.perf_counter()
    for _ in range(SMALL_LETTERS):
        mine.post(1, TensorLetter(0, "small"), [])
        assert mine.receive(60) is not None
    back = (time.perf_counter() - began) / SMALL_LETTERS
    ours.send(None)
    other.join(60)
    mine.close()
    sent_bytes = LARGE * (LARGE_LETTERS - 1)
    return Letters(sent_bytes / seconds, back, used * 1e8 / sent_bytes)


def spread(values: list[float], form: str = ".2f") -> str:
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="64KB,1MB,25MB,100MB", help="Of vectors that are all-reduced.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    identity = Authority().identity("both")
    rounds = [(letters(None), letters(identity)) for _ in range(given.rounds)]
    for name, number in (("in clear", 0), ("in TLS", 1)):
        print(
            f"letters {name:8}  {spread([1e-6 * r[number].rate for r in rounds], '.0f')} MB/s, there and back "
            f"{spread([1e6 * r[number].there_and_back for r in rounds], '.0f')} µs, "
            f"{spread([r[number].cpu for r in rounds])} s of CPU for 100 MB"
        )
    ratio = [secure.rate / plain.rate for plain, secure in rounds]
    print(f"letters: TLS / plain  {spread(ratio)} (goal: {GOAL})")
    times: dict[int, list[float]] = {}
    for _ in range(given.rounds):
        plain, secure = (
            measure(ask(2, given.sizes, transport, ALGORITHM, 1, False), None, Silent()).rows
            for transport in ("tcp", "tls")
        )
        for clear, enciphered in zip(plain, secure, strict=True):
            times.setdefault(clear.bytes, []).append(clear.ms[ALGORITHM] / enciphered.ms[ALGORITHM])
    for size, ratios in times.items():
        print(f"all-reduce of {size:>11,} bytes: TLS / plain  {spread(ratios)}")


if __name__ == "__main__":
    main()
