//! The routes: which clusters they lead to, which headers they remove, and whether they keep clients from the probe
//! path.

use prequal_core::client::settings::Shim;
use prequal_core::config::FilterConfig;
use regex::Regex;

use super::codes::*;
use super::headers::{DEST, LOAD};
use super::source::Source;
use super::{At, Findings};

/// Path at which agents answer probes.
const PROBE: &str = "/prequal/probe";

/// Returns the routes of one connection manager, unless they come from RDS and are not in this configuration.
pub(super) fn of<'a>(source: &Source<'a>, manager: &At<'a>) -> Option<At<'a>> {
    manager.get("route_config").or_else(|| {
        let rds = manager.get("rds")?;
        let name = rds.text("route_config_name")?;
        source.routes.iter().find(|config| config.text("name") == Some(name)).cloned()
    })
}

/// Names of the clusters that Prequal uses.
pub(super) struct Named<'a> {
    pub(super) serving: Vec<&'a str>,
    pub(super) probing: Vec<&'a str>,
}

impl<'a> Named<'a> {
    fn of(settings: &'a FilterConfig) -> Self {
        let entries = &settings.clusters;
        Self {
            serving: entries.iter().map(|entry| entry.cluster.as_str()).collect(),
            probing: entries.iter().map(|entry| entry.probe_cluster.as_str()).collect(),
        }
    }

    /// Returns whether one of the routes may lead to one of the serving clusters.
    pub(super) fn have_a_route_in(&self, config: &At<'_>) -> bool {
        config
            .list("virtual_hosts")
            .iter()
            .any(|host| host.list("routes").iter().any(|route| self.serve(route)))
    }

    /// Returns whether the route may lead to one of the serving clusters.
    fn serve(&self, route: &At<'_>) -> bool {
        is_dynamic(route) || targets(route).iter().any(|(cluster, _)| self.serving.contains(cluster))
    }

    /// Returns whether the route may lead to replicas, through a serving or a probe cluster.
    fn reach(&self, route: &At<'_>) -> bool {
        self.serve(route) || targets(route).iter().any(|(cluster, _)| self.probing.contains(cluster))
    }
}

/// Checks the routes of one connection manager with the filter.
pub(super) fn check(source: &Source<'_>, manager: &At<'_>, settings: &FilterConfig, findings: &mut Findings) {
    let Some(config) = of(source, manager) else {
        findings.push(UNSEEN, &manager.path, "routes");
        return;
    };
    let named = Named::of(settings);
    let leads = named.have_a_route_in(&config);
    if !leads {
        findings.push(
            ROUTES_ELSEWHERE,
            &config.path,
            format!("the settings name {}", named.serving.join(", ")),
        );
    }
    let removals = |place: &At<'_>, findings: &mut Findings| removals(place, settings.shim, findings);
    removals(&config, findings);
    for host in config.list("virtual_hosts") {
        let routes = host.list("routes");
        if routes.iter().any(|route| named.serve(route)) {
            removals(&host, findings);
        }
        for route in &routes {
            let targets = targets(route);
            if named.serve(route) {
                removals(route, findings);
                targets.iter().for_each(|(_, place)| removals(place, findings));
            }
            for (cluster, place) in targets.iter().filter(|(cluster, _)| !named.serving.contains(cluster)) {
                if leads {
                    findings.push(ROUTE_UNNAMED, &place.path, *cluster);
                }
            }
        }
    }
    check_requests(&config, &named, findings);
}

/// Checks what the routes do with requests to replicas: retries, and requests for the probe's path.
pub(super) fn check_requests(config: &At<'_>, named: &Named<'_>, findings: &mut Findings) {
    for host in config.list("virtual_hosts") {
        let routes = host.list("routes");
        for route in routes.iter().filter(|route| named.serve(route)) {
            check_retries(route, &host, findings);
        }
        check_closed(&routes, named, findings);
    }
}

/// Returns the clusters that a route may lead to, with the place that names each.
fn targets<'a>(route: &At<'a>) -> Vec<(&'a str, At<'a>)> {
    let Some(action) = route.get("route") else { return Vec::new() };
    let weighted =
        action.get("weighted_clusters").map(|weighted| weighted.list("clusters")).unwrap_or_default();
    let single = action.text("cluster").map(|name| (name, action.clone()));
    single
        .into_iter()
        .chain(weighted.into_iter().filter_map(|entry| Some((entry.text("name")?, entry))))
        .collect()
}

