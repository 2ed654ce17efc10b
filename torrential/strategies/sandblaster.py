"""Sandblaster L-BFGS (Dean et al. 2012): a coordinator commands, servers keep all vectors, workers compute portions.

    coordinator ── Assignment(portion) ──► worker        many small portions of one large batch, to whoever is idle
    worker ── Computed(portion) ────► coordinator   the first result of a portion counts, a copy's is thrown away
    worker ── sum of gradients ─────► servers       every few portions, when the coordinator says so
    coordinator ── dot, axpy, ... ──► servers       scalars come back: the two-loop recursion, the line search

Parameters, gradient, direction and history lie on the servers, each range on one and its replicas (server/vectors.py).
The objective is the mean loss over the batch, and the optimizer's weight decay; the line search sees to it that every
step decreases it. What the optimizer is called, and its learning rate, have no effect.

Any role may die. A worker's portions are given to others; a sum that reached some servers only is computed again and
added where it is missing. A coordinator's successor asks the servers what they remember and the workers what they have,
and repeats the commands of the iteration: commands that were carried out before are not carried out twice, and no
finished portion is computed anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import msgspec
import torch
from torch import Tensor, nn

from torrential.data.portions import Portions
from torrential.errors import BadInput
from torrential.optim.lbfgs import DIRECTION, GRADIENT, Command, CurvaturePair, LinePoint, keeps, two_loop, wolfe
from torrential.optimizers import OptimizerSpec
from torrential.server.consistency import Consistency
from torrential.server.vectors import HANDLERS, PARAMETERS, Survey, combined, read_survey
from torrential.strategies.base import Strategy
from torrential.strategies.context import Context
from torrential.strategies.portioned import LETTERS, PortionedBatches, PortionWorker
from torrential.strategies.roles import Role, Roles, Servers
from torrential.task import Task

START, START_GRADIENT = "start", "start_gradient"  # where the line search began
PORTIONS_EACH = 20  # portions for each worker, unless it is said


class Word(msgspec.Struct):
    """What a coordinator knows at the beginning of an iteration; servers keep it, and checkpoints."""

    step: int = 0
    samples: int = 0
    number: int = 1  # of the next list of commands
    batch: int = 0  # evaluations of the objective so far
    value: float = math.nan  # the objective; nan: not known yet
    pairs: list[CurvaturePair] = []
    slot: int = 0  # the place of the next pair
    scale: float = 1.0
    over: bool = False


class Sandblaster(Strategy, frozen=True, kw_only=True):
    """Sandblaster L-BFGS: full-batch steps with a line search, the batch cut into small portions for idle workers."""

    name: ClassVar[str] = "sandblaster"
    summary: ClassVar[str] = "L-BFGS on servers: a large batch in small portions, copies of slow ones, a line search"
    uncompressed: ClassVar[str] = "L-BFGS needs its gradients exactly"
    uses_rate: ClassVar[bool] = False
    passes: ClassVar[int] = 3  # an epoch is one step or less
    letters: ClassVar = LETTERS

    history: Annotated[int, msgspec.Meta(ge=1, le=100)] = 10
    """The number of pairs that approximate the Hessian."""
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """The share of the training samples that makes a batch; with less than 1 every step has a batch of its own, and
    costs an evaluation more."""
    portions: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The number of portions that a batch is cut into; 0: 20 for each worker."""
    copies: Annotated[int, msgspec.Meta(ge=0)] = 1
    """The number of workers that may be given a copy of a portion that somebody is slow with."""
    sum_every: Annotated[int, msgspec.Meta(ge=1)] = 8
    """The number of portions that a worker adds up before it pushes their sum."""
    tolerance: Annotated[float, msgspec.Meta(ge=0)] = 1e-9
    """The largest element of the gradient at which the run ends: there is nothing left to gain."""

    def roles(self, workers: int, servers: int) -> Roles:
        names = [GRADIENT, DIRECTION, START, START_GRADIENT]
        names += [f"{letter}{place}" for place in range(self.history) for letter in "sy"]
        return (
            Role("worker", workers, self.worker, "view"),
            Servers(servers, Consistency(None), handlers=HANDLERS, vectors=dict.fromkeys(names, 0.0)),
            Role("coordinator", 1, self.coordinator, "restart"),
        )

    def optimizer(self, spec: OptimizerSpec) -> OptimizerSpec:
        return spec.replaced(torch.optim.SGD, spec.lr, ("weight_decay",) if spec.decays_gradients() else ())

    def refuse(self, task: Task, model: nn.Module) -> None:
        if task.clip_norm is not None:
            raise BadInput("sandblaster needs the gradient as it is; leave out clip_norm")
        for name, module in model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                raise BadInput(
                    f"sandblaster needs an objective that is a sum over samples, and batch norm ({name}) makes each "
                    "depend on the others; use group norm, or another strategy"
                )
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                raise BadInput(
                    f"sandblaster needs an objective that is the same whenever it is evaluated, and dropout ({name}, "
                    f"p={module.p:g}) is not; set p=0, or use another strategy"
                )

    def worker(self, ctx: Context) -> None:
        ctx.replica.keep_batches()
        PortionWorker(ctx).run()
        ctx.leave()

    def coordinator(self, ctx: Context) -> None:
        _Minimisation(self, ctx).run()
        ctx.leave()


