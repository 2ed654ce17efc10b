"""Virtual time: the order of events, what ends a wait, and what belongs to a role. A run is a function of its seed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from torrential.strategies import STRATEGIES
from torrential.strategies.base import needs_servers
from torrential.testing.schedule import DRAWN, FaultSchedule, draw
from torrential.testing.sweep import check, simulate
from torrential.worlds.sim.kernel import MANY, Kernel, SimRole


def test_events_happen_by_time_and_then_by_order() -> None:
    kernel, seen = Kernel(), list[tuple[float, str]]()
    note: Callable[[str], None] = lambda word: seen.append((kernel.now, word))  # noqa: E731
    kernel.after(2.0, note, "late")
    kernel.after(1.0, note, "a")
    kernel.after(1.0, lambda: kernel.after(0.0, note, "made at 1"))
    kernel.after(1.0, note, "b")
    kernel.run()
    assert seen == [(1.0, "a"), (1.0, "b"), (1.0, "made at 1"), (2.0, "late")]
    assert kernel.events == 5 and not kernel.step()


def test_what_is_cancelled_does_not_happen_and_takes_no_room() -> None:
    kernel, seen = Kernel(), list[int]()
    events = [kernel.after(float(i), seen.append, i) for i in range(3 * MANY)]
    for event in events[10:]:
        kernel.cancel(event)
        kernel.cancel(event)
    assert len(kernel._heap) < 2 * MANY
    kernel.run()
    assert seen == list(range(10)) and kernel.now == 9.0
    kernel.cancel(events[0])  # it has happened
    assert kernel._cancelled == 0


def test_every_event_is_told_before_it_happens_and_looked_at_after() -> None:
    kernel, seen = Kernel(), list[object]()
    kernel.happens = lambda time, do, args: seen.append((time, args))
    kernel.between = lambda: seen.append("between")
    kernel.after(0.5, seen.append, "it")
    kernel.run()
    assert seen == [(0.5, ("it",)), "it", "between"]


def test_a_wait_ends_with_a_wake_or_with_its_time_and_a_sleep_only_with_its_time() -> None:
    kernel, seen = Kernel(), list[tuple[str, float]]()

    def program() -> None:
        role.wait()
        seen.append(("woken", kernel.now))
        role.wait(0.5)
        seen.append(("timed out", kernel.now))
        role.sleep(2.0)
        seen.append(("slept", kernel.now))
        role.wait(5.0)
        seen.append(("woken in time", kernel.now))
        role.wait(10.0)
        seen.append(("not by the timer before", kernel.now))

    role = kernel.role("one", program)
    for when in (1.0, 2.0, 3.0, 4.0):
        kernel.after(when, role.wake)  # those at 2 and 3 meet a sleeper
    kernel.run()
    assert seen == [
        ("woken", 1.0), ("timed out", 1.5), ("slept", 3.5), ("woken in time", 4.0), ("not by the timer before", 14.0)
    ]  # fmt: skip
    assert role.over and not kernel.failures


def test_a_killed_role_does_nothing_more_and_cleans_up() -> None:
    kernel, seen = Kernel(), list[str]()

    def program() -> None:
        try:
            role.sleep(1.0)
            seen.append("never")
        finally:
            seen.append("cleaned up")

    role = kernel.role("victim", program)
    not_begun = SimRole(kernel, "not begun", lambda: seen.append("never"), uses_torch=False)
    kernel.after(0.5, role.kill)
    kernel.after(0.6, role.wake)
    not_begun.kill()
    kernel.after(0.0, not_begun.go_on, not_begun.turn)
    kernel.run()
    role.kill()  # again
    assert seen == ["cleaned up"] and role.over and not kernel.failures


def test_a_role_that_kills_itself_is_gone_at_once() -> None:
    kernel, seen = Kernel(), list[str]()

    def program() -> None:
        role.kill()
        seen.append("never")

    role = kernel.role("itself", program)
    kernel.run()
    assert not seen and not kernel.failures


def test_a_failure_ends_the_run_and_says_whose_it_was() -> None:
    kernel = Kernel()
    kernel.role("bad", lambda: {}["key"])  # type: ignore[index]
    kernel.after(1.0, pytest.fail)
    kernel.run()
    ((whose, error),) = kernel.failures
    assert whose == "bad" and isinstance(error, KeyError) and kernel.now == 0.0


def test_torchs_state_goes_with_the_role() -> None:
    """Each draws and differentiates as if it were alone, however they take turns."""
    kernel, drawn = Kernel(), dict[int, list[float]]()

    def program(number: int) -> Callable[[], None]:
        def run() -> None:
            torch.manual_seed(number)
            with torch.set_grad_enabled(bool(number % 2)), torch.autocast("cpu", enabled=number == 2):
                for _ in range(3):
                    drawn.setdefault(number, []).append(float(torch.rand(())))
                    roles[number].sleep(0.1 * (number + 1))
                    assert torch.is_grad_enabled() is bool(number % 2)
                    assert torch.is_autocast_enabled("cpu") is (number == 2)

        return run

    roles = [kernel.role(str(number), program(number)) for number in range(3)]
    kernel.run()
    assert not kernel.failures
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    for number, values in drawn.items():
        torch.manual_seed(number)
        assert values == [float(torch.rand(())) for _ in range(3)]


def rough(strategy: str) -> FaultSchedule:
    """The first schedule of this strategy in which much goes wrong, and which can be survived."""
    for seed in range(10_000):
        schedule = draw(seed)
        kinds = {fault["kind"] for fault in schedule.cluster["faults"]}
        wanted = {"crash"} if strategy == "hogwild" else {"crash", "partition"}  # hogwild is on one host
        accidents = schedule.cluster["accidents"]
        lossy = accidents["loss"] and accidents["delay"]
        served = schedule.servers > 1 or not needs_servers(STRATEGIES[strategy])
        rough = kinds >= wanted and lossy and served
        if schedule.strategy == strategy and rough and not check(seed):
            return schedule
    raise AssertionError("there is none")


@pytest.mark.parametrize("strategy", DRAWN)
def test_the_same_seed_gives_the_same_records_and_bytes(strategy: str) -> None:
    schedule = rough(strategy)
    (first, one), (second, other) = (simulate(schedule) for _ in range(2))
    assert len(first) > 3 and first == second
    assert one and one == other
