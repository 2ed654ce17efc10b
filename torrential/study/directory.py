"""The directory of a study: one question, put once, and one process at a time that answers it."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from torrential import records
from torrential.errors import BadInput
from torrential.files import read_json
from torrential.locks import lock_directory
from torrential.study.ask import FORMAT, Question, differences
from torrential.study.results import STUDY

MOST_RUNS = 100_000
TRIALS_ARE_FIXED = (
    "; the number of trials is fixed before the first run, as adding some after a look at the verdict makes "
    "differences by chance likelier (--trials auto, from the beginning, allows for it)"
)


def read_question(directory: Path) -> Question:
    path = directory / STUDY
    try:
        found = read_json(path)
        version = found.get("format") if isinstance(found, dict) else None
        if version != FORMAT:
            raise BadInput(
                f"{path} has format {version} and this version reads {FORMAT}; use the version that wrote it"
            )
        return _checked(path, msgspec.convert(found, Question))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BadInput(f"{directory} holds no study ({STUDY} is missing); name the directory of one") from error
    except OSError as error:
        raise BadInput(f"cannot read {path} ({error.strerror}); check its permissions") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is damaged ({error}); take it from a copy, or start a new study") from error


def _checked(path: Path, question: Question) -> Question:
    """Refuse what no study has, and what would make readers look for runs without end, or outside of the study."""
    asked = question.asked
    tried = math.prod(map(len, asked.tune.values())) if asked.tune else 0
    runs = len(question.entries) * (asked.trials + tried * asked.tune_trials)
    if min(asked.trials, asked.tune_trials) < 1 or runs > MOST_RUNS:
        raise BadInput(
            f"{path} asks for fewer than one run of an entry, or for more than {MOST_RUNS:,} in all; "
            "take it from a copy, or start a new study"
        )
    for spec in question.entries:
        if not re.fullmatch(r"[A-Za-z0-9=_][A-Za-z0-9=._-]{0,150}", spec.slug):
            raise BadInput(f"{path} names a directory {spec.slug!r}; take it from a copy, or start a new study")
    return question


def open_directory(directory: Path, question: Question) -> Question:
    """Make the study's directory, or find in it the same study; gives the question that is kept there. Only for a
    process that has locked it."""
    records.make_directory(directory)
    _sweep(directory)
    if (directory / STUDY).exists():
        kept = read_question(directory)
        if changed := differences(kept, question):
            why = TRIALS_ARE_FIXED if kept.asked.trials != question.asked.trials else ""
            raise BadInput(f"{directory} holds another study ({'; '.join(changed)}){why}; choose another --out")
        return kept
    records.check_new_directory(directory)
    records.replace_file(directory / STUDY, msgspec.json.format(msgspec.json.encode(question), indent=2) + b"\n")
    return question


def _sweep(directory: Path) -> None:
    """Take away what processes that were killed while they wrote a file have left of it."""
    for path in directory.glob(".*"):
        half = re.fullmatch(r"\.(?:writable|.+\.tmp)-(\d+)", path.name)
        if half and not records.lives(int(half[1])):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """One process at a time carries a study out; the lock goes with the process. The directory is made if need be."""
    records.make_directory(directory)
    fd = lock_directory(directory, "study")
    try:
        yield
    finally:
        os.close(fd)
