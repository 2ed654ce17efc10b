"""The model as a worker has it whose replica is of several workers: one stage, run with the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from torrential.comm.protocol import Handle
from torrential.data.deal import Batch
from torrential.errors import RunFailed
from torrential.params.layout import Bucket, plan
from torrential.server.shares import Shares
from torrential.stages.passes import StagePasses
from torrential.strategies.base import Strategy
from torrential.strategies.parameter_server import ParameterServerStrategy
from torrential.trainer.partition import Partition
from torrential.trainer.replica import ModelReplica
from torrential.trainer.server_plan import shares_of


class StagedReplica(ModelReplica):
    """Implements strategies.context.Replica."""

    def _keep_of(self, whole: nn.Module, cuttable: nn.Module, strategy: Strategy) -> None:
        assert isinstance(strategy, ParameterServerStrategy)
        if self._dry:
            raise RunFailed("stages have nothing to pass on with gradients=off; leave out one of them")
        if self._device.type != "cpu":
            raise RunFailed(f"stages are computed on CPUs only (given: {self._device}); give --device cpu")
        self._strategy, count = strategy, strategy.stages
        self.whole_layout = plan(whole, strategy.bucket_bytes)
        parts = [strategy.part(cuttable, stage, self._config.workers) for stage in range(count)]
        self.shares: Shares = shares_of(whole, self.whole_layout, parts)
        self.stage = self._comm.rank % count
        self.partition = Partition(
            self._comm, self._config, self.shares, self.shares.owned(self.stage, self.whole_layout, self.layout)
        )
        names = {id(buffer): name for name, buffer in whole.named_buffers()}
        self._elsewhere = {
            stage: {names[id(b)]: torch.empty_like(b) for b in part.buffers()} for stage, part in enumerate(parts)
        }
        self._shared = self._found_shared([{id(p) for p in part.parameters()} for part in parts])

    def _found_shared(self, parts: Sequence[set[int]]) -> list[tuple[int, list[int]]]:
        """The parameters here that other stages have, too: which of them it is, and the stages, the owner first."""
        found = []
        for index, parameter in enumerate(self._parameters):
            stages = [stage for stage, part in enumerate(parts) if id(parameter) in part]
            if len(stages) > 1:
                found.append((index, stages))
        return found

    def begin(self) -> None:
        """An era has begun: nothing of what was under way in the one before is of use."""
        assert self._task.loss is not None
        passes = self._strategy.plan(self._config.settings.recompute == "stage")
        runners = [(rank, [stage]) for stage, rank in enumerate(self.partition.ranks)]
        self._passes = StagePasses(self._comm, self, self._task.loss, passes, runners)

    # -- forward and backward -----------------------------------------------------------------------------------
    def backward(
        self,
        batches: Sequence[Batch],
        ready: Callable[[Bucket], None] | None = None,
        after: Handle | None = None,
        finite: bool = True,
    ) -> float:
        assert ready is None, "buckets are announced where parameters are synchronized"
        batches = [batch for batch in batches if len(batch)]
        if not batches:
            return math.nan  # nothing to add this time
        for parameter in self._parameters:
            parameter.grad = None
        memory = self.memory()
        self._tell_shared()
        mean, samples = self._passes.run(batches)
        self.check_memory(memory)
        self._sum_shared()
        rows = self.partition.gather([mean * samples, samples, self._square()])
        loss = float(rows[:, 0].sum() / rows[:, 1].sum())
        self._progress.figures = {}
        if finite and not math.isfinite(loss):
            self._progress.refuse(loss, batches[0])
        if after is not None:
            after.wait()
        if self._gradient is not None:
            self.collected()
            if (clip := self._task.clip_norm) is not None:
                self._gradient *= min(1.0, clip / (math.sqrt(float(rows[:, 2].sum())) + 1e-6))
        return loss

    def _square(self) -> float:
        """The square of the norm of the gradients of those parameters that belong to this stage."""
        if self._task.clip_norm is None:
            return 0.0
        others = {index for index, stages in self._shared if stages[0] != self.stage}
        grads = [p.grad for index, p in enumerate(self._parameters) if index not in others]
        return math.fsum(float(grad.double().square().sum()) for grad in grads if grad is not None)

    def reached(self) -> list[int] | None:
        found = super().reached()
        keys = {entry.name: entry.index for entry in self.whole_layout.entries}
        return None if found is None else [keys[self.layout.entries[index].name] for index in found]

    # -- parameters that several stages have ------------------------------------------------------------------------
    def _tell_shared(self) -> None:
        """A shared parameter belongs to its first stage, which alone pushes and pulls it, and tells the others."""
        ranks, sent = self.partition.ranks, list[Handle]()
        for index, stages in self._shared:
            value = self._parameters[index].data
            if stages[0] == self.stage:
                sent += [self._comm.send(value, ranks[stage], "shared") for stage in stages[1:]]
            else:
                self._comm.recv(value, ranks[stages[0]], "shared").wait()
        for handle in sent:
            handle.wait()

    def _sum_shared(self) -> None:
        """The owner of a shared parameter adds up the gradients of all stages that have it."""
        ranks, sent = self.partition.ranks, list[Handle]()
        for index, stages in self._shared:
            parameter = self._parameters[index]
            grad = torch.zeros_like(parameter.data) if parameter.grad is None else parameter.grad
            if stages[0] != self.stage:
                sent.append(self._comm.send(grad, ranks[stages[0]], "gradient of shared"))
                continue
            for stage in stages[1:]:
                grad = grad + self._comm.recv(torch.empty_like(grad), ranks[stage], "gradient of shared").wait()
            parameter.grad = grad
        for handle in sent:
            handle.wait()

    # -- module buffers ---------------------------------------------------------------------------------------------
    def want_buffers(self) -> None:
        self.partition.wants_buffers = True

    def exchange_buffers(self) -> None:
        """Tell the others of the replica this stage's module buffers, and be told theirs: checkpoints have them all."""
        places = {stage: list(buffers.values()) for stage, buffers in self._elsewhere.items()}
        self.partition.exchange([tensor.clone() for tensor in self.buffers().values()], places)
        self.received = {
            name: tensor
            for stage, buffers in self._elsewhere.items()
            if stage != self.stage
            for name, tensor in buffers.items()
        }
