//! The rules for dependencies, checked with no tool other than cargo.
//!
//! Each dependency must have a licence that `deny.toml` allows and come from crates.io; none may be banned; each direct
//! dependency needs a line in `docs/design/dependencies.md`. `cargo deny` checks more (advisories, licence texts); if it is
//! installed, it runs as well.
//!
//! CI does not install `cargo deny`. It would have to compile 168 more crates, which takes minutes on two cores, more
//! than this whole step. Its further checks need the advisory database, a Git repository outside the package registries
//! that CI can reach. The rules checked here are those that a change can break, and they cost one `cargo metadata`.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::{run, workspace};

/// Reports every violation in one error; returns the number of dependencies checked.
pub(crate) fn check() -> Result<usize> {
    let allowed = quoted_list(&fs::read_to_string(workspace::root().join("deny.toml"))?, "allow")
        .context("deny.toml has no `allow` list")?;
    let metadata = run::output(run::cargo().args(["metadata", "--locked", "--format-version", "1"]))?;
    let metadata: Value = serde_json::from_str(&metadata)?;
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;

    let mut wrong = Vec::new();
    let mut looked_at = 0;
    for package in packages {
        let name = format!("{} {}", text(package, "name"), text(package, "version"));
        if package["source"].is_null() {
            if text(package, "license") != "Apache-2.0" {
                wrong.push(format!("{name} is part of this workspace and not under Apache-2.0"));
            }
            continue;
        }
        looked_at += 1;
        let source = text(package, "source");
        if !(source.starts_with("registry+") && source.ends_with("/crates.io-index")) {
            wrong.push(format!("{name} does not come from crates.io but from {source}"));
        }
        let licence = text(package, "license");
        if !permits(licence, &allowed) {
            wrong.push(format!("{name} is under `{licence}`, which deny.toml does not allow"));
        }
        if BANNED.contains(&text(package, "name")) {
            wrong.push(format!("{name} is banned in deny.toml"));
        }
    }
    wrong.extend(unexplained(packages)?);
    if !wrong.is_empty() {
        bail!("{}", wrong.join("\n"));
    }
    Ok(looked_at)
}

/// Direct dependencies that `docs/design/dependencies.md` does not name between backticks.
fn unexplained(packages: &[Value]) -> Result<Vec<String>> {
    let path = workspace::root().join("docs/design/dependencies.md");
    let explained = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let direct: BTreeSet<&str> = packages
        .iter()
        .filter(|package| package["source"].is_null())
        .flat_map(|package| package["dependencies"].as_array().into_iter().flatten())
        .filter(|dependency| !dependency["source"].is_null())
        .map(|dependency| text(dependency, "name"))
        .collect();
    Ok(direct
        .into_iter()
        .filter(|name| !explained.contains(&format!("`{name}`")))
        .map(|name| format!("docs/design/dependencies.md does not say why `{name}` is used"))
        .collect())
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

/// The strings of the first `key = [ ... ]`, one per line. Needs no TOML parser: the project controls the file.
fn quoted_list(toml: &str, key: &str) -> Option<Vec<String>> {
    let start = format!("{key} = [");
    let lines: Vec<String> = toml
        .lines()
        .skip_while(|line| line.trim() != start)
        .skip(1)
        .take_while(|line| line.trim() != "]")
        .filter_map(|line| Some(line.trim().strip_prefix('"')?.split('"').next()?.to_owned()))
        .collect();
    (!lines.is_empty()).then_some(lines)
}

/// Whether an SPDX expression can be satisfied with the allowed licences. An unreadable expression cannot.
fn permits(expression: &str, allowed: &[String]) -> bool {
    // Old crates use the deprecated spelling `A/B` for OR.
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = words.as_slice();
    any_of(&mut rest, allowed) == Some(true) && rest.is_empty()
}

fn any_of(rest: &mut &[&str], allowed: &[String]) -> Option<bool> {
    let mut permitted = all_of(rest, allowed)?;
    while let Some(("OR", tail)) = rest.split_first().map(|(first, tail)| (*first, tail)) {
        *rest = tail;
        permitted |= all_of(rest, allowed)?;
    }
    Some(permitted)
}

fn all_of(rest: &mut &[&str], allowed: &[String]) -> Option<bool> {
    let mut permitted = one(rest, allowed)?;
    while let Some(("AND", tail)) = rest.split_first().map(|(first, tail)| (*first, tail)) {
        *rest = tail;
        permitted &= one(rest, allowed)?;
    }
    Some(permitted)
}

fn one(rest: &mut &[&str], allowed: &[String]) -> Option<bool> {
    let (first, tail) = rest.split_first()?;
    *rest = tail;
    match *first {
        "(" => {
            let permitted = any_of(rest, allowed)?;
            let (")", tail) = rest.split_first().map(|(first, tail)| (*first, tail))? else { return None };
            *rest = tail;
            Some(permitted)
        }
        ")" | "OR" | "AND" | "WITH" => None,
        licence => {
            let mut name = licence.to_owned();
            if let [with, exception, tail @ ..] = *rest
                && *with == "WITH"
            {
                *rest = tail;
                name = format!("{name} WITH {exception}");
            }
            Some(allowed.contains(&name))
        }
    }
}

/// The crates that `[bans]` in `deny.toml` denies.
const BANNED: [&str; 2] = ["native-tls", "openssl-sys"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licence_expressions() {
        let allowed =
            ["MIT".to_owned(), "Apache-2.0".to_owned(), "Apache-2.0 WITH LLVM-exception".to_owned()];
        for (expression, expected) in [
            ("MIT", true),
            ("MIT OR GPL-3.0", true),
            ("GPL-3.0 OR MIT", true),
            ("MIT/Apache-2.0", true),
            ("MIT AND GPL-3.0", false),
            ("(MIT OR GPL-3.0) AND Apache-2.0", true),
            ("GPL-3.0 OR MIT AND GPL-2.0", false),
            ("Apache-2.0 WITH LLVM-exception OR GPL-3.0", true),
            ("MIT WITH LLVM-exception", false),
            ("GPL-3.0", false),
            ("", false),
            ("MIT OR", false),
            ("(MIT", false),
            ("MIT)", false),
            ("MIT Apache-2.0", false),
        ] {
            assert_eq!(permits(expression, &allowed), expected, "{expression}");
        }
    }

    #[test]
    fn the_shipped_deny_toml_is_readable() {
        let text = fs::read_to_string(workspace::root().join("deny.toml")).expect("deny.toml");
        let allowed = quoted_list(&text, "allow").expect("an allow list");
        assert!(allowed.iter().any(|licence| licence == "Apache-2.0"));
        for name in BANNED {
            assert!(text.contains(&format!("crate = \"{name}\"")), "{name}");
        }
        assert_eq!(text.matches("crate = \"").count(), BANNED.len());
    }
}
