"""Calls into the user's own code: what it raises is told as one sentence, with its place in that code.

with calling("loss"):                  the task's loss raised ValueError: no targets (/home/me/mine.py:12)
    loss = task.loss(outputs, targets)
"""

from __future__ import annotations

import contextlib
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, NoReturn

from torrential.errors import INTERRUPTS, BadInput, Interrupted, TaskFailed, TorrentialError

_loading: ContextVar[Path | None] = ContextVar("loading", default=None)  # the task file that is being imported
_OURS = (f"{Path(__file__).parent}/", f"{sysconfig.get_path('stdlib')}/", "<")
_INSTALLED = ("/site-packages/", "/dist-packages/")


class calling:
    """A block that runs one part of a task, or of the strategy that `whose` names. What the user's code raises there
    becomes TaskFailed.

    Errors that Torrential raises on purpose pass as they are, and so do interrupts. `made_by` is the user's function
    that is named where no frame is the user's, as in a model of torch's own layers.
    """

    __slots__ = ("_made_by", "_part", "_whose")

    def __init__(self, part: str, made_by: Callable[..., Any] | None = None, whose: str = "the task") -> None:
        self._part, self._made_by, self._whose = part, made_by, whose

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, TorrentialError) and not is_interrupt(error):
            raise failed(f"{self._whose}'s {self._part} raised", error, self._made_by) from error


def failed(fact: str, error: BaseException, made_by: Callable[..., Any] | None = None) -> TaskFailed:
    """The error for the user to read: a fact, the exception and its place. Where several frames are the user's, they
    are a note of it."""
    place = place_of(error)
    if not place and made_by is not None and (defined := _definition(made_by)):
        place = f"model factory at {defined}"
    failure = TaskFailed(f"{fact} {in_words(error)}{place and f' ({place})'}")
    if trace := trace_of(error):
        failure.add_note(trace)
    return failure


def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    """Handle SIGINT by an exception that no other code raises."""
    raise Interrupted


@contextlib.contextmanager
def telling_interrupts() -> Iterator[None]:
    """A block in which a KeyboardInterrupt of the user's code is told from SIGINT, unless the program handles that in a
    way of its own."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_interrupt(error: BaseException) -> bool:
    """Whether an exception ends the program from outside. So does a KeyboardInterrupt, but where SIGINT is ignored or
    raises Interrupted: there the user's code has raised it."""
    if isinstance(error, KeyboardInterrupt) and not isinstance(error, Interrupted):
        return signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, interrupt)
    return isinstance(error, INTERRUPTS)


@contextlib.contextmanager
def loading(path: Path) -> Iterator[None]:
    """A block that runs a file with a task or a strategy."""
    token = _loading.set(path)
    try:
        yield
    finally:
        _loading.reset(token)


def refuse_training() -> None:
    """Raises while a task's or strategy's file is being imported: one that trains there would train again for whoever
    asked for its task."""
    path = _loading.get()
    if path is not None:
        raise BadInput(
            f"{path.name} trains when it is imported; run it with `python {path.name}`, or put that under "
            '`if __name__ == "__main__":`'
        )


def refuse_joining() -> None:
    """Raises while a task's file is being imported that is a script with a loop of its own."""
    path = _loading.get()
    if path is not None:
        raise BadInput(f"{path.name} is a script with a loop of its own; run it with: torrential launch {path.name}")


def refuse_exit(end: SystemExit) -> BadInput:
    """The error to raise in the place of the user's SystemExit, which would end the program as if all were well."""
    place = place_of(end)
    return BadInput(
        f"{place and f'{place}: '}the task's code ended the program (sys.exit({end.code!r})); raise an error there, or "
        "return"
    )


def name_of_file() -> str:
    """What a task is called that was given no name: "mine.py" while that file is being imported (load_task makes more
    of it), else as the program; "task" where there is no file, as in a notebook."""
    loaded = _loading.get()
    if loaded is not None:
        return loaded.name
    main = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "task")
    if main.name.startswith("<"):  # standard input
        return "task"
    return main.parent.name if main.stem == "__main__" else main.stem


def in_words(error: BaseException) -> str:
    """An exception's class and text, in one line."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {' '.join(text.split())}".removesuffix(": ")


def place_of(error: BaseException) -> str:
    """The file and line of the user's code where an exception was raised; empty if none of its frames is the user's."""
    if isinstance(error, SyntaxError) and error.filename is not None and is_users(error.filename):
        return f"{error.filename}:{error.lineno}"
    frames = _frames(error)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def users_function() -> CodeType | None:
    """The code of the innermost function of the user's that is being run, or of the file; None if there is none."""
    frame = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_code


def trace_of(error: BaseException) -> str:
    """The frames that are the user's, where there are several; else empty, for `place_of` says it all."""
    frames = _frames(error)
    return "".join(traceback.format_list(frames)).rstrip() if len(frames) > 1 else ""


def is_users(filename: str) -> bool:
    """Whether a file is neither Torrential's nor Python's nor an installed package's."""
    return not filename.startswith(_OURS) and not any(place in filename for place in _INSTALLED)


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]


def _definition(function: Callable[..., Any]) -> str:
    """The place where a function of the user's, or the constructor of a class, begins."""
    function = getattr(function, "func", function)  # of a functools.partial
    code = getattr(function, "__code__", None) or getattr(getattr(function, "__init__", None), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None and is_users(code.co_filename) else ""
