"""What a person sees while a run goes on, and at its end.

On a terminal, a live area below the messages, redrawn at most eight times a second:

    step 120 / 500 ━━━━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━━━━━━━━━━ 0:00:38 left
    loss 0.123 · validation accuracy 97.3 % (target 97 %) · 12,345 samples/s
    worker 0  training  █████████▒▒░  compute 78 %  communicate 14 %  wait 8 %

Elsewhere, plain lines: every message, evaluation and event, and a line on the training at most every two seconds.
What cannot be written is dropped (streams.py). There is no thread: things are drawn when something is fed in, so a
supervisor with a quiet moment calls `tick`.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from torrential.records import Evaluation, Event, Record, Step, Summary

REDRAW_SECONDS = 1 / 8
LINE_SECONDS = 2.0
WINDOW_SECONDS = 5.0  # over which samples/s is taken
MANY = 8  # with more workers, two lines for all of them
BAR = 12  # characters; a worker's line then fits 80 columns
COLOURS = {"compute": "green", "communicate": "yellow", "wait": "red"}
STATE_STYLES = {"training": "green", "waiting": "yellow", "lost": "bold red", "finished": "dim"}

Shares = tuple[float, float, float]  # seconds of compute, communicate, wait; recent records weigh more


class ProgressDisplay:
    """A context manager that is told what happens and shows it on `console` (standard error)."""

    def __init__(
        self,
        total_steps: int | None,
        workers: int,
        metric: str,
        target: float | None,
        console: Console,
        live: bool | None = None,  # None: as the console is a terminal
        clock: Callable[[], float] = time.monotonic,
        virtual: bool = False,  # whether the run's time is not ours
        total_samples: int | None = None,  # in the place of steps, where these are few and long
        reported: bool = False,  # whether evaluations are what a script reports, of data that it alone knows
    ) -> None:
        self._total, self._metric, self._target = total_steps, metric, target
        self._total_samples, self._samples, self._reported = total_samples, 0, reported
        self._console, self._clock = console, clock
        self._began, self._virtual = clock(), virtual
        self._states = dict.fromkeys(range(workers), "starting")
        self._shares: dict[int, Shares] = {}
        self._losses: dict[int, float] = {}
        self._held_out: dict[str, float] = {}
        self._step = self._epoch = 0
        self._points: deque[tuple[float, float, int, int]] = deque()  # our clock, the run's time, samples, step
        self._drawn = -math.inf
        if live is None:  # is_terminal alone also says yes to a pipe under FORCE_COLOR
            live = console.is_terminal and not console.is_dumb_terminal and console.file.isatty()
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False) if live else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Takes the live area away; what was printed above it stays."""
        if self._live:
            self._live.stop()

    def message(self, text: str) -> None:
        self._print(text)

    def worker_state(self, worker: int, state: str) -> None:
        """Starting, training, waiting, lost or finished."""
        self._states[worker] = state
        self.tick()

    def record(self, record: Record) -> None:
        match record:
            case Step():
                self._trained(record)
            case Evaluation():
                self._held_out[record.split] = record.value
                self._came_to(record)
                if not self._live:
                    metric = self._metric_line(record.split)
                    loss = "" if record.loss is None else f"{self._named(record.split)} loss {number(record.loss)} · "
                    self._print(
                        f"step {record.step:,} · epoch {record.epoch:,} · {metric} · "
                        f"{loss if loss != f'{metric} · ' else ''}{record.samples:,} samples in "
                        f"{seconds(record.time, self._virtual)}"
                    )
            case Event():
                if record.event == "worker_lost" and record.worker is not None:
                    self._states[record.worker] = "lost"
                self._print(_event_line(record, self._virtual))
            case Summary():
                pass  # the command line prints final_table
        self.tick()

    def tick(self) -> None:
        """Draws what has changed, when it is time to."""
        now = self._clock()
        if now - self._drawn < (REDRAW_SECONDS if self._live else LINE_SECONDS):
            return
        if self._live:
            self._drawn = now
            self._live.update(self._area(), refresh=True)
        elif self._points:
            self._drawn = now
            left = self._time_left()
            line = [self._place(), f"epoch {self._epoch:,}", self._status(), f"{left} left" if left else ""]
            self._print(" · ".join(part for part in line if part))

    def _place(self) -> str:
        if self._total_samples:
            share = min(1.0, self._samples / self._total_samples)
            return f"step {self._step:,} · {share:.0%} of the samples".replace("%", " %")
        return f"step {self._step:,}" + (f" / {self._total:,}" if self._total else "")

    def _trained(self, record: Step) -> None:
        worker = record.worker
        if not record.of_worker:
            self._losses = {worker: record.loss}  # that of the whole step
            return self._came_to(record)
        if self._states.get(worker, "starting") == "starting":
            self._states[worker] = "training"
        self._losses[worker] = record.loss
        before = self._shares.get(worker, (0.0, 0.0, 0.0))
        new = (record.compute, record.communicate, record.wait)
        compute, communicate, wait = (
            0.9 * b + (n if math.isfinite(n) else 0.0) for b, n in zip(before, new, strict=True)
        )
        self._shares[worker] = (compute, communicate, wait)
        self._came_to(record)

    def _came_to(self, record: Step | Evaluation) -> None:
        now, before = self._clock(), self._step
        self._step, self._epoch = max(self._step, record.step), max(self._epoch, record.epoch)
        self._samples = max(self._samples, record.samples)
        if self._total is not None:
            self._total = max(self._total, self._step)  # with fewer workers than planned there are more steps
        if isinstance(record, Evaluation) and record.step <= before:
            return  # of parameters that others have gone on from
        if not self._points or now - self._points[-1][0] >= 0.02 or len(self._points) == 1:
            self._points.append((now, record.time, record.samples, record.step))
        while len(self._points) > 2 and now - self._points[0][0] > WINDOW_SECONDS:
            self._points.popleft()

    def _rate(self) -> float | None:
        """Samples a second of the run's own time, which a simulated world does not share with us."""
        if len(self._points) < 2:
            return None
        (_, start, first, _), (_, end, last, _) = self._points[0], self._points[-1]
        return (last - first) / (end - start) if end > start and last >= first else None

    def _time_left(self) -> str:
        total, place = (self._total_samples, 2) if self._total_samples else (self._total, 3)
        if not total or len(self._points) < 2:
            return ""
        (start, first), (end, last) = ((point[0], point[place]) for point in (self._points[0], self._points[-1]))
        return duration(max(0, total - last) * (end - start) / (last - first)) if last > first else ""

    def _status(self) -> str:
        here = [loss for worker, loss in self._losses.items() if self._states.get(worker) != "lost"]
        losses = [loss for loss in here if not math.isnan(loss)]  # a script that has taken no step yet has none
        rate = self._rate()
        parts = [f"loss {number(sum(losses) / len(losses))}"] if losses else []
        parts += [self._metric_line(split) for split in self._held_out]
        parts += [f"{rate:,.0f} samples/s"] if rate is not None else []
        if self._virtual and self._points:
            parts += [seconds(self._points[-1][1], True), f"{self._clock() - self._began:.1f} s of ours"]
        return " · ".join(parts)

    def _metric_line(self, split: str) -> str:
        line = f"{self._named(split)} {self._metric} {metric_value(self._metric, self._held_out[split])}"
        if self._target is not None and (split == "validation" or "validation" not in self._held_out):
            line += f" (target {metric_value(self._metric, self._target)})"
        return line

    def _named(self, split: str) -> str:
        return "reported" if self._reported else split

    def _area(self) -> RenderableType:
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        total, done = (self._total_samples, self._samples) if self._total_samples else (self._total, self._step)
        if total:
            head.add_column(ratio=1)
            head.add_column(no_wrap=True)
            bar = ProgressBar(total=total, completed=min(done, total))
            left = self._time_left()
            head.add_row(self._place(), bar, f"{left} left" if left else "")
        else:
            head.add_row(self._place())
        workers = self._all_workers() if len(self._states) > MANY else self._each_worker()
        return Group(head, Text(self._status(), no_wrap=True, overflow="ellipsis"), workers)

    def _each_worker(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for _ in range(4):
            table.add_column(no_wrap=True)
        for worker, state in sorted(self._states.items()):
            shares = self._shares.get(worker, (0.0, 0.0, 0.0))
            table.add_row(f"worker {worker}", Text(state, STATE_STYLES.get(state, "")), *_shares(shares))
        return table

    def _all_workers(self) -> RenderableType:
        counts = ", ".join(f"{count} {state}" for state, count in sorted(Counter(self._states.values()).items()))
        running = [shares for worker, shares in self._shares.items() if self._states.get(worker) != "lost"]
        compute, communicate, wait = (sum(column) for column in zip(*running, strict=True)) if running else (0.0,) * 3
        bar, words = _shares((compute, communicate, wait))
        states = Text(f"{len(self._states)} workers: {counts}", no_wrap=True, overflow="ellipsis")
        return Group(states, Text.assemble(bar, "  ", words))

    def _print(self, line: str) -> None:
        """Text without styles, so that nothing but its characters is written."""
        self._console.print(Text(line), soft_wrap=True, highlight=False)


def final_metric(metric: str, reported: bool) -> str:
    """The name of a run's last value of the metric: measured on test data, or reported by a script."""
    return f"{'reported' if reported else 'test'} {metric}"


def final_table(summary: Summary, took: float | None = None) -> RenderableType:
    """The end of a run for a person to read. `took`: seconds of ours, which a simulated run does not know."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _final_rows(summary, took):
        table.add_row(name, Text(value))
    return table


def _final_rows(summary: Summary, took: float | None) -> Iterable[tuple[str, str]]:
    servers = f", {counted(summary.servers, 'server')}" if summary.servers else ""
    unit = "virtual s" if summary.world == "sim" else "s"
    yield "task", f"{summary.task} (seed {summary.seed})"
    workers = counted(summary.workers, "worker")
    yield "strategy", f"{summary.strategy}, {workers}{servers}, world {summary.world}"
    nothing = "none (the script has not called run.report)" if summary.reported else "not measured"
    value = nothing if summary.value is None else metric_value(summary.metric, summary.value)
    yield final_metric(summary.metric, summary.reported), value
    if summary.target is not None:
        target = metric_value(summary.metric, summary.target)
        after = "" if summary.time_to_target is None else f" after {number(summary.time_to_target)} {unit}"
        yield "target", f"{target} reached{after}" if summary.reached else f"{target} not reached"
    rate = f", {summary.samples / summary.seconds:,.0f} samples/s" if summary.seconds > 0 else ""
    trained = f"{counted(summary.steps, 'step')}, {counted(summary.samples, 'sample')}"
    yield "trained", f"{trained} in {number(summary.seconds)} {unit}{rate}"
    if took is not None and summary.world == "sim":
        yield "simulated", f"in {number(took)} s of ours"
    yield "sent", byte_count(summary.bytes_sent)
    if summary.staleness_mean is not None:
        most = "" if summary.staleness_max is None else f", at most {summary.staleness_max:,}"
        yield "staleness", f"{number(summary.staleness_mean)} on average{most}"
    if summary.events:
        yield "events", f"{summary.events:,}, listed in records.jsonl"
    yield "directory", summary.out


def _shares(shares: Shares) -> tuple[Text, Text]:
    """The shares of the time, as a small bar and in per cent; both empty while nothing is known."""
    total = sum(shares)
    bar, words = Text(), Text()
    if not total > 0 or not math.isfinite(total):
        return bar, words
    ends = [round(BAR * sum(shares[: i + 1]) / total) for i in range(3)]
    for (name, colour), share, start, end in zip(COLOURS.items(), shares, [0, *ends], ends, strict=False):
        bar.append(("░" if name == "wait" else "▒" if name == "communicate" else "█") * (end - start), colour)
        words.append(f"{name} {100 * share / total:.0f} %  ", colour)
    words.rstrip()
    return bar, words


def _event_line(event: Event, virtual: bool) -> str:
    about = [f"worker {event.worker}"] if event.worker is not None else []
    about += [f"step {event.step:,}"] if event.step is not None else []
    return " · ".join(
        [seconds(event.time, virtual), event.event.replace("_", " "), *about, *filter(None, [event.detail])]
    )


def number(value: float) -> str:
    """Four significant digits, without an exponent where a person would write none."""
    if not math.isfinite(value) or value == 0 or not 1e-4 <= abs(value) < 1e7:
        return f"{value:.4g}"
    return f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"


def seconds(value: float, virtual: bool) -> str:
    return f"{number(value)} virtual s" if virtual else f"{value:.1f} s"


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def metric_value(metric: str, value: float) -> str:
    """Accuracies, which are fractions, in per cent; anything else as it is."""
    if "accuracy" in metric and math.isfinite(value):
        return f"{100 * value:.2f}".rstrip("0").rstrip(".") + " %"
    return number(value)


def duration(seconds: float) -> str:
    if not 0 <= seconds < 1e9:  # NaN too
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def byte_count(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
