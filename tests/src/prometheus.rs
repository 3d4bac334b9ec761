//! A real Prometheus as a child process, and its HTTP API.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;
use tempfile::TempDir;

use crate::client::Client;
use crate::config::target_dir;
use crate::process::Process;
use crate::runtime::eventually;

/// A running Prometheus; it stops on drop.
#[derive(Debug)]
pub struct Prometheus {
    addr: SocketAddr,
    _process: Process,
    _dir: TempDir,
}

impl Prometheus {
    /// Starts Prometheus with `config` and the rule file `rules.yaml`, which `config` may refer to, and waits until it
    /// is ready. It listens on a free port of 127.0.0.1.
    pub fn start(config: &Value, rules: &str) -> Result<Self> {
        let dir = TempDir::new()?;
        let file = |name: &str| dir.path().join(name);
        fs::write(file("rules.yaml"), rules)?;
        // JSON is valid YAML.
        fs::write(file("prometheus.yml"), config.to_string())?;
        let log = file("prometheus.log");
        let mut command = Command::new(prometheus_tool("prometheus"));
        command.arg("--config.file").arg(file("prometheus.yml"));
        command.arg("--storage.tsdb.path").arg(file("data"));
        command.arg("--web.listen-address=127.0.0.1:0");
        let mut process = Process::spawn("prometheus", &mut command, log.clone(), None)?;
        let addr = eventually("Prometheus names its port", Duration::from_secs(20), || {
            if let Some(status) = process.exited() {
                return Some(Err(anyhow::anyhow!("Prometheus ended ({status}):\n{}", process.log())));
            }
            let text = fs::read_to_string(&log).ok()?;
            let line = text.lines().find(|line| line.contains("Listening on"))?;
            Some(Ok(line.rsplit_once("address=")?.1.trim().parse().ok()?))
        })?;
        let ready = || Client::new(addr).get("/-/ready").is_ok_and(|reply| reply.status == 200).then_some(());
        eventually("Prometheus is ready", Duration::from_secs(20), ready);
        Ok(Self { addr, _process: process, _dir: dir })
    }

    /// The samples that `query` yields now. An error says why it cannot be evaluated.
    pub fn query(&self, query: &str) -> Result<Vec<Value>> {
        let answer = self.api(&format!("query?query={}", encoded(query)))?;
        answer["result"].as_array().cloned().with_context(|| format!("no vector: {query}: {answer}"))
    }

    /// The values of `label` among the series that `selector` matches.
    pub fn label_values(&self, label: &str, selector: &str) -> Result<Vec<String>> {
        let answer = self.api(&format!("label/{label}/values?match[]={}", encoded(selector)))?;
        let values = answer.as_array().context("no list of values")?;
        Ok(values.iter().filter_map(|value| value.as_str().map(str::to_owned)).collect())
    }

    /// GETs `/api/v1/<path>` and returns `data`.
    pub fn api(&self, path: &str) -> Result<Value> {
        let reply = Client::new(self.addr).get(&format!("/api/v1/{path}"))?;
        let mut answer: Value = serde_json::from_str(&reply.text()).context("the API answers JSON")?;
        ensure!(answer["status"] == "success", "{path}: {}", answer["error"]);
        Ok(answer["data"].take())
    }
}

/// Path of `prometheus` or `promtool`: where `cargo xtask test` unpacks Debian's package, else just the name.
pub fn prometheus_tool(name: &str) -> PathBuf {
    let unpacked = target_dir().join("prometheus/usr/bin").join(name);
    if unpacked.is_file() { unpacked } else { name.into() }
}

/// Why Prometheus is not available here; `None` if it is.
pub fn missing_prometheus() -> Option<String> {
    let runs = |name| Command::new(prometheus_tool(name)).arg("--version").output().is_ok();
    (!runs("prometheus") || !runs("promtool"))
        .then(|| "no `prometheus` with `promtool`; on Debian: apt-get install prometheus".to_owned())
}

fn encoded(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}
