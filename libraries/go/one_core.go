package prequal

// Whether requests share one core. This file follows crates/prequal-core/src/server/capacity/one_core.rs, which explains
// the test.

const (
	equal   = 0.1
	similar = 0.2
)

// oneCore holds fading sums over the busy periods whose requests were all answered well.
type oneCore struct {
	current period
	// Number of periods with one request, and the sums of their times and of the squares of these.
	alone, aloneTook, aloneSquares float64
	// Number of requests in periods with several, and the sum of the times of these periods.
	together, togetherTook float64
}

// period is a busy period: from an arrival at the idle server until the server is idle again.
type period struct {
	began uint64
	// When a request last left.
	leftAt uint64
	// Highest number of requests at the server.
	most uint32
	left uint32
	// Number of good responses.
	answered uint32
}

// moved records that the number of requests at the server changes from before to after.
func (o *oneCore) moved(now uint64, weight float64, before, after uint32) {
	if before == 0 && after > 0 {
		// The response to the last request is counted after its departure, so only now is the period complete.
		o.count(weight)
		o.current = period{began: now, leftAt: now}
	}
	o.current.most = max(o.current.most, after)
	if after < before {
		o.current.leftAt = now
		o.current.left += before - after
	}
}

// cameBack records that a request which left to wait for its client is back, beside others.
func (o *oneCore) cameBack(now uint64, others uint32) {
	if others == 0 {
		// The period goes on. The wait was no work.
		o.current.began += since(now, o.current.leftAt)
	}
	o.current.left = sub(o.current.left, 1)
	o.current.most = max(o.current.most, others+1)
}

// answered records a good response to a request that took latencyUs. A request that arrived before the period does not
// count: its client has kept it waiting.
func (o *oneCore) answered(now uint64, latencyUs uint32) {
	if since(now, o.current.began) >= uint64(latencyUs) {
		o.current.answered++
	}
}

// count counts the period that has ended.
func (o *oneCore) count(weight float64) {
	p := o.current
	if p.left != p.answered || p.left == 0 {
		return
	}
	took := float64(since(p.leftAt, p.began))
	if p.most == 1 {
		o.alone += weight
		o.aloneTook += took * weight
		o.aloneSquares += took * took * weight
	} else {
		o.together += float64(p.left) * weight
		o.togetherTook += took * weight
	}
}

// isEvident returns whether requests share one core. all has all good responses, and level requests are at the server now.
// With leaving, one of them is about to leave.
func (o *oneCore) isEvident(now uint64, level uint32, all *row, weight float64, leaving bool) bool {
	if o.alone < enough*weight || o.aloneTook <= 0 {
		return false
	}
	mean := o.aloneTook / o.alone
	together, togetherTook := o.together, o.togetherTook
	// The current period counts as far as it has come, unless it has lasted longer than one core needs for its requests.
	p, ended := o.current, o.current.leftAt
	if level > 0 {
		ended = now
	}
	took := float64(since(ended, p.began))
	leaves := p.left
	if leaving {
		leaves++
	}
	if p.most > 1 && p.left == p.answered && leaves > 0 &&
		took <= float64(p.left+level)*mean*(1+errorHigh) {
		together += float64(leaves) * weight
		togetherTook += took * weight
	}
	// Where requests take equally long, one response in such a period is enough.
	if together < weight {
		return false
	}
	squared := max(o.aloneSquares/o.alone/(mean*mean)-1, 0)
	variation := squared + assumed*weight/o.alone
	isSimilar := all.squares*all.met <= (1+similar)*all.took*all.took
	return isSimilar && variation <= equal &&
		togetherTook/together >= mean*(1-errorOf(variation*weight, together, o.alone))
}

// startAnew forgets the periods so far. The current one will not count, because the response that led here is not
// counted.
func (o *oneCore) startAnew() {
	*o = oneCore{current: o.current}
}

// scale divides the sums by weight.
func (o *oneCore) scale(weight float64) {
	o.alone /= weight
	o.aloneTook /= weight
	o.aloneSquares /= weight
	o.together /= weight
	o.togetherTook /= weight
}
