//! Probes: every probe is accounted for, whatever the agent does, and none affects a user's request.

use std::time::Duration;

use anyhow::Result;
use bytes::Bytes;
use prequal_testbed::{
    Agent, AgentOptions, Backend, Body, Envoy, EnvoyConfig, Fleet, Reply, Request, eventually,
};

use crate::support::{
    SERVING, VERIFIED_OR_NOT, addrs, assert_all_ok, assert_probes_balance, bed, is_probe, report, set,
    stand_ins, verified, warm, with_load,
};

/// A fixed rate of probes, and none while idle, so that the counters can come to rest.
fn probing(config: EnvoyConfig, r_probe: f64) -> EnvoyConfig {
    let config = set(set(config, "budget", "fixed"), "r_probe", r_probe);
    set(config, "idle_probe_interval_ms", 0)
}

#[test]
fn counters_balance_at_rest() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(4, &Reply::ok())?;
    let envoy = Envoy::start(probing(EnvoyConfig::for_replicas(&fleet.addrs())?, 2.0))?;
    assert_all_ok(&envoy.client().burst(500, 8, |_| Request::get("/")));
    let rest = assert_probes_balance(&envoy);
    // Two probes for each request, and some for discovery.
    assert!((990..=1150).contains(&rest.probes("sent")), "{rest:#?}");
    assert!(rest.probes("used") > 0, "{rest:#?}");
    assert_eq!(rest.steered() + rest.picks("fallback"), 500);
    // Envoy's own count of the probes.
    let sent = envoy.stat("cluster.replicas-agent.upstream_rq_total")?;
    assert_eq!(sent, rest.probes("sent"));
    Ok(())
}

#[test]
fn no_reply_is_lost_when_requests_are_shorter_than_probes() -> Result<()> {
    bed!();
    let slow = Duration::from_millis(30);
    let backends = stand_ins(
        4,
        move |addr| with_load(report(0, 1000, addr)).delay(slow),
        |_| Reply::ok().delay(Duration::from_millis(1)),
    )?;
    let config = probing(EnvoyConfig::for_replicas(&addrs(&backends))?, 1.0);
    let envoy = Envoy::start(set(config, "probe_timeout_ms", 1000))?;
    assert_all_ok(&envoy.client().burst(300, 1, |_| Request::get("/")));
    let rest = assert_probes_balance(&envoy);
    let arrived = backends.iter().map(Backend::served).sum::<u64>() - 300;
    assert_eq!(rest.probes("sent"), arrived, "{rest:#?}");
    assert_eq!(rest.probes("timeout") + rest.probes("refused"), 0, "{rest:#?}");
    assert_eq!(rest.probes("used"), arrived, "{rest:#?}");
    assert_eq!(rest.other("prequal_members"), 4);
    Ok(())
}

/// Behaviours of bad probe endpoints, each with the prefix of the result under which its probes are counted. `SELF` in
/// a header is replaced by the endpoint's own address.
fn bad_endpoints() -> Vec<(&'static str, Reply, &'static str)> {
    let garbage = |value: &str| Reply::ok().header("x-prequal-load", value);
    let endless =
        Body::Stream { chunk: Bytes::from_static(b"x"), count: 1000, gap: Duration::from_millis(20) };
    vec![
        ("hangs", Reply::ok().body(Body::Hang), "timeout"),
        ("breaks off", Reply::ok().body(Body::Reset), "refused"),
        ("answers 500", Reply::status(500), "rejected_"),
        ("says nothing", Reply::ok(), "rejected_"),
        ("no number", garbage("a;b;c"), "rejected_"),
        ("negative", garbage("-1;-1;SELF"), "rejected_"),
        ("huge", garbage("99999999999999999999;1;SELF"), "rejected_"),
        ("empty", garbage(""), "rejected_"),
        ("long", garbage(&"9".repeat(16_000)), "rejected_"),
        ("another replica", garbage("0;1;203.0.113.1:80"), "rejected_"),
        ("twice", garbage("0;1;SELF").header("x-prequal-load", "7;7;SELF"), "rejected_"),
        ("breaks off in the body", garbage("0;1;SELF").body(Body::Broken(Bytes::from_static(b"x"))), ""),
        ("hangs in the body", garbage("0;1;SELF").body(endless), ""),
        ("10 MB", Reply::ok().body(Body::Full(Bytes::from(vec![b'x'; 10 << 20]))), ""),
    ]
}

