"""Workers made slow on purpose."""

import pytest

from torrential.errors import BadInput
from torrential.resolve import RunRequest, resolve
from torrential.tasks import load_task
from torrential.trainer.slow import Slow


def test_a_worker_is_as_slow_as_was_asked() -> None:
    slow = Slow.parse("1:4, 3:2.5", 4)
    assert [slow.factor(0, worker, 7) for worker in range(4)] == [1, 4, 1, 2.5]
    assert [Slow.parse(None, 2).factor(0, worker, 7) for worker in range(2)] == [1, 1]


def test_random_slow_downs_come_once_in_so_many_steps_for_everybody_and_are_the_same_again() -> None:
    slow = Slow.parse("random:10:50,0:2", 3)
    times = {worker: [slow.factor(5, worker, batch) for batch in range(1000)] for worker in range(3)}
    for worker, factors in times.items():
        usual = 2 if worker == 0 else 1
        blocks = [factors[start : start + 50] for start in range(0, 1000, 50)]
        assert all(sorted(block) == [usual] * 49 + [10 * usual] for block in blocks)
        assert len({block.index(10 * usual) for block in blocks}) > 5
    assert times[1] != times[2]
    assert times[1] == [slow.factor(5, 1, batch) for batch in range(1000)]
    assert times[1] != [slow.factor(6, 1, batch) for batch in range(1000)]


@pytest.mark.parametrize(
    "text", ["", "4", "1:", "1:fast", "one:4", "1:0.5", "1:-4", "1:nan", "1:inf", "1:4:9", "random:10", "random:10:0"]
)
def test_nonsense_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadInput, match=r"try slow=1:4 or slow=random:10:50") as caught:
        Slow.parse(text, 8)
    assert repr(text) in str(caught.value)


def test_there_must_be_such_a_worker() -> None:
    with pytest.raises(BadInput, match=r"slow=2:4: there is no worker 2 \(workers: 2\); they count from 0"):
        Slow.parse("2:4", 2)


def test_a_run_refuses_it_before_anything_starts() -> None:
    task = load_task("digits-mlp")
    with pytest.raises(BadInput, match=r"there is no worker 2"):
        resolve(RunRequest(task=task, workers=2, options={"slow": "2:4"}))
    with pytest.raises(BadInput, match=r"allreduce needs no servers \(given: 2\); leave out --servers"):
        resolve(RunRequest(task=task, servers=2, options={}))
