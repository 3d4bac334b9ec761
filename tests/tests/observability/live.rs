//! A real fleet behind a real Envoy, scraped by a real Prometheus while things break one by one.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result};
use prequal_testbed::{
    Agent, AgentOptions, Body, Client, Envoy, EnvoyConfig, Fleet, Prometheus, Reply, Request, bed,
    crash_module, handle, http_get, missing_prometheus, needs,
};
use serde_json::{Value, json};
use tokio::task::AbortHandle;

use crate::operations::{self, Metrics};
use crate::shipped::{self, Query, Rule};

const MS: fn(u64) -> Duration = Duration::from_millis;

/// Number of replicas: few enough for two cores, and enough that four unhealthy ones do not cause panic.
const REPLICAS: usize = 10;

/// Maximum time until an effect shows.
const LIMIT: Duration = Duration::from_secs(25);

/// Queries of the dashboard that are correctly empty while everything is healthy.
const EMPTY_WHEN_HEALTHY: [&str; 1] = ["Alerts A"];

/// The alerts that must be raised as more and more things break, one list per step. Every alert is in one of them.
const SOME_UNHEALTHY: &[&str] = &[
    "PrequalReplicaShareLow",
    "PrequalReplicaShareHigh",
    "PrequalReplicaSlow",
    "PrequalReplicaBusy",
    "PrequalReplicaFailing",
    "PrequalAgentDown",
    "PrequalCertificateExpires",
    "PrequalMembersMismatch",
    "PrequalEjectedLong",
    "PrequalReportsRejected",
    "PrequalVmReloads",
];
const SERVED_BY_FEWER: &[&str] = &["PrequalDiverted"];
const PROBED_BY_FEWER: &[&str] = &["PrequalReplicaUnprobed"];
const NO_PROBE_HOSTS: &[&str] = &["PrequalProbesUndispatched"];
const ALL_FAIL: &[&str] = &["PrequalFleetFailing", "PrequalPanic"];
const ALL_GONE: &[&str] =
    &["PrequalFallbackHigh", "PrequalPoolEmpty", "PrequalProbesFailing", "PrequalSyncWaits"];
const ENVOY_GONE: &[&str] = &["PrequalEnvoyDown"];
const NO_FILTER: &[&str] = &["PrequalFilterMissing"];

