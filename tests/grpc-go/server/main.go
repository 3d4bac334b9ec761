// A server of Go's net/http, or of gRPC. Arguments: `http` or `grpc`, address. On SIGTERM it shuts down gracefully.
package main

import (
	"context"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
)

func main() {
	listener, err := net.Listen("tcp", os.Args[2])
	if err != nil {
		log.Fatal(err)
	}
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	if os.Args[1] == "grpc" {
		server := grpc.NewServer()
		grpc_health_v1.RegisterHealthServer(server, health.NewServer())
		go func() { log.Fatal(server.Serve(listener)) }()
		<-term
		server.GracefulStop()
		return
	}
	server := http.Server{Protocols: new(http.Protocols)}
	server.Protocols.SetHTTP1(true)
	server.Protocols.SetUnencryptedHTTP2(true)
	server.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		time.Sleep(5 * time.Millisecond)
		io.WriteString(w, "hello")
	})
	go server.Serve(listener)
	<-term
	if err := server.Shutdown(context.Background()); err != nil {
		log.Fatal(err)
	}
}
