"""Which server answers for which keys. Pure functions from one table of ranges to the next.

    begin     |-- A ----|-- B ----|            two servers; behind each range its replicas, the next servers in the ring
    join      |-- A -|a-|-- B -|b-|            C is put at the end of the chains of a and b, and is their heir
    promote   |-- A -|C-|-- B -|C-|            C is filled and answers for them
    leave     |-- B -|C-|-- B -|C-|            A is gone: its first replica answers, another server is put at the end

A newcomer takes the tail of every server's share, so 1/(S+1) of the keys move, and none between old servers. Ranges are
cut and never joined again, so that a server can follow by cutting what it holds. No server is made the head of a range
that it does not hold: a newcomer is first filled as a replica, and `promote` is called when it says so
(server/server.py).

Cuts are aligned to cache lines; an optimizer that looks at whole tensors is cut at `bounds` only. Where stages of the
model are on several workers, ranges end where the stages' shares do (server/shares.py).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from torrential.comm.protocol import ALIGNMENT, SERVERS
from torrential.errors import BadInput, RunFailed
from torrential.server.messages import Range

Table = tuple[Range, ...]


def begin(
    servers: Sequence[int],
    numel: int,
    replicas: int = 0,
    bounds: Sequence[int] | None = None,
    shares: Sequence[int] = (),
) -> Table:
    """Near-equal ranges of [0, numel); `bounds` are the keys at which tensors begin, the first of them 0. They are cut
    once more where `shares` begin, for the same servers."""
    count = len(servers)
    if count < 1:
        raise BadInput(f"a parameter server needs a server (servers: {count}); use --servers 1")
    if not 0 <= replicas < count:
        raise BadInput(f"{replicas} replicas do not fit {count} servers (at most {count - 1}); use more servers")
    places = sorted(set(bounds)) if bounds is not None else None
    most = numel if places is None else len(places)
    if count > most:
        what = "parameters" if places is None else "tensors, which this optimizer needs whole"
        raise BadInput(f"{count} servers do not fit {most} {what}; use --servers {max(1, most)} or fewer")
    cuts = [0]
    for i in range(1, count):
        ideal = i * numel // count
        cuts.append(_place(ideal, numel, places, cuts[-1] + 1, count - i))
    stops = [*cuts[1:], numel]
    chains = [tuple(servers[(i + j) % count] for j in range(replicas + 1)) for i in range(count)]
    table = tuple(Range(a, b, chain) for a, b, chain in zip(cuts, stops, chains, strict=True))
    return tuple(piece for r in table for piece in _cut_at(r, shares))


def _cut_at(r: Range, keys: Sequence[int]) -> list[Range]:
    """A range in pieces that begin at these keys, as far as they lie in it."""
    starts = [r.start, *(key for key in keys if r.start < key < r.stop)]
    return [Range(a, b, r.chain) for a, b in zip(starts, [*starts[1:], r.stop], strict=True)]


def _place(ideal: int, numel: int, places: Sequence[int] | None, lowest: int, after: int) -> int:
    """The place to cut near `ideal`: at `lowest` or above, with room for `after` ranges (this one included) from
    there."""
    if places is not None:
        first = bisect_left(places, lowest)
        allowed = places[first : len(places) - after + 1]
        return min(allowed, key=lambda place: abs(place - ideal))
    aligned = -(-ideal // ALIGNMENT) * ALIGNMENT
    return min(max(aligned if numel >= ALIGNMENT * after + aligned else ideal, lowest), numel - after)


def join(table: Table, server: int, replicas: int = 0, bounds: Sequence[int] | None = None) -> Table:
    """The newcomer becomes the heir of the tail of every head's share, and a replica wherever one is missing."""
    assert all(server not in r.chain for r in table)
    owners = [r.chain[0] if r.heir is None else r.heir for r in table]
    shares = {owner: 0 for owner in owners}
    for owner, r in zip(owners, table, strict=True):
        shares[owner] += r.stop - r.start
    wanted = {owner: share // (len(shares) + 1) for owner, share in shares.items()}
    places = sorted(set(bounds)) if bounds is not None else None
    found: list[Range] = []
    for owner, r in zip(reversed(owners), reversed(table), strict=True):
        size = r.stop - r.start
        cut = r.start if wanted[owner] >= size else _cut(r, r.stop - wanted[owner], places)
        wanted[owner] = max(0, wanted[owner] - size)
        heir = (*r.chain, server)
        kept = heir if len(r.chain) <= replicas else r.chain
        pieces = [Range(r.start, cut, kept, r.heir), Range(cut, r.stop, heir, server)]
        found.extend(p for p in reversed(pieces) if p.start < p.stop)
    return tuple(reversed(found))


def _cut(r: Range, ideal: int, places: Sequence[int] | None) -> int:
    """Inside a range or at its end."""
    if places is not None:
        return min((p for p in [*places, r.stop] if r.start < p <= r.stop), key=lambda place: abs(place - ideal))
    aligned = -(-ideal // ALIGNMENT) * ALIGNMENT
    return aligned if aligned < r.stop else ideal


def promote(table: Table, server: int, replicas: int = 0) -> Table:
    """The newcomer, which is filled by now, becomes the head of what it is the heir of."""

    def after(r: Range) -> Range:
        if r.heir != server:
            return r
        return Range(r.start, r.stop, (server, *(a for a in r.chain if a != server))[: replicas + 1])

    return tuple(after(r) for r in table)


def leave(table: Table, server: int, replicas: int = 0) -> Table:
    """The table without a server, dead or dismissed. Chains that became too short get another server at their end."""
    remaining = sorted({a for r in table for a in r.chain} - {server})

    def after(r: Range) -> Range:
        if server not in r.chain and len(r.chain) > replicas:
            return r
        chain = tuple(a for a in r.chain if a != server)
        if not chain:
            raise RunFailed(
                f"parameters {r.start} to {r.stop} are lost: server {server - SERVERS} held the only copy; "
                "more servers (--servers) with more replicas (--set replicas=N) survive more deaths"
            )
        heir = r.heir if r.heir != server else None
        ring = _from(remaining, chain[-1])
        missing = max(0, replicas + 1 + (heir is not None) - len(chain))
        return Range(r.start, r.stop, chain + tuple(a for a in ring if a not in chain)[:missing], heir)

    return tuple(after(r) for r in table)


def _from(servers: Sequence[int], last: int) -> Iterable[int]:
    at = bisect_left(servers, last)
    return [*servers[at:], *servers[:at]]


def find(table: Table, key: int) -> int:
    """The number of the range that holds a key."""
    return bisect_right(table, key, key=lambda r: r.start) - 1
