package prequal

import "math"

// How fast the server is, and how much it can serve at once: crates/prequal-core/src/capacity.rs. The sums are in that file's
// order, so that rounding is the same but for the last digits of logarithms and exponentials.

const (
	maxKnee      = 512
	fadesUs      = 6e6
	doubt        = 0.5
	leastLeft    = 0.5
	fitEveryUs   = 10_000
	fitAtLeastUs = 3_000_000
	together     = 128
	longestUs    = 60_000_000
	heavy        = 1e12
	tiny         = 1e-9
	stepUs       = 1_000_000
)

// capacity is base latency and knee, which may be higher if it is open.
type capacity struct {
	baseUs, knee uint32
	open         bool
}

func (c capacity) crowding(rif uint32) float64 {
	return max((float64(rif)+1)/float64(max(c.knee, 1)), 1)
}

// row is one level: sums that fade.
type row struct {
	// Time spent at this level, and good answers that left at it.
	time, left float64
	// Good answers to requests that arrived as this many-th, and what they took.
	met, took float64
}

type score struct{ score, effort float64 }

type levels struct {
	rows   []row
	logs   []float64
	scores []score
	// When the last good answer left, and at which level the burst began that it belongs to.
	burstAt    uint64
	burstLevel uint32
	level      uint32
	since      uint64
	begun      bool
	// When the weight was 1, and the latest time heard of.
	origin, latest uint64
	fittedAt       uint64
	isFitted       bool
	fit            capacity
	known          bool
	run            fastRun
	beyond         beyond
}

// moved credits the time since the last update to the level, which is after from now on.
func (l *levels) moved(now uint64, after uint32) {
	weight := l.weight(now)
	if elapsed := l.elapsed(now) * weight; elapsed > 0 {
		if r := l.row(l.level); r != nil {
			r.time += elapsed
		}
	}
	l.level, l.since, l.begun = after, now, true
}

// served takes in a good answer that left while level requests were in flight, itself included.
func (l *levels) served(now uint64, level, arrivedAs, latencyUs uint32) {
	if l.known {
		l.beyond.answered(now, l.fit, arrivedAs, latencyUs)
		if l.run.answered(now, l.fit, arrivedAs, latencyUs) {
			l.startAnew(now)
			return
		}
	}
	weight := l.weight(now)
	level = l.levelOfBurst(now, max(level, 1), uint64(latencyUs/together))
	l.row(level).left += weight
	arrived := l.row(max(arrivedAs, 1))
	arrived.met += weight
	arrived.took += float64(latencyUs) * weight
	if !l.isFitted || distance(now, l.fittedAt) > fitAtLeastUs {
		l.capacity(now, false)
	}
}

// startAnew forgets all but the run of fast answers, which count as if each had been alone.
func (l *levels) startAnew(now uint64) {
	answers, took := l.run.take()
	l.rows, l.logs = l.rows[:0], l.logs[:0]
	l.origin, l.latest, l.since, l.begun = now, now, now, true
	*l.row(1) = row{time: took, left: answers, met: answers, took: took}
	l.isFitted = false
}

// levelOfBurst is the level at which a burst of departures began: requests that came together leave together.
func (l *levels) levelOfBurst(now uint64, level uint32, together uint64) uint32 {
	if distance(now, l.burstAt) <= together && level < l.burstLevel {
		level = l.burstLevel
	}
	l.burstAt, l.burstLevel = now, level
	return level
}

func (l *levels) capacity(now uint64, leaving bool) (capacity, bool) {
	fresh := l.isFitted && distance(now, l.fittedAt) < fitEveryUs
	if !fresh || (leaving && !l.known) {
		weight := l.weight(now)
		l.row(l.level)
		running := row{time: l.elapsed(now) * weight}
		l.fittedAt, l.isFitted = now, true
		if leaving && l.level > 0 {
			running.left = weight
		}
		if fit, known := l.fitted(weight, running); known {
			l.fit, l.known = fit, true
		}
	}
	return l.fit, l.known
}

// fitted maximises the two likelihoods where the present weighs weight, and running is to be added to the current level.
func (l *levels) fitted(weight float64, running row) (capacity, bool) {
	current := min(int(l.level), len(l.rows))
	var all row
	var logMet, tookEach float64
	for i, r := range l.rows {
		all.time += r.time
		all.left += r.left
		all.met += r.met
		all.took += r.took
		logMet += r.met * l.logs[i]
		tookEach += r.took / float64(i+1)
	}
	if current > 0 {
		all.time += running.time
		all.left += running.left
	}
	if all.left < leastLeft*weight {
		return capacity{}, false
	}
	time, left, met := all.time, all.left, all.met
	var effort, took, gain, lastLog float64
	best := math.Inf(-1)
	l.scores = l.scores[:0]
	for i, r := range l.rows {
		k, log := float64(i+1), l.logs[i]
		effort += time
		gain += (log - lastLog) * left
		took += r.took
		met -= r.met
		logMet -= r.met * log
		tookEach -= r.took / k
		each := max(took+k*tookEach, tiny) / max(all.met, tiny)
		s := (gain + met*log - logMet - all.left*math.Log(max(effort*each, tiny))) / weight
		best = max(best, s)
		l.scores = append(l.scores, score{s, effort})
		if i+1 == current {
			time -= r.time + running.time
			left -= r.left + running.left
		} else {
			time -= r.time
			left -= r.left
		}
		lastLog = log
	}
	for i, s := range l.scores {
		if s.score >= best-doubt {
			base := min(max(s.effort/all.left, 1), maxLatencyUs)
			return capacity{uint32(base), uint32(i + 1), l.beyond.isOpen(l.latest)}, true
		}
	}
	return capacity{}, false
}

func (l *levels) elapsed(now uint64) float64 {
	if !l.begun {
		return 0
	}
	return float64(min(since(now, l.since), longestUs))
}

// weight is what an event now weighs; the past weighs less and less beside it.
func (l *levels) weight(now uint64) float64 {
	if now < l.latest && distance(now, l.latest) > stepUs {
		// After a step back the past is as old as it was.
		l.origin = since(l.origin, distance(now, l.latest))
		if l.begun {
			l.since = now
		}
		l.latest = now
	}
	l.latest = max(l.latest, now)
	weight := math.Exp(min(float64(since(now, l.origin))/fadesUs, 700))
	if weight < heavy {
		return weight
	}
	used := 0
	for i := range l.rows {
		r := &l.rows[i]
		r.time /= weight
		r.left /= weight
		r.met /= weight
		r.took /= weight
		if r.time > 1 || r.left > 1e-6 || r.met > 1e-6 {
			used = i + 1
		}
	}
	l.rows, l.logs = l.rows[:used], l.logs[:used]
	l.origin = now
	return 1
}

// row of a level from 1; those above the highest that is told apart share one.
func (l *levels) row(level uint32) *row {
	index := int(min(level, maxKnee))
	if index == 0 {
		return nil
	}
	for len(l.rows) < index {
		l.rows = append(l.rows, row{})
		l.logs = append(l.logs, math.Log(float64(len(l.rows))))
	}
	return &l.rows[index-1]
}
