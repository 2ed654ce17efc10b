"""Numbers are told from what is none, whatever their type and wherever it stands."""

import pytest
import torch

from torrential.server.objections import COLUMNS, STREAMS, finite

SIZES = (1, 1000, STREAMS * COLUMNS, STREAMS * COLUMNS * 2 + 7)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_bad_value_is_found_wherever_it_stands(size: int, dtype: torch.dtype) -> None:
    values = torch.ones(size, dtype=dtype)
    assert finite(values)
    for place in {0, size // 2, size - 1}:
        for bad in (float("nan"), float("inf"), -float("inf")):
            values[place] = bad
            assert not finite(values), (place, bad)
        values[place] = 1


@pytest.mark.parametrize("size", SIZES[1:])
def test_numbers_whose_sum_or_squares_overflow_are_numbers(size: int) -> None:
    assert finite(torch.full((size,), 3e38))


def test_infinities_that_would_cancel_are_found() -> None:
    values = torch.zeros(STREAMS * COLUMNS)
    values[0], values[-1] = float("inf"), -float("inf")
    assert not finite(values)
    assert finite(torch.arange(5)) and finite(torch.empty(0))
