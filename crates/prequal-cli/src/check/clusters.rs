//! Serving and probe clusters: their kinds, whether they match, and whether probes can be addressed and verified.

use prequal_core::client::settings::{ClusterConfig, Shim};
use prequal_core::config::FilterConfig;
use serde_json::Value;

use super::codes::*;
use super::headers::DEST;
use super::source::Source;
use super::{At, Findings};

/// Checks every pair of clusters that the filter's settings name; `path` is the place of the settings.
pub(super) fn check(source: &Source<'_>, settings: &FilterConfig, path: &str, findings: &mut Findings) {
    for entry in &settings.clusters {
        let serving = find(source, &entry.cluster, CLUSTER_ABSENT, path, findings);
        if let Some(serving) = &serving
            && settings.shim == Shim::OverrideHost
            && override_host(serving).is_none()
        {
            findings.push(
                SHIM_MISSING,
                &serving.path,
                "`shim: override_host`, but the cluster has another policy",
            );
        }
        check_pair(source, entry, serving.as_ref(), Placement::Learned, path, findings);
    }
}

/// How Prequal learns the placement of replicas: priorities, localities, weights, health.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Placement {
    /// From discovery probes: the probe cluster's policy chooses where they go.
    Learned,
    /// From Envoy's host sets.
    Known,
}

/// Checks a serving cluster, if it exists, and its probe cluster. Returns the probe cluster, unless no probes are sent.
pub(super) fn check_pair<'a>(
    source: &Source<'a>,
    entry: &ClusterConfig,
    serving: Option<&At<'_>>,
    placement: Placement,
    path: &str,
    findings: &mut Findings,
) -> Option<At<'a>> {
    if let Some(serving) = serving {
        check_kind(serving, findings);
        check_subsets(serving, findings);
        check_breakers(serving, findings);
        check_codec(&http_filters(serving), findings);
    }
    if entry.choice.rule.is_probe_free() {
        return None;
    }
    let probing = find(source, &entry.probe_cluster, PROBE_CLUSTER_ABSENT, path, findings)?;
    check_probing(entry, &probing, placement, findings);
    if let Some(serving) = serving.filter(|_| entry.cluster != entry.probe_cluster) {
        check_kind(&probing, findings);
        check_codec(&http_filters(&probing), findings);
        if placement == Placement::Learned {
            check_placement(source, serving, &probing, findings);
        }
        // The endpoints of an aggregate cluster are in other clusters.
        if !is_aggregate(serving) {
            compare(source, serving, &probing, placement, findings);
        }
    }
    Some(probing)
}

/// Returns the cluster `name`, or reports its absence.
pub(super) fn find<'a>(
    source: &Source<'a>,
    name: &str,
    code: &'static Code,
    path: &str,
    findings: &mut Findings,
) -> Option<At<'a>> {
    let found = source.cluster(name);
    if found.is_none() {
        let code = if source.more_clusters { UNSEEN } else { code };
        findings.push(code, path, format!("cluster `{name}`"));
    }
    found
}

fn check_kind(cluster: &At<'_>, findings: &mut Findings) {
    let custom = cluster.get("cluster_type");
    let named = custom.as_ref().and_then(|custom| custom.text("name")).unwrap_or_default();
    let kind = cluster.text("type").unwrap_or_default();
    let single = custom
        .and_then(|custom| custom.typed("DnsCluster"))
        .is_some_and(|dns| dns.flag("all_addresses_in_single_endpoint"));
    let name = cluster.text("name").unwrap_or_default();
    if kind == "ORIGINAL_DST" || named.ends_with("original_dst") {
        findings.push(ORIGINAL_DST, &cluster.path, name);
    } else if kind == "LOGICAL_DNS" || named.ends_with("logical_dns") || single {
        findings.push(LOGICAL_DNS, &cluster.path, name);
    } else if is_aggregate(cluster) {
        findings.push(AGGREGATE, &cluster.path, name);
    }
}

fn is_aggregate(cluster: &At<'_>) -> bool {
    let custom = cluster.get("cluster_type");
    custom.is_some_and(|custom| custom.text("name").is_some_and(|name| name.ends_with("aggregate")))
}

