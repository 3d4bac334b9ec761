//! One reading of one admin port.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

/// Maximum size of an answer, bytes: `/clusters` has about 1.3 KB per host, and each host is in two clusters.
const MAX_BODY: u64 = 64 << 20;

/// Time within which an admin port must answer.
const LIMIT: Duration = Duration::from_secs(5);

/// Path of the filter's statistics and of the number of module restarts.
const STATS: &str = "/stats?filter=prequal_%7Cvm_reload_success";

/// Name, cluster and kind of a statistic of the filter: [`prequal_stats::Sample`].
pub(super) type StatisticKey = (String, String, String);

#[derive(Debug)]
pub(super) struct Admin {
    /// URL as shown, without a trailing slash.
    pub(super) url: String,
    agent: ureq::Agent,
}

/// Content of one reading of an admin port.
#[derive(Clone, Debug)]
pub(super) struct Scrape {
    pub(super) at: Instant,
    pub(super) samples: BTreeMap<StatisticKey, u64>,
    /// Number of module restarts after a crash, for all wasm filters of this Envoy together.
    pub(super) reloads: u64,
    pub(super) hosts: Vec<HostStatus>,
}

/// One host of one cluster.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct HostStatus {
    pub(super) cluster: String,
    pub(super) address: String,
    pub(super) active: u64,
    pub(super) success: u64,
    pub(super) errors: u64,
    /// Reasons why Envoy does not use the host; empty if there are none.
    pub(super) trouble: String,
}

impl Admin {
    /// Creates the client of the admin port at `url`.
    ///
    /// # Errors
    /// If `url` cannot be the URL of an admin port.
    pub(super) fn new(url: &str) -> Result<Self> {
        ensure!(!url.starts_with("https://"), "`{url}`: admin interfaces use plain HTTP");
        let host = url.strip_prefix("http://").unwrap_or(url).trim_end_matches('/');
        let plain =
            !host.is_empty() && !host.contains(['/', '?', '#', '@']) && !host.contains(char::is_whitespace);
        ensure!(plain, "`{url}` must be http://HOST:PORT");
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(LIMIT))
            .http_status_as_error(false)
            .max_redirects(0)
            // A proxy from the environment is meant for outside addresses, not for a nearby admin port.
            .proxy(None)
            .build()
            .into();
        Ok(Self { url: format!("http://{host}"), agent })
    }

    /// Reads the admin port once.
    ///
    /// # Errors
    /// If there is no answer, if the answer is not Envoy's, or if this Envoy has no filter that chooses replicas.
    pub(super) fn scrape(&self) -> Result<Scrape> {
        let stats = self.get(STATS, "Envoy's admin interface")?;
        let at = Instant::now();
        let clusters = self.get("/clusters?format=json", "Envoy's admin interface")?;
        let clusters: Value =
            serde_json::from_str(&clusters).ok().filter(Value::is_object).with_context(|| {
                format!("{}: this is not Envoy's admin interface: /clusters has another format", self.url)
            })?;
        let samples: BTreeMap<StatisticKey, u64> = prequal_stats::samples(&stats)
            .map(|sample| ((sample.metric.into(), sample.cluster.into(), sample.kind.into()), sample.value))
            .collect();
        if samples.is_empty() {
            ensure!(
                !stats.contains("prequal_inbound_"),
                "{}: here the filter has the inbound role and chooses nothing: look at the Envoys of its clients",
                self.url
            );
            bail!(
                "{}: neither Prequal's filter nor its native module is active: this Envoy has no `prequal_` statistics. \
                 Look at its log, and run `prequal check` on its /config_dump",
                self.url
            );
        }
        let reloads =
            stats.lines().filter_map(|line| line.split_once(".vm_reload_success: ")?.1.parse::<u64>().ok());
        Ok(Scrape { at, samples, reloads: reloads.sum(), hosts: hosts(&clusters) })
    }

    /// Returns the body at `path`. `whose` names the expected owner, for the error message.
    pub(super) fn get(&self, path: &str, whose: &str) -> Result<String> {
        let url = &self.url;
        let mut response = self
            .agent
            .get(format!("{url}{path}"))
            .call()
            .with_context(|| format!("{url} cannot be reached"))?;
        let status = response.status();
        ensure!(
            status == 200,
            "{url}: this is not {whose}, or it denies access: the answer to {path} has status {status}"
        );
        let body = response.body_mut().with_config().limit(MAX_BODY).read_to_string();
        body.with_context(|| format!("{url}: {path} cannot be read"))
    }
}

