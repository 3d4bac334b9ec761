//! `cargo xtask crates`: checks that the packages for crates.io could be published. Uploads nothing.
//!
//! A package is published if its manifest says `publish = ["crates-io"]`. Cargo's own dry run packs it. This file
//! checks the content of each package, then compiles it with the oldest Rust that it supports. Cargo's built-in
//! verification is disabled (`--no-verify`): it would compile all dependencies with today's Rust, which `lint` has just
//! done from the same sources. The compilation here shows what `lint` cannot: that a package is complete and builds
//! outside this workspace.
//!
//! `interface.rs` compares each public API with a committed listing.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::{progress, run, workspace};

mod interface;

/// Checks that the packages for crates.io could be published: dry run, content, public API, the oldest Rust.
///
/// Compiles the packages from the packed files, with the Rust of `rust-version`; rustup fetches that compiler. Uploads
/// nothing.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Write the listings of the public APIs, public-api.txt, and check nothing else
    #[arg(long)]
    bless: bool,
}

/// What could not be checked on this machine, and why.
pub(crate) struct Unchecked {
    /// A failure in CI.
    pub(crate) skipped: Option<String>,
    /// Not a failure: some CI machines cannot check it.
    pub(crate) impossible: Option<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.bless {
        return interface::bless(&interfaces(&published(&metadata()?))?);
    }
    let unchecked = check()?;
    for why in unchecked.skipped.into_iter().chain(unchecked.impossible) {
        progress::say(format_args!("not checked: {why}"));
    }
    Ok(())
}

/// Fails if a package could not be published; returns what could not be checked on this machine.
pub(crate) fn check() -> Result<Unchecked> {
    let metadata = metadata()?;
    let packages = published(&metadata);
    ensure!(!packages.is_empty(), "no package is to be published");
    let oldest = text(packages[0], "rust_version");
    let too_new = too_new(&metadata, &packages, oldest);
    ensure!(
        too_new.is_empty(),
        "rust-version is {oldest}, but these linked packages need a newer Rust: {}",
        too_new.join(", ")
    );

    let mut publish = run::cargo();
    publish.args(["publish", "--dry-run", "--no-verify", "--allow-dirty", "--quiet"]);
    run::check(selected(&mut publish, &packages))?;
    let folder = unpacked(&packages)?;
    progress::say(format_args!("{} packages could be published", packages.len()));
    let skipped = interface::check(&interfaces(&packages)?)?;
    let impossible = missing(oldest);
    if impossible.is_none() {
        // First compile only the libraries, as a user of the tower layer does. With the programs' features enabled, a
        // missing feature would go unnoticed.
        for selection in [LIBRARIES.as_slice(), &["--workspace"]] {
            let mut oldest_cargo = cargo_of(oldest);
            oldest_cargo.args(["check", "--quiet", "--manifest-path"]).arg(folder.join("Cargo.toml"));
            oldest_cargo.arg("--target-dir").arg(workspace::target().join("oldest-rust"));
            run::check(oldest_cargo.args(selection))?;
        }
        progress::say(format_args!(
            "they compile outside the workspace with Rust {oldest}, with and without default features"
        ));
    }
    Ok(Unchecked { skipped, impossible })
}

fn metadata() -> Result<Value> {
    let metadata = run::output(run::cargo().args(["metadata", "--locked", "--format-version", "1"]))?;
    Ok(serde_json::from_str(&metadata)?)
}

/// The packages of this workspace that go to crates.io.
fn published(metadata: &Value) -> Vec<&Value> {
    let packages = metadata["packages"].as_array().into_iter().flatten();
    packages.filter(|package| package["source"].is_null() && package["publish"][0] == "crates-io").collect()
}

