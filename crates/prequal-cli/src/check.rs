//! `prequal check`: reports the mistakes that break Prequal in a configuration, each with its cure.
//!
//! The checks follow `docs/design/limits.md` and the comments of the shipped configuration. Only Envoy can say whether
//! it accepts the file at all (`envoy --mode validate`).

mod at;
mod balanced;
mod clusters;
mod codes;
mod detour;
mod filters;
mod headers;
mod manifest;
mod native;
mod routes;
mod settings;
mod shape;
mod source;
#[cfg(test)]
mod tests;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

pub(crate) use at::At;
use codes::{Code, FILTER_MISSING, Level};
use source::Source;

use crate::read;

/// Find mistakes that break Prequal in an Envoy configuration
///
/// Reads a bootstrap in YAML or JSON, the admin interface's /config_dump (recognised automatically), a file of
/// resources for LDS or CDS, or Istio's manifests (WasmPlugin, TrafficExtension). The output of
/// /config_dump?include_eds also has the endpoints from EDS, which are then compared between each cluster and its probe
/// cluster. The configuration may use the filter or the native module (docs/guide/native.md). Reports each mistake with
/// a code (docs/reference/prequal.md), its place in the file, its effect on users, and the fix.
///
/// It does not replace `envoy --mode validate`, which shows whether Envoy accepts the file at all.
#[derive(clap::Args)]
#[command(after_help = "\
Exit code: 0 no errors (warnings and hints are possible), 1 errors, 2 the file cannot be read.

Examples:
  prequal check envoy.yaml
  curl -s 'http://127.0.0.1:9901/config_dump?include_eds' | prequal check -
  kubectl get wasmplugins -A -o yaml | prequal check -
  prequal check --json envoy.yaml | jq -r '.findings[].code'")]
pub(crate) struct Args {
    /// File to check; `-` for standard input
    config: PathBuf,
    /// Require the file to be a config_dump
    #[arg(long)]
    dump: bool,
    /// Print JSON: {"errors": N, "findings": [{code, level, path, found, what, effect, cure}]}
    #[arg(long)]
    json: bool,
}

/// One mistake.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Finding {
    pub(crate) code: &'static Code,
    /// Path in the file.
    pub(crate) path: String,
    /// Details of what was found there.
    found: String,
}

/// All findings so far, without duplicates.
#[derive(Debug, Default)]
pub(crate) struct Findings(Vec<Finding>);

impl Findings {
    fn push(&mut self, code: &'static Code, path: &str, found: impl Into<String>) {
        let finding = Finding { code, path: path.to_owned(), found: found.into() };
        if !self.0.contains(&finding) {
            self.0.push(finding);
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let findings = judge(&read::source(&args.config)?, args.dump)
        .with_context(|| format!("cannot check {}", args.config.display()))?;
    let count = |level| findings.iter().filter(|finding| finding.code.level == level).count();
    let errors = count(Level::Error);
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{:#}", to_json(&findings, errors))?;
    } else {
        for finding in &findings {
            let Finding { code: Code { name, level, what, effect, cure }, path, found } = finding;
            let place = if path.is_empty() { "the file" } else { path };
            writeln!(out, "{}[{name}] {what}\n  at:   {place}", level.name())?;
            if !found.is_empty() {
                writeln!(out, "  here: {found}")?;
            }
            writeln!(out, "  then: {effect}\n  cure: {cure}\n")?;
        }
        writeln!(
            out,
            "{}: errors {errors}, warnings {}, hints {}",
            args.config.display(),
            count(Level::Warning),
            count(Level::Hint)
        )?;
    }
    Ok(ExitCode::from(u8::from(errors > 0)))
}

/// Returns all mistakes in an Envoy configuration or in Istio manifests, the most severe first.
///
/// # Errors
/// If the text is neither.
pub(crate) fn judge(text: &str, must_be_dump: bool) -> Result<Vec<Finding>> {
    let root = read::text(text)?;
    if !manifest::is_manifest(&root) {
        return check(&root, must_be_dump);
    }
    let documents = read::documents(text)?;
    let mut findings = Findings::default();
    manifest::check(&documents, must_be_dump, &mut findings)?;
    findings.0.sort_by_key(|finding| finding.code.level);
    Ok(findings.0)
}

/// Returns all mistakes in an Envoy configuration, the most severe first.
///
/// # Errors
/// If it is not an Envoy configuration.
pub(crate) fn check(root: &Value, must_be_dump: bool) -> Result<Vec<Finding>> {
    let mut findings = Findings::default();
    shape::check(&At::root(root), &mut findings);
    // Envoy refuses a file with these mistakes, so nothing else is checked.
    if findings.0.is_empty() {
        let source = Source::of(root, must_be_dump)?;
        let filter = filters::check(&source, &mut findings);
        let native = native::check(&source, &mut findings);
        if !filter && !native && !source.report_unseen_listeners(&mut findings) {
            findings.push(FILTER_MISSING, "", format!("listeners: {}", source.listeners.len()));
        }
    }
    findings.0.sort_by_key(|finding| finding.code.level);
    Ok(findings.0)
}

fn to_json(findings: &[Finding], errors: usize) -> Value {
    let list: Vec<Value> = findings
        .iter()
        .map(|Finding { code: Code { name, level, what, effect, cure }, path, found }| {
            json!({"code": name, "level": level.name(), "path": path, "found": found, "what": what,
                "effect": effect, "cure": cure})
        })
        .collect();
    json!({"errors": errors, "findings": list})
}
