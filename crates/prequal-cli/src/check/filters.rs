//! The HTTP filters: the wasm filter's settings, and the order and content of the filters around it.

use std::collections::BTreeSet;
use std::path::Path;

use prequal_core::client::settings::Shim;
use prequal_core::config::{Config, FilterConfig};
use serde_json::Value;

use super::codes::*;
use super::headers::{DEST, HEADERS, LOAD, removed};
use super::source::Source;
use super::{At, Findings, clusters, routes, settings};

/// Field of the plugin that holds the settings.
const SETTINGS_KEY: &str = "configuration";

/// Checks every HTTP connection manager that has the filter, and the clusters and routes that belong to it. Returns
/// whether such a manager exists or may exist.
pub(super) fn check(source: &Source<'_>, findings: &mut Findings) -> bool {
    let mut settled = false;
    for (manager, filters) in managers(source) {
        let wasm =
            filters.iter().enumerate().find_map(|(index, filter)| Some((index, prequal_plugin(filter)?)));
        if let Some(denial) = filters.iter().find(|filter| denies_in_place_of_a_module(filter)) {
            settled = true;
            findings.push(MODULE_DENIED, &denial.path, denial.text("name").unwrap_or_default());
        }
        if let Some((index, wasm)) = wasm {
            settled = true;
            check_manager(source, &manager, &filters, index, &wasm, findings);
        } else if let Some(filter) = filters.iter().find(|filter| filter.get("config_discovery").is_some()) {
            settled = true;
            findings.push(UNSEEN, &filter.path, "a filter");
        }
    }
    settled
}

/// Returns every HTTP connection manager with its HTTP filters.
pub(super) fn managers<'a>(source: &Source<'a>) -> Vec<(At<'a>, Vec<At<'a>>)> {
    let chains = source.listeners.iter().flat_map(|listener| {
        listener.list("filter_chains").into_iter().chain(listener.get("default_filter_chain"))
    });
    let filters = chains.flat_map(|chain| chain.list("filters"));
    let managers = filters.filter_map(|filter| filter.typed("HttpConnectionManager"));
    let with_filters = |manager: At<'a>| {
        let filters = manager.list("http_filters").into_iter().map(|filter| source.resolved(filter));
        let filters = filters.collect();
        (manager, filters)
    };
    managers.map(with_filters).collect()
}

/// Returns whether this is the filter that Istio's agent puts in place of a module that it could not fetch. That filter
/// keeps the module's name.
fn denies_in_place_of_a_module(filter: &At<'_>) -> bool {
    let of_istio = filter.text("name").is_some_and(|name| name.starts_with("extensions.istio.io/"));
    let rules = filter.typed("RBAC").and_then(|denial| denial.get("rules"));
    of_istio && rules.is_some_and(|rules| rules.text("action") == Some("DENY"))
}

/// Returns the plugin's `config`, if this is Prequal's wasm filter.
fn prequal_plugin<'a>(filter: &At<'a>) -> Option<At<'a>> {
    let config = filter.typed("Wasm")?.get("config")?;
    let named = |text: Option<&str>| text.is_some_and(|text| text.contains("prequal"));
    let module = config.at(&["vm_config", "code", "local"]);
    let by_name = named(filter.text("name"))
        || named(config.text("name"))
        || named(config.text("root_id"))
        || named(module.and_then(|local| local.text("filename")));
    (by_name || settings::are_prequals(&config, SETTINGS_KEY)).then_some(config)
}

