package prequal

import "math"

// The share of failures, and the rates in ORCA reports. Follows crates/prequal-core/src/server/failures.rs and rates.rs.

const (
	halfLifeUs     = 5_000_000
	silenceUs      = 1_000_000
	maxEvidence    = 64
	minEvidence    = 4
	youngS         = 600
	minWindowUs    = 100_000
	shortestWindow = 1.0 / 8
)

// failures counts responses and failures. Both counts fade.
type failures struct {
	ended, failed float64
	at            uint64
}

func (f *failures) record(now uint64, outcome Outcome) {
	if outcome == Aborted {
		return
	}
	next := f.faded(now)
	keep := min((maxEvidence-1)/next.ended, 1)
	next.ended = next.ended*keep + 1
	next.failed = next.failed*keep + share(outcome == Failure)
	*f = next
}

func (f *failures) perMille(now uint64) uint32 {
	if f.failed == 0 {
		return 0
	}
	next := f.faded(now)
	return uint32(min(math.Round(next.failed/max(next.ended, minEvidence)*1000), 1000))
}

func (f *failures) faded(now uint64) failures {
	gap := distance(now, f.at)
	if gap == 0 {
		return *f
	}
	halved := func(us uint64) float64 { return math.Exp2(-float64(us) / halfLifeUs) }
	byTime, bySilence := halved(gap), 1.0
	if gap > silenceUs {
		bySilence = halved(gap - silenceUs)
	}
	return failures{f.ended * byTime, f.failed * byTime * bySilence, now}
}

// rates counts requests as they come and go. The counts fade.
type rates struct {
	windowUs       float64
	rif            uint32
	latest         uint64
	ended, failed  float64
	busyUs, passed float64
}

// window holds means over the recent past: requests per second that ended and that failed, in thousandths, and requests in
// flight, in millionths.
type window struct{ endedMilli, failedMilli, rifMicro uint64 }

func (r *rates) finished(now uint64, rif uint32, outcome Outcome) {
	r.moved(now, rif)
	r.ended++
	if outcome == Failure {
		r.failed++
	}
}

func (r *rates) moved(now uint64, rif uint32) {
	r.advance(now)
	r.rif = rif
}

// over returns the means as of now. If leaving is set, the request whose response carries them counts as ended.
func (r *rates) over(now uint64, leaving bool) window {
	r.advance(now)
	passed := max(r.passed, r.windowUs*shortestWindow)
	perUs := func(sum, unit float64) uint64 { return uint64(math.Round(sum / passed * unit)) }
	return window{perUs(r.ended+share(leaving), 1e9), perUs(r.failed, 1e9), perUs(r.busyUs, 1e6)}
}

func (r *rates) advance(now uint64) {
	if now < r.latest {
		if since(r.latest, now) > stepUs {
			*r = rates{windowUs: r.windowUs, rif: r.rif, latest: now}
		}
		return
	}
	passed := float64(since(now, r.latest)) / r.windowUs
	r.latest = now
	kept, newUs := math.Exp(-passed), -math.Expm1(-passed)*r.windowUs
	r.ended *= kept
	r.failed *= kept
	r.busyUs = r.busyUs*kept + float64(r.rif)*newUs
	r.passed = r.passed*kept + newUs
}
