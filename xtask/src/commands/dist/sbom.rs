//! The bill of materials: CycloneDX 1.5 of everything that the module and the programs are built from.
//!
//! It is derived from `cargo metadata` for the shipped targets and from the checksums in `Cargo.lock`. Dependencies
//! that only tests and builds need are left out. Cargo resolves features for the whole workspace, so the list may
//! contain a crate that an artefact does not, but it never lacks one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::{AUTHORITIES_PACKAGE, Stamp, packages};
use crate::{run, workspace};

/// Versions of the build machine's libraries that are linked in.
pub(super) struct System {
    /// The C library, in the programs.
    pub(super) libc: String,
    /// GCC's runtime with the unwinder, in the programs and in the native module.
    pub(super) libgcc: String,
}

/// The document.
pub(super) fn document(targets: &[&str], system: &System, stamp: &Stamp) -> Result<Value> {
    let mut command = run::cargo();
    command.args(["metadata", "--locked", "--format-version", "1"]);
    for target in targets {
        command.args(["--filter-platform", target]);
    }
    let metadata: Value = serde_json::from_str(&run::output(&mut command)?)?;
    let lock = fs::read_to_string(workspace::root().join("Cargo.lock"))?;
    of(&metadata, &checksums(&lock), system, stamp)
}

fn of(
    metadata: &Value,
    checksums: &BTreeMap<(String, String), String>,
    system: &System,
    stamp: &Stamp,
) -> Result<Value> {
    let by_id: BTreeMap<&str, &Value> =
        array(&metadata["packages"]).map(|package| (text(package, "id"), package)).collect();
    let nodes: BTreeMap<&str, Vec<&str>> =
        array(&metadata["resolve"]["nodes"]).map(|node| (text(node, "id"), linked(node))).collect();

    let shipped: Vec<&str> = packages()
        .chain([AUTHORITIES_PACKAGE])
        .map(|name| {
            let mut found = by_id.iter().filter(|(_, p)| {
                text(p, "name") == name && (p["source"].is_null() || name == AUTHORITIES_PACKAGE)
            });
            found.next().map(|(id, _)| *id).with_context(|| format!("the workspace has no package {name}"))
        })
        .collect::<Result<_>>()?;
    let mut reached = BTreeSet::new();
    let mut pending = shipped.clone();
    while let Some(id) = pending.pop() {
        if reached.insert(id) {
            pending.extend(nodes.get(id).into_iter().flatten());
        }
    }

    let reference = |id: &str| by_id.get(id).map(|package| purl(package)).unwrap_or_default();
    let library = |reference: &str, name: &str, version: &str, licence: &str| {
        json!({
            "type": "library",
            "bom-ref": reference,
            "name": name,
            "version": version,
            "licenses": [{"expression": licence}],
        })
    };
    let mut components = vec![
        library("libc", "glibc", &system.libc, "LGPL-2.1-or-later"),
        library("libgcc", "libgcc", &system.libgcc, "GPL-3.0-or-later WITH GCC-exception-3.1"),
    ];
    let libraries = ["libc", "libgcc"].map(str::to_owned);
    let mut dependencies = vec![json!({
        "ref": "prequal",
        "dependsOn": shipped.iter().map(|id| reference(id)).chain(libraries).collect::<Vec<_>>(),
    })];
    for id in reached {
        let package = by_id.get(id).with_context(|| format!("no package {id}"))?;
        components.push(component(package, checksums));
        let needs: BTreeSet<String> = nodes.get(id).into_iter().flatten().map(|id| reference(id)).collect();
        dependencies.push(json!({"ref": purl(package), "dependsOn": needs}));
    }
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": stamp.time,
            "tools": [{"vendor": "prequal", "name": "cargo xtask dist", "version": stamp.version}],
            "component": {
                "type": "application",
                "bom-ref": "prequal",
                "name": "prequal",
                "version": stamp.version,
                "licenses": [{"expression": "Apache-2.0"}],
            },
            "properties": [
                {"name": "prequal:commit", "value": stamp.commit},
                {"name": "prequal:compiler", "value": stamp.compiler},
            ],
        },
        "components": components,
        "dependencies": dependencies,
    }))
}

