"""A clock for every key, kept by ranges (Li et al. 2014, section 3.3: range vector clocks).

    set(2, 6, 9)      |0 0 0 0 0 0 0 0|   one piece
                      |0 0|9 9 9 9|0 0|   at most two pieces more for each call

Space grows with the number of different ranges, not with the number of keys.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class RangeClock:
    """Times of the keys of [start, stop). A piece goes from its start to the start of the next."""

    def __init__(self, start: int, stop: int, time: int = 0) -> None:
        assert start <= stop
        self.start, self.stop = start, stop
        self._starts, self._times = [start], [time]

    def set(self, start: int, stop: int, time: int) -> None:
        """Every key of [start, stop) is at `time` from now on."""
        if start <= self.start and stop >= self.stop:
            self._starts, self._times = [self.start], [time]
            return
        start, stop = max(start, self.start), min(stop, self.stop)
        if start >= stop:
            return
        first = bisect_left(self._starts, start)  # pieces from here on begin inside or after
        after = bisect_right(self._starts, stop) - 1  # the piece that `stop` cuts, or that begins there
        starts, times = [start], [time]
        if stop < self.stop:
            starts.append(stop)
            times.append(self._times[after])
        self._starts[first : after + 1] = starts
        self._times[first : after + 1] = times

    def at(self, key: int) -> int:
        return self._times[bisect_right(self._starts, key) - 1]

    def least(self) -> int:
        """The smallest time of any key."""
        return min(self._times)

    def pieces(self) -> list[tuple[int, int, int]]:
        return list(zip(self._starts, [*self._starts[1:], self.stop], self._times, strict=True))

    def part(self, start: int, stop: int) -> RangeClock:
        """The same times, of fewer keys."""
        found = RangeClock(start, stop)
        for first, last, time in self.pieces():
            found.set(first, last, time)
        return found
