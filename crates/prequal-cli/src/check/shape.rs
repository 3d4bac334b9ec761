//! Precondition of all other checks: fields have the types that Envoy expects.

use serde_json::Value;

use super::codes::{MERGE_KEY, WRONG_TYPE};
use super::{At, Findings};

/// The type of a field.
#[derive(Clone, Copy)]
enum Kind {
    Text,
    List,
    Object,
}

/// Reports fields of a wrong type and merge keys, anywhere below `place`.
pub(super) fn check(place: &At<'_>, findings: &mut Findings) {
    match place.value {
        Value::Array(items) => {
            for (index, value) in items.iter().enumerate() {
                check(&At { path: format!("{}[{index}]", place.path), value }, findings);
            }
        }
        Value::Object(fields) => {
            if is_free(place) {
                return;
            }
            for key in fields.keys() {
                let Some(below) = place.get(key) else { continue };
                if key == "<<" {
                    findings.push(MERGE_KEY, &below.path, "`<<`");
                    continue;
                }
                if let Some((_, kind)) = FIELDS.iter().find(|(name, _)| name == key)
                    && let Some(problem) = problem(*kind, below.value)
                {
                    findings.push(WRONG_TYPE, &below.path, problem);
                } else if !FREE.contains(&key.as_str()) {
                    check(&below, findings);
                }
            }
        }
        _ => {}
    }
}

/// Returns whether a message may have any fields: it is a `Struct`, or its type is not one of Envoy's.
fn is_free(message: &At<'_>) -> bool {
    let Some(mut name) = message.text("@type") else { return false };
    if name.ends_with("TypedStruct") {
        name = message.text("type_url").unwrap_or_default();
    }
    let name = name.rsplit('/').next().unwrap_or_default();
    // Its `route_config` is a list.
    !name.starts_with("envoy.") || name.ends_with(".DubboProxy")
}

fn problem(kind: Kind, value: &Value) -> Option<String> {
    let (fits, wanted) = match kind {
        Kind::Text => (value.is_string(), "text"),
        Kind::Object => (value.is_object(), "an object"),
        Kind::List => {
            if let Some(items) = value.as_array()
                && let Some(index) = items.iter().position(Value::is_null)
            {
                return Some(format!("item {index} is null"));
            }
            (value.is_array(), "a list")
        }
    };
    let got = match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    (!fits).then(|| format!("must be {wanted}, is {got}"))
}

/// Fields whose content is free-form, at least in part.
const FREE: &[&str] = &[
    "metadata",
    "filter_metadata",
    "filter_context",
    "layers",
    "entries",
    "json_format",
    "typed_json_format",
    "transport_socket_matches",
];

/// Fields that the checks read, by name: each has the same type wherever it occurs in Envoy's API.
const FIELDS: &[(&str, Kind)] = &[
    ("@type", Kind::Text),
    ("admin", Kind::Object),
    ("bootstrap_extensions", Kind::List),
    ("circuit_breakers", Kind::Object),
    ("clusters", Kind::List),
    ("configs", Kind::List),
    ("direct_response", Kind::Object),
    ("dynamic_module_config", Kind::Object),
    ("dynamic_resources", Kind::Object),
    ("eds_cluster_config", Kind::Object),
    ("endpoints", Kind::List),
    ("filter_chains", Kind::List),
    ("filters", Kind::List),
    ("http_filters", Kind::List),
    ("lb_endpoints", Kind::List),
    ("lb_policy_config", Kind::Object),
    ("lb_subset_config", Kind::Object),
    ("listeners", Kind::List),
    ("load_assignment", Kind::Object),
    ("load_balancing_policy", Kind::Object),
    ("match", Kind::Object),
    ("override_host_sources", Kind::List),
    ("reload_config", Kind::Object),
    ("request_headers_to_remove", Kind::List),
    ("request_mutations", Kind::List),
    ("response_headers_to_remove", Kind::List),
    ("response_mutations", Kind::List),
    ("retry_host_predicate", Kind::List),
    ("retry_policy", Kind::Object),
    ("route", Kind::Object),
    ("route_config", Kind::Object),
    ("routes", Kind::List),
    ("session_state", Kind::Object),
    ("socket_address", Kind::Object),
    ("static_resources", Kind::Object),
    ("stats_config", Kind::Object),
    ("stats_tags", Kind::List),
    ("subset_selectors", Kind::List),
    ("thresholds", Kind::List),
    ("typed_config", Kind::Object),
    ("typed_extension_config", Kind::Object),
    ("typed_extension_protocol_options", Kind::Object),
    ("upstream_http_filters", Kind::List),
    ("upstream_log", Kind::List),
    ("virtual_hosts", Kind::List),
    ("vm_config", Kind::Object),
    ("weighted_clusters", Kind::Object),
];
