//! Once a second, queries the load generator, every agent and the Envoy with Prequal in parallel.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prequal_stats::Sample;
use tokio::task::JoinSet;

use crate::load;
use crate::page::Page;
use crate::page::endpoints::SERVICE_PORT;
use crate::web::Answer;

/// Port of the agents' metrics.
pub(crate) const AGENT_ADMIN: u16 = 9902;

/// Port of Envoy's admin interface.
pub(crate) const ENVOY_ADMIN: u16 = 9901;

const PERIOD: Duration = Duration::from_secs(1);

/// A program that has not answered by then counts as down: a hanging container must not make the page hang.
const LIMIT: Duration = Duration::from_millis(800);

pub(super) async fn for_ever(page: Arc<Page>) {
    let mut tick = tokio::time::interval(PERIOD);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        once(&page).await;
    }
}

async fn once(page: &Arc<Page>) {
    let mut asked = JoinSet::new();
    for number in 1..=page.args.replicas {
        let page = page.clone();
        asked.spawn(async move {
            look_up(&page, number).await;
            agent(&page, number).await;
        });
    }
    let (loaded, balanced, based) = (page.clone(), page.clone(), page.clone());
    asked.spawn(async move { load(&loaded).await });
    asked.spawn(async move { balancer(&balanced).await });
    asked.spawn(async move { baseline(&based).await });
    while asked.join_next().await.is_some() {}

    let now = Instant::now();
    let mut state = page.state();
    state.expire(now);
    if state.endpoints.stale(now)
        && let Err(error) = state.endpoints.write()
    {
        eprintln!("prequal-demo: {error:#}");
    }
}

async fn get(page: &Page, url: &str) -> Option<Answer> {
    page.client.get(url, LIMIT).await.ok().filter(|answer| answer.status.is_success())
}

/// The engine assigns addresses to containers; this finds them by name.
async fn look_up(page: &Page, number: u16) {
    let name = format!("replica-{number}:{SERVICE_PORT}");
    let Ok(Ok(mut found)) = tokio::time::timeout(LIMIT, tokio::net::lookup_host(name)).await else { return };
    if let Some(address) = found.find(|address| address.is_ipv4()) {
        page.state().endpoints.found(number, address);
    }
}

async fn agent(page: &Page, number: u16) {
    let answer = get(page, &format!("http://replica-{number}:{AGENT_ADMIN}/metrics")).await;
    let mut state = page.state();
    let agent = state.agents.entry(number).or_default();
    agent.up = answer.is_some();
    let Some(answer) = answer else { return };
    let mut values = BTreeMap::new();
    for (name, value) in samples(&String::from_utf8_lossy(&answer.body)) {
        match name {
            "prequal_agent_rif" => values.insert("rif".to_owned(), value),
            "prequal_agent_latency_median_seconds" => values.insert("latency_ms".to_owned(), value * 1e3),
            "prequal_agent_base_latency_seconds" => values.insert("base_ms".to_owned(), value * 1e3),
            "prequal_agent_knee" => values.insert("knee".to_owned(), value),
            "prequal_agent_requests_total{class=\"success\"}" => values.insert("success".to_owned(), value),
            "prequal_agent_requests_total{class=\"failure\"}" => values.insert("failure".to_owned(), value),
            _ => None,
        };
    }
    agent.readings.push(Instant::now(), values);
}

async fn load(page: &Page) {
    // Only newer windows are requested. A restarted generator is noticed by its clock, which has gone back.
    let since = page.state().newest();
    let Some(answer) = get(page, &format!("http://load:{}/stats?since={since}", load::PORT)).await else {
        return;
    };
    if let Ok(stats) = serde_json::from_slice(&answer.body) {
        page.state().load(&stats);
    }
}

async fn balancer(page: &Page) {
    let answer = get(page, &format!("http://envoy-prequal:{ENVOY_ADMIN}{}", prequal_stats::PATH)).await;
    let mut state = page.state();
    state.balancer_up = answer.is_some();
    let Some(answer) = answer else { return };
    let text = String::from_utf8_lossy(&answer.body);
    let values = prequal_stats::samples(&text)
        .filter_map(|sample| Some((short(&sample)?.to_owned(), sample.value as f64)))
        .collect();
    state.balancer.push(Instant::now(), values);
}

/// The short name of a statistic of the filter.
fn short(sample: &Sample<'_>) -> Option<&'static str> {
    match (sample.metric, sample.kind) {
        ("picks_total", "cold") => Some("cold"),
        ("picks_total", "hot") => Some("hot"),
        ("picks_total", "trial") => Some("trial"),
        ("picks_total", "fallback") => Some("fallback"),
        ("probes_total", "sent") => Some("sent"),
        ("diverted_total", _) => Some("diverted"),
        ("pool_occupancy", _) => Some("pool_occupancy"),
        ("theta_rif", _) => Some("theta_rif"),
        ("members", _) => Some("members"),
        ("ejected", _) => Some("ejected"),
        _ => None,
    }
}

async fn baseline(page: &Page) {
    let url = format!("http://envoy-baseline:{ENVOY_ADMIN}/runtime?format=json");
    let Some(answer) = get(page, &url).await else { return };
    let text = String::from_utf8_lossy(&answer.body);
    let runtime: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    let value = runtime["entries"]["baseline.round_robin"]["final_value"].as_str().unwrap_or("0").to_owned();
    let policy = if value == "0" { "least_request" } else { "round_robin" };
    policy.clone_into(&mut page.state().baseline);
}

/// The samples of a Prometheus text, with their labels as printed.
fn samples(text: &str) -> impl Iterator<Item = (&str, f64)> {
    text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
        let (name, value) = line.rsplit_once(' ')?;
        Some((name, value.parse().ok()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filters_statistics_are_recognised() {
        for (line, expected) in [
            ("wasmcustom.prequal_picks_total.cluster=replicas.branch=cold: 1", Some("cold")),
            ("wasmcustom.prequal_probes_total.cluster=replicas.result=sent: 1", Some("sent")),
            ("wasmcustom.prequal_probes_total.cluster=replicas.result=used: 1", None),
            ("wasmcustom.prequal_theta_rif.cluster=replicas: 1", Some("theta_rif")),
            ("wasmcustom.prequal_ejected.cluster=replicas: 1", Some("ejected")),
        ] {
            let sample = prequal_stats::samples(line).next().unwrap();
            assert_eq!(short(&sample), expected, "{line}");
        }
    }

    #[test]
    fn prometheus_text_is_parsed() {
        let text = "# TYPE a gauge\na 3\nb{class=\"x\"} 0.5\nnonsense\n";
        assert_eq!(samples(text).collect::<Vec<_>>(), [("a", 3.0), ("b{class=\"x\"}", 0.5)]);
    }
}