/// Returns the hosts in `/clusters?format=json`. An absent value reads as zero, because Envoy leaves zeros out.
fn hosts(clusters: &Value) -> Vec<HostStatus> {
    let list = |value: &Value, key: &str| value[key].as_array().cloned().unwrap_or_default();
    let mut hosts = Vec::new();
    for cluster in list(clusters, "cluster_statuses") {
        for host in list(&cluster, "host_statuses") {
            let stats = list(&host, "stats");
            let stat = |name: &str| {
                let stat = stats.iter().find(|stat| stat["name"] == name);
                let value = stat.map(|stat| &stat["value"]);
                value.and_then(|value| value.as_u64().or_else(|| value.as_str()?.parse().ok())).unwrap_or(0)
            };
            hosts.push(HostStatus {
                cluster: cluster["name"].as_str().unwrap_or_default().to_owned(),
                address: address(&host["address"]),
                active: stat("rq_active"),
                success: stat("rq_success"),
                errors: stat("rq_error"),
                trouble: trouble(&host["health_status"]),
            });
        }
    }
    hosts
}

fn address(address: &Value) -> String {
    let socket = &address["socket_address"];
    match (socket["address"].as_str(), socket["port_value"].as_u64()) {
        (Some(ip), Some(port)) if ip.contains(':') => format!("[{ip}]:{port}"),
        (Some(ip), Some(port)) => format!("{ip}:{port}"),
        _ => address["pipe"]["path"].as_str().unwrap_or("?").to_owned(),
    }
}

/// Returns the health flags that count against a host.
fn trouble(health: &Value) -> String {
    let flags = health.as_object().into_iter().flatten();
    let mut words: Vec<String> = flags
        .filter(|(_, value)| value.as_bool() == Some(true))
        .map(|(name, _)| name.trim_start_matches("failed_").replace('_', " "))
        .collect();
    if let Some(eds) =
        health["eds_health_status"].as_str().filter(|status| *status != "HEALTHY" && *status != "UNKNOWN")
    {
        words.push(format!("eds {}", eds.to_lowercase()));
    }
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn hosts_are_read_and_zeros_filled_in() {
        let clusters = json!({"cluster_statuses": [{"name": "a", "host_statuses": [
            {"address": {"socket_address": {"address": "::1", "port_value": 80}},
                "stats": [{"name": "rq_active", "value": "3"}, {"name": "rq_error", "value": 2}],
                "health_status": {"eds_health_status": "DRAINING", "failed_outlier_check": true}},
            {"address": {"pipe": {"path": "/x"}}, "stats": 7}]}, {"name": 3}, null]});
        let host = |address: &str, active, errors, trouble: &str| HostStatus {
            cluster: "a".into(),
            address: address.into(),
            active,
            errors,
            trouble: trouble.into(),
            ..HostStatus::default()
        };
        assert_eq!(
            hosts(&clusters),
            [host("[::1]:80", 3, 2, "outlier check, eds draining"), host("/x", 0, 0, "")]
        );
        for odd in [json!(null), json!({"cluster_statuses": {"a": 1}}), json!([])] {
            assert_eq!(hosts(&odd), []);
        }
    }

    #[test]
    fn an_admin_is_a_host_and_a_port() {
        for (text, url) in
            [("127.0.0.1:9901", "http://127.0.0.1:9901"), ("http://envoy:1/", "http://envoy:1")]
        {
            assert_eq!(Admin::new(text).unwrap().url, url);
        }
        for text in ["", "http://", "https://a:1", "http://a/b", "a b", "x@y:1"] {
            assert!(Admin::new(text).is_err(), "{text}");
        }
    }
}
