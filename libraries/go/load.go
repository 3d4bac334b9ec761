// Package prequal lets a server report its own load, without an agent beside it, to Prequal's clients and to any client that
// reads ORCA.
//
// Handler does so for net/http. The package prequalgrpc has interceptors for gRPC. Both report the same values as Prequal's
// agent, and classify requests in the same way (docs/guide/libraries.md).
package prequal

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// ORCAFormat is the format of the header endpoint-load-metrics.
type ORCAFormat int

const (
	// ORCANone means that responses carry no such header.
	ORCANone ORCAFormat = iota
	// ORCAText is `TEXT name=value,...`.
	ORCAText
	// ORCAJSON is `JSON {...}`.
	ORCAJSON
)

// Config defines how a server reports its load.
type Config struct {
	// Endpoint is the ip:port by which clients know this server. Required.
	Endpoint string
	// ProbeEndpoint is the ip:port on which the server answers probes, if it uses another port for them.
	ProbeEndpoint string
	// ProbeOnly omits x-prequal-load from responses. Replies to probes still carry it.
	ProbeOnly bool
	// ORCA is the format of the header endpoint-load-metrics on responses.
	ORCA ORCAFormat
	// ORCALimit is the number of requests that the server is meant to serve at once. 0 means unknown.
	ORCALimit uint32
	// ORCAWindow is the time constant of the means in ORCA reports. Values below 100 ms count as 100 ms; 0 means 5 s.
	ORCAWindow time.Duration
	// Clock returns the time since a fixed origin, for tests. nil means the system's monotonic clock.
	Clock func() time.Duration
}

// Load counts the requests of one server. Its methods may be called concurrently.
type Load struct {
	config  Config
	ended   [4]atomic.Uint64
	mutex   sync.Mutex
	tracker tracker
	failed  failures
	rates   rates
	up      uint64
}

// New returns the Load of an idle server that has just started.
func New(config Config) (*Load, error) {
	endpoint, err := canonical(config.Endpoint)
	if err != nil {
		return nil, fmt.Errorf("Endpoint %q: %w", config.Endpoint, err)
	}
	config.Endpoint = endpoint.String()
	if config.ProbeEndpoint != "" {
		probe, err := canonical(config.ProbeEndpoint)
		if err != nil {
			return nil, fmt.Errorf("ProbeEndpoint %q: %w", config.ProbeEndpoint, err)
		}
		if probe.Addr() != endpoint.Addr() {
			return nil, fmt.Errorf("ProbeEndpoint %q: must be a port of Endpoint's host", config.ProbeEndpoint)
		}
		config.ProbeEndpoint = probe.String()
	}
	if config.ORCAWindow == 0 {
		config.ORCAWindow = 5 * time.Second
	}
	if config.ORCAWindow < 0 {
		return nil, fmt.Errorf("ORCAWindow %v: must not be negative", config.ORCAWindow)
	}
	if config.Clock == nil {
		origin := time.Now()
		config.Clock = func() time.Duration { return time.Since(origin) }
	}
	load := &Load{config: config}
	load.up = load.now()
	windowUs := max(config.ORCAWindow.Microseconds(), minWindowUs)
	load.rates = rates{windowUs: float64(windowUs), latest: load.up}
	load.tracker.levels.run.usual = fastShareLow
	return load, nil
}

func canonical(text string) (netip.AddrPort, error) {
	endpoint, err := netip.ParseAddrPort(text)
	if err != nil || endpoint.Port() == 0 || endpoint.Addr().Zone() != "" {
		return endpoint, errors.New("must be ip:port with a port of 1 to 65535, IPv6 as [ip]:port")
	}
	return endpoint, nil
}

func (l *Load) now() uint64 {
	return uint64(max(l.config.Clock().Microseconds(), 0))
}

// Request is a request in flight, from Start to Finish.
type Request struct {
	load  *Load
	visit *visit
	done  bool
}