/// The libraries of `packages`.
fn interfaces(packages: &[&Value]) -> Result<Vec<interface::Package>> {
    let package = |package: &&Value| -> Result<interface::Package> {
        let name = text(package, "name");
        let mut targets = package["targets"].as_array().into_iter().flatten();
        let library = targets.find(|target| target["kind"][0] == "lib");
        let library = library.with_context(|| format!("{name} has no library"))?;
        let folder = Path::new(text(package, "manifest_path")).parent();
        Ok(interface::Package {
            name: name.to_owned(),
            version: text(package, "version").to_owned(),
            folder: folder.with_context(|| format!("{name} has no folder"))?.to_owned(),
            library: text(library, "name").to_owned(),
        })
    };
    packages.iter().map(package).collect()
}

/// Linked packages that need a newer Rust than `oldest`.
fn too_new(metadata: &Value, roots: &[&Value], oldest: &str) -> Vec<String> {
    let array = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let nodes: BTreeMap<String, Vec<Value>> = array(&metadata["resolve"]["nodes"])
        .iter()
        .map(|node| (text(node, "id").to_owned(), array(&node["deps"])))
        .collect();
    let mut linked = BTreeSet::new();
    let mut pending: Vec<String> = roots.iter().map(|root| text(root, "id").to_owned()).collect();
    while let Some(id) = pending.pop() {
        if !linked.insert(id.clone()) {
            continue;
        }
        for dependency in nodes.get(&id).into_iter().flatten() {
            if array(&dependency["dep_kinds"]).iter().any(|kind| kind["kind"] != "dev") {
                pending.push(text(dependency, "pkg").to_owned());
            }
        }
    }
    let newer = |package: &&Value| {
        linked.contains(text(package, "id")) && version(text(package, "rust_version")) > version(oldest)
    };
    let packages = array(&metadata["packages"]);
    packages.iter().filter(newer).map(|p| format!("{} {}", text(p, "name"), text(p, "version"))).collect()
}

/// Major and minor number; 0 for a missing part.
fn version(text: &str) -> (u32, u32) {
    let mut numbers = text.split('.').map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// Packs the packages, unpacks them side by side, and makes them a workspace in which they find each other.
fn unpacked(packages: &[&Value]) -> Result<PathBuf> {
    let mut pack = run::cargo();
    pack.args(["package", "--no-verify", "--allow-dirty", "--offline", "--quiet", "--target-dir"]);
    pack.arg(workspace::target());
    run::output(selected(&mut pack, packages))?;
    let folder = workspace::target().join("crates");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    let (mut members, mut patches) = (Vec::new(), String::new());
    for package in packages {
        let name = text(package, "name");
        let unpacked = format!("{name}-{}", text(package, "version"));
        let archive = workspace::target().join("package").join(format!("{unpacked}.crate"));
        // `m` sets fresh timestamps: those in a package never change, and cargo detects changes by timestamp.
        run::output(run::tool("tar").arg("-xzmf").arg(&archive).arg("-C").arg(&folder))?;
        is_complete(&folder.join(&unpacked)).with_context(|| format!("package {name}"))?;
        patches.push_str(&format!("{name} = {{ path = \"{unpacked}\" }}\n"));
        members.push(format!("\"{unpacked}\""));
    }
    let members = members.join(", ");
    let manifest =
        format!("[workspace]\nresolver = \"3\"\nmembers = [{members}]\n\n[patch.crates-io]\n{patches}");
    fs::write(folder.join("Cargo.toml"), manifest)?;
    // The versions that everything else is tested with.
    fs::copy(workspace::root().join("Cargo.lock"), folder.join("Cargo.lock"))?;
    Ok(folder)
}

/// Checks that a package holds what a reader of crates.io expects, and nothing superfluous.
fn is_complete(package: &Path) -> Result<()> {
    for file in ["Cargo.toml", "LICENSE", "README.md", "src/lib.rs"] {
        ensure!(package.join(file).is_file(), "{file} is missing");
    }
    for entry in fs::read_dir(package)? {
        let name = entry?.file_name();
        ensure!(ALLOWED.iter().any(|allowed| name == *allowed), "{} does not belong there", name.display());
    }
    let (readme, library) =
        (fs::read_to_string(package.join("README.md"))?, fs::read_to_string(package.join("src/lib.rs"))?);
    ensure!(readme.contains("\n```rust\n"), "README.md shows no example");
    // With the README in the library's documentation, rustdoc shows it and `cargo test` runs its example.
    ensure!(
        library.contains("#![doc = include_str!(\"../README.md\")]"),
        "the library's documentation leaves README.md out"
    );
    Ok(())
}

fn selected<'a>(command: &'a mut Command, packages: &[&Value]) -> &'a mut Command {
    for package in packages {
        command.args(["--package", text(package, "name")]);
    }
    command
}

