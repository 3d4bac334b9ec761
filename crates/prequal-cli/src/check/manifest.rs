//! Istio's manifests: the source of the module of a WasmPlugin or a TrafficExtension, the effect if it cannot be
//! fetched, and the module's settings.
//!
//! `docs/guide/istio.md` ("How safe the module's source is") gives the reasons. Everything else is checked on a
//! config_dump.

use anyhow::{Result, bail, ensure};
use prequal_core::config::Config;
use serde_json::Value;

use super::codes::{FAIL_CLOSED, FAIL_OPEN, FILTER_MISSING, MODULE_FETCHED, MODULE_MOVES, SETTINGS};
use super::{At, Findings};

/// Returns whether the first document of a file is a Kubernetes object, and therefore not a configuration of Envoy.
pub(super) fn is_manifest(first: &Value) -> bool {
    // The reader has converted `apiVersion` to snake_case, as for Envoy.
    first["api_version"].is_string() && first["kind"].is_string()
}

/// Checks every object that loads the module.
///
/// # Errors
/// If none of the objects loads a module, which suggests that the wrong file was given.
pub(super) fn check(documents: &[Value], must_be_dump: bool, findings: &mut Findings) -> Result<()> {
    ensure!(!must_be_dump, "it is not a config_dump: it contains Kubernetes objects");
    // `kubectl get -o yaml` wraps its output in a list.
    let objects = documents.iter().flat_map(|document| {
        let items = document["items"].as_array().map_or(&[][..], Vec::as_slice);
        std::iter::once(document).chain(items)
    });
    let (mut plugins, mut checked) = (0, 0);
    for object in objects {
        let Some(wasm) = module(object) else { continue };
        plugins += 1;
        if is_prequals(object, wasm.value) {
            checked += 1;
            check_source(&wasm, findings);
            check_settings(&wasm, findings);
        }
    }
    if plugins == 0 {
        bail!("none of its Kubernetes objects is a WasmPlugin or TrafficExtension with a module");
    }
    if checked == 0 {
        findings.push(FILTER_MISSING, "", format!("WasmPlugins and TrafficExtensions: {plugins}"));
    }
    Ok(())
}

/// Returns the module's fields, whose place depends on the kind of object.
fn module(object: &Value) -> Option<At<'_>> {
    let field = match object["kind"].as_str() {
        Some("WasmPlugin") => "spec",
        Some("TrafficExtension") => "spec.wasm",
        _ => return None,
    };
    let value = field.split('.').try_fold(object, |place, key| place.get(key))?;
    let text = |key: &str| object["metadata"][key].as_str().unwrap_or_default();
    let kind = object["kind"].as_str().unwrap_or_default();
    Some(At { path: format!("{kind} {}/{}: {field}", text("namespace"), text("name")), value })
}

/// Returns whether the module is Prequal's. Other modules in the file are ignored.
fn is_prequals(object: &Value, wasm: &Value) -> bool {
    let named = [&object["metadata"]["name"], &wasm["pluginName"], &wasm["url"]];
    named.iter().any(|name| name.as_str().is_some_and(|name| name.contains("prequal")))
        || wasm["pluginConfig"].to_string().contains("\"probe_cluster\"")
}

fn check_source(wasm: &At<'_>, findings: &mut Findings) {
    let strategy = wasm.text("failStrategy").unwrap_or("unset, which is FAIL_CLOSE");
    let path = format!("{}.failStrategy", wasm.path);
    let url = wasm.text("url").unwrap_or_default();
    // Istio treats a URL without a scheme as an image.
    let is_file = url.starts_with("file://");
    if !matches!(strategy, "FAIL_OPEN" | "FAIL_RELOAD") {
        findings.push(FAIL_CLOSED, &path, strategy);
    }
    if is_file {
        if strategy == "FAIL_OPEN" {
            findings.push(FAIL_OPEN, &path, strategy);
        }
        return;
    }
    if strategy != "FAIL_OPEN" {
        findings.push(MODULE_FETCHED, &path, format!("`failStrategy` is {strategy}, `url` is {url}"));
    }
    let by_web = url.starts_with("http://") || url.starts_with("https://");
    let digest = !by_web && url.contains("@sha256:");
    if !digest && wasm.text("sha256").is_none_or(str::is_empty) {
        findings.push(MODULE_MOVES, &format!("{}.url", wasm.path), url);
    }
}

/// Checks `pluginConfig`, which Istio passes on as JSON. Without it the filter has no cluster to balance.
fn check_settings(wasm: &At<'_>, findings: &mut Findings) {
    let path = format!("{}.pluginConfig", wasm.path);
    let Some(settings) = wasm.get("pluginConfig") else {
        return findings.push(SETTINGS, &path, "`pluginConfig` is missing");
    };
    if let Err(errors) = Config::parse(&settings.value.to_string()) {
        errors.0.iter().for_each(|error| findings.push(SETTINGS, &path, error.to_string()));
    }
}
