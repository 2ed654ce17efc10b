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
from torrential.randomness import EVALUATION, seed_all
from torrential.records import Evaluation
from torrential.step import Score, run_step
from torrential.strategies.base import Strategy
from torrential.task import Task, build_model
from torrential.trainer.pending import Parts
from torrential.trainer.snapshot import Snapshot, load_flat, load_tensors, to_checkpoint
from torrential.trainer.state import EVERYBODY

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
        self.evaluates = task.validation is not None  # not if a script reports by itself
        self.needed: int | None = None  # the step of a checkpoint that is not to be deleted
        self.gets_on: Callable[[], None] = lambda: None  # called after every batch that was evaluated
        self._data = {}
        if task.validation is not None:
            self._data = {
                "validation": Batches(task.validation, device, "validation data", task.collate, seed=config.seed),
                "test": Batches(task.test, device, "test data", task.collate, seed=config.seed),
            }
        short = task.step is None and task.collate is None
        self._batch = EVALUATION_BATCH if short else task.batch_size  # what is large enough for long texts

    def complete(self, snapshot: Snapshot, parts: Parts) -> bool:
        """Whether there is a model to evaluate. Where it is put together from the workers' own states, one may have
        died before it had given its part; then others must have all of its parameters."""
        if not self._assembles or parts.keys() >= set(snapshot.members):
            return True
        trained = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        return trained <= self._assembled(parts).keys()

    def _assembled(self, parts: Parts) -> Mapping[str, Tensor]:
        """In the order of ranks, whichever came first: sums depend on it."""
        return self._strategy.assembled(dict(sorted(parts.items())))

    def load(self, flat: Mapping[str, Tensor], rest: Mapping[str, Tensor], parts: Parts) -> None:
        """Make the model of a snapshot: the first member's, and what the strategy puts together from `parts`, the own
        states of workers by rank."""
        if flat:
            load_flat(self.model, self.layout, flat)
        load_tensors(self.model, _named(rest, "rest/") | dict(self._assembled(parts)))

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
        seed_all(self.device, self.config.seed, EVALUATION, snapshot.step)  # for models that draw here, too
        score = Score(self.task, self.device, f" on {data.name}")
        with torch.no_grad():
            for indices in torch.arange(len(data)).split(self._batch):
                result = run_step(self.task, self.model, data.fetch(indices), f" on {data.name}")
                score.add(result, len(indices))
                self.gets_on()
        figures = score.figures()
        return Evaluation(
            split=split,
            step=snapshot.step,
            epoch=snapshot.epoch,
            samples=snapshot.samples,
            time=snapshot.time,
            value=score.value(),
            loss=figures.pop("loss"),
            figures=figures,
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
        checkpoint.save(self.directory / "checkpoints", whole, 2, keep_best, minimize, self.needed)


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
