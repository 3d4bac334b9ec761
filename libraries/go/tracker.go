package prequal

import "slices"

// The estimate of the latency of a request that arrives now. Follows crates/prequal-core/src/server/tracker.rs, for one process.

// Outcome describes how a request ended.
type Outcome int

const (
	// Success is a real response; its latency is a sample.
	Success Outcome = iota
	// Failure is an error that the server caused: a status of 500 or above, a gRPC status that blames the server, or a panic.
	Failure
	// Aborted means that the client went away, which says nothing about the server.
	Aborted
	// Streaming is an event stream, a WebSocket or a gRPC stream; its duration is not a latency.
	Streaming
)

const (
	maxLatencyUs     = 3_600_000_000
	maxAgeUs         = 15_000_000
	stallFactor      = 3
	failureLatencyUs = 1_000_000
	buckets          = 128
	samples          = 8
	// Multiple of the expected latency beyond which an overtaken request is very long.
	long = 10
	// Number of requests that must have succeeded since a request was first overtaken before it counts as very long.
	overtaken = 10
)

// visit is a request in flight.
type visit struct {
	arrived uint64
	// Time of its arrival, or of its latest return. Linked visits are in this order.
	since uint64
	// Time since which it does not count as being at the server: a stream, a very long request, or one that waits for its
	// client.
	awaySince       uint64
	away, staysAway bool
	// Time that it was away before since, microseconds.
	awayUs                  uint64
	rifAtArrival, arrivedAs uint32
	// Number of successes when it was first overtaken.
	overtakenAt uint64
	// The list that it is in, if any, and its neighbours there.
	list       *visits
	prev, next *visit
}

// visits is a list of requests in order of age.
type visits struct {
	oldest, newest *visit
}

type sample struct {
	latency uint32
	at      uint64
}

// bucket holds the recent samples for one RIF, or for a narrow range of RIFs.
type bucket struct {
	samples   [samples]sample
	len, next int
}

type tracker struct {
	rif, away uint32
	// Requests at the server that may be stuck, and those that later ones have overtaken.
	waiting, overtaken visits
	// Number of requests that have succeeded.
	successes uint64
	levels    levels
	buckets   [buckets]bucket
	// Highest bucket ever used plus one.
	used        int
	lastFailure uint64
	hasFailed   bool
}

func (t *tracker) start(now uint64) *visit {
	before := t.rif - t.away
	v := &visit{arrived: now, since: now, rifAtArrival: t.rif, arrivedAs: before + 1}
	t.waiting.link(v)
	t.rif++
	t.levels.moved(now, before+1)
	return v
}

func (t *tracker) finish(v *visit, now uint64, outcome Outcome) {
	level := t.rif - t.away
	t.rif--
	v.unlink()
	awayUs := v.awayUs
	if v.away {
		awayUs += since(now, v.awaySince)
		t.away--
		level = 0
	}
	latency := uint32(min(since(since(now, v.arrived), awayUs), maxLatencyUs))
	if level > 0 {
		t.levels.moved(now, level-1)
	}
	switch outcome {
	case Success:
		index := bucketOf(v.rifAtArrival)
		t.buckets[index].push(sample{latency, now})
		t.used = max(t.used, index+1)
		t.levels.served(now, level, v.arrivedAs, latency)
		t.overtake(v.since)
		t.setLongOnesApart(now)
	case Failure:
		t.lastFailure, t.hasFailed = now, true
	}
}

// overtake marks as overtaken all requests that came to the server before the given time: they are heavy, not stuck.
func (t *tracker) overtake(time uint64) {
	t.successes++
	for v := t.waiting.oldest; v != nil && v.since < time; v = t.waiting.oldest {
		v.unlink()
		v.overtakenAt = t.successes
		t.overtaken.link(v)
	}
}

// setLongOnesApart stops counting very long requests among those at the server.
func (t *tracker) setLongOnesApart(now uint64) {
	if !t.levels.known {
		return
	}
	expected := min(float64(t.levels.fit.baseUs)*t.levels.fit.crowding(sub(t.levels.level, 1)), maxLatencyUs)
	for v := t.overtaken.oldest; v != nil; v = t.overtaken.oldest {
		if float64(since(now, v.since)) <= long*float64(uint32(expected)) || t.successes-v.overtakenAt < overtaken {
			return
		}
		t.streaming(v, now)
	}
}