/// Returns whether the request determines the cluster.
fn is_dynamic(route: &At<'_>) -> bool {
    let action = route.get("route");
    action.is_some_and(|action| {
        ["cluster_header", "cluster_specifier_plugin", "inline_cluster_specifier_plugin"]
            .iter()
            .any(|key| action.get(key).is_some())
    })
}

/// Reports routes that remove headers needed later. `stateful_session` reads the choice before the request is routed,
/// so with that shim routes may remove it.
fn removals(place: &At<'_>, shim: Shim, findings: &mut Findings) {
    let dest = removed(place, "request_headers_to_remove", DEST).map(|item| (item, DEST, ROUTE_REMOVES_DEST));
    let load =
        removed(place, "response_headers_to_remove", LOAD).map(|item| (item, LOAD, ROUTE_REMOVES_LOAD));
    for (item, header, code) in dest.filter(|_| shim == Shim::OverrideHost).into_iter().chain(load) {
        findings.push(code, &item.path, header);
    }
}

/// Returns the item of the list `key` that removes the header.
fn removed<'a>(place: &At<'a>, key: &str, header: &str) -> Option<At<'a>> {
    let removes = |item: &At<'a>| item.value.as_str().is_some_and(|name| name.eq_ignore_ascii_case(header));
    place.list(key).into_iter().find(removes)
}

/// Returns whether the routes remove the steering header from requests to the clusters that the settings name.
pub(super) fn remove_dest(config: &At<'_>, settings: &FilterConfig) -> bool {
    let removes = |place: &At<'_>| removed(place, "request_headers_to_remove", DEST).is_some();
    let named = Named::of(settings);
    let route_removes = |route: &At<'_>| {
        let targets = targets(route);
        !named.serve(route)
            || removes(route)
            || (!targets.is_empty() && targets.iter().all(|(_, place)| removes(place)))
    };
    removes(config)
        || config
            .list("virtual_hosts")
            .iter()
            .all(|host| removes(host) || host.list("routes").iter().all(route_removes))
}

fn check_retries(route: &At<'_>, host: &At<'_>, findings: &mut Findings) {
    let own = route.at(&["route", "retry_policy"]);
    let Some(policy) = own.or_else(|| host.get("retry_policy")) else { return };
    let elsewhere = policy.list("retry_host_predicate").iter().any(|predicate| {
        predicate.typed("PreviousHostsPredicate").is_some()
            || predicate.text("name") == Some("envoy.retry_host_predicates.previous_hosts")
    });
    if !elsewhere {
        findings.push(RETRY_SAME_HOST, &policy.path, "");
    }
}

/// Checks that a route answers the probe's path before any route leads to replicas.
fn check_closed(routes: &[At<'_>], named: &Named<'_>, findings: &mut Findings) {
    for route in routes {
        let Some(matched) = route.get("match").filter(matches_probe) else { continue };
        if named.reach(route) {
            findings.push(PROBE_OPEN, &route.path, format!("this route takes {PROBE}"));
            return;
        }
        let conditional =
            ["headers", "query_parameters", "runtime_fraction", "grpc", "tls_context", "cookies"]
                .iter()
                .any(|key| matched.get(key).is_some());
        if !conditional {
            return;
        }
    }
}

fn matches_probe(matched: &At<'_>) -> bool {
    if let Some(prefix) = matched.text("prefix") {
        return PROBE.starts_with(prefix);
    }
    if let Some(prefix) = matched.text("path_separated_prefix") {
        return PROBE.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    }
    if let Some(path) = matched.text("path") {
        return path == PROBE;
    }
    let pattern = matched.get("safe_regex");
    pattern.and_then(|pattern| pattern.text("regex")).is_some_and(|regex| {
        // A limit on size keeps a hostile expression from using much memory. An expression that cannot be parsed
        // matches nothing.
        let whole = regex::RegexBuilder::new(&format!("^(?:{regex})$")).size_limit(1 << 20).build();
        whole.is_ok_and(|whole: Regex| whole.is_match(PROBE))
    })
}
