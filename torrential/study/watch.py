"""What a person sees while a study goes on. On a terminal, below a line for each run that has ended:

    run 5 / 12 ━━━━━━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 0:01:38 left
    ssp, trial 2 · step 120 / 500 · validation accuracy 95.3 % (target 97 %)

Elsewhere the lines alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from torrential.progress import REDRAW_SECONDS, duration, final_metric, metric_value, number
from torrential.records import Evaluation, Record, Step
from torrential.study.plan import Trial
from torrential.study.read import read_run
from torrential.study.results import Run, unit_of_time


class StudyProgress:
    """A StudyListener that shows progress, and also gives out displays for the runs."""

    def __init__(
        self,
        metric: str,
        target: float,
        console: Console,
        live: bool | None = None,  # None: as the console is a terminal
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metric, self._target, self._console, self._clock = metric, target, console, clock
        self._runs = self._done = self._ended_here = 0
        self._spent = 0.0  # seconds, on the runs that have ended here
        self._began = self._drawn = -math.inf
        self._trial: Trial | None = None
        self._step, self._value = 0, math.nan
        self._steps: int | None = None
        if live is None:
            live = console.is_terminal and not console.is_dumb_terminal and console.file.isatty()
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False) if live else None

    def planned(self, runs: int, done: int) -> None:
        self._runs, self._done = runs, done
        if done:
            self._print(f"{done} of {runs} runs are there already")
        if self._live:
            self._live.start()

    def goes_on(self, runs: int, trials: int, more: int) -> None:
        self._runs = runs
        self._print(f"undecided after {trials} trials each: going on to {more}")

    def begins(self, trial: Trial) -> None:
        self._trial, self._began = trial, self._clock()
        self._step, self._steps, self._value = 0, None, math.nan
        self.tick()

    def listen(self, steps: int | None) -> RunInStudy:
        self._steps = steps
        return RunInStudy(self)

    def ended(self, trial: Trial) -> None:
        self._done += 1
        self._ended_here += 1
        self._spent += self._clock() - self._began
        self._trial = None
        left = self._time_left()
        outcome = describe(read_run(trial.directory), self._metric, self._target)
        self._print(f"{self._done} / {self._runs} · {trial.title}: {outcome}" + (f" · {left} left" if left else ""))

    def close(self) -> None:
        if self._live:
            self._live.stop()

    def message(self, text: str) -> None:
        self._print(text)

    def heard(self, record: Record) -> None:
        if isinstance(record, Step):
            self._step = max(self._step, record.step)
        elif isinstance(record, Evaluation) and record.split == "validation":
            self._value = record.value
        self.tick()

    def tick(self) -> None:
        now = self._clock()
        if self._live and now - self._drawn >= REDRAW_SECONDS:
            self._drawn = now
            self._live.update(self._area(), refresh=True)

    def _time_left(self) -> str:
        """The time still to go, if the runs to come take as long as those that have ended here."""
        if not self._ended_here or self._done == self._runs:
            return ""
        under_way = 0.0 if self._trial is None else self._clock() - self._began
        return duration(max(0.0, self._spent / self._ended_here * (self._runs - self._done) - under_way))

    def _area(self) -> RenderableType:
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        left = self._time_left()
        head.add_row(
            f"run {min(self._done + 1, self._runs)} / {self._runs}",
            ProgressBar(total=self._runs, completed=self._done),
            f"{left} left" if left else "",
        )
        return Group(head, Text(self._now(), no_wrap=True, overflow="ellipsis"))

    def _now(self) -> str:
        if self._trial is None:
            return ""
        parts = [self._trial.title]
        if not self._step:
            parts.append("starting")
        else:
            parts.append(f"step {self._step:,}" + (f" / {self._steps:,}" if self._steps else ""))
        if not math.isnan(self._value):
            target = metric_value(self._metric, self._target)
            parts.append(f"validation {self._metric} {metric_value(self._metric, self._value)} (target {target})")
        return " · ".join(parts)

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True, highlight=False)


class RunInStudy:
    """The display of one run of a study."""

    def __init__(self, watching: StudyProgress) -> None:
        self._watching = watching

    def record(self, record: Record) -> None:
        self._watching.heard(record)

    def worker_state(self, worker: int, state: str) -> None: ...

    def tick(self) -> None:
        self._watching.tick()

    def message(self, text: str) -> None:
        self._watching.message(text)

    def close(self) -> None: ...  # the study goes on


def describe(run: Run, metric: str, target: float) -> str:
    """The end of a run in a few words."""
    wanted = f"{metric_value(metric, target)} {metric}"
    if run.diverged:
        return f"missed {wanted}, diverged"
    assert run.summary is not None
    value = run.summary.value
    name = final_metric(metric, run.summary.reported)
    last = "" if value is None else f", {name} {metric_value(metric, value)}"
    if run.time_to_target is None:
        return f"missed {wanted}{last}"
    return f"{wanted} after {number(run.time_to_target)} {unit_of_time(run.summary.world)}{last}"
