"""Compiled forward and backward passes: a model's call goes through torch.compile.

    build     a batch is run through forward and backward, and thrown away     (trainer/backward.py)
    compile   in the first process of this user that comes to it; the others wait, and find the result on disk
    train     with kernels that are there

The module itself stays what it was: torch keeps the compiled call beside it, so its names, its parameters and its
checkpoints are those of the plain model, and evaluation, in another process, uses the plain one. Random numbers are
drawn as without compiling (`fallback_random`), so dropout drops the same elements.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torrential.cache import cache_directory
from torrential.config import RunConfig
from torrential.errors import BadInput
from torrential.locks import in_turn

CACHE = "TORCHINDUCTOR_CACHE_DIR"  # torch's name for the directory of what it has compiled
PATIENCE_SECONDS = 300.0  # with another process that compiles; then this one does it, too


def compile_model(model: nn.Module) -> None:
    """Have calls of a model compiled from now on. What torch compiles and learns about shapes it keeps by the function
    that is called, so that of a model has a name of its own: other models of the process make no difference.
    (nn.Module.compile would leave a model alone that is of torch's own classes, such as an nn.Sequential.)"""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=f"call_{next(_numbers)}")
    model._compiled_call_impl = torch.compile(call, options={"fallback_random": True})


_numbers = itertools.count()


def compiled_sizes(config: RunConfig) -> tuple[int, ...]:
    """The numbers of samples for which the model is compiled before the run: the batch, and, where other batches come,
    another one, at which torch compiles for any number."""
    size, joined = config.batch_size, config.batch_size * config.workers
    ends = config.steps is None or config.steps * config.samples_per_step >= config.samples  # an epoch
    return (size, size - 1) if config.samples % joined and ends and size > 2 else (size,)


@contextlib.contextmanager
def compiling_in_turn() -> Iterator[None]:
    """A block that compiles. One process of a user enters it at first; the others follow when it is done, and read
    what it has compiled."""
    given, own = os.environ.get(CACHE), cache_directory()
    place = Path(given) if given else None if own is None else own / "compiled"
    turn: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if place is not None:  # else, of a user without a home directory, torch has a place of its own
        os.environ[CACHE] = str(place)
        place.mkdir(parents=True, exist_ok=True)
        turn = in_turn(place, PATIENCE_SECONDS)
    with turn, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own modules, as they are imported
        yield


def check_compiler(device: str) -> None:
    """Refuse to compile where that cannot work: torch writes C++, for GPUs with Triton."""
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        raise BadInput(
            f"compile=true needs a C++ compiler, and {name} is not there; install it, name another one in CXX, or "
            "leave compile out"
        )
    if not Path(header := os.path.join(sysconfig.get_path("include"), "Python.h")).exists():
        raise BadInput(
            f"compile=true needs Python's own header files, and {header} is not there; install them (python3-dev), or "
            "leave compile out"
        )
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        raise BadInput("compile=true on a GPU needs triton, which is not installed; install it, or leave compile out")