#[test]
fn every_query_answers_on_a_live_fleet_and_every_alert_can_fire() -> Result<()> {
    let module = crash_module();
    bed!(std::slice::from_ref(&module));
    needs!(missing_prometheus());
    let rules = shipped::rules()?;
    let phases = [
        SOME_UNHEALTHY,
        SERVED_BY_FEWER,
        PROBED_BY_FEWER,
        NO_PROBE_HOSTS,
        ALL_FAIL,
        ALL_GONE,
        ENVOY_GONE,
        NO_FILTER,
    ];
    let shown: BTreeSet<&str> = phases.concat().into_iter().collect();
    let alerts: BTreeSet<&str> = rules.iter().filter_map(|rule| rule.alert.as_deref()).collect();
    assert_eq!(alerts, shown, "the steps here must raise every alert, and no other");

    let documented = operations::documented()?;
    let healthy = Reply::ok().delay(MS(20)).header("endpoint-load-metrics", "TEXT cpu_utilization=0.5");
    let reading =
        AgentOptions { args: vec!["--orca-from-backend".into(), "utilization".into()], ..Default::default() };
    let mut fleet = Fleet::start_with(std::iter::repeat_n(healthy, REPLICAS), &reading)?;
    let addrs = fleet.addrs();
    let config = EnvoyConfig::for_replicas(&addrs)?
        .module(&module)
        .concurrency(2)
        .eds(&["replicas", "replicas-agent"])
        .filter_settings(|settings| {
            let cluster = &mut settings["clusters"][0];
            cluster["route_modes"] = json!({"ask": "sync"});
            // On two busy cores, answers are sometimes late, which this test does not check.
            cluster["probe_timeout_ms"] = json!(500);
            cluster["sync_deadline_ms"] = json!(100);
        })
        .edit(|config| {
            let mut route = config.routes_mut().last().expect("a route").clone();
            route["name"] = json!("ask");
            route["match"] = json!({"prefix": "/ask"});
            let routes = config.routes_mut();
            routes.insert(routes.len() - 1, route);
        });
    let mut envoy = Envoy::start(config)?;
    let traffic = Traffic::start(&envoy);
    let certificate = Certificate::expiring(60)?;
    let secure = Agent::start_with(fleet[0].backend.addr(), &certificate.options())?;
    let bed = Bed { prometheus: scraping(&envoy, &fleet, &secure)?, rules };

    bed.is_healthy(&EMPTY_WHEN_HEALTHY, &[])?;
    let mut exposed = exposed(&envoy, &fleet, &secure)?;
    // The label of `build_info` differs in each release.
    exposed.remove("prequal_agent_build_info");
    assert_eq!(documented, exposed, "docs/reference/metrics.md must list what is exposed");

    fleet[0].backend.set(Reply::ok().delay(MS(300)));
    fleet[1].backend.set(Reply::ok().body(Body::Hang));
    certificate.renew(3)?;
    // A client that ignores load sends requests directly.
    let direct = Traffic::hang(&fleet[1].agent);
    fleet[2].backend.set(Reply::status(503));
    fleet[3].agent.kill();
    let elsewhere = AgentOptions {
        listen: addrs[4].to_string(),
        advertise: Some("192.0.2.1:1".into()),
        ..Default::default()
    };
    fleet[4].agent.kill();
    fleet[4].agent = Agent::start_with(fleet[4].backend.addr(), &elsewhere)?;
    // This replica is fast, because it does nothing.
    fleet[5].backend.set(Reply::status(404));
    let crash = envoy.client().send(Request::get("/").header("x-crash-prequal", "1"))?;
    assert_eq!(crash.status, 503);
    bed.raises("some replicas are unhealthy", SOME_UNHEALTHY)?;
    bed.shows(&bed.only(&EMPTY_WHEN_HEALTHY)?)?;
    drop(direct);

    // Remove six replicas, among them the one that every request prefers.
    envoy.set_endpoints("replicas", &addrs[6..])?;
    bed.raises("Envoy serves from fewer than it probes", SERVED_BY_FEWER)?;
    envoy.set_endpoints("replicas", &addrs)?;
    envoy.set_endpoints("replicas-agent", &addrs[..8])?;
    bed.raises("Envoy probes fewer than it serves from", PROBED_BY_FEWER)?;
    envoy.set_endpoints("replicas-agent", &[])?;
    bed.raises("the probe cluster is empty", NO_PROBE_HOSTS)?;
    envoy.set_endpoints("replicas-agent", &addrs)?;

    for replica in fleet.iter() {
        replica.backend.set(Reply::status(503));
    }
    bed.raises("all replicas fail", ALL_FAIL)?;
    for replica in fleet.iter_mut() {
        replica.agent.kill();
    }
    bed.raises("no agent is left", ALL_GONE)?;

    let admin = envoy.admin();
    drop(traffic);
    drop(envoy);
    bed.raises("Envoy is gone", ENVOY_GONE)?;
    let bare = EnvoyConfig::for_replicas(&addrs)?.without_prequal().edit(|config| {
        config.root_mut()["admin"]["address"]["socket_address"]["port_value"] = json!(admin.port());
    });
    let _bare = Envoy::start(bare)?;
    bed.raises("an Envoy without the filter", NO_FILTER)?;
    bed.no_rule_failed()
}

/// Queries about what the native module does not have: a VM, synchronous mode, stored bytes that could be damaged.
const NOT_NATIVE: [&str; 10] = [
    "VM reloads A",
    "Waits by end A",
    "Wait A",
    "Wait B",
    "Wait C",
    "Answers per decision A",
    "Reloads, replaced blobs, dropped updates A",
    "Reloads, replaced blobs, dropped updates B",
    "Reloads, replaced blobs, dropped updates C",
    "Reloads, replaced blobs, dropped updates D",
];

/// Prometheus gives the native module's metrics the filter's names, so that the same dashboard and rules fit.
///
/// The module knows the fleet and needs no discovery probes, so a replica that reports its load on its responses is
/// probed only about twice a minute.
#[test]
fn dashboard_and_rules_fit_the_native_module() -> Result<()> {
    bed!();
    needs!(missing_prometheus());
    let fleet = Fleet::start(std::iter::repeat_n(Reply::ok().delay(MS(20)), REPLICAS))?;
    let envoy = Envoy::start(EnvoyConfig::native_for_replicas(&fleet.addrs())?.concurrency(2))?;
    let _traffic = Traffic::start(&envoy);
    let secure = Agent::start(fleet[0].backend.addr())?;
    let bed = Bed { prometheus: scraping(&envoy, &fleet, &secure)?, rules: shipped::rules()? };
    bed.is_healthy(&[&EMPTY_WHEN_HEALTHY[..], &NOT_NATIVE[..]].concat(), &["PrequalReplicaUnprobed"])?;
    bed.only(&NOT_NATIVE)?;
    bed.no_rule_failed()
}

