"""Workers made slow on purpose, to see what the others make of it.

1:4,3:2         worker 1 takes four times as long for every batch, worker 3 twice
random:10:50    every worker takes ten times as long for one batch in each 50, drawn anew each time
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Self

from torrential.comm.protocol import Comm
from torrential.config import RunConfig
from torrential.errors import BadInput


@dataclass(frozen=True)
class Slow:
    always: dict[int, float] = field(default_factory=dict)  # factors by worker
    at_times: tuple[float, int] | None = None  # a factor, and in how many steps it applies once

    @classmethod
    def parse(cls, text: str | None, workers: int) -> Self:
        always: dict[int, float] = {}
        at_times = None
        for part in text.split(",") if text is not None else ():
            who, *numbers = part.strip().split(":")
            try:
                factor, *every = float(numbers[0]), *map(int, numbers[1:])
                if who == "random":
                    (steps,) = every
                    at_times = factor, steps
                else:
                    () = every
                    always[int(who)] = factor
                if not 1 <= factor < float("inf") or min(every, default=1) < 1:
                    raise ValueError
            except (ValueError, IndexError) as error:
                raise BadInput(
                    f"slow is worker:factor, or random:factor:steps, with factors of 1 and more (given: {part!r} in "
                    f"{text!r}); try slow=1:4 or slow=random:10:50"
                ) from error
        for worker in always:
            if not 0 <= worker < workers:
                raise BadInput(f"slow={text}: there is no worker {worker} (workers: {workers}); they count from 0")
        return cls(always, at_times)

    def factor(self, seed: int, worker: int, batch: int) -> float:
        """The factor by which a worker's batch takes longer; a pure function of its place."""
        factor = self.always.get(worker, 1.0)
        if self.at_times is not None:
            times, steps = self.at_times
            block, place = divmod(batch, steps)
            if Random(f"slow {seed} {worker} {block}").randrange(steps) == place:
                factor *= times
        return factor


class Brake:
    """Stretches a worker's batches, one after the other."""

    def __init__(self, config: RunConfig, comm: Comm) -> None:
        self._slow, self._seed, self._comm = Slow.parse(config.settings.slow, config.workers), config.seed, comm
        self._batch = 0

    def hold(self, began: float) -> None:
        """Sleep after a batch that began then, for as long as this worker is to be slower."""
        factor = self._slow.factor(self._seed, self._comm.rank, self._batch)
        self._batch += 1
        if factor > 1:
            self._comm.sleep((factor - 1) * (self._comm.now() - began))
