"""One common copy of the parameters: who owns what, and a step that is all or nothing wherever a member dies in it.

Members are objects in this process over common tensors, run one after another. A death is an exception at a chosen
moment: at every entry of the journal, in the middle of saving a unit, of updating it, of restoring it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torrential.comm.protocol import Agreement, Meter, Part, slices
from torrential.optim.rates import Rates
from torrential.optimizers import OptimizerSpec, optimizer
from torrential.params import shared
from torrential.params.base import Finished, Update
from torrential.params.layout import Layout, plan
from torrential.params.shared import SharedParameters, Unit

BUCKET = 400  # bytes: several buckets even in a small model


# -- layout -------------------------------------------------------------------------------------------------------
class Odd(nn.Module):
    """Tied, frozen, of several dtypes and of awkward sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.frozen = nn.Linear(13, 13)
        self.frozen.requires_grad_(False)
        self.wide = nn.Parameter(torch.randn(5, 9, dtype=torch.float64))
        self.second = nn.Linear(13, 13, bias=False)
        self.tied = nn.Linear(13, 13, bias=False)
        self.tied.weight = self.second.weight
        self.one = nn.Parameter(torch.randn(1))
        self.scalar = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.randn(0, 3))
        self.last = nn.Linear(13, 31)


def test_tied_weights_appear_once_and_frozen_ones_never() -> None:
    layout = plan(Odd(), BUCKET)
    names = [e.name for e in layout.entries]
    assert names == [
        "last.bias", "last.weight", "second.weight", "first.bias", "first.weight", "none", "scalar", "one", "wide",
    ]  # fmt: skip
    assert [e.index for e in layout.entries] == list(range(len(names)))


@pytest.mark.parametrize("bucket_bytes", [1, 100, BUCKET, 1 << 30])
def test_buckets_are_contiguous_in_order_and_of_one_dtype(bucket_bytes: int) -> None:
    layout = plan(Odd(), bucket_bytes)
    assert [b.index for b in layout.buckets] == list(range(len(layout.buckets)))
    assert [e for b in layout.buckets for e in b.entries] == list(layout.entries)
    for bucket in layout.buckets:
        assert {e.dtype for e in bucket.entries} == {bucket.dtype}
        held = [e.shape.numel() * e.dtype.itemsize for e in bucket.entries]
        assert sum(held[:-1]) < bucket_bytes  # closed as soon as it is full
        for entry, following in zip(bucket.entries, bucket.entries[1:], strict=False):
            assert entry.stop <= following.start
    if bucket_bytes == 1 << 30:
        assert len(layout.buckets) == 2  # one per dtype


@pytest.mark.parametrize("members", range(1, 8))
@pytest.mark.parametrize("bucket_bytes", [1, BUCKET, 1 << 30])
def test_the_members_pieces_cover_every_element_exactly_once(bucket_bytes: int, members: int) -> None:
    layout = plan(Odd(), bucket_bytes)
    owners = {d: torch.zeros(n, dtype=torch.int64) for d, n in layout.sizes.items()}
    for member in range(members):
        for piece in layout.pieces(member, members):
            assert piece.entry.start <= piece.start < piece.stop <= piece.entry.stop
            owners[piece.entry.dtype][piece.start : piece.stop] += 1
    for entry in layout.entries:
        assert entry.view(owners[entry.dtype]).eq(1).all(), entry.name
    assert sum(int(o.sum()) for o in owners.values()) == sum(e.shape.numel() for e in layout.entries)


def test_pieces_agree_with_what_a_reduce_scatter_leaves_to_each_member() -> None:
    layout = plan(Odd(), BUCKET)
    for member in range(3):
        mine = {(p.entry.dtype, i) for p in layout.pieces(member, 3) for i in range(p.start, p.stop)}
        for bucket in layout.buckets:
            low, high = slices(bucket.stop - bucket.start, 3)[member]
            for entry in bucket.entries:
                for i in range(entry.start, entry.stop):
                    assert ((entry.dtype, i) in mine) == (low <= i - bucket.start < high)


