"""Recursive halving and doubling (Rabenseifner): exchange halves with ever farther partners, then the same backwards.

Reduce-scatter, d = 1, 2, 4, .. p/2: the partner is r xor d; of the interval that is left, keep the half that the bit d
of r says, send the other, add what comes. All-gather, d = p/2 .. 1: send the interval, receive the partner's.

    p = 4      d = 1, with r^1       d = 2, with r^2       so r owns the chunk at its bit-reversed place
    member 0   keeps [0, n/2)        keeps [0, n/4)        0
    member 1   keeps [n/2, n)        keeps [n/2, 3n/4)     2
    member 2   keeps [0, n/2)        keeps [n/4, n/2)      1
    member 3   keeps [n/2, n)        keeps [3n/4, n)       3

Seconds: 2 log2(p) alpha + 2(p-1)/p n beta + (p-1)/p n gamma.

Other counts than powers of two: of the first 2 (p - 2^k) members every second one folds its vector into its neighbour's
before and gets the result after, for 2 alpha + 2 n beta + n gamma more.
"""

from __future__ import annotations

from collections.abc import Callable

from torrential.comm.schedules.base import Algorithm, Costs, Plan, Range, Receive, Send, Stream, cut, step

Name = Callable[[int], int]
"""Which member plays this part, where only some take part."""

SUM, COPY, FOLD, UNFOLD = range(4)  # keys: a pair meets once in each


def _everybody(part: int) -> int:
    return part


def place(part: int, parts: int) -> int:
    """Which of the p chunks a part owns: the bits of its number in reverse."""
    bits = parts.bit_length() - 1
    return int(f"{part:0{bits}b}"[::-1], 2) if bits else 0


def _halves(part: int, parts: int, numel: int) -> list[tuple[int, Range, Range]]:
    """The partner, the half that is kept, and the half that is given away, for d = 1, 2, 4 ..."""
    bounds = [a for a, _ in cut(0, numel, parts)] + [numel]
    low, high, found = 0, parts, []
    for d in (1 << i for i in range(parts.bit_length() - 1)):
        middle = (low + high) // 2
        lower, upper = (bounds[low], bounds[middle]), (bounds[middle], bounds[high])
        if part & d:
            found.append((part ^ d, upper, lower))
            low = middle
        else:
            found.append((part ^ d, lower, upper))
            high = middle
    return found


def reduce_scatter(part: int, parts: int, numel: int, name: Name = _everybody) -> Plan:
    """Sum over 2^k parts, so that each ends up with the sum of the chunk at its `place`."""
    halves = _halves(part, parts, numel)
    return [[step([Send(name(q), *give, SUM)], [Receive(name(q), *keep, SUM, True)]) for q, keep, give in halves]]


def all_gather(part: int, parts: int, numel: int, name: Name = _everybody) -> Plan:
    """Collect the chunks that reduce_scatter left, so that every part has the whole vector."""
    halves = reversed(_halves(part, parts, numel))
    return [[step([Send(name(q), *keep, COPY)], [Receive(name(q), *give, COPY, False)]) for q, keep, give in halves]]


def all_reduce(member: int, members: int, numel: int) -> Plan:
    parts = 1 << (members.bit_length() - 1)
    surplus = members - parts
    before: Stream = []
    after: Stream = []
    if member < 2 * surplus:
        neighbour = member ^ 1
        if member % 2:
            fold, unfold = Send(neighbour, 0, numel, FOLD), Receive(neighbour, 0, numel, UNFOLD, False)
            return [[step([fold], [unfold])]]
        before = [step(receives=[Receive(neighbour, 0, numel, FOLD, True)])]
        after = [step([Send(neighbour, 0, numel, UNFOLD)])]
    part = member // 2 if member < 2 * surplus else member - surplus

    def name(part: int) -> int:
        return 2 * part if part < surplus else part + surplus

    middle = reduce_scatter(part, parts, numel, name)[0] + all_gather(part, parts, numel, name)[0]
    return [before + middle + after]


def seconds(members: int, nbytes: int, costs: Costs) -> float:
    rounds = members.bit_length() - 1
    share = (1 - 1 / (1 << rounds)) * nbytes
    if members > 1 << rounds:
        share, rounds = share + nbytes, rounds + 1
    return 2 * rounds * costs.latency + 2 * share * costs.byte + share * costs.reduce


HALVING = Algorithm("halving", "recursive halving and doubling", all_reduce, seconds)