#[test]
fn a_bad_probe_endpoint_costs_no_request() -> Result<()> {
    bed!();
    for ((case, reply, result), is_verified) in bad_endpoints()
        .into_iter()
        .flat_map(|case| VERIFIED_OR_NOT.map(|is_verified| (case.clone(), is_verified)))
    {
        let answer = move |addr: std::net::SocketAddr| {
            let mut reply = reply.clone();
            for (_, value) in &mut reply.headers {
                *value = value.replace("SELF", &addr.to_string());
            }
            reply
        };
        let backends = stand_ins(2, answer, |_| Reply::ok())?;
        let config = verified(probing(EnvoyConfig::for_replicas(&addrs(&backends))?, 1.0), is_verified);
        // Targets are learned from reports; these agents send none, so the targets are listed.
        let known = addrs(&backends).iter().map(ToString::to_string).collect::<Vec<_>>();
        let envoy = Envoy::start(set(config, "endpoints", known))?;
        assert_all_ok(&envoy.client().burst(40, 2, |_| Request::get("/")));
        let rest = assert_probes_balance(&envoy);
        assert!(rest.probes("sent") >= 20, "{case}: {rest:#?}");
        // If all agents agree on an invented endpoint and Envoy does not verify who answered, any agent that is probed
        // under that name confirms it. The endpoint stays a candidate.
        let hearsay = case == "another replica" && !is_verified;
        assert!(rest.probes("used") == 0 || hearsay, "{case}: {rest:#?}");
        let counted: u64 =
            rest.probes.iter().filter(|(name, _)| name.starts_with(result)).map(|(_, count)| count).sum();
        assert!(counted > 0, "{case}: expected {result}: {rest:#?}");
        assert_eq!(rest.picks("fallback"), 40, "{case}: {rest:#?}");
        assert_eq!(envoy.stat("wasm.prequal.vm_reload_success")?, 0, "{case}");
    }
    Ok(())
}

#[test]
fn a_closed_probe_port_costs_no_request() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(2, &Reply::ok())?;
    // Bound and closed again, so that connections are refused.
    let closed = Backend::start(Reply::ok())?.addr();
    let config = EnvoyConfig::for_replicas(&fleet.addrs())?.endpoints("replicas-agent", &[closed]);
    let envoy = Envoy::start(probing(config, 1.0))?;
    assert_all_ok(&envoy.client().burst(100, 2, |_| Request::get("/")));
    let rest = assert_probes_balance(&envoy);
    assert!(rest.probes("refused") > 0, "{rest:#?}");
    assert_eq!(rest.probes("used"), 0, "{rest:#?}");
    // The reports on the answers are enough for steering.
    assert!(rest.reports("used") > 0 && rest.steered() > 0, "{rest:#?}");
    Ok(())
}

