//! Tests software in other languages together with this project's: a real gRPC client beside agents, servers as their
//! backends, and the libraries for servers, which all pass one conformance program. `docs/guide/libraries.md` describes
//! its requirements.
//!
//! These tests need Go, Python, nginx, Node, a JVM and h2load.

mod calls;
mod compare;
mod grpc_client;
mod http;
mod plan;
mod reference;
mod servers;
mod service;
mod subject;
mod tools;
mod tower;
mod trace;

use std::time::Instant;

use anyhow::{Context as _, Result};
use prequal_testbed::needs;
use subject::Subject;

/// Runs the whole conformance program for one library.
fn conforms(subject: &Subject) -> Result<()> {
    let begin = Instant::now();
    compare::traces(subject)?;
    eprintln!("{}: traces after {:?}", subject.name, begin.elapsed());
    service::check(subject).with_context(|| subject.name)?;
    if let Some(addr) = subject.calls {
        calls::check(subject, addr).with_context(|| subject.name)?;
    }
    eprintln!("{}: all after {:?}", subject.name, begin.elapsed());
    Ok(())
}

#[test]
fn the_layer_for_tower_conforms() -> Result<()> {
    conforms(&tower::subject()?)
}

#[test]
fn the_library_for_go_conforms() -> Result<()> {
    needs!(tools::missing_go());
    let program = tools::go_program("libraries/go", "./internal/conformance", "go-conformance")?;
    conforms(&Subject::program("go", std::process::Command::new(program))?)
}

#[test]
fn the_middleware_for_python_conforms() -> Result<()> {
    needs!(tools::missing_python());
    conforms(&Subject::program("python", tools::python_server()?)?)
}
