"""The entry point: the process that a shell starts, its child that carries the command out, and exit codes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import typer

from torrential import descriptors, processes, streams
from torrential.cli.commands import app
from torrential.cli.common import err
from torrential.errors import BY_THE_TASK, INTERRUPTS, BadInput, Terminated, TorrentialError
from torrential.terminal import check_output, printable
from torrential.usercode import place_of, refuse_exit


def main() -> None:
    """Entry point. The command is carried out in a child: a task's code may end that, and is not this process.

    Without a terminal a run goes on when its output is no longer read: its records count.
    """
    streams.keep()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    code, finished = processes.run_in_child(carry_out)
    if code < 0:
        err.fail(f"the command was ended by {signal.Signals(-code).name}; what a run had recorded is in its directory")
        code = 128 - code
    elif not finished:
        directory = processes.begun()
        err.fail(_exited(code, directory))
        code = 2 if directory is None else 1
    os._exit(code)  # this process has nothing to take down


def _exited(code: int, directory: Path | None) -> str:
    """What is said where something has ended the child that carried the command out; of a run it goes on record."""
    words = f"the command exited with status {code} before it was done"
    if directory is None:
        return f"{words}, {BY_THE_TASK}"
    from torrential import records
    from torrential.worlds.failure import going_on

    path = directory / records.RECORDS
    found = records.read_records(path) if path.exists() else []
    last = max((record.step for record in found if isinstance(record, records.Step)), default=0)
    said = f"{words} (the last step on record: {last}), {BY_THE_TASK}; {going_on(directory)}"
    records.note_end(directory, records.FAILED, said)
    return said


def carry_out() -> int:
    """The exit code: 0, 1 (the run failed), 2 (bad input), 130 (interrupted), 143 (terminated); and 141 if standard
    output is a pipe that was closed, as of any program that SIGPIPE ends."""
    code = 0
    try:
        _check_arguments()
        with descriptors.explained():
            code = app(standalone_mode=False) or 0
    except TorrentialError as error:
        err.fail("\n".join([str(error), *getattr(error, "__notes__", ())]))
        code = error.exit_code
    except SystemExit as end:
        if place_of(end):
            refused = refuse_exit(end)
            err.fail(str(refused))
            code = refused.exit_code
        else:  # what a shell asks for its completion ends like this
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except typer.Abort:
        code = 130
    except KeyboardInterrupt:
        code = 130
    except Terminated as end:
        code = 128 + int(end.args[0])
    except ImportError as error:  # what modules in C++ make of a signal that comes while they are loaded
        if not isinstance(error.__cause__, INTERRUPTS):
            raise
        code = 130 if isinstance(error.__cause__, KeyboardInterrupt) else 128 + int(error.__cause__.args[0])
    except OSError as error:  # a directory that cannot be written to, a name that is too long
        if error.filename is None:
            raise
        err.fail(f"{error.filename}: {error.strerror}")
        code = 1
    except Exception as error:
        if type(error).__module__.startswith(("click", "typer")) and hasattr(error, "format_message"):
            if text := _usage(error):  # none where the help itself was the answer
                err.fail(text)
            code = 2
        else:
            raise
    sys.stdout.flush()  # whoever leaves with a code does so at once
    return code or check_output(err, " (the records of a run are complete all the same)" if processes.begun() else "")


def _check_arguments() -> None:
    """Names of files need not be text, but manifests, records and pages that name them are."""
    for argument in sys.argv:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise BadInput(f"the argument {printable(argument)} is not UTF-8; give another name") from error


def _usage(error: Any) -> str:
    """What is wrong with the arguments; where one could not be converted, with the value given."""
    message = str(error.format_message())
    errors = getattr(error.__cause__, "errors", None)
    return message if errors is None else f"{message} (given: {errors()[0]['input']!r})"
