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
)

// visit is a request in flight.
type visit struct {
	arrived uint64
	// When it last came to the server. Linked visits are in this order.
	since uint64
	// If it waits for its client: when that wait began.
	awaySince    uint64
	away, stream bool
	// Time that its client took before since, microseconds.
	awayUs                  uint64
	rifAtArrival, arrivedAs uint32
	// Neighbours in the list of requests that may be stuck, in order of age.
	prev, next *visit
	linked     bool
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
	rif, away      uint32
	oldest, newest *visit
	levels         levels
	buckets        [buckets]bucket
	// Highest bucket ever used plus one.
	used        int
	lastFailure uint64
	hasFailed   bool
}

func (t *tracker) start(now uint64) *visit {
	before := t.rif - t.away
	v := &visit{arrived: now, since: now, rifAtArrival: t.rif, arrivedAs: before + 1}
	t.link(v)
	t.rif++
	t.levels.moved(now, before+1)
	return v
}

func (t *tracker) finish(v *visit, now uint64, outcome Outcome) {
	level := t.rif - t.away
	t.rif--
	t.unlink(v)
	client := v.awayUs
	if v.away {
		client += since(now, v.awaySince)
		t.away--
		level = 0
	}
	latency := uint32(min(since(since(now, v.arrived), client), maxLatencyUs))
	if level > 0 {
		t.levels.moved(now, level-1)
	}
	switch outcome {
	case Success:
		index := bucketOf(v.rifAtArrival)
		t.buckets[index].push(sample{latency, now})
		t.used = max(t.used, index+1)
		t.levels.served(now, level, v.arrivedAs, latency)
		// Older requests have been overtaken: they are heavy, not stuck.
		for t.oldest != nil && t.oldest.since < v.since {
			t.unlink(t.oldest)
		}
	case Failure:
		t.lastFailure, t.hasFailed = now, true
	}
}

func (t *tracker) streaming(v *visit, now uint64) {
	t.clientWaits(v, now)
	v.stream = true
}

func (t *tracker) clientWaits(v *visit, now uint64) {
	if v.away {
		return
	}
	v.away, v.awaySince = true, now
	t.unlink(v)
	t.away++
	t.levels.moved(now, sub(t.levels.level, 1))
}

func (t *tracker) clientIsBack(v *visit, now uint64) {
	if v.stream || !v.away {
		return
	}
	v.away = false
	v.awayUs += since(now, v.awaySince)
	v.since = now
	t.link(v)
	t.away--
	t.levels.moved(now, t.levels.level+1)
}

// capacity returns base latency and knee. If leaving is set, a request that is about to end counts as a good response.
func (t *tracker) capacity(now uint64, leaving bool) (capacity, bool) {
	c, known := t.levels.capacity(now, leaving)
	c.knee = uint32(min(uint64(c.knee)+uint64(min(t.away, 65535)), 65535))
	return c, known
}

// latency returns the expected latency with rif requests in flight, not counting leaving, which is about to end.
func (t *tracker) latency(now uint64, rif uint32, leaving *visit) (uint32, bool) {
	if median, known := t.nearestMedian(bucketOf(rif), now); known {
		if waiting := t.waiting(now, leaving); waiting/stallFactor > median {
			return waiting, true
		}
		return median, true
	}
	if t.hasFailed && distance(now, t.lastFailure) < maxAgeUs {
		return failureLatencyUs, true
	}
	return 0, false
}

func (t *tracker) waiting(now uint64, leaving *visit) uint32 {
	oldest := t.oldest
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

func (t *tracker) link(v *visit) {
	v.linked, v.prev, v.next = true, t.newest, nil
	if t.newest != nil {
		t.newest.next = v
	} else {
		t.oldest = v
	}
	t.newest = v
}

func (t *tracker) unlink(v *visit) {
	if !v.linked {
		return
	}
	v.linked = false
	if v.prev != nil {
		v.prev.next = v.next
	} else {
		t.oldest = v.next
	}
	if v.next != nil {
		v.next.prev = v.prev
	} else {
		t.newest = v.prev
	}
	v.prev, v.next = nil, nil
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
