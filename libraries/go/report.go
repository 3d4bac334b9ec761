package prequal

import (
	"fmt"
	"strings"
)

// Report is the load report of a server. It follows crates/prequal-core/src/wire/report.rs, orca.rs and probe.rs.
type Report struct {
	// RIF is the number of requests in flight now.
	RIF uint32
	// Away is the number of those that the server is not working on: streams, very long requests, and requests that
	// wait for their client. The knee counts them, too.
	Away uint32
	// LatencyUs is the median recent latency near that RIF, in microseconds; nil while it is unknown.
	LatencyUs *uint32
	// Capacity is the base latency and knee; nil until a request has been served.
	Capacity *Capacity
	// Failing is the share of recent requests that failed, per mille.
	Failing uint32
	// UpS is the time since the server started, in seconds, below 600; nil after that.
	UpS *uint32
	// Utilization is the mean number of requests in flight, divided by the number that the server can serve at once, in
	// millionths; nil while the latter is unknown.
	Utilization *uint64
	// EndedMilli and FailedMilli are the requests per second that ended, and those of them that failed, in thousandths.
	EndedMilli, FailedMilli uint64

	endpoint, probeEndpoint string
}

// Capacity is the base latency and knee of a server.
type Capacity struct {
	// BaseUs is the latency of a request while none waits, in microseconds.
	BaseUs uint32
	// Knee is the number of requests in flight beyond which further ones only wait.
	Knee uint32
	// Open is true if the knee may be higher.
	Open bool
	// Steady is true if requests take almost the same time as long as none waits.
	Steady bool
	// RSEPercent is the relative standard error of the base latency, percent, 0 to 255.
	RSEPercent uint32
}

// String returns the value of the header x-prequal-load.
func (r *Report) String() string {
	var text strings.Builder
	fmt.Fprintf(&text, "%d;", r.RIF)
	if r.LatencyUs != nil {
		fmt.Fprintf(&text, "%d", *r.LatencyUs)
	}
	text.WriteString(";" + r.endpoint)
	if r.probeEndpoint != "" {
		text.WriteString(";probe=" + r.probeEndpoint)
	}
	if r.Failing > 0 {
		fmt.Fprintf(&text, ";fail=%d", r.Failing)
	}
	if r.UpS != nil {
		fmt.Fprintf(&text, ";up=%d", *r.UpS)
	}
	if r.Away > 0 {
		fmt.Fprintf(&text, ";away=%d", r.Away)
	}
	if c := r.Capacity; c != nil {
		fmt.Fprintf(&text, ";base=%d;knee=%d", c.BaseUs, c.Knee)
		if c.Open {
			text.WriteString(";open=1")
		}
		if c.Steady {
			text.WriteString(";steady=1")
		}
		if c.RSEPercent > 0 {
			fmt.Fprintf(&text, ";rse=%d", c.RSEPercent)
		}
	}
	return text.String()
}

// json returns the body of the reply to a probe that accepts JSON.
func (r *Report) json(timestampMs int64) string {
	var text strings.Builder
	fmt.Fprintf(&text, `{"rif":%d,"latency_median_ms":`, r.RIF)
	if us := r.LatencyUs; us != nil {
		fmt.Fprintf(&text, `%d.%03d,"latency_us":%d`, *us/1000, *us%1000, *us)
	} else {
		text.WriteString(`null,"latency_us":null`)
	}
	if c := r.Capacity; c != nil {
		fmt.Fprintf(&text, `,"base_us":%d,"knee":%d,"open":%t,"steady":%t`, c.BaseUs, c.Knee, c.Open, c.Steady)
		fmt.Fprintf(&text, `,"rse_percent":%d`, c.RSEPercent)
	} else {
		text.WriteString(`,"base_us":null,"knee":null`)
	}
	fmt.Fprintf(&text, `,"away":%d,"failing":%d,"up_s":`, r.Away, r.Failing)
	if r.UpS != nil {
		fmt.Fprintf(&text, "%d", *r.UpS)
	} else {
		text.WriteString("null")
	}
	fmt.Fprintf(&text, `,"timestamp_ms":%d,"endpoint":"%s"`, timestampMs, r.endpoint)
	if r.probeEndpoint != "" {
		fmt.Fprintf(&text, `,"probe_endpoint":"%s"`, r.probeEndpoint)
	}
	return text.String() + "}"
}

// ORCA returns the value of the header endpoint-load-metrics, as text or JSON.
func (r *Report) ORCA(format ORCAFormat) string {
	var own, named []string
	pair := "%s=%s"
	prefix := "named_metrics."
	if format == ORCAJSON {
		pair, prefix = `"%s":%s`, ""
	}
	put := func(name, value string) { own = append(own, fmt.Sprintf(pair, name, value)) }
	if r.Utilization != nil {
		put("application_utilization", fixed(*r.Utilization, 1_000_000))
	}
	put("rps_fractional", fixed(r.EndedMilli, 1000))
	put("eps", fixed(r.FailedMilli, 1000))
	r.Named(func(name string, value uint32) {
		named = append(named, fmt.Sprintf(pair, prefix+name, fmt.Sprint(value)))
	})
	if format == ORCAJSON {
		return "JSON {" + strings.Join(own, ",") + `,"named_metrics":{` + strings.Join(named, ",") + "}}"
	}
	return "TEXT " + strings.Join(append(own, named...), ",")
}

// Named calls put for each metric that has no ORCA field of its own.
func (r *Report) Named(put func(name string, value uint32)) {
	put("prequal_rif", r.RIF)
	if c := r.Capacity; c != nil {
		put("prequal_base_latency_us", c.BaseUs)
		put("prequal_knee", c.Knee)
	}
}

// fixed formats parts/unit as a decimal number. unit must be 1000 or 1000000.
func fixed(parts, unit uint64) string {
	switch {
	case parts%unit == 0:
		return fmt.Sprint(parts / unit)
	case unit == 1000:
		return fmt.Sprintf("%d.%03d", parts/unit, parts%unit)
	default:
		return fmt.Sprintf("%d.%06d", parts/unit, parts%unit)
	}
}
