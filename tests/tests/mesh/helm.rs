//! Helm, and helpers that read the objects that it renders from the chart `charts/prequal`.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context as _, Result, ensure};
use prequal_testbed::manifests::parse;
use prequal_testbed::{skip, target_dir, workspace_root};
use serde_json::Value;
use tempfile::TempDir;

/// Values without a default, set as in the Kustomize files.
pub const NEEDED: [&str; 3] = [
    "registry=registry.example.com/prequal",
    "replicas.app.image=registry.example.com/replica:1.0.0",
    "replicas.app.args={--listen,127.0.0.1:9000}",
];

pub fn chart() -> PathBuf {
    workspace_root().join("charts/prequal")
}

/// Helm with its own home folder: the one that xtask builds, or the machine's.
pub struct Helm {
    program: PathBuf,
    home: TempDir,
}

impl Helm {
    /// Finds Helm. If there is none, reports that the test is skipped, and returns `None`.
    pub fn find() -> Result<Option<Self>> {
        let built = target_dir().join("bin/helm");
        let program = if built.is_file() { built } else { "helm".into() };
        let helm = Self { program, home: TempDir::new()? };
        if helm.run(&["version"]).is_err() {
            skip("no `helm`: run `cargo xtask helm`, which builds it with Go 1.26 or later");
            return Ok(None);
        }
        Ok(Some(helm))
    }

    pub fn run(&self, arguments: &[&str]) -> Result<Output> {
        let home = self.home.path();
        Command::new(&self.program)
            .args(arguments)
            .env("HELM_CACHE_HOME", home)
            .env("HELM_CONFIG_HOME", home)
            .env("HELM_DATA_HOME", home)
            .output()
            .with_context(|| self.program.display().to_string())
    }

    /// Renders the release `shop` in the namespace `prequal` with these values and flags.
    pub fn template(&self, chart: &Path, values: &[&str], flags: &[&str]) -> Result<Output> {
        let chart = chart.to_str().context("UTF-8")?;
        let mut arguments = vec!["template", "shop", chart, "--namespace", "prequal"];
        arguments.extend(values.iter().flat_map(|value| ["--set", value]));
        arguments.extend(flags);
        self.run(&arguments)
    }

    pub fn objects(&self, chart: &Path, values: &[&str], flags: &[&str]) -> Result<Vec<Value>> {
        let output = self.template(chart, values, flags)?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{values:?} {flags:?}: {error}");
        parse(&String::from_utf8(output.stdout)?)
    }
}

pub fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

/// The settings of the filter, or of the native module.
pub fn filter_settings(envoy: &Value) -> Result<String> {
    let manager =
        &envoy["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
    let filter = &manager["http_filters"][1]["typed_config"]["config"]["configuration"]["value"];
    // The native module's settings are in the policy.
    let policy = &envoy["static_resources"]["clusters"][0]["load_balancing_policy"]["policies"][0];
    let native = &policy["typed_extension_config"]["typed_config"]["lb_policy_config"]["value"];
    Ok(filter.as_str().or(native.as_str()).context("settings")?.to_owned())
}

/// The agent's container in `pod`, and whether it is a native sidecar.
pub fn agent(pod: &Value) -> Result<(&Value, bool)> {
    let named = |key: &str| {
        let containers = pod[key].as_array().into_iter().flatten();
        containers.filter(|container| container["name"] == "probe-agent").collect::<Vec<_>>()
    };
    match (named("containers")[..].first(), named("initContainers")[..].first()) {
        (Some(container), None) => Ok((container, false)),
        (None, Some(container)) => Ok((container, true)),
        found => anyhow::bail!("{found:?}"),
    }
}

pub fn arguments(container: &Value) -> Vec<String> {
    let args = container["args"].as_array().into_iter().flatten().filter_map(Value::as_str);
    args.map(|arg| arg.replace("$(POD_IP)", "10.0.0.1")).collect()
}
