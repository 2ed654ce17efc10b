"""Clients with data of their own: partitions, federated averaging by hand, equivalences, those that drop out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import torrential as tt
from tests.killing import Killing
from tests.test_averaging import SAMPLES, data, task
from tests.test_equivalence import assert_equal_models, fresh
from torrential.data.clients import Clients, clients_of
from torrential.data.deal import Deal
from torrential.errors import BadInput
from torrential.records import Event, Step


def train(strategy: Any, out: Path, of: tt.Task | None = None, **options: Any) -> tt.TrainResult:
    given = {"workers": 2, "world": "sim", "out": out, "progress": False}
    return tt.train(of or task(), strategy, **given | options)


def labelled(samples: int, labels: int = 10) -> TensorDataset:
    return TensorDataset(torch.zeros(samples, 6), torch.arange(samples) % labels)


def indices_of(clients: Clients) -> list[list[int]]:
    """The samples of each client, as one epoch gives them."""
    return [
        [int(i) for batch in clients.batches(client, 0, 8, steps=0, epochs=1) for i in batch.indices]
        for client in range(len(clients))
    ]


# -- partitions -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("given", [tt.partition(7), tt.partition(7, alpha=0.1), tt.partition(7, labels=2)], ids=str)
def test_every_sample_is_one_clients(given: Any) -> None:
    clients = clients_of(task(train=labelled(100), partition=given), 3, 0)
    dealt = indices_of(clients)
    assert sorted(index for mine in dealt for index in mine) == list(range(100))
    assert [len(mine) for mine in dealt] == clients.sizes
    assert max(clients.sizes) - min(clients.sizes) <= (2 if given.labels else 1)
    assert dealt == indices_of(clients_of(task(train=labelled(100), partition=given), 3, 0))
    assert dealt != indices_of(clients_of(task(train=labelled(100), partition=given), 4, 0))


def test_the_smaller_alpha_the_fewer_labels() -> None:
    """The mean share of a client's commonest label: nearly all at 0.01, a tenth (and chance) of all at 1,000."""
    found = {}
    for alpha in (0.01, 1.0, 1000.0):
        of = task(train=labelled(5000), partition=tt.partition(50, alpha=alpha))
        commonest = [Counter(i % 10 for i in mine).most_common(1)[0][1] for mine in indices_of(clients_of(of, 0, 0))]
        found[alpha] = sum(commonest) / 5000
    assert found[0.01] > 0.8 and 0.25 < found[1.0] < 0.5 and found[1000.0] < 0.2


def test_clients_have_so_many_labels() -> None:
    dealt = indices_of(clients_of(task(train=labelled(1000), partition=tt.partition(20, labels=2)), 0, 0))
    assert max(len({index % 10 for index in mine}) for mine in dealt) <= 4  # a piece may be of two
    assert sum(len({index % 10 for index in mine}) for mine in dealt) / 20 < 2.5


def test_a_client_goes_on_where_it_was() -> None:
    """By steps: minibatches of one pass after the other, each in the order of the epoch that the client is in."""
    clients, order = (
        clients_of(task(train=data(40), partition=[list(range(10)), list(range(10, 40))]), 0, 0),
        Deal(40, 0).order,
    )
    first = clients.batches(0, 0, 4, steps=2, epochs=1)
    second = clients.batches(0, 8, 4, steps=2, epochs=1)
    expected = [[int(i) for i in order.whole(epoch) if i < 10] for epoch in (0, 1)]
    assert [batch.indices.tolist() for batch in first + second] == [
        expected[0][:4],
        expected[0][4:8],
        expected[0][8:],
        expected[1][:4],
    ]
    assert [(batch.epoch, batch.first) for batch in first + second] == [(0, 0), (0, 4), (0, 8), (1, 0)]


def test_samples_of_nobody_are_left_out(tmp_path: Path) -> None:
    of = task(partition=[[0, 1, 2, 3], [5, 6, 7]])
    made = train(tt.FedAvg(), tmp_path / "run", of, steps=2)
    assert made.summary.samples == 14


def test_a_list_of_indices_is_of_what_the_user_gave(tmp_path: Path) -> None:
    """A validation set that is cut from train takes samples from the clients that have them."""
    of = task(validation=None, partition=[list(range(48)), list(range(48, 96))])
    made = train(tt.FedAvg(), tmp_path / "run", of, steps=1)
    assert made.summary.samples == 96 - 9