# -- members without a world --------------------------------------------------------------------------------------
class Death(Exception):
    """A SIGKILL, as an exception: nothing after it happens on that member."""


class Meeting:
    """What the members have in common: memory, and reduce-scatters that are done when the last has come."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, int | None], Tensor] = {}
        self.members: tuple[int, ...] = ()
        self.waiting: dict[int, tuple[Tensor, Sequence[Part]]] = {}

    def scatter(self, rank: int, region: Tensor, parts: Sequence[Part]) -> None:
        self.waiting[rank] = region, parts
        if set(self.waiting) < set(self.members):
            return
        total = torch.zeros_like(region)
        for member in self.members:
            for part in self.waiting[member][1]:
                if part.data is not None:
                    total[part.start : part.stop] += part.data
        for index, member in enumerate(self.members):
            low, high = slices(region.numel(), len(self.members))[index]
            theirs = self.waiting[member][0]
            theirs.fill_(77.0)  # scratch, as the protocol says
            theirs[low:high] = total[low:high]
        self.waiting = {}


class FakeComm:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.meter = meeting, rank, Meter()
        self.shares_memory, self.generation = True, 0

    @property
    def members(self) -> tuple[int, ...]:
        return self.meeting.members

    def buffer(
        self, name: str, numel: int, dtype: torch.dtype, *, common: bool = False, rank: int | None = None
    ) -> Tensor:
        key = name, None if common else (self.rank if rank is None else rank)
        held = self.meeting.buffers.setdefault(key, torch.zeros(numel, dtype=dtype))
        assert held.numel() == numel and held.dtype == dtype
        return held

    def reduce_scatter(self, region: Tensor, parts: Sequence[Part]) -> Finished:
        self.meeting.scatter(self.rank, region, parts)
        return Finished()

    def barrier(self) -> Finished:
        return Finished()


class Crew:
    """Members of one run, stepped in turn."""

    def __init__(self, make: Callable[[], nn.Module], ranks: tuple[int, ...], spec: OptimizerSpec) -> None:
        self.meeting = Meeting()
        self.make, self.spec = make, spec
        self.models: dict[int, nn.Module] = {}
        self.homes: dict[int, SharedParameters] = {}
        self.generation = 0
        self.done = -1
        for rank in ranks:
            self.add(rank)
        self.gather(ranks)

    def add(self, rank: int) -> None:
        torch.manual_seed(5)
        self.models[rank] = self.make()
        layout = plan(self.models[rank], BUCKET)
        self.homes[rank] = SharedParameters(FakeComm(self.meeting, rank), self.models[rank], layout, self.spec)  # type: ignore[arg-type]

    @property
    def layout(self) -> Layout:
        return next(iter(self.homes.values())).layout

    def standing(self, ranks: tuple[int, ...]) -> Agreement:
        self.generation += 1
        old = [r for r in ranks if r in self.meeting.members]
        return Agreement(self.generation, ranks, (old or ranks)[0], self.done, ())

    def gather(self, ranks: tuple[int, ...]) -> None:
        """Regroup, the source first, as the barrier would have it; those behind learn the counts."""
        standing = self.standing(ranks)
        for rank in sorted(ranks, key=lambda r: r != standing.source):
            self.homes[rank].regroup(standing)
        for rank in ranks:
            self.homes[rank].counts[:] = self.homes[standing.source].counts
            self.homes[rank].rebuild()
        self.meeting.members = ranks
        self.done = max(self.done, 0)

    def propose(self, step: int) -> None:
        for rank in self.meeting.members:
            for parameter, grad in zip(self.homes[rank]._parameters, gradients(self.layout, rank, step), strict=True):
                parameter.grad = grad
        for bucket in self.layout.buckets:
            for rank in self.meeting.members:
                self.homes[rank].reduce(bucket).wait()

    def step(self, step: int, dying: int | None = None) -> None:
        self.propose(step)
        decided = update(self.layout, self.meeting.members, step)
        for rank in self.meeting.members:
            if rank == dying:
                with pytest.raises(Death):
                    self.homes[rank].apply(decided)
            else:
                self.homes[rank].apply(decided)
        self.done += 1
        if dying is None:
            for rank in self.meeting.members:
                self.homes[rank].wait_for_everybody()

    def contents(self) -> dict[str, bytes]:
        """Parameters, state and counts, as a survivor sees them."""
        home = self.homes[self.meeting.members[0]]
        flat = {n: t.numpy().tobytes() for n, t in home.flat().items()}
        return flat | {"counts": repr(home.counts).encode()}


def gradients(layout: Layout, rank: int, step: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    made = [torch.randn(e.shape, generator=generator, dtype=e.dtype) for e in layout.entries]
    absent = [(step + e.index) % 4 == 0 or (step + e.index + rank) % 5 == 0 for e in layout.entries]
    return [None if a else g for a, g in zip(absent, made, strict=True)]


def update(layout: Layout, ranks: Sequence[int], step: int) -> Update:
    """Some entries are reached by nobody in some steps; some steps are clipped."""
    seen = zip(*([g is not None for g in gradients(layout, r, step)] for r in ranks), strict=True)
    return Update(0.1 / step, 0.5 if step % 2 else 1.0, tuple(any(s) for s in seen))


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 11), nn.ReLU(), nn.Linear(11, 9), nn.ReLU(), nn.Linear(9, 4))


def mixed() -> nn.Module:
    """Two dtypes, so that units of both are in one member's slice."""
    model = small()
    model[2].double()
    return model


