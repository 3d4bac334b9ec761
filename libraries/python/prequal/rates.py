"""The share of failures, and the rates in ORCA reports. Follows crates/prequal-core/src/server/failures.rs and rates.rs."""

from __future__ import annotations

import math
from typing import NamedTuple

from .tracker import Outcome

HALF_LIFE_US = 5_000_000
SILENCE_US = 1_000_000
MAX_EVIDENCE = 64.0
MIN_EVIDENCE = 4.0
MIN_WINDOW_US = 100_000
STEP_US = 1_000_000
SHORTEST = 1.0 / 8.0


class Failures:
    """Counts of responses and failures. Both fade."""

    def __init__(self) -> None:
        self._ended = 0.0
        self._failed = 0.0
        self._at = 0

    def record(self, now: int, outcome: Outcome) -> None:
        if outcome == Outcome.ABORTED:
            return
        ended, failed = self._faded(now)
        keep = min((MAX_EVIDENCE - 1.0) / ended, 1.0) if ended > 0.0 else 1.0
        self._ended = ended * keep + 1.0
        self._failed = failed * keep + float(outcome == Outcome.FAILURE)
        self._at = now

    def per_mille(self, now: int) -> int:
        if self._failed == 0.0:
            return 0
        ended, failed = self._faded(now)
        return min(rounded(failed / max(ended, MIN_EVIDENCE) * 1000.0), 1000)

    def _faded(self, now: int) -> tuple[float, float]:
        gap = abs(now - self._at)
        if gap == 0:
            return self._ended, self._failed
        by_time = halved(gap)
        by_silence = halved(gap - SILENCE_US) if gap > SILENCE_US else 1.0
        return self._ended * by_time, self._failed * by_time * by_silence


class Window(NamedTuple):
    """Means over the recent past."""

    #: Requests per second that ended, and those of them that failed, in thousandths.
    ended_milli: int
    failed_milli: int
    #: Mean number of requests in flight, in millionths.
    rif_micro: int


class Rates:
    """Counts requests as they come and go. The counts fade."""

    def __init__(self, now: int, window_us: int) -> None:
        self._window_us = float(max(window_us, MIN_WINDOW_US))
        self._rif = 0
        self._clear(now)

    def _clear(self, now: int) -> None:
        self._latest = now
        self._ended = self._failed = self._busy_us = self._passed_us = 0.0

    def ended(self, now: int, rif: int, outcome: Outcome) -> None:
        self.moved(now, rif)
        self._ended += 1.0
        if outcome == Outcome.FAILURE:
            self._failed += 1.0

    def moved(self, now: int, rif: int) -> None:
        self._advance(now)
        self._rif = rif

    def over(self, now: int, leaving: bool) -> Window:
        """Returns the means as of now. With `leaving`, the request whose response carries them counts as ended."""
        self._advance(now)
        passed = max(self._passed_us, self._window_us * SHORTEST)
        return Window(
            rounded((self._ended + float(leaving)) / passed * 1e9),
            rounded(self._failed / passed * 1e9),
            rounded(self._busy_us / passed * 1e6),
        )

    def _advance(self, now: int) -> None:
        if now < self._latest:
            if self._latest - now > STEP_US:
                self._clear(now)
            return
        passed = (now - self._latest) / self._window_us
        self._latest = now
        kept, new_us = math.exp(-passed), -math.expm1(-passed) * self._window_us
        self._ended *= kept
        self._failed *= kept
        self._busy_us = self._busy_us * kept + self._rif * new_us
        self._passed_us = self._passed_us * kept + new_us


def halved(us: int) -> float:
    return 2.0 ** (-us / HALF_LIFE_US)


def rounded(value: float) -> int:
    """Rounds to the nearest integer, with halves rounded up. `round` would round halves to the nearest even integer."""
    whole = math.floor(value)
    return whole + 1 if value - whole >= 0.5 else whole
