"""Python files of the user's that hold a task or a strategy: named as file.py[:name], imported, sent along by value.

A file's directory goes to the front of sys.path, and what the file defines is pickled by value, so that it can be sent
to processes that cannot import it.
"""

from __future__ import annotations

import grp
import hashlib
import importlib.util
import os
import pwd
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from torrential.errors import BadInput, TorrentialError
from torrential.usercode import failed, is_interrupt, loading, place_of

FILE_MODULE = "torrential_file_"  # how the names of such modules begin
_imported: dict[Path, tuple[tuple[int, int, int], ModuleType]] = {}  # with what told one version from another


def split_spec(spec: str) -> tuple[str, str]:
    """The file and the name in it; two empty strings for what is registered under a name."""
    file, colon, name = spec.rpartition(":")
    if not colon or not file.endswith(".py"):
        file, name = spec, ""
    return (file, name) if file.endswith(".py") else ("", "")


def absolute_spec(spec: str) -> str:
    """The same in any working directory."""
    file, name = split_spec(spec)
    return spec if not file else str(Path(file).absolute()) + (name and f":{name}")


def import_file(file: str, what: str) -> tuple[ModuleType, Path]:
    """The file as a module of a name that depends on its path alone, and that path. A file that holds both a task and a
    strategy is imported once, unless it has changed in between."""
    path = Path(file)
    if not path.is_file():
        raise BadInput(f"there is no file {file} (looked in {Path.cwd()}); give the path of a {what}'s file")
    path = path.resolve()
    status = path.stat()
    version = (status.st_ino, status.st_mtime_ns, status.st_size)
    before, module = _imported.get(path, (None, None))
    if module is None or before != version or sys.modules.get(module.__name__) is not module:
        module = _import(path)
        _imported[path] = version, module
    return module, path


def _import(path: Path) -> ModuleType:
    digest = hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()
    spec = importlib.util.spec_from_file_location(f"{FILE_MODULE}{path.stem}_{digest}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    directory = str(path.parent)
    sys.path[:] = [directory, *(entry for entry in sys.path if entry != directory)]
    sys.modules[module.__name__] = module
    try:
        users_own(path, spec.loader.exec_module, module)
    except BaseException:
        del sys.modules[module.__name__]
        raise
    cloudpickle.register_pickle_by_value(module)
    return module


def users_own(path: Path, function: Callable[..., Any], *args: Any) -> Any:
    """Calls the user's code; if it raises, the user sees where in it, and nothing of ours."""
    try:
        with loading(path):
            return function(*args)
    except BadInput as error:
        place = place_of(error)
        raise BadInput(f"{place and f'{place}: '}{error}") from error
    except BaseException as error:
        if isinstance(error, TorrentialError) or is_interrupt(error):
            raise
        raise failed(f"{path} cannot be loaded:", error) from error


def check_own(record: Path, spec: str, remedy: str) -> None:
    """Refuse to go on with what is recorded in a directory, unless it is the caller's own.

    The record names a task or a strategy, and loading it may run a file. So no other user may have written the record,
    or be able to write to it, its directory, the file, or the file's directory, which it imports from; the last two may
    belong to root. Nor may another user be able to replace them, from a directory above them.
    """
    file = Path(split_spec(spec)[0])
    found = [_objection(path, path.stat(), (os.geteuid(),)) for path in (record.parent, record)]
    if file.is_file():
        found += [_objection(path, path.stat(), (os.geteuid(), 0)) for path in (file, file.resolve().parent)]
        for path in (*_way_to(record.absolute()), *_way_to(file.absolute())):
            found.append(_objection(path, path.lstat(), (os.geteuid(), 0), above=True))
    for objection in filter(None, found):
        raise BadInput(f"{objection}, and the Python file that {record.name} names would be run; {remedy}")


def _way_to(path: Path) -> Iterator[Path]:
    """A path and all that is above it, and where links among them lead."""
    for each in (path, *path.parents):
        yield each
        if each.is_symlink():
            yield from _way_to(each.parent / each.readlink())


def _objection(path: Path, status: os.stat_result, owners: Sequence[int], above: bool = False) -> str | None:
    """The reason why another user may have changed a file, a directory or a link, or its contents; None: no other user
    may. `above`: a directory in which only the entry on the way matters, which a sticky bit protects."""
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in owners:
        return f"{path} is not yours (owner: {_user(status.st_uid)})"
    if stat.S_ISLNK(status.st_mode) or (above and mode & stat.S_ISVTX):
        return None
    if mode & stat.S_IWOTH:
        return f"every user can write to {path} (mode: {mode:o})"
    if mode & stat.S_IWGRP and (group := _shared_group(status.st_gid)):
        return f"the group {group} can write to {path} (mode: {mode:o})"
    return None


def _shared_group(number: int) -> str | None:
    """The name of a group that has members besides the caller and root, or whose members are unknown."""
    try:
        group = grp.getgrgid(number)
    except KeyError:
        return str(number)
    members = {*group.gr_mem, *(user.pw_name for user in pwd.getpwall() if user.pw_gid == number)}
    return group.gr_name if members - {_user(os.geteuid()), _user(0)} else None


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # nobody has that number here
        return str(number)
