"""Finds the files of a known data set: where the user says, in our cache, where systems keep them, or by download."""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torrential.cache import cache_directory
from torrential.errors import BadInput

_SYSTEM = Path("/usr/share/datasets")
_TIMEOUT_SECONDS = 30.0
_data_dir: Path | None = None


@dataclass(frozen=True)
class Source:
    """A data set's files with their MD5 sums as published, the addresses they come from, and how else to get them."""

    name: str
    files: Mapping[str, str]
    addresses: tuple[str, ...]
    install: str  # a sentence for somebody without a network
    others: tuple[tuple[str, ...], ...] = ()  # the same data in other files: any complete list will do


def set_data_dir(path: Path | None) -> None:
    """Set the directory in which data is looked for first, and to which it is downloaded."""
    global _data_dir
    _data_dir = path


def find(source: Source, data_dir: Path | None = None) -> dict[str, Path]:
    """The data set's files by name, or those of one of its other lists. A file may lie there decompressed (no .gz).

    Checksums are for downloads only: distributions compress anew, so files found on disk are judged by their content.
    """
    chosen = data_dir or _data_dir
    own = [chosen / source.name] if chosen else []
    kept = [cache / source.name] if (cache := cache_directory()) else []
    places = [*([chosen] if chosen else []), *own, *kept, _SYSTEM / source.name]
    for place in places:
        for names in (tuple(source.files), *source.others):
            found = {name: path for name in names if (path := _present(place, name))}
            if len(found) == len(names):
                return found
    home = next(iter([*own, *kept]), None)
    if home is None:
        raise BadInput(
            f"{source.name} was not found in {_SYSTEM / source.name}, and there is no home directory to download it "
            f"to; {source.install}; or say where it shall be with --data-dir DIR"
        )
    try:
        return {name: _download(source, name, md5, home) for name, md5 in source.files.items()}
    except OSError as error:
        raise BadInput(
            f"{source.name} was found in none of {', '.join(map(str, places))} and could not be downloaded ({error}); "
            f"{source.install}; or put {', '.join(source.files)} in {home}"
        ) from error


def _present(place: Path, name: str) -> Path | None:
    return next((path for path in (place / name, place / name.removesuffix(".gz")) if path.is_file()), None)


def _download(source: Source, name: str, md5: str, home: Path) -> Path:
    """Fetches one file beside its place and renames it when its checksum is right; the first address that works."""
    if present := _present(home, name):
        return present
    home.mkdir(parents=True, exist_ok=True)
    failures = []
    for address in source.addresses:
        try:
            with urllib.request.urlopen(address + name, timeout=_TIMEOUT_SECONDS) as reply:
                content = reply.read()
        except OSError as error:
            failures.append(f"{address}{name}: {error}")
            continue
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
            failures.append(f"{address}{name}: wrong checksum")
            continue
        with tempfile.NamedTemporaryFile(dir=home, prefix=f".{name}.", delete=False) as file:
            try:
                file.write(content)
                file.flush()
                os.replace(file.name, home / name)
            except BaseException:
                os.unlink(file.name)
                raise
        return home / name
    raise OSError("; ".join(failures))
