//! Envoy's own `client_side_weighted_round_robin` with the reports of agents or of the inbound role, without the filter
//! and without probes.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result};
use prequal_testbed::{
    AgentOptions, Backend, Client, Envoy, EnvoyConfig, Replica, Reply, Request, Seen, eventually,
};
use serde_json::{Value, json};

use crate::support::{assert_all_ok, bed};

/// Clusters of a fast and a slow replica: how their agents report load, and whether Envoy requests reports out of band.
const CLUSTERS: [(&str, &[&str], bool); 5] = [
    (SILENT, &[], false),
    ("text", &["--orca", "text"], false),
    ("json", &["--orca", "json"], false),
    ("binary", &["--orca", "binary"], false),
    ("oob", &["--orca-streams", "10"], true),
];
const POLICY: &str = "envoy.extensions.load_balancing_policies.client_side_weighted_round_robin";
/// The cluster of a fast and a slow replica behind Envoys in the inbound role, which report in different formats.
const INBOUND: &str = "inbound";
/// A cluster whose agents report nothing: its replicas get equal shares.
const SILENT: &str = "silent";
const HEADER: &str = "endpoint-load-metrics";
const HEADER_BIN: &str = "endpoint-load-metrics-bin";
/// Maximum number of requests, out of 100, that the slow replica may get.
const SPARED: u64 = 25;
const TRIES: usize = 10;

fn policy(out_of_band: bool) -> Value {
    let typed_config = json!({
        "@type": format!("type.googleapis.com/{POLICY}.v3.ClientSideWeightedRoundRobin"),
        "blackout_period": "0.1s", "weight_update_period": "0.1s",
        "enable_oob_load_report": out_of_band, "oob_reporting_period": "0.2s",
    });
    json!({"policies": [{"typed_extension_config": {"name": POLICY, "typed_config": typed_config}}]})
}

/// The shipped inbound configuration with two workers.
fn inbound(backend: &Backend, settings: &Value) -> Result<EnvoyConfig> {
    let mut settings = settings.clone();
    settings["role"] = json!("inbound");
    Ok(EnvoyConfig::inbound(backend.addr())?.concurrency(2).filter_text(&settings.to_string()))
}

#[test]
fn weighted_round_robin_spares_the_replica_that_agents_report_as_slow() -> Result<()> {
    bed!();
    let start = |(name, args, out_of_band): (&'static str, &[&str], bool)| {
        let load = ["--orca-window-ms", "1000", "--orca-limit", "64"];
        let args: Vec<String> = args.iter().chain(&load).map(ToString::to_string).collect();
        let options = AgentOptions { args, ..AgentOptions::default() };
        let replica = |ms| Replica::start_with(Reply::ok().delay(Duration::from_millis(ms)), &options);
        Ok((name, out_of_band, [replica(10)?, replica(80)?]))
    };
    let fleets = CLUSTERS.map(start).into_iter().collect::<Result<Vec<_>>>()?;
    let backends = [10, 80].map(|ms| Backend::start(Reply::ok().delay(Duration::from_millis(ms))));
    let backends = backends.into_iter().collect::<Result<Vec<_>>>()?;
    let beside = |(backend, format): (&Backend, &str)| {
        Envoy::start(inbound(
            backend,
            &json!({"orca": format, "orca_window_ms": 1000, "orca_limit": 64, "report": "probe_only"}),
        )?)
    };
    let servers = backends.iter().zip(["text", "json"]).map(beside).collect::<Result<Vec<_>>>()?;
    let mut addrs: Vec<(&str, bool, [SocketAddr; 2], [&Backend; 2])> = fleets
        .iter()
        .map(|(name, out_of_band, replicas)| {
            let backends = replicas.each_ref().map(|replica| &replica.backend);
            (*name, *out_of_band, replicas.each_ref().map(Replica::addr), backends)
        })
        .collect();
    let ([fast, slow], [before_fast, before_slow]) = (&backends[..], &servers[..]) else { unreachable!() };
    addrs.push((INBOUND, false, [before_fast.addr(), before_slow.addr()], [fast, slow]));
    let mut config = EnvoyConfig::shipped()?;
    for (name, _, addrs, _) in &addrs {
        config = config.add_cluster(name, &format!("/{name}/"), addrs);
    }
    let envoy = Envoy::start(config.without_prequal().edit(|config| {
        for (name, out_of_band, ..) in &addrs {
            let cluster = config.cluster_mut(name);
            cluster.as_object_mut().expect("a cluster").remove("lb_policy");
            cluster["load_balancing_policy"] = policy(*out_of_band);
        }
    }))?;

    let envoy = &envoy;
    // The slow replica's share in percent. Reports take a while to take effect, and a busy machine slows both replicas.
    let slow_share = |name: &str, backends: [&Backend; 2]| {
        let mut share = 100;
        let tries = if name == SILENT { 1 } else { TRIES };
        for _ in 0..tries {
            backends.iter().for_each(|backend| backend.clear());
            let path = format!("/{name}/");
            assert_all_ok(&envoy.client().burst(100, 8, move |_| Request::get(&path)));
            share = share.min(backends[1].served());
            if share <= SPARED {
                break;
            }
        }
        share
    };
    std::thread::scope(|scope| {
        let ask = |name, backends| scope.spawn(move || slow_share(name, backends));
        let shares: Vec<_> =
            addrs.iter().map(|(name, .., backends)| (*name, ask(*name, *backends))).collect();
        for (name, share) in shares {
            let share = share.join().expect("no failed request");
            let fair = if name == SILENT { 40..=60 } else { 0..=SPARED };
            eprintln!("{name}: the slow replica got {share} of 100");
            assert!(fair.contains(&share), "{name}: the slow replica got {share} of 100\n{}", envoy.log());
        }
    });
    let reply = envoy.client().get("/text/")?;
    assert!(reply.header("endpoint-load-metrics").is_some(), "removing it is left to the operator");
    let reports = envoy.stat("cluster.oob.lb_orca_oob.reports_received")?;
    let streams = fleets[4].2[0].agent.metrics()?["prequal_agent_orca_streams"];
    assert!(reports > 0 && streams == 1.0, "{reports} reports, {streams} streams");
    Ok(())
}

