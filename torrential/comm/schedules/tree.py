"""Double binary tree, as in NCCL: two trees carry half of the vector each, in chunks that follow one another.

Sums travel up to the root and back down. A member that is inside one tree is a leaf of the other, so that both
directions of each member are used alike: at most 2n sent by any member, 2(p-1) n in all, depth at most ceil(log2 p).

    tree A of 8    0            With b the lowest set bit of r > 0: the parent is (r ^ b) | 2b, or r ^ b if there is
                   └─4          no such member; the children r - b/2 and r + b/2, whose offset halves until it exists.
                   ┌─┴─┐        The root's only child is the highest power of two below p.
                   2   6
                  ┌┴┐ ┌┴┐       Tree B: r plays p-1-r if p is even, r-1 mod p if it is odd.
                  1 3 5 7

Seconds: 2 log2(p) alpha + 2 n beta + n gamma; the pipeline's filling is left out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torrential.comm.schedules.base import Algorithm, Costs, Plan, Range, Receive, Send, Stream, cut, step

CHUNK = 1 << 16  # elements that travel as one
MOST_CHUNKS = 16


class Node(NamedTuple):
    """A member's place in a tree."""

    parent: tuple[int, ...]  # none or one
    children: tuple[int, ...]


def first(member: int, members: int, root: int = 0) -> Node:
    """Tree A, turned so that any member may be its root."""
    place = (member - root) % members
    low = place & -place
    parent: tuple[int, ...] = ()
    children: tuple[int, ...] = ()
    if place == 0:
        children = (1 << ((members - 1).bit_length() - 1),) if members > 1 else ()
    else:
        up = (place ^ low) | (low << 1)
        parent = (up if up < members else place ^ low,)
        offsets = [low >> i for i in range(1, low.bit_length())]
        right = next((o for o in offsets if place + o < members), None)
        children = (place - low // 2,) if low > 1 else ()
        children += (place + right,) if right else ()
    return Node(tuple((p + root) % members for p in parent), tuple((c + root) % members for c in children))


def second(member: int, members: int) -> Node:
    """The place of a member in the second tree (B)."""
    if members % 2:
        return first(member, members, root=1 % members)
    node = first(members - 1 - member, members)
    return Node(tuple(members - 1 - p for p in node.parent), tuple(members - 1 - c for c in node.children))


def _flow(sources: tuple[int, ...], targets: tuple[int, ...], part: Range, add: bool, tree: int = 0) -> Stream:
    """Chunk after chunk: received from the sources, then sent to the targets while the next one is received."""
    count = max(1, min(MOST_CHUNKS, math.ceil((part[1] - part[0]) / CHUNK)))
    receives, sends = [], []
    for i, (a, b) in enumerate(cut(*part, count)):
        receives.append([Receive(s, a, b, 2 * i + tree, add) for s in sources])
        sends.append([Send(t, a, b, 2 * i + tree) for t in targets])
    return [step(s, r) for s, r in zip([[], *sends], [*receives, []], strict=True)]


def reduce(member: int, members: int, numel: int, root: int = 0) -> Plan:
    """The sum, with the root; the others' vectors hold parts of it."""
    node = first(member, members, root)
    return [_flow(node.children, node.parent, (0, numel), add=True)]


def broadcast(member: int, members: int, numel: int, root: int = 0) -> Plan:
    node = first(member, members, root)
    return [_flow(node.parent, node.children, (0, numel), add=False)]


def all_reduce(member: int, members: int, numel: int) -> Plan:
    plan: Plan = []
    for tree, (node, half) in enumerate(zip((first, second), cut(0, numel, 2), strict=True)):
        parent, children = node(member, members)
        if parent:
            plan += [_flow(children, parent, half, True, tree), _flow(parent, children, half, False, tree)]
        else:
            plan += [_flow(children, children, half, True, tree)]
    return plan


def seconds(members: int, nbytes: int, costs: Costs) -> float:
    if members == 1:
        return 0.0
    return 2 * math.log2(members) * costs.latency + nbytes * (2 * costs.byte + costs.reduce)


TREE = Algorithm("tree", "two binary trees, in chunks", all_reduce, seconds)
