"""Virtual time: a heap of (time, order, event) and greenlets.

    kernel.after(0.5, do)      an event: `do` is called when the clock has come there
    kernel.role(name, program) a role: plain blocking code, which gives way wherever it sleeps or waits
    kernel.run()               one event after the other, until it is over

Events of the same time happen in the order in which they were made, so a run is a pure function of its input. What
belongs to a role in torch (grad mode, autocast, the random generator) is put aside when it gives way and taken up
again when it goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet

MANY = 10_000  # cancelled events, from which on it is worth throwing them out

Event = list[Any]  # [time, order, what to do or None, arguments]


class Kernel:
    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0  # that happened
        self.over = False
        self.failures: list[tuple[str, BaseException]] = []  # of roles, by name
        self.happens: Callable[[float, Callable[..., None], tuple[Any, ...]], None] | None = None  # told of every event
        self.between: Callable[[], None] | None = None  # called after it: what must always hold is checked here
        self._heap: list[Event] = []
        self._made = 0
        self._cancelled = 0
        self.hub = getcurrent()  # where events happen

    # -- events ---------------------------------------------------------------------------------------------------
    def after(self, seconds: float, do: Callable[..., None], *args: Any) -> Event:
        return self.at(self.now + seconds, do, *args)

    def at(self, time: float, do: Callable[..., None], *args: Any) -> Event:
        self._made += 1
        event = [time, self._made, do, args]
        heappush(self._heap, event)
        return event

    def cancel(self, event: Event) -> None:
        if event[2] is None:
            return
        event[2] = None
        self._cancelled += 1
        if self._cancelled > MANY and self._cancelled > len(self._heap) // 2:
            self._heap = [e for e in self._heap if e[2] is not None]
            heapify(self._heap)
            self._cancelled = 0

    def step(self) -> bool:
        """The next event; False when there is none."""
        while self._heap:
            time, _, do, args = event = heappop(self._heap)
            if do is None:
                self._cancelled -= 1
                continue
            event[2] = None
            self.now = time
            self.events += 1
            if self.happens is not None:
                self.happens(time, do, args)
            do(*args)
            if self.between is not None:
                self.between()
            return True
        return False

    def run(self) -> None:
        """Let events happen until `over`, a role's failure, or the end of all events."""
        self.hub = getcurrent()
        while not self.over and not self.failures and self.step():
            pass

    # -- roles ----------------------------------------------------------------------------------------------------
    def role(self, name: str, program: Callable[[], None], uses_torch: bool = True) -> SimRole:
        """Start a role: it begins as the next event of this moment."""
        role = SimRole(self, name, program, uses_torch)
        self.after(0.0, role.go_on, role.turn)
        return role


class SimRole:
    """A role on virtual time: its program is a greenlet that waits for events."""

    def __init__(self, kernel: Kernel, name: str, program: Callable[[], None], uses_torch: bool) -> None:
        self.kernel, self.name, self.over, self._uses_torch = kernel, name, False, uses_torch
        self.turn = 0  # which of its waits this is: whatever would end an earlier one comes too late
        self._listening = False
        self._patience: float | None = None  # how long this wait lasts at the most
        self._deadline: float | None = None
        self._alarm: Event | None = None
        self._rings_at = 0.0
        self._greenlet = greenlet(lambda: self._play(program))

    def _play(self, program: Callable[[], None]) -> None:
        try:
            program()
        except GreenletExit:
            pass
        except BaseException as error:  # a user's task may raise anything
            self.kernel.failures.append((self.name, error))
        self.over = True

    def sleep(self, seconds: float) -> None:
        """Sleep; messages that come in the meantime have to wait."""
        self.kernel.after(seconds, self.go_on, self.turn)
        self._give_way()

    def halt(self) -> None:
        """Stop until `go_on`, and for nothing else."""
        self._give_way()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until `wake`, but no longer than this."""
        self._patience = seconds
        self.wait_on()
        if self._deadline is not None and (self._alarm is None or self._rings_at > self._deadline):
            self._set_alarm()
        self._listening = True
        self._give_way()

    def wait_on(self) -> None:
        """The time that it waits at the most begins now."""
        self._deadline = None if self._patience is None else self.kernel.now + self._patience

    def wake(self) -> None:
        """Called by an event, it goes on within this event; called by another role, as the next one."""
        if self._listening:
            self._listening = False
            if getcurrent() is self.kernel.hub:
                self._greenlet.switch()
            else:
                self.kernel.after(0.0, self.go_on, self.turn)

    def _set_alarm(self) -> None:
        """One for many waits: it is set anew when it rings too early, for most waits end long before."""
        assert self._deadline is not None
        if self._alarm is not None:
            self.kernel.cancel(self._alarm)
        self._rings_at = self._deadline
        self._alarm = self.kernel.after(self._deadline - self.kernel.now, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        if self._listening and self._deadline is not None and not self.over:
            if self._rings_at < self._deadline:
                self._set_alarm()
            else:
                self._greenlet.switch()

    def kill(self) -> None:
        self.over, self._listening = True, False
        if self._greenlet is getcurrent():
            raise GreenletExit
        if self._greenlet and not self._greenlet.dead:
            self._greenlet.throw(GreenletExit)

    def go_on(self, turn: int) -> None:
        if turn == self.turn and not self.over:
            self._greenlet.switch()

    def _give_way(self) -> None:
        mine = _put_aside() if self._uses_torch else None
        self.kernel.hub.switch()
        self.turn += 1
        self._listening = False
        if mine is not None:
            _take_up(mine)


# -- what belongs to a role in torch -----------------------------------------------------------------------------------
State = tuple[torch.Tensor, bool, bool]


def _put_aside() -> State:
    return torch.default_generator.get_state(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")


def _take_up(state: State) -> None:
    torch.default_generator.set_state(state[0])
    if torch.is_grad_enabled() is not state[1]:
        torch.set_grad_enabled(state[1])
    if torch.is_autocast_enabled("cpu") is not state[2]:
        torch.set_autocast_enabled("cpu", state[2])
