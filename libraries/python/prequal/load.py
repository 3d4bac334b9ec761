"""Counts the requests of one server."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections.abc import Callable

from .rates import Failures, Rates, Window
from .report import Report
from .tracker import Outcome, Tracker

YOUNG_S = 600


class Load:
    """Counts the requests of one server, which has just started. Its methods may be called from several threads.

    `endpoint` is the ip:port by which clients know the server. `orca` is the format of ORCA reports on responses: "text",
    "json", or None for no reports. `orca_limit` is the number of requests that the server is meant to serve at once; 0
    means unknown. `orca_window` is the time constant of the means in ORCA reports, in seconds; values below 0.1 count as
    0.1. With `probe_only`, responses do not carry x-prequal-load. `clock` returns the time in microseconds, for tests.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        orca: str | None = None,
        orca_limit: int = 0,
        orca_window: float = 5.0,
        probe_only: bool = False,
        clock: Callable[[], int] | None = None,
    ) -> None:
        if orca not in (None, "text", "json"):
            raise ValueError(f"orca {orca!r}: must be None, 'text' or 'json'")
        if orca_limit < 0:
            raise ValueError(f"orca_limit {orca_limit}: must not be negative")
        if not 0.0 < orca_window < float("inf"):
            raise ValueError(f"orca_window {orca_window}: must be seconds above 0")
        self.endpoint = canonical(endpoint)
        self.orca = orca
        self.probe_only = probe_only
        self._limit = orca_limit
        self._clock = clock or (lambda: time.monotonic_ns() // 1000)
        self._lock = threading.Lock()
        self._tracker = Tracker()
        self._failures = Failures()
        self._up = self._clock()
        self._rates = Rates(self._up, round(orca_window * 1e6))
        self._ended = [0, 0, 0, 0]

    def start(self) -> Request:
        """Counts a request that arrives. Call its `finish` once, whatever its outcome."""
        now = self._clock()
        with self._lock:
            visit = self._tracker.start(now)
            self._rates.moved(now, self._tracker.rif)
        return Request(self, visit)

    def report(self, leaving: Request | None = None) -> Report:
        """Returns the current load.

        `leaving` is the request whose response carries the report, if that request is about to end.
        """
        return self._report(leaving, True)

    def _report(self, leaving: Request | None, means: bool) -> Report:
        """Returns the current load. If `means` is set, the report includes the mean values, which only ORCA needs.

        Probes leave `means` unset, so that they do not update the mean values.
        """
        now = self._clock()
        with self._lock:
            visit = leaving.visit if leaving is not None and not leaving.done else None
            rif = self._tracker.rif - (visit is not None)
            latency_us = self._tracker.latency(now, rif, visit)
            capacity = self._tracker.capacity(now, visit is not None)
            serves = self._limit
            if capacity is not None:
                serves = max(serves, capacity.knee) if capacity.open else capacity.knee
            up = max(now - self._up, 0) // 1_000_000
            rates = self._rates.over(now, visit is not None) if means else Window(0, 0, 0)
            return Report(
                rif=rif,
                away=min(self._tracker.away, rif),
                latency_us=latency_us,
                capacity=capacity,
                endpoint=self.endpoint,
                failing=self._failures.per_mille(now),
                up_s=up if up < YOUNG_S else None,
                rates=rates,
                utilization_micro=rates.rif_micro // serves if means and serves > 0 else None,
            )

    def ended(self, outcome: Outcome) -> int:
        """Returns the number of requests that have ended with this outcome."""
        return self._ended[outcome]


class Request:
    """A request in flight, from `Load.start` to `finish`."""

    def __init__(self, load: Load, visit) -> None:
        self.visit = visit
        self.done = False
        self._load = load

    def finish(self, outcome: Outcome) -> None:
        """Ends the request. Only the first call counts."""
        load = self._load
        now = load._clock()
        with load._lock:
            if self.done:
                return
            self.done = True
            load._failures.record(now, outcome)
            load._rates.ended(now, load._tracker.rif - 1, outcome)
            load._tracker.finish(self.visit, now, outcome)
            load._ended[outcome] += 1

    def stream(self) -> None:
        """Marks the request as a stream. It stays in flight, but its age says nothing about the server's speed."""
        self._do(self._load._tracker.streaming)

    def client_waits(self) -> None:
        """Notes that the request waits for its client until `client_is_back`. That time does not count against the server."""
        self._do(self._load._tracker.client_waits)

    def client_is_back(self) -> None:
        """Notes that the request no longer waits for its client."""
        self._do(self._load._tracker.client_is_back)

    def _do(self, change) -> None:
        now = self._load._clock()
        with self._load._lock:
            if not self.done:
                change(self.visit, now)


def canonical(endpoint: str) -> str:
    """Returns the endpoint as Prequal's clients write it. Raises ValueError if it is not an ip:port."""
    host, _, port = endpoint.rpartition(":")
    try:
        is_v6 = host.startswith("[") and host.endswith("]")
        address = ipaddress.IPv6Address(host[1:-1]) if is_v6 else ipaddress.IPv4Address(host)
        if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535) or "%" in host:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"endpoint {endpoint!r}: must be ip:port with a port of 1 to 65535, IPv6 as [ip]:port"
        ) from None
    return f"[{address}]:{int(port)}" if is_v6 else f"{address}:{int(port)}"