fn check_manager(
    source: &Source<'_>,
    manager: &At<'_>,
    filters: &[At<'_>],
    wasm_index: usize,
    wasm: &At<'_>,
    findings: &mut Findings,
) {
    check_module(source, wasm, findings);
    let parse = |text: &str| Config::parse(text).map_err(|errors| errors.0);
    let settings = match settings::read(wasm, SETTINGS_KEY, parse, findings) {
        Some((path, Config::Outbound(settings))) => Some((path, settings)),
        // The inbound role chooses nothing and sends no probes, so none of the following checks applies to it.
        Some((_, Config::Inbound(_))) => return,
        None => None,
    };
    source.check_stats_tags(findings);
    let shim = settings.as_ref().map_or(Shim::StatefulSession, |(_, settings)| settings.shim);
    let list = format!("{}.http_filters", manager.path);
    check_shim(filters, &list, wasm_index, shim, findings);
    let misplaced = check_later_strips(filters, wasm_index, shim, findings);
    check_strip(&filters[..wasm_index], &list, misplaced, findings);
    check_routing(filters, wasm_index, findings);
    let router = router(filters, findings);
    check_paths(manager, findings);
    // The settings name the clusters, so without settings the following checks are impossible.
    if let Some((path, settings)) = &settings {
        if let Some(router) = &router {
            check_upstream_strip(source, manager, filters, router, settings, findings);
        }
        routes::check(source, manager, settings, findings);
        clusters::check(source, settings, path, findings);
    }
}

/// Checks the module: its behaviour after a crash, and its location.
fn check_module(source: &Source<'_>, wasm: &At<'_>, findings: &mut Findings) {
    let policy = match wasm.value.get("failure_policy") {
        Some(Value::String(name)) => name.as_str(),
        Some(Value::Number(number)) if number.as_u64() == Some(1) => "FAIL_RELOAD",
        _ if wasm.flag("fail_open") => "FAIL_OPEN",
        _ => "unset",
    };
    let fetched = source.dump && is_fetched_by_istio(wasm);
    match policy {
        "FAIL_RELOAD" => check_backoff(wasm, findings),
        "FAIL_OPEN" if fetched => {}
        "FAIL_OPEN" => findings.push(FAIL_OPEN, &wasm.path, "FAIL_OPEN"),
        other => findings.push(FAIL_CLOSED, &wasm.path, other),
    }
    if fetched && policy != "FAIL_OPEN" {
        findings.push(MODULE_FETCHED, &wasm.path, policy);
    }
    let Some(vm) = wasm.get("vm_config") else { return };
    if let Some(runtime) = vm.text("runtime").filter(|runtime| *runtime != "envoy.wasm.runtime.v8") {
        findings.push(RUNTIME, &format!("{}.runtime", vm.path), runtime);
    }
    let Some(local) = vm.at(&["code", "local"]) else { return };
    if local.get("inline_string").is_some() {
        findings.push(MODULE_INLINE, &local.path, "`inline_string`");
    }
    if let Some(name) = local.text("filename").filter(|name| !source.dump && !Path::new(name).is_file()) {
        findings.push(MODULE_MISSING, &format!("{}.filename", local.path), name);
    }
}

/// Returns whether Istio fetched the module: its agent keeps fetched modules in its own folder, and gives Envoy that
/// path.
fn is_fetched_by_istio(wasm: &At<'_>) -> bool {
    let local = wasm.at(&["vm_config", "code", "local"]);
    let file = local.as_ref().and_then(|local| local.text("filename"));
    file.is_some_and(|file| file.starts_with("/var/lib/istio/data/"))
}

fn check_backoff(wasm: &At<'_>, findings: &mut Findings) {
    let backoff = wasm.at(&["reload_config", "backoff"]);
    let interval = backoff.as_ref().and_then(|backoff| backoff.text("base_interval"));
    let seconds = interval.and_then(|text| text.strip_suffix('s')?.parse::<f64>().ok());
    if seconds.is_none_or(|seconds| seconds >= 1.0) {
        let path = backoff.map_or_else(|| wasm.path.clone(), |backoff| backoff.path);
        findings.push(RELOAD_SLOW, &path, format!("`base_interval` is {}", interval.unwrap_or("unset (1s)")));
    }
}

/// Checks that the shim exists, follows the wasm filter, and is not strict.
fn check_shim(filters: &[At<'_>], list: &str, wasm: usize, shim: Shim, findings: &mut Findings) {
    let shim_at = filters.iter().position(is_shim);
    let uses_session = shim == Shim::StatefulSession;
    match shim_at {
        Some(index) if uses_session && index < wasm => {
            findings.push(
                SHIM_ORDER,
                &filters[index].path,
                format!("the wasm filter is {}", filters[wasm].path),
            );
        }
        None if uses_session => {
            let other = filters.iter().find_map(session_header);
            let found = other.map_or("no `stateful_session` by header".to_owned(), |name| {
                format!("`stateful_session` reads `{name}`")
            });
            findings.push(SHIM_MISSING, list, found);
        }
        _ => {}
    }
    if let Some(index) = shim_at
        && let Some(session) =
            filters[index].typed("StatefulSession").filter(|session| session.flag("strict"))
    {
        findings.push(SHIM_STRICT, &session.path, "`strict: true`");
    }
}

/// Checks that no filter after the wasm filter removes headers that are still needed. Returns whether one does.
fn check_later_strips(filters: &[At<'_>], wasm: usize, shim: Shim, findings: &mut Findings) -> bool {
    let shim_at = filters.iter().position(is_shim);
    let mut misplaced = false;
    for (index, filter) in filters.iter().enumerate().skip(wasm + 1) {
        // After `stateful_session` the choice has been read, and no later filter needs the header.
        let needed = shim == Shim::OverrideHost || shim_at.is_none_or(|shim| index < shim);
        let on_requests = needed && removed(filter, "request_mutations").contains(DEST);
        if on_requests || removed(filter, "response_mutations").contains(LOAD) {
            misplaced = true;
            findings.push(STRIP_ORDER, &filter.path, format!("the wasm filter is {}", filters[wasm].path));
        }
    }
    misplaced
}

/// Checks the filters that are set to change the route, or to keep it. Envoy evaluates the route again in the strip, which
/// is a `header_mutation`, and when the wasm filter has written its choice.
fn check_routing(filters: &[At<'_>], wasm: usize, findings: &mut Findings) {
    let strip = filters[..wasm].iter().rposition(|filter| filter.typed("HeaderMutation").is_some());
    for (index, filter) in filters.iter().enumerate() {
        let Some(config) = filter.get("typed_config") else { continue };
        // Without a strip, another check reports that.
        if strip.is_some_and(|strip| index > strip) && clears_route(config.value, true) {
            findings.push(ROUTE_CHANGES, &filter.path, filter.text("name").unwrap_or_default());
        } else if index < wasm && clears_route(config.value, false) {
            findings.push(ROUTE_KEPT, &filter.path, filter.text("name").unwrap_or_default());
        }
    }
}

/// Returns whether a filter's configuration says, at any depth, that the filter clears the route cache or, if `clears` is
/// false, that it does not.
fn clears_route(config: &Value, clears: bool) -> bool {
    match config {
        Value::Object(fields) => fields.iter().any(|(key, value)| match &**key {
            "clear_route_cache" => value.as_bool() == Some(clears),
            "route_cache_action" => value.as_str() == Some(if clears { "CLEAR" } else { "RETAIN" }),
            _ => clears_route(value, clears),
        }),
        Value::Array(items) => items.iter().any(|item| clears_route(item, clears)),
        _ => false,
    }
}

/// Checks that the filters `before` Prequal's filter remove Prequal's headers. `misplaced`: a later filter removes
/// them.
pub(super) fn check_strip(before: &[At<'_>], list: &str, misplaced: bool, findings: &mut Findings) {
    let left = |key: &str| -> Vec<&str> {
        let gone: BTreeSet<&str> = before.iter().flat_map(|filter| removed(filter, key)).collect();
        HEADERS.into_iter().filter(|name| !gone.contains(name)).collect()
    };
    let (requests, responses) = (left("request_mutations"), left("response_mutations"));
    if requests.len() + responses.len() == 2 * HEADERS.len() {
        if !misplaced {
            findings.push(STRIP_MISSING, list, "");
        }
        return;
    }
    for (side, names) in [("requests", requests), ("responses", responses)] {
        if !names.is_empty() {
            findings.push(STRIP_INCOMPLETE, list, format!("{side} keep {}", names.join(", ")));
        }
    }
}

/// Checks that no spelling of a path bypasses the route that closes the probe's path.
pub(super) fn check_paths(manager: &At<'_>, findings: &mut Findings) {
    for key in ["normalize_path", "merge_slashes"] {
        if !manager.flag(key) {
            findings.push(PATH_SPELLING, &manager.path, format!("`{key}` is not true"));
        }
    }
}

/// Returns the header that a `stateful_session` filter reads.
fn session_header<'a>(filter: &At<'a>) -> Option<&'a str> {
    filter.typed("StatefulSession")?.get("session_state")?.typed("HeaderBasedSessionState")?.text("name")
}

fn is_shim(filter: &At<'_>) -> bool {
    session_header(filter).is_some_and(|name| name.eq_ignore_ascii_case(DEST))
}

/// Returns the router's configuration, and checks that the router is last.
pub(super) fn router<'a>(filters: &[At<'a>], findings: &mut Findings) -> Option<At<'a>> {
    let router = filters.iter().find(|filter| {
        filter.typed("Router").is_some() || filter.text("name") == Some("envoy.filters.http.router")
    });
    let last = filters.last()?;
    let Some(router) = router.filter(|router| router.path == last.path) else {
        let found = router.map_or("no router".to_owned(), |router| format!("the router is {}", router.path));
        findings.push(ROUTER_ORDER, &last.path, found);
        return None;
    };
    let config = router.typed("Router").unwrap_or_else(|| router.clone());
    clusters::check_codec(&config.list("upstream_http_filters"), findings);
    Some(config)
}

