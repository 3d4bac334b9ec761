//! Writes `tests/envoy-gateway/translated.json`: Envoy Gateway's translation of `envoy-configs/envoy-gateway/`. With
//! `--check` it writes nothing and fails if the translation differs. `cargo xtask gateway` runs it. Needs Go 1.26. The
//! first run takes several minutes and 3 GB of Go's caches.
//!
//! The translating program, `tests/envoy-gateway/translate.go`, uses Envoy Gateway's internal packages. Therefore a
//! copy of the module is made in `target/`, and the program is built there as one of its commands.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use prequal_testbed::manifests::{ENVOY_GATEWAY, TRANSLATE, translated};
use prequal_testbed::{target_dir, workspace_root};
use serde_json::Value;

fn main() -> Result<()> {
    let check = match &std::env::args().skip(1).collect::<Vec<_>>()[..] {
        [] => false,
        [flag] if flag == "--check" => true,
        _ => bail!("the only argument is `--check`"),
    };
    let text = format!("{:#}\n", translated(&build()?)?);
    let file = workspace_root().join("tests/envoy-gateway/translated.json");
    if check {
        ensure!(
            std::fs::read_to_string(&file)? == text,
            "{} differs from the translation: run `cargo xtask gateway`",
            file.display()
        );
        return Ok(());
    }
    Ok(std::fs::write(file, text)?)
}

fn build() -> Result<PathBuf> {
    // Each release is built in its own folder.
    let version = ENVOY_GATEWAY.rsplit('@').next().unwrap_or_default();
    let folder = target_dir().join(format!("envoy-gateway-{version}"));
    let program = target_dir().join("bin/envoy-gateway-translate");
    let command = folder.join("cmd/prequal-translate");
    if !command.is_dir() {
        let output =
            Command::new("go").args(["mod", "download", "-json", ENVOY_GATEWAY]).output().context("no Go")?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        let found: Value = serde_json::from_slice(&output.stdout)?;
        copy(Path::new(found["Dir"].as_str().context("a folder")?), &folder)?;
        std::fs::create_dir(&command)?;
    }
    std::fs::copy(workspace_root().join(TRANSLATE), command.join("main.go"))?;
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
