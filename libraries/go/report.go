package prequal

import (
	"fmt"
	"strings"
)

// Report is what a server says of itself: crates/prequal-core/src/report.rs, orca.rs and probe.rs.
type Report struct {
	// RIF is how many requests are in flight now.
	RIF uint32
	// LatencyUs is the median recent latency near that RIF; nil while there is no sample.
	LatencyUs *uint32
	// Capacity is nil until a request has been answered.
	Capacity *Capacity
	// Failing is the share of recent requests that failed, per mille.
	Failing uint32
	// UpS says how long ago the server started, in seconds, below 600.
	UpS *uint32
	// Utilization is the mean number of requests in flight over what the server serves at once, in millionths; nil while that is
	// not known.
	Utilization *uint64
	// EndedMilli and FailedMilli are requests a second in thousandths: those that ended, and of these those that failed.
	EndedMilli, FailedMilli uint64

	endpoint, probeEndpoint string
}

// Capacity says how fast a server is and how much it serves at once.
type Capacity struct {
	// BaseUs is what a request takes while none waits, in microseconds.
	BaseUs uint32
	// Knee is how many requests at once saturate the server.
	Knee uint32
	// Open means that the knee may be higher.
	Open bool
}

// String is the value of the header x-prequal-load.
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
	if c := r.Capacity; c != nil {
		fmt.Fprintf(&text, ";base=%d;knee=%d", c.BaseUs, c.Knee)
		if c.Open {
			text.WriteString(";open=1")
		}
	}
	return text.String()
}

// json is the body of the reply to a probe that accepts it.
func (r *Report) json(timestampMs int64) string {
	var text strings.Builder
	fmt.Fprintf(&text, `{"rif":%d,"latency_median_ms":`, r.RIF)
	if us := r.LatencyUs; us != nil {
		fmt.Fprintf(&text, `%d.%03d,"latency_us":%d`, *us/1000, *us%1000, *us)
	} else {
		text.WriteString(`null,"latency_us":null`)
	}
	if c := r.Capacity; c != nil {
		fmt.Fprintf(&text, `,"base_us":%d,"knee":%d,"open":%t`, c.BaseUs, c.Knee, c.Open)
	} else {
		text.WriteString(`,"base_us":null,"knee":null`)
	}
	fmt.Fprintf(&text, `,"failing":%d,"up_s":`, r.Failing)
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

// ORCA is the value of the header endpoint-load-metrics as text or JSON.
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

// Named calls put with each metric that ORCA has no field for.
func (r *Report) Named(put func(name string, value uint32)) {
	put("prequal_rif", r.RIF)
	if c := r.Capacity; c != nil {
		put("prequal_base_latency_us", c.BaseUs)
		put("prequal_knee", c.Knee)
	}
}

// fixed is a number in parts of the second, which is 1000 or 1000000.
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
