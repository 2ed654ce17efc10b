"""What a person sees of a benchmark: progress, a table, a picture."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from torrential.bench.allreduce import Benchmark, Result, Timings, decode
from torrential.bench.estimate import Plan, known_costs, plan
from torrential.bench.member import CALIBRATION_SECONDS, Calibrated, News, Picked
from torrential.comm.costs import Fitted
from torrential.errors import BadInput
from torrential.progress import LINE_SECONDS, REDRAW_SECONDS, byte_count, counted, duration
from torrential.records import Event, Record

TRUSTED = 0.1  # of the planned time: until so much is done, the plan says more than how long things took
WIDTH = 124  # what the table needs with all algorithms
LEGEND = (
    "* the least median, auto's included. / best: auto's time divided by that one's; / gloo: by Gloo's (native); both "
    "are medians of the ratios within a round. In brackets: interpolated from the times of the calibration."
)


class BenchmarkProgress:
    """A listener that says beforehand how long it takes, and then how long still: a bar on a terminal, else a line now
    and then. What is done counts by the time it was to take: the largest size takes a thousand times the smallest."""

    def __init__(
        self,
        asked: Benchmark,
        console: Console,
        live: bool | None = None,  # None: as the console is a terminal
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._asked, self._console, self._clock = asked, console, clock
        self._done, self._spent = 0, 0.0  # measurements, and the seconds that all until then was to take
        self._plan: Plan | None = None
        self._checked = set[int]()  # sizes
        self._began: float | None = None  # when costs were known to the workers
        self._heard_at = self._drawn = clock()
        self._doing = f"starting {asked.workers} workers"
        if live is None:
            live = console.is_terminal and not console.is_dumb_terminal and console.file.isatty()
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False) if live else None
        self._announce(known_costs(asked))
        if self._live:
            self._live.start()

    def _announce(self, table: Fitted | None) -> None:
        sizes, rounds = counted(len(self._asked.sizes), "size"), counted(self._asked.rounds, "round")
        names = counted(len(self._asked.algorithms), "algorithm")
        what = f"{self._asked.cells:,} measurements ({sizes}, {names}, {rounds})"
        if table is None:
            first = f"costs of {self._asked.workers} workers are measured first, for about {CALIBRATION_SECONDS:.0f} s"
            self._print(f"{what}; {first}, and then it is said how long the rest takes")
        else:
            self._plan = plan(self._asked, table)
            self._print(f"{what}: about {duration(self._plan.total)}, by the costs measured here before")

    def record(self, record: Record) -> None:
        if isinstance(record, Event) and record.event == "bench":
            self._heard(decode(record))
        self.tick()

    def _heard(self, news: News) -> None:
        if isinstance(news, Calibrated):
            self._began, self._doing = self._clock(), "costs are known"
            if self._plan is None:
                self._plan = plan(self._asked, news.table)
                self._print(f"about {duration(self._plan.total)} to go")
        elif isinstance(news, Picked):
            self._doing = f"{byte_count(news.nbytes)} checking every sum"
        else:
            assert self._plan is not None, "costs are known before anything is measured"
            self._done += 1
            self._spent += self._plan.blocks[news.nbytes, news.name]
            if news.nbytes not in self._checked:
                self._checked.add(news.nbytes)
                self._spent += self._plan.checks[news.nbytes]
            self._doing = f"{byte_count(news.nbytes)} {news.name}"
        self._heard_at = self._clock()

    def worker_state(self, worker: int, state: str) -> None:
        if state == "training" and self._plan is None:
            self._doing = f"calibrating, for about {CALIBRATION_SECONDS:.0f} s"

    def tick(self) -> None:
        now = self._clock()
        if now - self._drawn < (REDRAW_SECONDS if self._live else LINE_SECONDS):
            return
        self._drawn = now
        left = self._time_left()
        words = f"{self._doing} · {self._done:,} / {self._asked.cells:,} measured"
        if self._live:
            self._live.update(self._area(words, left), refresh=True)
        else:
            self._print(words + (f" · {left} left" if left else ""))

    def _time_left(self) -> str:
        """The time still to go, if the rest takes as much longer than planned as what is done did."""
        if self._plan is None or self._began is None:
            return ""
        before = TRUSTED * self._plan.total
        slower = (self._heard_at - self._began + before) / (self._spent + before)
        under_way = self._clock() - self._heard_at
        return duration(max(0.0, (self._plan.total - self._spent) * slower - under_way))

    def _area(self, words: str, left: str) -> RenderableType:
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True, overflow="ellipsis")
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        bar = ProgressBar(total=self._plan.total if self._plan else 1.0, completed=self._spent)
        head.add_row(words, bar, f"{left} left" if left else "")
        return head

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True, highlight=False)

    def close(self) -> None:
        if self._live:
            self._live.stop()


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


def _cell(row: Timings, name: str) -> Text:
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
    """Refuse, before anything is measured, a path where no picture can be written."""
    if path.suffix.lower() != ".png":
        raise BadInput(f"--plot writes PNG files (given: {path}); try {path.with_suffix('.png')}")
    if not path.absolute().parent.is_dir():
        raise BadInput(f"there is no directory {path.absolute().parent} for --plot; make it first")
    try:  # last, as without a home directory it has things to say when it is loaded
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BadInput("--plot needs matplotlib; install it with: pip install 'torrential[plot]'") from error


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
