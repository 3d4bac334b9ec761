// A gRPC client with the policy weighted_round_robin, and the two servers that it calls: one is ten times slower.
//
// The test that runs it puts an agent in front of each server, and judges the results. The program prints the servers'
// addresses, reads the agents' addresses from standard input, and prints the result of each round of calls. The first
// rounds are without out-of-band load reports, the later ones with them. An argument changes that:
//
//	reporting   only rounds with out-of-band reports; in trailers, the servers report a utilisation of their own, which
//	            is high for the fast one
//	streaming   the same, but the servers report it out of band
//	in-band     only rounds without out-of-band reports; the client reads the agents' reports in trailers
//	limits      only rounds without out-of-band reports, with far more calls at once; the servers allow few streams per
//	            connection and soon close connections
package main

import (
	"bufio"
	"context"
	"fmt"
	"log"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	_ "google.golang.org/grpc/balancer/weightedroundrobin"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/orca"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
)

const rounds = 30

// Number of calls in a round, and how many are made at once.
var calls, concurrency = 100, 8

// server answers each call after a delay, and counts the calls. It reports its utilisation, if that is set: out of band
// if it streams, otherwise in the trailers of each call.
type server struct {
	grpc_health_v1.UnimplementedHealthServer
	delay       time.Duration
	utilization float64
	streams     bool
	limits      bool
	served      atomic.Int64
}

func (s *server) Check(ctx context.Context, _ *grpc_health_v1.HealthCheckRequest) (*grpc_health_v1.HealthCheckResponse, error) {
	s.served.Add(1)
	if s.utilization > 0 && !s.streams {
		orca.CallMetricsRecorderFromContext(ctx).SetApplicationUtilization(s.utilization)
	}
	time.Sleep(s.delay)
	return &grpc_health_v1.HealthCheckResponse{Status: grpc_health_v1.HealthCheckResponse_SERVING}, nil
}

func (s *server) start() string {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	var options []grpc.ServerOption
	if s.utilization > 0 && !s.streams {
		options = append(options, orca.CallMetricsServerOption(nil))
	}
	if s.limits {
		age := keepalive.ServerParameters{MaxConnectionAge: 200 * time.Millisecond, MaxConnectionAgeGrace: 5 * time.Second}
		options = append(options, grpc.MaxConcurrentStreams(10), grpc.KeepaliveParams(age))
	}
	registered := grpc.NewServer(options...)
	grpc_health_v1.RegisterHealthServer(registered, s)
	if s.streams {
		recorder := orca.NewServerMetricsRecorder()
		recorder.SetApplicationUtilization(s.utilization)
		// It reports at once and then every 30 s, the shortest interval that gRPC allows.
		if err := orca.Register(registered, orca.ServiceOptions{ServerMetricsProvider: recorder}); err != nil {
			log.Fatal(err)
		}
	}
	go func() { log.Fatal(registered.Serve(listener)) }()
	return listener.Addr().String()
}

func client(agents []string, outOfBand bool) *grpc.ClientConn {
	builder := manual.NewBuilderWithScheme("agents")
	var endpoints []resolver.Endpoint
	for _, agent := range agents {
		endpoints = append(endpoints, resolver.Endpoint{Addresses: []resolver.Address{{Addr: agent}}})
	}
	builder.InitialState(resolver.State{Endpoints: endpoints})
	config := fmt.Sprintf(`{"loadBalancingConfig": [{"weighted_round_robin": {
		"enableOobLoadReport": %t, "oobReportingPeriod": "0.1s", "blackoutPeriod": "0.1s", "weightUpdatePeriod": "0.1s"
	}}]}`, outOfBand)
	conn, err := grpc.NewClient("agents:///health.test", grpc.WithResolvers(builder), grpc.WithDefaultServiceConfig(config),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	return conn
}

// round makes its calls, and returns how many failed.
func round(conn *grpc.ClientConn) int64 {
	var failed atomic.Int64
	var left atomic.Int64
	left.Store(int64(calls))
	var workers sync.WaitGroup
	for range concurrency {
		workers.Go(func() {
			for left.Add(-1) >= 0 {
				ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
				_, err := grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
				cancel()
				if err != nil && failed.Add(1) == 1 {
					log.Print(err)
				}
			}
		})
	}
	workers.Wait()
	return failed.Load()
}

func main() {
	servers := []*server{{delay: 5 * time.Millisecond}, {delay: 50 * time.Millisecond}}
	modes := []bool{false, true}
	switch strings.Join(os.Args[1:], " ") {
	case "":
	case "reporting":
		servers[0].utilization, servers[1].utilization = 0.9, 0.1
		modes = []bool{true}
	case "streaming":
		servers[0].utilization, servers[1].utilization = 0.9, 0.1
		servers[0].streams, servers[1].streams = true, true
		modes = []bool{true}
	case "in-band":
		modes = []bool{false}
	case "limits":
		servers[0].limits, servers[1].limits = true, true
		modes = []bool{false}
		calls, concurrency = 2000, 100
	default:
		log.Fatal("the argument is `reporting`, `streaming`, `in-band`, `limits` or none")
	}
	fmt.Println("servers", servers[0].start(), servers[1].start())
	input := bufio.NewScanner(os.Stdin)
	if !input.Scan() {
		log.Fatal("no addresses of agents on standard input")
	}
	agents := strings.Fields(input.Text())
	for _, outOfBand := range modes {
		conn := client(agents, outOfBand)
		for range rounds {
			servers[0].served.Store(0)
			servers[1].served.Store(0)
			failed := round(conn)
			fmt.Println("round", outOfBand, servers[0].served.Load(), servers[1].served.Load(), failed)
			// The test decides whether it has seen enough.
			if !input.Scan() {
				log.Fatal("no answer")
			}
			if input.Text() == "enough" {
				break
			}
		}
		conn.Close()
	}
}
