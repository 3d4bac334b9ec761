//! Replicas that fail, hang, or lie about it: they are ejected soon and come back, and the harm is bounded.

use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use bytes::Bytes;
use prequal_testbed::{
    Backend, Body, Client, Envoy, EnvoyConfig, Fleet, Reply, Request, Response, SHIM_NAME, eventually,
};
use serde_json::json;

use crate::support::{
    SERVING, addrs, bed, counted, grpc_reply, grpc_reply_alone, grpc_request, is_probe, report, set,
    stand_in, stand_ins, warm, with_load,
};

const MS: fn(u64) -> Duration = Duration::from_millis;

/// The shipped configuration without retries, so that every failure is seen.
fn without_retries(addrs: &[SocketAddr]) -> Result<EnvoyConfig> {
    Ok(EnvoyConfig::for_replicas(addrs)?.edit(|config| {
        config.route_mut().as_object_mut().expect("a route").remove("retry_policy");
    }))
}

/// Fails `share` per cent of the requests at once, in a fixed pattern; the others are answered after 20 ms.
fn fail(backend: &Backend, share: u64) {
    let count = Arc::new(AtomicU64::new(0));
    backend.set_handler(move |_| {
        // 37 is coprime to 100, which spreads the failures.
        if count.fetch_add(37, Ordering::Relaxed) % 100 < share {
            Reply::status(503)
        } else {
            Reply::ok().delay(MS(20))
        }
    });
}

/// Asserts that no replica was ever ejected: the gauge alone also reads 0 in panic.
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

#[test]
fn without_probes_all_replicas_are_used_and_a_failed_one_comes_back() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(4, &Reply::ok().delay(MS(5)))?;
    let config = set(without_retries(&fleet.addrs())?, "budget", "fixed");
    let config = set(set(config, "r_probe", 0), "idle_probe_interval_ms", 0);
    let envoy = Envoy::start(config)?;
    warm(&envoy, 4);
    let client = envoy.client();
    fail(&fleet[0].backend, 100);
    until(&client, "ejected", Duration::from_secs(10), || {
        envoy.prequal("replicas").is_ok_and(|counts| counts.other("prequal_ejected") == 1)
    });
    fleet[0].backend.set(Reply::ok().delay(MS(5)));
    until(&client, "back in use", Duration::from_secs(30), || {
        envoy.prequal("replicas").is_ok_and(|counts| counts.other("prequal_ejected") == 0)
    });
    Ok(())
}

#[test]
fn a_replica_that_fails_some_of_its_requests_is_ejected_and_comes_back() -> Result<()> {
    bed!();
    for (share, workers) in [(30, 1), (30, 2), (50, 1), (100, 1)] {
        let fleet = Fleet::uniform(10, &Reply::ok().delay(MS(20)))?;
        let envoy = Envoy::start(without_retries(&fleet.addrs())?.concurrency(workers))?;
        warm(&envoy, 10);
        let client = envoy.client();
        get(&client, 400);
        fail(&fleet[0].backend, share);
        fleet.clear();
        let answers = get(&client, 2000);
        let counts = envoy.prequal("replicas")?;
        assert!(good(&answers) >= 1980, "failing {share} %: {} of 2000 good: {counts:#?}", good(&answers));
        // A replica that looked slow on a busy machine has to wait for its first request.
        until(&client, "it keeps a trickle", Duration::from_secs(30), || fleet.served()[0] > 0);
        fleet[0].backend.set(Reply::ok().delay(MS(20)));
        until(&client, "back in use", Duration::from_secs(30), || {
            fleet.clear();
            get(&client, 200);
            fleet.served()[0] >= 10
        });
        let counts = envoy.prequal("replicas")?;
        assert!(counts.other("prequal_trials_total") > 0, "{counts:#?}");
    }
    Ok(())
}

#[test]
fn grpc_errors_in_trailers_or_without_a_body_eject() -> Result<()> {
    bed!();
    for failing in [grpc_reply("14"), grpc_reply_alone("14")] {
        let fleet = Fleet::uniform(4, &grpc_reply("0").delay(MS(10)))?;
        let envoy = Envoy::start(without_retries(&fleet.addrs())?)?;
        warm(&envoy, 4);
        fleet[0].backend.set(failing);
        let client = Client::http2(envoy.addr());
        eventually("the failing one is left alone", Duration::from_secs(20), || {
            fleet.clear();
            client.burst(400, 8, |_| grpc_request());
            (fleet.served()[0] < 24).then_some(())
        });
        counted(&envoy, "ejected", |now| {
            now.other("prequal_ejections_total.failing") + now.other("prequal_ejections_total.reported") > 0
        });
    }
    Ok(())
}

