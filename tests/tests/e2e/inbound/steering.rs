//! Steering by the reports of Envoys beside the replicas.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result};
use prequal_testbed::{Backend, Client, Envoy, EnvoyConfig, Reply, Request, eventually};
use serde_json::json;

use super::{MS, beside, free_port, on_port, probe, with};
use crate::support::{SERVING, assert_all_ok, assert_no_prequal_headers, bed, is_probe, warm};

/// Asserts that a client's Envoy avoids the last of `backends`, which is slow.
fn assert_steers(backends: &[Backend], client: &Envoy) -> Result<()> {
    warm(client, backends.len() as u64);
    // On a busy machine, six callers send more than the filter may steer while it still learns the replicas, and one of
    // the fast replicas may look slow.
    let after = eventually("three are used, the slow one is left alone", Duration::from_secs(20), || {
        backends.iter().for_each(Backend::clear);
        let before = client.prequal(SERVING).ok()?;
        let answers = client.client().burst(600, 6, |_| Request::get("/"));
        assert_all_ok(&answers);
        for answer in answers.into_iter().flatten() {
            assert_no_prequal_headers(&answer.headers);
        }
        let after = client.prequal(SERVING).ok()?;
        let served: Vec<u64> = backends.iter().map(Backend::served).collect();
        let used = served[..3].iter().filter(|served| **served >= 30).count();
        let steered = after.steered() - before.steered() >= 580;
        let heard = after.reports("used") - before.reports("used") >= 550;
        (steered && heard && served[3] <= 60 && used >= 2).then_some(after)
    });
    assert_eq!(after.reports("wrong_endpoint"), 0, "{after:#?}");
    assert!(after.probes("used") >= 10 && after.probes("timeout") * 5 < after.probes("used"), "{after:#?}");
    assert!(backends.iter().flat_map(Backend::seen).all(|seen| !is_probe(&seen)), "a probe got through");
    Ok(())
}

fn three_fast_and_one_slow() -> Result<Vec<Backend>> {
    [5, 5, 5, 150].map(|delay| Backend::start(Reply::ok().delay(MS(delay)))).into_iter().collect()
}

#[test]
fn the_inbound_role_replaces_the_agent() -> Result<()> {
    bed!();
    let backends = three_fast_and_one_slow()?;
    let servers =
        backends.iter().map(|backend| Envoy::start(beside(backend)?)).collect::<Result<Vec<_>>>()?;
    let addrs: Vec<SocketAddr> = servers.iter().map(Envoy::addr).collect();
    let client = Envoy::start(EnvoyConfig::for_replicas(&addrs)?.concurrency(2))?;
    assert_steers(&backends, &client)?;
    for server in &servers {
        assert!(server.inbound(server.addr())?["probes"] > 0);
        assert_eq!(probe(server.addr())?.endpoint, server.addr().to_string());
    }
    Ok(())
}

#[test]
fn probes_may_have_a_separate_port() -> Result<()> {
    bed!();
    let backends = three_fast_and_one_slow()?;
    let server = |backend: &Backend| -> Result<Envoy> {
        let port = free_port()?;
        let config = with(beside(backend)?, &json!({"role": "inbound", "serving_port": port}));
        Envoy::start(on_port(config.add_listener("probes"), port))
    };
    let servers = backends.iter().map(server).collect::<Result<Vec<_>>>()?;
    let serving: Vec<SocketAddr> = servers.iter().map(Envoy::addr).collect();
    let ports = servers.iter().map(|server| server.listener("probes").context("no such listener"));
    let probing = ports.collect::<Result<Vec<_>>>()?;
    let client = EnvoyConfig::shipped()?.endpoints(SERVING, &serving).endpoints("replicas-agent", &probing);
    let client = Envoy::start(client.concurrency(2))?;
    assert_steers(&backends, &client)?;
    for (serving, probing) in serving.iter().zip(&probing) {
        let reported = probe(*probing)?;
        assert_eq!(reported.endpoint, serving.to_string());
        assert!(reported.rest.starts_with(&format!("probe={probing}")), "{reported:?}");
    }
    // A request on that port that is not a probe passes through and is not counted.
    let before = servers[0].inbound(serving[0])?["requests.success"];
    assert_eq!(Client::new(probing[0]).get("/")?.status, 200);
    assert_eq!(servers[0].inbound(serving[0])?["requests.success"], before);
    assert!(servers[0].inbound(probing[0])?.is_empty());
    Ok(())
}
