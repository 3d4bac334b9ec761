package prequal

import "math"

// The estimate of how fast the server is, and how much it can serve at once. Follows crates/prequal-core/src/server/capacity.rs. The
// sums are computed in the order of that file, so that they are rounded alike. Only logarithms and exponentials may differ, in
// their last digits. The constants are documented there.

const (
	maxKnee      = 512
	fadesUs      = 6e6
	doubt        = 0.5
	steady       = 0.05
	mostSteady   = 16.0
	steadyKnee   = 3
	even         = 0.2
	evident      = 4.0
	exponential  = 1.0
	mostRse      = 255.0
	faded        = 1e-9
	many         = 6.0
	narrow       = 0.02
	clearly      = 0.005
	assumed      = 0.25
	leastLeft    = 0.5
	fitEveryUs   = 10_000
	fitAtLeastUs = 3_000_000
	together     = 128
	longestUs    = 60_000_000
	heavy        = 1e12
	tiny         = 1e-9
	stepUs       = 1_000_000
)

// capacity is the base latency and knee of the server. If open is set, the knee may be higher. If steady is set,
// requests take almost the same time as long as none waits.
type capacity struct {
	baseUs, knee uint32
	open, steady bool
	// The relative standard error of the base latency, percent.
	rsePercent uint32
}

func (c capacity) crowding(rif uint32) float64 {
	return max((float64(rif)+1)/float64(max(c.knee, 1)), 1)
}

// row holds the fading sums for one level, which is a number of requests at the server.
type row struct {
	// Time spent at this level, and number of good responses that left at it.
	time, left float64
	// Number of good responses to requests that raised the level to this one on arrival, and the time that those requests took.
	met, took float64
	// Sum of the squares of these times.
	squares float64
}

type score struct{ score, effort float64 }

type levels struct {
	rows   []row
	logs   []float64
	scores []score
	// Sum of the squares of the weights of the good responses that left.
	leftSquares float64
	// When the last good response left, and at which level its burst began.
	burstAt    uint64
	burstLevel uint32
	level      uint32
	since      uint64
	begun      bool
	// When the weight was 1, and the latest time seen.
	origin, latest uint64
	fittedAt       uint64
	isFitted       bool
	fit            capacity
	known          bool
	run            fastRun
	beyond         beyond
	single         oneByOne
	oneCore        oneCore
}

// moved credits the time since the last update to the current level, and then changes the level to after.
func (l *levels) moved(now uint64, after uint32) {
	before := l.level
	weight := l.credit(now, after)
	l.oneCore.moved(now, weight, before, after)
	if after < before {
		l.single.left(now)
	}
}

// cameBack records that a request which left at leftAt to wait for its client is back.
func (l *levels) cameBack(now, leftAt uint64) {
	others := l.level
	l.credit(now, others+1)
	l.oneCore.cameBack(now, others)
	l.single.cameBack(now, leftAt)
}

// credit does what moved says, and returns the weight of the present.
func (l *levels) credit(now uint64, after uint32) float64 {
	weight := l.weight(now)
	if elapsed := l.elapsed(now); elapsed > 0 {
		busy := min(l.level, maxKnee)
		if l.known {
			busy = min(busy, l.fit.knee)
		}
		l.run.worked += elapsed * float64(busy)
		if r := l.row(l.level); r != nil {
			r.time += elapsed * weight
		}
	}
	l.level, l.since, l.begun = after, now, true
	return weight
}

// served records a good response that left while level requests were at the server, itself included.
func (l *levels) served(now uint64, level, arrivedAs, latencyUs uint32) {
	if l.known {
		l.beyond.answered(now, l.fit, arrivedAs, latencyUs)
		if l.run.answered(now, l.fit, level, arrivedAs, latencyUs) {
			l.startAnew(now)
			return
		}
	}
	weight := l.weight(now)
	level = l.levelOfBurst(now, max(level, 1), uint64(latencyUs/together))
	l.row(level).left += weight
	l.leftSquares += weight * weight
	l.oneCore.answered(now, latencyUs)
	if arrivedAs > 1 {
		l.single.answered(now, weight, latencyUs)
	}
	arrived := l.row(max(arrivedAs, 1))
	arrived.met += weight
	arrived.took += float64(latencyUs) * weight
	arrived.squares += float64(latencyUs) * float64(latencyUs) * weight
	if !l.isFitted || distance(now, l.fittedAt) > fitAtLeastUs {
		l.capacity(now, false)
	}
}

// startAnew forgets everything except the run of fast responses, which count as if each had been alone at the server.
func (l *levels) startAnew(now uint64) {
	answers, took := l.run.take()
	l.rows, l.logs = l.rows[:0], l.logs[:0]
	l.single.startAnew()
	l.oneCore.startAnew()
	l.origin, l.latest, l.since, l.begun = now, now, now, true
	squares := 2 * took * took / max(answers, 1)
	*l.row(1) = row{time: took, left: answers, met: answers, took: took, squares: squares}
	l.leftSquares = answers
	l.isFitted = false
}

