"""Plain PyTorch DDP, on a task of torrential's: what torrential's strategies are compared with from outside.

    parent ── spawns ──► worker 0 … n-1    DistributedDataParallel over Gloo; a DistributedSampler deals the samples
           └─ spawns ──► evaluator         takes snapshots of worker 0, beside training, at the observer's niceness
    parent ◄── records ── all of them      written to records.jsonl as they come

It is what a user of DDP writes: DDP's own defaults, torch's sampler, the task's model, loss and fused optimizer, one
seed per run. The rules are those that torrential's strategies run under. Time begins when all have met, before data is
touched; an evaluation has the time at which its parameters existed; the same code computes the metric, in a process of
its own, and a worker waits for that only with a third snapshot. The word that the target is reached comes with the
next snapshot, which costs no time that counts. Batches are gathered from tensors, not by a DataLoader, which would be
slower.

A slow worker sleeps after backward, for a multiple of what its own forward and backward took, without the exchanges
inside them that DDP waits for: of buffers before forward, of gradients at the end of backward. Where the time went can
be told no finer: `wait` is these exchanges, sending included. Bytes are those of a ring, as for torrential over Gloo.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from torrential import opening, records
from torrential.config import RunConfig
from torrential.data.batches import Batches
from torrential.errors import RunFailed, WorkerFailed
from torrential.records import Record, RecordWriter, Step
from torrential.resolve import Request
from torrential.run import summarise
from torrential.strategies.allreduce import AllReduce
from torrential.task import Task, with_validation
from torrential.tasks import load_task
from torrential.trainer.observer import Observer
from torrential.trainer.recorder import RECORD_SECONDS
from torrential.trainer.slow import Slow
from torrential.trainer.snapshot import Snapshot
from torrential.worlds.base import Job, Listener
from torrential.worlds.local.observing import NICENESS
from torrential.worlds.local.outlet import SLOTS

DDP = "ddp"
MEETING = "meeting"  # a file in a run's directory where its workers find each other
SILENT_SECONDS = 120.0  # after which a run is given up; steps are recorded several times a second
END_SECONDS = 10.0
PR_SET_PDEATHSIG = 1


def run(request: Request, directory: Path, listener_for: Callable[[Job], Listener]) -> None:
    """One run in a fresh directory, which torrential's readers take for one of its own. `request` is for allreduce."""
    job = as_ddp(opening.open_run(request, directory))
    try:
        path = directory / records.RECORDS
        with RecordWriter(path) as writer:
            _carry_out(job, writer.write, listener_for(job))
            writer.write(summarise(job, records.read_records(path)))
    finally:
        opening.unlock(directory)


def as_ddp(job: Job) -> Job:
    """The same run, by DDP; also in its manifest."""
    settings = msgspec.structs.replace(job.config.settings, transport="tcp", algorithm="native")  # Gloo's
    config = msgspec.structs.replace(job.config, strategy=DDP, options={}, settings=settings)
    manifest = records.read_manifest(job.directory)
    records.write_manifest(job.directory, msgspec.structs.replace(manifest, config=msgspec.to_builtins(config)))
    return Job(config, job.task, job.strategy, job.directory)


# -- the parent -------------------------------------------------------------------------------------------------------
def _carry_out(job: Job, write: Callable[[Record], None], listener: Listener) -> None:
    context = multiprocessing.get_context("spawn")
    snapshots, stop = context.Queue(SLOTS - 1), context.Event()  # one more is being evaluated
    meeting = job.directory / MEETING
    parts: dict[str, tuple[Any, ...]] = {
        f"worker {rank}": (_train, rank, str(meeting), snapshots, stop) for rank in range(job.config.workers)
    }
    parts["the evaluator"] = (_evaluate, snapshots, stop)
    with _started(context, parts, job.config) as (processes, pipes):
        _hear(processes, pipes, write, listener)
    meeting.unlink(missing_ok=True)


