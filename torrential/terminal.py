"""Text for a terminal: it has our styles, and no control sequences from elsewhere.

Names of tasks, entries and directories, texts of events and of errors may come from files that others have written. A
terminal obeys what it finds in them: an escape sequence moves the cursor, hides lines, or writes to the clipboard.
"""

from __future__ import annotations

import errno
import re
import signal
import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment

from torrential import streams

# Control characters but for line break and tab; those that turn the direction of text; halves of characters, which
# names of files that are not UTF-8 are read as and which cannot be printed.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Terminal(Console):
    """A console that shows text from files, and never obeys it: commands in it are written out."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Everything that is printed is rendered here; rich adds its own commands afterwards, or marks them."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def fail(self, message: str) -> None:
        """Print why a command fails, after the remains of a display that was cut short."""
        self.show_cursor(True)  # which it has hidden
        self.print(f"[red]error:[/red] {escape(message)}", highlight=False, soft_wrap=True)


def check_output(err: Terminal, remark: str = "") -> int:
    """The exit code of a program for which all went well: 0 if standard output has taken what it was given; 141 if that
    is a pipe that was closed, as of any program that SIGPIPE ends; else 1, and `err` says why."""
    lost = streams.why_lost(sys.stdout)
    if lost is None:
        return 0
    if lost.errno == errno.EPIPE:
        return 128 + signal.SIGPIPE
    err.fail(f"standard output: {lost.strerror}; write it elsewhere{remark}")
    return 1


def standard_error() -> Terminal:
    """Standard error as a terminal that falls silent when it is lost; as it is where somebody has put another stream in
    its place, such as a notebook."""
    ours = sys.stderr is not None and sys.stderr is sys.__stderr__
    return Terminal(file=streams.kept(2, sys.stderr)) if ours else Terminal(stderr=True)


def printable(text: str) -> str:
    r"""The text with characters that could command a terminal written out, as in \x1b."""
    return _COMMANDS.sub(lambda found: _written_out(ord(found[0])), text)


def printable_json(text: str) -> str:
    r"""The same JSON value with such characters as JSON writes them, as in \u009b."""
    return _COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _written_out(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
