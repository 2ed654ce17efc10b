"""Binary blocks: recursive halving for any number of members, as in Gloo.

One block per set bit of p, the largest first. Each block halves on its own; from the smallest up, a member cuts the
chunk it owns among the owners in the next larger block, which add. The total then travels back the same way.

    p = 6      1. halve inside        2. up, 3. down                        4. double inside
    {0,1,2,3}  own a quarter each     <── half 0 ──> owners of quarters 0, 1    all-gather
    {4,5}      own a half each        <── half 1 ──> owners of quarters 2, 3    all-gather

A block first receives from the smaller one, then sends to the larger. Owners sit at bit-reversed places.

Seconds, with blocks of b_1 > b_2 > ..: those of halving among b_1, and for each smaller block b on the way
2 alpha + 2 n/b beta + n/b gamma: little if the sizes are near (16+8), much if not (16+1).
"""

from __future__ import annotations

from torrential.comm.schedules import halving
from torrential.comm.schedules.base import Algorithm, Costs, Plan, Receive, Send, cut, step

UP, DOWN = 0, 1  # keys; members of different blocks meet nowhere else


def sizes(members: int) -> list[int]:
    return [1 << i for i in reversed(range(members.bit_length())) if members >> i & 1]


def all_reduce(member: int, members: int, numel: int) -> Plan:
    blocks = sizes(members)
    which = next(i for i in range(len(blocks)) if member < sum(blocks[: i + 1]))
    size, first = blocks[which], sum(blocks[:which])
    part = member - first
    mine = halving.place(part, size)

    def name(part: int) -> int:
        return first + part

    smaller: list[tuple[int, int, int]] = []  # of the next smaller block: who shares my chunk, and its range
    if which + 1 < len(blocks):
        other = blocks[which + 1]
        owner = first + size + halving.place(mine * other // size, other)
        smaller = [(owner, *cut(0, numel, size)[mine])]
    larger: list[tuple[int, int, int]] = []  # of the next larger block: who owns the pieces of mine
    if which:
        other = blocks[which - 1]
        ratio, pieces = other // size, cut(0, numel, other)
        owners = range(mine * ratio, (mine + 1) * ratio)
        larger = [(first - other + halving.place(u, other), *pieces[u]) for u in owners]
    between = [
        step(receives=[Receive(*s, UP, True) for s in smaller]),
        step([Send(*s, UP) for s in larger], [Receive(*s, DOWN, False) for s in larger]),
        step([Send(*s, DOWN) for s in smaller]),
    ]
    down = halving.all_gather(part, size, numel, name)[0]
    return [halving.reduce_scatter(part, size, numel, name)[0] + between + down]


def seconds(members: int, nbytes: int, costs: Costs) -> float:
    largest, *others = sizes(members)
    hops = sum(2 * costs.latency + nbytes / b * (2 * costs.byte + costs.reduce) for b in others)
    return halving.seconds(largest, nbytes, costs) + hops


BLOCKS = Algorithm("blocks", "halving in binary blocks", all_reduce, seconds)
