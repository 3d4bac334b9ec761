"""Detects that requests share one core.

Follows crates/prequal-core/src/server/capacity/one_core.rs, which explains the test.
"""

from __future__ import annotations

from .single import ASSUMED, ENOUGH, ERROR, Times, error_of

EQUAL = 0.1
SIMILAR = 0.2


class OneCore:
    """Fading sums over the busy periods whose requests were all answered well.

    A busy period lasts from an arrival at the idle server until the server is idle again.
    """

    def __init__(self) -> None:
        #: When the current period began, when a request last left, and the numbers of departures and of good responses.
        self._began = self._left_at = self._left = self._answered = 0
        #: Highest number of requests at the server in the current period.
        self._most = 0
        self.start_anew()

    def moved(self, now: int, weight: float, before: int, after: int) -> None:
        """Records that the number of requests at the server changes from `before` to `after`."""
        if before == 0 and after > 0:
            # The response to the last request is counted after its departure, so only now is the period complete.
            self._count(weight)
            self._began = self._left_at = now
            self._left = self._answered = self._most = 0
        self._most = max(self._most, after)
        if after < before:
            self._left_at = now
            self._left += before - after

    def came_back(self, now: int, others: int) -> None:
        """Records that a request which left to wait for its client is back, beside `others`."""
        if others == 0:
            # The period goes on. The wait was no work.
            self._began += max(now - self._left_at, 0)
        self._left = max(self._left - 1, 0)
        self._most = max(self._most, others + 1)

    def answered(self, now: int, latency_us: int) -> None:
        """Records a good response to a request that took `latency_us`.

        A request that arrived before the period does not count: its client has kept it waiting.
        """
        if max(now - self._began, 0) >= latency_us:
            self._answered += 1

    def _count(self, weight: float) -> None:
        """Counts the period that has ended."""
        if self._left != self._answered or self._left == 0:
            return
        took = float(max(self._left_at - self._began, 0))
        if self._most == 1:
            self._alone += weight
            self._alone_took += took * weight
            self._alone_squares += took * took * weight
        else:
            self._together += self._left * weight
            self._together_took += took * weight

    def is_evident(self, now: int, level: int, every: Times, weight: float, leaving: bool) -> bool:
        """Whether requests share one core.

        `every` has all good responses, and `level` requests are at the server now. With `leaving`, one of them is about
        to leave.
        """
        if self._alone < ENOUGH * weight or self._alone_took <= 0.0:
            return False
        mean = self._alone_took / self._alone
        together, together_took = self._together, self._together_took
        # The current period counts as far as it has come, unless it has lasted longer than one core needs for its
        # requests.
        took = float(max((now if level > 0 else self._left_at) - self._began, 0))
        leaves = self._left + int(leaving)
        if (
            self._most > 1
            and self._left == self._answered
            and leaves > 0
            and took <= (self._left + level) * mean * (1.0 + ERROR[1])
        ):
            together += leaves * weight
            together_took += took * weight
        # Where requests take equally long, one response in such a period is enough.
        if together < weight:
            return False
        squared = max(self._alone_squares / self._alone / (mean * mean) - 1.0, 0.0)
        variation = squared + ASSUMED * weight / self._alone
        similar = every.squares * every.met <= (1.0 + SIMILAR) * every.took * every.took
        error = error_of(variation * weight, together, self._alone)
        return similar and variation <= EQUAL and together_took / together >= mean * (1.0 - error)

    def start_anew(self) -> None:
        """Forgets the periods so far.

        The current one will not count, because the response that led here is not counted.
        """
        #: Number of periods with one request, and the sums of their times and of the squares of these.
        self._alone = self._alone_took = self._alone_squares = 0.0
        #: Number of requests in periods with several, and the sum of the times of these periods.
        self._together = self._together_took = 0.0

    def scale(self, weight: float) -> None:
        """Divides the sums by `weight`."""
        self._alone /= weight
        self._alone_took /= weight
        self._alone_squares /= weight
        self._together /= weight
        self._together_took /= weight