@contextmanager
def _started(context: Any, parts: dict[str, tuple[Any, ...]], config: RunConfig) -> Iterator[tuple[Any, Any]]:
    """Processes by name, and names by the pipe that each talks into. None of them outlives the block."""
    processes: dict[str, Any] = {}
    pipes: dict[Any, str] = {}
    try:
        for name, part in parts.items():
            ours, theirs = context.Pipe(duplex=False)
            processes[name] = context.Process(target=_child, args=(os.getpid(), config, theirs, *part), name=name)
            processes[name].start()
            theirs.close()
            pipes[ours] = name
        yield processes, pipes
    finally:
        for process in processes.values():
            process.terminate()  # does nothing to one that has ended
        for process in processes.values():
            process.join(END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()


def _hear(processes: Any, pipes: Any, write: Callable[[Record], None], listener: Listener) -> None:
    """Until all have said their last word."""
    talking, heard = dict(pipes), time.monotonic()
    while talking:
        ready: list[Any] = connection.wait(list(talking), timeout=1.0)
        for pipe in ready:
            heard = time.monotonic()
            name = talking[pipe]
            try:
                said = pipe.recv()
            except EOFError:
                del talking[pipe]
                processes[name].join(END_SECONDS)
                if processes[name].exitcode != 0:
                    raise WorkerFailed(f"{name} of the DDP run ended (exit code: {processes[name].exitcode})") from None
                continue
            if isinstance(said, str):
                raise WorkerFailed(f"{name} of the DDP run failed:\n{said}")
            write(said)
            listener.record(said)
        listener.tick()
        if time.monotonic() - heard > SILENT_SECONDS:
            names = ", ".join(talking.values())
            raise RunFailed(f"nothing was heard for {SILENT_SECONDS:.0f} s from {names} of the DDP run; run it again")


def _child(parent: int, config: RunConfig, out: Any, work: Callable[..., None], *rest: Any) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        work(config, out.send, *rest)
    except Exception:
        out.send(traceback.format_exc())
        raise SystemExit(1) from None


def _task(config: RunConfig) -> Task:
    assert config.source is not None
    return with_validation(load_task(config.source), config.seed)


# -- a worker ---------------------------------------------------------------------------------------------------------
def _train(
    config: RunConfig, say: Callable[[Record], None], rank: int, meeting: str, snapshots: Any, stop: Any
) -> None:
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(config.settings.threads or max(1, cores // config.workers))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    patience = timedelta(seconds=config.settings.timeout)
    store = dist.FileStore(meeting, config.workers)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=config.workers, timeout=patience)
    task = _task(config)
    torch.manual_seed(config.seed)
    model = DistributedDataParallel(task.model())
    optimizer = task.optimizer.with_lr(config.lr).build(model.parameters())
    batches = Batches(task.train)
    sampler: DistributedSampler[Any] = DistributedSampler(task.train, config.workers, rank, seed=config.seed)
    slow = Slow.parse(config.settings.slow, config.workers)
    own = _Own(model)
    gradient_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    sent = 2 * (config.workers - 1) * gradient_bytes // config.workers
    began = _meet()
    recorder = _Recorder(say, rank, sent)
    step = samples = 0
    for epoch, indices, last_of_epoch in _order(sampler, config):
        start = time.monotonic()
        inputs, targets = batches.fetch(indices)
        optimizer.zero_grad()
        called = time.monotonic()
        loss = task.loss(model(inputs), targets)
        loss.backward()
        before = own.began - called  # what DDP does before forward
        recorder.wait += before + time.monotonic() - own.ended
        if (factor := slow.factor(config.seed, rank, step)) > 1:
            time.sleep((factor - 1) * (own.ended - start - before))
        if task.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
        optimizer.step()
        step, samples = step + 1, samples + len(indices) * config.workers
        now = time.monotonic() - began
        epoch += last_of_epoch
        ended = epoch == config.epochs or step == config.steps
        place = {"step": step, "epoch": epoch, "samples": samples}
        recorder.look(now, float(loss.detach()), place, ended)
        if ended or _due(step, last_of_epoch, config):
            if rank == 0:
                state = {name: tensor.numpy().copy() for name, tensor in model.module.state_dict().items()}
                snapshots.put((place | {"time": now}, state))
            if ended or _told_to_stop(stop):
                break
    if rank == 0:
        snapshots.put(None)
    dist.destroy_process_group()


class _Own:
    """When this worker's own forward began and its own backward ended. Before the one, DDP broadcasts buffers; after
    the other, it waits for gradients."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.began = self.ended = 0.0
        model.module.register_forward_pre_hook(self._begins)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._ends)

    def _begins(self, *_: Any) -> None:
        self.began = time.monotonic()

    def _ends(self, _: torch.Tensor) -> None:
        self.ended = time.monotonic()


def _meet() -> float:
    """The moment at which time begins, of the first worker's clock: one for all processes of a machine."""
    dist.barrier()
    moment = torch.tensor([time.monotonic()], dtype=torch.float64)
    dist.broadcast(moment, 0)
    return float(moment)


def _order(sampler: DistributedSampler[Any], config: RunConfig) -> Iterator[tuple[int, torch.Tensor, bool]]:
    """This worker's batches, each with its epoch and whether it is the last of it."""
    for epoch in range(config.epochs):
        sampler.set_epoch(epoch)
        parts = torch.tensor(list(sampler)).split(config.batch_size)
        for part, following in itertools.zip_longest(parts, parts[1:]):
            yield epoch, part, following is None


def _due(step: int, last_of_epoch: bool, config: RunConfig) -> bool:
    every = config.settings.evaluate_every
    return last_of_epoch if every is None else step % every == 0


def _told_to_stop(stop: Any) -> bool:
    """All hear the same."""
    word = torch.tensor([float(stop.is_set())])
    dist.broadcast(word, 0)
    return bool(word)


class _Recorder:
    """As torrential's workers do it: a few times a second, where the time went since the record before."""

    def __init__(self, say: Callable[[Record], None], rank: int, sent: int) -> None:
        self._say, self._rank, self._sent = say, rank, sent
        self._last = -RECORD_SECONDS
        self._before = 0.0
        self.wait = 0.0  # since the record before

    def look(self, now: float, loss: float, place: dict[str, Any], ended: bool) -> None:
        if now - self._last < RECORD_SECONDS and not ended:
            return
        self._say(
            Step(
                worker=self._rank,
                loss=loss,
                time=now,
                compute=now - self._before - self.wait,
                communicate=0.0,
                wait=self.wait,
                bytes_sent=self._sent * place["step"],
                **place,
            )
        )
        self._last = self._before = now
        self.wait = 0.0


# -- beside training --------------------------------------------------------------------------------------------------
def _evaluate(config: RunConfig, say: Callable[[Record], None], snapshots: Any, stop: Any) -> None:
    """As torrential's observer does it; after the target is reached, nothing but the last word on test data."""
    os.nice(NICENESS)
    torch.set_num_threads(1)
    task = _task(config)
    observer = Observer(task, config, AllReduce(), torch.device("cpu"), Path())
    last: Snapshot | None = None
    while (taken := snapshots.get(timeout=SILENT_SECONDS)) is not None:
        if stop.is_set():
            continue
        place, state = taken
        observer.model.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
        last = Snapshot(**place, cursor=0, members=[], counts=[], final=False)
        evaluation = observer.evaluate(last, "validation")
        say(evaluation)
        if task.reaches(config.target, evaluation.value):
            stop.set()
    if last is not None:
        say(observer.evaluate(last, "test"))
