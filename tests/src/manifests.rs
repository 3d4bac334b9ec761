//! The shipped files of `envoy-configs/`, as data.

use anyhow::{Context as _, Result};
use serde::Deserialize as _;
use serde_json::Value;

use crate::workspace_root;

/// Every document of `path` under `envoy-configs/`.
pub fn documents(path: &str) -> Result<Vec<Value>> {
    let file = workspace_root().join("envoy-configs").join(path);
    let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    parse(&text).with_context(|| file.display().to_string())
}

/// Every document of a YAML text; empty ones are left out.
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
