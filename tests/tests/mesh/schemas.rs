//! Checks the manifests against the published schemas: Istio's from its CRDs, Kubernetes' from the types that
//! `k8s-openapi` generates from its OpenAPI document. An unknown field is an error, because a cluster that does not
//! validate would silently drop a misspelt field.
//!
//! Not checked here: values inside `patch.value` (free-form in the CRD; the other tests load them into Envoy) and the
//! rules in CEL.

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use prequal_testbed::workspace_root;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use prequal_testbed::manifests::{documents, find};

/// Checks one object.
pub fn check(object: &Value) -> Result<()> {
    let text = |field: &Value| field.as_str().unwrap_or_default().to_owned();
    let (version, kind) = (text(&object["apiVersion"]), text(&object["kind"]));
    let name = text(&object["metadata"]["name"]);
    ensure!(!name.is_empty(), "{kind} without a name");
    let checked = match (version.as_str(), kind.as_str()) {
        ("v1", "ConfigMap") => typed::<ConfigMap>(object),
        ("v1", "Namespace") => typed::<Namespace>(object),
        ("v1", "Service") => typed::<Service>(object),
        ("v1", "ServiceAccount") => typed::<ServiceAccount>(object),
        ("apps/v1", "DaemonSet") => typed::<DaemonSet>(object),
        ("apps/v1", "Deployment") => typed::<Deployment>(object),
        ("networking.k8s.io/v1", "NetworkPolicy") => typed::<NetworkPolicy>(object),
        ("policy/v1", "PodDisruptionBudget") => typed::<PodDisruptionBudget>(object),
        _ if version.contains("istio.io/") => custom(object, &version, &kind),
        _ => bail!("no schema for {version} {kind}"),
    };
    checked.with_context(|| format!("{kind} {name}"))
}

/// An object matches its schema if nothing is lost or added when it passes through its type.
fn typed<T: DeserializeOwned + Serialize>(object: &Value) -> Result<()> {
    let known: T = serde_json::from_value(object.clone())?;
    let known = serde_json::to_value(known)?;
    let mut wrong = Vec::new();
    differences("", object, &known, &mut wrong);
    ensure!(wrong.is_empty(), "{}", wrong.join("; "));
    Ok(())
}

/// The paths at which `written` differs from `known`.
pub fn differences(path: &str, written: &Value, known: &Value, wrong: &mut Vec<String>) {
    match (written, known) {
        (Value::Object(written), Value::Object(known)) => {
            for (key, value) in written {
                match known.get(key) {
                    Some(known) => differences(&format!("{path}/{key}"), value, known, wrong),
                    None => wrong.push(format!("{path}/{key} is not a known field")),
                }
            }
            wrong.extend(
                known
                    .keys()
                    .filter(|key| !written.contains_key(*key))
                    .map(|key| format!("{path}/{key} is required")),
            );
        }
        (Value::Array(written), Value::Array(known)) if written.len() == known.len() => {
            for (index, (written, known)) in written.iter().zip(known).enumerate() {
                differences(&format!("{path}/{index}"), written, known, wrong);
            }
        }
        _ if written == known => {}
        _ => wrong.push(format!("{path}: {written} is read as {known}")),
    }
}

/// Checks an Istio object against its CRD.
fn custom(object: &Value, version: &str, kind: &str) -> Result<()> {
    let file = workspace_root().join(format!("tests/schemas/istio/{kind}.json"));
    let text = std::fs::read_to_string(&file).with_context(|| format!("no schema: {}", file.display()))?;
    let schema: Value = serde_json::from_str(&text)?;
    ensure!(
        schema["apiVersion"] == version,
        "the schema here is of {}, not of {version}",
        schema["apiVersion"]
    );
    let mut spec = schema["spec"].clone();
    strict(&mut spec);
    let validator = jsonschema::draft7::new(&spec)?;
    let wrong: Vec<String> = validator
        .iter_errors(&object["spec"])
        .map(|error| format!("spec{}: {error}", error.instance_path()))
        .collect();
    ensure!(wrong.is_empty(), "{}", wrong.join("; "));
    // The rest of the object is checked by Kubernetes' own rules.
    let mut rest = object.clone();
    rest.as_object_mut().context("an object")?.remove("spec");
    rest["apiVersion"] = json!("v1");
    rest["kind"] = json!("ConfigMap");
    typed::<ConfigMap>(&rest)
}

/// An OpenAPI schema of Kubernetes as a JSON schema that refuses unknown fields.
fn strict(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            if fields.get("x-kubernetes-int-or-string") == Some(&json!(true)) {
                fields.remove("type");
            }
            // Alternatives under `oneOf` list some properties only to say which of them exclude each other.
            if fields.get("type") == Some(&json!("object"))
                && fields.contains_key("properties")
                && fields.get("x-kubernetes-preserve-unknown-fields") != Some(&json!(true))
            {
                fields.insert("additionalProperties".into(), json!(false));
            }
            fields.values_mut().for_each(strict);
        }
        Value::Array(items) => items.iter_mut().for_each(strict),
        _ => {}
    }
}

/// Every YAML file below `envoy-configs/<folder>` that contains objects of a cluster.
fn files(folder: &str) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let mut folders: Vec<PathBuf> = vec![workspace_root().join("envoy-configs").join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() {
                folders.push(path);
            } else if name.ends_with(".yaml") && name != "envoy.yaml" && name != "kustomization.yaml" {
                let path = path.strip_prefix(workspace_root().join("envoy-configs"))?;
                found.push(path.to_string_lossy().into_owned());
            }
        }
    }
    found.sort();
    Ok(found)
}

#[test]
fn every_object_for_istio_matches_the_schema() -> Result<()> {
    let files = files("istio")?;
    assert!(files.len() >= 6, "{files:?}");
    for file in files {
        for object in documents(&file)? {
            check(&object).with_context(|| file.clone())?;
        }
    }
    Ok(())
}

#[test]
fn mistakes_in_an_object_are_reported() -> Result<()> {
    let istio = documents("istio/client-sidecar.yaml")?;
    let server = documents("istio/server-agent.yaml")?;
    let plugin = find(&istio, "WasmPlugin", "prequal");
    let deployment = find(&server, "Deployment", "replicas");
    for (whole, pointer, value, expected) in [
        (&plugin, "/spec/failStrategi", json!("FAIL_RELOAD"), "failStrategi"),
        (&plugin, "/spec/failStrategy", json!("FAIL_SOFTLY"), "FAIL_SOFTLY"),
        (&plugin, "/spec/match/0/port", json!([]), "port"),
        (&plugin, "/metadata/nmae", json!("prequal"), "nmae"),
        (&deployment, "/spec/template/spec/container", json!([]), "container"),
        (&deployment, "/spec/replicas", json!("four"), "expected i32"),
        (&deployment, "/spec/template/spec/containers/0/resources/request", json!({}), "request"),
    ] {
        let mut object = whole.clone();
        let (parent, field) = pointer.rsplit_once('/').context("a pointer")?;
        object.pointer_mut(parent).context("its parent")?[field] = value;
        let error = check(&object).expect_err(pointer);
        assert!(format!("{error:#}").contains(expected), "{pointer}: {error:#}");
    }
    let mut nameless = plugin.clone();
    nameless["spec"].as_object_mut().context("a spec")?.remove("url");
    assert!(format!("{:#}", check(&nameless).expect_err("no url")).contains("url"));
    let mut selectorless = deployment;
    selectorless["spec"].as_object_mut().context("a spec")?.remove("selector");
    assert!(format!("{:#}", check(&selectorless).expect_err("no selector")).contains("selector"));
    Ok(())
}
