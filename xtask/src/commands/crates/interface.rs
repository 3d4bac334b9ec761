//! The public API of each published crate, compared with the listing in its folder's `public-api.txt`.
//!
//! This comparison replaces `cargo semver-checks`, which takes minutes to compile. rustdoc describes a library as JSON,
//! and the crate `public-api` turns that into one line for each public item. A listing holds these lines and the
//! version that made the last breaking change. Once that version is released (CHANGELOG.md has its date), removing or
//! changing a line requires a version that cargo treats as incompatible.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use crate::commands::dist::changelog;
use crate::{progress, run, workspace};

/// A published package.
#[derive(Debug)]
pub(super) struct Package {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) folder: PathBuf,
    /// Name of the library in `use`.
    pub(super) library: String,
}

/// Fails if a listing is not up to date, or if a change breaks users' code; returns the reason if nothing could be
/// compared.
pub(super) fn check(packages: &[Package]) -> Result<Option<String>> {
    if let Some(why) = describe(packages)? {
        return Ok(Some(why));
    }
    let mut wrong = Vec::new();
    for package in packages {
        match package.verdict()? {
            Verdict::Same => {}
            Verdict::Outdated(what) | Verdict::Breaks(what) => wrong.push(what),
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    progress::say("their public APIs are as listed");
    Ok(None)
}

/// Writes the listings that are out of date. Refuses a breaking change without a new version.
pub(super) fn bless(packages: &[Package]) -> Result<()> {
    if let Some(why) = describe(packages)? {
        bail!("{why}");
    }
    for package in packages {
        match package.verdict()? {
            Verdict::Same => progress::say(format_args!("{}: as listed", package.name)),
            Verdict::Breaks(what) => bail!("{what}"),
            Verdict::Outdated(_) => {
                let since = match package.listing()? {
                    Some(old) if !is_raised(&old.since, &package.version) => old.since,
                    _ => package.version.clone(),
                };
                let listing = Listing { since, lines: package.public_api()? };
                fs::write(package.file(), listing.text(&package.name))?;
                progress::say(format_args!("{}: {} lines written", package.name, listing.lines.len()));
            }
        }
    }
    Ok(())
}

/// Runs rustdoc on the libraries; returns the reason if its output cannot be read.
fn describe(packages: &[Package]) -> Result<Option<String>> {
    let libraries: Vec<&str> = packages.iter().map(|package| package.library.as_str()).collect();
    let mut doc = run::cargo();
    doc.args(["doc", "--quiet", "--locked", "--lib", "--no-deps", "--target-dir"]).arg(folder());
    packages.iter().for_each(|package| {
        doc.args(["--package", &package.name]);
    });
    // A stable rustdoc writes JSON only if unstable features are allowed, here for these crates alone. The target
    // folder is separate: in the usual one, this setting and these flags would make cargo rebuild.
    doc.env("RUSTC_BOOTSTRAP", libraries.join(","));
    doc.env("RUSTDOCFLAGS", "-Zunstable-options --output-format=json");
    run::check(&mut doc)?;
    for package in packages {
        let described: Value = serde_json::from_str(&fs::read_to_string(package.described())?)?;
        if let Some(why) = unreadable(&described) {
            return Ok(Some(why));
        }
    }
    Ok(None)
}

fn folder() -> PathBuf {
    workspace::target().join("public-api")
}

/// The reason why `public-api` cannot read rustdoc's output, if any. The format changes every few releases of Rust.
fn unreadable(described: &Value) -> Option<String> {
    let format = &described["format_version"];
    (*format != FORMAT).then(|| {
        format!(
            "public API: this Rust describes libraries in format {format}, and `public-api` reads {FORMAT}; use Rust {RUST}, \
             or the `public-api` for that format (docs/guide/releasing.md)"
        )
    })
}

impl Package {
    fn file(&self) -> PathBuf {
        self.folder.join("public-api.txt")
    }

    fn described(&self) -> PathBuf {
        folder().join("doc").join(&self.library).with_extension("json")
    }

    /// The lines of the current public API.
    fn public_api(&self) -> Result<Vec<String>> {
        let path = self.described();
        let api = public_api::Builder::from_rustdoc_json(&path).omit_blanket_impls(true).build();
        let api = api.with_context(|| format!("reading {}", path.display()))?;
        let mut seen = BTreeSet::new();
        let lines = api.items().map(ToString::to_string).filter(|line| is_promise(line));
        Ok(lines.filter(|line| seen.insert(line.clone())).collect())
    }

    /// The committed listing, if there is one.
    fn listing(&self) -> Result<Option<Listing>> {
        let path = self.file();
        if !path.exists() {
            return Ok(None);
        }
        let text = fs::read_to_string(&path)?;
        Listing::parse(&text, &self.name).with_context(|| format!("reading {}", path.display())).map(Some)
    }

    fn verdict(&self) -> Result<Verdict> {
        let Some(listing) = self.listing()? else {
            return Ok(Verdict::Outdated(format!("{} is missing: {BLESS}", self.file().display())));
        };
        let changes = fs::read_to_string(workspace::root().join("CHANGELOG.md"))?;
        let released =
            changelog::section(&changes, &listing.since).is_ok_and(|(date, _)| changelog::is_dated(date));
        Ok(listing.verdict(self, &self.public_api()?, released))
    }
}

/// The content of a `public-api.txt`.
#[derive(Debug)]
struct Listing {
    /// The version that everything listed is compatible with.
    since: String,
    lines: Vec<String>,
}

#[derive(Debug)]
enum Verdict {
    Same,
    /// The listing must be rewritten.
    Outdated(String),
    /// Code that compiles with the listed version may no longer compile, although the new version promises that it
    /// does.
    Breaks(String),
}

impl Listing {
    fn parse(text: &str, package: &str) -> Result<Self> {
        let (first, lines) = text.split_once('\n').context("it has no lines")?;
        let since = first.strip_prefix(&format!("# {package} ")).and_then(|rest| rest.split(':').next());
        let since = since.with_context(|| format!("its first line is not `# {package} <version>: ...`"))?;
        Ok(Self { since: since.to_owned(), lines: lines.lines().map(str::to_owned).collect() })
    }

    fn text(&self, package: &str) -> String {
        let first =
            format!("# {package} {}: its public API, written by `cargo xtask crates --bless`", self.since);
        format!("{first}\n{}\n", self.lines.join("\n"))
    }

    /// Compares the listing with `now`, the current lines. If `released`, users may depend on the version of this
    /// listing.
    fn verdict(&self, package: &Package, now: &[String], released: bool) -> Verdict {
        let Package { name, version, .. } = package;
        let Self { since, .. } = self;
        let then: BTreeSet<&str> = self.lines.iter().map(String::as_str).collect();
        let now: BTreeSet<&str> = now.iter().map(String::as_str).collect();
        let removed: Vec<&str> = then.difference(&now).copied().collect();
        let added: Vec<&str> = now.difference(&then).copied().collect();
        let raised = is_raised(since, version);
        if removed.is_empty() && added.is_empty() {
            return match raised {
                true => {
                    Verdict::Outdated(format!("the listing of {name} is of {since}, not {version}: {BLESS}"))
                }
                false => Verdict::Same,
            };
        }
        let breaks = !removed.is_empty() || added.iter().any(|line| extends_an_enum(line, &then));
        let lines = |sign: &'static str, lines: &[&str]| -> String {
            lines.iter().map(|line| format!("  {sign} {line}\n")).collect()
        };
        let lines = lines("-", &removed) + &lines("+", &added);
        if breaks && released && !raised {
            return Verdict::Breaks(format!(
                "{name} {version} does not keep the public API of {since}:\n{lines}Restore it, or raise `version` in \
                 Cargo.toml to {} and {BLESS}",
                next(since)
            ));
        }
        let why = match (breaks, raised) {
            (false, _) => "nothing was removed",
            (true, true) => "the version is raised",
            (true, false) => "the old API is not released yet",
        };
        Verdict::Outdated(format!(
            "the public API of {name} {version} is not as listed:\n{lines}If that is meant, {BLESS}: {why}"
        ))
    }
}

/// Whether a line of `public-api` is a promise to users. The other lines are internal to the compiler, or say that a
/// type lacks a trait.
fn is_promise(line: &str) -> bool {
    let subject = line.split(" for ").next().unwrap_or_default();
    let lacks_trait = line.contains(" !core::");
    let private = line.starts_with("impl") && PRIVATE.iter().any(|name| subject.ends_with(name));
    !lacks_trait && !private
}

/// Whether a new line adds a variant, or a variant's field, to a listed enum that users may match without a wildcard.
fn extends_an_enum(line: &str, listed: &BTreeSet<&str>) -> bool {
    let Some(path) = line.strip_prefix("pub ") else { return false };
    let enums = listed.iter().filter_map(|line| line.strip_prefix("pub enum "));
    enums.filter_map(|line| line.split(['<', ' ']).next()).any(|name| {
        path.strip_prefix(name).is_some_and(|rest| rest.starts_with("::") || rest.starts_with('<'))
    })
}

/// Whether `to` is newer than `from`, and incompatible with it according to cargo.
fn is_raised(from: &str, to: &str) -> bool {
    leading(to) > leading(from)
}

/// The leading numbers of a version, which determine compatibility: up to and including the first that is not 0.
fn leading(version: &str) -> Vec<u64> {
    let release = version.split(['-', '+']).next().unwrap_or_default();
    let numbers: Vec<u64> = release.split('.').map(|number| number.parse().unwrap_or(0)).collect();
    let end = numbers.iter().position(|number| *number != 0).map_or(numbers.len(), |index| index + 1);
    numbers[..end].to_vec()
}

/// The first version that need not be compatible with `version`.
fn next(version: &str) -> String {
    let mut numbers = leading(version);
    if let Some(last) = numbers.last_mut() {
        *last += 1;
    }
    numbers.resize(3, 0);
    numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(".")
}

/// The format of rustdoc's JSON that this version of `public-api` reads, and a version of Rust that writes it.
const FORMAT: u64 = 57;
const RUST: &str = "1.95";

const BLESS: &str = "run `cargo xtask crates --bless` and commit what it writes";

/// Traits that the compiler implements automatically, and that users cannot name on stable Rust, or hardly ever do.
const PRIVATE: [&str; 5] = [
    "core::marker::Freeze",
    "core::marker::StructuralPartialEq",
    "core::marker::UnsafeUnpin",
    "core::panic::unwind_safe::RefUnwindSafe",
    "core::panic::unwind_safe::UnwindSafe",
];

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const OLD: [&str; 4] =
        ["pub enum a::E<T>", "pub a::E::One", "pub fn a::f(u8)", "#[non_exhaustive] pub enum a::Open"];

    fn package(version: &str) -> Package {
        Package { name: "a".into(), version: version.into(), folder: "a".into(), library: "a".into() }
    }

    fn listing() -> Listing {
        Listing { since: "0.1.0".to_owned(), lines: OLD.map(str::to_owned).to_vec() }
    }

    /// The verdict on `version` if `less` is removed from the lines of `OLD` and `more` is added.
    fn verdict(version: &str, less: &[&str], more: &[&str], released: bool) -> Verdict {
        let lines = OLD.iter().filter(|line| !less.contains(line)).chain(more);
        let now: Vec<String> = lines.map(|line| (*line).to_owned()).collect();
        listing().verdict(&package(version), &now, released)
    }

    #[test]
    fn an_unchanged_interface_is_fine_in_any_order_and_in_a_compatible_version() {
        assert!(matches!(verdict("0.1.0", &[], &[], true), Verdict::Same));
        assert!(matches!(verdict("0.1.7", &[], &[], true), Verdict::Same));
        assert!(matches!(verdict("0.1.7", &[OLD[0]], &[OLD[0]], true), Verdict::Same));
    }

    #[test]
    fn a_removed_line_breaks_and_is_named() {
        let Verdict::Breaks(what) = verdict("0.1.1", &[OLD[2]], &[], true) else { panic!("no break") };
        assert!(what.contains("\n  - pub fn a::f(u8)\n"), "{what}");
        assert!(
            what.contains("Cargo.toml to 0.2.0") && what.contains("cargo xtask crates --bless"),
            "{what}"
        );
    }

    #[test]
    fn a_changed_line_breaks_and_both_are_named() {
        let changed = verdict("0.1.1", &[OLD[2]], &["pub fn a::f(u16)"], true);
        let Verdict::Breaks(what) = changed else { panic!("{changed:?}") };
        assert!(what.contains("\n  - pub fn a::f(u8)\n  + pub fn a::f(u16)\n"), "{what}");
    }

    #[test]
    fn an_added_line_only_asks_for_a_new_listing() {
        let added = verdict("0.1.0", &[], &["pub fn a::g()"], true);
        let Verdict::Outdated(what) = added else { panic!("{added:?}") };
        assert!(what.contains("\n  + pub fn a::g()\n") && what.contains("--bless"), "{what}");
    }

    #[test]
    fn a_variant_added_to_an_enum_breaks_unless_it_is_non_exhaustive() {
        assert!(matches!(verdict("0.1.1", &[], &["pub a::E::Two(u8)"], true), Verdict::Breaks(_)));
        assert!(matches!(verdict("0.1.1", &[], &["pub a::E::One::field: u8"], true), Verdict::Breaks(_)));
        for harmless in
            ["pub a::Open::Two", "pub fn a::E<T>::g()", "pub a::Else::field: u8", "pub enum a::New"]
        {
            let added = verdict("0.1.1", &[], &[harmless], true);
            assert!(matches!(added, Verdict::Outdated(_)), "{harmless}: {added:?}");
        }
    }

    #[test]
    fn a_raised_version_may_break_and_needs_a_listing_of_its_own() {
        assert!(matches!(verdict("0.2.0", &[OLD[2]], &[], true), Verdict::Outdated(_)));
        // Without a listing of 0.2.0, the next breaking change to 0.2 would be compared with 0.1.
        assert!(matches!(verdict("0.2.0", &[], &[], true), Verdict::Outdated(_)));
    }

    #[test]
    fn before_the_first_release_a_break_only_asks_for_a_new_listing() {
        let removed = verdict("0.1.0", &[OLD[2]], &[], false);
        let Verdict::Outdated(what) = removed else { panic!("{removed:?}") };
        assert!(what.contains("  - pub fn a::f(u8)\n") && what.contains("is not released yet"), "{what}");
    }

    #[test]
    fn compatibility_follows_cargos_rules() {
        let raised = [
            ("0.1.9", "0.2.0"),
            ("0.9.1", "1.0.0"),
            ("1.9.0", "2.0.0"),
            ("0.0.3", "0.0.4"),
            ("0.0.9", "0.1.0"),
        ];
        for (from, to) in raised {
            assert!(is_raised(from, to), "{from} to {to}");
            assert!(!is_raised(to, from), "{to} to {from}");
        }
        for (from, to) in
            [("0.1.0", "0.1.1"), ("1.2.0", "1.3.0"), ("0.2.0-rc.1", "0.2.0"), ("0.1.0", "0.1.0")]
        {
            assert!(!is_raised(from, to), "{from} to {to}");
        }
        assert_eq!(["0.1.4", "1.2.3", "0.0.3"].map(next), ["0.2.0", "2.0.0", "0.0.4"]);
    }

    #[test]
    fn a_listing_is_read_as_written_and_only_by_its_own_package() {
        let read = Listing::parse(&listing().text("a"), "a").expect("read");
        assert_eq!((read.since.as_str(), read.lines), ("0.1.0", listing().lines));
        let error = Listing::parse(&listing().text("a"), "b").expect_err("another package").to_string();
        assert!(error.contains("`# b <version>: ...`"), "{error}");
        Listing::parse("", "a").expect_err("empty");
    }

    #[test]
    fn what_the_compiler_adds_by_itself_is_not_listed() {
        for promise in
            ["impl core::marker::Send for a::E", "impl<T> a::Freeze for a::E<T>", "pub fn a::f(u8)"]
        {
            assert!(is_promise(promise), "{promise}");
        }
        for other in ["impl<T> core::marker::Freeze for a::E<T>", "impl !core::marker::Send for a::E"] {
            assert!(!is_promise(other), "{other}");
        }
    }

    #[test]
    fn another_format_of_rustdoc_is_named_in_one_line() {
        assert_eq!(unreadable(&json!({"format_version": FORMAT})), None);
        let why = unreadable(&json!({"format_version": 59})).expect("another format");
        assert!(why.contains("in format 59") && !why.contains('\n'), "{why}");
        unreadable(&json!({})).expect("no format");
    }
}