#[test]
fn a_separate_probe_port_works() -> Result<()> {
    bed!();
    let backend = Backend::start(Reply::ok())?;
    let options = AgentOptions {
        probe_listen: Some("127.0.0.1:0".into()),
        report: Some("probe-only"),
        ..AgentOptions::default()
    };
    let agents = (0..3).map(|_| Agent::start_with(backend.addr(), &options)).collect::<Result<Vec<_>>>()?;
    let service = agents.iter().map(Agent::addr).collect::<Vec<_>>();
    let probe = agents.iter().map(Agent::probe_addr).collect::<Vec<_>>();
    assert!(service.iter().all(|addr| !probe.contains(addr)));
    let config = EnvoyConfig::for_replicas(&service)?.endpoints("replicas-agent", &probe);
    let envoy = Envoy::start(probing(config, 2.0))?;
    let warmed = warm(&envoy, 3);
    assert_eq!(warmed.other("prequal_members"), 3);
    assert_all_ok(&envoy.client().burst(100, 2, |_| Request::get("/")));
    let rest = assert_probes_balance(&envoy);
    assert!(rest.probes("used") > rest.probes("sent") / 2, "{rest:#?}");
    assert_eq!(rest.reports("used"), 0, "probe-only: {rest:#?}");
    assert_eq!(rest.other("prequal_diverted_total"), 0);
    // The service port does not answer probes: the path is left to the backend.
    assert!(!backend.seen().iter().any(is_probe));
    Ok(())
}

#[test]
fn an_idle_filter_continues_to_probe_and_then_stops() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(3, &Reply::ok())?;
    let config = EnvoyConfig::for_replicas(&fleet.addrs())?.concurrency(2);
    let envoy = Envoy::start(set(config, "idle_probe_interval_ms", 200))?;
    warm(&envoy, 3);
    // These requests need few probes, but add to the budget for more.
    assert_all_ok(&envoy.client().burst(200, 2, |_| Request::get("/")));
    let before = envoy.prequal(SERVING)?;
    eventually("probes without requests", Duration::from_secs(5), || {
        let now = envoy.prequal(SERVING).ok()?;
        (now.probes("sent") >= before.probes("sent") + 5).then_some(())
    });
    std::thread::sleep(Duration::from_secs(4));
    let rested = envoy.prequal(SERVING)?;
    assert!(rested.probes("sent") <= before.probes("sent") + 32, "{rested:#?}");
    assert_eq!(rested.other("prequal_pool_occupancy"), 0, "the gauge shows that the pool is empty");
    std::thread::sleep(Duration::from_secs(2));
    let after = envoy.prequal(SERVING)?;
    assert_eq!((after.probes("sent"), &after.picks), (rested.probes("sent"), &before.picks));
    // The next request finds the fleet again immediately.
    warm(&envoy, 3);
    assert!(envoy.prequal(SERVING)?.probes("sent") > rested.probes("sent"));
    Ok(())
}

#[test]
fn unanswered_probes_become_rare() -> Result<()> {
    bed!();
    let backends = stand_ins(3, |_| Reply::status(404), |_| Reply::ok())?;
    let envoy = Envoy::start(EnvoyConfig::for_replicas(&addrs(&backends))?)?;
    let end = std::time::Instant::now() + Duration::from_secs(8);
    let mut requests = 0;
    while std::time::Instant::now() < end {
        assert_all_ok(&envoy.client().burst(10, 2, |_| Request::get("/")));
        requests += 10;
        std::thread::sleep(Duration::from_millis(20));
    }
    // Probes are sent in the first second, then after one second, and then after pauses that double each time.
    let sent = envoy.prequal(SERVING)?.probes("sent");
    assert!(sent <= requests / 4, "{sent} with {requests} requests");
    // The first report ends the back-off.
    backends.iter().for_each(|backend| {
        let addr = backend.addr();
        backend.set_handler(move |_| with_load(report(1, 1000, addr)));
    });
    warm(&envoy, 3);
    Ok(())
}

#[test]
fn a_lying_agent_harms_only_its_own_share() -> Result<()> {
    bed!();
    VERIFIED_OR_NOT.into_iter().try_for_each(one_agent_lies)
}

