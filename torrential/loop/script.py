"""Runs a script as Python does, or a function."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import torch

from torrential.errors import BadInput
from torrential.loop.blueprint import Script


def spare_compiler() -> None:
    """Keep torch from loading its compiler when the script makes an optimizer: that takes each process more than a
    second and a hundred megabytes, and outside of compiled code the methods marked for it do the same without."""
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        plain = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if plain is not None:
            plain.__dynamo_disable = plain  # where torch keeps what its compiler makes of it


def play(script: Script) -> None:
    """Run the script to its end; it finds its arguments in sys.argv, and its directory on the search path."""
    spare_compiler()
    if script.function is not None:
        script.function()
        return
    sys.argv = [script.path, *script.args]
    sys.path.insert(0, str(Path(script.path).parent))
    main = ModuleType("__main__")
    main.__file__ = script.path
    sys.modules["__main__"] = main
    try:
        code = compile(Path(script.path).read_bytes(), script.path, "exec")
    except OSError as error:
        raise BadInput(f"cannot read {script.path} ({error.strerror})") from error
    exec(code, vars(main))