SPECS = {
    "sgd": optimizer("sgd", lr=0.1, momentum=0.9, weight_decay=0.01),
    "plain sgd": optimizer("sgd", lr=0.1),
    "adam": optimizer("adam", lr=0.1, weight_decay=0.01),
    "groups": optimizer(
        "sgd", lr=0.1, momentum=0.9, groups=[("*.bias", {"lr": 0.03}), ("2.*", {"momentum": 0.0, "weight_decay": 0.1})]
    ).over(small()),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # waking another one costs more than these tensors do
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "UNIT", 40)


# -- without deaths -----------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("ranks", [(0,), (0, 1), (0, 1, 4)])
@pytest.mark.parametrize("name", SPECS)
def test_a_sliced_update_is_the_whole_update(name: str, ranks: tuple[int, ...]) -> None:
    crew = Crew(small, ranks, SPECS[name])
    torch.manual_seed(5)
    model = small()
    named = dict(model.named_parameters())
    plain = [named[e.name] for e in crew.layout.entries]
    spec = replace(SPECS[name], options=SPECS[name].options | {"fused": False})
    whole = spec.build(plain, names=[entry.name for entry in crew.layout.entries])
    rates = Rates(whole, spec)
    for step in range(1, 8):
        crew.step(step)
        decided = update(crew.layout, ranks, step)
        per_rank = [gradients(crew.layout, r, step) for r in ranks]
        for index, parameter in enumerate(plain):
            present = [g[index] for g in per_rank if g[index] is not None]
            assert decided.used[index] == bool(present)
            parameter.grad = sum(present, torch.zeros_like(parameter)) * decided.scale if present else None
        rates.set(0.1 / step)
        whole.step()
        for entry, parameter in zip(crew.layout.entries, plain, strict=True):
            ours = entry.view(crew.homes[ranks[-1]].flat()["float32"])
            assert torch.allclose(ours, parameter, rtol=1e-6, atol=1e-7), (step, entry.name)


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("name", SPECS)
def test_all_models_look_at_the_common_copy(name: str) -> None:
    crew = Crew(small, (0, 1), SPECS[name])
    crew.step(1)
    for entry in crew.layout.entries:
        pointers = {dict(m.named_parameters())[entry.name].data_ptr() for m in crew.models.values()}
        assert len(pointers) == 1


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("name", SPECS)
def test_who_is_there_makes_no_difference_to_what_a_step_does(name: str) -> None:
    """The same summed gradient, whatever the number of slices: one pair goes on, the other becomes three and one."""
    crew = Crew(small, (0, 1), SPECS[name])
    twin = Crew(small, (0, 1), SPECS[name])
    crew.step(1)
    twin.step(1)
    twin.add(2)
    twin.gather((0, 1, 2))
    assert twin.contents() == crew.contents()
    twin.gather((1,))
    assert twin.contents() == crew.contents()
    twin.gather((0, 1))
    for step in (2, 3):
        crew.step(step)
        twin.step(step)
    assert twin.contents() == crew.contents()


