//! Replicas and agents that die, hang or fail, and the effect on users' requests.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::Result;
use bytes::Bytes;
use prequal_testbed::{AgentOptions, Body, Envoy, EnvoyConfig, Fleet, Replica, Reply, Request};
use serde_json::json;

use crate::support::{
    SERVING, assert_all_ok, assert_no_prequal_headers, bed, report, set, stand_in, warm, with_load,
};

#[test]
fn after_the_death_of_an_agent_no_later_request_fails() -> Result<()> {
    bed!();
    let ms = Duration::from_millis;
    // The replica that will die is the fastest, so it is preferred.
    let mut fleet = Fleet::start([1, 10, 10, 10].map(|delay| Reply::ok().delay(ms(delay))))?;
    let envoy = Envoy::start(EnvoyConfig::for_replicas(&fleet.addrs())?)?;
    warm(&envoy, 4);
    let retries = envoy.stat("cluster.replicas.upstream_rq_retry")?;
    fleet[0].agent.kill();
    fleet.clear();
    assert_all_ok(&envoy.client().burst(400, 8, |_| Request::get("/")));
    assert_eq!(fleet.served()[0], 0);
    let retried = envoy.stat("cluster.replicas.upstream_rq_retry")? - retries;
    assert!(retried > 0, "the dead replica was never chosen: nothing was tested");
    assert_eq!(envoy.stat("cluster.replicas.upstream_rq_retry_limit_exceeded")?, 0);
    Ok(())
}

/// Envoy's own policy places retries, and it prefers dead hosts, because they look idle. Three shipped retries still
/// find a live one.
#[test]
fn three_hosts_that_are_dead_at_once_cost_no_request() -> Result<()> {
    bed!();
    let mut fleet = Fleet::uniform(6, &Reply::ok().delay(Duration::from_millis(10)))?;
    let envoy = Envoy::start(EnvoyConfig::for_replicas(&fleet.addrs())?.without_prequal())?;
    fleet.iter_mut().take(3).for_each(|replica| replica.agent.kill());
    assert_all_ok(&envoy.client().burst(300, 8, |_| Request::get("/")));
    let retried = envoy.stat("cluster.replicas.upstream_rq_retry")?;
    assert!(retried > 0, "no dead host was chosen: nothing was tested");
    Ok(())
}

/// An agent at its `--max-rif` refuses requests. Envoy sends them elsewhere, so no user notices. The filter counts them
/// as failures of the replica, and may eject it for a while.
#[test]
fn requests_that_an_agent_sheds_are_served_elsewhere() -> Result<()> {
    bed!();
    let ms = Duration::from_millis;
    let replica = |args: &[&str], delay| {
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        Replica::start_with(Reply::ok().delay(delay), &AgentOptions { args, ..AgentOptions::default() })
    };
    // The replica that sheds load is the fastest, so it is preferred.
    let fleet = [replica(&["--max-rif=1"], ms(5))?, replica(&[], ms(20))?, replica(&[], ms(20))?];
    let addrs: Vec<_> = fleet.iter().map(Replica::addr).collect();
    let envoy = Envoy::start(EnvoyConfig::for_replicas(&addrs)?)?;
    warm(&envoy, 3);
    let shed = || anyhow::Ok(fleet[0].agent.metrics()?["prequal_agent_shed_total"]);
    let retries = || envoy.stat("cluster.replicas.upstream_rq_retry");
    let (shed_before, retried_before) = (shed()?, retries()?);
    fleet.iter().for_each(|replica| replica.backend.clear());
    let answers = envoy.client().burst(400, 8, |_| Request::get("/"));
    assert_all_ok(&answers);
    answers.iter().flatten().for_each(|answer| assert_no_prequal_headers(&answer.headers));
    let shed = shed()? - shed_before;
    assert!(shed > 0.0, "nothing was shed: nothing was tested");
    #[expect(clippy::cast_precision_loss, reason = "a small count")]
    let retried = (retries()? - retried_before) as f64;
    assert_eq!(retried, shed, "each refusal is retried, and nothing else");
    // The replica served some requests, and no request reached a backend twice.
    let served: Vec<u64> = fleet.iter().map(|replica| replica.backend.served()).collect();
    assert!(served[0] > 0, "{served:?}");
    assert_eq!(served.iter().sum::<u64>(), 400, "{served:?}");
    Ok(())
}

#[test]
fn a_hung_agent_gets_no_requests_after_three_seconds() -> Result<()> {
    bed!();
    let ms = Duration::from_millis;
    let fleet = Fleet::start([1, 10, 10, 10].map(|delay| Reply::ok().delay(ms(delay))))?;
    let envoy = Envoy::start(EnvoyConfig::for_replicas(&fleet.addrs())?)?;
    warm(&envoy, 4);
    fleet[0].agent.freeze();
    let frozen = Instant::now();
    // Requests continue; those that hang are aborted by their clients.
    while frozen.elapsed() < Duration::from_secs(3) {
        envoy.client().abandon(Request::get("/"), ms(300));
    }
    let before = envoy.prequal(SERVING)?;
    let answers = envoy.client().burst(200, 4, |_| Request::get("/"));
    fleet[0].agent.thaw();
    assert_all_ok(&answers);
    let slowest = answers.iter().flatten().map(|answer| answer.elapsed).max();
    assert!(slowest < Some(Duration::from_secs(1)), "{slowest:?}");
    let after = envoy.prequal(SERVING)?;
    assert!(after.steered() - before.steered() >= 180, "{after:#?}");
    assert!(after.probes("timeout") > 0, "{after:#?}");
    fleet.assert_idle();
    Ok(())
}

