"""Files that others may have written: read without trust in their kind, their size or their content.

What is wrong with one is an OSError with words in `strerror`, or a msgspec.DecodeError: readers say it as they say that
a file is missing, or damaged.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

T = TypeVar("T")

LARGEST_JSON = 16 << 20  # bytes; manifests have a few thousand
LARGEST_WHOLE = 1 << 64
DEEPEST_JSON = 50  # levels; manifests have about five


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file to read it. Anything else is refused: a pipe could keep the reader waiting, a device never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # to open a pipe waits otherwise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    return open(descriptor, "rb")


def read_regular(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """The content of a file; one with more than `most` bytes is refused."""
    with open_regular(path) as file:
        if most is not None and os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", os.fspath(path))
        return file.read(-1 if most is None else most)


def decode_json(content: bytes, type: type[T]) -> T:
    """Decode JSON as msgspec does, except that content nested too deeply is an error like any other."""
    try:
        return msgspec.json.decode(content, type=type)
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None


def read_json(path: Path) -> Any:
    """The JSON value in a small file: nested so little that it can be walked by recursion, with whole numbers that a
    float can hold."""
    found = decode_json(read_regular(path, LARGEST_JSON), object)
    level: list[Any] = [found]
    for _ in range(DEEPEST_JSON):
        if any(isinstance(value, int) and abs(value) > LARGEST_WHOLE for value in level):
            raise msgspec.DecodeError("it has a whole number of more than 64 bits")
        level = [child for value in level for child in _children(value)]
        if not level:
            return found
    raise msgspec.DecodeError(f"it is nested more than {DEEPEST_JSON} levels deep")


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
