//! Rehearses a release as a step of the tests. Builds it once, for this machine's architecture only and without
//! optimising the programs, checks its files, pushes its images to a registry with the commands of
//! docs/guide/releasing.md, and checks that the same images come back.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use sha2::{Digest as _, Sha256};

use super::{
    NAME, NATIVE, PROGRAMS, Parts, SUMS, VERSION, pack, provenance, verify_agent, verify_module,
    verify_native,
};
use crate::commands::platform::Platform;
use crate::commands::{debian, helm};
use crate::toolchain::{Choice, Toolchain};
use crate::{progress, run, workspace};

/// The reason why a rehearsal is impossible here, if any. Installs or fetches the programs that it needs.
pub(crate) fn missing() -> Option<String> {
    let had = debian::install(&[("skopeo", "skopeo")]).and_then(|()| debian::unpacked("docker-registry"));
    had.err().map(|why| progress::last_line(&why))
}

/// Builds the release below target/.
pub(crate) fn build(choice: Choice) -> Result<()> {
    parts(choice).map(drop)
}

/// Builds the release and checks it.
pub(crate) fn run(choice: Choice) -> Result<()> {
    let parts = parts(choice)?;
    let scratch = workspace::target().join(format!("release-{}", std::process::id()));
    let checked = check(&parts, &scratch);
    fs::remove_dir_all(&scratch)?;
    checked
}

fn parts(choice: Choice) -> Result<Parts> {
    let toolchain = Toolchain::prepare(choice)?;
    Parts::build(&toolchain, &[Platform::here()?], "rehearsal")
}

fn check(parts: &Parts, scratch: &Path) -> Result<()> {
    let out = scratch.join("release-dist");
    let files = pack(parts, &out)?;
    run::output(run::tool("sha256sum").args(["--check", "--strict", SUMS]).current_dir(&out))?;
    signed(parts, &out, scratch)?;
    programs_run(&out)?;
    let registry = Registry::start(scratch)?;
    let pushed = push(&out, registry.addr)?;
    ensure!(pushed == 3, "docs/guide/releasing.md shows {pushed} commands that push, not one for each image");
    let back = |name: &str| -> Result<_> {
        let folder = scratch.join(name);
        let from = format!("docker://{}/{name}:{VERSION}", registry.addr);
        let to = format!("oci:{}:{VERSION}", folder.display());
        run::output(run::tool("skopeo").args(["copy", "--all", "--src-tls-verify=false", &from, &to]))?;
        Ok(folder)
    };
    verify_module(&back("prequal_filter")?, &parts.module)?;
    verify_agent(&back("probe-agent")?, &parts.builds)?;
    verify_native(&back("prequal_native")?, &parts.builds)?;
    manifests_name(&out, registry.addr)?;
    let chart = match helm::built() {
        Ok(helm) => {
            chart_installs(&helm, &out, scratch, registry.addr)?;
            "and the chart"
        }
        Err(why) => &*format!("the chart was not tested: {}", progress::last_line(&why)),
    };
    progress::say(format_args!("{} files; the images went through a registry, {chart}", files.len()));
    Ok(())
}

/// Checks that the chart comes back from the registry as pushed, and names the agent's image by the registry's digest.
fn chart_installs(helm: &Path, out: &Path, scratch: &Path, registry: SocketAddr) -> Result<()> {
    let chart = format!("{NAME}-{VERSION}.tgz");
    let page = fs::read_to_string(workspace::root().join("docs/guide/releasing.md"))?;
    let line = page.lines().map(str::trim).find(|line| line.starts_with("helm push "));
    let line = line.context("docs/guide/releasing.md shows no command that pushes the chart")?;
    let typed = line
        .replace("helm push", "helm push --plain-http")
        .replace("target/release-dist", &out.display().to_string())
        .replace("REGISTRY", &registry.to_string());
    let helm = |arguments: &[&str]| -> Result<String> {
        let mut helm = run::tool(helm);
        for home in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
            helm.env(home, scratch.join("helm"));
        }
        run::output(helm.args(arguments))
    };
    helm(&typed.split(' ').skip(1).collect::<Vec<_>>()).with_context(|| line.to_owned())?;
    let (from, to) = (format!("oci://{registry}/{NAME}"), scratch.display().to_string());
    helm(&["pull", &from, "--version", VERSION, "--plain-http", "--destination", &to])?;
    let back = scratch.join(&chart);
    ensure!(fs::read(&back)? == fs::read(out.join(&chart))?, "another chart came back from the registry");
    let set = format!("registry={registry},replicas.app.image=x:1");
    let objects = helm(&["template", "release", &back.display().to_string(), "--set", &set])?;
    let image = format!("docker://{registry}/probe-agent:{VERSION}");
    let mut skopeo = run::tool("skopeo");
    let manifest = run::output(skopeo.args(["inspect", "--raw", "--tls-verify=false", &image]))?;
    let image = format!("image: {registry}/probe-agent@sha256:{:x}", Sha256::digest(manifest));
    ensure!(objects.contains(&image), "the chart does not name {image}, which the registry has");
    Ok(())
}