/// Four replicas whose agents do not report failures, so that they are ejected only for failures that this Envoy sees.
struct Unreported {
    backends: Vec<Backend>,
    /// The first replica fails every n-th time; while this is not set, it never fails.
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

    /// Starts replicas that answer calls after `delay`, an Envoy that knows them and a client; every `nth` answer of the
    /// first fails.
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

    /// Makes the first replica fail every request, and asserts that it is soon ejected for failures that this Envoy sees,
    /// and then gets only trials.
    #[track_caller]
    fn assert_ejected(&self, case: &str, envoy: &Envoy, client: &Client, request: fn(usize) -> Request) {
        warm(envoy, 4);
        self.fail_every(1);
        // Ejection takes two failures. If the first brings no report, the replica waits for a probe at the end of the
        // pool.
        eventually(case, Duration::from_secs(30), || {
            client.burst(50, 8, request);
            (envoy.prequal(SERVING).ok()?.other("prequal_ejections_total.failing") > 0).then_some(())
        });
        client.burst(400, 8, request);
        // A fair share is 100 requests. Only requests from before the ejection and trials may fail.
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
        // It takes only tens of requests.
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

#[test]
fn an_unresponsive_replica_is_ejected_at_once_and_comes_back_when_it_answers() -> Result<()> {
    bed!();
    // Each worker detects it by itself; the verdict applies to all.
    for workers in [1, 2] {
        unresponsive_and_back(workers)?;
    }
    Ok(())
}

fn unresponsive_and_back(workers: u32) -> Result<()> {
    let fleet = Fleet::uniform(6, &Reply::ok().delay(MS(20)))?;
    let envoy = Envoy::start(EnvoyConfig::for_replicas(&fleet.addrs())?.concurrency(workers))?;
    warm(&envoy, 6);
    let client = envoy.client();
    get(&client, 600);
    fleet[0].backend.set(Reply::ok().delay(Duration::from_secs(2)));
    fleet.clear();
    let answers = get(&client, 1500);
    let late = answers.iter().flatten().filter(|answer| answer.elapsed > Duration::from_secs(1)).count();
    // Eight callers: at most the requests that they had in flight there, and a trial or two.
    assert!(late <= 12, "{late} late: {:#?}", envoy.prequal("replicas")?);
    counted(&envoy, "ejected as unresponsive", |now| now.other("prequal_ejections_total.unresponsive") > 0);
    fleet[0].backend.set(Reply::ok().delay(MS(20)));
    let start = Instant::now();
    until(&client, "half of its share", Duration::from_secs(12), || {
        fleet.clear();
        get(&client, 200);
        fleet.served()[0] >= 17
    });
    assert!(start.elapsed() < Duration::from_secs(12));
    Ok(())
}

#[test]
fn refused_connections_eject_and_the_replica_is_back_when_it_listens_again() -> Result<()> {
    bed!();
    let mut fleet = Fleet::uniform(5, &Reply::ok().delay(MS(10)))?;
    let envoy = Envoy::start(without_retries(&fleet.addrs())?)?;
    warm(&envoy, 5);
    let client = envoy.client();
    get(&client, 300);
    fleet[0].agent.kill();
    let answers = get(&client, 1000);
    assert!(good(&answers) >= 985, "{} of 1000 good: {:#?}", good(&answers), envoy.prequal("replicas")?);
    let options = prequal_testbed::AgentOptions { listen: fleet[0].addr().to_string(), ..Default::default() };
    let _agent = prequal_testbed::Agent::start_with(fleet[0].backend.addr(), &options)?;
    until(&client, "back in use", Duration::from_secs(30), || {
        fleet.clear();
        get(&client, 200);
        fleet.served()[0] >= 20
    });
    Ok(())
}

#[test]
fn if_most_of_the_fleet_fails_no_replica_is_ejected() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(5, &Reply::ok().delay(MS(5)))?;
    let envoy = Envoy::start(without_retries(&fleet.addrs())?)?;
    warm(&envoy, 5);
    for replica in fleet.iter().take(4) {
        replica.backend.set(Reply::status(500));
    }
    let client = envoy.client();
    get(&client, 400);
    // The replicas that failed first were ejected until the others failed too.
    let ejected = || envoy.prequal("replicas").map(|now| now.other("prequal_ejected"));
    until(&client, "no replica is ejected", Duration::from_secs(5), || {
        ejected().is_ok_and(|ejected| ejected == 0)
    });
    fleet.clear();
    get(&client, 500);
    let served = fleet.served();
    // Trials alone would be at most one per second and replica; equal replicas need not share evenly (docs/design/limits.md).
    assert!(served.iter().take(4).sum::<u64>() > 100, "{served:?}");
    assert!(served[4] < 400, "the healthy one does not carry all: {served:?}");
    for replica in fleet.iter().take(4) {
        replica.backend.set(Reply::ok().delay(MS(5)));
    }
    until(&client, "all in use", Duration::from_secs(30), || {
        fleet.clear();
        good(&get(&client, 250)) == 250 && fleet.served().iter().all(|count| *count > 15)
    });
    Ok(())
}

#[test]
fn client_aborts_do_not_eject() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(3, &Reply::ok().delay(MS(30)))?;
    // Without the limit on waiting: a client that aborts early would not reach it.
    let config = set(EnvoyConfig::for_replicas(&fleet.addrs())?, "ejection_wait_factor", 0);
    let envoy = Envoy::start(config)?;
    warm(&envoy, 3);
    let served = || fleet.served().iter().sum::<u64>();
    for client in [envoy.client(), Client::http2(envoy.addr())] {
        let given_up = (0..30).filter(|_| {
            let before = served();
            client.abandon_when(Request::get("/"), || served() > before)
        });
        assert!(given_up.count() >= 20, "too busy a machine: answers came first");
    }
    counted(&envoy, "aborts", |now| now.outcomes("client_abort") >= 40);
    // The updates of a request are applied with the next request.
    assert_eq!(good(&get(&envoy.client(), 1)), 1);
    assert_not_ejected(&envoy);
    assert_eq!(good(&get(&envoy.client(), 100)), 100);
    Ok(())
}

