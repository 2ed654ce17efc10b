"""What a worker will train on next, as far as that can be known, so that loaders can read it ahead.

joined batches       the next ones follow from the place in the data, unless members change
leases, one joined   likewise
leases as one comes  taken ahead: a worker holds a few, and gives back what it does not train on
... of one clock     guessed (a checkpoint of such a run relies on no worker having samples of a later clock)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from torrential.config import RunConfig
from torrential.data.deal import Deal, Order, part
from torrential.data.loaders import Loaders, Place
from torrential.errors import WaitedTooLong
from torrential.server.client import Answer, Client, PendingRequest
from torrential.strategies.roles import Servers

MOMENT_SECONDS = 0.002  # longer than an answer takes to come, if there is one


class LookAhead:
    """Tells a worker's loaders what comes next."""

    def __init__(self, loaders: Loaders, config: RunConfig, order: Order, servers: Servers | None) -> None:
        self._loaders, self._config, self._order, self._servers = loaders, config, order, servers
        self._leases: deque[Answer] = deque()  # taken ahead
        self._pending: PendingRequest | None = None  # the request for one more
        self._dry = False  # whether there was nothing to take ahead any more

    def share(self, deal: Deal, member: int, members: int, batches: int) -> None:
        """A worker takes its share of the joined batch at a place; the following ones come next."""
        ahead = Deal(deal.samples, deal.seed, deal.epoch, deal.cursor, self._order)
        places: list[Place] = []
        for _ in range(self._loaders.depth + 1):
            if ahead.epoch >= self._config.epochs or len(places) >= batches + self._loaders.depth:
                break
            share = ahead.share(member, members, self._config.batch_size, batches)
            places += [(batch.epoch, batch.first, batch.stop) for batch in share.batches]
            ahead.advance(share.total)
        self._loaders.expect(places)

    def told(self, epoch: int, first: int, last: int) -> None:
        """Another worker has taken a lease for this one, too."""
        self._loaders.expect([*self._minibatches(Answer(indices=(first, last), epoch=epoch))])

    def forget(self) -> None:
        """The leases that were taken ahead are not this worker's any more."""
        self._leases.clear()
        self._pending, self._dry = None, False

    def take(self, client: Client, count: int, clock: int, after: int, workers: Sequence[int], rank: int) -> Answer:
        """The next lease of samples from the servers."""
        assert self._servers is not None
        if not self._servers.joined and not self._servers.consistency.aggregates:
            return self._take_ahead(client, count, clock, after)
        answer = client.take(count, clock=clock, after=after).wait()
        first, last = answer.indices
        if first == last or rank not in workers:
            return answer
        member, members = workers.index(rank), len(workers)
        if self._servers.joined:
            cursor = first - part(answer.total, member, members, count)[0]
            self.share(Deal(self._order.samples, self._order.seed, answer.epoch, cursor), member, members, 1)
        else:
            self._loaders.expect([*self._guess(answer, count, members)])
        return answer

    def _guess(self, answer: Answer, count: int, members: int) -> Iterator[Place]:
        """The places of this lease and the next ones, if workers come in the same order every time."""
        samples = self._order.samples
        begin = answer.epoch * samples + answer.indices[0]
        for number in range(self._loaders.depth + 1):
            epoch, first = divmod(begin + number * count * members, samples)
            if epoch < self._config.epochs:
                yield epoch, first, min(samples, first + count)

    # -- leases that are taken ahead ----------------------------------------------------------------------------------
    def _take_ahead(self, client: Client, count: int, clock: int, after: int) -> Answer:
        if not self._leases:
            pending = self._pending or client.take(count, clock=clock, after=after)
            self._pending = None
            self._leases.append(pending.wait())
        answer = self._leases.popleft()
        if answer.lease:
            self._fill(client, count, clock, after)
            self._loaders.expect([place for lease in (answer, *self._leases) for place in self._minibatches(lease)])
        return answer

    def _fill(self, client: Client, count: int, clock: int, after: int) -> None:
        """Take more leases, as long as they are to be had at once. One request at a time: servers keep one of each
        worker, and it says at which clock the worker is, so a later clock may not be named yet."""
        while not self._dry and len(self._leases) < self._loaders.depth:
            self._pending = self._pending or client.take(count, clock=clock, after=after)
            try:
                answer = self._pending.wait(MOMENT_SECONDS)
            except WaitedTooLong:
                return
            self._pending = None
            self._dry = not answer.lease
            if answer.lease:
                self._leases.append(answer)

    def _minibatches(self, lease: Answer) -> Iterator[Place]:
        first, last = lease.indices
        for start in range(first, last, self._config.batch_size):
            yield lease.epoch, start, min(last, start + self._config.batch_size)

    def give_up(self, client: Client) -> None:
        """Give back the leases that were taken ahead; nothing more will be trained on."""
        if self._pending is not None:
            client.give_back(0).wait()  # afterwards it has been answered, or never will be
            if self._pending.done():
                self._leases.append(self._pending.wait())
            else:
                client.forget(self._pending)
            self._pending = None
        while self._leases:
            if lease := self._leases.popleft().lease:
                client.give_back(lease).wait()
