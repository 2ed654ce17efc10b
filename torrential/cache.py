"""Where things are kept for the next run on this machine: data sets that were downloaded, and what was measured."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path | None:
    """`$XDG_CACHE_HOME/torrential`, else `~/.cache/torrential`; None for a user who has no home directory.

    A relative path counts as not given, as the XDG specification has it: it would name another place in every
    directory.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    home = os.path.expanduser("~")  # HOME, or what the password file says; "~" for a user who is not in there
    place = given if os.path.isabs(given) else os.path.join(home, ".cache")
    return Path(place, "torrential") if os.path.isabs(place) else None