#[test]
fn requests_that_envoy_refuses_are_not_counted_against_the_replica() -> Result<()> {
    bed!();
    let load = |addr| with_load(report(1, 5000, addr));
    let backends = stand_ins(3, load, move |addr| load(addr).delay(MS(20)))?;
    let config = without_retries(&addrs(&backends))?;
    let breaker = |keys: &[&str]| {
        config.clone().edit(|config| {
            let threshold = &mut config.cluster_mut(SERVING)["circuit_breakers"]["thresholds"][0];
            keys.iter().for_each(|key| threshold[key] = json!(1));
        })
    };
    let fault = config.clone().edit(|config| {
        let fault = "type.googleapis.com/envoy.extensions.filters.http.fault.v3.HTTPFault";
        let abort = json!({"http_status": 503, "percentage": {"numerator": 80}});
        let settings = json!({"@type": fault, "abort": abort});
        config.insert_before(SHIM_NAME, json!({"name": "fault", "typed_config": settings}));
    });
    for (case, config) in [
        ("requests", breaker(&["max_requests"])),
        ("pending requests", breaker(&["max_connections", "max_pending_requests"])),
        ("fault", fault),
    ] {
        let envoy = Envoy::start(config)?;
        warm(&envoy, 3);
        let before = envoy.prequal(SERVING)?;
        let answers = get(&envoy.client(), 300);
        assert!(good(&answers) < 250, "{case}: nothing was refused: {}", good(&answers));
        let refused = (300 - good(&answers)) as u64;
        let local = before.outcomes("local") + refused;
        let after = counted(&envoy, case, |now| now.outcomes("local") >= local);
        assert_eq!(after.outcomes("upstream_failure"), 0, "{case}: {after:#?}");
        assert_not_ejected(&envoy);
    }
    Ok(())
}

#[test]
fn a_full_circuit_breaker_starts_no_cooldown() -> Result<()> {
    bed!();
    // One replica that is preferred, and enough others to choose from without it.
    let best = |addr| with_load(report(0, 5000, addr));
    let worse = |addr| with_load(report(3, 900_000, addr));
    let wanted = stand_in(best, move |addr| best(addr).delay(MS(20)))?;
    let mut backends = stand_ins(3, worse, worse)?;
    backends.insert(0, wanted);
    let config = without_retries(&addrs(&backends))?.edit(|config| {
        config.cluster_mut(SERVING)["circuit_breakers"]["thresholds"][0]["max_requests"] = json!(1);
    });
    let envoy = Envoy::start(config)?;
    warm(&envoy, 4);
    let (client, wanted) = (envoy.client(), &backends[0]);
    client.burst(20, 1, |_| Request::get("/"));
    // The refused request may have been for another replica, so try three times.
    for _ in 0..3 {
        wanted.clear();
        assert_eq!(good(&client.burst(2, 2, |_| Request::get("/"))), 1, "one was to be refused");
        // A cooldown would last for a second.
        assert_eq!(good(&client.burst(10, 1, |_| Request::get("/"))), 10);
        let served = wanted.seen().iter().filter(|seen| !is_probe(seen)).count();
        assert!(served >= 8, "{served} of 11");
    }
    Ok(())
}

