"""The vector in p chunks that travel around a ring, first collecting sums, then carrying them to everybody.

Reduce-scatter, s = 0 .. p-2: member r sends chunk r-s to r+1 and adds the chunk r-1-s that comes from r-1 (all mod p).
Member r then owns the sum of chunk r+1. All-gather, s = 0 .. p-2: it sends chunk r+1-s and replaces chunk r-s.

    p = 3      s = 0            s = 1            owns
    member 0   c0 ->  <- c2     c2 ->  <- c1     c1
    member 1   c1 ->  <- c0     c0 ->  <- c2     c2
    member 2   c2 ->  <- c1     c1 ->  <- c0     c0

Seconds: 2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma. Every member only ever talks to its two neighbours.
"""

from __future__ import annotations

from torrential.comm.schedules.base import Algorithm, Costs, Plan, Receive, Send, Stream, cut, step


def _around(member: int, members: int, numel: int, first: int, key: int, add: bool) -> Stream:
    """p-1 steps: send chunk first - s onwards, receive chunk first - 1 - s."""
    chunks = cut(0, numel, members)
    after, before = (member + 1) % members, (member - 1) % members
    return [
        step(
            [Send(after, *chunks[(first - s) % members], key + s)],
            [Receive(before, *chunks[(first - 1 - s) % members], key + s, add)],
        )
        for s in range(members - 1)
    ]


def reduce_scatter(member: int, members: int, numel: int) -> Plan:
    """Member r ends up with the sum of chunk r+1."""
    return [_around(member, members, numel, member, 0, add=True)]


def all_gather(member: int, members: int, numel: int) -> Plan:
    """Pass the chunks on, from chunk r+1 at member r to the whole vector everywhere."""
    return [_around(member, members, numel, member + 1, members, add=False)]


def all_reduce(member: int, members: int, numel: int) -> Plan:
    return [reduce_scatter(member, members, numel)[0] + all_gather(member, members, numel)[0]]


def seconds(members: int, nbytes: int, costs: Costs) -> float:
    share = (members - 1) / members * nbytes
    return 2 * (members - 1) * costs.latency + 2 * share * costs.byte + share * costs.reduce


RING = Algorithm("ring", "chunks travel around a ring twice", all_reduce, seconds)
