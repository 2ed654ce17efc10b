"""A prepared loader: the script's own DataLoader, whose samples the run deals out to the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from torrential.data.deal import Batch, Deal, Order
from torrential.data.stream import StreamReader
from torrential.errors import BadInput, RunFailed
from torrential.loop.turns import BeginPass
from torrential.usercode import calling


def check_loader(loader: DataLoader[Any]) -> None:
    """Refuse a loader whose samples cannot be dealt out."""
    stream = isinstance(loader.dataset, IterableDataset)
    if stream and not hasattr(loader.dataset, "__len__"):
        raise BadInput(
            f"the loader reads a stream without a length ({type(loader.dataset).__name__}), and the run deals out a "
            "known number of samples; give it a __len__: the samples of an epoch"
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise BadInput("the loader has a batch_sampler of its own, and the run deals batches out; give batch_size=...")
    sampler = loader.sampler
    if not stream and type(sampler) not in (RandomSampler, SequentialSampler):
        raise BadInput(
            f"the loader has a sampler of its own ({type(sampler).__name__}), and the run deals samples out; give "
            "shuffle=True or False, and a torch.utils.data.Subset for some of the samples"
        )
    if isinstance(sampler, RandomSampler) and (sampler.replacement or len(sampler) != len(loader.dataset)):  # type: ignore[arg-type]
        raise BadInput("the loader draws samples with replacement, or some of them; the run deals each out once")
    if not len(loader.dataset):  # type: ignore[arg-type]
        raise BadInput("the loader's data set is empty; give it at least one sample")


def shuffles(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.sampler, RandomSampler)


def order_of(dataset: int, shuffle: bool, seed: int) -> Order:
    """The order of a data set's samples in each epoch."""
    return Order(dataset, seed, stream=not shuffle)  # a stream without a window is read as it lies


def one_part(order: Order, samples: int, member: int, members: int, batch_size: int) -> Iterator[Batch]:
    """A member's batches of the first epoch, cut as in a run without deaths."""
    deal = Deal(samples, order.seed, order=order)
    while deal.epoch == 0:
        share = deal.share(member, members, batch_size)
        yield from share.batches
        deal.advance(share.total)


@dataclass
class Pass:
    """The script's way through its loader once."""

    epoch: int
    trained: int  # how often backward and step had been called when it began
    handed: int = 0  # batches that the script was given
    ended: bool = False  # whether the epoch was over


class DealtLoader:
    """A prepared loader: iterating gives this worker's batches of one epoch. All else is that of the script's
    DataLoader.

    A pass in which the script trains uses up its epoch, also where it is left in the middle. A pass in which it does
    not, such as reading the first batch, uses up nothing. Without gradients the script evaluates: such a pass takes no
    samples from the deal, and gives the worker's part of the data whenever it is asked for."""

    def __init__(self, loader: DataLoader[Any], workers: int, samples: int, seed: int = 0) -> None:
        """`samples`: of an epoch; `seed`: from which a stream draws."""
        self._loader, self._stream = loader, None
        if isinstance(loader.dataset, IterableDataset):
            size = len(loader.dataset)  # type: ignore[arg-type]
            said = "let __len__ give {}"
            self._stream = StreamReader(loader.dataset, size, 1, seed, "data set", "the loader", said)
        self._length = -(-samples // (workers * (loader.batch_size or 1)))
        self.begin: Callable[[BeginPass], None] = lambda wish: None
        self.ask: Callable[[int], Batch | None] = lambda epoch: None
        self.place: Callable[[], int] = lambda: 0  # the number of passes that others have done before
        self.trained: Callable[[], int] = lambda: 0  # how often the script has called backward and step
        self.evaluates: Callable[[], bool] = lambda: False
        self.part: Callable[[], Iterator[Batch]] = lambda: iter(())  # what a pass that evaluates gives
        self.newest: Pass | None = None
        self.looked = False  # whether there was a pass over an epoch in which the script has not trained
        self._done: int | None = None  # passes that are left out, because they were done before
        self._next = 0  # the epoch of the pass after one that has trained

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        """Batches that a worker has in an epoch, if all take equally many."""
        return self._length

    @property
    def replaying(self) -> bool:
        """Whether the script is in an epoch that was over before this worker came."""
        return self._done is not None and self._done > 0

    def skip_none(self, epoch: int) -> None:
        """The script knows by itself that it begins with this epoch."""
        if self._done is None:
            self._next = epoch
        self._done = 0

    def __iter__(self) -> Iterator[Any]:
        if self.evaluates():
            trained, left = self.trained(), self.part()
            while trained == self.trained() and (batch := next(left, None)) is not None:
                yield self._fetch(batch)
            return
        if self._done is None:
            place = self.place()
            self._done = place if self._done is None else self._done
        elif self._done:
            self._done -= 1
        if self._done:
            self._next += 1
            return
        mine = self._begin()
        # Samples of an epoch before come late, where a dead worker had them; and a worker that was slow to begin may
        # have none of an epoch that the others have done without it.
        while (another := self.ask(mine.epoch)) is not None:
            mine.handed += 1
            yield self._fetch(another)
            if self.newest is not mine:
                raise RunFailed(
                    "the script goes on with a pass over its loader after it has begun another; finish one before the "
                    "next, or take a second loader that is not prepared"
                )
        mine.ended = True
        self.looked |= mine.handed > 0 and self.trained() == mine.trained

    def _begin(self) -> Pass:
        wish = self.after_newest()
        self.begin(wish)
        self._next = wish.epoch + 1
        self.newest = Pass(wish.epoch, self.trained())
        return self.newest

    def after_newest(self) -> BeginPass:
        """The epoch of a pass that begins now, and what becomes of batches without a step."""
        last = self.newest
        unused = last is not None and last.handed > 0 and self.trained() == last.trained
        broken = last is not None and not unused and not last.ended
        return BeginPass(last.epoch if last is not None and unused else self._next, unused, broken)

    def _fetch(self, batch: Batch) -> Any:
        dataset, collate, indices = self._loader.dataset, self._loader.collate_fn, batch.indices
        if collate is default_collate and type(dataset) is TensorDataset:
            return [tensor.index_select(0, indices) for tensor in dataset.tensors]  # what default_collate gives, sooner
        chosen = indices.tolist()
        if self._stream is not None:
            items = self._stream.read(chosen, batch.epoch)
        else:
            with calling("data set", whose="the loader"):
                many = getattr(dataset, "__getitems__", None)
                items = many(chosen) if many else [dataset[i] for i in chosen]
        with calling(f"collate_fn on the samples {chosen}", whose="the loader"):
            return collate(items)
