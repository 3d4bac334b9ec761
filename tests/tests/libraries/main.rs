//! What other languages bring, against ours: a real gRPC client beside our agents.
//!
//! It needs Go. Where that is missing a line says so, and the test fails where `CI` is `true`.

mod grpc_client;
mod tools;
