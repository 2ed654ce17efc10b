"""Tensors through memory that both ends see: where they lie, when their place is free, what generations keep apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from torrential.comm.lanes import Lane, lane_bytes

SLOTS, SHAPE = 3, (2, 5)
NBYTES = 2 * 5 * 4


class Ends:
    def __init__(self) -> None:
        self.memory = torch.zeros(lane_bytes(SLOTS, NBYTES), dtype=torch.uint8)
        self.sender, self.receiver = (Lane(self.memory, SLOTS, NBYTES) for _ in range(2))
        self.regroup(1)

    def regroup(self, generation: int) -> None:
        for end in (self.sender, self.receiver):
            end.regroup(generation)

    def put(self, value: float) -> bool:
        return self.sender.put(torch.full(SHAPE, float(value)))

    def take(self) -> Tensor | None:
        number = self.receiver.expect()
        assert self.receiver.posted(number)
        return self.receiver.take(number)

    def holds(self, tensor: Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self.memory.data_ptr() < self.memory.nbytes


def values(found: list[Tensor | None]) -> list[float | None]:
    return [None if tensor is None else float(tensor.unique()) for tensor in found]


def test_a_tensor_is_read_where_the_sender_has_put_it() -> None:
    ends = Ends()
    assert all(ends.put(value) for value in range(SLOTS))
    found = [ends.take() for _ in range(SLOTS)]
    assert values(found) == [0.0, 1.0, 2.0]
    assert all(tensor is not None and tensor.shape == SHAPE and ends.holds(tensor) for tensor in found)


def test_a_place_is_free_when_nobody_has_its_tensor() -> None:
    ends = Ends()
    for value in range(10):  # the same place each time
        assert ends.put(value)
        assert values([ends.take()]) == [value]
    assert not ends.memory[-2 * 128 :].any()
    for value in range(SLOTS):
        ends.put(value)
    kept = [ends.take() for _ in range(SLOTS)]
    assert not ends.put(7.0)  # there is no room: it is for a letter
    assert ends.take() is None
    del kept[1]
    assert ends.put(8.0)
    kept.append(ends.take())
    assert values(kept) == [0.0, 2.0, 8.0]


def test_autograd_keeps_a_place_as_long_as_it_needs_it() -> None:
    ends, layer = Ends(), nn.Linear(5, 4)
    for value in range(SLOTS):
        ends.put(value)
    given = ends.take()
    assert given is not None
    output = layer(given.requires_grad_())
    del given
    assert not ends.put(9.0)
    output.sum().backward()
    del output
    assert layer.weight.grad is not None and float(layer.weight.grad.sum()) == 0.0
    assert ends.put(10.0)


def test_nothing_of_an_earlier_generation_is_taken_for_new() -> None:
    ends = Ends()
    for value in range(SLOTS):
        ends.put(value)
    old = ends.take()
    ends.regroup(2)
    assert not ends.receiver.posted(ends.receiver.expect())
    ends.receiver.regroup(2)
    assert ends.put(5.0)  # over what was given up
    new = ends.take()
    del old  # which frees nothing that is new
    assert ends.put(6.0) and ends.put(7.0) and not ends.put(8.0)
    assert values([new, ends.take(), ends.take(), ends.take()]) == [5.0, 6.0, 7.0, None]


@pytest.mark.parametrize("sizes", [(4, 5), (20,), (2, 1, 10), (1,) * 13 + (20,), (1,) * 14 + (20,)])
def test_a_tensor_has_the_type_and_sizes_that_were_sent(sizes: tuple[int, ...]) -> None:
    ends = Ends()
    sent = torch.arange(20, dtype=torch.bfloat16).view(sizes)  # a type that numpy does not have
    put = ends.sender.put(sent)
    found = ends.receiver.take(ends.receiver.expect())
    if len(sizes) > 14:  # more than there is room for: a letter
        assert not put and found is None
    else:
        assert found is not None and found.dtype == sent.dtype and found.shape == sizes and torch.equal(found, sent)
