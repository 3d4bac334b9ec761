package prequal

import "math"

// Whether the server serves one request at a time. This file follows
// crates/prequal-core/src/server/capacity/single.rs, which explains the test.

const (
	enough    = 3
	varied    = 0.5
	errorLow  = 0.05
	errorHigh = 0.2
)

// oneByOne holds fading sums over the requests that arrived while others were at the server.
type oneByOne struct {
	// Number of departures that are known, at most two, and the times of the last one but one and of the last one.
	departures   int
	before, last uint64
	// Number of good responses to such requests, and the sum of their times, each from the previous departure or from the
	// request's own arrival, whichever is later.
	followed, took float64
}

// left records that a request has left the server, or waits for its client.
func (o *oneByOne) left(now uint64) {
	o.before, o.last = o.last, now
	o.departures = min(o.departures+1, 2)
}

// cameBack records that a request which left at leftAt to wait for its client is back. Then that was no departure, and
// the wait was no work. If another request has left since, the departures stay as they are.
func (o *oneByOne) cameBack(now, leftAt uint64) {
	if o.departures > 0 && o.last == leftAt {
		o.departures--
		o.last = o.before + since(now, leftAt)
	}
}

// answered records the good response to a request that arrived while others were at the server, and that has just left.
func (o *oneByOne) answered(now uint64, weight float64, latencyUs uint32) {
	if o.departures == 2 && o.last == now {
		o.followed += weight
		o.took += min(float64(latencyUs), float64(since(now, o.before))) * weight
	}
}

// isEvident returns whether requests are served one by one. alone is the row of level 1.
func (o *oneByOne) isEvident(alone *row, weight float64) bool {
	if min(o.followed, alone.met) < enough*weight || alone.took <= 0 {
		return false
	}
	mean := alone.took / alone.met
	squared := max(alone.squares/alone.met/(mean*mean)-1, 0)
	variation := squared + assumed*weight/alone.met
	return variation <= varied && o.took/o.followed >= mean*(1-errorOf(variation*weight, o.followed, alone.met))
}

// errorOf returns the relative error of the comparison of two means over one and other requests: their standard error,
// within bounds. variation is the squared coefficient of variation.
func errorOf(variation, one, other float64) float64 {
	return min(max(math.Sqrt(variation*(1/one+1/other)), errorLow), errorHigh)
}

// startAnew forgets the requests so far, but not when the last ones left.
func (o *oneByOne) startAnew() {
	o.followed, o.took = 0, 0
}

// scale divides the sums by weight.
func (o *oneByOne) scale(weight float64) {
	o.followed /= weight
	o.took /= weight
}
