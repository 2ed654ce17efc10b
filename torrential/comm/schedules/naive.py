"""Everything to one member, which adds it up and sends it back.

    1 ─┐          ┌─> 1
    2 ─┼─> 0 adds ┼─> 2        2 rounds; the root receives (p-1) n and sends (p-1) n
    3 ─┘          └─> 3

Seconds: 2 alpha + 2(p-1) n beta at the root, which also adds (p-1) n.
"""

from __future__ import annotations

from torrential.comm.schedules.base import Algorithm, Costs, Plan, Receive, Send, step


def reduce(member: int, members: int, numel: int) -> Plan:
    """The sum, with member 0."""
    if member:
        return [[step([Send(0, 0, numel, 0)])]]
    return [[step(receives=[Receive(r, 0, numel, 0, True) for r in range(1, members)])]]


def broadcast(member: int, members: int, numel: int) -> Plan:
    """Member 0's vector to everybody."""
    if member:
        return [[step(receives=[Receive(0, 0, numel, 0, False)])]]
    return [[step([Send(r, 0, numel, 0) for r in range(1, members)])]]


def gather(member: int, members: int, numel: int, root: int = 0) -> Plan:
    """Send part i of every member i to the root, in a vector of members x numel."""
    parts = [(i * numel, (i + 1) * numel) for i in range(members)]
    if member != root:
        return [[step([Send(root, *parts[member], 0)])]]
    return [[step(receives=[Receive(i, *part, 0, False) for i, part in enumerate(parts) if i != root])]]


def all_reduce(member: int, members: int, numel: int) -> Plan:
    return [reduce(member, members, numel)[0] + broadcast(member, members, numel)[0]]


def seconds(members: int, nbytes: int, costs: Costs) -> float:
    if members == 1:
        return 0.0
    return 2 * costs.latency + (members - 1) * nbytes * (2 * costs.byte + costs.reduce)


NAIVE = Algorithm("naive", "one member adds up for all", all_reduce, seconds)
