"""The model as one role has it: built, cut as the strategy says, run forward and backward."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torrential.checkpoint import Checkpoint
from torrential.comm.protocol import Comm, Handle
from torrential.compression.dgc import clipping
from torrential.compute.compiled import compiled_sizes, compiling_in_turn
from torrential.compute.recompute import recompute
from torrential.config import RunConfig
from torrential.data.deal import Batch
from torrential.data.loaders import Loaders
from torrential.data.resize import Resize
from torrential.errors import BadInput, RunFailed
from torrential.optim.corrected import corrected, momentum_of
from torrential.optim.recipe import adapt_optimizer
from torrential.optimizers import OptimizerSpec
from torrential.params.base import CommonParameters, Parameters, choose, flat_gradient
from torrential.params.layout import Bucket, plan
from torrential.params.local import LocalParameters
from torrential.params.replicated import ReplicatedParameters
from torrential.params.shared import SharedParameters
from torrential.params.sums import GradientSums
from torrential.params.synchronized import Synchronized
from torrential.params.unlocked import UnlockedParameters
from torrential.randomness import TRAINING, seed_all
from torrential.splits.slices import name_of
from torrential.step import Means
from torrential.strategies.base import Strategy, servers_of
from torrential.task import Task
from torrential.trainer.backward import FORWARD, Gradients, GradientWork, Portion
from torrential.trainer.compressing import CompressedPushes, Moment, compressed_sums
from torrential.trainer.handed import WholeModel, build_whole, take_memory
from torrential.trainer.loss_scale import LossScale
from torrential.trainer.progress import TrainingProgress
from torrential.trainer.slow import Brake
from torrential.trainer.snapshot import buffers_of, from_checkpoint
from torrential.trainer.state import NamedStates
from torrential.trainer.watch import BackwardWatch

T = TypeVar("T")


class ModelReplica:
    """Implements strategies.context.Replica."""

    hears_backward = True  # by hooks in autograd

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        strategy: Strategy,
        comm: Comm,
        state: NamedStates,
        progress: TrainingProgress,
        device: torch.device,
        reduce_device: torch.device,
        is_worker: bool,
        timed: Callable[[CommonParameters], CommonParameters],
        checkpoint: Checkpoint | None,
        loaders: Loaders | None,
        handed: Callable[[], WholeModel] | None,
    ) -> None:
        """`reduce_device`: the device on which gradients are summed; `timed`: makes updates of parameters take time, in
        a world where that is simulated; `handed`: gives the model, mapped from a file, where it was built already."""
        self._task, self._config, self._comm, self._state, self._progress = task, config, comm, state, progress
        self._device, self._reduce_device, self._timed, self._checkpoint = device, reduce_device, timed, checkpoint
        self._dry = device.type == "meta"  # nothing is computed there
        whole, cuttable = build_whole(task, config, strategy, device) if handed is None else handed()
        part = strategy.part(cuttable, comm.rank, config.workers) if is_worker else whole
        if handed is not None:
            take_memory(part)
        full = {id(t): name for name, t in itertools.chain(whole.named_parameters(), whole.named_buffers())}
        named = itertools.chain(part.named_parameters(), part.named_buffers())
        self._names = {n: name_of(t, full[id(t)]) for n, t in named}
        self.model = self._placed(part)
        self.layout = self.whole_layout = plan(self.model, strategy.bucket_bytes, self._names)
        self._work = self._recompute()
        self._parameters = [p for p in reversed(list(self.model.parameters())) if p.requires_grad]
        self.received: dict[str, Tensor] = {}  # module buffers of other workers' parts, for a checkpoint
        assembles = type(strategy).assembled is not Strategy.assembled
        self._says_what_is_evaluated = assembles or servers_of(strategy, config.workers) is not None
        self._keep_of(whole, cuttable, strategy)
        spec = strategy.optimizer(adapt_optimizer(config.recipe, task.optimizer_spec.with_lr(config.lr), whole))
        servers = servers_of(strategy, config.workers, max(1, config.servers))
        adds = config.compression.clips_locally and servers is not None and servers.consistency.staleness is not None
        self._added_up = config.workers if adds else 1  # gradients that add up to one, where each is clipped for that
        self._uncorrected, self._spec = spec, corrected(config.compression, spec, whole)
        self._loaders = loaders
        self.loss_scale = self._make_loss_scale()
        self._gradients = self._make_gradients()
        self._resize = None if config.recipe.resize is None else Resize.parse(config.recipe.resize)
        self._brake = Brake(config, comm)
        self._watch: BackwardWatch | None = None
        self._vector: Tensor | None = None
        self._gradient: Tensor | None = None
        self.parameters: Parameters | None = None  # where they live, once the program has said
        if checkpoint is not None:
            self._load_untrained(checkpoint.model)
        self._register_buffers()
        if config.settings.compile and is_worker and not self._dry:
            self._compile()

    def _keep_of(self, whole: nn.Module, cuttable: nn.Module, strategy: Strategy) -> None:
        """Note what is of use of the whole model, before only this role's part is left. `cuttable`: the form of it that
        the strategy cuts."""

    def want_buffers(self) -> None:
        """A checkpoint is being made: have other workers' parts in `received` by the time of the next batch."""

    def _placed(self, model: nn.Module) -> nn.Module:
        return model.to(self._device).train()

    def _recompute(self) -> float:
        """Have backward compute again what the run says; the work of a step, where 1 is that without it."""
        return 1.0 + FORWARD * (recompute(self.model, self._config) - 1.0)

    def _make_gradients(self) -> Gradients | None:
        """Forward and backward of a task; a script does that by itself."""
        config = self._config
        return Gradients(
            self._task, self.model, self._device, config.seed, config.settings, self._loaders, self.loss_scale
        )

    def _compile(self) -> None:
        """Compile the model's calls, before the run begins; how long that took is on record in a run of real time."""
        config = self._config
        with compiling_in_turn():
            began = time.monotonic()
            self._of_task.compile(compiled_sizes(config))
            took = time.monotonic() - began
        if config.world != "sim":  # whose time is not ours
            self._progress.note("compiled", f"in {took:.1f} s")

    def _make_loss_scale(self) -> LossScale | None:
        if self._config.settings.precision != "fp16" or self._dry:
            return None
        made = LossScale(self._parameters)
        self._state.everybody("loss scale", made.save, made.load)
        return made

    @property
    def _of_task(self) -> Gradients:
        assert self._gradients is not None, "a script has a forward of its own"
        return self._gradients

    def _register_buffers(self) -> None:
        """Module buffers (statistics of batch norm, say) are each worker's own."""
        if self.buffers():
            self._state.own("buffers", self.buffers, self._load_buffers)

    def buffers(self) -> dict[str, Tensor]:
        """The module's buffers, by the names that the whole model has for them."""
        return {self._names[name]: tensor for name, tensor in buffers_of(self.model).items()}

    def _load_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        for name, mine in self.buffers().items():
            if name in tensors:
                mine.copy_(tensors[name])

    @property
    def names(self) -> list[str]:
        """The parameters and buffers of this role's part, by the names that the whole model has for them."""
        return list(self._names.values())

    def server_spec(self) -> OptimizerSpec:
        """The optimizer that the servers run."""
        return self._spec

    def frozen(self) -> dict[str, Tensor]:
        """Parameters that are not trained, by name."""
        return {self._names[n]: p.detach() for n, p in self.model.named_parameters() if not p.requires_grad}

    def _load_untrained(self, saved: Mapping[str, Tensor]) -> None:
        """Take over buffers, and parameters that are not trained, from a whole model's."""
        with torch.no_grad():
            for name, tensor in (self.frozen() | self.buffers()).items():
                if name in saved:
                    tensor.copy_(saved[name])

    # -- where parameters live ----------------------------------------------------------------------------------
    def synchronized(self) -> Synchronized:
        common: CommonParameters
        clip_norm = self._task.clip_norm
        if self._config.compression.changes_gradients:
            sums = self._compressed_sums()
            common = ReplicatedParameters(
                self._comm, self.model, self.layout, self._spec, self._device, self._reduce_device, sums
            )
            if self._config.compression.clips_locally:
                clip_norm = None
        elif choose(self._comm, self._spec, self._device):
            common = SharedParameters(self._comm, self.model, self.layout, self._spec)
        else:
            common = ReplicatedParameters(
                self._comm, self.model, self.layout, self._spec, self._device, self._reduce_device
            )
        self.parameters = common = self._timed(common)
        self._watch = watch = BackwardWatch(self._parameters, self.layout, self.hears_backward)
        sizes = [sum(e.shape.numel() for e in bucket.entries) for bucket in self.layout.buckets]
        self._done_by = [done / sum(sizes) for done in itertools.accumulate(sizes)]  # share of backward, by bucket
        return Synchronized(common, lambda: watch.seen, clip_norm, self.loss_scale)

    def compressed_pushes(self) -> CompressedPushes | None:
        """How gradients are compressed that are pushed to servers, if they are."""
        compression = self._config.compression
        if not compression.changes_gradients:
            return None
        return CompressedPushes(compression, self.whole_layout, self._momentum, self._moment(), self._state)

    def _momentum(self, name: str) -> tuple[float, bool]:
        return momentum_of(self._uncorrected, name)

    def _moment(self) -> Moment:
        progress, samples = self._progress, self._config.samples
        return Moment(lambda: progress.step, lambda: progress.samples / samples, progress.total_epochs())

    def _compressed_sums(self) -> GradientSums:
        return compressed_sums(
            self._config.compression,
            self._comm,
            self.layout,
            self._parameters,
            self._state,
            device=self._device,
            reduce_device=self._reduce_device,
            momentum=self._momentum,
            clip_norm=self._task.clip_norm,
            moment=self._moment(),
            seed=self._config.seed,
        )

    def local(self, *, own: bool = False, alike: bool = False, undo: bool = True) -> LocalParameters:
        if own and not self._says_what_is_evaluated:
            raise BadInput(
                "replica.local(own=True) gives every worker parameters of its own, and the strategy does not say what "
                "model they make; give it a method assembled(parts)"
            )
        local = LocalParameters(
            self._parameters, self.layout, self._spec, self._device, self._task.clip_norm, own, self.loss_scale
        )
        self.parameters = local
        if self._checkpoint is not None and not own:
            local.load(*from_checkpoint(self._checkpoint, self.layout))
        if own:
            self._state.own("parameters", local.values, local.load_values, undo=undo)
        else:
            self._state.moving("parameters", local.values, local.load_values)
        remember = self._state.everybody if alike else self._state.own
        remember("optimizer", local.optimizer_state, local.load_optimizer_state, undo=undo)
        return local

    def unlocked(self, *, count_lost: bool = False) -> UnlockedParameters:
        unlocked = UnlockedParameters(
            self._comm,
            self._parameters,
            self.layout,
            self._spec,
            self._device,
            self._task.clip_norm,
            self._config.workers,
            count_lost,
            self.loss_scale,
        )
        self.parameters = unlocked
        self._state.own("optimizer", unlocked.optimizer_state, unlocked.load_optimizer_state)
        return unlocked

    def vector(self) -> Tensor:
        if self._vector is None:
            ((dtype, numel),) = self.layout.sizes.items()
            self._vector = vector = self._comm.buffer("vector", numel, dtype)
            for entry, parameter in zip(self.layout.entries, self._parameters, strict=True):
                entry.view(vector).copy_(parameter.data)
                if not self._apart:
                    parameter.data = entry.view(vector)
        return self._vector

    @property
    def _apart(self) -> bool:
        """Whether the model's parameters are copies of the vector, not views."""
        return self._device.type not in ("cpu", "meta")

    def memory(self) -> list[int]:
        """Where the model's parameters lie, if it is memory that steps change and that is not the model's alone."""
        common = self.parameters is not None and not self.parameters.private
        return (
            [p.data_ptr() for p in self._parameters] if common or (self._vector is not None and not self._apart) else []
        )

    def check_memory(self, before: Sequence[int]) -> None:
        """Raise RunFailed if the user's code has given a parameter other memory than `before`: no step reaches that."""
        if before and self.memory() != before:
            moved = next(
                e.name for e, old, new in zip(self.layout.entries, before, self.memory(), strict=True) if old != new
            )
            raise RunFailed(
                f"the parameter {moved} was given new memory (as by p.data = ...), where no step would change it; "
                "change it in place: with torch.no_grad(): p.copy_(...)"
            )

    def gradient(self) -> Tensor:
        if self._gradient is None:
            ((dtype, numel),) = self.layout.sizes.items()
            self._gradient = self._comm.buffer("gradient", numel, dtype)
        return self._gradient

    def wrap(self, wrapper: Callable[[nn.Module], nn.Module]) -> None:
        self._of_task.model = wrapper(self.model)

    # -- forward and backward -----------------------------------------------------------------------------------
    def backward(
        self,
        batches: Sequence[Batch],
        ready: Callable[[Bucket], None] | None = None,
        after: Handle | None = None,
        finite: bool = True,
    ) -> float:
        batches = [batch for batch in batches if len(batch)]
        if not batches and ready is None:
            return math.nan  # nothing to add this time
        began = self._comm.now()
        self._load()
        for parameter in self._parameters:
            parameter.grad = None
        memory = self.memory()
        watch = None if ready is None else self._begin_watch(ready, max(1, len(batches)))
        samples = sum(len(batch) for batch in batches)
        work = GradientWork(self._of_task, self._portions(batches), watch)
        numbers = self._comm.compute(
            self._work * samples, (lambda: self._no_work(watch, batches)) if self._dry else work
        )
        self.check_memory(memory)
        loss = self._mean_loss(numbers, batches)
        if ready is None and finite and not math.isfinite(loss):
            self._progress.refuse(loss, batches[0])
        if after is not None:
            after.wait()
        if self.loss_scale is not None:
            self.loss_scale.look()
        if self._gradient is not None and not self._dry:
            self._collect(self._gradient)
        self._brake.hold(began)
        return loss

    def backward_with_others(self, batches: Sequence[Batch], share: float) -> float:
        batches = [batch for batch in batches if len(batch)]
        began = self._comm.now()
        work = GradientWork(self._of_task, self._portions(batches))
        samples = share * sum(len(batch) for batch in batches)
        loss = self._mean_loss(self._comm.compute(samples, lambda: work(), waits=True), batches)
        self._brake.hold(began)
        return loss

    def _mean_loss(self, numbers: Sequence[Mapping[str, float]], batches: Sequence[Batch]) -> float:
        """The mean loss of batches whose losses and figures these are; the mean figures go on record."""
        means = Means()
        for portion, batch in zip(numbers, batches, strict=True):
            means.add(portion, len(batch))
        self._progress.figures = dict(means)
        return self._progress.figures.pop("loss", 0.0)

    def _begin_watch(self, ready: Callable[[Bucket], None], parts: int) -> BackwardWatch:
        assert self._watch is not None, "buckets are announced where parameters are synchronized"

        def announce(bucket: Bucket) -> None:
            of_backward = 1.0 if self._config.settings.compile else self._done_by[bucket.index]  # all come at its end
            done = (parts - 1 + FORWARD + (1 - FORWARD) * of_backward) / parts
            self._comm.reached(done, lambda: ready(bucket))

        self._watch.begin(announce)
        return self._watch

    def _portions(self, batches: Sequence[Batch]) -> list[Portion]:
        scale = None if self._resize is None else self._resize.at(self._progress.share_done())
        return [Portion((b.epoch, b.first), b.indices, b.weight, scale) for b in batches]

    @staticmethod
    def _no_work(watch: BackwardWatch | None, batches: Sequence[Batch]) -> list[dict[str, float]]:
        if watch is not None:
            watch.end()
        return [{"loss": 0.0}] * len(batches)

    def _load(self) -> None:
        if self._apart and self._vector is not None:
            for entry, parameter in zip(self.layout.entries, self._parameters, strict=True):
                parameter.data.copy_(entry.view(self._vector), non_blocking=True)

    def collected(self) -> Tensor:
        gradient = self.gradient()
        for entry, parameter in zip(self.layout.entries, self._parameters, strict=True):
            grad = flat_gradient(parameter)
            target = gradient[entry.start : entry.stop]
            target.zero_() if grad is None else target.copy_(grad)
        return gradient

    def _collect(self, gradient: Tensor) -> None:
        """Gradients from where autograd left them into the flat vector; clipped here, before they are sent."""
        if self.loss_scale is not None and self.loss_scale.overflowed:
            gradient.zero_()
            return
        self.collected()
        if self._task.clip_norm is not None:
            norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
            gradient *= clipping(norm, self._task.clip_norm, self._added_up)

    def reached(self) -> list[int] | None:
        if self._dry:
            return None
        found = [e.index for e, p in zip(self.layout.entries, self._parameters, strict=True) if p.grad is not None]
        return None if len(found) == len(self._parameters) else found

    def push_scale(self) -> float:
        return 0.0 if self.loss_scale is not None and self.loss_scale.overflowed else 1.0

    def keep_batches(self) -> None:
        self._of_task.keep_batches()

    def weight_decay(self) -> list[tuple[int, int, float]]:
        own = {name: group.options for group in self._spec.groups for name in group.names}
        given = self._spec.options
        found = list[tuple[int, int, float]]()
        for entry in self.layout.entries:
            weight = float(own.get(entry.name, {}).get("weight_decay", given.get("weight_decay", 0.0)))
            if found and found[-1][2] == weight:
                found[-1] = found[-1][0], entry.stop, weight
            else:
                found.append((entry.start, entry.stop, weight))
        return found

    def fetch(self, batch: Batch) -> Any:
        return self._of_task.fetch((batch.epoch, batch.first), batch.indices)

    def compute(self, batch: Batch, work: Callable[[], T], share: float = 1.0, part: int | None = 0) -> T:
        place = (batch.epoch, batch.first, part) if part else (batch.epoch, batch.first)

        def seeded() -> T:
            if part is not None:
                seed_all(self._device, self._config.seed, TRAINING, *place)
            return work()

        began = self._comm.now()
        result = self._comm.compute(share * len(batch), seeded)
        self._brake.hold(began)
        return result
