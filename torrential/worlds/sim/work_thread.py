"""Work that waits for other roles on its way, in autograd too: it runs in a thread of its own, in turns with its role.

Roles are greenlets of one thread, and autograd's engine is not made to be left in the middle of a backward: another
role's backward would be taken for a part of it. So such a work has a thread, which never runs at the same time as any
other: its role waits for it, carries out what it asks for, and hands back the answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from torrential.errors import CommError
from torrential.randomness import SeparateDraws

T = TypeVar("T")
Outcome = tuple[Any, BaseException | None]


class WorkThread:
    """One work, and what it asks its role to do meanwhile."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()  # None: the work is over
        self._answers: SimpleQueue[Outcome] = SimpleQueue()
        self._end: Outcome = (None, None)

    def run(self, work: Callable[[], T]) -> T:
        """Do the work; called by its role, which does here what is asked for. When a wait fails, as it does where the
        role is to die, the work is given up and this raises what the wait has raised."""
        thread = threading.Thread(target=self._work, args=(work,), daemon=True)
        thread.start()
        failed: BaseException | None = None
        while (asked := self._asked.get()) is not None:
            answer: Outcome = (None, failed)
            if failed is None:
                with SeparateDraws():  # other roles have their turn: afterwards the work draws where it stopped
                    answer = _outcome(asked)
            failed = answer[1]
            self._answers.put(answer)
        thread.join()
        result: T
        result, error = self._end
        if failed is not None or error is not None:
            raise failed or error  # type: ignore[misc]
        return result

    def outside(self, wait: Callable[[], T]) -> T:
        """Have the role do something that waits; called by the work."""
        self._asked.put(wait)
        answer: T
        answer, error = self._answers.get()
        if error is not None:
            raise CommError("a wait has failed, and the work is given up") from error
        return answer

    def _work(self, work: Callable[[], Any]) -> None:
        self._end = _outcome(work)
        self._asked.put(None)


def _outcome(work: Callable[[], Any]) -> Outcome:
    try:
        return work(), None
    except BaseException as error:  # told to whoever waits for the outcome
        return None, error
