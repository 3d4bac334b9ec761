//! The native module's detour filter, which belongs in a listener (`docs/guide/native.md`). For a request it can name a
//! host that is not healthy, which Envoy does not accept from the module's policy.

use super::balanced::{Balanced, DETOUR, FILTER, is_prequals, module};
use super::codes::*;
use super::{At, Findings};

/// Health of the hosts that the filter names, as `override_host_status` spells it.
const NAMED: [&str; 4] = ["UNHEALTHY", "DRAINING", "TIMEOUT", "DEGRADED"];

/// Health of the hosts that Envoy accepts from a filter by default.
const DEFAULT: [&str; 3] = ["UNKNOWN", "HEALTHY", "DEGRADED"];

/// Checks the filters of a manager whose routes lead to the clusters `leading`.
pub(super) fn check(
    manager: &At<'_>,
    filters: &[At<'_>],
    leading: &[&Balanced<'_>],
    findings: &mut Findings,
) {
    let mut session = None;
    let mut detours = Vec::new();
    for filter in filters {
        if filter.typed("StatefulSession").is_some() {
            session = session.or(Some(&filter.path));
        }
        let Some(config) = filter.typed(FILTER) else { continue };
        let Some(loaded) = module(&config) else { continue };
        let named = config.text("filter_name") == Some(DETOUR);
        let known = leading.iter().any(|one| one.module == loaded);
        if named && known {
            detours.push(loaded);
            if let Some(session) = session {
                findings.push(NATIVE_DETOUR_ORDER, &filter.path, format!("`stateful_session` is {session}"));
            }
        } else if named || known || is_prequals(loaded) {
            let name = config.text("filter_name").unwrap_or_default();
            findings.push(
                NATIVE_DETOUR_NAME,
                &filter.path,
                format!("`filter_name` is \"{name}\", and the module is {loaded}"),
            );
        }
    }
    for one in leading {
        check_cluster(one, detours.contains(&one.module), session.is_some(), manager, findings);
    }
}

/// Checks that the cluster allows all hosts that the filter names, and that the filter exists if the cluster allows
/// unhealthy hosts.
fn check_cluster(one: &Balanced<'_>, detour: bool, session: bool, manager: &At<'_>, findings: &mut Findings) {
    let status = one.cluster.at(&["common_lb_config", "override_host_status"]);
    let statuses: Vec<&str> = match &status {
        Some(status) => status.list("statuses").iter().filter_map(|status| status.value.as_str()).collect(),
        None => DEFAULT.to_vec(),
    };
    let refused: Vec<&str> = NAMED.into_iter().filter(|status| !statuses.contains(status)).collect();
    if detour && !refused.is_empty() {
        findings.push(
            NATIVE_DETOUR_STATUS,
            &one.cluster.path,
            format!("`override_host_status` lacks {}", refused.join(", ")),
        );
    }
    // A filter for sessions may also need unhealthy hosts.
    if !detour && !session && statuses.contains(&"UNHEALTHY") {
        let list = format!("{}.http_filters", manager.path);
        findings.push(NATIVE_DETOUR_MISSING, &list, format!("cluster `{}` allows them", one.name));
    }
}