#[test]
fn a_retry_goes_to_another_host() -> Result<()> {
    bed!();
    let ms = Duration::from_millis;
    let fleet = Fleet::start([10, 10, 10].map(|delay| Reply::ok().delay(ms(delay))))?;
    let config = EnvoyConfig::for_replicas(&fleet.addrs())?.edit(|config| {
        let policy = &mut config.route_mut()["retry_policy"];
        policy["retry_on"] = json!("5xx");
        policy["num_retries"] = json!(1);
    });
    let envoy = Envoy::start(config)?;
    warm(&envoy, 3);
    fleet[0].backend.set(Reply::status(503));
    fleet.clear();
    let retries = envoy.stat("cluster.replicas.upstream_rq_retry")?;
    assert_all_ok(&envoy.client().burst(200, 4, |_| Request::get("/")));
    let failed = fleet.served()[0];
    assert!(failed > 0, "the failing replica was never chosen: nothing was tested");
    // One retry each, and no retry reached the failing replica.
    assert_eq!(envoy.stat("cluster.replicas.upstream_rq_retry")? - retries, failed);
    assert_eq!(fleet.served().iter().sum::<u64>(), 200 + failed);
    Ok(())
}

#[test]
fn a_failure_that_a_retry_rescues_counts_before_the_response_ends() -> Result<()> {
    bed!();
    // The replica that serves the retry reports about itself, or claims to be the one that failed.
    for lies in [false, true] {
        let fails = Arc::new(AtomicBool::new(false));
        let best = |addr| with_load(report(0, 5000, addr));
        let wanted = {
            let fails = Arc::clone(&fails);
            let reply = move |addr| if fails.load(Relaxed) { Reply::status(503) } else { best(addr) };
            stand_in(best, reply)?
        };
        let rescuer = {
            let (fails, wanted) = (Arc::clone(&fails), wanted.addr());
            let chunk = Bytes::from_static(b"x");
            let stream =
                move || Body::Stream { chunk: chunk.clone(), count: 600, gap: Duration::from_millis(50) };
            stand_in(
                |addr| with_load(report(3, 900_000, addr)),
                move |addr| match (fails.load(Relaxed), lies) {
                    (false, _) => with_load(report(3, 900_000, addr)),
                    (true, false) => with_load(report(3, 900_000, addr)).body(stream()),
                    (true, true) => with_load(report(0, 5000, wanted)).body(stream()),
                },
            )?
        };
        let config =
            set(EnvoyConfig::for_replicas(&[wanted.addr(), rescuer.addr()])?, "ejection_wait_factor", 0);
        let envoy = Envoy::start(config.edit(|config| {
            let policy = &mut config.route_mut()["retry_policy"];
            policy["retry_on"] = json!("5xx");
            policy["num_retries"] = json!(1);
        }))?;
        warm(&envoy, 2);
        fails.store(true, Relaxed);
        let mut streams = Vec::new();
        let start = Instant::now();
        while envoy.prequal(SERVING)?.other("prequal_ejections_total.failing") == 0 {
            assert!(
                start.elapsed() < Duration::from_secs(10),
                "lies: {lies}: {:#?}",
                envoy.prequal(SERVING)?
            );
            let mut stream = TcpStream::connect(envoy.addr())?;
            stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")?;
            assert!(stream.read(&mut [0; 100])? > 0, "no response");
            streams.push(stream);
        }
    }
    Ok(())
}

#[test]
fn all_agents_stop_and_come_back() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(2, &Reply::ok())?;
    let addrs = fleet.addrs();
    let envoy = Envoy::start(EnvoyConfig::for_replicas(&addrs)?)?;
    warm(&envoy, 2);
    let upstreams = Fleet::uniform(2, &Reply::ok())?;
    drop(fleet);
    let reply = envoy.client().get("/")?;
    assert_eq!(reply.status, 503);
    // New agents on the old ports: the filter recovers by itself.
    let _agents = addrs
        .iter()
        .zip(upstreams.iter())
        .map(|(addr, replica)| {
            let options = AgentOptions { listen: addr.to_string(), ..Default::default() };
            prequal_testbed::Agent::start_with(replica.backend.addr(), &options)
        })
        .collect::<Result<Vec<_>>>()?;
    let before = envoy.prequal(SERVING)?.steered();
    prequal_testbed::eventually("steering again", Duration::from_secs(10), || {
        envoy.client().burst(10, 2, |_| Request::get("/"));
        (envoy.prequal(SERVING).ok()?.steered() > before + 20).then_some(())
    });
    assert_all_ok(&envoy.client().burst(50, 2, |_| Request::get("/")));
    assert!(envoy.prequal(SERVING)?.outcomes("upstream_failure") > 0);
    Ok(())
}
