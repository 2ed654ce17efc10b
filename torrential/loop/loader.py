"""A prepared loader: the script's own DataLoader, whose samples the run deals out to the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from torrential.data.deal import Batch, Order
from torrential.errors import BadInput
from torrential.usercode import calling


def check_loader(loader: DataLoader[Any]) -> None:
    """Refuse a loader whose samples cannot be dealt out."""
    if isinstance(loader.dataset, IterableDataset):
        raise BadInput(
            f"the loader reads a stream ({type(loader.dataset).__name__}), which cannot be dealt out to workers; "
            "give a data set with __len__ and __getitem__"
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise BadInput("the loader has a batch_sampler of its own, and the run deals batches out; give batch_size=...")
    sampler = loader.sampler
    if type(sampler) not in (RandomSampler, SequentialSampler):
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


class DealtLoader:
    """Iterating gives this worker's batches of one epoch. Everything else is as the script's DataLoader has it."""

    def __init__(self, loader: DataLoader[Any], workers: int, samples: int) -> None:
        self._loader = loader
        self._length = -(-samples // (workers * (loader.batch_size or 1)))
        self.ask: Callable[[int], Batch | None] = lambda epoch: None
        self.begin: Callable[[], int] = lambda: 0  # the number of iterations that others have done before
        self._done: int | None = None  # iterations that are left out, because they were done before
        self._next = 0  # the epoch that the script's next iteration is for

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
        if self._done is None:
            self._done = self.begin()
        elif self._done:
            self._done -= 1
        epoch, self._next = self._next, self._next + 1
        if self._done:
            return
        # Samples of an epoch before come late, where a dead worker had them; and a worker that was slow to begin may
        # have none of an epoch that the others have done without it.
        while (batch := self.ask(epoch)) is not None:
            yield self._fetch(batch.indices)

    def _fetch(self, indices: Tensor) -> Any:
        dataset, collate = self._loader.dataset, self._loader.collate_fn
        if collate is default_collate and type(dataset) is TensorDataset:
            return [tensor.index_select(0, indices) for tensor in dataset.tensors]  # what default_collate gives, sooner
        chosen = indices.tolist()
        with calling("data set", whose="the loader"):
            many = getattr(dataset, "__getitems__", None)
            items = many(chosen) if many else [dataset[i] for i in chosen]
        with calling(f"collate_fn on the samples {chosen}", whose="the loader"):
            return collate(items)