/// Prometheus with the shipped configuration, except for its targets and shorter intervals.
fn scraping(envoy: &Envoy, fleet: &Fleet, secure: &Agent) -> Result<Prometheus> {
    let mut config = shipped::yaml("prometheus.yml")?;
    config["global"] = json!({
        "scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms",
    });
    config["rule_files"] = json!(["rules.yaml"]);
    for job in config["scrape_configs"].as_array_mut().context("no jobs")? {
        let targets: Vec<String> = match job["job_name"].as_str() {
            Some("prequal-envoy") => vec![envoy.admin().to_string()],
            _ => fleet.iter().map(|replica| replica.agent.admin().to_string()).collect(),
        };
        job["static_configs"][0]["targets"] = json!(targets);
        if job["job_name"] == "prequal-agents"
            && let Some(configs) = job["static_configs"].as_array_mut()
        {
            configs.push(json!({"targets": [secure.admin().to_string()], "labels": {"cluster": "secure"}}));
        }
    }
    Prometheus::start(&config, &shipped::rules_text()?)
}

/// The metrics that Envoy and agents expose, unfiltered.
fn exposed(envoy: &Envoy, fleet: &Fleet, secure: &Agent) -> Result<Metrics> {
    let mut pages = vec![envoy.admin_get("/stats/prometheus")?, http_get(secure.admin(), "/metrics")?];
    for replica in fleet.iter() {
        pages.push(http_get(replica.agent.admin(), "/metrics")?);
    }
    let mut all = Metrics::new();
    for (name, values) in pages.iter().flat_map(|page| operations::exposed(page)) {
        all.entry(name).or_default().extend(values);
    }
    Ok(all)
}

/// The certificate and key of an agent that has its own cluster.
struct Certificate {
    dir: tempfile::TempDir,
}

impl Certificate {
    fn expiring(days: u64) -> Result<Self> {
        let certificate = Self { dir: tempfile::tempdir()? };
        certificate.renew(days)?;
        Ok(certificate)
    }

    /// Replaces the files; the agent reads the new ones by itself.
    fn renew(&self, days: u64) -> Result<()> {
        let mut params = rcgen::CertificateParams::new(vec!["localhost".to_owned()])?;
        let until = SystemTime::now() + Duration::from_secs(days * 86_400);
        params.not_after = until.into();
        let key = rcgen::KeyPair::generate()?;
        std::fs::write(self.path("cert.pem"), params.self_signed(&key)?.pem())?;
        std::fs::write(self.path("key.pem"), key.serialize_pem())?;
        Ok(())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn options(&self) -> AgentOptions {
        let path = |name| self.path(name).display().to_string();
        let args = ["--tls-cert".into(), path("cert.pem"), "--tls-key".into(), path("key.pem")].to_vec();
        AgentOptions { args, ..Default::default() }
    }
}

struct Bed {
    prometheus: Prometheus,
    rules: Vec<Rule>,
}

impl Bed {
    /// Waits until every query of the dashboard and every recording rule yields numbers, and no alert does. Exceptions
    /// are the queries in `empty`, and the alerts in `hasty`, for which the tests' window is too short.
    fn is_healthy(&self, empty: &[&str], hasty: &[&str]) -> Result<()> {
        let dashboard = shipped::dashboard()?;
        self.variables_have_values(&dashboard)?;
        let mut queries = shipped::queries(&dashboard)?;
        queries.retain(|query| !empty.contains(&query.name.as_str()));
        assert!(queries.len() > 50, "the dashboard was not read: {}", queries.len());
        let recording = self.rules.iter().filter(|rule| rule.alert.is_none());
        queries.extend(recording.map(|rule| Query { name: rule.expr.clone(), expr: rule.expr.clone() }));
        self.shows(&queries)?;
        let start = Instant::now();
        loop {
            let mut raised = Vec::new();
            for rule in &self.rules {
                if let Some(alert) = &rule.alert
                    && !hasty.contains(&alert.as_str())
                    && let samples = self.prometheus.query(&rule.expr)?
                    && !samples.is_empty()
                {
                    raised.push(format!("{alert}: {samples:?}"));
                }
            }
            if raised.is_empty() {
                return Ok(());
            }
            assert!(start.elapsed() < LIMIT, "raised although everything is healthy: {raised:#?}");
            std::thread::sleep(MS(100));
        }
    }

