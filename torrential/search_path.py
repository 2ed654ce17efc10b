"""Where `python -m` looks for modules.

This one imports nothing that Python has not loaded before it begins: until the path is in order, anything else may come
from the current directory.
"""

import os
import sys


def drop_current_directory() -> None:
    """Take back what `python -m` has put before everything else on the search path. Where this package itself was found
    in the current directory, and may be nowhere else, that comes last. To be called by every module that is meant for
    `python -m`, before it imports anything else."""
    if sys.flags.safe_path:
        return
    try:
        here = os.getcwd()
    except FileNotFoundError:  # it was removed, and so is on no path
        return
    if sys.path[0] != here:
        return
    del sys.path[0]
    if os.path.dirname(os.path.dirname(os.path.abspath(__file__))) == here and here not in sys.path:
        sys.path.append(here)
