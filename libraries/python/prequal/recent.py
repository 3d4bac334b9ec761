"""Detects some changes sooner than the fit does. Follows crates/prequal-core/src/server/capacity/recent.rs."""

from __future__ import annotations

import math
from typing import Protocol

CERTAIN = 12.0
SHORTEST = 10.0
FAST_SHARE = (0.3, 0.99)
REMEMBERED = 32.0
SELDOM_HINDERED = 0.35
FORGOTTEN_US = 30e6


class Fit(Protocol):
    """The part of a capacity that is used here."""

    @property
    def base_us(self) -> int: ...

    @property
    def knee(self) -> int: ...


class FastRun:
    """Detects that the server has become faster than its fit says."""

    def __init__(self) -> None:
        #: Moving average of the share of fast responses.
        self._usual = FAST_SHARE[0]
        #: When the first request of the run arrived.
        self._since = 0
        self._answers = 0.0
        self._took = 0.0
        #: Time that requests have spent at the server since the first request of the run arrived, microseconds. At most
        #: as many requests count at a time as the knee.
        self._worked = 0.0

    def worked(self, us: float) -> None:
        """Adds to the time that requests have spent at the server."""
        self._worked += us

    def answered(self, now: int, fit: Fit, level: int, arrived_as: int, latency_us: int) -> bool:
        """Records a response that left while `level` requests were in flight, itself included. Returns whether the run
        is too long to be due to chance."""
        if arrived_as > fit.knee:
            return False
        arrived = max(now - latency_us, 0)
        fast = latency_us < fit.base_us // 2
        self._usual += (float(fast) - self._usual) / REMEMBERED
        if not fast:
            # A request that is older than the run does not contradict it.
            if arrived >= self._since:
                self._answers = 0.0
            return False
        if self._answers == 0.0:
            self._since, self._took = arrived, 0.0
            # The current level stands for the levels since the request arrived, which are not known here.
            self._worked = float(max(latency_us, 1) * min(max(level, 1), fit.knee))
        self._answers += 1.0
        self._took += latency_us
        usual = min(max(self._usual, FAST_SHARE[0]), FAST_SHARE[1])
        return (
            self._answers >= SHORTEST
            and self._answers * -math.log(usual) > CERTAIN
            and self._surprise(usual * self._worked / fit.base_us) > CERTAIN
        )

    def _surprise(self, expected: float) -> float:
        """Returns s such that the probability of at least this many fast responses is at most e^-s where `expected` are
        expected (Chernoff's bound for a Poisson distribution); 0 if there are no more than expected."""
        times = self._answers / expected
        return self._answers * (math.log(times) - 1.0) + expected if times > 1.0 else 0.0

    def take(self) -> tuple[float, float]:
        """Returns the number of responses in the run and the time they took, and begins the next run."""
        answers, self._answers = self._answers, 0.0
        return answers, self._took


class Beyond:
    """Detects whether requests that arrive beyond the knee wait, as they would if the knee were real."""

    def __init__(self) -> None:
        #: Moving average of the latency of requests that arrived up to the knee, microseconds; 0 before the first.
        self._unhindered_us = 0.0
        #: Moving average of the share of requests beyond the knee that were delayed by at least half of what a queue
        #: would add.
        self._hindered = 0.0
        self._at = 0

    def answered(self, now: int, fit: Fit, arrived_as: int, latency_us: int) -> None:
        crowding = max(arrived_as, 1) / max(fit.knee, 1)
        if crowding <= 1.0:
            first = self._unhindered_us == 0.0
            self._unhindered_us += (latency_us - self._unhindered_us) / (1.0 if first else REMEMBERED)
            return
        base_us = self._unhindered_us if self._unhindered_us > 0.0 else float(fit.base_us)
        hindered = float(latency_us >= base_us * (1.0 + crowding) / 2.0)
        share = self._hindered_at(now)
        self._hindered, self._at = share + (hindered - share) / REMEMBERED, now

    def _hindered_at(self, now: int) -> float:
        """Returns the share of hindered requests, which decreases with its age.

        Old evidence is forgotten, so that a server that is never sent requests beyond its knee is tried again.
        """
        return self._hindered * max(1.0 - max(now - self._at, 0) / FORGOTTEN_US, 0.0)

    def is_open(self, now: int) -> bool:
        return self._hindered_at(now) < SELDOM_HINDERED