/// Checks that replicas do not see the choice.
fn check_upstream_strip(
    source: &Source<'_>,
    manager: &At<'_>,
    filters: &[At<'_>],
    router: &At<'_>,
    settings: &FilterConfig,
    findings: &mut Findings,
) {
    let removes_dest = |filter: &At<'_>| removed(filter, "request_mutations").contains(DEST);
    if router.list("upstream_http_filters").iter().any(removes_dest) {
        return;
    }
    // The shim in the settings determines when the header is read, and so when it may be removed.
    if settings.shim == Shim::StatefulSession {
        let mut behind = filters.iter().skip_while(|filter| !is_shim(filter));
        // If routes are not in this configuration, another check reports that.
        if behind.any(removes_dest)
            || routes::of(source, manager).is_none_or(|routes| routes::remove_dest(&routes, settings))
        {
            return;
        }
    }
    // A cluster may have its own upstream filters, which then replace the router's.
    let clean = |name: &str| {
        let filters =
            source.cluster(name).map(|cluster| clusters::http_filters(&cluster)).unwrap_or_default();
        filters.iter().any(removes_dest)
    };
    if !settings.clusters.iter().all(|entry| clean(&entry.cluster)) {
        findings.push(UPSTREAM_STRIP, &router.path, "");
    }
}