    fn variables_have_values(&self, dashboard: &Value) -> Result<()> {
        let variables = dashboard["templating"]["list"].as_array().context("no variables")?;
        let mut asked = 0;
        for variable in variables.iter().filter(|variable| variable["type"] == "query") {
            let query = variable["query"]["query"].as_str().context("a variable without a query")?;
            let inner = query.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')'));
            let (selector, label) =
                inner.and_then(|inner| inner.rsplit_once(", ")).context("label_values")?;
            let selector = shipped::replaced(selector)?;
            prequal_testbed::eventually(query, LIMIT, || {
                let values = self.prometheus.label_values(label, &selector).ok()?;
                (!values.is_empty()).then_some(())
            });
            asked += 1;
        }
        assert_eq!(asked, 3, "cluster, Envoy, agent");
        Ok(())
    }

    /// The queries of the dashboard with these names.
    fn only(&self, names: &[&str]) -> Result<Vec<Query>> {
        let mut queries = shipped::queries(&shipped::dashboard()?)?;
        queries.retain(|query| names.contains(&query.name.as_str()));
        assert_eq!(queries.len(), names.len(), "{names:?}");
        Ok(queries)
    }

    /// Waits until each of `queries` has yielded a number.
    fn shows(&self, queries: &[Query]) -> Result<()> {
        let start = Instant::now();
        let mut left: Vec<&Query> = queries.iter().collect();
        loop {
            let mut empty = Vec::new();
            for query in left {
                if !self.prometheus.query(&query.expr)?.iter().any(is_number) {
                    empty.push(query);
                }
            }
            left = empty;
            if left.is_empty() {
                return Ok(());
            }
            assert!(start.elapsed() < LIMIT, "without data: {left:#?}");
            std::thread::sleep(MS(100));
        }
    }

    /// Waits until each of `alerts` has had a sample since the call.
    fn raises(&self, what: &str, alerts: &[&str]) -> Result<()> {
        let wanted = self.rules.iter().filter_map(|rule| {
            let alert = rule.alert.clone().filter(|alert| alerts.contains(&alert.as_str()))?;
            Some(Query { name: format!("{what}: {alert}"), expr: rule.expr.clone() })
        });
        let start = Instant::now();
        self.shows(&wanted.collect::<Vec<_>>())?;
        println!("{what}: {:.1} s", start.elapsed().as_secs_f64());
        Ok(())
    }

    /// Prometheus has evaluated every rule repeatedly during the whole test: none may be in error.
    fn no_rule_failed(&self) -> Result<()> {
        let groups = self.prometheus.api("rules")?;
        let groups = groups["groups"].as_array().context("no groups")?;
        let evaluated: Vec<&Value> =
            groups.iter().filter_map(|group| group["rules"].as_array()).flatten().collect();
        assert_eq!(evaluated.len(), self.rules.len());
        for rule in evaluated {
            assert_eq!(rule["health"], "ok", "{rule}");
        }
        Ok(())
    }
}

fn is_number(sample: &Value) -> bool {
    sample["value"][1].as_str().and_then(|text| text.parse::<f64>().ok()).is_some_and(f64::is_finite)
}

/// Requests that continue until this is dropped.
struct Traffic(Vec<AbortHandle>);

impl Traffic {
    /// Eight callers, some of whose requests first wait for probes (synchronous mode).
    fn start(envoy: &Envoy) -> Self {
        let client = envoy.client();
        let caller = |first: usize| {
            let client = client.clone();
            async move {
                for turn in first.. {
                    let request = Request::get(if turn % 4 == 0 { "/ask" } else { "/" });
                    let _ = tokio::time::timeout(MS(1000), client.send_async(request)).await;
                    tokio::time::sleep(MS(20)).await;
                }
            }
        };
        Self((0..8).map(|first| handle().spawn(caller(first)).abort_handle()).collect())
    }

    /// A dozen requests to one replica that are never aborted.
    fn hang(agent: &Agent) -> Self {
        let client = Client::new(agent.addr());
        let request = || {
            let client = client.clone();
            async move { client.send_async(Request::get("/")).await.map(drop) }
        };
        Self((0..12).map(|_| handle().spawn(request()).abort_handle()).collect())
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}
