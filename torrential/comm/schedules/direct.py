"""Each slice straight to its owner, which adds it up and sends the sum to everybody: as a parameter server would.

    reduce-scatter   slice j of everybody ──> member j        2 rounds of p-1 messages each;
    all-gather       slice j of member j  ──> everybody       2(p-1)/p n sent per member, fan-in p-1

Seconds: 2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma. Sums are in order of rank, to the last bit those of shared
memory; owners are those of `protocol.slices`.
"""

from __future__ import annotations

from torrential.comm.protocol import slices
from torrential.comm.schedules.base import Algorithm, Costs, Exchange, Plan, Range, Receive, Send, step


def _exchange(member: int, give: list[Range], take: list[Range], key: int, add: bool) -> Exchange:
    """Part give[i] to every other member i, and part take[i] from it. Everybody begins with its neighbour."""
    others = [(member + i) % len(give) for i in range(1, len(give))]
    sends = [Send(i, *give[i], key) for i in others]
    return step(sends, [Receive(i, *take[i], key, add) for i in others])


def reduce_scatter(member: int, members: int, numel: int) -> Plan:
    cuts = slices(numel, members)
    return [[_exchange(member, cuts, [cuts[member]] * members, 0, add=True)]]


def all_gather(member: int, members: int, numel: int) -> Plan:
    cuts = slices(numel, members)
    return [[_exchange(member, [cuts[member]] * members, cuts, 1, add=False)]]


def share(member: int, members: int, numel: int) -> Plan:
    """Send part i of every member i to everybody, in a vector of members x numel."""
    parts = [(i * numel, (i + 1) * numel) for i in range(members)]
    return [[_exchange(member, [parts[member]] * members, parts, 0, add=False)]]


def all_to_all(member: int, members: int, numel: int) -> Plan:
    """Exchange parts in a vector of two halves, each members x numel: part i of the first half goes to member i; part j
    of the second half is what member j had for us."""
    give = [(i * numel, (i + 1) * numel) for i in range(members)]
    take = [(a + members * numel, b + members * numel) for a, b in give]
    return [[_exchange(member, give, take, 0, add=False)]]


def all_reduce(member: int, members: int, numel: int) -> Plan:
    return [reduce_scatter(member, members, numel)[0] + all_gather(member, members, numel)[0]]


def seconds(members: int, nbytes: int, costs: Costs) -> float:
    share = (members - 1) / members * nbytes
    return 2 * (members - 1) * costs.latency + 2 * share * costs.byte + share * costs.reduce


DIRECT = Algorithm("direct", "each slice straight to its owner and back", all_reduce, seconds)
