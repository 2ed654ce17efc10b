"""Plain training on the joined batches, which members that step together, and their checkpoints, must agree with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

import torch
from torch import Tensor, nn

from torrential.data.batches import training_batches
from torrential.data.deal import Deal
from torrential.params.layout import plan
from torrential.randomness import MODEL, seed_all
from torrential.step import run_step
from torrential.strategies.fedavg import FedAvg
from torrential.trainer.snapshot import Snapshot, load_flat, load_tensors
from torrential.worlds.base import Job

TOLERANCE = 1e-9  # of float64; sums are taken in another order


class PlainTraining:
    """The checkpoints of one run whose members take steps together, and what they are compared with at its end."""

    def __init__(self, job: Job, complain: Callable[[str], None]) -> None:
        self._job, self._complain = job, complain
        self._saved: list[tuple[Snapshot, Mapping[str, Tensor], Mapping[str, Tensor]]] = []

    def saved(self, snapshot: Snapshot, flat: Mapping[str, Tensor], assembled: Mapping[str, Tensor]) -> None:
        """Keep what a checkpoint holds: flat vectors, or parameters by name, put together from what workers have."""
        self._saved.append((snapshot, flat, assembled))

    def wrong_end(self, workers: Mapping[str, tuple[int, int]], finished: bool) -> str:
        """Whether the last checkpoint is not of the run's end, or a worker that is there did not come to it, in words.
        `workers`: steps and samples by name; `finished`: whether all epochs were to be done."""
        last = self._saved[-1][0] if self._saved else None
        if last is None or not last.final:
            return "no checkpoint was made of the end"
        ends = dict(workers) | {"the last checkpoint": (last.step, last.samples)}
        wanted = self._job.config.epochs * self._job.config.samples
        done = {samples for _, samples in ends.values()}
        exact = self._job.strategy.name != FedAvg.name  # of which a round may end beyond an epoch
        short = finished and (done != {wanted} if exact else min(done) < wanted)
        if len(set(ends.values())) > 1 or short:
            return f"not all of it was done: {ends} (steps and samples, of {wanted} samples)"
        return ""

    def check_parameters(self, taken: Mapping[int, int], workers: Mapping[int, nn.Module]) -> None:
        """Check checkpoints, and the workers that are there at the end, against plain training. `taken`: the samples of
        each step, by its number."""
        steps = self._saved[-1][0].step
        sizes = [taken[step] for step in range(1, steps + 1)]
        samples = [0, *accumulate(sizes)]
        saved = self._job.task.model()
        for step, model in enumerate(self._train(sizes)):
            for snapshot, flat, assembled in [each for each in self._saved if each[0].step == step]:
                if flat:
                    load_flat(saved, plan(saved, 1), flat)
                load_tensors(saved, assembled)
                self._compare(f"the checkpoint at {step}", saved, model, step)
                if snapshot.samples != samples[step]:
                    self._complain(f"the checkpoint at {step} is of {snapshot.samples} samples, not {samples[step]}")
        for rank, mine in workers.items():
            self._compare(f"worker {rank}", mine, model, steps)

    def _train(self, sizes: list[int]) -> Iterator[nn.Module]:
        """The model before the first step, and after each, of so many samples."""
        config, task = self._job.config, self._job.task
        seed_all(torch.device("cpu"), config.seed, MODEL)
        model = task.model()
        yield model
        optimizer = task.optimizer_spec.build(model.parameters())
        deal, batches = Deal(config.samples, config.seed), training_batches(task)
        for size in sizes:
            joined = deal.order.between(deal.epoch, deal.cursor, deal.cursor + size)
            batch = batches.fetch(joined, deal.epoch)
            optimizer.zero_grad()
            run_step(task, model, batch).loss.backward()
            optimizer.step()
            deal.advance(size)
            yield model

    def _compare(self, whose: str, mine: nn.Module, plain: nn.Module, steps: int) -> None:
        off = max(
            float((a - b).detach().abs().max()) for a, b in zip(mine.parameters(), plain.parameters(), strict=True)
        )
        if off > TOLERANCE:
            self._complain(f"{whose} is off plain training by {off} after {steps} steps")
