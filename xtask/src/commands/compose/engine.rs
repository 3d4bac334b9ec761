//! The container engine: finds the installed Docker Compose, and manages one project with it.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

use crate::{progress, run, workspace};

/// The form in which the demo's Envoy runs Prequal.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, clap::ValueEnum)]
pub(crate) enum ModuleForm {
    /// The WebAssembly filter
    #[default]
    Wasm,
    /// The native module (docs/guide/native.md, experimental)
    Native,
}

impl ModuleForm {
    /// Name of Envoy's configuration file in its image.
    fn config(self) -> &'static str {
        match self {
            Self::Wasm => "envoy-prequal.yaml",
            Self::Native => "envoy-native.yaml",
        }
    }
}

/// The demo under one project name. Several projects can run side by side.
#[derive(Clone, Debug)]
pub(crate) struct Project {
    /// `docker-compose`, or `docker compose`.
    compose: Vec<String>,
    name: String,
    /// Use any free ports of this machine instead of the documented ones.
    free_ports: bool,
    v1: bool,
    module: ModuleForm,
}

impl Project {
    /// The demo as a person runs it; `COMPOSE_PROJECT_NAME` renames it, as it does for compose itself.
    pub(crate) fn usual() -> Result<Self> {
        let name = std::env::var("COMPOSE_PROJECT_NAME").unwrap_or_else(|_| USUAL_NAME.to_owned());
        Self::named(name, false)
    }

    /// A separate project on free ports.
    pub(crate) fn apart() -> Result<Self> {
        Self::named(format!("{USUAL_NAME}-check-{}", std::process::id()), true)
    }

    fn named(name: String, free_ports: bool) -> Result<Self> {
        if !run::succeeds(run::tool("docker").arg("--version")) {
            bail!("there is no `docker` here; on Debian, as root: {INSTALL}");
        }
        if !run::succeeds(run::tool("docker").args(["version", "--format", "{{.Server.Version}}"])) {
            bail!("no Docker engine answers; start it (`dockerd`, as root), or see `docker version`");
        }
        let mut ways: Vec<Vec<String>> =
            vec![vec!["docker".into(), "compose".into()], vec!["docker-compose".into()]];
        if let Some(given) = std::env::var_os("DOCKER_COMPOSE") {
            ways = vec![vec![given.to_string_lossy().into_owned()]];
        }
        for compose in ways {
            let mut command = run::tool(&compose[0]);
            command.args(&compose[1..]).args(["version", "--short"]);
            let Ok(version) = run::output(&mut command) else { continue };
            let v1 = version.trim().trim_start_matches('v').starts_with("1.");
            return Ok(Self { compose, name, free_ports, v1, module: ModuleForm::default() });
        }
        bail!("there is neither `docker compose` nor `docker-compose` here; on Debian, as root: {INSTALL}");
    }

    /// The same project with this form of Prequal.
    pub(crate) fn with(self, module: ModuleForm) -> Self {
        Self { module, ..self }
    }

    /// `docker-compose` with the demo's file and this project's name.
    pub(crate) fn compose(&self) -> Command {
        let mut command = run::tool(&self.compose[0]);
        command.args(&self.compose[1..]).args(["--project-name", &self.name, "--file"]).arg(file());
        // Compose 1.29 would pass a build to the `docker` command, which may require BuildKit but lack it.
        if self.v1 {
            command.env("COMPOSE_DOCKER_CLI_BUILD", "0");
        }
        if !run::succeeds(run::tool("docker").args(["buildx", "version"])) {
            command.env("DOCKER_BUILDKIT", "0");
        }
        command.env("PREQUAL_CONFIG", self.module.config());
        if self.free_ports {
            for port in ["PREQUAL_PAGE_PORT", "PREQUAL_ENVOY_PORT", "PREQUAL_BASELINE_PORT"] {
                command.env(port, "0");
            }
        }
        command
    }

    /// Starts every container; the images must exist.
    pub(crate) fn up(&self) -> Result<()> {
        progress::silently("docker-compose up", || {
            run::output(self.compose().args(["up", "--detach", "--no-build", "--remove-orphans"]))
        })?;
        Ok(())
    }

    /// Removes containers, network and volume, and checks that they are gone.
    pub(crate) fn down(&self) -> Result<()> {
        let faults = run::output(
            run::tool("docker")
                .args(["ps", "--all", "--quiet", "--filter"])
                .arg(format!("label={FAULT_LABEL}={}", self.name)),
        )?;
        for id in faults.split_whitespace() {
            let _ = run::succeeds(run::tool("docker").args(["rm", "--force", id]));
        }
        progress::silently("docker-compose down", || {
            run::output(self.compose().args(["down", "--volumes", "--remove-orphans", "--timeout", "2"]))
        })?;
        let label = format!("label=com.docker.compose.project={}", self.name);
        for what in [["ps", "--all"].as_slice(), &["network", "ls"], &["volume", "ls"]] {
            let left = run::output(run::tool("docker").args(what).args(["--quiet", "--filter", &label]))?;
            ensure!(left.trim().is_empty(), "`docker {}` still lists {}", what.join(" "), left.trim());
        }
        Ok(())
    }

    /// The address on this machine at which a service's port is published.
    pub(crate) fn port(&self, service: &str, port: u16) -> Result<String> {
        let said = run::output(self.compose().args(["port", service, &port.to_string()]))?;
        let address = said.trim().to_owned();
        ensure!(
            !address.is_empty() && !address.ends_with(":0"),
            "`{service}` is not running: `cargo xtask compose`"
        );
        Ok(address)
    }

    /// The container of a service, running or not.
    pub(crate) fn container(&self, service: &str) -> Result<String> {
        let said = run::output(
            run::tool("docker")
                .args(["ps", "--all", "--quiet"])
                .args(["--filter", &format!("label=com.docker.compose.project={}", self.name)])
                .args(["--filter", &format!("label=com.docker.compose.service={service}")]),
        )?;
        said.split_whitespace()
            .next()
            .map(str::to_owned)
            .with_context(|| format!("there is no `{service}` here"))
    }

    /// Label of the containers that carry out a fault in this project.
    pub(crate) fn fault_label(&self) -> String {
        format!("{FAULT_LABEL}={}", self.name)
    }

    /// The last lines of every container's log, for a failure report.
    pub(crate) fn logs(&self) -> String {
        run::output(self.compose().args(["logs", "--no-color", "--tail", "5"])).unwrap_or_default()
    }
}

/// The compose file, the same one that a user brings up.
pub(crate) fn file() -> PathBuf {
    workspace::root().join("envoy-configs").join("compose").join("docker-compose.yml")
}

const USUAL_NAME: &str = "prequal";

const FAULT_LABEL: &str = "prequal.fault";

const INSTALL: &str = "apt-get install --no-install-recommends docker.io docker-compose iptables debootstrap";

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum as _;

    #[test]
    fn every_module_has_a_configuration() {
        let folder = file().parent().expect("a folder").to_owned();
        for module in ModuleForm::value_variants() {
            assert!(folder.join(module.config()).is_file(), "{module:?}");
        }
        let text = std::fs::read_to_string(file()).expect("the file");
        assert!(
            text.contains(&format!("/etc/envoy/${{PREQUAL_CONFIG:-{}}}", ModuleForm::default().config()))
        );
    }
}
