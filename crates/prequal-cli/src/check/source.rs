//! Finds listeners, clusters, routes and endpoints in a bootstrap, a config_dump, or a file of resources.

use anyhow::{Result, bail};
use serde_json::Value;

use super::codes::{STATS_TAGS, UNSEEN};
use super::{At, Findings};

/// Parts of a configuration, from any of these forms.
#[derive(Debug, Default)]
pub(super) struct Source<'a> {
    /// Whether the configuration is a dump of a running process, perhaps on another machine.
    pub(super) dump: bool,
    pub(super) listeners: Vec<At<'a>>,
    pub(super) clusters: Vec<At<'a>>,
    /// Route configurations outside listeners.
    pub(super) routes: Vec<At<'a>>,
    /// Endpoints outside clusters.
    assignments: Vec<At<'a>>,
    /// HTTP filters that listeners refer to only by name.
    extensions: Vec<At<'a>>,
    bootstrap: Option<At<'a>>,
    /// Whether clusters may exist that are not in this configuration.
    pub(super) more_clusters: bool,
    more_listeners: bool,
}

impl<'a> Source<'a> {
    pub(super) fn of(root: &'a Value, must_be_dump: bool) -> Result<Self> {
        let root = At::root(root);
        let mut source = Self::default();
        if root.get("configs").is_some() {
            source.read_dump(&root);
        } else if must_be_dump {
            bail!("it is not a config_dump: `configs` is missing at the top");
        } else if root.get("resources").is_some() {
            for resource in root.list("resources") {
                for (kind, into) in [
                    ("Listener", &mut source.listeners),
                    ("Cluster", &mut source.clusters),
                    ("RouteConfiguration", &mut source.routes),
                    ("ClusterLoadAssignment", &mut source.assignments),
                ] {
                    into.extend(resource.typed(kind));
                }
            }
            (source.more_clusters, source.more_listeners) = (true, true);
        } else if ["static_resources", "dynamic_resources", "admin"].iter().any(|key| root.get(key).is_some())
        {
            if let Some(resources) = root.get("static_resources") {
                source.listeners = resources.list("listeners");
                source.clusters = resources.list("clusters");
            }
            let dynamic = |key| root.at(&["dynamic_resources", key]).is_some();
            source.more_clusters = dynamic("cds_config") || dynamic("ads_config");
            source.more_listeners = dynamic("lds_config") || dynamic("ads_config");
            source.bootstrap = Some(root);
        } else {
            bail!(
                "it is neither a bootstrap of Envoy (`static_resources`, `dynamic_resources` or `admin` at the top), \
                 nor a config_dump (`configs`), nor a file of resources (`resources`), nor a manifest (`apiVersion`)"
            );
        }
        Ok(source)
    }

    fn read_dump(&mut self, root: &At<'a>) {
        self.dump = true;
        for part in root.list("configs") {
            if let Some(bootstrap) = part.typed("BootstrapConfigDump") {
                self.bootstrap = bootstrap.get("bootstrap");
            } else if let Some(dump) = part.typed("ListenersConfigDump") {
                self.listeners.extend(inner(&dump, "static_listeners", &["listener"]));
                for state in ["active_state", "warming_state"] {
                    self.listeners.extend(inner(&dump, "dynamic_listeners", &[state, "listener"]));
                }
            } else if let Some(dump) = part.typed("ClustersConfigDump") {
                for list in ["static_clusters", "dynamic_active_clusters", "dynamic_warming_clusters"] {
                    self.clusters.extend(inner(&dump, list, &["cluster"]));
                }
            } else if let Some(dump) = part.typed("RoutesConfigDump") {
                for list in ["static_route_configs", "dynamic_route_configs"] {
                    self.routes.extend(inner(&dump, list, &["route_config"]));
                }
            } else if let Some(dump) = part.typed("EcdsConfigDump") {
                self.extensions.extend(inner(&dump, "ecds_filters", &["ecds_filter"]));
            } else if let Some(dump) = part.typed("EndpointsConfigDump") {
                for list in ["static_endpoint_configs", "dynamic_endpoint_configs"] {
                    self.assignments.extend(inner(&dump, list, &["endpoint_config"]));
                }
            }
        }
    }

    /// Returns the cluster `name`.
    pub(super) fn cluster(&self, name: &str) -> Option<At<'a>> {
        self.clusters.iter().find(|cluster| cluster.text("name") == Some(name)).cloned()
    }

    /// Returns the endpoints of the EDS service `name`.
    pub(super) fn assignment(&self, name: &str) -> Option<At<'a>> {
        self.assignments.iter().find(|assignment| assignment.text("cluster_name") == Some(name)).cloned()
    }

    /// Returns the filter's own configuration if the listener refers to it only by name, otherwise `filter`.
    pub(super) fn resolved(&self, filter: At<'a>) -> At<'a> {
        let named = |found: &&At<'a>| found.text("name") == filter.text("name");
        let found = filter.get("config_discovery").and_then(|_| self.extensions.iter().find(named));
        found.cloned().unwrap_or(filter)
    }

    /// Returns whether listeners may exist that are not in this configuration, and reports it.
    pub(super) fn report_unseen_listeners(&self, findings: &mut Findings) -> bool {
        if self.more_listeners {
            findings.push(UNSEEN, "dynamic_resources", "listeners");
        }
        self.more_listeners
    }

    /// Returns the bootstrap extensions; `None` if the bootstrap is not in this configuration.
    pub(super) fn bootstrap_extensions(&self) -> Option<Vec<At<'a>>> {
        Some(self.bootstrap.as_ref()?.list("bootstrap_extensions"))
    }

    /// Reports missing `stats_tags`. Without them the filter's metrics keep their labels in their names.
    pub(super) fn check_stats_tags(&self, findings: &mut Findings) {
        let Some(bootstrap) = &self.bootstrap else { return };
        let tags = bootstrap.get("stats_config").map(|config| config.list("stats_tags")).unwrap_or_default();
        let missing: Vec<&str> = ["cluster", "branch", "result", "class", "end", "reason"]
            .into_iter()
            .filter(|name| !tags.iter().any(|tag| tag.text("tag_name") == Some(name)))
            .collect();
        if !missing.is_empty() {
            findings.push(STATS_TAGS, "stats_config.stats_tags", format!("no tag {}", missing.join(", ")));
        }
    }
}

fn inner<'a>(dump: &At<'a>, list: &str, keys: &[&str]) -> Vec<At<'a>> {
    dump.list(list).iter().filter_map(|item| item.at(keys)).collect()
}
