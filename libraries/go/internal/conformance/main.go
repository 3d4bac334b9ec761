// The server that the conformance program (tests/tests/libraries) drives: an application behind this library, and a control
// port. The control port replays traces of arrivals and departures on a virtual clock. docs/guide/libraries.md defines its
// replies.
package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	prequal "prequal.invalid/go"
	"prequal.invalid/go/prequalgrpc"
)

func main() {
	service, control, calls := listen(), listen(), listen()
	load := newLoad(prequal.Config{Endpoint: service.Addr().String(), ORCA: prequal.ORCAText})
	go serve(service, load.Handler(http.HandlerFunc(application)))

	server := grpc.NewServer(prequalgrpc.ServerOptions(load)...)
	grpc_health_v1.RegisterHealthServer(server, health{})
	go func() { log.Fatal(server.Serve(calls)) }()

	fmt.Printf("listening service=%s control=%s grpc=%s\n", service.Addr(), control.Addr(), calls.Addr())
	mux := http.NewServeMux()
	mux.HandleFunc("POST /trace", func(w http.ResponseWriter, r *http.Request) { play(w, r.Body) })
	mux.HandleFunc("GET /ended", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, load.Ended(prequal.Success), load.Ended(prequal.Failure), load.Ended(prequal.Aborted),
			load.Ended(prequal.Streaming))
	})
	serve(control, mux)
}

func listen() net.Listener {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	return listener
}

func serve(listener net.Listener, handler http.Handler) {
	server := http.Server{Handler: handler, ErrorLog: log.New(io.Discard, "", 0)}
	log.Fatal(server.Serve(listener))
}

func newLoad(config prequal.Config) *prequal.Load {
	load, err := prequal.New(config)
	if err != nil {
		log.Fatal(err)
	}
	return load
}

func application(w http.ResponseWriter, r *http.Request) {
	ms, _ := strconv.Atoi(r.URL.Query().Get("ms"))
	time.Sleep(time.Duration(ms) * time.Millisecond)
	switch r.URL.Path {
	case "/ok":
		fmt.Fprint(w, "ok")
	case "/empty":
	case "/missing":
		http.Error(w, "missing", http.StatusNotFound)
	case "/error":
		http.Error(w, "error", http.StatusInternalServerError)
	case "/panic":
		panic(http.ErrAbortHandler)
	case "/break":
		w.Header().Set("Content-Length", "10")
		fmt.Fprint(w, "half")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	case "/hang":
		<-r.Context().Done()
	case "/events":
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, "data: 1\n\n")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	case "/large":
		w.Header().Set("Content-Length", strconv.Itoa(32<<20))
		for range 32 << 4 {
			if _, err := w.Write(make([]byte, 1<<16)); err != nil {
				return
			}
		}
	case "/lies":
		for _, name := range []string{"x-prequal-load", "endpoint-load-metrics", "endpoint-load-metrics-bin"} {
			w.Header().Set(name, "a lie")
		}
		fmt.Fprint(w, "lies")
	default:
		http.Error(w, "the application's", http.StatusTeapot)
	}
}

// health answers according to the name of the service in the request.
type health struct {
	grpc_health_v1.UnimplementedHealthServer
}

func (health) Check(ctx context.Context, in *grpc_health_v1.HealthCheckRequest) (*grpc_health_v1.HealthCheckResponse, error) {
	switch in.Service {
	case "hang":
		<-ctx.Done()
		return nil, ctx.Err()
	case "internal":
		return nil, status.Error(codes.Internal, "of the server's making")
	case "missing":
		return nil, status.Error(codes.NotFound, "an answer")
	}
	return &grpc_health_v1.HealthCheckResponse{Status: grpc_health_v1.HealthCheckResponse_SERVING}, nil
}

func (health) Watch(in *grpc_health_v1.HealthCheckRequest, stream grpc.ServerStreamingServer[grpc_health_v1.HealthCheckResponse]) error {
	answers := 1
	if in.Service == "two" {
		answers = 2
	}
	for range answers {
		if err := stream.Send(&grpc_health_v1.HealthCheckResponse{}); err != nil {
			return err
		}
	}
	if in.Service == "broken" {
		return status.Error(codes.Unavailable, "broken")
	}
	return nil
}

// play replays a trace, and writes a line for each report that the trace asks for.
func play(w http.ResponseWriter, trace io.Reader) {
	var load *prequal.Load
	var now time.Duration
	var format prequal.ORCAFormat
	requests := map[string]*request{}
	lines := bufio.NewScanner(trace)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		us, err := strconv.ParseInt(fields[0], 10, 64)
		if err != nil {
			http.Error(w, lines.Text(), http.StatusBadRequest)
			return
		}
		now = time.Duration(us) * time.Microsecond
		switch what := fields[1]; what {
		case "begin":
			format = map[string]prequal.ORCAFormat{"text": prequal.ORCAText, "json": prequal.ORCAJSON}[fields[2]]
			limit, _ := strconv.ParseUint(fields[3], 10, 32)
			window, _ := strconv.ParseInt(fields[4], 10, 64)
			load = newLoad(prequal.Config{
				Endpoint: fields[5], ORCA: format, ORCALimit: uint32(limit),
				ORCAWindow: time.Duration(window) * time.Microsecond,
				Clock:      func() time.Duration { return now },
			})
		case "probe":
			probed := httptest.NewRecorder()
			load.Handler(nil).ServeHTTP(probed, httptest.NewRequest(http.MethodGet, "/prequal/probe", nil))
			fmt.Fprintln(w, probed.Header().Get("x-prequal-load"))
		case "start":
			requests[fields[2]] = &request{Request: load.Start()}
		case "head":
			fmt.Fprintln(w, requests[fields[2]].head(load, fields[3], format))
		case "wait":
			requests[fields[2]].ClientWaits()
		case "back":
			requests[fields[2]].ClientIsBack()
		case "finish":
			requests[fields[2]].Finish(requests[fields[2]].outcome)
		case "abort":
			requests[fields[2]].Finish(requests[fields[2]].aborted())
		default:
			http.Error(w, lines.Text(), http.StatusBadRequest)
			return
		}
	}
}

// request is a request of a trace.
type request struct {
	*prequal.Request
	outcome prequal.Outcome
}

// head classifies a response by its head, and returns the reports that it carries.
func (r *request) head(load *prequal.Load, kind string, format prequal.ORCAFormat) string {
	leaving := r.Request
	switch kind {
	case "fail":
		r.outcome = prequal.Failure
	case "stream":
		r.outcome, leaving = prequal.Streaming, nil
		r.Stream()
	}
	report := load.Report(leaving)
	return report.String() + "\t" + report.ORCA(format)
}

func (r *request) aborted() prequal.Outcome {
	if r.outcome == prequal.Streaming {
		return prequal.Streaming
	}
	return prequal.Aborted
}
