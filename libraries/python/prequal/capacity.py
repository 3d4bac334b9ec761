"""Estimates how fast the server is, and how much it can serve at once. Follows crates/prequal-core/src/server/capacity.rs.

The sums are computed in the order of that file, so that they are rounded alike.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .one_core import OneCore
from .recent import Beyond, FastRun
from .single import ASSUMED, OneByOne

# The constants of crates/prequal-core/src/server/capacity.rs, which documents them.
MAX_LATENCY_US = 3_600_000_000
MAX_KNEE = 512
FADES_US = 6e6
DOUBT = 0.5
STEADY = 0.05
MOST_STEADY = 16.0
STEADY_KNEE = 3
EVEN = 0.2
EVIDENT = 4.0
EXPONENTIAL = 1.0
MOST_RSE = 255.0
FADED = 1e-9
MANY = 6.0
NARROW = 0.02
CLEARLY = 0.005
LEAST = 0.5
FIT_EVERY_US = 10_000
FIT_AT_LEAST_US = 3_000_000
TOGETHER = 128
LONGEST_US = 60_000_000
HEAVY = 1e12
TINY = 1e-9
STEP_US = 1_000_000


class Capacity(NamedTuple):
    """Base latency and knee of a server."""

    #: Latency of a request while none waits, microseconds.
    base_us: int
    #: Number of requests in flight beyond which further ones only wait.
    knee: int
    #: Whether the knee may be higher.
    open: bool
    #: Whether requests take almost the same time as long as none waits.
    steady: bool
    #: Relative standard error of the base latency, percent.
    rse_percent: int


class Row:
    """Fading sums for one level, which is a number of requests at the server."""

    __slots__ = ("time", "left", "met", "took", "squares")

    def __init__(
        self, time: float = 0.0, left: float = 0.0, met: float = 0.0, took: float = 0.0, squares: float = 0.0
    ) -> None:
        #: Time spent at this level, and number of good responses that left at it.
        self.time, self.left = time, left
        #: Number of good responses to requests that raised the level to this one on arrival, and the time that those
        #: took.
        self.met, self.took = met, took
        #: Sum of the squares of these times.
        self.squares = squares


class Levels:
    """Counts at each level, and the fit to them."""

    def __init__(self) -> None:
        self.level = 0
        self._rows: list[Row] = []
        self._logs: list[float] = []
        #: Sum of the squares of the weights of the good responses that left.
        self._left_squares = 0.0
        #: When the last good response left, and at which level its burst began.
        self._burst = (0, 0)
        self._since: int | None = None
        #: When the weight was 1, and the latest time seen.
        self._origin = 0
        self._latest = 0
        self._fitted_at: int | None = None
        self._fit: Capacity | None = None
        self._run = FastRun()
        self._beyond = Beyond()
        self._single = OneByOne()
        self._one_core = OneCore()

    def expected_us(self) -> int | None:
        """Returns the latency of a request at the current level according to the last fit, microseconds."""
        if self._fit is None:
            return None
        crowding = max(max(self.level, 1) / max(self._fit.knee, 1), 1.0)
        return int(min(self._fit.base_us * crowding, MAX_LATENCY_US))

    def moved(self, now: int, after: int) -> None:
        """Credits the time since the last update to the current level, and then changes the level to `after`."""
        before = self.level
        weight = self._credit(now, after)
        self._one_core.moved(now, weight, before, after)
        if after < before:
            self._single.left(now)

    def came_back(self, now: int, left_at: int) -> None:
        """Records that a request which left at `left_at` to wait for its client is back."""
        others = self.level
        self._credit(now, others + 1)
        self._one_core.came_back(now, others)
        self._single.came_back(now, left_at)

    def _credit(self, now: int, after: int) -> float:
        """Does what `moved` says, and returns the weight of the present."""
        weight = self._weight(now)
        elapsed = self._elapsed(now)
        if elapsed > 0.0 and self.level > 0:
            self._run.worked(elapsed * min(self.level, MAX_KNEE if self._fit is None else self._fit.knee))
            self._row(self.level).time += elapsed * weight
        self.level, self._since = after, now
        return weight

    def served(self, now: int, level: int, arrived_as: int, latency_us: int) -> None:
        """Records a good response that left while `level` requests were at the server, itself included."""
        if self._fit is not None:
            self._beyond.answered(now, self._fit, arrived_as, latency_us)
            if self._run.answered(now, self._fit, level, arrived_as, latency_us):
                self._start_anew(now)
                return
        weight = self._weight(now)
        level = self._level_of_burst(now, max(level, 1), latency_us // TOGETHER)
        self._row(level).left += weight
        self._left_squares += weight * weight
        self._one_core.answered(now, latency_us)
        if arrived_as > 1:
            self._single.answered(now, weight, latency_us)
        arrived = self._row(max(arrived_as, 1))
        arrived.met += weight
        arrived.took += latency_us * weight
        arrived.squares += float(latency_us) * float(latency_us) * weight
        if self._fitted_at is None or abs(now - self._fitted_at) > FIT_AT_LEAST_US:
            self.capacity(now, False)

    def _start_anew(self, now: int) -> None:
        """Forgets everything except the run of fast responses, which count as if each had been alone at the server."""
        answers, took = self._run.take()
        squares = 2.0 * took * took / max(answers, 1.0)
        self._rows, self._logs = [Row(took, answers, answers, took, squares)], [0.0]
        self._single.start_anew()
        self._one_core.start_anew()
        self._origin, self._latest, self._since = now, now, now
        self._left_squares = answers
        self._fitted_at = None

    def _level_of_burst(self, now: int, level: int, together: int) -> int:
        """Returns the level at which the current burst of departures began.

        Requests that arrive together may leave together; all of them count at that level.
        """
        last, began_at = self._burst
        if abs(now - last) <= together and level < began_at:
            level = began_at
        self._burst = (now, level)
        return level

    def capacity(self, now: int, leaving: bool) -> Capacity | None:
        fresh = self._fitted_at is not None and abs(now - self._fitted_at) < FIT_EVERY_US
        if not fresh or (leaving and self._fit is None):
            weight = self._weight(now)
            if self.level > 0:
                self._row(self.level)
            running = self._elapsed(now) * weight
            self._fitted_at = now
            left = weight if leaving and self.level > 0 else 0.0
            self._fit = self._fitted(weight, running, left) or self._fit
        return self._fit

    def _fitted(self, weight: float, running: float, leaves: float) -> Capacity | None:
        """Chooses the knee by the score that capacity.rs describes.

        `weight` is the weight of the present. `running` and `leaves` are added to `time` and `left` of the current level.
        """
        current = min(self.level, len(self._rows))
        time = left = met = took_all = squares_all = log_met = took_each = levels = squares = 0.0
        for k, (row, log) in enumerate(zip(self._rows, self._logs), 1):
            time += row.time
            left += row.left
            met += row.met
            took_all += row.took
            squares_all += row.squares
            log_met += row.met * log
            took_each += row.took / k
            levels += row.met * k
            squares += row.met * k * k
        if current > 0:
            time += running
            left += leaves
        all_left, all_met = left, max(met, TINY)
        many = levels > MANY * met
        narrow = squares * met < (1.0 + NARROW) * levels * levels
        prior = 0.0 if many and not narrow else 1.0
        if all_left < LEAST * weight:
            return None
        alpha = self._steadiness(weight)
        effort = took = gain = last_log = 0.0
        best = -math.inf
        scores: list[tuple[float, float]] = []
        for k, (row, log) in enumerate(zip(self._rows, self._logs), 1):
            effort += time
            gain += (log - last_log) * left
            took += row.took
            met -= row.met
            log_met -= row.met * log
            took_each -= row.took / k
            each = max(took + k * took_each, TINY) / all_met
            departures = gain - all_left * math.log(max(effort, TINY))
            arrivals = met * log - log_met - all_left * math.log(each)
            score = (departures + alpha * arrivals) / weight - prior * log
            best = max(best, score)
            scores.append((score, effort))
            if k == current:
                time -= row.time + running
                left -= row.left + leaves
            else:
                time -= row.time
                left -= row.left
            last_log = log
        # With many requests whose levels hardly vary, the knee is 1 unless another scores clearly better.
        unclear = many and narrow and scores[0][0] >= best - (DOUBT + CLEARLY * all_left / weight)
        every = Row(met=all_met, took=took_all, squares=squares_all)
        alone = (
            unclear
            or self._single.is_evident(self._rows[0], weight)
            or self._one_core.is_evident(self._latest, self.level, every, weight, leaves > 0.0)
        )
        for k, (score, effort) in enumerate(scores, 1):
            if alone or score >= best - DOUBT:
                base = min(max(effort / all_left, 1.0), float(MAX_LATENCY_US))
                # As many equally recent responses would show the base latency as precisely.
                responses = all_left * all_left / (self._left_squares + leaves * leaves)
                variation = self._variation(k, responses / all_met)
                if variation is None:
                    variation, steady = EXPONENTIAL, self._fit is not None and self._fit.steady
                else:
                    steady = variation < EVEN
                rse = min(100.0 * math.sqrt(variation / responses), MOST_RSE)
                return Capacity(int(base), k, self._beyond.is_open(self._latest), steady, int(rse))
        return None

    def _steadiness(self, weight: float) -> float:
        """Returns α, the weight of the second likelihood."""
        if self._fit is None or self._fit.knee > STEADY_KNEE:
            return 1.0
        variation = math.inf
        for row in self._rows[: self._fit.knee]:
            if row.met > weight and row.took > 0.0:
                squared = max(row.squares * row.met / (row.took * row.took) - 1.0, 0.0)
                variation = min(variation, squared + ASSUMED * weight / row.met)
        return min(max(STEADY / variation, 1.0), MOST_STEADY)

    def _variation(self, knee: int, each: float) -> float | None:
        """Returns the squared coefficient of variation of the latencies within the levels up to the knee.

        Returns `None` if too few requests arrived at these levels. A weight of 1 stands for `each` responses.
        """
        met = means = within = levels = 0.0
        for row in self._rows[:knee]:
            # A row that has faded away must not be divided by.
            if row.met > FADED and row.took > 0.0:
                mean = row.took * row.took / row.met
                met += row.met
                means += mean
                within += max(row.squares - mean, 0.0)
                levels += 1.0
        responses = met * each
        if responses < EVIDENT:
            return None
        return within / means + ASSUMED * levels / responses

    def _elapsed(self, now: int) -> float:
        """Returns the time spent at the current level since the last update, microseconds."""
        return 0.0 if self._since is None else float(min(max(now - self._since, 0), LONGEST_US))

    def _weight(self, now: int) -> float:
        """Returns the weight of an event at `now`. It grows with time, so that the past counts less and less."""
        if self._latest - now > STEP_US:
            # If the clock has stepped back, past events keep their age.
            self._origin = max(self._origin - (self._latest - now), 0)
            if self._since is not None:
                self._since = now
            self._latest = now
        self._latest = max(self._latest, now)
        weight = math.exp(min(max(now - self._origin, 0) / FADES_US, 700.0))
        if weight < HEAVY:
            return weight
        used = 0
        for k, row in enumerate(self._rows, 1):
            row.time /= weight
            row.left /= weight
            row.met /= weight
            row.took /= weight
            row.squares /= weight
            if row.time > 1.0 or row.left > 1e-6 or row.met > 1e-6:
                used = k
        self._left_squares /= weight * weight
        self._single.scale(weight)
        self._one_core.scale(weight)
        del self._rows[used:], self._logs[used:]
        self._origin = now
        return 1.0

    def _row(self, level: int) -> Row:
        """Returns the row of a level, which is at least 1. All levels above `MAX_KNEE` share one row."""
        index = min(level, MAX_KNEE)
        while len(self._rows) < index:
            self._rows.append(Row())
            self._logs.append(math.log(len(self._rows)))
        return self._rows[index - 1]