class Items(Dataset[Any]):
    """A data set that is read item by item."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(6), index % 3


def test_labels_are_read_item_by_item_where_they_have_to_be() -> None:
    dealt = indices_of(clients_of(task(train=Items(), partition=tt.partition(3, labels=1)), 0, 0))
    assert [len({index % 3 for index in mine}) for mine in dealt] == [1, 1, 1]


# -- equivalences -----------------------------------------------------------------------------------------------------
def by_hand(of: tt.Task, partition: list[list[int]], rounds: list[list[int]], **sgd: float) -> nn.Module:
    """Federated averaging as a plain loop: in every round some clients, each with one pass over its data."""
    model, passes = fresh(of), Counter[int]()
    for chosen in rounds:
        total, sums = (
            sum(len(partition[client]) for client in chosen),
            [torch.zeros_like(p) for p in model.parameters()],
        )
        for client in chosen:
            replica = fresh(of)
            replica.load_state_dict(model.state_dict())
            optimizer = torch.optim.SGD(replica.parameters(), **sgd)
            order = [i for i in Deal(SAMPLES, 0).order.whole(passes[client]).tolist() if i in set(partition[client])]
            passes[client] += 1
            for first in range(0, len(order), of.batch_size):
                x, y = of.train[order[first : first + of.batch_size]]
                optimizer.zero_grad()
                F.cross_entropy(replica(x), y).backward()
                optimizer.step()
            for mean, p in zip(sums, replica.parameters(), strict=True):
                mean.add_(p.detach(), alpha=len(partition[client]) / total)
        with torch.no_grad():
            for p, mean in zip(model.parameters(), sums, strict=True):
                p.copy_(mean)
    return model


UNEVEN = [list(range(0, 8)), list(range(8, 20)), list(range(20, 50)), list(range(50, 96))]


@pytest.mark.parametrize("world", ["local", "sim"])
@pytest.mark.parametrize("workers", [1, 3])
def test_fedavg_is_a_loop_over_clients_that_are_averaged(world: str, workers: int, tmp_path: Path) -> None:
    of = task(tt.optimizer("sgd", lr=0.1, momentum=0.9), partition=UNEVEN)
    made = train(tt.FedAvg(sampled=2), tmp_path / "run", of, steps=3, world=world, workers=workers)
    clients = clients_of(of, 0, 0)
    rounds = [clients.sampled(2, number) for number in range(3)]
    assert_equal_models(made.model, by_hand(of, UNEVEN, rounds, lr=0.1, momentum=0.9), 1e-6)
    assert made.summary.samples == sum(len(UNEVEN[client]) for chosen in rounds for client in chosen)


@pytest.mark.parametrize(("workers", "world"), [(1, "sim"), (2, "sim"), (4, "sim"), (2, "local")])
def test_one_local_step_of_all_clients_is_allreduce(workers: int, world: str, tmp_path: Path) -> None:
    """Of equal clients that have a minibatch each: a round and a joined batch are of the same samples."""
    of = task(batch_size=24, epochs=5)
    made = train(tt.FedAvg(clients=4, local_steps=1), tmp_path / "made", of, workers=workers, world=world)
    other = train(tt.AllReduce(), tmp_path / "other", of, workers=4)
    assert made.summary.steps == other.summary.steps == 5
    assert_equal_models(made.model, other.model, 1e-6)


def test_one_client_is_plain_training(tmp_path: Path) -> None:
    """A pass with momentum is a round; the next one begins without."""
    momentum = tt.optimizer("sgd", lr=0.1, momentum=0.9)
    made = train(tt.FedAvg(), tmp_path / "made", task(momentum, epochs=1), workers=1)
    other = train(tt.AllReduce(), tmp_path / "other", task(momentum, epochs=1), workers=1)
    assert made.summary.steps == 1 and made.summary.samples == SAMPLES
    assert_equal_models(made.model, other.model, 1e-6)


def test_several_passes_in_a_round(tmp_path: Path) -> None:
    made = train(tt.FedAvg(local_epochs=3), tmp_path / "made", task(epochs=9), steps=2)
    assert made.summary.samples == 2 * 3 * SAMPLES


def test_statistics_of_batch_norm_are_averaged(tmp_path: Path) -> None:
    normed = task(model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)))
    one, both = (train(tt.FedAvg(clients=4), tmp_path / f"{n}", normed, steps=2, workers=n) for n in (1, 2))
    for name in ("running_mean", "running_var"):
        mine, theirs = (getattr(made.model[1], name) for made in (one, both))
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)
    assert not torch.equal(both.model[1].running_mean, torch.zeros(8))


# -- going on, and dropping out ---------------------------------------------------------------------------------------
def left_out(made: tt.TrainResult) -> list[str]:
    return [
        record.detail for record in made.history if isinstance(record, Event) and record.event == "clients_left_out"
    ]


def test_clients_of_a_worker_that_dies_are_left_out(tmp_path: Path) -> None:
    """The worker of clients 1 and 3 dies in the first round: that is one of clients 0 and 2 alone, from its beginning,
    and with the samples that those have."""
    cluster = {"compute": {"seconds_per_sample": 1e-3}, "faults": [{"kind": "crash", "worker": 1, "at": 0.02}]}
    of = task(partition=UNEVEN)
    made = train(tt.FedAvg(), tmp_path / "run", of, steps=1, cluster=cluster)
    assert left_out(made) == ["2 of 4 of a round: their worker is gone"]
    assert made.summary.samples == 8 + 30
    assert_equal_models(made.model, by_hand(of, UNEVEN, [[0, 2]], lr=0.1), 1e-6)


def test_clients_come_back_with_their_worker(tmp_path: Path) -> None:
    fault = {"kind": "crash", "worker": 1, "at": 0.3, "lasts": 5.0}
    cluster = {"compute": {"seconds_per_sample": 1e-2}, "faults": [fault]}
    made = train(tt.FedAvg(), tmp_path / "run", task(partition=UNEVEN, epochs=99), steps=40, cluster=cluster)
    gone = len(left_out(made))
    assert 1 <= gone < 40 and made.summary.samples == 40 * SAMPLES - gone * (12 + 46)


def test_a_worker_that_is_killed(tmp_path: Path) -> None:
    killing = Killing("tt-worker-1", lambda record: isinstance(record, Step) and record.step >= 2)
    of = task(partition=UNEVEN, epochs=60)
    made = train(tt.FedAvg(), tmp_path / "run", of, world="local", restart=True, listeners=[killing])
    assert killing.killed.is_set() and made.summary.samples >= 60 * SAMPLES


def test_a_thousand_clients_of_four_workers(tmp_path: Path) -> None:
    """What is sent depends on the workers, not on how many clients they have in a round."""
    of = task(train=data(4000), partition=tt.partition(1000, alpha=0.1), epochs=9)
    few, many = (train(tt.FedAvg(share=s), tmp_path / f"{s}", of, workers=4, steps=4) for s in (0.1, 0.2))
    assert few.summary.samples == 4 * 100 * 4 and many.summary.samples == 4 * 200 * 4
    assert few.summary.bytes_sent == many.summary.bytes_sent


# -- bad input --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[0, 1], []], r"leaves a client without samples \(client: 1\); leave it out"),
        ([[0, 1], [1, 2]], r"clients 0 and 1 both have sample 1; give each sample to one client"),
        ([[0, 96]], r"client 0 has sample 96, of 96 in train; give indices of train"),
        ("abc", r"must come from partition\(\) or be a list of index lists \(got str\)"),
        ([1, 2], r"must come from partition\(\) or be a list of index lists \(got list\)"),
        (tt.partition(97), r"leaves a client without samples \(97 clients, 96 samples\); use fewer clients"),
    ],
    ids=str,
)
def test_refuses_partitions(given: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        task(partition=given)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), "much"])
def test_refuses_alphas(alpha: Any) -> None:
    with pytest.raises(BadInput, match=r"alpha must be a positive number \(got .*\); try alpha=1.0"):
        tt.partition(10, alpha=alpha)


def test_refuses_both_rules() -> None:
    with pytest.raises(BadInput, match="give alpha or labels, not both"):
        tt.partition(10, alpha=1.0, labels=2)


@pytest.mark.parametrize(
    ("options", "of", "message"),
    [
        (
            {"sampled": 5},
            {"partition": UNEVEN},
            r"more clients than there are \(sampled: 5, clients: 4\); use sampled=4",
        ),
        (
            {"clients": 5},
            {"partition": UNEVEN},
            r"other clients than asked for \(partition: 4, clients: 5\); leave out",
        ),
        ({"clients": 97}, {}, r"a client would have no samples \(clients: 97, samples: 96\); use clients=96 at most"),
        ({"clients": 1}, {}, r"a worker would have no client \(clients: 1, workers: 2\); leave out clients"),
        ({}, {"partition": [[1, 2]]}, r"a worker would have no client \(clients: 1, workers: 2\); use --workers 1"),
        ({"share": 0.0}, {}, "share"),
    ],
    ids=str,
)
def test_refuses(options: dict[str, Any], of: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message):
        train("fedavg", tmp_path / "run", task(**of), **options)


def test_refuses_labels_that_are_no_labels(tmp_path: Path) -> None:
    of = task(
        train=TensorDataset(torch.zeros(20, 6), torch.rand(20)),
        validation=data(8),
        loss=lambda out, _: out.mean(),
        metric=lambda out, _: out.mean(),
        partition=tt.partition(2, alpha=1.0),
    )
    with pytest.raises(BadInput, match=r"needs .input, label. pairs with whole numbers as labels"):
        train(tt.FedAvg(), tmp_path / "run", of)


def test_refuses_loaders(tmp_path: Path) -> None:
    of = task(train=Items(), partition=tt.partition(3))
    with pytest.raises(BadInput, match=r"read their data by themselves \(loaders: 1\); leave out loaders"):
        train(tt.FedAvg(), tmp_path / "run", of, world="local", loaders=1)