fn one_agent_lies(is_verified: bool) -> Result<()> {
    let ms = Duration::from_millis;
    // The last replica is slow and honest; every report of the first says that the last is idle and fast.
    let backends = stand_ins(
        4,
        |addr| with_load(report(1, 5000, addr)),
        move |addr| with_load(report(1, 5000, addr)).delay(ms(5)),
    )?;
    let slow = backends[3].addr();
    backends[3].set_handler(move |seen| {
        let load = with_load(report(3, 200_000, slow));
        if is_probe(seen) { load } else { load.delay(ms(200)) }
    });
    // It also forges the header that Envoy sets.
    let praise = with_load(report(0, 1, slow)).header("x-prequal-host", slow.to_string());
    backends[0].set(praise.delay(ms(5)));
    let envoy = Envoy::start(verified(EnvoyConfig::for_replicas(&addrs(&backends))?, is_verified))?;
    warm(&envoy, 3);
    backends[3].clear();
    assert_all_ok(&envoy.client().burst(400, 4, |_| Request::get("/")));
    let to_slow = backends[3].seen().iter().filter(|seen| !is_probe(seen)).count();
    assert!(to_slow <= 20, "{to_slow} of 400");
    let after = envoy.prequal(SERVING)?;
    // All reports on the liar's own answers were dropped, so it never became a member.
    let by_liar = backends[0].seen().iter().filter(|seen| !is_probe(seen)).count() as u64;
    assert_eq!(after.reports("wrong_endpoint"), by_liar, "{after:#?}");
    assert_eq!(after.other("prequal_members"), 3, "{after:#?}");
    Ok(())
}

#[test]
fn ten_thousand_invented_endpoints_have_no_effect() -> Result<()> {
    bed!();
    VERIFIED_OR_NOT.into_iter().try_for_each(one_agent_invents)
}

fn one_agent_invents(is_verified: bool) -> Result<()> {
    let backends =
        stand_ins(3, |addr| with_load(report(1, 5000, addr)), |addr| with_load(report(1, 5000, addr)))?;
    let next = std::sync::atomic::AtomicU32::new(0);
    backends[0].set_handler(move |_| {
        let index = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let [_, a, b, c] = index.to_be_bytes();
        with_load(format!("0;1;10.{a}.{b}.{c}:80"))
    });
    let config = probing(EnvoyConfig::for_replicas(&addrs(&backends))?, 3.0);
    let envoy = Envoy::start(verified(config, is_verified))?;
    assert_all_ok(&envoy.client().burst(10_000, 8, |_| Request::get("/")));
    let rest = assert_probes_balance(&envoy);
    assert!(rest.steered() > 9_000, "{rest:#?}");
    assert!(rest.other("prequal_members") <= 200, "inventions are not members: {rest:#?}");
    // The two honest replicas carry the load; the liar gets at most its share under the fallback policy.
    let liar = backends[0].seen().len();
    assert!(liar > 0);
    assert_eq!(envoy.stat("wasm.prequal.vm_reload_success")?, 0);
    Ok(())
}

#[test]
fn the_separate_headers_of_other_implementations_count_too() -> Result<()> {
    bed!();
    // These headers name no endpoint, so they count only if Envoy says who answered.
    let separate = |_| Reply::ok().header("x-prequal-rif", "1").header("x-prequal-latency-us", "900");
    for is_verified in VERIFIED_OR_NOT {
        let backends = stand_ins(3, separate, separate)?;
        let config = probing(EnvoyConfig::for_replicas(&addrs(&backends))?, 1.0);
        // A busy machine must not make a probe fail here.
        let envoy = Envoy::start(verified(set(config, "probe_timeout_ms", 1000), is_verified))?;
        assert_all_ok(&envoy.client().burst(100, 2, |_| Request::get("/")));
        let rest = assert_probes_balance(&envoy);
        assert!(rest.reports("used") > 0 && rest.steered() > 0, "{rest:#?}");
        assert_eq!(rest.probes("used"), if is_verified { rest.probes("sent") } else { 0 }, "{rest:#?}");
    }
    Ok(())
}

