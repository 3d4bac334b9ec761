//! Extracts the schemas that the tests need from Istio's `customresourcedefinitions.gen.yaml`, see
//! `tests/schemas/README.md`: `cargo run -p prequal-testbed --example refresh_schemas -- PATH`.

use anyhow::{Context as _, Result};
use prequal_testbed::workspace_root;
use serde::Deserialize as _;
use serde_json::{Value, json};

/// The kinds that `envoy-configs/` uses, with their versions.
const KINDS: [(&str, &str); 9] = [
    ("AuthorizationPolicy", "v1"),
    ("DestinationRule", "v1"),
    ("EnvoyFilter", "v1alpha3"),
    ("Gateway", "v1"),
    ("PeerAuthentication", "v1"),
    ("Sidecar", "v1"),
    ("TrafficExtension", "v1alpha1"),
    ("VirtualService", "v1"),
    ("WasmPlugin", "v1alpha1"),
];

fn main() -> Result<()> {
    let path = std::env::args_os().nth(1).context("the path of customresourcedefinitions.gen.yaml")?;
    let text = std::fs::read_to_string(path)?;
    let documents = yaml_serde::Deserializer::from_str(&text).map(Value::deserialize);
    let documents = documents.collect::<Result<Vec<_>, _>>()?;
    for (kind, version) in KINDS {
        let spec = documents.iter().map(|it| &it["spec"]).find(|spec| spec["names"]["kind"] == kind);
        let spec = spec.with_context(|| format!("no CRD of {kind}"))?;
        let versions = spec["versions"].as_array().with_context(|| format!("versions of {kind}"))?;
        let found = versions.iter().find(|it| it["name"] == version);
        let found = found.with_context(|| format!("{kind} has no version {version}"))?;
        let mut schema = found["schema"]["openAPIV3Schema"]["properties"]["spec"].clone();
        drop_descriptions(&mut schema);
        let group = spec["group"].as_str().context("a group")?;
        let kept = json!({"apiVersion": format!("{group}/{version}"), "kind": kind, "spec": schema});
        let file = workspace_root().join(format!("tests/schemas/istio/{kind}.json"));
        std::fs::write(file, format!("{kept:#}\n"))?;
    }
    Ok(())
}

/// Drops descriptions, which are two thirds of the file. A property called `description` is an object and stays.
fn drop_descriptions(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            fields.retain(|name, value| name != "description" || !value.is_string());
            fields.values_mut().for_each(drop_descriptions);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_descriptions),
        _ => {}
    }
}