/// The reason why a compiler of version `oldest` is not available, if any.
fn missing(oldest: &str) -> Option<String> {
    if run::succeeds(cargo_of(oldest).arg("--version")) {
        return None;
    }
    let mut rustup = run::tool("rustup");
    rustup.args(["toolchain", "install", &toolchain(oldest), "--profile", "minimal", "--no-self-update"]);
    match run::output(&mut rustup) {
        Ok(_) => None,
        Err(why) => Some(format!(
            "packages with Rust {oldest}, which rustup cannot fetch: {}",
            progress::last_line(&why)
        )),
    }
}

fn cargo_of(version: &str) -> Command {
    let mut command = run::tool("rustup");
    command.args(["run", &toolchain(version), "cargo"]);
    // These belong to the cargo that runs this program.
    command.env_remove("CARGO").env_remove("RUSTC").env_remove("RUSTDOC");
    command
}

fn toolchain(version: &str) -> String {
    format!("{version}.0")
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

/// The libraries that users' crates depend on: the core, and the agent's tower layer.
const LIBRARIES: [&str; 6] =
    ["--package", "prequal-policy", "--package", "probe-agent", "--no-default-features", "--lib"];

/// Names allowed in the top folder of a package.
const ALLOWED: [&str; 7] =
    [".cargo_vcs_info.json", "Cargo.lock", "Cargo.toml", "Cargo.toml.orig", "LICENSE", "README.md", "src"];

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn packages_that_need_a_newer_rust_count_only_if_they_are_linked() {
        let package = |name: &str, rust: &str| json!({"id": name, "name": name, "version": "1.0.0", "rust_version": rust});
        let to = |name: &str, kind: Value| json!({"pkg": name, "dep_kinds": [{"kind": kind}]});
        let metadata = json!({
            "packages": [package("ours", "1.88"), package("direct", "1.70"), package("deep", "1.90.1"),
                package("build", "2.1"), package("tests", "1.95")],
            "resolve": {"nodes": [
                {"id": "ours", "deps": [to("direct", Value::Null), to("tests", json!("dev"))]},
                {"id": "direct", "deps": [to("deep", Value::Null), to("build", json!("build"))]},
            ]},
        });
        let roots = [&metadata["packages"][0]];
        assert_eq!(too_new(&metadata, &roots, "1.88"), ["deep 1.0.0", "build 1.0.0"]);
        assert_eq!(too_new(&metadata, &roots, "2.1"), [""; 0]);
    }

    #[test]
    fn a_package_without_its_readme_or_with_tests_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path();
        fs::create_dir(path.join("src")).expect("made");
        for (file, content) in [
            ("Cargo.toml", ""),
            ("LICENSE", ""),
            ("README.md", "# A\n\n```rust\nassert!(true);\n```\n"),
            ("src/lib.rs", "#![doc = include_str!(\"../README.md\")]\n"),
        ] {
            fs::write(path.join(file), content).expect("written");
        }
        is_complete(path).expect("complete");
        fs::write(path.join("tests.rs"), "").expect("written");
        assert_eq!(is_complete(path).expect_err("tests").to_string(), "tests.rs does not belong there");
        fs::remove_file(path.join("tests.rs")).expect("removed");
        fs::write(path.join("src/lib.rs"), "").expect("written");
        let error = is_complete(path).expect_err("no documentation").to_string();
        assert!(error.contains("leaves README.md out"), "{error}");
        fs::remove_file(path.join("README.md")).expect("removed");
        assert_eq!(is_complete(path).expect_err("no README").to_string(), "README.md is missing");
    }
}
