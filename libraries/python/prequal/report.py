"""The load report of a server. Follows crates/prequal-core/src/wire/report.rs, orca.rs and probe.rs."""

from __future__ import annotations

from typing import NamedTuple

from .capacity import Capacity
from .rates import Window


class Report(NamedTuple):
    """The load of a server."""

    #: Number of requests in flight now.
    rif: int
    #: Number of those that the server is not working on: streams, very long requests, and requests that wait for their
    #: client. The knee counts them, too.
    away: int
    #: Median recent latency near that RIF, microseconds; None while it is unknown.
    latency_us: int | None
    #: Base latency and knee; None until a request has been served.
    capacity: Capacity | None
    endpoint: str
    #: Share of recent requests that failed, per mille.
    failing: int
    #: Time since the server started, seconds, below 600; None after that.
    up_s: int | None
    #: Rates, and mean number of requests in flight.
    rates: Window
    #: Mean number of requests in flight, divided by the number that the server can serve at once, in millionths; None
    #: while the latter is unknown.
    utilization_micro: int | None

    def header(self) -> str:
        """Returns the value of the header x-prequal-load."""
        text = f"{self.rif};{'' if self.latency_us is None else self.latency_us};{self.endpoint}"
        if self.failing > 0:
            text += f";fail={self.failing}"
        if self.up_s is not None:
            text += f";up={self.up_s}"
        if self.away > 0:
            text += f";away={self.away}"
        if self.capacity is not None:
            text += f";base={self.capacity.base_us};knee={self.capacity.knee}"
            if self.capacity.open:
                text += ";open=1"
            if self.capacity.steady:
                text += ";steady=1"
            if self.capacity.rse_percent:
                text += f";rse={self.capacity.rse_percent}"
        return text

    def json(self, timestamp_ms: int) -> str:
        """Returns the body of the reply to a probe that accepts JSON."""
        us, capacity = self.latency_us, self.capacity
        median = "null" if us is None else f"{us // 1000}.{us % 1000:03}"
        text = f'{{"rif":{self.rif},"latency_median_ms":{median},"latency_us":{"null" if us is None else us}'
        if capacity is None:
            text += ',"base_us":null,"knee":null'
        else:
            text += f',"base_us":{capacity.base_us},"knee":{capacity.knee}'
            text += f',"open":{"true" if capacity.open else "false"}'
            text += f',"steady":{"true" if capacity.steady else "false"},"rse_percent":{capacity.rse_percent}'
        text += f',"away":{self.away},"failing":{self.failing},"up_s":{"null" if self.up_s is None else self.up_s}'
        return text + f',"timestamp_ms":{timestamp_ms},"endpoint":"{self.endpoint}"}}'

    def orca(self, form: str) -> str:
        """Returns the value of the header endpoint-load-metrics. `form` is "text" or "json"."""
        own: list[tuple[str, str]] = []
        if self.utilization_micro is not None:
            own.append(("application_utilization", fixed(self.utilization_micro, 6)))
        own.append(("rps_fractional", fixed(self.rates.ended_milli, 3)))
        own.append(("eps", fixed(self.rates.failed_milli, 3)))
        named = [("prequal_rif", str(self.rif))]
        if self.capacity is not None:
            named.append(("prequal_base_latency_us", str(self.capacity.base_us)))
            named.append(("prequal_knee", str(self.capacity.knee)))
        if form == "text":
            return "TEXT " + ",".join(
                [f"{name}={value}" for name, value in own]
                + [f"named_metrics.{name}={value}" for name, value in named]
            )
        pairs = ["".join(f'"{name}":{value},' for name, value in own)]
        inner = ",".join(f'"{name}":{value}' for name, value in named)
        return "JSON {" + pairs[0] + '"named_metrics":{' + inner + "}}"


def fixed(parts: int, digits: int) -> str:
    """Formats parts / 10**digits as a decimal number."""
    whole, rest = divmod(parts, 10**digits)
    return f"{whole}.{rest:0{digits}}" if rest else str(whole)