class _Minimisation:
    """L-BFGS by commands to the servers; an evaluation of the objective is a batch for the workers.

    Every list of commands has a number, and an iteration begins with what is known before it (Word) in the servers'
    hands. So a coordinator that takes another's place says the iteration again from its beginning: it is given the
    same scalars, comes to the same decisions, and so to the place where the other one was."""

    def __init__(self, strategy: Sandblaster, ctx: Context) -> None:
        self._strategy, self._ctx, self._word = strategy, ctx, Word()
        ctx.state.everybody("lbfgs", self._saved, self._load)
        self._total = max(1, round(strategy.share * ctx.config.samples))
        count = min(strategy.portions or PORTIONS_EACH * ctx.config.workers, self._total)
        self._batches = PortionedBatches(ctx, Portions(count, strategy.copies), self._total, strategy.sum_every)
        self._weights = ctx.replica.weight_decay()
        self._number = self._batch = 0  # of the next list of commands, and of the last batch
        self._spent = 0  # samples since the last step
        self._remembered: list[Survey] = []  # what servers know of a coordinator before this one

    # -- what outlives this process ---------------------------------------------------------------------------------
    def _saved(self) -> dict[str, Tensor]:
        return {"word": torch.frombuffer(bytearray(msgspec.msgpack.encode(self._word)), dtype=torch.uint8)}

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        self._word = msgspec.msgpack.decode(tensors["word"].numpy().tobytes(), type=Word)

    def _recall(self) -> None:
        """Learn what the servers know of a coordinator that was here before; it is listened to no more."""
        answer = self._ctx.params.call("survey", {"least": self._batches.first_ticket}).wait()
        self._remembered = [read_survey(tensor) for tensor in answer.tensors]
        words = [msgspec.msgpack.decode(survey.word, type=Word) for survey in self._remembered if survey.word]
        if words:
            self._word = max(words, key=lambda word: word.number)

    # -- iterations -------------------------------------------------------------------------------------------------
    def run(self) -> None:
        progress = self._ctx.progress
        self._recall()
        progress.go_on(self._word.step, self._word.samples, over=self._word.over)
        self._batches.greet()
        while not progress.finished():
            self._iterate()
        self._number, self._word.over = self._word.number, True
        self._run([], msgspec.msgpack.encode(self._word))
        self._batches.dismiss()

    def _iterate(self) -> None:
        """One step: a direction, and a line search along it."""
        word, progress, several = self._word, self._ctx.progress, self._strategy.share < 1
        self._number, self._batch, self._spent = word.number, word.batch, 0
        self._run([], msgspec.msgpack.encode(word))
        value = word.value
        if math.isnan(value) or several:
            value, _ = self._evaluate([], along=False)
        slope = two_loop(self._run, word.pairs, word.scale)
        if not slope < 0:  # rounding has spoilt the pairs
            word.pairs, word.scale = [], 1.0
            slope = two_loop(self._run, (), 1.0)
        copies: list[Command] = [("copy", START, PARAMETERS), ("copy", START_GRADIENT, GRADIENT)]
        length, largest = self._run([*copies, ("sum_abs", GRADIENT), ("max_abs", GRADIENT)])
        taken = None
        if math.isfinite(value) and largest > self._strategy.tolerance:
            taken = self._search(value, slope, 1.0 if word.pairs else min(1.0, 1 / length))
        if taken is not None:
            self._keep_pair()
        else:
            self._run([("copy", PARAMETERS, START), ("copy", GRADIENT, START_GRADIENT)])
            if not self._all_spent:
                progress.end_early(self._why(value, largest))
        self._word = msgspec.structs.replace(
            word,
            step=word.step + 1,
            samples=word.samples + self._spent,
            number=self._number,
            batch=self._batch,
            value=value if taken is None else taken.value,
        )
        progress.conclude(self._spent, self._word.value)

    def _search(self, value: float, slope: float, first: float) -> LinePoint | None:
        """The step that the line search takes, with its gradient on the servers; None if there is none."""
        search, step = wolfe(value, slope, first), first
        next(search)
        while True:
            point = LinePoint(step, *self._evaluate([("step", PARAMETERS, START, step, DIRECTION)]))
            if not math.isfinite(point.value):
                self._ctx.progress.note("step_shortened", f"the objective is {point.value} at a step of {step:.3g}")
            if self._all_spent:
                return point if point.value < value else None  # no time for a better one
            try:
                step = search.send(point[1:])
            except StopIteration as end:
                taken: LinePoint | None = end.value
                break
        if taken is not None and taken.step != step:
            self._evaluate([("step", PARAMETERS, START, taken.step, DIRECTION)])
        return taken

    @property
    def _all_spent(self) -> bool:
        """Whether the samples of all epochs are used up."""
        config = self._ctx.config
        return self._word.samples + self._spent >= config.epochs * config.samples

    def _why(self, value: float, largest: float) -> str:
        if not math.isfinite(value):
            return f"the objective is {value} at the first parameters; begin with others"
        if largest <= self._strategy.tolerance:
            return f"converged: no element of the gradient is larger than {largest:.2g}"
        kind = str(self._ctx.params.dtype).removeprefix("torch.")
        further = "" if kind == "float64" else "; a model in float64 can go on further"
        return f"no step along the last direction decreases the objective in {kind} ({value:.9g}){further}"

    def _keep_pair(self) -> None:
        """Remember the step and what it changed of the gradient, if that tells something of the curvature."""
        word, s, y = self._word, f"s{self._word.slot}", f"y{self._word.slot}"
        product, square = self._run(
            [
                ("difference", s, PARAMETERS, START),
                ("difference", y, GRADIENT, START_GRADIENT),
                ("dot", y, s),
                ("dot", y, y),
            ]
        )
        word.pairs = [pair for pair in word.pairs if pair.s != s]
        if keeps(product, square):
            word.pairs.append(CurvaturePair(s, y, 1 / product))
            word.scale, word.slot = product / square, (word.slot + 1) % self._strategy.history

    # -- commands and evaluations -----------------------------------------------------------------------------------
    def _run(self, commands: Sequence[Command], word: bytes | None = None) -> list[float]:
        """Have all servers carry out commands, once; `word` is for them to keep."""
        number, self._number = self._number, self._number + 1
        options = {"number": number, "forget": self._word.number, "commands": commands, "word": word}
        return combined(commands, self._ctx.params.call("vectors", options).wait().tensors)

    def _evaluate(self, before: list[Command], along: bool = True) -> tuple[float, float]:
        """The objective, and its slope along the direction, after some commands; the gradient is on the servers."""
        place = self._word.step, self._word.samples + self._spent
        self._batch += 1
        self._spent += self._total
        self._run([*before, ("begin", GRADIENT, self._batch)])
        loss = 0.0
        if not self._remembered or not all(self._number in survey.answered for survey in self._remembered):
            epoch = self._word.step if self._strategy.share < 1 else 0
            loss = self._batches.compute(self._batch, epoch, place, self._remembered) / self._total
            self._remembered = []
        slope: list[Command] = [("dot", GRADIENT, DIRECTION)] if along else []
        loss, decay, *product = self._run([("value", loss), ("decay", GRADIENT, PARAMETERS, self._weights), *slope])
        return loss + decay, product[0] if product else math.nan
