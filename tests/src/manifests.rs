//! The shipped files of `envoy-configs/`, as data.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize as _;
use serde_json::Value;

use crate::workspace_root;

/// Every document of `path` under `envoy-configs/`.
pub fn documents(path: &str) -> Result<Vec<Value>> {
    let file = workspace_root().join("envoy-configs").join(path);
    let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    parse(&text).with_context(|| file.display().to_string())
}

/// Every document of a YAML text, except empty ones.
pub fn parse(text: &str) -> Result<Vec<Value>> {
    let documents = yaml_serde::Deserializer::from_str(text).map(Value::deserialize);
    let documents = documents.collect::<std::result::Result<Vec<_>, _>>().context("not YAML")?;
    Ok(documents.into_iter().filter(|document| !document.is_null()).collect())
}

/// The document of `kind` called `name`.
pub fn find(documents: &[Value], kind: &str, name: &str) -> Value {
    let found = documents.iter().find(|it| it["kind"] == kind && it["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("no {kind} {name}")).clone()
}

/// The objects of `envoy-configs/envoy-gateway/` as docs/envoy-gateway.md applies them: without the patches, or with them
/// and the setting that relies on them.
pub fn envoy_gateway(patched: bool) -> Result<Vec<Value>> {
    let mut objects = Vec::new();
    for file in ["gateway", "replicas", "prequal"] {
        objects.extend(documents(&format!("envoy-gateway/{file}.yaml"))?);
    }
    if patched {
        objects.extend(documents("envoy-gateway/patches.yaml")?);
        let policy = objects.iter_mut().find(|it| it["kind"] == "EnvoyExtensionPolicy");
        policy.context("the filter")?["spec"]["wasm"][0]["config"]["clusters"][0]["verified_probes"] =
            true.into();
    }
    Ok(objects)
}

/// Envoy Gateway's translation of [`envoy_gateway`], with the objects as `input`. `program` is the compiled
/// `tests/envoy-gateway/translate.go`.
pub fn translated(program: &Path, patched: bool) -> Result<Value> {
    let objects = envoy_gateway(patched)?;
    let mut child = Command::new(program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| program.display().to_string())?;
    // JSON is valid YAML. The program reads all of its input before it writes.
    let text: Vec<String> = objects.iter().map(Value::to_string).collect();
    child.stdin.take().context("its input")?.write_all(text.join("\n---\n").as_bytes())?;
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "the translation failed, see above");
    let mut found: Value = serde_json::from_slice(&output.stdout)?;
    found["input"] = objects.into();
    Ok(found)
}
