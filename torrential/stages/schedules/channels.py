"""Receives in time: lists of actions that cannot deadlock, although a channel holds one message only.

A stage that receives right before it computes may be waiting for one neighbour while another one waits for it to empty
a slot, in a circle. Some receive of the circle then has to come sooner; its message waits inside the stage instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from torrential.stages.schedules.base import Action, ReceiveFrom, SendTo

Channel = tuple[int, int, str]  # from, to, kind


def receive_in_time(lists: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """The lists of all stages, with those receives ahead of their place without which nobody could go on."""
    moved = [list(actions) for actions in lists]
    places = [0] * len(moved)
    full: set[Channel] = set()
    while True:
        while any([_run(stage, moved[stage], places, full) for stage in range(len(moved))]):
            pass
        senders = [stage for stage, place in enumerate(places) if isinstance(_at(moved[stage], place), SendTo)]
        if not senders:
            return moved
        sender = senders[0]
        blocked = moved[sender][places[sender]]
        assert isinstance(blocked, SendTo)
        actions, place = moved[blocked.to], places[blocked.to]
        wanted = (sender, blocked.kind)
        found = next(i for i in range(place, len(actions)) if _received(actions[i]) == wanted)
        actions.insert(place, actions.pop(found))


def _at(actions: list[Action], place: int) -> Action | None:
    return actions[place] if place < len(actions) else None


def _received(action: Action) -> tuple[int, str] | None:
    return (action.source, action.kind) if isinstance(action, ReceiveFrom) else None


def _run(stage: int, actions: list[Action], places: list[int], full: set[Channel]) -> bool:
    """Run one stage as far as it gets; whether it got on."""
    began = places[stage]
    for action in actions[began:]:
        match action:
            case SendTo(to, _, kind):
                if (stage, to, kind) in full:
                    break
                full.add((stage, to, kind))
            case ReceiveFrom(source, _, kind):
                if (source, stage, kind) not in full:
                    break
                full.remove((source, stage, kind))
        places[stage] += 1
    return places[stage] > began
