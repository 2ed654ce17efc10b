"""What a script sees: `tt.join()` gives a run, which prepares the script's own objects.

    run = tt.join()
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for epoch in run.epochs(10):
        for inputs, targets in loader: ...
        run.report(accuracy=value)

Started by itself the script is a plain loop, and nothing is changed. `torrential launch script.py` runs it once in a
trial, up to its first batch, and then in every worker.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from torrential.config import NO_LIMIT, RunConfig
from torrential.data.deal import Batch
from torrential.errors import BadInput, RunFailed
from torrential.loop.blueprint import Blueprint, describe_model, join_models, load_first_values
from torrential.loop.context import LoopContext
from torrential.loop.loader import DealtLoader, Pass, check_loader, one_part, order_of, shuffles
from torrential.loop.optimizer import BackwardLosses, parameters_of, replace_step, spec_of_all, tell_of_state
from torrential.loop.turns import AtEnd, BeginPass, NextBatch, Place, TakeStep, Turns
from torrential.optimizers import OF_RUNS
from torrential.randomness import TRAINING, seed_all
from torrential.records import Evaluation
from torrential.usercode import place_of, refuse_joining, users_function

MOST_REPORTS = 1_000_000_000  # more than a script makes in an epoch
NO_STEP = "the script has never called optimizer.step(); call it after loss.backward()"
_current: ScriptRun | None = None  # of a process that a launch has started


class ScriptRun:
    """The run of a script, as `join` gives it. This base class is for a script that was started by itself: a plain
    loop."""

    rank = 0
    """The number of this worker, from 0."""
    workers = 1
    """The number of workers that the run was started with."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.loader: DataLoader[Any] | None = None
        self.saved: dict[str, Any] = {}
        self.asked_for = False  # whether the script has called join
        self._metric: str | None = None
        self._stopped = False

    @property
    def epoch(self) -> int:
        """The epoch to begin with: 0, unless the run was resumed or this worker replaces another."""
        return 0

    def epochs(self, count: int) -> Iterable[int]:
        """The epochs of so many that are still to be done."""
        return takewhile(lambda epoch: not self._stopped, range(self.epoch, count))

    def prepare(self, *things: Any) -> Any:
        """The script's models, optimizers and loader, as they are used from now on, in the order they were given.
        Schedulers may be among them: they are saved with checkpoints."""
        if not things:
            raise BadInput("run.prepare was given nothing; give it the model, the optimizer and the loader")
        prepared = tuple(self._prepare(thing) for thing in things)
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare(self, thing: Any) -> Any:
        if isinstance(thing, nn.Module):
            if any(thing is model for model in self.models):
                raise BadInput(f"the model {type(thing).__name__} was prepared already; call run.prepare once for each")
            self.models.append(thing)
        elif isinstance(thing, torch.optim.Optimizer):
            if any(thing is optimizer for optimizer in self.optimizers):
                raise BadInput("the optimizer was prepared already; call run.prepare once for each")
            self.optimizers.append(thing)
        elif isinstance(thing, DataLoader):
            if self.loader is not None:
                raise BadInput("a loader was prepared already, and one is dealt out to the workers; leave the others")
            check_loader(thing)
            self.loader = thing
        elif isinstance(thing, LRScheduler):
            self.save(**{f"scheduler {len(self.saved)}": thing})
        else:
            kind = type(thing).__name__
            raise BadInput(f"run.prepare takes models, optimizers, schedulers and a DataLoader (given: a {kind})")
        return thing

    def save(self, **objects: Any) -> None:
        """Save objects with state_dict() and load_state_dict() in checkpoints; a resumed run loads them again."""
        for name, thing in objects.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise BadInput(f"run.save takes objects with state_dict and load_state_dict ({name}: {thing!r})")
            if name in self.saved:
                raise BadInput(f"run.save was given {name!r} already; call it something else")
            self.saved[name] = thing

    def report(self, **values: float) -> None:
        """Put an evaluation on record: the first value is the metric, the others go beside it as figures, one called
        `loss` as the loss."""
        if not values:
            raise BadInput("run.report was given nothing; give it a value, as in run.report(accuracy=0.9)")
        name = next(iter(values))
        if self._metric not in (None, name):
            raise BadInput(f"run.report was given {name!r} first, and {self._metric!r} before; the first is the metric")
        self._metric = name
        numbers = {each: float(value) for each, value in values.items()}
        self._report(numbers.pop(name), numbers.pop("loss", None), numbers)

    def _report(self, value: float, loss: float | None, figures: Mapping[str, float]) -> None:
        """A plain loop keeps no records."""

    def stop(self) -> None:
        """Ask for the end of the run: `run.epochs` ends, in all workers at the same step where they step together."""
        self._stopped = True

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Clip the gradient of the coming step, where gradients are summed their sum; returns this worker's norm."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def join() -> ScriptRun:
    """The run that this script takes part in; alone, a plain loop."""
    refuse_joining()
    if _current is None:
        return ScriptRun()
    _current.asked_for = True
    return _current