// Start counts a request that arrives. Call Finish once, whatever its outcome.
func (l *Load) Start() *Request {
	now := l.now()
	l.mutex.Lock()
	defer l.mutex.Unlock()
	v := l.tracker.start(now)
	l.rates.moved(now, l.tracker.rif)
	return &Request{load: l, visit: v}
}

// Finish ends the request. Only the first call counts.
func (r *Request) Finish(outcome Outcome) {
	r.do(func(l *Load, now uint64) {
		r.done = true
		l.failed.record(now, outcome)
		l.rates.finished(now, l.tracker.rif-1, outcome)
		l.tracker.finish(r.visit, now, outcome)
		l.ended[outcome].Add(1)
	})
}

// Stream marks the request as a stream. It stays in flight, but its age says nothing about the server's speed.
func (r *Request) Stream() {
	r.do(func(l *Load, now uint64) { l.tracker.streaming(r.visit, now) })
}

// ClientWaits notes that the request waits for its client until ClientIsBack. That time does not count against the server.
func (r *Request) ClientWaits() {
	r.do(func(l *Load, now uint64) { l.tracker.clientWaits(r.visit, now) })
}

// ClientIsBack notes that the request no longer waits for its client.
func (r *Request) ClientIsBack() {
	r.do(func(l *Load, now uint64) { l.tracker.clientIsBack(r.visit, now) })
}

func (r *Request) do(change func(l *Load, now uint64)) {
	now := r.load.now()
	r.load.mutex.Lock()
	defer r.load.mutex.Unlock()
	if !r.done {
		change(r.load, now)
	}
}

// Report returns the current load. leaving is the request whose response carries the report, if that request is about
// to end: the client reads the report after the request has ended. leaving is nil for probes, streams and long
// downloads.
func (l *Load) Report(leaving *Request) *Report {
	return l.report(leaving, true)
}

// report returns the current load. If the argument means is set, the report includes the mean values, which only ORCA
// needs. Probes leave it unset, so that they do not update the mean values.
func (l *Load) report(leaving *Request, means bool) *Report {
	now := l.now()
	l.mutex.Lock()
	defer l.mutex.Unlock()
	var leaves *visit
	rif := l.tracker.rif
	if leaving != nil && !leaving.done {
		leaves = leaving.visit
		rif--
	}
	r := &Report{RIF: rif, Away: min(l.tracker.away, rif), endpoint: l.config.Endpoint, probeEndpoint: l.config.ProbeEndpoint}
	if latency, known := l.tracker.latency(now, rif, leaves); known {
		r.LatencyUs = &latency
	}
	serves := l.config.ORCALimit
	if c, known := l.tracker.capacity(now, leaves != nil); known {
		r.Capacity = &Capacity{c.baseUs, c.knee, c.open, c.steady, c.rsePercent}
		if !c.open {
			serves = c.knee
		}
		serves = max(serves, c.knee)
	}
	r.Failing = l.failed.perMille(now)
	if up := uint32(min(since(now, l.up)/1_000_000, youngS)); up < youngS {
		r.UpS = &up
	}
	if !means {
		return r
	}
	window := l.rates.over(now, leaves != nil)
	r.EndedMilli, r.FailedMilli = window.endedMilli, window.failedMilli
	if serves > 0 {
		utilization := window.rifMicro / uint64(serves)
		r.Utilization = &utilization
	}
	return r
}

// Ended returns the number of requests that have ended with this outcome.
func (l *Load) Ended(outcome Outcome) uint64 {
	return l.ended[outcome].Load()
}

// ReportsOnResponses returns whether responses carry x-prequal-load. Interceptors call this method.
func (l *Load) ReportsOnResponses() bool { return !l.config.ProbeOnly }

// ReportsORCA returns whether responses carry load in ORCA format. On gRPC responses, the format is binary.
// Interceptors call this method.
func (l *Load) ReportsORCA() bool { return l.config.ORCA != ORCANone }