# -- deaths -------------------------------------------------------------------------------------------------------
class Fate:
    """Counts the moments at which a member could die in `_run`, and kills it at one of them."""

    def __init__(self, home: SharedParameters, moment: int | None = None) -> None:
        self.home, self.moment = home, moment
        self.count = 0
        self.names: list[str] = []
        home._journal = Journal(home._journal, self)  # type: ignore[assignment]
        self._real_undo, self._real_cut = home._undo, home._cut
        home._undo = self._undo  # type: ignore[method-assign]
        home._cut = self._cut  # type: ignore[method-assign]
        for unit in home._units:
            self._watch(unit)

    def now(self, name: str, before_dying: Callable[[], None] = lambda: None) -> None:
        self.names.append(name)
        self.count += 1
        if self.count - 1 == self.moment:
            before_dying()
            raise Death(name)

    def _cut(self, *args: Any) -> list[Unit]:
        units = self._real_cut(*args)
        for unit in units:
            self._watch(unit)
        return units

    def _watch(self, unit: Unit) -> None:
        whole = Unit.step

        def step(update: Update, summed: list[Tensor | None]) -> None:
            self.now("before the update")
            self.now("first half updated", lambda: tear(unit, lambda: whole(unit, update, summed), 0))
            self.now("second half updated", lambda: tear(unit, lambda: whole(unit, update, summed), 1))
            self.now("garbage in the unit", lambda: spoil(unit.contents()))
            whole(unit, update, summed)
            self.now("after the update")

        unit.step = step  # type: ignore[method-assign]

    def _undo(self, rank: int, unit: Unit) -> list[Tensor]:
        copies = self._real_undo(rank, unit)
        if int(self.home._journal[rank, 1]) % 2:
            self.now("while restoring", lambda: spoil(unit.contents()))
        else:
            self.now("while saving", lambda: spoil(copies))
        return copies


