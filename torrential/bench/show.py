"""What a person sees of a benchmark: progress, a table, a picture."""

from __future__ import annotations

import time
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from torrential.bench.allreduce import Ask, Result, Row, decode
from torrential.bench.member import CALIBRATION_SECONDS, Calibrated, Measured, Picked
from torrential.comm.costs import Fitted
from torrential.errors import BadInput
from torrential.progress import byte_count
from torrential.records import Event, Record

LINE_SECONDS = 2.0
WIDTH = 124  # what the table needs with all algorithms
LEGEND = (
    "* the least median, auto's included. / best: auto's time divided by that one's; / gloo: by Gloo's (native); both "
    "are medians of the ratios within a round. In brackets: interpolated from the times of the calibration."
)


class Watching:
    """A listener: a bar on a terminal, else a line now and then."""

    def __init__(self, asked: Ask, console: Console) -> None:
        self._asked, self._console = asked, console
        self._done, self._said = 0, time.monotonic()
        self._doing = f"starting {asked.workers} workers"
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        live = console.is_terminal and console.file.isatty()
        self._bar = Progress(*columns, console=console, transient=True) if live else None
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task(self._doing, total=asked.cells)

    def record(self, record: Record) -> None:
        if isinstance(record, Event) and record.event == "bench":
            news = decode(record)
            if isinstance(news, Calibrated):
                self._doing = "costs are known"
            elif isinstance(news, Picked):
                self._doing = f"{byte_count(news.nbytes)} checking every sum"
            elif isinstance(news, Measured):
                self._done += 1
                self._doing = f"{byte_count(news.nbytes)} {news.name}"
        self.tick()

    def worker_state(self, worker: int, state: str) -> None:
        if state == "training":
            self._doing = f"calibrating, for about {CALIBRATION_SECONDS:.0f} s"

    def tick(self) -> None:
        now = time.monotonic()
        if self._bar:
            self._bar.update(self._task, completed=self._done, description=self._doing)
        elif now - self._said > LINE_SECONDS:
            self._said = now
            self._console.print(f"{self._doing} · {self._done:,} / {self._asked.cells:,} measured", highlight=False)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()


def table(result: Result) -> RenderableType:
    title = f"all-reduce between {result.workers} workers, {result.transport}: median ms (predicted)"
    shown = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    names = list(result.rows[0].ms)
    for column in ("size", *names, "auto is", "/ best", "/ gloo"):
        shown.add_column("gloo" if column == "native" else column, justify="right", no_wrap=True)
    for row in result.rows:
        ratios = (f"{ratio:.2f}" if ratio else "" for ratio in (row.auto_over_best, row.auto_over_gloo))
        shown.add_row(byte_count(row.bytes), *(_cell(row, name) for name in names), row.picked, *ratios)
    return Group(shown, Text(LEGEND), Text(result.machine), Text(noise(result)), Text(describe(result.fitted)))


def _cell(row: Row, name: str) -> Text:
    best = name == row.best
    text = Text(f"{_ms(row.ms[name])}{'*' if best else ''}", style="bold green" if best else "")
    return text.append(f"\n({_ms(row.predicted_ms[name])})", style="dim")


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def noise(result: Result) -> str:
    same = [row.auto_over_picked for row in result.rows if row.auto_over_picked is not None]
    if not same:
        return "How exact this is would show if auto and what it picks were both measured."
    return (
        f"auto against the very algorithm it picks: {min(same):.2f} to {max(same):.2f}. "
        "That is the same code but for the picking, so smaller differences than this mean nothing."
    )


def describe(fitted: Fitted) -> str:
    costs = fitted.costs
    rates = [f"{1e-9 / cost:.3g} GB/s {what}" for cost, what in ((costs.byte, "sent"), (costs.reduce, "added")) if cost]
    most = max(size for points in fitted.measured.values() for size, _ in points)
    return (
        f"Calibrated up to {byte_count(most)}; predictions beyond are extrapolated. "
        f"Fitted to messages over {fitted.transport} ({fitted.when}): {1e6 * costs.latency:.3g} µs a message, "
        f"{', '.join(rates)}; these costs alone are off by {100 * fitted.error():.0f} % (median)."
    )


def check_plot(path: Path) -> None:
    """Before anything is measured: can a picture be written there?"""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BadInput("--plot needs matplotlib; install it with: pip install 'torrential[plot]'") from error
    if path.suffix.lower() != ".png":
        raise BadInput(f"--plot writes PNG files (given: {path}); try {path.with_suffix('.png')}")
    if not path.absolute().parent.is_dir():
        raise BadInput(f"there is no directory {path.absolute().parent} for --plot; make it first")


def plot(result: Result, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    sizes = [row.bytes for row in result.rows]
    for name in result.rows[0].ms:
        width = 2.5 if name == "auto" else 1.2
        label = "gloo" if name == "native" else name
        (line,) = axes.plot(sizes, [row.ms[name] for row in result.rows], marker="o", lw=width, label=label)
        if name != "auto":
            axes.plot(sizes, [row.predicted_ms[name] for row in result.rows], "--", lw=0.8, color=line.get_color())
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="ms (dashed: predicted)")
    axes.set_title(f"all-reduce between {result.workers} workers, {result.transport}\n{result.machine}", fontsize=10)
    axes.grid(which="major", alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise BadInput(f"cannot write {path} ({error.strerror}); choose another file for --plot") from error
