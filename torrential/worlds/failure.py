"""What ended a role, as one sentence: the same in every world, whether the role was a process or not.

exception ──describe──► Failure ──(a socket, or nothing)──► failed ──► RunFailed, WorkerFailed or Diverged
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from torrential.errors import Diverged, RunFailed, TaskFailed, TorrentialError, WorkerFailed
from torrential.records import MANIFEST, read_manifest
from torrential.usercode import in_words, is_interrupt, place_of, trace_of


class Failure(msgspec.Struct, frozen=True):
    """The facts about an exception that ended a role; plain data, so that a process can send it to another."""

    kind: Literal["diverged", "run", "known", "raised"]
    """diverged: training went astray; run: an error on purpose whose text names the role that it concerns; known:
    another error on purpose; raised: any other exception, those of the user's code included."""
    text: str
    step: int | None = None
    """The step that a worker was at, counted from 1; None for other roles, and before there is one."""
    trace: str = ""
    """Frames of the user's code, where they say more than the text."""


def describe(error: BaseException, step: int | None = None) -> Failure:
    """A failure's description from the exception that ended the role."""
    if isinstance(error, TaskFailed):
        return Failure("raised", str(error), step, "\n".join(getattr(error, "__notes__", ())))
    if isinstance(error, TorrentialError):
        kind: Literal["diverged", "run", "known"] = "known"
        if isinstance(error, RunFailed):
            kind = "diverged" if isinstance(error, Diverged) else "run"
        return Failure(kind, str(error), step)
    place = place_of(error)
    if not place and (frames := traceback.extract_tb(error.__traceback__)):
        place = f"{frames[-1].filename}:{frames[-1].lineno}"
    return Failure("raised", f"{in_words(error)}{place and f' ({place})'}", step, trace_of(error))


def failed(role: str, failure: Failure, directory: Path) -> RunFailed:
    """The error that a run ends with when one of its roles has failed."""
    at = "" if failure.step is None else f" at step {failure.step}"
    who = "" if failure.kind in ("diverged", "run") else f"{role} failed{at}: "
    onward = going_on(directory) if role.startswith("server") else last_good(directory)
    kinds = {"diverged": Diverged, "raised": WorkerFailed}
    error = kinds.get(failure.kind, RunFailed)(f"{who}{failure.text}; {onward}")
    if failure.trace:
        error.add_note(failure.trace)
    return error


@contextlib.contextmanager
def attributed(role: str, directory: Path) -> Iterator[None]:
    """Attribute every exception that is raised in this block to a role."""
    try:
        yield
    except BaseException as error:  # user code may raise anything
        if is_interrupt(error):
            raise
        raise failed(role, describe(error), directory) from error


def resuming(directory: Path) -> str:
    """The advice to go on with a run, by the command or the call that it was begun with."""
    path = directory / MANIFEST
    config = read_manifest(directory).config if path.exists() else {}
    if (script := config.get("script")) is not None:
        call = f"torrential launch --resume {directory}" if script[0] else f"tt.launch(..., resume={str(directory)!r})"
    elif config.get("strategy", "").endswith(":MapReduce"):
        call = f"tt.map_reduce(..., resume={str(directory)!r})"
    elif config and config.get("source") is None:
        call = f"tt.train(task, resume={str(directory)!r})"
    else:
        call = f"torrential train --resume {directory}"
    return f"go on with: {call}"


def last_good(directory: Path) -> str:
    saved = sorted((directory / "checkpoints").glob("step-*"))
    return f"the last good checkpoint is {saved[-1]}" if saved else "no checkpoint was made yet"


def going_on(directory: Path) -> str:
    """What is left of a run that failed, and how to go on from there; nothing is left before the first checkpoint."""
    saved = last_good(directory)
    return saved if saved.startswith("no ") else f"{saved}; {resuming(directory)}"
