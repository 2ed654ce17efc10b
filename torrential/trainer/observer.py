"""The observer: evaluates snapshots and saves them, beside training, so that no worker is stalled by either."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from torrential import checkpoint
from torrential.config import RunConfig
from torrential.data.batches import Batches
from torrential.params.layout import plan
from torrential.records import Evaluation
from torrential.strategies.base import Strategy
from torrential.task import Task, build_model
from torrential.trainer.pending import Parts
from torrential.trainer.randomness import seed_all
from torrential.trainer.snapshot import Snapshot, load_flat, load_tensors, to_checkpoint
from torrential.trainer.state import EVERYBODY
from torrential.usercode import calling

EVALUATION_BATCH = 512


class Observer:
    def __init__(
        self, task: Task, config: RunConfig, strategy: Strategy, device: torch.device, directory: Path
    ) -> None:
        self.task, self.config, self.device, self.directory = task, config, device, directory
        self.model = build_model(task).to(device).eval()
        self.layout = plan(self.model, strategy.bucket_bytes)
        self._strategy = strategy
        self._assembles = type(strategy).assembled is not Strategy.assembled
        assert task.validation is not None
        self.gets_on: Callable[[], None] = lambda: None  # called after every batch that was evaluated
        self._data = {
            "validation": Batches(task.validation, device, "validation data"),
            "test": Batches(task.test, device, "test data"),
        }

    def complete(self, snapshot: Snapshot, parts: Parts) -> bool:
        """Whether there is a model to evaluate: where it is put together from the workers' own states, all are needed.
        One may have died before it had given its part."""
        return not self._assembles or parts.keys() >= set(snapshot.members)

    def load(self, flat: Mapping[str, Tensor], rest: Mapping[str, Tensor], parts: Parts) -> None:
        """Make the model of a snapshot: the first member's, and what the strategy puts together from `parts`, the own
        states of workers by rank."""
        if flat:
            load_flat(self.model, self.layout, flat)
        load_tensors(self.model, _named(rest, "rest/") | dict(self._strategy.assembled(parts)))

    def load_saved(self) -> Snapshot | None:
        """The newest snapshot that was saved; when its parameters existed is on record with its evaluation."""
        saved, _ = checkpoint.latest(self.directory / "checkpoints")
        if saved is None:
            return None
        self.model.load_state_dict(saved.model)
        return Snapshot(
            step=saved.step,
            epoch=saved.epoch,
            cursor=saved.cursor,
            samples=saved.samples,
            time=0.0,
            members=saved.members,
            counts={},
            final=True,
        )

    def evaluate(self, snapshot: Snapshot, split: str) -> Evaluation:
        """Evaluate the parameters that were loaded last."""
        data = self._data[split]
        value = loss = 0.0
        seed_all(self.device, self.config.seed, 2, snapshot.step)  # for models that draw here, too
        with torch.inference_mode():
            for indices in torch.arange(len(data)).split(EVALUATION_BATCH):
                inputs, targets = data.fetch(indices)
                with calling(f"forward pass on {data.name}", self.task.model):
                    outputs = self.model(inputs)
                with calling(f"metric on {data.name}"):
                    value += float(self.task.metric(outputs, targets)) * len(indices)
                with calling(f"loss on {data.name}"):
                    loss += float(self.task.loss(outputs, targets)) * len(indices)
                self.gets_on()
        return Evaluation(
            split=split,
            step=snapshot.step,
            epoch=snapshot.epoch,
            samples=snapshot.samples,
            time=snapshot.time,
            value=value / len(data),
            loss=loss / len(data),
        )

    def save(
        self,
        snapshot: Snapshot,
        flat: Mapping[str, Tensor],
        rest: Mapping[str, Tensor],
        workers: Parts,
        value: float | None = None,
    ) -> None:
        """`value`: the metric of these parameters on validation data."""
        owners = {str(rank): states for rank, states in workers.items()} | {EVERYBODY: _named(rest, "state/")}
        extras = _named(rest, "extra/")
        whole = to_checkpoint(snapshot, self.config.seed, self.model, self.layout, flat, extras, owners, value)
        keep_best, minimize = self.config.settings.keep_best, not self.task.maximize
        checkpoint.save(self.directory / "checkpoints", whole, keep_best=keep_best, minimize=minimize)


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