fn component(package: &Value, checksums: &BTreeMap<(String, String), String>) -> Value {
    let (name, version) = (text(package, "name"), text(package, "version"));
    let mut component = json!({
        "type": "library",
        "bom-ref": purl(package),
        "name": name,
        "version": version,
        "purl": purl(package),
        // `A/B` is the deprecated spelling of `A OR B`.
        "licenses": [{"expression": text(package, "license").replace('/', " OR ")}],
    });
    if let Some(checksum) = checksums.get(&(name.to_owned(), version.to_owned())) {
        component["hashes"] = json!([{"alg": "SHA-256", "content": checksum}]);
    }
    component
}

/// The dependencies linked into a package, without those of its build script and tests.
fn linked(node: &Value) -> Vec<&str> {
    array(&node["deps"])
        .filter(|dependency| array(&dependency["dep_kinds"]).any(|kind| kind["kind"].is_null()))
        .map(|dependency| text(dependency, "pkg"))
        .collect()
}

fn purl(package: &Value) -> String {
    format!("pkg:cargo/{}@{}", text(package, "name"), text(package, "version").replace('+', "%2B"))
}

/// The checksums in a `Cargo.lock`, by name and version. Needs no TOML parser: cargo writes one key per line.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    lock.split("[[package]]")
        .filter_map(|package| {
            let value = |key: &str| {
                let line = package.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = \""))?;
                Some(line.trim_end_matches('"').to_owned())
            };
            Some(((value("name")?, value("version")?), value("checksum")?))
        })
        .collect()
}

fn array(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cyclonedx_bom::prelude::{Bom, SpecVersion, Validate as _};

    fn shipped() -> Value {
        let system = System { libc: "2.36".to_owned(), libgcc: "12.2.0".to_owned() };
        document(&["x86_64-unknown-linux-gnu", "wasm32-wasip1"], &system, &Stamp::example()).expect("a bill")
    }

    #[test]
    fn it_is_valid_cyclonedx() {
        let bom = Bom::parse_json_value(shipped()).expect("CycloneDX's own library reads it");
        let result = bom.validate_version(SpecVersion::V1_5);
        assert!(result.passed(), "{result:#?}");
    }

    #[test]
    fn it_lists_exactly_what_is_shipped() {
        let bill = shipped();
        let names: BTreeSet<&str> = array(&bill["components"]).map(|c| text(c, "name")).collect();
        for name in [
            "prequal-filter",
            "prequal-native",
            "arc-swap",
            "prequal-policy",
            "probe-agent",
            "plb-netlink",
            "hyper",
            "proxy-wasm",
            "glibc",
            "libgcc",
            "webpki-root-certs",
        ] {
            assert!(names.contains(name), "no {name}");
        }
        for name in ["criterion", "proptest", "xtask", "prequal-testbed", "windows-sys", "plotters", "cc"] {
            assert!(!names.contains(name), "{name}");
        }
        for component in array(&bill["components"]) {
            let foreign = component["hashes"][0]["content"].as_str().is_some_and(|hash| hash.len() == 64);
            let ours = text(component, "version") == env!("CARGO_PKG_VERSION")
                || ["glibc", "libgcc"].contains(&text(component, "name"));
            assert!(foreign || ours, "{component}");
        }
    }

    #[test]
    fn every_reference_resolves() {
        let bill = shipped();
        let known: BTreeSet<&str> =
            array(&bill["components"]).map(|c| text(c, "bom-ref")).chain(["prequal"]).collect();
        assert_eq!(
            known.len(),
            bill["components"].as_array().expect("a list").len() + 1,
            "one reference each"
        );
        for dependency in array(&bill["dependencies"]) {
            assert!(known.contains(text(dependency, "ref")), "{dependency}");
            for needed in array(&dependency["dependsOn"]) {
                assert!(known.contains(needed.as_str().expect("text")), "{needed}");
            }
        }
    }
}
