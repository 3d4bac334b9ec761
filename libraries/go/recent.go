package prequal

import "math"

// Single responses show some changes sooner than the fit does. This file follows
// crates/prequal-core/src/server/capacity/recent.rs.

const (
	certain        = 12
	shortest       = 10
	fastShareLow   = 0.3
	fastShareHigh  = 0.99
	remembered     = 32
	seldomHindered = 0.35
	forgottenUs    = 30e6
)

// fastRun detects that the server has become faster than its fit says.
type fastRun struct {
	// Moving average of the share of fast responses.
	usual float64
	// When the first request of the run arrived.
	since         uint64
	answers, took float64
	// Time that requests have spent at the server since the first request of the run arrived, microseconds. At most as
	// many requests count at a time as the knee.
	worked float64
}

// answered records a response that left while level requests were in flight, itself included. It returns whether the run
// is too long to be due to chance.
func (f *fastRun) answered(now uint64, fit capacity, level, arrivedAs, latencyUs uint32) bool {
	if arrivedAs > fit.knee {
		return false
	}
	arrived := since(now, uint64(latencyUs))
	fast := latencyUs < fit.baseUs/2
	f.usual += (share(fast) - f.usual) / remembered
	if !fast {
		// A request that is older than the run does not contradict it.
		if arrived >= f.since {
			f.answers = 0
		}
		return false
	}
	if f.answers == 0 {
		f.since, f.took = arrived, 0
		// The current level stands for the levels since the request arrived, which are not known here.
		f.worked = float64(max(latencyUs, 1)) * float64(min(max(level, 1), fit.knee))
	}
	f.answers++
	f.took += float64(latencyUs)
	usual := min(max(f.usual, fastShareLow), fastShareHigh)
	return f.answers >= shortest && f.answers*-math.Log(usual) > certain &&
		f.surprise(usual*f.worked/float64(fit.baseUs)) > certain
}

// surprise returns s such that the probability of at least this many fast responses is at most e^-s where expected are
// expected (Chernoff's bound for a Poisson distribution); 0 if there are no more than expected.
func (f *fastRun) surprise(expected float64) float64 {
	times := f.answers / expected
	if times <= 1 {
		return 0
	}
	return f.answers*(math.Log(times)-1) + expected
}

func (f *fastRun) take() (answers, took float64) {
	answers, took = f.answers, f.took
	f.answers = 0
	return answers, took
}

// beyond detects whether requests that arrive beyond the knee wait, as they would if the knee were real.
type beyond struct {
	// Moving average of the latency of requests that arrived up to the knee, microseconds; 0 before the first.
	unhinderedUs float64
	// Moving average of the share of requests beyond the knee that were delayed by at least half of what a queue
	// would add.
	hindered float64
	at       uint64
}

func (b *beyond) answered(now uint64, fit capacity, arrivedAs, latencyUs uint32) {
	latency, crowding := float64(latencyUs), fit.crowding(sub(arrivedAs, 1))
	if crowding <= 1 {
		answers := float64(remembered)
		if b.unhinderedUs == 0 {
			answers = 1
		}
		b.unhinderedUs += (latency - b.unhinderedUs) / answers
		return
	}
	base := float64(fit.baseUs)
	if b.unhinderedUs > 0 {
		base = b.unhinderedUs
	}
	before := b.hinderedAt(now)
	b.hindered = before + (share(latency >= base*(1+crowding)/2)-before)/remembered
	b.at = now
}

// hinderedAt returns the share of hindered requests, which decreases with its age. Old evidence is forgotten, so that a
// server that is never sent requests beyond its knee is tried again.
func (b *beyond) hinderedAt(now uint64) float64 {
	return b.hindered * max(1-float64(since(now, b.at))/forgottenUs, 0)
}

func (b *beyond) isOpen(now uint64) bool {
	return b.hinderedAt(now) < seldomHindered
}

func share(is bool) float64 {
	if is {
		return 1
	}
	return 0
}
