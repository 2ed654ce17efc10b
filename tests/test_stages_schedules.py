"""Schedules of pipelines as data, carried out in memory: complete, free of deadlocks, as long as the papers say."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from torrential.errors import BadInput, UnknownName
from torrential.stages.rehearse import Rehearsal, StageCosts, rehearse, rehearse_schedule
from torrential.stages.rules import BrokenSchedule
from torrential.stages.schedules import SCHEDULES, all_stages, schedule
from torrential.stages.schedules.base import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    OptimizerStep,
    ReceiveFrom,
    SendTo,
)
from torrential.stages.schedules.pipedream import versions_used

STAGES, MICROBATCHES = (1, 2, 3, 4, 8), (1, 2, 5, 8)
GRID = [*itertools.product(STAGES, MICROBATCHES)]
COSTS = [(1.0, 2.0), (1.0, 1.0), (3.0, 2.0)]  # seconds of forward and backward
CASES = [(name, 1) for name in SCHEDULES] + [("interleaved", 2), ("interleaved", 3)]


def even(stages: int, forward: float, backward: float, **more: float) -> StageCosts:
    return StageCosts([forward] * stages, [backward] * stages, **more)


def count(actions: list[Action], *kinds: type) -> int:
    return sum(isinstance(action, kinds) for action in actions)


# -- all of them -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("stages", "microbatches"), GRID)
@pytest.mark.parametrize(("name", "virtual"), CASES)
def test_every_microbatch_goes_forward_and_back_once(name: str, virtual: int, stages: int, microbatches: int) -> None:
    """The rehearsal refuses what comes twice, not at all, or too soon, and every deadlock; here is what it cannot know:
    how many there must be."""
    lists = all_stages(name, stages, microbatches, virtual)
    done = rehearse(lists, even(stages, 1, 2, communication=0.25))
    parts = stages * virtual
    crossings = (parts - 1) * microbatches if stages > 1 else 0
    every = [action for actions in lists for action in actions]
    assert count(every, Forward) == count(every, Backward, BackwardInput) == parts * microbatches
    assert count(every, SendTo) == count(every, ReceiveFrom) == 2 * crossings
    steps = microbatches if SCHEDULES[name].asynchronous else 1
    assert [count(actions, OptimizerStep) for actions in lists] == [steps] * stages
    assert all(isinstance(actions[-1], OptimizerStep) for actions in lists)
    assert sum(done.busy) == pytest.approx(3 * stages * microbatches)
    assert len(done.timeline) == len(every)
    assert lists == [schedule(name, stages, microbatches, stage, virtual) for stage in range(stages)]


@pytest.mark.parametrize(("name", "virtual"), CASES)
def test_messages_stand_beside_the_work_that_they_are_for(name: str, virtual: int) -> None:
    """Sent at once, received right before."""
    for actions in all_stages(name, 4, 9, virtual):
        for before, action in itertools.pairwise(actions):
            if isinstance(action, SendTo):
                kinds = Forward if action.kind == "activation" else (Backward, BackwardInput)
                assert isinstance(before, kinds) and before.microbatch == action.microbatch
            if isinstance(before, ReceiveFrom):
                kinds = Forward if before.kind == "activation" else (Backward, BackwardInput)
                assert isinstance(action, kinds) and action.microbatch == before.microbatch


def test_a_list_written_out() -> None:
    assert schedule("1f1b", 2, 2, 0) == [
        Forward(0),
        SendTo(1, 0, "activation"),
        Forward(1),
        SendTo(1, 1, "activation"),
        ReceiveFrom(1, 0, "gradient"),
        Backward(0),
        ReceiveFrom(1, 1, "gradient"),
        Backward(1),
        OptimizerStep(),
    ]
    assert schedule("gpipe", 1, 2, 0) == [Forward(0), Forward(1), Backward(1), Backward(0), OptimizerStep()]


# -- bubbles and memory ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("stages", "microbatches"), GRID)
@pytest.mark.parametrize(("forward", "backward"), COSTS)
def test_gpipe_and_1f1b_are_equally_long_and_keep_different_amounts(
    stages: int, microbatches: int, forward: float, backward: float
) -> None:
    """T16.4, and the bubble (K-1)/(M+K-1) of T16.2."""
    costs = even(stages, forward, backward)
    gpipe = rehearse_schedule("gpipe", costs, microbatches)
    one_f_one_b = rehearse_schedule("1f1b", costs, microbatches)
    for done in (gpipe, one_f_one_b):
        assert done.seconds == pytest.approx((microbatches + stages - 1) * (forward + backward))
        assert done.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert gpipe.live == [microbatches] * stages
    assert one_f_one_b.live == [min(microbatches, stages - stage) for stage in range(stages)]


def test_the_makespan_and_the_bubbles_that_are_on_paper() -> None:
    assert rehearse_schedule("1f1b", even(4, 1, 2), 8).seconds == 33
    shares = [round(100 * rehearse_schedule("gpipe", even(4, 1, 2), m).bubble) for m in (1, 4, 16)]
    assert shares == [75, 43, 16]


@pytest.mark.parametrize("virtual", [1, 2, 3, 4])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (2, 8), (3, 9), (4, 4), (4, 8), (8, 8), (8, 16)])
def test_interleaving_divides_the_bubble(stages: int, microbatches: int, virtual: int) -> None:
    for forward, backward in COSTS:
        done = rehearse_schedule("interleaved", even(stages, forward, backward), microbatches, virtual)
        assert done.bubble == pytest.approx((stages - 1) / (virtual * microbatches + stages - 1))
        ahead = [2 * (stages - 1 - stage) + (virtual - 1) * stages + 1 for stage in range(stages)]
        assert done.live == [min(virtual * microbatches, chunks) for chunks in ahead]


def test_interleaving_handles_a_remainder() -> None:
    """It takes no longer than the next multiple of K, and idles for no longer than 1F1B."""
    for stages, microbatches, virtual in itertools.product(range(2, 7), range(1, 14), (2, 3)):
        done = rehearse_schedule("interleaved", even(stages, 1, 2), microbatches, virtual)
        whole = math.ceil(microbatches / stages) * stages
        assert done.seconds < 3 * (whole + (stages - 1) / virtual) + 1e-9
        assert done.bubble < (stages - 1) / (microbatches + stages - 1) + 1e-9


@pytest.mark.parametrize(("stages", "microbatches"), GRID)
def test_zero_bubble_idles_less_than_1f1b_with_its_memory(stages: int, microbatches: int) -> None:
    """ZB-H1: (K-1)(f+b-w) idle seconds in the place of (K-1)(f+b+w), once there are as many microbatches as stages."""
    for forward, backward in COSTS:
        costs = even(stages, forward, backward)
        done = rehearse_schedule("zero-bubble", costs, microbatches)
        plain = rehearse_schedule("1f1b", costs, microbatches)
        assert done.bubble < plain.bubble or stages == 1
        assert done.live == [min(microbatches, stages)] * stages
        if microbatches >= stages:
            idle = done.seconds - microbatches * (forward + backward)
            assert idle == pytest.approx((stages - 1) * forward)  # half of backward is for weights: f + b - w = f


# -- PipeDream ---------------------------------------------------------------------------------------------------------
def steady(done: Rehearsal, stage: int) -> list[tuple[type, float, float]]:
    """The computations of a stage between its first backward and its last forward."""
    spans = [span for span in done.timeline if span.stage == stage and isinstance(span.action, Forward | Backward)]
    kinds = [type(span.action) for span in spans]
    last = len(kinds) - kinds[::-1].index(Forward)
    return [(type(span.action), span.begin, span.end) for span in spans[kinds.index(Backward) : last]]


@pytest.mark.parametrize("stages", STAGES)
def test_pipedream_has_no_bubble_in_steady_state(stages: int) -> None:
    """T15.3: forward and backward alternate, and once the last stage sets the pace no stage waits."""
    minibatches = 5 * stages
    done = rehearse_schedule("pipedream", even(stages, 1, 1), minibatches)
    for stage in range(stages):
        spans = steady(done, stage)
        assert len(spans) > 2 * stages
        assert all(a[0] is not b[0] and a[2] == b[1] for a, b in itertools.pairwise(spans))
    assert done.seconds == 2 * (minibatches + stages - 1)  # one minibatch in f + b, and the start and the end


@pytest.mark.parametrize("stages", STAGES)
def test_pipedream_uses_weights_that_are_as_old_as_the_stages_that_follow(stages: int) -> None:
    """T15.4: n-k steps between forward and backward of stage k = 1 .. n, and n-k+1 minibatches in flight."""
    minibatches = 3 * stages
    lists = all_stages("pipedream", stages, minibatches)
    assert rehearse(lists, even(stages, 1, 1)).live == [stages - stage for stage in range(stages)]
    for stage, actions in enumerate(lists):
        used = versions_used(actions)
        after = stages - 1 - stage
        assert [newest for _, newest in used] == [*range(minibatches)]
        assert [newest - seen for seen, newest in used] == [min(b, after) for b in range(minibatches)]
        versions = {newest - seen for seen, newest in used}
        assert len(versions) == after + 1


def test_one_stage_of_pipedream_is_plain_training() -> None:
    """T15.6, the order of it."""
    one = [[Forward(b), Backward(b), OptimizerStep()] for b in range(3)]
    assert schedule("pipedream", 1, 3, 0) == [action for actions in one for action in actions]


# -- what the rehearsal finds ------------------------------------------------------------------------------------------
def broken(stage: int, change: str) -> list[list[Action]]:
    lists = all_stages("zero-bubble" if "half" in change else "1f1b", 2, 3)
    actions = lists[stage]
    if change == "none back":
        lists[stage] = [a for a in actions if not isinstance(a, Backward) or a.microbatch != 2]
    elif change == "forward twice":
        actions.insert(3, Forward(0))
    elif change == "sent before it is made":
        actions.insert(0, actions.pop(next(i for i, a in enumerate(actions) if isinstance(a, SendTo))))
    elif change == "other order":
        lists[stage] = [replace(a, microbatch=2 - a.microbatch) if hasattr(a, "microbatch") else a for a in actions]
    elif change == "no step":
        actions.pop()
    elif change == "not received":
        lists[stage] = [a for a in actions if not isinstance(a, ReceiveFrom)]
    elif change == "half before":
        actions.insert(0, BackwardWeight(0))
    return lists


@pytest.mark.parametrize(
    ("change", "stage", "said"),
    [
        ("none back", 0, "microbatch 2 goes forward on stage 0, chunk 0, and not back"),
        ("forward twice", 0, "forward of microbatch 0 (stage 0, chunk 0) comes twice"),
        ("sent before it is made", 0, "sending of the activation of microbatch 0 (stage 0, chunk 0) comes before its"),
        ("other order", 1, "expects the activation of microbatch 2 from stage 0 to 1"),
        ("no step", 1, "stage 1 ends with 3 gradients that no step was taken on"),
        ("not received", 1, "forward of microbatch 0 (stage 1, chunk 0) comes before its input"),
        ("half before", 0, "weight gradient of microbatch 0 (stage 0, chunk 0) comes before its backward"),
    ],
)
def test_a_broken_schedule_is_named(change: str, stage: int, said: str) -> None:
    with pytest.raises(BrokenSchedule) as caught:
        rehearse(broken(stage, change), even(2, 1, 1))
    assert said in str(caught.value)


def test_a_deadlock_says_who_waits_for_what() -> None:
    first: list[Action] = [Forward(0), Forward(1), ReceiveFrom(1, 0, "gradient"), SendTo(1, 0, "activation")]
    first += [Backward(0), SendTo(1, 1, "activation"), ReceiveFrom(1, 1, "gradient"), Backward(1), OptimizerStep()]
    with pytest.raises(BrokenSchedule) as caught:
        rehearse([first, schedule("1f1b", 2, 2, 1)], even(2, 1, 1))
    assert str(caught.value) == (
        "nobody can go on: stage 0 waits for the gradient of microbatch 0 from stage 1 to 0; stage 1 waits for the "
        "activation of microbatch 0 from stage 0 to 1"
    )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("gpipe", 0, 1, 0), "stages must be at least 1 (got 0)"),
        (("gpipe", 2, 0, 0), "microbatches must be at least 1 (got 0)"),
        (("gpipe", 2, 2, 2), "there is no stage 2 (stages: 2); stages are numbered from 0 to 1"),
        (("1f1b", 2, 2, 0, 2), "schedule '1f1b' has one chunk of the model on each stage (virtual: 2)"),
        (("interleaved", 2, 2, 0, 0), "virtual must be at least 1 (got 0)"),
    ],
)
def test_bad_input_is_refused(asked: tuple[str, int, int, int], said: str) -> None:
    with pytest.raises(BadInput) as caught:
        schedule(*asked)
    assert said in str(caught.value)


def test_an_unknown_schedule_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'gpipe'"):
        schedule("g-pipe", 2, 2, 0)
