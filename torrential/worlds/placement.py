"""Which roles are on which host: a pure function of the roles and of the hosts that are there.

Workers are in blocks of ranks, near-equal; servers one on each host in turn, so that a server and its replicas are on
different ones; coordinators and the observer are on host 0. A role whose host is gone goes to the host that has the
fewest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from torrential.comm.protocol import address_of, role_of
from torrential.errors import BadInput


class Seat(NamedTuple):
    """The place of a role on its host."""

    host: int
    number: int  # among the roles of its name there
    beside: int  # how many of its name the host is meant to have


class Placement:
    def __init__(self, hosts: int, counts: Mapping[str, int], wishes: Mapping[int, int] | None = None) -> None:
        """`counts`: members by role; `wishes`: hosts by the address of a role that is to be elsewhere than by rule."""
        self._hosts, self._counts = hosts, counts
        self._wishes = wishes or {}
        self._now: dict[int, int] = {}  # hosts by address

    def seat(self, address: int, hosts: Collection[int]) -> Seat:
        """Where a role is to be, given the hosts that are there."""
        role, number = role_of(address)
        host = self.meant(address)
        if host not in hosts:
            load = Counter(at for other, at in self._now.items() if other != address)
            host = min(hosts, key=lambda one: (load[one], one))
        self._now[address] = host
        meant = [n for n in range(self._counts.get(role, 0)) if self.meant(address_of(role, n)) == host]
        return Seat(host, meant.index(number) if number in meant else len(meant), max(1, len(meant)))

    def count(self, role: str, members: int, host: int) -> int:
        """How many of a role's members a host is meant to have."""
        return sum(self.meant(address_of(role, number)) == host for number in range(members))

    def meant(self, address: int) -> int:
        """The host of a role as long as all hosts are there."""
        if address in self._wishes:
            return self._wishes[address]
        role, number = role_of(address)
        if role == "worker":
            return number * self._hosts // max(1, self._counts["worker"])
        return number % self._hosts if role == "server" else 0


def read_wishes(text: str, hosts: int, counts: Mapping[str, int]) -> dict[int, int]:
    """The setting `placement`: as in observer:2,server-1:0."""
    wishes: dict[int, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, host = part.rpartition(":")
        role, _, number = name.partition("-")
        if not host.isdigit() or not (number.isdigit() or (role, number) == ("observer", "")):
            raise BadInput(f"placement takes ROLE-NUMBER:HOST, as in observer:2,server-1:0 (given: {part!r})")
        if int(number or 0) >= counts.get(role, 0):
            raise BadInput(f"placement: the run has no {name} (given: {part!r})")
        if int(host) >= hosts:
            raise BadInput(f"placement: hosts are numbered from 0 to {hosts - 1} (given: {part!r})")
        wishes[address_of(role, int(number or 0))] = int(host)
    return wishes
