"""The pages that people read (README.md and docs/*.md): their blocks of code, headings and links.

A block that is not run as it stands says so in a comment on the line before it:

    <!-- not run: takes four minutes -->              left out, with the reason
    <!-- shortened: --epochs 1 -->                    added to each of its torrential commands
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name != "log.md")]
LINKED = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```(?P<language>\S*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!-- (?P<word>not run|shortened): (?P<rest>[^\n]+) -->\n\Z")
_FILE = re.compile(r"# (\w+\.(?:py|toml))\n")
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int
    not_run: str = ""  # why
    shortened: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """The file that the block shows, named in its first line; an empty string where it is to be run at once."""
        named = _FILE.match(self.code)
        return named[1] if named else ""

    def commands(self) -> list[list[str]]:
        """The words of each command, without comments."""
        lines = self.code.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in _FENCE.finditer(text):
        said = _COMMENT.search(text, 0, found.start())
        word, rest = (said["word"], said["rest"]) if said else ("", "")
        yield Block(
            language=found["language"],
            code=found["code"],
            line=text.count("\n", 0, found.start()) + 1,
            not_run=rest if word == "not run" else "",
            shortened=tuple(shlex.split(rest)) if word == "shortened" else (),
        )


def links(page: Path) -> list[str]:
    return [found["target"] for found in _LINK.finditer(_FENCE.sub("", page.read_text()))]


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