// streaming sets a request apart for good.
func (t *tracker) streaming(v *visit, now uint64) {
	t.clientWaits(v, now)
	v.staysAway = true
}

func (t *tracker) clientWaits(v *visit, now uint64) {
	if v.away {
		return
	}
	v.away, v.awaySince = true, now
	v.unlink()
	t.away++
	t.levels.moved(now, sub(t.levels.level, 1))
}

func (t *tracker) clientIsBack(v *visit, now uint64) {
	if v.staysAway || !v.away {
		return
	}
	v.away = false
	v.awayUs += since(now, v.awaySince)
	v.since = now
	t.waiting.link(v)
	t.away--
	t.levels.cameBack(now, v.awaySince)
}

// capacity returns base latency and knee. If leaving is set, a request that is about to end counts as a good response.
func (t *tracker) capacity(now uint64, leaving bool) (capacity, bool) {
	c, known := t.levels.capacity(now, leaving)
	c.knee = uint32(min(uint64(c.knee)+uint64(min(t.away, 65535)), 65535))
	return c, known
}

// latency returns the expected latency with rif requests in flight. leaving is a request that is about to end, and
// is not among them.
func (t *tracker) latency(now uint64, rif uint32, leaving *visit) (uint32, bool) {
	if median, known := t.nearestMedian(bucketOf(rif), now); known {
		if waited := t.waited(now, leaving); waited/stallFactor > median {
			return waited, true
		}
		return median, true
	}
	if t.hasFailed && distance(now, t.lastFailure) < maxAgeUs {
		return failureLatencyUs, true
	}
	return 0, false
}

func (t *tracker) waited(now uint64, leaving *visit) uint32 {
	oldest := t.waiting.oldest
	if oldest != nil && oldest == leaving {
		oldest = oldest.next
	}
	if oldest == nil {
		return 0
	}
	return uint32(min(since(now, oldest.since), maxLatencyUs))
}

// nearestMedian returns the median of the nearest RIF with a sample. At equal distance, the higher RIF wins, to err on the side
// of caution.
func (t *tracker) nearestMedian(centre int, now uint64) (uint32, bool) {
	for d := 0; d < buckets && d <= max(centre, t.used); d++ {
		if above := centre + d; above < buckets {
			if median, known := t.buckets[above].median(now); known {
				return median, true
			}
		}
		if below := centre - d; below >= 0 {
			if median, known := t.buckets[below].median(now); known {
				return median, true
			}
		}
	}
	return 0, false
}

func (l *visits) link(v *visit) {
	v.list, v.prev, v.next = l, l.newest, nil
	if l.newest != nil {
		l.newest.next = v
	} else {
		l.oldest = v
	}
	l.newest = v
}

// unlink takes the request out of its list, if it is in one.
func (v *visit) unlink() {
	if v.list == nil {
		return
	}
	if v.prev != nil {
		v.prev.next = v.next
	} else {
		v.list.oldest = v.next
	}
	if v.next != nil {
		v.next.prev = v.prev
	} else {
		v.list.newest = v.prev
	}
	v.list, v.prev, v.next = nil, nil, nil
}

func (b *bucket) push(s sample) {
	b.samples[b.next] = s
	b.next = (b.next + 1) % samples
	b.len = min(b.len+1, samples)
}

func (b *bucket) median(now uint64) (uint32, bool) {
	var young [samples]uint32
	count := 0
	for _, s := range b.samples[:b.len] {
		if distance(now, s.at) < maxAgeUs {
			young[count] = s.latency
			count++
		}
	}
	if count == 0 {
		return 0, false
	}
	slices.Sort(young[:count])
	return young[count/2], true
}

// bucketOf returns the bucket of a RIF: exact below 16, then four buckets per octave.
func bucketOf(rif uint32) int {
	if rif < 16 {
		return int(rif)
	}
	octave := 0
	for r := rif; r > 1; r >>= 1 {
		octave++
	}
	return (octave-4)*4 + int(rif>>(octave-2)&3) + 16
}

// since returns now minus earlier, or 0 if the clock stepped back.
func since(now, earlier uint64) uint64 {
	if now < earlier {
		return 0
	}
	return now - earlier
}

func distance(a, b uint64) uint64 {
	return max(a, b) - min(a, b)
}

func sub(a, b uint32) uint32 {
	return a - min(a, b)
}
