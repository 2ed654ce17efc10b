"""All-gather in log2(members) rounds (Bruck et al. 1997): in each round everybody has twice as much as before.

    round 0   member i sends its own part to i - 1, and has i, i + 1
    round 1   sends these two to i - 2, and has i .. i + 3
    round k   sends what it has, at most what the other lacks, to i - 2^k

Members x log2(members) messages in place of members x (members - 1): for small parts of many members.
"""

from __future__ import annotations

from torrential.comm.schedules.base import Exchange, Plan, Range, Receive, Send, Stream, step


def all_gather(member: int, members: int, numel: int) -> Plan:
    """Send part i of every member i to everybody, in a vector of members x numel."""
    stream: Stream = []
    reach, key = 1, 0
    while reach < members:
        count = min(reach, members - reach)
        mine = _parts(member, count, members, numel)
        theirs = _parts(member + reach, count, members, numel)
        stream.append(_round((member - reach) % members, (member + reach) % members, mine, theirs, key))
        reach, key = 2 * reach, key + 2
    return [stream]


def _round(to: int, source: int, mine: list[Range], theirs: list[Range], key: int) -> Exchange:
    sends = [Send(to, a, b, key + i) for i, (a, b) in enumerate(mine)]
    receives = [Receive(source, a, b, key + i, False) for i, (a, b) in enumerate(theirs)]
    return step(sends, receives)


def _parts(first: int, count: int, members: int, numel: int) -> list[Range]:
    """Parts first .. first + count - 1, around the end."""
    first %= members
    last = first + count
    pieces = [(first, min(last, members)), (0, last - members)]
    return [(a * numel, b * numel) for a, b in pieces if a < b]
