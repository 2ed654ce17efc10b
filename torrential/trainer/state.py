"""What a role keeps by name, so that checkpoints, resumed runs, newcomers and abandoned rounds all treat it alike.

    everybody's   the same on all members when a round is concluded: one of them saves it, newcomers are given it
    own           of one worker: everybody's goes into a checkpoint; a newcomer begins with that of a member

In a checkpoint's workers.safetensors a tensor is called "<worker>/<name>/<key>", or "everybody/<name>/<key>".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from torrential.comm.protocol import SERVERS
from torrential.errors import BadInput

EVERYBODY = "everybody"

Save = Callable[[], Mapping[str, Tensor]]
Load = Callable[[Mapping[str, Tensor]], None]


@dataclass(frozen=True)
class _Kept:
    kind: Literal["everybody", "own", "moving"]  # moving: saved otherwise, but put back with the rest
    save: Save
    load: Load
    undo: bool
    handed: bool = True  # to newcomers; else they begin with what is there when it is registered


class NamedStates:
    """Implements strategies.context.State."""

    def __init__(
        self,
        saved: Mapping[str, Tensor] | None = None,
        owner: str = "",
        fellows: range = range(0),
        begun: Callable[[], bool] = lambda: False,
        replaces: bool = False,
    ) -> None:
        """`saved`: the states in the checkpoint that the run goes on from, each loaded as soon as it is registered;
        `owner`: which of them are this role's own; `fellows`: the workers whose states are the next best
        (Strategy.fellows); `begun`: whether this role has begun with its first step, after which it is too late to
        register anything; `replaces`: whether this role takes the place of one that has gone on from there."""
        self._begun = begun
        self._saved_itself = not replaces and bool(_owned(saved or {}, owner))
        self._saved = {
            "everybody": _owned(saved or {}, EVERYBODY),
            "own": _owned(saved or {}, owner) or _of_anybody(saved or {}, fellows),
            "moving": {},
        }
        self._kept: dict[str, _Kept] = {}
        self._before: dict[str, dict[str, Tensor]] = {}  # what a round under way may have changed, as it was

    def everybody(self, name: str, save: Save, load: Load, *, undo: bool = True) -> None:
        self._keep(name, _Kept("everybody", save, load, undo))

    def own(self, name: str, save: Save, load: Load, *, undo: bool = True, handed: bool = True) -> None:
        self._keep(name, _Kept("own", save, load, undo, handed))

    def moving(self, name: str, save: Save, load: Load) -> None:
        """Put something back when a round is given up; where it is saved is another's business."""
        self._keep(name, _Kept("moving", save, load, undo=True))

    def _keep(self, name: str, kept: _Kept) -> None:
        if name in self._kept or "/" in name or not name:
            what = "is registered already" if name in self._kept else "is no name for a state: it is empty, or has a /"
            raise BadInput(f"the state {name!r} {what}; call it something else")
        if self._begun():
            late = "is registered after the first step has begun, where a run that goes on cannot load it in time"
            raise BadInput(f"the state {name!r} {late}; register it before the first step (before ctx.rounds)")
        if kept.kind != "moving":
            _check_saved(name, kept.save())
        self._kept[name] = kept
        found = _owned(self._saved[kept.kind], name)
        if found and (kept.handed or self._saved_itself):
            kept.load(found)

    # -- rounds -------------------------------------------------------------------------------------------------
    def remember(self) -> None:
        """A round begins: keep copies of what it may change."""
        self._before = {
            name: {key: tensor.clone() for key, tensor in kept.save().items()}
            for name, kept in self._kept.items()
            if kept.undo
        }

    def put_back(self) -> None:
        """The round is given up, and leaves no trace."""
        for name, tensors in self._before.items():
            self._kept[name].load(tensors)
        self._before = {}

    def forget(self) -> None:
        """The round is concluded."""
        self._before = {}

    # -- what is saved, and loaded ------------------------------------------------------------------------------
    @property
    def some_are_own(self) -> bool:
        return any(kept.kind == "own" for kept in self._kept.values())

    def tensors(self, kind: Literal["everybody", "own"], *, handed: bool = False) -> dict[str, Tensor]:
        """All states of a kind, or those that newcomers are handed, by "<name>/<key>"."""
        return {
            f"{name}/{key}": tensor.detach()
            for name, kept in self._kept.items()
            if kept.kind == kind and (kept.handed or not handed)
            for key, tensor in kept.save().items()
        }

    def load(self, kind: Literal["everybody", "own"], tensors: Mapping[str, Tensor]) -> None:
        """Take over states, as `tensors` gave them; those that are missing there stay as they are."""
        for name, kept in self._kept.items():
            found = _owned(tensors, name)
            if kept.kind == kind and found:
                kept.load(found)


def _check_saved(name: str, saved: object) -> None:
    if not isinstance(saved, Mapping):
        wrong = f"it returned {type(saved).__name__}"
    elif found := [key for key, value in saved.items() if not (isinstance(key, str) and isinstance(value, Tensor))]:
        wrong = f"it has {type(saved[found[0]]).__name__} at {found[0]!r}"
    else:
        return
    raise BadInput(f'save of the state {name!r} must return a dict of tensors ({wrong}); try {{"value": tensor}}')


def _of_anybody(saved: Mapping[str, Tensor], fellows: range) -> dict[str, Tensor]:
    """What workers have saved of their own, for one that has saved nothing: it was gone, or is new. Of several that
    have something of one name, the first of the fellows counts, else the first."""
    owners = {int(owner) for owner in (name.partition("/")[0] for name in saved) if owner.isdigit()}
    workers = sorted((owner for owner in owners if owner < SERVERS), key=lambda rank: (rank not in fellows, rank))
    return {name: tensor for worker in reversed(workers) for name, tensor in _owned(saved, str(worker)).items()}


def _owned(tensors: Mapping[str, Tensor], owner: str) -> dict[str, Tensor]:
    """The states whose names begin with "<owner>/", without that prefix."""
    return {name.removeprefix(f"{owner}/"): t for name, t in tensors.items() if name.startswith(f"{owner}/")}