/// Reports subsets: Envoy looks up the chosen host among all hosts of the cluster.
fn check_subsets(serving: &At<'_>, findings: &mut Findings) {
    // Without selectors, Envoy ignores the field.
    let field = serving.get("lb_subset_config").filter(|config| !config.list("subset_selectors").is_empty());
    let policy = || policies(serving).iter().find_map(|policy| policy.typed("Subset"));
    if let Some(subsets) = field.or_else(policy) {
        findings.push(SUBSETS, &subsets.path, serving.text("name").unwrap_or_default());
    }
}

fn check_breakers(cluster: &At<'_>, findings: &mut Findings) {
    let Some(breakers) = cluster.get("circuit_breakers") else { return };
    for threshold in breakers.list("thresholds") {
        for key in ["max_connections", "max_pending_requests", "max_requests"] {
            if let Some(limit) = threshold.number(key).filter(|limit| *limit < 1024) {
                findings.push(BREAKERS_NARROW, &threshold.path, format!("`{key}` is {limit}"));
            }
        }
    }
}

/// Checks that probes reach the replicas they are addressed to, and that replies show which host answered.
fn check_probing(entry: &ClusterConfig, probing: &At<'_>, placement: Placement, findings: &mut Findings) {
    let learned = placement == Placement::Learned;
    let policy = override_host(probing);
    let same = entry.cluster == entry.probe_cluster;
    match (&policy, same) {
        (None, true) => findings.push(PROBE_CLUSTER_SAME, &probing.path, &*entry.cluster),
        (None, false) => findings.push(PROBE_POLICY, &probing.path, &*entry.probe_cluster),
        (Some(_), true) => findings.push(BREAKERS_SHARED, &probing.path, &*entry.cluster),
        (Some(_), false) => {}
    }
    if let Some(policy) = policy.filter(|_| learned && !same) {
        let fallbacks =
            policy.get("fallback_policy").map(|fallback| fallback.list("policies")).unwrap_or_default();
        let in_turn = |policy: &At<'_>| {
            policy.get("typed_extension_config").is_some_and(|config| config.typed("RoundRobin").is_some())
        };
        if !fallbacks.first().is_some_and(in_turn) {
            findings.push(PROBE_FALLBACK, &policy.path, "`fallback_policy`");
        }
    }
    let (written, overwritten) = host_mutation(probing);
    if entry.pool.verified_probes && !overwritten {
        let found = if written {
            "it is written, but does not overwrite what a replica sent"
        } else {
            "it is not written"
        };
        findings.push(HOST_UNVERIFIED, &probing.path, found);
    } else if learned && written && !entry.pool.verified_probes {
        findings.push(HOST_UNUSED, &probing.path, &*entry.cluster);
    }
}

/// Returns the cluster's `override_host` policy, if it reads Prequal's header.
fn override_host<'a>(cluster: &At<'a>) -> Option<At<'a>> {
    let policy = policy(cluster, "OverrideHost")?;
    let sources = policy.list("override_host_sources");
    let by_header =
        |source: &At<'_>| source.text("header").is_some_and(|name| name.eq_ignore_ascii_case(DEST));
    sources.iter().any(by_header).then_some(policy)
}

/// Returns the cluster's policy of type `kind`.
pub(super) fn policy<'a>(cluster: &At<'a>, kind: &str) -> Option<At<'a>> {
    let policies = cluster.get("load_balancing_policy")?.list("policies");
    policies.iter().find_map(|policy| policy.get("typed_extension_config")?.typed(kind))
}

/// Returns the cluster's own upstream HTTP filters.
pub(super) fn http_filters<'a>(cluster: &At<'a>) -> Vec<At<'a>> {
    let options = cluster.at(&["typed_extension_protocol_options", HTTP_OPTIONS]);
    options.map(|options| options.list("http_filters")).unwrap_or_default()
}