/// Checks that the digests in the manifests are those under which the registry has the images.
fn manifests_name(out: &Path, registry: SocketAddr) -> Result<()> {
    let archive = format!("{NAME}-manifests-{VERSION}.tar.gz");
    run::output(run::tool("tar").args(["-xzf", &archive]).current_dir(out))?;
    let manifests = [
        ("prequal_filter", "istio/client-sidecar.yaml", "prequal_filter@"),
        ("probe-agent", "istio/server-agent.yaml", "probe-agent@"),
        ("probe-agent", "kubernetes/base/kustomization.yaml", "probe-agent, digest: \""),
    ];
    for (name, file, before) in manifests {
        let image = format!("docker://{registry}/{name}:{VERSION}");
        let mut skopeo = run::tool("skopeo");
        let digest = run::output(skopeo.args(["inspect", "--raw", "--tls-verify=false", &image]))
            .map(|manifest| format!("{before}sha256:{:x}", Sha256::digest(manifest)))?;
        let text = fs::read_to_string(out.join(file))?;
        ensure!(text.contains(&digest), "{file} does not name {digest}, which the registry has");
    }
    Ok(())
}

/// Signs the release with a new key, verifies it without a network, and checks that a changed file is refused.
fn signed(parts: &Parts, out: &Path, scratch: &Path) -> Result<()> {
    let (private, public) = (scratch.join("release.key"), scratch.join("release.pub"));
    let mut openssl = run::tool("openssl");
    openssl.args(["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out"]);
    run::output(openssl.arg(&private))?;
    let mut openssl = run::tool("openssl");
    run::output(openssl.args(["pkey", "-pubout", "-in"]).arg(&private).arg("-out").arg(&public))?;
    let envelope = provenance::sign(out, &parts.stamp.version, &private)?;
    progress::say(provenance::verify(out, &public)?);
    let module = out.join(format!("prequal_filter-{VERSION}.wasm"));
    fs::write(&module, [&parts.module[..], b"x"].concat())?;
    ensure!(provenance::verify(out, &public).is_err(), "a module that was changed passed for the signed one");
    fs::write(&module, &parts.module)?;
    Ok(fs::remove_file(out.join(envelope))?)
}

/// Checks that the programs in the archive start without any library of this machine.
fn programs_run(out: &Path) -> Result<()> {
    let archive = format!("{NAME}-{VERSION}-{}-linux.tar.gz", std::env::consts::ARCH);
    run::output(run::tool("tar").args(["-xzf", &archive]).current_dir(out))?;
    for (_, program) in PROGRAMS {
        let said = run::output(run::tool(out.join(program)).arg("--version"))?;
        ensure!(said.trim() == format!("{program} {VERSION}"), "{program} calls itself {said}");
        let elf = run::output(run::tool("readelf").args(["--program-headers"]).arg(out.join(program)))?;
        ensure!(!elf.contains("INTERP"), "{program} is not linked statically");
    }
    ensure!(out.join(NATIVE).is_file(), "no {NATIVE} in {archive}");
    Ok(())
}

/// Runs the commands of docs/guide/releasing.md with this release and this registry; returns the number of commands.
fn push(out: &Path, registry: SocketAddr) -> Result<usize> {
    let page = fs::read_to_string(workspace::root().join("docs/guide/releasing.md"))?;
    let lines: Vec<&str> =
        page.lines().map(str::trim).filter(|line| line.starts_with("skopeo copy ")).collect();
    for line in &lines {
        ensure!(line.contains("target/release-dist/") && line.contains("docker://REGISTRY/"), "{line}");
        let typed = line
            .replace("target/release-dist", &out.display().to_string())
            .replace("REGISTRY", &registry.to_string())
            // A registry on loopback has no certificate.
            .replace("skopeo copy", "skopeo copy --dest-tls-verify=false");
        run::output(run::tool("sh").args(["-c", &typed])).with_context(|| (*line).to_owned())?;
    }
    Ok(lines.len())
}

/// Debian's packaged container registry; stopped on drop.
struct Registry {
    process: Child,
    addr: SocketAddr,
}

impl Registry {
    fn start(scratch: &Path) -> Result<Self> {
        let (settings, log) = (scratch.join("registry.json"), scratch.join("registry.log"));
        let config = serde_json::json!({
            "version": 0.1,
            "storage": {"filesystem": {"rootdirectory": scratch.join("registry")}},
            "http": {"addr": "127.0.0.1:0"},
        });
        // JSON is valid YAML.
        fs::write(&settings, config.to_string())?;
        let program = debian::unpacked("docker-registry")?.join("usr/bin/docker-registry");
        let process = Command::new(program)
            .arg("serve")
            .arg(&settings)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(&log)?)
            .spawn()
            .context("cannot start the registry")?;
        let mut registry = Self { process, addr: ([127, 0, 0, 1], 0).into() };
        let started = Instant::now();
        loop {
            let said = fs::read_to_string(&log)?;
            let addr = said.split("listening on ").nth(1).and_then(|rest| rest.split('"').next());
            if let Some(addr) = addr.and_then(|addr| addr.parse().ok()) {
                registry.addr = addr;
                return Ok(registry);
            }
            if registry.process.try_wait()?.is_some() || started.elapsed() > Duration::from_secs(20) {
                bail!("the registry did not start:\n{said}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        // An error means that it has already exited.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