// levelOfBurst returns the level at which the current burst of departures began. Requests that arrive together may
// leave together; all of them count at that level.
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

// fitted chooses the knee by the score that capacity.rs describes. weight is the weight of the present. running is
// added to the row of the current level.
func (l *levels) fitted(weight float64, running row) (capacity, bool) {
	current := min(int(l.level), len(l.rows))
	var all row
	var logMet, tookEach, levels, squares float64
	for i, r := range l.rows {
		all.time += r.time
		all.left += r.left
		all.met += r.met
		all.took += r.took
		all.squares += r.squares
		logMet += r.met * l.logs[i]
		level := float64(i + 1)
		tookEach += r.took / level
		levels += r.met * level
		squares += r.met * level * level
	}
	if current > 0 {
		all.time += running.time
		all.left += running.left
	}
	if all.left < leastLeft*weight {
		return capacity{}, false
	}
	alpha := l.steadiness(weight)
	isMany := levels > many*all.met
	isNarrow := squares*all.met < (1+narrow)*levels*levels
	prior := 1.0
	if isMany && !isNarrow {
		prior = 0
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
		departures := gain - all.left*math.Log(max(effort, tiny))
		arrivals := met*log - logMet - all.left*math.Log(each)
		s := (departures+alpha*arrivals)/weight - prior*log
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
	// With many requests whose levels hardly vary, the knee is 1 unless another scores clearly better.
	unclear := isMany && isNarrow && l.scores[0].score >= best-(doubt+clearly*all.left/weight)
	alone := unclear || l.single.isEvident(&l.rows[0], weight) || l.oneCore.isEvident(l.latest, l.level, &all, weight, running.left > 0)
	for i, s := range l.scores {
		if alone || s.score >= best-doubt {
			base := min(max(s.effort/all.left, 1), maxLatencyUs)
			knee := uint32(i + 1)
			// As many equally recent responses would show the base latency as precisely.
			responses := all.left * all.left / (l.leftSquares + running.left*running.left)
			variation, known := l.variation(knee, responses/max(all.met, tiny))
			isSteady := variation < even
			if !known {
				variation, isSteady = exponential, l.known && l.fit.steady
			}
			rse := min(100*math.Sqrt(variation/responses), mostRse)
			return capacity{uint32(base), knee, l.beyond.isOpen(l.latest), isSteady, uint32(rse)}, true
		}
	}
	return capacity{}, false
}

// steadiness returns α, the weight of the second likelihood.
func (l *levels) steadiness(weight float64) float64 {
	if !l.known || l.fit.knee > steadyKnee {
		return 1
	}
	variation := math.Inf(1)
	for _, r := range l.rows[:min(int(l.fit.knee), len(l.rows))] {
		if r.met > weight && r.took > 0 {
			squared := max(r.squares*r.met/(r.took*r.took)-1, 0)
			variation = min(variation, squared+assumed*weight/r.met)
		}
	}
	return min(max(steady/variation, 1), mostSteady)
}

// variation returns the squared coefficient of variation of the latencies within the levels up to the knee. It is not
// known if too few requests arrived at these levels. A weight of 1 stands for each responses.
func (l *levels) variation(knee uint32, each float64) (squared float64, known bool) {
	var met, means, within, count float64
	for _, r := range l.rows[:min(int(knee), len(l.rows))] {
		// A row that has faded away must not be divided by.
		if r.met > faded && r.took > 0 {
			mean := r.took * r.took / r.met
			met += r.met
			means += mean
			within += max(r.squares-mean, 0)
			count++
		}
	}
	responses := met * each
	if responses < evident {
		return 0, false
	}
	return within/means + assumed*count/responses, true
}

func (l *levels) elapsed(now uint64) float64 {
	if !l.begun {
		return 0
	}
	return float64(min(since(now, l.since), longestUs))
}

// weight returns the weight of an event at now. It grows with time, so that the past counts less and less.
func (l *levels) weight(now uint64) float64 {
	if now < l.latest && distance(now, l.latest) > stepUs {
		// If the clock has stepped back, past events keep their age.
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
		r.squares /= weight
		if r.time > 1 || r.left > 1e-6 || r.met > 1e-6 {
			used = i + 1
		}
	}
	l.leftSquares /= weight * weight
	l.single.scale(weight)
	l.oneCore.scale(weight)
	l.rows, l.logs = l.rows[:used], l.logs[:used]
	l.origin = now
	return 1
}

// row returns the row of a level, or nil for level 0. All levels above maxKnee share one row.
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