def enter(run: ScriptRun) -> None:
    """Have `join` give this run."""
    global _current
    _current = run


class TrialDone(BaseException):
    """Ends a trial where training would begin."""


class TrialRun(ScriptRun):
    """The trial of a script: it notes at the first batch what the script has prepared, and ends before the script would
    train."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.workers = workers
        self._epochs: int | None = None
        self._asked = False  # whether the script has asked for the epoch to go on with
        self._found: Blueprint | None = None

    @property
    def epoch(self) -> int:
        self._asked = True
        return 0

    def epochs(self, count: int) -> Iterable[int]:
        self._epochs = count
        if self._found is not None:
            self._end()
        return super().epochs(count)

    def _prepare(self, thing: Any) -> Any:
        thing = super()._prepare(thing)
        if isinstance(thing, torch.optim.Optimizer):
            replace_step(thing, self._end)
        if isinstance(thing, DataLoader):
            samples = len(thing.dataset)  # type: ignore[arg-type]
            dealt = DealtLoader(thing, self.workers, samples)
            order = order_of(samples, shuffles(thing), seed=0)
            dealt.part = lambda: one_part(order, samples, 0, self.workers, thing.batch_size or 1)
            dealt.evaluates = self._look
            return dealt
        return thing

    def _look(self) -> bool:
        """The script wants batches: before the loop over epochs, to look at them."""
        self._found = self._found or blueprint_of(self, None).copied()
        if self._epochs is not None or self._asked:
            self._end()
        BackwardLosses(self._end).listen()
        return True

    def _end(self) -> None:
        raise TrialDone

    @property
    def looked(self) -> bool:
        """Whether the script was given batches."""
        return self._found is not None

    def blueprint(self) -> Blueprint:
        found = self._found or blueprint_of(self, None)
        return dataclasses.replace(found, epochs=self._epochs, keeps_place=self._asked or self._epochs is not None)


def blueprint_of(run: ScriptRun, epochs: int | None) -> Blueprint:
    """The blueprint of what a script has prepared. Raises BadInput if no run can be made of it."""
    missing = [
        what
        for what, there in (("model", run.models), ("optimizer", run.optimizers), ("loader", run.loader))
        if not there
    ]
    if missing or run.loader is None:
        raise BadInput(
            f"the script has prepared no {' and no '.join(missing)}; call run.prepare(model, optimizer, loader) before "
            "the loop"
        )
    model = join_models(run.models)
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise BadInput("the model has no trainable parameters; unfreeze some")
    loader = run.loader
    return Blueprint(
        tensors=describe_model(model),
        optimizer=spec_of_all(run.optimizers, model),
        dataset=len(loader.dataset),  # type: ignore[arg-type]
        batch_size=loader.batch_size or 1,
        shuffle=shuffles(loader),
        drop_last=loader.drop_last,
        epochs=epochs,
        device=trained[0].device.type,
        readers=loader.num_workers,
    )


class WorkerRun(ScriptRun):
    """A worker's part in a run: the strategy's program begins at the first batch, step or question."""

    def __init__(
        self,
        blueprint: Blueprint,
        config: RunConfig,
        rank: int,
        start: Callable[[WorkerRun], LoopContext],
        play: Callable[[LoopContext], None],
        note: Callable[[Evaluation, int], None],
        stop: Callable[[], None],
    ) -> None:
        """`start` makes the context of the strategy's program, `play` runs the program; `note` puts a report on record,
        of several with one number the first; `stop` has all workers stop."""
        super().__init__()
        self.rank, self.workers = rank, config.workers
        self.losses = BackwardLosses()
        self._blueprint, self._config, self._start, self._play = blueprint, config, start, play
        self._note, self._have_all_stop = note, stop
        self._reports = Counter[int]()  # by epoch
        self._dealt: DealtLoader | None = None
        self._steps = 0  # that the script has asked for
        self._news = False  # whether there was one since the last report
        self._open: dict[str, CodeType | None] = {}  # functions of the script in whose loops over these it is
        self.turns = Turns(self._program)
        self.context: LoopContext | None = None

    def context_of(self, *parts: Any) -> LoopContext:
        """The context of the strategy's program, from the parts that one of a task has, too."""
        task, *others = parts
        model = join_models(self.models)
        return LoopContext(
            dataclasses.replace(task, model=lambda: model),
            *others,
            turns=self.turns,
            optimizers=self.optimizers,
            losses=self.losses,
            saved=self.saved,
            dataset=self._blueprint.dataset,
            shuffle=self._blueprint.shuffle,
        )

    # -- what the script prepares ---------------------------------------------------------------------------------
    def _prepare(self, thing: Any) -> Any:
        if self.context is not None:
            raise BadInput("run.prepare was called after the loop had begun; prepare everything before it")
        thing = super()._prepare(thing)
        if isinstance(thing, torch.optim.Optimizer):
            number = len(self.optimizers) - 1
            if not number:
                register_optimizer_step_pre_hook(self._check_prepared)
            replace_step(thing, lambda: self._step(number))
            tell_of_state(thing)
        if isinstance(thing, DataLoader):
            self._dealt = dealt = DealtLoader(thing, self.workers, self._config.samples, self._config.seed)
            dealt.begin, dealt.ask, dealt.place = self._begin_pass, self._next, self._passes_done
            dealt.trained = lambda: self.losses.calls + self._steps
            dealt.evaluates, dealt.part = self._evaluates, self._part
            return dealt
        return thing

    def _check_prepared(self, optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
        """Refuse the step of an optimizer that has parameters of the run's models and was not prepared: other workers
        would not learn of it."""
        if optimizer in OF_RUNS or any(optimizer is each for each in self.optimizers):
            return
        mine = {id(parameter) for model in self.models for parameter in model.parameters()}
        if any(id(parameter) in mine for parameter in parameters_of(optimizer)):
            raise BadInput(
                f"an optimizer that was not prepared ({type(optimizer).__name__}) takes a step with parameters of the "
                "prepared model; give all optimizers to run.prepare"
            )

    def save(self, **objects: Any) -> None:
        if self.context is not None:
            raise BadInput("run.save was called after the loop had begun; name what is to be saved before it")
        super().save(**objects)

    def _program(self) -> None:
        found = blueprint_of(self, None)
        odd = self._blueprint.differs(found)
        if odd is not None:
            raise BadInput(f"the script prepares something else in worker {self.rank} than in its trial: {odd}")
        load_first_values(join_models(self.models), self._blueprint.tensors)
        self.losses.listen()
        self.context = self._start(self)
        self.context.data.stopping = self._stopped
        self._play(self.context)

    # -- what the script does -------------------------------------------------------------------------------------
    def _passes_done(self) -> int:
        return 0 if self._blueprint.keeps_place and self.epoch >= 0 else self._place()

    def _begin_pass(self, wish: BeginPass) -> None:
        assert self._dealt is not None
        last, served = self._dealt.newest, self.context is not None and self.context.servers is not None
        if served and wish.unused and last is not None and (last.ended or last.handed > 1):
            raise RunFailed(  # servers take a batch for used when the next is asked for
                f"a pass over the loader took {last.handed} batches and trained on none of them; evaluate under "
                "torch.no_grad(), or on a loader that is not prepared"
            )
        self.turns.ask(wish)

    def _next(self, epoch: int) -> Batch | None:
        batch: Batch | None = self.turns.ask(NextBatch(epoch))
        self._open["batches"] = None if batch is None else users_function()
        if batch is not None:
            device = torch.device(self._blueprint.device)
            seed_all(device, self._config.seed, TRAINING, batch.epoch, batch.first)  # as a run of a task draws
        return batch

    def _step(self, optimizer: int) -> None:
        self._steps += 1
        news, self._news = self._news, True
        self.turns.ask(TakeStep(optimizer))
        if self.context is not None and self.context.data.dropped:
            self._news = news

    def _evaluates(self) -> bool:
        """Whether the script iterates over the loader to evaluate: without gradients; or, when the run has no batches
        any more, if models are not in training, or it has gone through an epoch without training before."""
        assert self._dealt is not None
        if not torch.is_grad_enabled():
            return True
        looks = self._dealt.looked or not any(model.training for model in self.models)
        return looks and self.context is not None and self._is_over()

    def _part(self) -> Iterator[Batch]:
        """This worker's part of the data; nothing of it is used up."""
        self._place()
        assert self.context is not None
        members, config = sorted({*self.context.comm.view.workers, self.rank}), self._config
        order = order_of(self._blueprint.dataset, self._blueprint.shuffle, config.seed)
        return one_part(order, config.samples, members.index(self.rank), len(members), config.batch_size)

    def _place(self) -> int:
        return int(self.turns.ask(Place()) or 0)

    @property
    def epoch(self) -> int:
        place = self._place()
        if self._dealt is not None:
            self._dealt.skip_none(place)
        return place

    def epochs(self, count: int) -> Iterator[int]:
        limit = self._config.epochs
        for epoch in range(self.epoch, count if limit >= NO_LIMIT else limit):
            if self._is_over():
                break
            self._open["epochs"] = users_function()
            yield epoch
        self._open["epochs"] = None

    def _is_over(self) -> bool:
        """Whether the run has no more batches for this script."""
        context = self.context
        if context is None:
            return False
        if self._stopped or (context.servers is not None and context.comm.stop_requested()):
            return True  # other members of a group stop when all have voted on it
        return context.progress.finished()

    def _report(self, value: float, loss: float | None, figures: Mapping[str, float]) -> None:
        if self.context is None:
            self._place()
        if self.context is None or (self._dealt is not None and self._dealt.replaying):
            return
        newest = None if self._dealt is None else self._dealt.newest
        begun, epochs = newest is not None, 0 if newest is None else newest.epoch + newest.ended
        served, workers = self.context.servers is not None, self.context.comm.view.workers
        if not self._news and (self._is_over() or (served and begun)):
            return  # of an epoch without a step: the run was stopped, or others have trained on all of it
        first = bool(workers) and self.rank == workers[0]
        self._news, number = False, self._number_of_report(newest)
        if first or (served and begun):  # the members of a group are alike
            self._note(self.context.evaluation(value, loss, epochs, figures), number)

    def stop(self) -> None:
        super().stop()
        if self.context is not None:
            self.context.data.stopping = True
        self._have_all_stop()

    def _number_of_report(self, newest: Pass | None) -> int:
        """The number of a report: the same for the reports of several workers on one epoch."""
        epoch = -1 if newest is None else newest.epoch
        self._reports[epoch] += 1
        return (epoch + 1) * MOST_REPORTS + self._reports[epoch]

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        if self.context is None:
            raise BadInput("run.clip_grad_norm_ was called before the loop had begun; call it after loss.backward()")
        self.context.replica.clip_norm = float(max_norm)
        present = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(present)

    def left(self, end: SystemExit) -> RunFailed | None:
        """The failure of a script that has called sys.exit with an error, or in a loop over batches or epochs of which
        there were more; None if it was done: sys.exit(main()) is well once main has returned."""
        context, place = self.context, place_of(end)
        running = {frame.f_code for frame, _ in traceback.walk_tb(end.__traceback__)}
        amid = context is not None and not self._is_over() and running & set(self._open.values())
        if end.code in (None, 0) and not amid:
            return None
        at = "" if context is None else f" at step {context.progress.step + 1}"
        remedy = ", before its loop was done; leave the loop with break, or raise an error" if amid else ""
        return RunFailed(f"worker {self.rank} called sys.exit({end.code!r}){at}{place and f' ({place})'}{remedy}")

    def _has_never_stepped(self) -> bool:
        """Whether the script was given batches and took no step. Where workers take batches as they come, a slow worker
        may have too few for a step; a worker with its full part has enough."""
        if self._steps or self.context is None or self._dealt is None or self._dealt.newest is None:
            return False
        return self._dealt.newest.handed >= (1 if self.context.servers is None else len(self._dealt))

    def end(self) -> None:
        """The script has come to its end; returns when the run has."""
        if self.context is None:
            raise BadInput("the script has ended without a batch; iterate over the prepared loader")
        if self._has_never_stepped() and not (self._stopped or self.context.comm.stop_requested()):
            raise RunFailed(NO_STEP)
        after = None if self._dealt is None else self._dealt.after_newest()
        self.turns.ask(AtEnd(after.epoch if after is not None and after.broken else 0))
