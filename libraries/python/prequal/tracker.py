"""Estimates the latency of a request that arrives now. Follows crates/prequal-core/src/server/tracker.rs, for one process.

Times are non-negative integers, in microseconds.
"""

from __future__ import annotations

import enum

from .capacity import Capacity, Levels

MAX_LATENCY_US = 3_600_000_000
MAX_AGE_US = 15_000_000
STALL_FACTOR = 3
FAILURE_LATENCY_US = 1_000_000
BUCKETS = 128
SAMPLES = 8
#: Multiple of the expected latency beyond which an overtaken request is very long.
LONG = 10.0
#: Number of requests that must have succeeded since a request was first overtaken before it counts as very long.
OVERTAKEN = 10


class Outcome(enum.IntEnum):
    """How a request ended."""

    #: A real response; its latency is a sample.
    SUCCESS = 0
    #: An error that the server caused: a status of 500 or above, or an exception.
    FAILURE = 1
    #: The client went away, which says nothing about the server.
    ABORTED = 2
    #: An event stream or a WebSocket; its duration is not a latency.
    STREAMING = 3


class Visit:
    """A request in flight."""

    __slots__ = (
        "arrived",
        "since",
        "away_since",
        "stays_away",
        "away_us",
        "overtaken_at",
        "rif_at_arrival",
        "arrived_as",
    )

    def __init__(self, now: int, rif: int, arrived_as: int) -> None:
        self.arrived = now
        #: Time of its arrival, or of its latest return.
        self.since = now
        #: Time since which it does not count as being at the server: a stream, a very long request, or one that waits
        #: for its client.
        self.away_since: int | None = None
        self.stays_away = False
        #: Time that it was away before `since`.
        self.away_us = 0
        #: Number of successes when it was first overtaken.
        self.overtaken_at = 0
        self.rif_at_arrival = rif
        self.arrived_as = arrived_as


class Tracker:
    """Requests in flight and recent latencies."""

    def __init__(self) -> None:
        self.rif = 0
        self.away = 0
        #: Requests that may be stuck (at the server and not overtaken), in order of age.
        self._waiting: dict[Visit, None] = {}
        #: Requests at the server that later ones have overtaken, in order of age.
        self._overtaken: dict[Visit, None] = {}
        self._successes = 0
        self._levels = Levels()
        #: Last samples of each bucket, as pairs of latency and time.
        self._buckets: list[list[tuple[int, int]]] = [[] for _ in range(BUCKETS)]
        self._used = 0
        self._last_failure: int | None = None

    def start(self, now: int) -> Visit:
        before = self.rif - self.away
        visit = Visit(now, self.rif, before + 1)
        self._waiting[visit] = None
        self.rif += 1
        self._levels.moved(now, before + 1)
        return visit

    def finish(self, visit: Visit, now: int, outcome: Outcome) -> None:
        level = self.rif - self.away
        self.rif -= 1
        self._unlink(visit)
        away_us = visit.away_us
        if visit.away_since is not None:
            away_us += max(now - visit.away_since, 0)
            self.away -= 1
            level = 0
        latency = min(max(max(now - visit.arrived, 0) - away_us, 0), MAX_LATENCY_US)
        if level > 0:
            self._levels.moved(now, level - 1)
        if outcome == Outcome.SUCCESS:
            index = bucket_of(visit.rif_at_arrival)
            bucket = self._buckets[index]
            bucket.append((latency, now))
            del bucket[:-SAMPLES]
            self._used = max(self._used, index + 1)
            self._levels.served(now, level, visit.arrived_as, latency)
            self._overtake(visit.since)
            self._set_long_ones_apart(now)
        elif outcome == Outcome.FAILURE:
            self._last_failure = now

    def _overtake(self, since: int) -> None:
        """Marks the requests that came to the server earlier than `since` as overtaken: they are heavy, not stuck."""
        self._successes += 1
        while self._waiting:
            oldest = next(iter(self._waiting))
            if oldest.since >= since:
                return
            del self._waiting[oldest]
            oldest.overtaken_at = self._successes
            self._overtaken[oldest] = None

    def _set_long_ones_apart(self, now: int) -> None:
        """Stops counting very long requests among those at the server."""
        expected_us = self._levels.expected_us()
        while expected_us is not None and self._overtaken:
            oldest = next(iter(self._overtaken))
            if now - oldest.since <= LONG * expected_us or self._successes - oldest.overtaken_at < OVERTAKEN:
                return
            self.streaming(oldest, now)

    def _unlink(self, visit: Visit) -> None:
        self._waiting.pop(visit, None)
        self._overtaken.pop(visit, None)

    def streaming(self, visit: Visit, now: int) -> None:
        """Sets a request apart for good."""
        self.client_waits(visit, now)
        visit.stays_away = True

    def client_waits(self, visit: Visit, now: int) -> None:
        if visit.away_since is not None:
            return
        visit.away_since = now
        self._unlink(visit)
        self.away += 1
        self._levels.moved(now, max(self._levels.level - 1, 0))

    def client_is_back(self, visit: Visit, now: int) -> None:
        if visit.stays_away or visit.away_since is None:
            return
        left_at, visit.away_since = visit.away_since, None
        visit.away_us += max(now - left_at, 0)
        visit.since = now
        self._waiting[visit] = None
        self.away -= 1
        self._levels.came_back(now, left_at)

    def capacity(self, now: int, leaving: bool) -> Capacity | None:
        """Returns base latency and knee. With `leaving`, a request that is about to end counts as a good response."""
        fit = self._levels.capacity(now, leaving)
        return fit and fit._replace(knee=min(fit.knee + self.away, 65535))

    def latency(self, now: int, rif: int, leaving: Visit | None) -> int | None:
        """Returns the expected latency with `rif` requests in flight, not counting `leaving`, which is about to end."""
        median = self._nearest_median(bucket_of(rif), now)
        if median is not None:
            waited = self._waited(now, leaving)
            return waited if waited // STALL_FACTOR > median else median
        if self._last_failure is not None and abs(now - self._last_failure) < MAX_AGE_US:
            return FAILURE_LATENCY_US
        return None

    def _waited(self, now: int, leaving: Visit | None) -> int:
        for oldest in self._waiting:
            if oldest is not leaving:
                return min(max(now - oldest.since, 0), MAX_LATENCY_US)
        return 0

    def _nearest_median(self, centre: int, now: int) -> int | None:
        """Returns the median of the nearest RIF with a sample.

        At equal distance, the higher RIF wins, to err on the side of caution.
        """
        for distance in range(min(BUCKETS, max(centre, self._used) + 1)):
            for index in (centre + distance, centre - distance):
                if 0 <= index < BUCKETS and self._buckets[index]:
                    young = sorted(took for took, at in self._buckets[index] if abs(now - at) < MAX_AGE_US)
                    if young:
                        return young[len(young) // 2]
        return None


def bucket_of(rif: int) -> int:
    """Returns the bucket of a RIF: exact below 16, then four buckets per octave."""
    if rif < 16:
        return rif
    octave = rif.bit_length() - 1
    return (octave - 4) * 4 + (rif >> (octave - 2) & 3) + 16
