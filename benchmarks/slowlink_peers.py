"""What other libraries do over a slow link, as strategies: the same samples, model, evaluation and records as ours.

    PowerSgd              DDP with torch's PowerSGD hook: gradients as two thin matrices, with error feedback
    AccelerateLocalSgd    Hugging Face Accelerate's LocalSGD: steps apart, then a mean of all parameters
    TorchftDiLoCo         torchft's DiLoCo: each worker a replica group of one, the lighthouse with worker 0

All exchange over Gloo. Their members vote once in a round, on the loss and whether to stop, as under `ddp`.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Annotated, Any, ClassVar

import msgspec
import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

import torrential as tt
from torrential.strategies.averaging import within_epoch
from torrential.task import Task


class Peer(tt.Strategy, frozen=True, kw_only=True):
    """A library's way to train with several processes."""

    worlds: ClassVar[tuple[str, ...]] = ("local",)

    def roles(self, workers: int, servers: int) -> tt.Roles:
        return (tt.Role("worker", workers, self.worker, "fail"),)


class PowerSgd(Peer, frozen=True, kw_only=True):
    """DDP with the PowerSGD hook."""

    name: ClassVar[str] = "powersgd"
    summary: ClassVar[str] = "DDP with torch's PowerSGD hook"

    matrix_rank: Annotated[int, msgspec.Meta(ge=1)] = 4
    """The rank of the matrices that a gradient is sent as."""
    start: Annotated[int, msgspec.Meta(ge=2)] = 10
    """Steps before compression begins; torch's default is 1000."""

    def worker(self, ctx: tt.Context) -> None:
        parameters, workers = ctx.replica.local(alike=True), ctx.config.workers

        def parallel(model: nn.Module) -> nn.Module:
            made = DistributedDataParallel(model, process_group=ctx.comm.process_group())
            state = powersgd.PowerSGDState(None, self.matrix_rank, start_powerSGD_iter=self.start)
            made.register_comm_hook(state, powersgd.powerSGD_hook)
            return made

        def propose() -> tt.Vote:
            share = ctx.data.share()
            return tt.Vote(ctx.replica.backward([b.weighted(b.weight * workers) for b in share.batches]), share.samples)

        def conclude(decision: tt.Decision) -> None:
            parameters.step(ctx.progress.rate(ctx.data.joined))

        ctx.replica.wrap(parallel)
        ctx.rounds(propose, conclude)


class AccelerateLocalSgd(Peer, frozen=True, kw_only=True):
    """Accelerate's LocalSGD: a mean of all parameters every few steps, one tensor after the other."""

    name: ClassVar[str] = "accelerate"
    summary: ClassVar[str] = "Accelerate's LocalSGD"

    period: Annotated[int, msgspec.Meta(ge=1)] = 8
    """The number of steps between two averages (local_sgd_steps)."""

    def samples_per_update(self, workers: int, batch_size: int) -> int:
        return workers * batch_size * self.period

    def fitted(self, task: Task, model: nn.Module, workers: int) -> AccelerateLocalSgd:
        return msgspec.structs.replace(self, period=within_epoch(self.period, task, workers))

    def worker(self, ctx: tt.Context) -> None:
        parameters, averaging = ctx.replica.local(), self._averaging
        found = list[Any]()

        def parallel(model: nn.Module) -> nn.Module:
            made = DistributedDataParallel(model, process_group=ctx.comm.process_group())
            found.append(averaging(made, ctx))
            return made

        def propose() -> tt.Vote:
            share, loss = ctx.data.share(self.period), 0.0
            for batch in share.batches:
                loss += len(batch) * ctx.replica.backward([batch.weighted(1.0)])
                parameters.step(ctx.progress.rate(len(batch) * ctx.config.workers))
                found[0].step()
            return tt.Vote(loss / max(1, share.samples), share.samples)

        ctx.replica.wrap(parallel)
        ctx.rounds(propose, lambda decision: None)

    def _averaging(self, model: DistributedDataParallel, ctx: tt.Context) -> Any:
        from accelerate import Accelerator
        from accelerate.local_sgd import LocalSGD

        rank, workers = str(ctx.comm.rank), str(ctx.config.workers)
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
        made = LocalSGD(Accelerator(cpu=True), model, local_sgd_steps=self.period)
        assert made.enabled, "Accelerate has not seen the group of torch.distributed"
        made.__enter__()
        return made


class TorchftDiLoCo(Peer, frozen=True, kw_only=True):
    """torchft's DiLoCo, with its default of one fragment."""

    name: ClassVar[str] = "torchft"
    summary: ClassVar[str] = "torchft's DiLoCo"

    period: Annotated[int, msgspec.Meta(ge=1)] = 16
    """The number of steps between two outer ones (sync_every)."""
    outer_rate: float = 0.7
    """The learning rate of the outer step."""
    outer_momentum: float = 0.9
    """The Nesterov momentum of the outer step."""

    def samples_per_update(self, workers: int, batch_size: int) -> int:
        return workers * batch_size * self.period

    def fitted(self, task: Task, model: nn.Module, workers: int) -> TorchftDiLoCo:
        return msgspec.structs.replace(self, period=within_epoch(self.period, task, workers))

    def worker(self, ctx: tt.Context) -> None:
        parameters, held = ctx.replica.local(), list[object]()

        def propose() -> tt.Vote:
            if not held:  # members have met by now
                held.extend(self._join(ctx, parameters._optimizer))
            share, loss = ctx.data.share(self.period), 0.0
            for batch in share.batches:
                loss += len(batch) * ctx.replica.backward([batch.weighted(1.0)])
                parameters.step(ctx.progress.rate(len(batch) * ctx.config.workers))  # its hooks synchronize
            return tt.Vote(loss / max(1, share.samples), share.samples)

        ctx.rounds(propose, lambda decision: None)
        held[-1].shutdown(wait=False)  # type: ignore[attr-defined]

    def _join(self, ctx: tt.Context, inner: torch.optim.Optimizer) -> list[object]:
        """What has to live as long as training; the manager is the last of it."""
        os.environ.setdefault("RUST_LOG", "error")  # else every round is told
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo

        model, comm, found = ctx.replica.model, ctx.comm, list[object]()
        port = torch.zeros(1, dtype=torch.int64)
        if comm.rank == comm.members[0]:
            found.append(house := LighthouseServer(bind="127.0.0.1:0", min_replicas=ctx.config.workers))
            port[0] = int(house.address().rpartition(":")[2])
        port = comm.all_gather(port).wait()[0]
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
            load_state_dict=model.load_state_dict,
            state_dict=model.state_dict,
            min_replica_size=ctx.config.workers,
            use_async_quorum=False,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=store.port,
            lighthouse_addr=f"http://127.0.0.1:{int(port)}",
            replica_id=f"worker_{comm.rank}_",
            hostname="127.0.0.1",
        )
        outer = torch.optim.SGD(model.parameters(), lr=self.outer_rate, momentum=self.outer_momentum, nesterov=True)
        diloco = DiLoCo(manager, [model], inner, outer, sync_every=self.period, pin_memory=False)
        diloco.__enter__()
        return [*found, store, diloco, manager]