#[test]
fn only_an_idle_stream_with_a_complete_request_counts_against_the_replica() -> Result<()> {
    bed!();
    let (part, whole) = ("123", "1234567890");
    for (case, limit, body, class) in [
        ("a part, and buffered", "stream_idle_timeout", part, "local"),
        ("a part", "stream_idle_timeout", part, "local"),
        ("the whole request", "stream_idle_timeout", whole, "upstream_failure"),
        ("the whole request", "max_stream_duration", whole, "local"),
    ] {
        let load = |addr| with_load(report(1, 5000, addr));
        let hang = Arc::new(AtomicBool::new(false));
        let backends = {
            let hang = Arc::clone(&hang);
            let body =
                move || if hang.load(Ordering::Relaxed) { Body::Hang } else { Body::Full(Bytes::new()) };
            stand_ins(2, load, move |addr| load(addr).body(body()))?
        };
        let envoy = Envoy::start(without_retries(&addrs(&backends))?.edit(|config| {
            let http = config.http_mut();
            if limit == "max_stream_duration" {
                http["common_http_protocol_options"][limit] = json!("0.2s");
            } else {
                http[limit] = json!("0.2s");
            }
            if case.ends_with("buffered") {
                let buffer = "type.googleapis.com/envoy.extensions.filters.http.buffer.v3.Buffer";
                let settings = json!({"@type": buffer, "max_request_bytes": 1000});
                config.insert_before(SHIM_NAME, json!({"name": "buffer", "typed_config": settings}));
            }
        }))?;
        let before = warm(&envoy, 2);
        hang.store(true, Ordering::Relaxed);
        let mut socket = TcpStream::connect(envoy.addr())?;
        write!(socket, "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{body}")?;
        counted(&envoy, &format!("{case}, {limit}"), |now| now.outcomes(class) == before.outcomes(class) + 1);
    }
    Ok(())
}

#[test]
fn a_failing_replica_that_always_reports_zero_load_gets_a_trickle() -> Result<()> {
    bed!();
    let honest =
        || stand_ins(4, |addr| with_load(report(1, 5000, addr)), |addr| with_load(report(1, 5000, addr)));
    for status in [503u16, 200] {
        let mut backends = honest()?;
        let liar = stand_in(
            |addr| with_load(format!("0;0;{addr}")),
            move |addr| Reply::status(status).header("x-prequal-load", format!("0;0;{addr};fail=1000")),
        )?;
        backends.insert(0, liar);
        let envoy = Envoy::start(without_retries(&addrs(&backends))?)?;
        warm(&envoy, 5);
        let client = envoy.client();
        get(&client, 200);
        let before = backends[0].served();
        let answers = get(&client, 1000);
        let got = backends[0].served() - before;
        assert!(got < 100, "status {status}: {got} of 1000, probes included");
        assert!(good(&answers) >= 985, "{}", good(&answers));
    }
    Ok(())
}

#[test]
fn a_replica_that_reports_huge_values_starves_only_itself() -> Result<()> {
    bed!();
    let mut backends =
        stand_ins(3, |addr| with_load(report(1, 5000, addr)), |addr| with_load(report(1, 5000, addr)))?;
    let huge = |addr: SocketAddr| with_load(format!("1000000;3600000000;{addr};fail=1000;up=4294967295"));
    backends.push(stand_in(huge, huge)?);
    let envoy = Envoy::start(EnvoyConfig::for_replicas(&addrs(&backends))?)?;
    warm(&envoy, 4);
    let before: Vec<u64> = backends.iter().map(Backend::served).collect();
    assert_eq!(good(&get(&envoy.client(), 600)), 600);
    let served: Vec<u64> = backends.iter().zip(before).map(|(b, before)| b.served() - before).collect();
    assert!(served.iter().take(3).all(|count| *count > 100), "{served:?}");
    Ok(())
}

#[test]
fn both_rules_can_be_switched_off() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(4, &Reply::ok().delay(MS(5)))?;
    let config = without_retries(&fleet.addrs())?.filter_settings(|settings| {
        settings["ejection_failure_share"] = json!(0);
        settings["ejection_wait_factor"] = json!(0);
    });
    let envoy = Envoy::start(config)?;
    warm(&envoy, 4);
    fail(&fleet[0].backend, 50);
    get(&envoy.client(), 400);
    let counts = envoy.prequal("replicas")?;
    assert_eq!(counts.other("prequal_ejected"), 0, "{counts:#?}");
    assert_eq!(counts.other("prequal_trials_total"), 0, "{counts:#?}");
    Ok(())
}
