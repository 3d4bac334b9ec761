//! Writes `tests/envoy-gateway/translated.json`: Envoy Gateway's translation of `envoy-configs/envoy-gateway/`. Needs Go
//! 1.26 and, the first time, several minutes and 2 GB of Go's caches: `cargo run -p prequal-testbed --example
//! refresh_envoy_gateway`.
//!
//! The translating program, `tests/envoy-gateway/translate.go`, uses Envoy Gateway's internal packages. Therefore a copy of
//! the module is made in `target/`, and the program is built there as one of its commands.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use prequal_testbed::{manifests, target_dir, workspace_root};
use serde_json::{Map, Value, json};

/// The release whose translation is committed.
const MODULE: &str = "github.com/envoyproxy/gateway@v1.9.1";

fn main() -> Result<()> {
    let translate = build()?;
    let mut written = Map::from_iter([("module".to_owned(), json!(MODULE))]);
    for (name, patched) in [("shipped", false), ("patched", true)] {
        written.insert(name.to_owned(), manifests::translated(&translate, patched)?);
    }
    let file = workspace_root().join("tests/envoy-gateway/translated.json");
    std::fs::write(file, format!("{:#}\n", Value::Object(written)))?;
    Ok(())
}

fn build() -> Result<PathBuf> {
    let folder = target_dir().join("envoy-gateway");
    let program = target_dir().join("bin/envoy-gateway-translate");
    let command = folder.join("cmd/prequal-translate");
    if !command.is_dir() {
        let output =
            Command::new("go").args(["mod", "download", "-json", MODULE]).output().context("no Go")?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        let found: Value = serde_json::from_slice(&output.stdout)?;
        copy(Path::new(found["Dir"].as_str().context("a folder")?), &folder)?;
        std::fs::create_dir(&command)?;
    }
    let source = workspace_root().join("tests/envoy-gateway/translate.go");
    std::fs::copy(source, command.join("main.go"))?;
    let status = Command::new("go")
        .args(["build", "-o"])
        .arg(&program)
        .arg("./cmd/prequal-translate")
        .current_dir(&folder)
        .status()?;
    ensure!(status.success(), "go build failed");
    Ok(program)
}

/// Copies a folder of Go's cache, in which everything is read-only.
fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            std::fs::write(&target, std::fs::read(entry.path())?)?;
        }
    }
    Ok(())
}
