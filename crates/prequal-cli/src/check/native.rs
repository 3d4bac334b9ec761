//! The native module (`docs/guide/native.md`): its policy on a cluster, the three other roles that the policy needs,
//! and the optional detour filter.

use std::collections::BTreeSet;

use super::balanced::{self, Balanced, is_prequals, module};
use super::clusters::Placement;
use super::codes::*;
use super::headers::{LOAD, removed};
use super::routes::Named;
use super::source::Source;
use super::{At, Findings, clusters, detour, filters, routes};

/// Type of the bootstrap extension.
const PROBER: &str = "DynamicModuleBootstrapExtension";

/// Checks every cluster with the module's policy, and the other roles of its module. Returns whether such a cluster
/// exists or may exist.
pub(super) fn check(source: &Source<'_>, findings: &mut Findings) -> bool {
    let all: Vec<Balanced<'_>> =
        source.clusters.iter().filter_map(|cluster| balanced::find(source, cluster, findings)).collect();
    let extensions = source.bootstrap_extensions();
    if all.is_empty() {
        let probes =
            |extension: &At<'_>| extension.typed(PROBER).as_ref().and_then(module).is_some_and(is_prequals);
        let used = extensions.is_some_and(|extensions| extensions.iter().any(probes));
        if used && source.more_clusters {
            findings.push(UNSEEN, "dynamic_resources", "clusters");
        }
        return used && source.more_clusters;
    }
    source.check_stats_tags(findings);
    for one in &all {
        if extensions.as_ref().is_some_and(|extensions| !one.is_loaded_by(extensions, PROBER)) {
            findings.push(NATIVE_PROBER_MISSING, "bootstrap_extensions", one.expected());
        }
    }
    check_listeners(source, &all, findings);
    for one in &all {
        let Some((path, entry)) = &one.entry else { continue };
        let probing =
            clusters::check_pair(source, entry, Some(&one.cluster), Placement::Known, path, findings);
        if let Some(probing) = probing
            && let Some(filter) = one.filter_in(&clusters::http_filters(&probing))
        {
            findings.push(NATIVE_FILTER_PROBES, &filter.path, &*entry.probe_cluster);
        }
    }
    true
}

/// Checks every HTTP connection manager whose routes lead to a cluster with the policy.
fn check_listeners(source: &Source<'_>, all: &[Balanced<'_>], findings: &mut Findings) {
    let mut reached = BTreeSet::new();
    let mut unseen = false;
    for (manager, filters) in filters::managers(source) {
        let Some(config) = routes::of(source, &manager) else {
            findings.push(UNSEEN, &manager.path, "routes");
            unseen = true;
            continue;
        };
        let leads = |one: &&Balanced<'_>| {
            Named { serving: vec![one.name], probing: Vec::new() }.have_a_route_in(&config)
        };
        let leading: Vec<&Balanced<'_>> = all.iter().filter(leads).collect();
        if !leading.is_empty() {
            check_manager(&manager, &filters, &config, &leading, findings);
        }
        reached.extend(leading.iter().map(|one| one.name));
    }
    if reached.is_empty() && !unseen && !source.report_unseen_listeners(findings) {
        for one in all {
            findings.push(ROUTES_ELSEWHERE, &one.cluster.path, one.name);
        }
    }
    // A cluster without a route may be used by filters that send requests of their own: there is no router to check.
    for one in all.iter().filter(|one| !reached.contains(one.name)) {
        check_filter(one, None, findings);
    }
}

fn check_manager(
    manager: &At<'_>,
    filters: &[At<'_>],
    config: &At<'_>,
    leading: &[&Balanced<'_>],
    findings: &mut Findings,
) {
    // The module reads and removes reports upstream of all these filters, so any of them may remove Prequal's headers.
    filters::check_strip(filters, &format!("{}.http_filters", manager.path), false, findings);
    filters::check_paths(manager, findings);
    let named = Named {
        serving: leading.iter().map(|one| one.name).collect(),
        probing: leading.iter().filter_map(|one| Some(&*one.entry.as_ref()?.1.probe_cluster)).collect(),
    };
    routes::check_requests(config, &named, findings);
    detour::check(manager, filters, leading, findings);
    let router = filters::router(filters, findings);
    for one in leading {
        check_filter(one, router.as_ref(), findings);
        if let Some(router) = &router
            && !one.is_loaded_by(&router.list("upstream_log"), "DynamicModuleAccessLog")
        {
            findings.push(NATIVE_LOG_MISSING, &router.path, one.expected());
        }
    }
}

/// Checks the upstream filters of a cluster: its own or, if it has none, the router's.
fn check_filter(one: &Balanced<'_>, router: Option<&At<'_>>, findings: &mut Findings) {
    let own = clusters::http_filters(&one.cluster);
    let filters = match router {
        Some(router) if own.is_empty() => router.list("upstream_http_filters"),
        _ => own,
    };
    let Some(ours) = one.filter_in(&filters) else {
        return findings.push(NATIVE_FILTER_MISSING, &one.cluster.path, one.expected());
    };
    // Responses pass the filters from the last to the first.
    for filter in filters.iter().skip_while(|filter| filter.path != ours.path) {
        if removed(filter, "response_mutations").contains(LOAD) {
            findings.push(STRIP_ORDER, &filter.path, format!("the module's filter is {}", ours.path));
        }
    }
}
