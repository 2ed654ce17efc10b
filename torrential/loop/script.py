"""Runs a script as Python does, or a function."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from torrential.errors import BadInput
from torrential.loop.blueprint import Script


def play(script: Script) -> None:
    """Run the script to its end; it finds its arguments in sys.argv, and its directory on the search path."""
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
