"""The built-in tasks, and the way from a name or a file to a `Task`."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torrential.errors import BadInput, UnknownName
from torrential.userfiles import import_file, split_spec, users_own

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
    file, and after its own variable too if that was asked for.
    """
    file, name = split_spec(spec)
    if not file:
        if spec not in TASKS:
            raise UnknownName("task", spec, [*TASKS, "path/to/file.py"])
        return TASKS[spec]()
    module, path = import_file(file, "task")
    task = _pick(module, path, name)
    if task.name != path.name:
        return task
    return dataclasses.replace(task, name=path.stem if name in ("", _DEFAULT_NAME) else f"{path.stem}-{name}")


def _pick(module: ModuleType, path: Path, name: str) -> Task:
    from torrential.task import Task

    members = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    tasks = [key for key, value in members.items() if isinstance(value, Task)]
    if not name and _DEFAULT_NAME not in members:
        if len(tasks) != 1:
            if not tasks:
                made = f"a function without arguments that returns one ({path.name}:NAME)"
                raise BadInput(f"{path} holds no Task; make one (task = tt.Task(...)), or name {made}")
            held = f"holds {len(tasks)} tasks ({', '.join(tasks)})"
            raise BadInput(f"{path} {held} and none is named {_DEFAULT_NAME!r}; say which: {path.name}:NAME")
        name = tasks[0]
    name = name or _DEFAULT_NAME
    if name not in members:
        own = [key for key, value in members.items() if getattr(value, "__module__", "") == module.__name__]
        raise UnknownName(f"task in {path}", name, {*tasks, *own})
    value: Any = members[name]
    if not isinstance(value, Task) and callable(value):
        value = users_own(path, value)
    if not isinstance(value, Task):
        kind = type(value).__name__
        raise BadInput(
            f"{name} in {path} is a {kind}, not a Task; make it a Task or a function without arguments for one"
        )
    return value
