"""Every error that Torrential raises on purpose.

    TorrentialError
    ├── BadInput              what the user gave cannot be used; nothing was started
    │   ├── UnknownName       ... because no such task, strategy or option exists (the nearest name is offered)
    │   └── TaskFailed        the user's own code raised; names the part of the task, and file and line (usercode.py)
    ├── RunFailed             a run that had started could not go on
    │   ├── WorkerFailed      a role raised; names the role and the step
    │   ├── UnequalSizes      members gave a collective tensors of different sizes; names the members and sizes
    │   ├── UnequalCalls      members started different collectives, or of different types; names them
    │   └── Diverged          training went astray; no fault of the machine, and it would happen again
    │       └── NonFiniteLoss the loss turned NaN or infinite; names the worker and the step
    ├── CheckpointDamaged     no checkpoint in the directory can be trusted
    └── CommError             raised inside roles by waits
        ├── WaitedTooLong     the role waited for did not answer in time
        └── Regrouped         membership changed; whatever was in flight is void

Messages state the fact, the offending value and the remedy. We raise for the user and assert for ourselves.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

BY_THE_TASK = (
    "as by os._exit in the task's code; look for that in the model, the loss, the data sets and what they import"
)
"""What is said of an exit status that none of our own code gives."""
BY_THE_SCRIPT = "as by os._exit; look for that in the script and what it imports"
"""The same of a worker that runs a script with a loop of its own."""


class Terminated(BaseException):
    """SIGTERM as an exception, so that everything is cleaned up on the way out."""


class Interrupted(KeyboardInterrupt):
    """SIGINT, where it must be told from a KeyboardInterrupt that the user's code raises (usercode.py)."""


INTERRUPTS = (KeyboardInterrupt, Terminated)
"""What ends a program from outside. Anything else, BaseException or not, is the failure of the code that raised it."""

FEW = 12  # names that are read at a glance


class TorrentialError(Exception):
    """Base of all errors raised on purpose; the command line prints its message and no traceback."""

    exit_code = 1


class BadInput(TorrentialError):
    exit_code = 2


class UnknownName(BadInput):
    """No such task, strategy or option. Offers the nearest, and all of them if there is none or there are few."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hints = [f"did you mean {near[0]!r}?"] if near else []
        if not near or len(names) <= FEW:
            hints.append(f"known: {', '.join(names)}")
        super().__init__(f"no {kind} named {name!r}; {' '.join(hints)}")


class TaskFailed(BadInput):
    """The user's task code raised. In a run a world makes WorkerFailed of it, which names the role and the step."""


class RunFailed(TorrentialError):
    pass


class WorkerFailed(RunFailed):
    pass


class UnequalSizes(RunFailed):
    """`sizes`: by worker, how many elements it gave, or passed on of them."""

    def __init__(self, what: str, sizes: Mapping[int, int]) -> None:
        self.sizes = dict(sizes)
        given = ", ".join(f"worker {rank}: {size}" for rank, size in sorted(sizes.items()))
        super().__init__(f"members differ in the number of elements of their {what} ({given}); it must be one on all")


class UnequalCalls(RunFailed):
    """`calls`: by worker, which collective it has started, in words."""

    def __init__(self, calls: Mapping[int, str]) -> None:
        given = ", ".join(f"worker {rank}: {call}" for rank, call in sorted(calls.items()))
        remedy = "all members must start the same ones in the same order"
        super().__init__(f"members have started different collectives at once ({given}); {remedy}")


class Diverged(RunFailed):
    pass


class NonFiniteLoss(Diverged):
    def __init__(self, step: int, worker: int, loss: float, remedy: str) -> None:
        self.step, self.worker, self.loss = step, worker, loss
        super().__init__(f"the loss turned {loss} on worker {worker} at step {step}; {remedy}")


class CheckpointDamaged(TorrentialError):
    pass


class CommError(TorrentialError):
    pass


class WaitedTooLong(CommError):
    def __init__(self, who: str, seconds: float, what: str) -> None:
        self.who, self.seconds = who, seconds
        super().__init__(f"waited {seconds:.1f} s for {who} ({what})")


class Regrouped(CommError):
    def __init__(self, generation: int) -> None:
        self.generation = generation
        super().__init__(f"membership changed (generation {generation})")