class Journal:
    """The journal; a member may die before and after each entry it makes, and between the two words of one."""

    def __init__(self, words: Any, fate: Fate) -> None:
        self._words, self._fate = words, fate

    def __getitem__(self, at: Any) -> Any:
        return self._words[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        self._fate.now(f"before journal[{at}] = {value}")
        if isinstance(value, tuple):
            self._words[at, 0] = value[0]
            self._fate.now(f"within journal[{at}] = {value}")
        self._words[at] = value
        self._fate.now(f"after journal[{at}] = {value}")


def tear(unit: Unit, step: Callable[[], None], half: int) -> None:
    """Leave every second tensor, and one half of all others, as after the update; the rest as before."""
    before = [t.clone() for t in unit.contents()]
    step()
    for number, (tensor, old) in enumerate(zip(unit.contents(), before, strict=True)):
        if number % 2 == half:
            tensor[tensor.numel() // 2 :] = old[tensor.numel() // 2 :]
        else:
            tensor.copy_(old)


def spoil(tensors: list[Tensor]) -> None:
    for number, tensor in enumerate(tensors):
        tensor[number % 2 :: 2] = torch.nan


def moments(make: Callable[[], nn.Module], ranks: tuple[int, ...], spec: OptimizerSpec, rank: int) -> list[str]:
    crew = Crew(make, ranks, spec)
    crew.step(1)
    crew.propose(2)
    fate = Fate(crew.homes[rank])
    crew.homes[rank].apply(update(crew.layout, ranks, 2))
    return fate.names


def undisturbed(
    make: Callable[[], nn.Module], ranks: tuple[int, ...], spec: OptimizerSpec, then: tuple[int, ...]
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Two steps with all; what is there then, and after one more by those who stay."""
    crew = Crew(make, ranks, spec)
    crew.step(1)
    crew.step(2)
    crew.gather(then)
    early = crew.contents()
    crew.step(3)
    return early, crew.contents()


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("make", [small, mixed])
@pytest.mark.parametrize(("ranks", "dying"), [((0, 1), 0), ((0, 2, 3), 2)])
@pytest.mark.parametrize("name", SPECS)
def test_a_step_is_whole_wherever_a_member_dies_in_it(
    name: str, ranks: tuple[int, ...], dying: int, make: Callable[[], nn.Module]
) -> None:
    spec = SPECS[name]
    survivors = tuple(r for r in ranks if r != dying)
    early, late = undisturbed(make, ranks, spec, survivors)
    possible = moments(make, ranks, spec, dying)
    assert possible.count("before the update") >= 2  # several units
    for moment, what in enumerate(possible):
        crew = Crew(make, ranks, spec)
        crew.step(1)
        Fate(crew.homes[dying], moment)
        crew.step(2, dying)
        crew.gather(survivors)
        assert crew.contents() == early, what
        crew.step(3)
        assert crew.contents() == late, what


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_step_is_whole_even_when_the_first_survivor_dies_repairing_it(name: str) -> None:
    spec, ranks = SPECS[name], (0, 1, 2)
    early, late = undisturbed(small, ranks, spec, (2,))
    possible = moments(small, ranks, spec, 1)
    tried = 0
    for moment, what in list(enumerate(possible))[::3]:
        again = -1
        while True:
            again += 3 if tried % 2 else 2  # not all pairs: a few hundred
            crew = Crew(small, ranks, spec)
            crew.step(1)
            Fate(crew.homes[1], moment)
            crew.step(2, dying=1)
            standing = crew.standing((0, 2))
            assert standing.source == 0
            repair = Fate(crew.homes[0], again)
            try:
                crew.homes[0].regroup(standing)
            except Death as death:
                tried += 1
                crew.gather((2,))
                assert crew.contents() == early, (what, str(death))
                crew.step(3)
                assert crew.contents() == late, (what, str(death))
            else:
                assert repair.count <= again
                break
    assert tried > 100


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_replacement_continues_where_the_survivors_are(name: str) -> None:
    spec, ranks = SPECS[name], (0, 1)
    crew = Crew(small, ranks, spec)
    crew.step(1)
    crew.step(2)
    after_two = copy.deepcopy(crew.contents())
    crew.step(3)
    whole = crew.contents()
    for moment in (0, 7, 12):
        crew = Crew(small, ranks, spec)
        crew.step(1)
        Fate(crew.homes[0], moment)
        crew.step(2, dying=0)
        crew.gather((1,))
        assert crew.contents() == after_two
        crew.add(0)
        crew.gather((0, 1))
        assert crew.contents() == after_two
        crew.step(3)
        assert crew.contents() == whole


@pytest.mark.usefixtures("small_units")
def test_a_member_that_dies_before_the_decision_takes_the_step_with_it() -> None:
    crew = Crew(small, (0, 1), SPECS["adam"])
    crew.step(1)
    before = crew.contents()
    crew.propose(2)
    crew.gather((1,))
    assert crew.contents() == before
