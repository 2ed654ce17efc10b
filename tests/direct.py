"""Letters straight to one server, without clients and greenlets: for very many reads."""

import random

import torch
from network import Hub, MemoryComm, flat_layout

from torrential.comm.protocol import SERVERS, Letter
from torrential.optimizers import OptimizerSpec
from torrential.server import ring
from torrential.server.consistency import Consistency
from torrential.server.messages import Done, Pull, Push, View
from torrential.server.server import Server
from torrential.server.shard import Initial


class Desk(MemoryComm):
    """Answers pile up by worker."""

    def __init__(self, hub, workers):
        super().__init__(hub, SERVERS)
        self.answers = {rank: [] for rank in range(workers)}

    def post(self, to, message, tensors=()):
        assert isinstance(message, Done)
        self.answers[to].append((message, [t.clone() for t in tensors]))


def many_reads(staleness, workers, reads, seed):
    """Each push adds one to the worker's own element, so element r is the number of r's clocks that a read contains.
    Workers take turns at random; some are slow for a while. Returns how many reads were checked."""
    rng = random.Random(seed)
    hub = Hub()
    hub.view = View(0, tuple(range(workers)), ring.begin([SERVERS], workers))
    desk = Desk(hub, workers)
    server = Server(
        desk, flat_layout(workers), OptimizerSpec(torch.optim.SGD, 1.0), Consistency(staleness),
        initial=Initial(torch.zeros(workers)),
    )  # fmt: skip
    clocks, seqs, reading = [0] * workers, [0] * workers, [False] * workers
    ones = [-torch.eye(workers)[rank] for rank in range(workers)]
    again = [0] * workers
    spans, checked, slow = ((0, workers),), 0, 0
    while checked < reads:
        if rng.random() < 0.02:
            slow = rng.randrange(workers)
        rank = rng.randrange(workers)
        if rank == slow and rng.random() < 0.8:
            continue
        if not reading[rank]:
            seqs[rank] += 1
            common = {"seq": seqs[rank], "floor": seqs[rank], "view": 0, "spans": spans}
            server.handle(Letter(rank, Pull(clock=clocks[rank], **common), []))
            reading[rank] = True
        if desk.answers[rank]:
            (done, (seen,)) = desk.answers[rank].pop()
            assert done.seq == seqs[rank]
            found, clock = seen.tolist(), clocks[rank]
            assert min(found) >= clock - staleness, (found, clock)
            assert found[rank] == clock
            assert max(found) <= clock + staleness + 1
            checked += 1
            again[rank] = (again[rank] + 1) % 4  # four reads to a clock
            if again[rank]:
                reading[rank] = False
                continue
            seqs[rank] += 1
            common = {"seq": seqs[rank], "floor": seqs[rank], "view": 0, "spans": spans}
            server.handle(Letter(rank, Push(clock=clock, lr=1.0, **common), [ones[rank]]))
            clocks[rank] += 1
            if staleness:
                assert desk.answers[rank].pop()[0].seq == seqs[rank]
            reading[rank] = False
        if staleness == 0:
            for answers in desk.answers.values():
                answers[:] = [answer for answer in answers if answer[1]]
    return checked
