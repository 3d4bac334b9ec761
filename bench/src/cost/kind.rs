//! The kinds of Envoys whose costs are compared, each in front of any number of clusters.

use std::net::SocketAddr;

use anyhow::Result;
use prequal_testbed::{EnvoyConfig, Policy};
use serde_json::{Value, json};

use crate::deployment::CLUSTER;

/// Whether Prequal runs in an Envoy, and in which form.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum EnvoyKind {
    /// Envoy's round robin alone.
    Without,
    Filter,
    Native,
}

impl EnvoyKind {
    pub(super) const ALL: [Self; 3] = [Self::Without, Self::Filter, Self::Native];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Without => "without Prequal",
            Self::Filter => "filter",
            Self::Native => "native",
        }
    }

    /// An Envoy with one worker and `clusters` clusters of the same `replicas`, each under its [`path`].
    pub(super) fn config(self, replicas: &[SocketAddr], clusters: usize) -> Result<EnvoyConfig> {
        let first = match self {
            Self::Without => EnvoyConfig::for_replicas(replicas)?.policy(Policy::RoundRobin),
            Self::Filter => EnvoyConfig::for_replicas(replicas)?,
            Self::Native => EnvoyConfig::native_for_replicas(replicas)?,
        };
        let all = (1..clusters).fold(first, |config, index| {
            let config = config.add_cluster(&name(index), &path(index), replicas);
            if self == Self::Native { config.edit(|config| set_native(config, index)) } else { config }
        });
        Ok(match self {
            Self::Without => all.without_prequal().edit(|config| {
                let clusters = config.root_mut()["static_resources"]["clusters"].as_array_mut();
                clusters.into_iter().for_each(|clusters| clusters.retain(|cluster| !is_probing(cluster)));
            }),
            Self::Filter => all.filter_settings(|settings| {
                settings["clusters"] = (0..clusters).map(entry).collect();
            }),
            Self::Native => all,
        })
    }
}

/// The path under which a cluster is reached. Except for the first, no path is a prefix of another.
pub(super) fn path(cluster: usize) -> String {
    if cluster == 0 { "/".to_owned() } else { format!("/{}", name(cluster)) }
}

fn name(cluster: usize) -> String {
    if cluster == 0 { CLUSTER.to_owned() } else { format!("cluster-{cluster:04}") }
}

fn is_probing(cluster: &Value) -> bool {
    cluster["name"].as_str().is_some_and(|name| name.ends_with("-agent"))
}

/// A cluster's entry in the settings.
fn entry(cluster: usize) -> Value {
    let name = name(cluster);
    json!({"cluster": name, "probe_cluster": format!("{name}-agent"), "verified_probes": true})
}

/// Gives a copied cluster's policy the settings of its own cluster.
fn set_native(config: &mut EnvoyConfig, cluster: usize) {
    let policy = &mut config.cluster_mut(&name(cluster))["load_balancing_policy"]["policies"][0];
    policy["typed_extension_config"]["typed_config"]["lb_policy_config"]["value"] =
        json!(json!({"clusters": [entry(cluster)]}).to_string());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(config: &mut EnvoyConfig) -> Vec<String> {
        let clusters = config.root_mut()["static_resources"]["clusters"].as_array().unwrap();
        clusters.iter().map(|cluster| cluster["name"].as_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn every_cluster_has_a_probe_cluster_only_if_prequal_runs() {
        let replicas = ["127.0.0.1:1".parse().unwrap()];
        let of = |kind: EnvoyKind| names(&mut kind.config(&replicas, 3).unwrap());
        assert_eq!(of(EnvoyKind::Without), ["replicas", "cluster-0001", "cluster-0002"]);
        assert_eq!(of(EnvoyKind::Filter).len(), 6);
        assert_eq!(of(EnvoyKind::Native).len(), 6);
    }

    #[test]
    fn a_native_policy_names_its_own_cluster() {
        let mut config = EnvoyKind::Native.config(&["127.0.0.1:1".parse().unwrap()], 3).unwrap();
        let text = config.cluster_mut("cluster-0002").to_string();
        assert!(text.contains("cluster-0002-agent") && !text.contains("replicas-agent"), "{text}");
    }
}
