//! A cluster with the native module's policy, and the extensions that belong to it.

use prequal_core::client::settings::ClusterConfig;
use prequal_core::config::FilterConfig;
use serde_json::Value;

use super::codes::*;
use super::source::Source;
use super::{At, Findings, clusters, settings};

/// Field of the policy that holds the settings.
const SETTINGS_KEY: &str = "lb_policy_config";

/// Type of the module's HTTP filters, in clusters and in listeners.
pub(super) const FILTER: &str = "DynamicModuleFilter";

/// `filter_name` of the module's filter in a listener. With any other name, it is the filter of a cluster.
pub(super) const DETOUR: &str = "prequal_detour";

/// A cluster with the module's policy.
pub(super) struct Balanced<'a> {
    pub(super) cluster: At<'a>,
    pub(super) name: &'a str,
    pub(super) module: &'a Value,
    /// Path of the settings, and their entry for this cluster; `None` if there is no valid entry.
    pub(super) entry: Option<(String, ClusterConfig)>,
}

/// Returns the cluster if it has the module's policy. Checks the policy's settings.
pub(super) fn find<'a>(
    source: &Source<'_>,
    cluster: &At<'a>,
    findings: &mut Findings,
) -> Option<Balanced<'a>> {
    let policy = clusters::policy(cluster, "DynamicModulesLoadBalancerConfig")?;
    let module = module(&policy)?;
    let named =
        policy.text("lb_policy_name").is_some_and(|name| name.contains("prequal")) || is_prequals(module);
    if !named && !settings::are_prequals(&policy, SETTINGS_KEY) {
        return None;
    }
    let name = cluster.text("name")?;
    let parse = |text: &str| FilterConfig::parse_native(text).map_err(|errors| errors.0);
    let read = settings::read(&policy, SETTINGS_KEY, parse, findings);
    let entry = read.and_then(|(path, settings)| {
        let entry = own_entry(source, name, settings, &path, findings)?;
        Some((path, entry))
    });
    Some(Balanced { cluster: cluster.clone(), name, module, entry })
}

/// Returns the entry that a cluster's settings have for the cluster itself.
fn own_entry(
    source: &Source<'_>,
    name: &str,
    settings: FilterConfig,
    path: &str,
    findings: &mut Findings,
) -> Option<ClusterConfig> {
    let mut all_exist = true;
    for entry in &settings.clusters {
        all_exist &= clusters::find(source, &entry.cluster, CLUSTER_ABSENT, path, findings).is_some();
    }
    let own = settings.clusters.into_iter().find(|entry| entry.cluster == name);
    // An entry for a cluster that does not exist is probably meant for this cluster, with its name misspelled.
    if own.is_none() && all_exist {
        findings.push(ROUTE_UNNAMED, path, name);
    }
    own
}

/// Returns the module that an extension's configuration loads: its name, or the source of its file.
pub(super) fn module<'a>(extension: &At<'a>) -> Option<&'a Value> {
    let module = extension.get("dynamic_module_config")?;
    Some(module.get("module").or_else(|| module.get("name"))?.value)
}

pub(super) fn is_prequals(module: &Value) -> bool {
    module.to_string().contains("prequal")
}

impl Balanced<'_> {
    /// Whether an extension of this kind loads the policy's module. Another module does not know the policy.
    pub(super) fn is_loaded_by(&self, extensions: &[At<'_>], kind: &str) -> bool {
        let loads = |config: At<'_>| module(&config) == Some(self.module);
        extensions.iter().any(|extension| extension.typed(kind).is_some_and(loads))
    }

    /// Returns the upstream filter that loads the policy's module.
    pub(super) fn filter_in<'a>(&self, filters: &[At<'a>]) -> Option<At<'a>> {
        let upstream = |filter: &&At<'a>| {
            let config = filter.typed(FILTER);
            config.is_some_and(|config| {
                module(&config) == Some(self.module) && config.text("filter_name") != Some(DETOUR)
            })
        };
        filters.iter().find(upstream).cloned()
    }

    /// Describes the filter or log that is missing.
    pub(super) fn expected(&self) -> String {
        format!("expected one that loads {}, as the policy of cluster `{}` does", self.module, self.name)
    }
}
