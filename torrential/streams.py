"""Standard output and error that outlast their reader.

A terminal that is closed, a pipe whose reader has left, a full disk: writing there raises OSError, and would end a run
that has hours behind it. A kept stream notes the first such error, falls silent, and lets its writer go on.
"""

from __future__ import annotations

import io
import os
import select
import sys
from typing import Any, TextIO


class TolerantFile(io.FileIO):
    """A descriptor that is written to for as long as that works."""

    lost: OSError | None = None  # why it fell silent

    def write(self, data: Any, /) -> int:
        if self.lost is None:
            try:
                while (written := super().write(data)) is None:  # its reader is slow, and nobody may wait in the kernel
                    select.select((), (self,), ())
                return written
            except OSError as error:
                self.lost = error
        return len(data)


def keep() -> None:
    """Put kept streams in the place of sys.stdout and sys.stderr, for this process and those that it forks."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # closed from the beginning; no socket may get this number, to be written to by mistake
            os.open(os.devnull, os.O_RDONLY)
    sys.stdout, sys.stderr = kept(1, sys.stdout), kept(2, sys.stderr)


def kept(descriptor: int, like: TextIO | None) -> TextIO:
    """A kept text stream in the manner of another one, which is None where the descriptor was closed."""
    raw = TolerantFile(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(like, "encoding", None),
        errors=getattr(like, "errors", None),
        line_buffering=descriptor == 2 or raw.isatty(),
        write_through=getattr(like, "write_through", False),
    )


class Labelled(io.TextIOBase):
    """A text stream that writes whole lines, each behind a label."""

    def __init__(self, stream: TextIO, label: str) -> None:
        self._stream, self._label, self._begun = stream, label, ""

    def write(self, text: str, /) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        if lines:
            self._stream.write("".join(f"{self._label}: {line}\n" for line in lines))
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        if self._begun:
            self.write("\n")
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()


def label(name: str) -> None:
    """Have lines that this process prints begin with a name."""
    sys.stdout, sys.stderr = Labelled(sys.stdout, name), Labelled(sys.stderr, name)


def why_lost(stream: TextIO) -> OSError | None:
    """Why a stream fell silent, once all that it was given is written; None for one that did not, or is not kept."""
    stream.flush()
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return raw.lost if isinstance(raw, TolerantFile) else None
