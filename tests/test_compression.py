"""Compressors by themselves: nothing is lost, tricks do what their papers say, messages are as long as they must be."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks import compression as benchmark
from torrential.compression import int8
from torrential.compression.dgc import WARMUP, DeepGradientCompression, clipping, share_sent, warmup_epochs
from torrential.compression.powersgd import LowRank, saves
from torrential.compression.sparse import (
    LONGEST,
    Selected,
    largest,
    message_bytes,
    pack,
    room,
    sampled_threshold,
    unpack,
    wanted,
)
from torrential.compression.topk import TopK
from torrential.compression.wire import rounded, wire_dtype

CPU = torch.device("cpu")
SIZES = [300, 40, 1000]


def dense(selected: Selected, numel: int) -> Tensor:
    found = torch.zeros(numel, dtype=selected.values.dtype)
    found[selected.places] = selected.values
    return found


def draws(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-1000, 1000, (size,), generator=generator).to(dtype) for size in SIZES]


def dgc(
    sizes: list[int] = SIZES, *, m: float = 0.9, nesterov: bool = False, masking: bool = True
) -> DeepGradientCompression:
    count = len(sizes)
    return DeepGradientCompression(
        sizes, torch.float64, CPU, momenta=[m] * count, nesterov=[nesterov] * count, masking=masking
    )


def step(compressor: TopK, gradients: list[Tensor | None], ratio: float, number: int = 0) -> Tensor:
    """One step; what was sent."""
    counts = [wanted(size, ratio) for size in compressor.sizes]
    sent = compressor.select(gradients, counts, 1.0, number)
    compressor.sent(sent)
    compressor.commit()
    return dense(sent, sum(compressor.sizes))


# -- top-k ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_that_was_sent_and_what_stays_behind_is_all_there_was(dtype: torch.dtype) -> None:
    """Exactly, in whole numbers, after every step."""
    compressor = TopK(SIZES, dtype, CPU)
    sent, total = torch.zeros(sum(SIZES), dtype=dtype), torch.zeros(sum(SIZES), dtype=dtype)
    for number in range(30):
        gradients = draws(number, dtype)
        total += torch.cat(gradients)
        part = step(compressor, list(gradients), 0.02, number)
        assert int(part.count_nonzero()) <= 6 + 1 + 20
        sent += part
        assert torch.equal(sent + compressor.save()["residual"], total)


def test_the_largest_of_every_tensor_are_sent() -> None:
    gradients = draws(1)
    part = step(TopK(SIZES, torch.float32, CPU), list(gradients), 0.1)
    for piece, gradient in zip(part.split(SIZES), gradients, strict=True):
        count = math.ceil(0.1 * gradient.numel())
        assert int(piece.count_nonzero()) == count
        assert float(piece.abs().sum()) == float(gradient.abs().topk(count).values.sum())


def test_a_tensor_that_backward_has_not_reached_stays_as_it_is() -> None:
    compressor = TopK(SIZES, torch.float32, CPU)
    step(compressor, list(draws(1)), 0.01)
    before = compressor.save()["residual"].clone().split(SIZES)
    first, _, last = draws(2)
    part = step(compressor, [first, None, last], 0.01).split(SIZES)
    assert not part[1].any() and torch.equal(compressor.save()["residual"].split(SIZES)[1], before[1])


def test_a_step_that_is_given_up_leaves_no_trace() -> None:
    ours, other = dgc(), dgc()
    for compressor in (ours, other):
        step(compressor, list(draws(1, torch.float64)), 0.05)
    ours.sent(ours.select(list(draws(2, torch.float64)), [1, 1, 1], 1.0, 1))  # a member died before it was decided
    parts = [step(compressor, list(draws(3, torch.float64)), 0.05, 1) for compressor in (ours, other)]
    assert torch.equal(*parts)
    for name, vector in ours.save().items():
        assert torch.equal(vector, other.save()[name])


# -- which are the largest --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "many zeros", "repeating", "few", "none"])
@pytest.mark.parametrize("count", [1, 70, 2000])
def test_a_sample_finds_exactly_the_largest(kind: str, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(200_000, generator=generator)
    if kind == "heavy tails":
        values = values**5
    elif kind == "many zeros":
        values *= torch.rand(200_000, generator=generator) < 0.02
    elif kind == "repeating":
        values = torch.arange(200_000) % 1000 + torch.rand(200_000, generator=generator) / 2
    elif kind == "few":
        values = torch.zeros(200_000).index_fill_(0, torch.tensor([5, 77, 199_999]), -2.0)
    elif kind == "none":
        values = torch.zeros(200_000)
    found = largest(values.__getitem__, len(values), count, 3)
    assert torch.equal(found, found.unique())
    expected = min(count, int(values.count_nonzero()))
    assert found.numel() == expected
    assert torch.equal(values[found].abs().sort().values, values.abs().topk(expected).values.sort().values)


def test_a_sampled_threshold_is_exceeded_by_about_as_many_as_are_wanted() -> None:
    """Between 0.8 and 1.3 times as many in 99 of 100 steps."""
    generator, good = torch.Generator().manual_seed(0), 0
    for number in range(100):
        values = torch.randn(100_000, generator=generator) ** 3
        threshold = sampled_threshold(values.__getitem__, len(values), 1000, number)
        good += 0.8 * 1000 <= int((values.abs() > threshold).sum()) <= 1.3 * 1000
    assert good >= 99


# -- messages ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("wire", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "places",
    [[], [0], [LONGEST - 1], [LONGEST], [3 * LONGEST - 1], [0, 1, 2, LONGEST + 2, LONGEST + 3, 4 * LONGEST], [299_999]],
)
def test_a_message_says_what_was_packed(places: list[int], wire: torch.dtype) -> None:
    numel, at = 300_000, torch.tensor(places, dtype=torch.int64)
    values = torch.arange(1.0, len(places) + 1)
    count = room(len(places), numel)
    message = pack(Selected(at, values), count, wire)
    assert message.nbytes == message_bytes(count, wire)
    found = unpack(message, count, wire)
    total = torch.zeros(numel).index_add_(0, found.places, found.values.float())
    assert torch.equal(total, torch.zeros(numel).index_put_((at,), values))


def test_a_thousandth_is_a_message_of_less_than_a_250th() -> None:
    numel = 25_000_000
    size = message_bytes(room(wanted(numel, 0.001), numel), torch.float32)
    assert size == 4 + 6 * (25_000 + 381)
    assert size * 250 < 4 * numel


# -- DGC --------------------------------------------------------------------------------------------------------------
def momentum_sgd(gradients: list[Tensor], m: float, nesterov: bool) -> Tensor:
    weights = torch.nn.Parameter(torch.zeros_like(gradients[0]))
    optimizer = torch.optim.SGD([weights], lr=1.0, momentum=m, nesterov=nesterov)
    for gradient in gradients:
        weights.grad = gradient.clone()
        optimizer.step()
    return weights.detach()


@pytest.mark.parametrize("nesterov", [False, True])
def test_with_everything_sent_it_is_momentum_sgd_and_with_masking_plain_sgd(nesterov: bool) -> None:
    gradients = [torch.cat(draws(number, torch.float64)) for number in range(5)]
    given: list[list[Tensor | None]] = [list(gradient.split(SIZES)) for gradient in gradients]
    plain = dgc(masking=False, nesterov=nesterov)
    moved = -sum(step(plain, each, 1.0) for each in given)
    torch.testing.assert_close(moved, momentum_sgd(gradients, 0.9, nesterov))
    masked = dgc(masking=True)
    moved = -sum(step(masked, each, 1.0) for each in given)
    torch.testing.assert_close(moved, momentum_sgd(gradients, 0.0, False))


def test_an_element_that_waits_gathers_the_momentum_of_its_wait() -> None:
    """A constant gradient of 1 with momentum 0.9; one of two elements is sent in turn, for the other is larger then."""
    steps, m = 2000, 0.9
    gradient = torch.ones(2, dtype=torch.float64)
    corrected, naive = dgc([2], m=m, masking=False), TopK([2], torch.float64, CPU)
    ours = sum(float(step(corrected, [gradient], 0.5)[0]) for _ in range(steps))
    dense_run = -float(momentum_sgd([gradient] * steps, m, False)[0])
    assert ours == pytest.approx(dense_run, rel=0.01)
    first = [float(step(naive, [gradient], 0.5).max()) for _ in range(2)][1]  # waited one step: 1 + 1
    second = dgc([2], m=m, masking=False)
    waited = [float(step(second, [gradient], 0.5).max()) for _ in range(2)][1]  # 1 + (1 + 0.9)
    assert (first, waited) == (2.0, pytest.approx(2.9))


def test_masking_takes_back_the_momentum_of_what_is_sent() -> None:
    compressor = dgc()
    gradients = draws(4, torch.float64)
    part = step(compressor, list(gradients), 0.1)
    kept = compressor.save()
    assert not kept["momentum"][part != 0].any() and not kept["residual"][part != 0].any()
    assert torch.equal(kept["momentum"][part == 0], torch.cat(gradients)[part == 0])


def test_each_worker_clips_so_that_the_sum_of_all_is_clipped() -> None:
    """Gradients of N workers that are like independent draws add up to the root of N times one of them."""
    assert clipping(8.0, 2.0, 4) == pytest.approx(1 / 8)
    assert clipping(0.5, 2.0, 4) == 1.0


def test_sparsity_warms_up_in_four_equal_parts() -> None:
    assert [share_sent(epoch, 4, 0.001) for epoch in (0, 0.99, 1, 2, 3, 3.99, 4, 100)] == [
        *(WARMUP[0], WARMUP[0], *WARMUP[1:], WARMUP[3]),
        0.001,
        0.001,
    ]
    assert [share_sent(epoch, 4, 0.1) for epoch in (0, 1, 4)] == [0.25, 0.1, 0.1]
    assert share_sent(0, 0, 0.001) == 0.001
    assert (warmup_epochs(None, 164), warmup_epochs(None, 5), warmup_epochs(2.5, 5)) == (4, 0.5, 2.5)


# -- PowerSGD ---------------------------------------------------------------------------------------------------------
SHAPES = [(20, 30), (8, 3, 3, 3)]


def powersgd_step(workers: list[LowRank], gradients: list[list[Tensor | None]]) -> list[Tensor]:
    left = torch.stack([w.project(g, 1.0) for w, g in zip(workers, gradients, strict=True)]).sum(0)
    right = torch.stack([w.fit(left) for w in workers]).sum(0)
    results = []
    for worker in workers:
        results.append([torch.zeros(size, dtype=torch.float64) for size in worker.sizes])
        worker.approximate(right, results[-1], len(workers))
        worker.commit()
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    return results[0]


def low_rank(rank: int, count: int) -> list[LowRank]:
    return [LowRank(SHAPES, rank, torch.float64, CPU, 7) for _ in range(count)]


def matrices(seed: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(math.prod(shape), generator=generator, dtype=torch.float64) for shape in SHAPES]


def test_what_factors_lack_stays_behind() -> None:
    workers, applied, given = (
        low_rank(2, 3),
        torch.zeros(816, dtype=torch.float64),
        torch.zeros(816, dtype=torch.float64),
    )
    for number in range(20):
        gradients = [matrices(10 * number + rank) for rank in range(3)]
        given += sum(torch.cat([g for g in each if g is not None]) for each in gradients)
        applied += torch.cat(powersgd_step(workers, gradients))
        kept = sum(worker.error for worker in workers)
        torch.testing.assert_close(applied + kept, given)


def test_what_stayed_behind_of_a_matrix_that_is_not_reached_stays_there() -> None:
    workers = low_rank(2, 2)
    powersgd_step(workers, [matrices(1), matrices(2)])
    before = [worker.error.clone() for worker in workers]
    first, second = powersgd_step(workers, [[matrices(3)[0], None], [matrices(4)[0], None]])
    assert first.any() and not second.any()
    for worker, kept in zip(workers, before, strict=True):
        assert torch.equal(worker.error.split(worker.sizes)[1], kept.split(worker.sizes)[1])


def test_a_matrix_of_low_rank_is_sent_as_it_is() -> None:
    generator = torch.Generator().manual_seed(1)
    thin = [torch.randn(rows, 2, generator=generator, dtype=torch.float64) for rows in (20, 30)]
    matrix = (thin[0] @ thin[1].t()).view(-1)
    (first, _) = powersgd_step(low_rank(2, 1), [[matrix, None]])
    torch.testing.assert_close(first, matrix)


def test_a_start_from_the_step_before_finds_the_largest_directions() -> None:
    """The same matrix again and again: what is sent in a step comes to the best that the rank allows."""
    (worker,), gradient = low_rank(3, 1), matrices(5)
    for _ in range(60):
        worker.error.zero_()
        first, _ = powersgd_step([worker], [gradient])
    assert gradient[0] is not None
    u, s, v = torch.linalg.svd(gradient[0].view(20, 30), full_matrices=False)
    best = (u[:, :3] * s[:3]) @ v[:3]
    assert float((first.view(20, 30) - best).norm()) < 0.05 * float(best.norm())


def test_only_what_becomes_smaller_is_factored() -> None:
    assert saves((20, 30), 4) and saves((64, 3, 3, 3), 4)
    assert not saves((64,), 1) and not saves((), 1) and not saves((10, 4), 4)


# -- int8, precisions -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("numel", [0, 1, 1023, 1024, 1025, 5000])
def test_bytes_are_as_near_as_a_block_allows(numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    message = int8.encode(values)
    assert message.nbytes == int8.message_bytes(numel)
    found = int8.decode(message, numel)
    for block, back in zip(values.split(int8.BLOCK), found.split(int8.BLOCK), strict=True):
        assert float((block - back).abs().max()) <= float(block.abs().max()) / 127 / 2 * 1.0001 if numel else True
    assert torch.equal(int8.decode(int8.encode(found), numel), found)


def test_zeros_in_bytes_are_zeros() -> None:
    assert not int8.decode(int8.encode(torch.zeros(3000)), 3000).any()


def test_what_half_precision_has_no_room_for_stays_behind() -> None:
    values = torch.tensor([1e6, -1e6, 1.0])
    assert torch.equal(rounded(values, torch.float16), torch.tensor([65504.0, -65504.0, 1.0]))
    assert torch.equal(rounded(values, torch.float32), values)


def test_nothing_is_sent_in_a_larger_precision_than_it_has() -> None:
    assert wire_dtype("bf16", torch.float32) == torch.bfloat16
    assert wire_dtype("fp16", torch.bfloat16) == torch.bfloat16
    assert wire_dtype("float32", torch.float64) == torch.float64
    assert wire_dtype("fp16", torch.int64) == torch.int64


# -- the benchmark ----------------------------------------------------------------------------------------------------
def test_all_that_encodes_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        found = benchmark.time_encoding([(64, 1024), (8, 16)], rounds=2)
    finally:
        torch.set_num_threads(threads)
    benchmark.show_encoding(found)
    rows = capsys.readouterr().out.splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:]] == [
        *("a pass", "bf16", "int8", "powersgd, rank 4", "topk", "dgc")
    ]