#[test]
fn a_counter_shows_a_probe_cluster_that_does_not_name_hosts() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(2, &Reply::ok())?;
    let config = EnvoyConfig::for_replicas(&fleet.addrs())?.edit(|config| {
        let options = &mut config.cluster_mut("replicas-agent")["typed_extension_protocol_options"];
        for (_, options) in options.as_object_mut().expect("an object") {
            options.as_object_mut().expect("an object").remove("http_filters").expect("shipped");
        }
    });
    // A busy machine must not make a probe fail here.
    let envoy = Envoy::start(set(probing(config, 1.0), "probe_timeout_ms", 1000))?;
    assert_all_ok(&envoy.client().burst(50, 2, |_| Request::get("/")));
    let rest = assert_probes_balance(&envoy);
    assert!(rest.probes("sent") > 0, "{rest:#?}");
    assert_eq!(rest.probes("rejected_no_host"), rest.probes("sent"), "{rest:#?}");
    // The reports on the answers are enough for steering.
    assert!(rest.steered() > 0, "{rest:#?}");
    Ok(())
}

#[test]
fn one_invented_endpoint_repeated_in_every_report_takes_no_share_from_honest_replicas() -> Result<()> {
    bed!();
    VERIFIED_OR_NOT.into_iter().try_for_each(one_invention)
}

fn one_invention(is_verified: bool) -> Result<()> {
    let honest = |addr| with_load(report(1, 5000, addr)).delay(Duration::from_millis(5));
    let backends = stand_ins(4, honest, honest)?;
    // Always the same address, which no cluster contains, and always idle.
    backends[0].set(with_load("0;1;203.0.113.1:80").delay(Duration::from_millis(5)));
    let config = probing(EnvoyConfig::for_replicas(&addrs(&backends))?, 2.0);
    let envoy = Envoy::start(verified(config, is_verified))?;
    warm(&envoy, 3);
    let before = envoy.prequal(SERVING)?;
    assert_all_ok(&envoy.client().burst(600, 4, |_| Request::get("/")));
    let rest = assert_probes_balance(&envoy);
    // If the filter chooses the invented endpoint, Envoy's own policy places the request. Only a few such choices are
    // allowed.
    let diverted = rest.other("prequal_diverted_total") - before.other("prequal_diverted_total");
    assert!(diverted <= 30, "{diverted} of 600: {rest:#?}");
    assert!(rest.steered() - before.steered() >= 500, "{rest:#?}");
    Ok(())
}

#[test]
fn malformed_requests_leave_no_request_in_flight() -> Result<()> {
    bed!();
    use std::io::{Read as _, Write as _};
    let fleet = Fleet::uniform(1, &Reply::ok())?;
    let agent = &fleet[0].agent;
    for message in [
        "GET / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nabc",
        "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: a\r\nbad header: x\r\n\r\n",
        "nonsense\r\n\r\n",
    ] {
        let mut stream = std::net::TcpStream::connect(agent.addr())?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        stream.write_all(message.as_bytes())?;
        let mut answer = Vec::new();
        // A refusal closes the connection, possibly with a reset after the answer.
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer).into_owned();
        assert!(answer.starts_with("HTTP/1.1 4"), "{message:?}: {answer:?}");
    }
    fleet.assert_idle();
    assert_eq!(fleet.served(), [0]);
    assert_eq!(prequal_testbed::Client::new(agent.addr()).get("/")?.status, 200);
    Ok(())
}

#[test]
fn a_dead_backend_is_a_502_with_a_reason() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(1, &Reply::ok())?;
    let agent = &fleet[0].agent;
    let client = prequal_testbed::Client::new(agent.addr());
    assert_eq!(client.get("/")?.status, 200);
    fleet[0].backend.set(Reply::ok().body(Body::Reset));
    let reply = client.get("/")?;
    assert_eq!(reply.status, 502);
    assert!(!reply.text().is_empty(), "a reason");
    fleet.assert_idle();
    let closed = Backend::start(Reply::ok())?.addr();
    let agent = Agent::start(closed)?;
    let reply = prequal_testbed::Client::new(agent.addr()).get("/")?;
    assert_eq!(reply.status, 502);
    assert_eq!(agent.rif()?, 0);
    Ok(())
}
