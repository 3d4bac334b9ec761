//! The tables of docs/reference/metrics.md, and the headings of docs/guide/operations.md.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, bail};
use prequal_testbed::workspace_root;

/// Metrics by name, each with its label values as `key=value`.
pub type Metrics = BTreeMap<String, BTreeSet<String>>;

const METRICS: &str = "docs/reference/metrics.md";
const OPERATIONS: &str = "docs/guide/operations.md";
const HEADER: &str = "| metric | label | meaning |";

/// Labels that identify a metric's origin, and buckets.
const NOT_LISTED: [&str; 2] = ["cluster", "le"];

/// The metrics that the tables of [`METRICS`] under [`HEADER`] name: rows `` | `name` | `key`: `value`, `value` |
/// meaning | ``.
pub fn documented() -> Result<Metrics> {
    let mut found = Metrics::new();
    let mut in_table = false;
    for line in text(METRICS)?.lines() {
        in_table = line == HEADER || (in_table && line.starts_with('|'));
        if !in_table || !line.starts_with("| `") {
            continue;
        }
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, name, labels, meaning, _] = cells[..] else { bail!("not a row of three cells: {line}") };
        let name = name.trim_matches('`');
        assert!(!meaning.is_empty(), "{METRICS} does not say what {name} means");
        let mut words = labels.split('`').skip(1).step_by(2);
        let values = words
            .next()
            .map_or_else(BTreeSet::new, |key| words.map(|value| format!("{key}={value}")).collect());
        assert!(found.insert(name.to_owned(), values).is_none(), "{METRICS} has {name} twice");
    }
    Ok(found)
}

/// Headings of [`OPERATIONS`] without their leading `#`.
pub fn headings() -> Result<BTreeSet<String>> {
    Ok(text(OPERATIONS)?
        .lines()
        .filter(|line| line.starts_with('#'))
        .map(|line| line.trim_matches(['#', ' ']).to_owned())
        .collect())
}

/// Prequal's metrics on a page in Prometheus' text format.
pub fn exposed(page: &str) -> Metrics {
    let of_type = |line: &str| {
        let (name, kind) = line.strip_prefix("# TYPE ")?.split_once(' ')?;
        Some((name.to_owned(), kind.to_owned()))
    };
    let types: BTreeMap<String, String> = page.lines().filter_map(of_type).collect();
    let mut found = Metrics::new();
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let Some((sample, _)) = line.rsplit_once(' ') else { continue };
        let (name, labels) = sample.trim_end_matches('}').split_once('{').unwrap_or((sample, ""));
        let histogram = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| {
            name.strip_suffix(suffix).filter(|name| types.get(*name).is_some_and(|kind| kind == "histogram"))
        });
        let name = histogram.unwrap_or(name);
        if !name.starts_with("prequal_") && !name.starts_with("envoy_wasm_prequal_") {
            continue;
        }
        let values = labels.split(',').filter_map(|label| {
            let (key, value) = label.split_once('=')?;
            (!NOT_LISTED.contains(&key)).then(|| format!("{key}={}", value.trim_matches('"')))
        });
        found.entry(name.to_owned()).or_default().extend(values);
    }
    found
}

fn text(page: &'static str) -> Result<String> {
    std::fs::read_to_string(workspace_root().join(page)).context(page)
}