/// Checks that upstream filters end with the codec.
pub(super) fn check_codec(filters: &[At<'_>], findings: &mut Findings) {
    if let Some(last) = filters.last().filter(|last| last.typed("UpstreamCodec").is_none()) {
        findings.push(UPSTREAM_CODEC, &last.path, last.text("name").unwrap_or_default());
    }
}

/// Returns whether Envoy adds the address of the answering host to replies, and whether that overwrites a value from
/// the replica.
fn host_mutation(cluster: &At<'_>) -> (bool, bool) {
    let mut found = (false, false);
    for filter in http_filters(cluster) {
        let mutations = filter.typed("HeaderMutation").and_then(|filter| filter.get("mutations"));
        for mutation in mutations.map(|all| all.list("response_mutations")).unwrap_or_default() {
            let Some(append) = mutation.get("append") else { continue };
            let Some(header) = append.get("header") else { continue };
            let ours = header.text("key").is_some_and(|key| key.eq_ignore_ascii_case("x-prequal-host"))
                && header.text("value") == Some("%UPSTREAM_REMOTE_ADDRESS%");
            if ours {
                found.0 = true;
                found.1 |= append.text("append_action") == Some("OVERWRITE_IF_EXISTS_OR_ADD");
            }
        }
    }
    found
}

/// One endpoint, with the values that determine its placement in Envoy.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Placed {
    priority: u64,
    locality: String,
    locality_weight: u64,
    weight: u64,
    address: String,
    port: u64,
}

/// Checks that both clusters have the same endpoints or the same source of endpoints. If the placement is learned, it
/// must be the same too.
fn compare(
    source: &Source<'_>,
    serving: &At<'_>,
    probing: &At<'_>,
    placement: Placement,
    findings: &mut Findings,
) {
    let places = |assignment: &At<'_>| {
        let all = places(assignment);
        if placement == Placement::Learned { all } else { addresses(all) }
    };
    let found = match (eds(serving), eds(probing)) {
        (Some(one), Some(other)) if one == other => return,
        (Some((one, _)), Some((other, _))) => {
            let (Some(one), Some(other)) = (source.assignment(&one), source.assignment(&other)) else {
                findings.push(
                    UNSEEN,
                    &probing.path,
                    format!("endpoints of the EDS services `{one}` and `{other}`"),
                );
                return;
            };
            difference(places(&one), places(&other))
        }
        (None, None) => {
            let of =
                |cluster: &At<'_>| cluster.get("load_assignment").map(|all| places(&all)).unwrap_or_default();
            difference(of(serving), of(probing))
        }
        _ => Some("only one of the clusters gets its endpoints from EDS".to_owned()),
    };
    if let Some(found) = found {
        findings.push(ENDPOINTS_DIFFER, &probing.path, found);
    }
}

/// Checks that the probe cluster shares the other settings that determine where the serving cluster sends requests.
fn check_placement(source: &Source<'_>, serving: &At<'_>, probing: &At<'_>, findings: &mut Findings) {
    let several_priorities = || {
        let found = match eds(serving) {
            Some((name, _)) => source.assignment(&name),
            None => serving.get("load_assignment"),
        };
        found.is_some_and(|all| places(&all).iter().any(|place| place.priority > 0))
    };
    let checked = |cluster: &At<'_>| !cluster.list("health_checks").is_empty();
    if checked(serving) && !checked(probing) && several_priorities() {
        findings.push(HEALTH_DIFFERS, &probing.path, "no `health_checks`");
    }
    if by_locality(serving) && !by_locality(probing) {
        findings.push(LOCALITY_DIFFERS, &probing.path, "no `locality_lb_config`");
    }
}

/// Returns whether the cluster balances by locality: by the old settings, or by a policy, which may be the fallback of
/// another policy.
fn by_locality(cluster: &At<'_>) -> bool {
    let common = cluster.get("common_lb_config");
    let old = ["locality_weighted_lb_config", "zone_aware_lb_config"]
        .iter()
        .any(|key| common.as_ref().is_some_and(|common| common.get(key).is_some()));
    let by_policy = |policy: &At<'_>| policy.at(&["typed_config", "locality_lb_config"]).is_some();
    old || policies(cluster).iter().any(by_policy)
}