/// The value of the first metric `name` in a text report.
fn metric(report: &str, name: &str) -> Result<f64> {
    let fields = report.strip_prefix("TEXT ").with_context(|| format!("no text: {report}"))?.split(',');
    let value = fields.filter_map(|field| field.split_once('=')).find(|(field, _)| *field == name);
    let (_, value) = value.with_context(|| format!("no {name}: {report}"))?;
    Ok(value.parse()?)
}

#[test]
fn the_inbound_role_reports_what_all_its_workers_serve() -> Result<()> {
    bed!();
    let backend = Backend::start_on("127.0.0.1:0", |seen: &Seen| {
        let kind = if seen.path == "/grpc" { "application/grpc" } else { "text/plain" };
        let status = if seen.path == "/fails" { 500 } else { 200 };
        let delay = if seen.path == "/held" { 1000 } else { 5 };
        let reply = Reply::status(status).header("content-type", kind).delay(Duration::from_millis(delay));
        reply.header(HEADER, "TEXT cpu_utilization=0.9").header(HEADER_BIN, "AAAA")
    })?;
    // The window is so long that a request keeps its weight for the whole test. Rates are over 75 s, an eighth of the
    // window.
    let settings = json!({"orca": "text", "orca_for": "http", "orca_limit": 64, "orca_window_ms": 600_000});
    let envoy = Envoy::start(inbound(&backend, &settings)?)?;
    let rates_of = 75.0;
    // A worker counts from its first request on. Connections reach either worker.
    eventually("both workers serve", Duration::from_secs(20), || {
        assert_eq!(Client::new(envoy.addr()).get("/").expect("an answer").status, 200);
        let counts = envoy.inbound(envoy.addr()).ok()?;
        (counts.keys().filter(|name| name.starts_with("in_flight.")).count() == 2).then_some(())
    });
    let warm = envoy.inbound(envoy.addr())?["requests.success"] as f64;

    let path = |number: usize| if number.is_multiple_of(3) { "/fails" } else { "/" };
    let answers = envoy.client().burst(300, 8, move |number| Request::get(path(number)));
    assert!(answers.iter().all(Result::is_ok), "an answer to each");
    // Requests that clients abort count as ended, too.
    for _ in 0..10 {
        let before = backend.seen().len();
        let arrived = || backend.seen().len() > before;
        assert!(Client::new(envoy.addr()).abandon_when(Request::get("/held"), arrived));
    }
    let ended = || -> Option<f64> {
        let counts = envoy.inbound(envoy.addr()).ok()?;
        Some(counts.iter().filter(|(name, _)| name.starts_with("requests.")).map(|(_, n)| *n as f64).sum())
    };
    eventually("all have ended", Duration::from_secs(10), || (ended()? == warm + 310.0).then_some(()));
    let reports_of_both =
        eventually("the reports of either worker count all", Duration::from_secs(10), || {
            let least = ended()? - warm;
            let reports: Vec<String> = (0..8)
                .filter_map(|_| {
                    let reply = Client::new(envoy.addr()).get("/").ok()?;
                    assert!(reply.header(HEADER_BIN).is_none(), "the replica's own report must be removed");
                    Some(reply.header(HEADER)?.to_owned())
                })
                .collect();
            let most = ended()?;
            let whole = reports.iter().all(|report| {
                let ended = metric(report, "rps_fractional").expect("a rate") * rates_of;
                let failed = metric(report, "eps").expect("a rate") * rates_of;
                // A request from a few seconds ago counts as slightly less than one.
                (0.95 * least..=most + 0.5).contains(&ended) && (95.0..100.5).contains(&failed)
            });
            (whole && reports.len() == 8).then_some(reports)
        });
    for report in &reports_of_both {
        assert!(metric(report, "application_utilization")? > 0.0, "{report}");
        assert!(metric(report, "named_metrics.prequal_base_latency_us")? >= 5000.0, "{report}");
    }
    let reply = envoy.client().get("/")?;
    assert_eq!(reply.headers.get_all(HEADER).iter().count(), 1, "{:?}", reply.headers);
    assert!(reply.header("x-prequal-load").is_some(), "Prequal's own report must be there too");
    let other = envoy.client().get("/grpc")?;
    assert_eq!(
        other.header(HEADER),
        Some("TEXT cpu_utilization=0.9"),
        "a response of the other class keeps the replica's report"
    );
    assert_eq!(other.header(HEADER_BIN), Some("AAAA"));
    Ok(())
}
