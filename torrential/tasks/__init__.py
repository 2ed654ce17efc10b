"""The built-in tasks, and the way from a name or a file to a `Task`."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import os
import pwd
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import cloudpickle

from torrential.errors import INTERRUPTS, BadInput, TorrentialError, UnknownName
from torrential.usercode import failed, loading, place_of

if TYPE_CHECKING:  # torch is loaded when a task is: names are listed and completed without it
    from torrential.task import Task


@dataclass(frozen=True)
class Builtin:
    module: str
    function: str
    description: str

    def __call__(self) -> Task:
        build: Callable[[], Task] = getattr(importlib.import_module(self.module), self.function)
        return build()


TASKS: dict[str, Builtin] = {
    "digits": Builtin("torrential.tasks.digits", "digits", "UCI digits 8x8 (shipped), a small CNN with batch norm"),
    "digits-mlp": Builtin("torrential.tasks.digits", "digits_mlp", "UCI digits 8x8 (shipped), two hidden layers"),
    "fashion": Builtin("torrential.tasks.fashion", "fashion", "Fashion-MNIST, a CNN of three blocks with batch norm"),
    "fashion-mlp": Builtin("torrential.tasks.fashion", "fashion_mlp", "Fashion-MNIST, two hidden layers"),
    "fashion-resnet": Builtin("torrential.tasks.fashion", "fashion_resnet", "Fashion-MNIST, ResNet-8"),
    "cifar10": Builtin("torrential.tasks.cifar10", "cifar10", "CIFAR-10, ResNet-20, flips and crops"),
    "cifar10-resnet9": Builtin("torrential.tasks.cifar10", "cifar10_resnet9", "CIFAR-10, ResNet-9, flips and crops"),
}
_DEFAULT_NAME = "task"


def load_task(spec: str) -> Task:
    """A built-in task by name, or one from `path/to/file.py[:name]`: a Task there, or a function that returns one.

    Without a name it is `task`, or else the file's only Task. A Task that was not given a name is called after the
    file, and after its own variable too if that was asked for. The file's directory goes to the front of sys.path, and
    what the file defines is pickled by value, so that it can be sent to processes that cannot import it.
    """
    file, name = _split(spec)
    if not file:
        if spec not in TASKS:
            raise UnknownName("task", spec, [*TASKS, "path/to/file.py"])
        return TASKS[spec]()
    path = Path(file)
    if not path.is_file():
        raise BadInput(f"there is no file {file} (looked in {Path.cwd()}); give the path of a task's file")
    path = path.resolve()
    task = _pick(_import(path), path, name)
    if task.name != path.name:
        return task
    return dataclasses.replace(task, name=path.stem if name in ("", _DEFAULT_NAME) else f"{path.stem}-{name}")


def check_own(record: Path, spec: str, remedy: str) -> None:
    """Refuse to go on with what is recorded in a directory, unless it is the caller's own.

    The record names a task, and loading a task runs its file. So nobody else may have written the record, or be able to
    write to it, its directory, or the file; which may belong to root.
    """
    file = Path(_split(spec)[0])
    for path in (record.parent, record, *([file] if file.is_file() else [])):
        status = path.stat()
        allowed = (os.geteuid(), 0) if path == file else (os.geteuid(),)
        why = f"the Python file that {record.name} names would be run; {remedy}"
        if status.st_uid not in allowed:
            raise BadInput(f"{path} is not yours (owner: {_user(status.st_uid)}), and {why}")
        if status.st_mode & stat.S_IWOTH:
            raise BadInput(f"everybody can write to {path} (mode: {stat.S_IMODE(status.st_mode):o}), and {why}")


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # nobody has that number here
        return str(number)


def _split(spec: str) -> tuple[str, str]:
    """The file and the name in it; two empty strings for a built-in task."""
    file, colon, name = spec.rpartition(":")
    if not colon or not file.endswith(".py"):
        file, name = spec, ""
    return (file, name) if file.endswith(".py") else ("", "")


def _import(path: Path) -> ModuleType:
    """The file as a module of a name that depends on its path alone."""
    digest = hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()
    spec = importlib.util.spec_from_file_location(f"torrential_task_{path.stem}_{digest}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    directory = str(path.parent)
    sys.path[:] = [directory, *(entry for entry in sys.path if entry != directory)]
    sys.modules[module.__name__] = module
    try:
        _users_own(path, spec.loader.exec_module, module)
    except BaseException:
        del sys.modules[module.__name__]
        raise
    cloudpickle.register_pickle_by_value(module)
    return module


def _pick(module: ModuleType, path: Path, name: str) -> Task:
    from torrential.task import Task

    members = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    tasks = [key for key, value in members.items() if isinstance(value, Task)]
    if not name and _DEFAULT_NAME not in members:
        if len(tasks) != 1:
            held = f"holds {len(tasks)} tasks ({', '.join(tasks)})" if tasks else "holds no Task"
            raise BadInput(f"{path} {held} and none is named {_DEFAULT_NAME!r}; say which: {path.name}:NAME")
        name = tasks[0]
    name = name or _DEFAULT_NAME
    if name not in members:
        own = [key for key, value in members.items() if getattr(value, "__module__", "") == module.__name__]
        raise UnknownName(f"task in {path}", name, {*tasks, *own})
    value: Any = members[name]
    if not isinstance(value, Task) and callable(value):
        value = _users_own(path, value)
    if not isinstance(value, Task):
        kind = type(value).__name__
        raise BadInput(
            f"{name} in {path} is a {kind}, not a Task; make it a Task or a function without arguments for one"
        )
    return value


def _users_own(path: Path, function: Callable[..., Any], *args: Any) -> Any:
    """Calls the user's code; if it raises, the user sees where in it, and nothing of ours."""
    try:
        with loading(path):
            return function(*args)
    except (TorrentialError, *INTERRUPTS) as error:
        if isinstance(error, BadInput):
            place = place_of(error)
            raise BadInput(f"{place and f'{place}: '}{error}") from error
        raise
    except BaseException as error:
        raise failed(f"{path} cannot be loaded:", error) from error