/// Returns the cluster's policies, and those that they fall back to.
fn policies<'a>(cluster: &At<'a>) -> Vec<At<'a>> {
    let listed = |policy: Option<At<'a>>| {
        let list = policy.map(|policy| policy.list("policies")).unwrap_or_default();
        list.into_iter().filter_map(|policy| policy.get("typed_extension_config"))
    };
    let mut all: Vec<At<'a>> = listed(cluster.get("load_balancing_policy")).collect();
    let fallbacks: Vec<At<'a>> =
        all.iter().flat_map(|policy| listed(policy.at(&["typed_config", "fallback_policy"]))).collect();
    all.extend(fallbacks);
    all
}

/// Returns the service name and the source of a cluster with EDS.
fn eds(cluster: &At<'_>) -> Option<(String, Option<Value>)> {
    (cluster.text("type") == Some("EDS")).then(|| {
        let config = cluster.get("eds_cluster_config");
        let name =
            config.as_ref().and_then(|config| config.text("service_name")).filter(|name| !name.is_empty());
        let name = name.or_else(|| cluster.text("name")).unwrap_or_default().to_owned();
        (name, config.and_then(|config| config.get("eds_config")).map(|config| config.value.clone()))
    })
}

fn places(assignment: &At<'_>) -> Vec<Placed> {
    let mut all = Vec::new();
    for group in assignment.list("endpoints") {
        for item in group.list("lb_endpoints") {
            let Some(address) = item.at(&["endpoint", "address"]) else { continue };
            let socket = address.get("socket_address");
            let (host, port) = match &socket {
                Some(socket) => (
                    socket.text("address").unwrap_or_default().to_owned(),
                    socket.number("port_value").unwrap_or(0),
                ),
                None => (address.value.to_string(), 0),
            };
            all.push(Placed {
                priority: group.number("priority").unwrap_or(0),
                locality: group
                    .get("locality")
                    .map(|locality| locality.value.to_string())
                    .unwrap_or_default(),
                locality_weight: group.number("load_balancing_weight").unwrap_or(0),
                weight: item.number("load_balancing_weight").unwrap_or(1),
                address: host,
                port,
            });
        }
    }
    all.sort();
    all
}

/// Returns the endpoints as if all had the same placement.
fn addresses(places: Vec<Placed>) -> Vec<Placed> {
    let anywhere = |Placed { address, port, .. }| Placed {
        priority: 0,
        locality: String::new(),
        locality_weight: 0,
        weight: 1,
        address,
        port,
    };
    let mut all: Vec<Placed> = places.into_iter().map(anywhere).collect();
    all.sort();
    all
}

/// Describes how two lists differ. Lists that differ in every port count as equal, because agents may answer probes on
/// a separate port.
fn difference(serving: Vec<Placed>, probing: Vec<Placed>) -> Option<String> {
    if serving == probing {
        return None;
    }
    let hosts = |list: &[Placed]| {
        let mut list: Vec<Placed> = list.iter().map(|place| Placed { port: 0, ..place.clone() }).collect();
        list.sort();
        list
    };
    let is_served = |place: &Placed| {
        serving.iter().any(|other| (&other.address, other.port) == (&place.address, place.port))
    };
    if hosts(&serving) == hosts(&probing) && !probing.iter().any(is_served) {
        return None;
    }
    let show = |place: &Placed| {
        format!("{}:{} (priority {}, weight {})", place.address, place.port, place.priority, place.weight)
    };
    let only = |list: &[Placed], other: &[Placed]| list.iter().find(|place| !other.contains(place)).map(show);
    Some(match (only(&serving, &probing), only(&probing, &serving)) {
        (Some(place), _) => format!("{place} is not in the probe cluster, or has another placement there"),
        (None, Some(place)) => {
            format!("{place} is not in the serving cluster, or has another placement there")
        }
        (None, None) => "one cluster lists an endpoint more often than the other".to_owned(),
    })
}

/// Key of a cluster's HTTP options.
const HTTP_OPTIONS: &str = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
