// Package prequal lets a server report its own load to Prequal's clients, and to all that read ORCA, without an agent beside it.
//
// Handler does so for net/http; the package prequalgrpc has interceptors for gRPC. What they report and when a request counts
// as what is that of Prequal's agent (docs/libraries.md).
package prequal

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// ORCAFormat says how the header endpoint-load-metrics is written.
type ORCAFormat int

const (
	// ORCANone means that responses carry no such header.
	ORCANone ORCAFormat = iota
	// ORCAText is `TEXT name=value,...`.
	ORCAText
	// ORCAJSON is `JSON {...}`.
	ORCAJSON
)

// Config says how a server reports its load.
type Config struct {
	// Endpoint is the ip:port by which clients know this server. Required.
	Endpoint string
	// ProbeEndpoint is the ip:port where it answers probes, if that is another port.
	ProbeEndpoint string
	// ProbeOnly leaves x-prequal-load out of responses; replies to probes have it.
	ProbeOnly bool
	// ORCA asks for the header endpoint-load-metrics on responses.
	ORCA ORCAFormat
	// ORCALimit is how many requests the server is meant to serve at once. 0 is not known.
	ORCALimit uint32
	// ORCAWindow is the time constant of ORCA's means, at least 100 ms. 0 is 5 s.
	ORCAWindow time.Duration
	// Clock is the time since a fixed origin, for tests. nil is the system's monotonic clock.
	Clock func() time.Duration
}

// Load counts the requests of one server. Its methods may be called at the same time.
type Load struct {
	config  Config
	ended   [4]atomic.Uint64
	mutex   sync.Mutex
	tracker tracker
	failed  failures
	rates   rates
	up      uint64
}

// New is an idle server that has just started.
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

// Request is one in flight, from Start to Finish.
type Request struct {
	load  *Load
	visit *visit
	done  bool
}

// Start counts a request that arrives. Call Finish once, whatever becomes of it.
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

// Stream says that the request is a stream: it stays in flight, and its age says nothing of the server's speed.
func (r *Request) Stream() {
	r.do(func(l *Load, now uint64) { l.tracker.streaming(r.visit, now) })
}

// ClientWaits says that the request waits for its client until ClientIsBack. That time is none of the server's.
func (r *Request) ClientWaits() {
	r.do(func(l *Load, now uint64) { l.tracker.clientWaits(r.visit, now) })
}

// ClientIsBack ends ClientWaits.
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

// Report is the load now. leaving is the request on whose response the report goes, if it is about to leave: its client reads
// the report when it has left. It is nil for probes, streams and long downloads.
func (l *Load) Report(leaving *Request) *Report {
	return l.report(leaving, true)
}

// report has what only ORCA's readers need if they are to be asked: probes do not move the means.
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
	r := &Report{RIF: rif, endpoint: l.config.Endpoint, probeEndpoint: l.config.ProbeEndpoint}
	if latency, known := l.tracker.latency(now, rif, leaves); known {
		r.LatencyUs = &latency
	}
	serves := l.config.ORCALimit
	if c, known := l.tracker.capacity(now, leaves != nil); known {
		r.Capacity = &Capacity{c.baseUs, c.knee, c.open}
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

// Ended says how many requests have ended so.
func (l *Load) Ended(outcome Outcome) uint64 {
	return l.ended[outcome].Load()
}

// ReportsOnResponses is for interceptors: whether responses carry x-prequal-load.
func (l *Load) ReportsOnResponses() bool { return !l.config.ProbeOnly }

// ReportsORCA is for interceptors: whether responses carry load in the format of ORCA. On gRPC's it is binary.
func (l *Load) ReportsORCA() bool { return l.config.ORCA != ORCANone }
