"""Detects that the server serves one request at a time.

Follows crates/prequal-core/src/server/capacity/single.rs, which explains the test.
"""

from __future__ import annotations

import math
from typing import Protocol

#: Squared coefficient of variation that is assumed before any latency is known. It weighs as much as one new latency.
ASSUMED = 0.25
ENOUGH = 3.0
VARIED = 0.5
ERROR = (0.05, 0.2)


class Times(Protocol):
    """Number of good responses, and the sums of their times and of the squares of these."""

    @property
    def met(self) -> float: ...

    @property
    def took(self) -> float: ...

    @property
    def squares(self) -> float: ...


def error_of(variation: float, one: float, other: float) -> float:
    """Returns the relative error of the comparison of two means over `one` and `other` requests.

    It is their standard error, within bounds. `variation` is the squared coefficient of variation.
    """
    low, high = ERROR
    return min(max(math.sqrt(variation * (1.0 / one + 1.0 / other)), low), high)


class OneByOne:
    """Fading sums over the requests that arrived while others were at the server."""

    def __init__(self) -> None:
        #: Times of the last departure but one, and of the last one, as far as they are known.
        self._departures: tuple[int | None, int | None] = (None, None)
        #: Number of good responses to such requests, and the sum of their times, each from the previous departure or
        #: from the request's own arrival, whichever is later.
        self._followed = 0.0
        self._took = 0.0

    def left(self, now: int) -> None:
        """Records that a request has left the server, or waits for its client."""
        self._departures = (self._departures[1], now)

    def came_back(self, now: int, left_at: int) -> None:
        """Records that a request which left at `left_at` to wait for its client is back.

        Then that was no departure, and the wait was no work. If another request has left since, the departures stay as
        they are.
        """
        before, last = self._departures
        if last == left_at:
            wait = max(now - left_at, 0)
            self._departures = (None, None if before is None else before + wait)

    def answered(self, now: int, weight: float, latency_us: int) -> None:
        """Records the good response to a request that arrived while others were at the server, and has just left."""
        before, last = self._departures
        if before is not None and last == now:
            self._followed += weight
            self._took += min(float(latency_us), float(max(now - before, 0))) * weight

    def is_evident(self, alone: Times, weight: float) -> bool:
        """Whether requests are served one by one. `alone` is the row of level 1."""
        if min(self._followed, alone.met) < ENOUGH * weight or alone.took <= 0.0:
            return False
        mean = alone.took / alone.met
        squared = max(alone.squares / alone.met / (mean * mean) - 1.0, 0.0)
        variation = squared + ASSUMED * weight / alone.met
        error = error_of(variation * weight, self._followed, alone.met)
        return variation <= VARIED and self._took / self._followed >= mean * (1.0 - error)

    def start_anew(self) -> None:
        """Forgets the requests so far, but not when the last ones left."""
        self._followed = self._took = 0.0

    def scale(self, weight: float) -> None:
        """Divides the sums by `weight`."""
        self._followed /= weight
        self._took /= weight
