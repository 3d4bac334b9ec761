//! Failures that only this Envoy sees, because no replica reports them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use bytes::Bytes;
use prequal_testbed::{Backend, Body, Client, Envoy, Reply, Request, eventually};
use serde_json::json;

use super::{MS, assert_not_ejected, without_retries};
use crate::support::{
    SERVING, addrs, bed, counted, grpc_reply, grpc_reply_alone, grpc_request, report, set, stand_in,
    stand_ins, warm, with_load,
};

/// Four replicas whose agents do not report failures, so that they are ejected only for failures that this Envoy sees.
struct Unreported {
    backends: Vec<Backend>,
    /// The first replica fails every n-th request. At the start, `n` is so large that none fails.
    every: Arc<AtomicU64>,
    /// Number of failures so far.
    failures: Arc<AtomicU64>,
}

impl Unreported {
    fn start(good: &Reply, bad: &Reply) -> Result<Self> {
        let load = |addr| with_load(report(1, 5000, addr));
        let loaded = |reply: &Reply, addr| reply.clone().header("x-prequal-load", report(1, 5000, addr));
        let (every, failures) = (Arc::new(AtomicU64::new(u64::MAX)), Arc::new(AtomicU64::new(0)));
        let first = {
            let (every, failures) = (Arc::clone(&every), Arc::clone(&failures));
            let (good, bad, count) = (good.clone(), bad.clone(), AtomicU64::new(1));
            move |addr| {
                let every = every.load(Ordering::Relaxed);
                if count.fetch_add(1, Ordering::Relaxed).is_multiple_of(every) {
                    failures.fetch_add(1, Ordering::Relaxed);
                    return loaded(&bad, addr);
                }
                loaded(&good, addr)
            }
        };
        let good = good.clone();
        let mut backends = vec![stand_in(load, first)?];
        backends.extend(stand_ins(3, load, move |addr| loaded(&good, addr))?);
        Ok(Self { backends, every, failures })
    }

    /// Starts replicas that answer calls after `delay`, an Envoy that knows them, and a client. Every `nth` answer of
    /// the first replica fails.
    fn failing(bad: &Reply, delay: Duration, nth: u64) -> Result<(Self, Envoy, Client)> {
        let fleet = Self::start(&grpc_reply("0").delay(delay), bad)?;
        let envoy = Envoy::start(without_retries(&fleet.addrs())?)?;
        warm(&envoy, 4);
        fleet.fail_every(nth);
        let client = Client::http2(envoy.addr());
        Ok((fleet, envoy, client))
    }

    fn fail_every(&self, nth: u64) {
        self.every.store(nth, Ordering::Relaxed);
    }

    fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    fn addrs(&self) -> Vec<SocketAddr> {
        addrs(&self.backends)
    }

    /// Makes the first replica fail every request, and asserts that it is soon ejected for failures that this Envoy
    /// sees, and then gets only trials.
    #[track_caller]
    fn assert_ejected(&self, case: &str, envoy: &Envoy, client: &Client, request: fn(usize) -> Request) {
        warm(envoy, 4);
        self.fail_every(1);
        // Ejection takes two failures.
        eventually(case, Duration::from_secs(30), || {
            client.burst(50, 8, request);
            (envoy.prequal(SERVING).ok()?.other("prequal_ejections_total.failing") > 0).then_some(())
        });
        client.burst(400, 8, request);
        // A fair share is 100 requests. Only trials, and requests sent before the ejection, may fail.
        assert!((2..=24).contains(&self.failures()), "{case}: {} failures", self.failures());
        let counts = envoy.prequal(SERVING).expect("stats");
        assert_eq!(counts.other("prequal_ejections_total.reported"), 0, "{counts:#?}");
        assert_eq!(counts.other("prequal_ejections_total.unresponsive"), 0, "{counts:#?}");
    }
}

/// A body that ends too early.
fn broken(status: u16) -> Reply {
    Reply::status(status).body(Body::Broken(Bytes::from_static(b"half")))
}

#[test]
fn one_failure_in_a_hundred_after_the_headers_does_not_eject() -> Result<()> {
    bed!();
    for bad in [grpc_reply("14"), broken(200), broken(503)] {
        let (fleet, envoy, client) = Unreported::failing(&bad, MS(2), 100)?;
        eventually("six failures", Duration::from_secs(30), || {
            client.burst(200, 8, |_| grpc_request());
            (fleet.failures() >= 6).then_some(())
        });
        counted(&envoy, "failures", |now| now.outcomes("upstream_failure") >= 6);
        assert_not_ejected(&envoy);
    }
    Ok(())
}

#[test]
fn errors_that_no_replica_reports_eject() -> Result<()> {
    bed!();
    for (case, bad) in [
        ("503", Reply::status(503)),
        ("grpc-status in trailers", grpc_reply("14")),
        ("grpc-status alone", grpc_reply_alone("14")),
    ] {
        let fleet = Unreported::start(&grpc_reply("0").delay(MS(10)), &bad)?;
        let envoy = Envoy::start(without_retries(&fleet.addrs())?)?;
        fleet.assert_ejected(case, &envoy, &Client::http2(envoy.addr()), |_| grpc_request());
    }
    Ok(())
}

#[test]
fn partial_failures_that_no_replica_reports_eject() -> Result<()> {
    bed!();
    for bad in [Reply::status(503), grpc_reply("14")] {
        let (fleet, envoy, client) = Unreported::failing(&bad, MS(10), 3)?;
        eventually("ejected", Duration::from_secs(30), || {
            client.burst(100, 8, |_| grpc_request());
            (envoy.prequal(SERVING).ok()?.other("prequal_ejections_total.failing") > 0).then_some(())
        });
        // The replica is ejected within tens of requests.
        assert!(fleet.failures() <= 40, "{} failures", fleet.failures());
        assert_eq!(envoy.prequal(SERVING)?.other("prequal_ejections_total.reported"), 0);
    }
    Ok(())
}

#[test]
fn timeouts_resets_and_broken_answers_eject() -> Result<()> {
    bed!();
    for (case, bad) in [
        ("the route's timeout", Reply::ok().body(Body::Hang)),
        ("reset", Reply::ok().body(Body::Reset)),
        ("broken off", broken(200)),
    ] {
        let fleet = Unreported::start(&Reply::ok().delay(MS(10)), &bad)?;
        // Without the limit on waiting, which would detect the replica before the timeout expires.
        let config = set(without_retries(&fleet.addrs())?, "ejection_wait_factor", 0)
            .edit(|config| config.route_mut()["timeout"] = json!("0.2s"));
        let envoy = Envoy::start(config)?;
        fleet.assert_ejected(case, &envoy, &envoy.client(), |_| Request::get("/"));
    }
    Ok(())
}
