//! Replicas that fail, hang, or lie about it: they are ejected soon and come back, and the harm is bounded.

mod blameless;
mod failing;
mod liars;
mod unreported;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::Result;
use prequal_testbed::{Client, Envoy, EnvoyConfig, Request, Response};

use crate::support::SERVING;

const MS: fn(u64) -> Duration = Duration::from_millis;

/// The shipped configuration without retries, so that every failure is seen.
fn without_retries(addrs: &[SocketAddr]) -> Result<EnvoyConfig> {
    Ok(EnvoyConfig::for_replicas(addrs)?.edit(|config| {
        config.route_mut().as_object_mut().expect("a route").remove("retry_policy");
    }))
}

/// Asserts that no replica was ever ejected. The gauge of ejected replicas would not suffice: in panic, it reads 0 too.
#[track_caller]
fn assert_not_ejected(envoy: &Envoy) {
    let now = envoy.prequal(SERVING).expect("stats");
    for reason in ["failing", "reported", "unresponsive"] {
        assert_eq!(now.other(&format!("prequal_ejections_total.{reason}")), 0, "{reason}: {now:#?}");
    }
    assert_eq!(now.other("prequal_panic"), 0, "{now:#?}");
}

fn get(client: &Client, count: usize) -> Vec<Result<Response>> {
    client.burst(count, 8, |_| Request::get("/"))
}

fn good(answers: &[Result<Response>]) -> usize {
    answers.iter().flatten().filter(|answer| answer.status == 200).count()
}

/// Sends requests until `done`; panics after `limit`. Returns the time that it took.
#[track_caller]
fn until(client: &Client, what: &str, limit: Duration, done: impl Fn() -> bool) -> Duration {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < limit, "not within {limit:?}: {what}");
        get(client, 20);
    }
    start.elapsed()
}
