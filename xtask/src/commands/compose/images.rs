//! The images: base images from their registry or, if none answers, made here under the same names.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};

use crate::commands::compose::engine::Project;
use crate::commands::envoy;
use crate::{progress, run, workspace};

/// Provides the base images, then builds the demo's own images.
pub(super) fn prepare(project: &Project) -> Result<()> {
    progress::headline("images");
    bases()?;
    for service in ["page", "agent-1", "envoy-prequal"] {
        progress::silently(&format!("image of `{service}`"), || {
            run::output(project.compose().args(["build", service]))
        })?;
    }
    build("netfault", NETFAULT)?;
    // Remove the images that the new ones replaced.
    run::output(run::tool("docker").args(["image", "prune", "--force", "--filter", "label=prequal.demo"]))?;
    Ok(())
}

/// Provides the images that the demo's own images are built on.
pub(super) fn bases() -> Result<()> {
    base(DEBIAN, debian)?;
    base(&envoy_image(), envoy_base)
}

/// Image that drops and delays packets; not a service in the compose file.
pub(crate) const NETFAULT: &str = "prequal-demo/netfault";

fn build(target: &str, image: &str) -> Result<()> {
    progress::silently(&format!("image `{image}`"), || {
        let mut command = run::tool("docker");
        command.args(["build", "--quiet", "--tag", image, "--target", target, "--file"]);
        command.arg("envoy-configs/compose/Dockerfile").arg(".");
        if !run::succeeds(run::tool("docker").args(["buildx", "version"])) {
            command.env("DOCKER_BUILDKIT", "0");
        }
        run::output(&mut command)
    })?;
    Ok(())
}

/// Uses the local image, pulls it, or makes it, in this order.
fn base(name: &str, make: fn(&str) -> Result<()>) -> Result<()> {
    if run::succeeds(run::tool("docker").args(["image", "inspect", name])) {
        progress::say(format_args!("{name}: already present"));
        return Ok(());
    }
    let pulled = progress::silently(&format!("{name}: pulling"), || {
        run::output(run::tool("docker").args(["pull", "--quiet", name]))
    });
    let Err(why) = pulled else { return Ok(()) };
    progress::say(format_args!(
        "{name}: no registry provides it ({}); making it locally",
        progress::last_line(&why)
    ));
    make(name).with_context(|| format!("making {name} here"))
}

/// Debian's own minimal system, from the mirror that apt uses.
fn debian(name: &str) -> Result<()> {
    ensure!(
        run::output(run::tool("id").arg("-u"))?.trim() == "0",
        "making {name} needs root: run this as root once, or pull {name} from a registry"
    );
    if !run::succeeds(run::tool("debootstrap").arg("--version")) {
        bail!("`debootstrap` is missing; apt-get install --no-install-recommends debootstrap");
    }
    let scratch = workspace::target().join("compose");
    let root = scratch.join(format!("base-{}", std::process::id()));
    fs::create_dir_all(&scratch)?;
    let made = progress::silently("debootstrap, about a minute", || {
        run::output(
            run::tool("debootstrap")
                .args(["--variant=minbase", "--include=iproute2,iptables", SUITE])
                .arg(&root),
        )?;
        // The public image also leaves these out.
        for folder in [
            "var/cache/apt/archives",
            "var/lib/apt/lists",
            "usr/share/doc",
            "usr/share/man",
            "usr/share/locale",
        ] {
            empty(&root.join(folder))?;
        }
        run::output(
            run::tool("sh").args(["-c", "tar -C \"$0\" -c . | docker import - \"$1\""]).arg(&root).arg(name),
        )
    });
    fs::remove_dir_all(&root)?;
    made.map(drop)
}

fn empty(folder: &Path) -> Result<()> {
    if folder.is_dir() {
        fs::remove_dir_all(folder)?;
        fs::create_dir(folder)?;
    }
    Ok(())
}

/// Debian with the pinned Envoy at the path that the public image uses.
fn envoy_base(name: &str) -> Result<()> {
    let scratch = workspace::target().join("compose").join(format!("envoy-{}", std::process::id()));
    fs::create_dir_all(&scratch)?;
    let made = envoy::pinned(envoy::DEFAULT_VERSION).and_then(|binary| {
        fs::hard_link(&binary, scratch.join("envoy"))
            .or_else(|_| fs::copy(&binary, scratch.join("envoy")).map(drop))?;
        fs::write(scratch.join("Dockerfile"), format!("FROM {DEBIAN}\nCOPY envoy /usr/local/bin/envoy\n"))?;
        let mut command = run::tool("docker");
        command.args(["build", "--quiet", "--tag", name]).arg(&scratch);
        if !run::succeeds(run::tool("docker").args(["buildx", "version"])) {
            command.env("DOCKER_BUILDKIT", "0");
        }
        run::output(&mut command)
    });
    fs::remove_dir_all(&scratch)?;
    made.map(drop)
}

fn envoy_image() -> String {
    format!("envoyproxy/envoy:v{}", envoy::DEFAULT_VERSION)
}

/// Newer than the Debian of most build machines, so that a program linked there finds a C library that is new enough.
const DEBIAN: &str = "debian:trixie-slim";

const SUITE: &str = "trixie";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dockerfile_names_these_images() {
        let dockerfile = workspace::root().join("envoy-configs/compose/Dockerfile");
        let text = fs::read_to_string(dockerfile).expect("the Dockerfile");
        for line in [format!("ARG BASE={DEBIAN}"), format!("ARG ENVOY={}", envoy_image())] {
            assert!(text.lines().any(|l| l == line), "{line}");
        }
    }
}
