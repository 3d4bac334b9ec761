// Package prequalgrpc has interceptors that count the calls of a gRPC server on a prequal.Load, and report the load to clients.
//
// Responses to unary calls carry x-prequal-load in their headers, and endpoint-load-metrics-bin in their trailers, where gRPC
// clients read in-band load reports. Probes are plain HTTP: serve Load.Handler on another port, and name that port in
// Config.ProbeEndpoint.
package prequalgrpc

import (
	"context"
	"sync"
	"time"

	orca "github.com/cncf/xds/go/xds/data/orca/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	prequal "prequal.invalid/go"
)

// unaryTail is the time after the first message of the response beyond which an open call counts as a stream.
const unaryTail = time.Second

// ServerOptions returns the options that make a server count all its calls on load.
func ServerOptions(load *prequal.Load) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(UnaryServerInterceptor(load)),
		grpc.ChainStreamInterceptor(StreamServerInterceptor(load)),
	}
}

// UnaryServerInterceptor returns an interceptor that counts unary calls and puts the report on their responses.
func UnaryServerInterceptor(load *prequal.Load) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, in any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		request := load.Start()
		// Remains the outcome if the handler panics.
		outcome := prequal.Failure
		defer func() { request.Finish(outcome) }()
		out, err := handler(ctx, in)
		outcome = judge(ctx, err)
		report := load.Report(request)
		if load.ReportsOnResponses() {
			own := metadata.Pairs("x-prequal-load", report.String())
			// If the handler has already sent the headers, only the trailers are left.
			if grpc.SetHeader(ctx, own) != nil {
				_ = grpc.SetTrailer(ctx, own)
			}
		}
		if encoded, failed := proto.Marshal(message(report)); failed == nil && load.ReportsORCA() {
			_ = grpc.SetTrailer(ctx, metadata.Pairs("endpoint-load-metrics-bin", string(encoded)))
		}
		return out, err
	}
}

// StreamServerInterceptor returns an interceptor that counts streams. A stream with a single response message, sent less than
// a second before its end, counts like a unary call.
func StreamServerInterceptor(load *prequal.Load) grpc.StreamServerInterceptor {
	return func(server any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		tracked := &tracked{ServerStream: stream, request: load.Start()}
		outcome := prequal.Failure
		defer func() { tracked.finish(outcome) }()
		err := handler(server, tracked)
		outcome = judge(stream.Context(), err)
		return err
	}
}

// tracked wraps the stream of a call, and determines whether the call counts as a stream.
type tracked struct {
	grpc.ServerStream
	request  *prequal.Request
	mutex    sync.Mutex
	messages int
	timer    *time.Timer
	stream   bool
}

func (t *tracked) SendMsg(message any) error {
	t.mutex.Lock()
	t.messages++
	if t.messages == 1 {
		t.timer = time.AfterFunc(unaryTail, t.becomeStream)
	}
	second := t.messages == 2
	t.mutex.Unlock()
	if second {
		t.becomeStream()
	}
	t.request.ClientWaits()
	defer t.request.ClientIsBack()
	return t.ServerStream.SendMsg(message)
}

func (t *tracked) becomeStream() {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	t.stream = true
	t.request.Stream()
}

func (t *tracked) finish(outcome prequal.Outcome) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if t.timer != nil {
		t.timer.Stop()
	}
	if t.stream && outcome != prequal.Failure {
		outcome = prequal.Streaming
	}
	t.request.Finish(outcome)
}

// judge returns the outcome of a call that has ended. DEADLINE_EXCEEDED is a valid response: the client chose the deadline, and
// a slow server shows in its latency.
func judge(ctx context.Context, err error) prequal.Outcome {
	if ctx.Err() == context.Canceled {
		return prequal.Aborted
	}
	said, ok := status.FromError(err)
	if !ok {
		said = status.FromContextError(err)
	}
	switch said.Code() {
	case codes.Unknown, codes.ResourceExhausted, codes.Internal, codes.Unavailable, codes.DataLoss:
		return prequal.Failure
	default:
		return prequal.Success
	}
}

func message(report *prequal.Report) *orca.OrcaLoadReport {
	message := &orca.OrcaLoadReport{
		RpsFractional: float64(report.EndedMilli) / 1e3,
		Eps:           float64(report.FailedMilli) / 1e3,
		NamedMetrics:  map[string]float64{},
	}
	if report.Utilization != nil {
		message.ApplicationUtilization = float64(*report.Utilization) / 1e6
	}
	report.Named(func(name string, value uint32) { message.NamedMetrics[name] = float64(value) })
	return message
}
