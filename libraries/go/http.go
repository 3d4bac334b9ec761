package prequal

import (
	"bufio"
	"context"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

const (
	prefix    = "/prequal/"
	probePath = "/prequal/probe"
	// Content-Length above which a response is a large download, bytes.
	largeBody = 1 << 20

	headerLoad    = "X-Prequal-Load"
	headerORCA    = "Endpoint-Load-Metrics"
	headerORCABin = "Endpoint-Load-Metrics-Bin"
)

// Handler returns a handler that answers probes, counts all other requests to next, and puts the load on their responses.
//
// For gRPC calls, use the interceptors of prequalgrpc, which see how calls end. A status of 500 or above and a panic are failures
// of the server. A client that leaves before next returns says nothing about the server. A request counts as a stream if next
// answers it with text/event-stream or takes over its connection.
func (l *Load) Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch path := r.URL.EscapedPath(); {
		case !strings.HasPrefix(path, prefix):
			l.serve(w, r, next)
		case path != probePath:
			http.Error(w, "not found", http.StatusNotFound)
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "probes use GET or HEAD", http.StatusMethodNotAllowed)
		default:
			l.answer(w, r)
		}
	})
}

// answer replies to a probe.
func (l *Load) answer(w http.ResponseWriter, r *http.Request) {
	report, header := l.report(nil, false), w.Header()
	header.Set(headerLoad, report.String())
	header.Set("X-Prequal-Rif", strconv.FormatUint(uint64(report.RIF), 10))
	if us := report.LatencyUs; us != nil {
		header.Set("X-Prequal-Latency-Us", strconv.FormatUint(uint64(*us), 10))
	}
	header.Set("Cache-Control", "no-store")
	if strings.Contains(strings.Join(r.Header.Values("Accept"), ","), "application/json") {
		header.Set("Content-Type", "application/json")
		// If the client is gone, nothing needs to be done.
		_, _ = w.Write([]byte(report.json(time.Now().UnixMilli())))
	}
}

func (l *Load) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	tracked := &writer{ResponseWriter: w, request: l.Start()}
	returned := false
	defer func() {
		tracked.request.Finish(tracked.outcome(r.Context(), returned))
	}()
	next.ServeHTTP(tracked, r)
	returned = true
	// net/http sends the head of a response without a body when this function returns.
	tracked.head(http.StatusOK)
}

// writer puts the report on the head of a response, and notes when the response waits for its client.
type writer struct {
	http.ResponseWriter
	request        *Request
	hasHead        bool
	failed, stream bool
}

// Unwrap returns the underlying writer, for http.ResponseController.
func (w *writer) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *writer) WriteHeader(status int) {
	if status >= 200 || status == http.StatusSwitchingProtocols {
		w.head(status)
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *writer) Write(data []byte) (int, error) {
	w.head(http.StatusOK)
	w.request.ClientWaits()
	defer w.request.ClientIsBack()
	return w.ResponseWriter.Write(data)
}

// Flush implements http.Flusher.
func (w *writer) Flush() {
	w.head(http.StatusOK)
	w.request.ClientWaits()
	defer w.request.ClientIsBack()
	// If the server cannot flush, nothing needs to be done.
	_ = http.NewResponseController(w.ResponseWriter).Flush()
}

// Hijack implements http.Hijacker. The request is a stream from then on.
func (w *writer) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buffer, err := http.NewResponseController(w.ResponseWriter).Hijack()
	if err == nil {
		w.hasHead, w.stream = true, true
		w.request.Stream()
	}
	return conn, buffer, err
}

// head classifies the response by its head, and puts the report there.
func (w *writer) head(status int) {
	if w.hasHead {
		return
	}
	w.hasHead = true
	header := w.Header()
	w.failed = status >= 500
	if strings.HasPrefix(header.Get("Content-Type"), "text/event-stream") || status == http.StatusSwitchingProtocols {
		w.stream = true
		w.request.Stream()
	}
	length, _ := strconv.ParseInt(header.Get("Content-Length"), 10, 64)
	leaving := w.request
	if (w.stream && !w.failed) || length > largeBody {
		leaving = nil
	}
	load := w.request.load
	if load.config.ProbeOnly && load.config.ORCA == ORCANone {
		return
	}
	report := load.report(leaving, load.config.ORCA != ORCANone)
	if !load.config.ProbeOnly {
		header.Set(headerLoad, report.String())
	}
	if load.config.ORCA != ORCANone {
		// Two reports would contradict each other.
		header.Del(headerORCABin)
		header.Set(headerORCA, report.ORCA(load.config.ORCA))
	}
}

func (w *writer) outcome(ctx context.Context, returned bool) Outcome {
	switch {
	case w.stream && !w.failed:
		return Streaming
	case ctx.Err() == context.Canceled:
		return Aborted
	case w.failed || !returned:
		return Failure
	default:
		return Success
	}
}
