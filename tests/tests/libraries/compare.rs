//! Compares a library's reports on a trace with the core's: the text of the headers.
//!
//! Values that result from integer arithmetic alone must be equal: RIF, latency, knee, age, the form of the text.
//! Logarithms and exponentials may differ in the last digit between languages, so values rounded from them may differ
//! by one: base latency and its error, failures, ORCA's means.

use std::sync::LazyLock;

use anyhow::{Result, ensure};

use crate::plan;
use crate::reference;
use crate::subject::Subject;
use crate::trace::Trace;

/// Minimum share of a trace's lines that must be equal to the last digit.
const EQUAL: f64 = 0.9;

/// Numbers that may differ, and by how much.
const ROUNDED: [(&str, f64); 7] = [
    ("base", 1.0),
    ("rse", 1.0),
    ("fail", 1.0),
    ("prequal_base_latency_us", 1.0),
    ("rps_fractional", 0.001),
    ("eps", 0.001),
    ("application_utilization", 0.000_001),
];

/// A trace and the correct lines.
type Known = (Trace, Vec<String>);

/// All traces with the core's reports on each, computed once for all libraries.
static EXPECTED: LazyLock<Result<Vec<Known>>> = LazyLock::new(|| {
    plan::traces().into_iter().map(|trace| reference::play(&trace).map(|lines| (trace, lines))).collect()
});

/// Plays all traces and compares.
pub(crate) fn traces(subject: &Subject) -> Result<()> {
    let all = EXPECTED.as_ref().map_err(|error| anyhow::anyhow!("{error:#}"))?;
    for (trace, expected) in all {
        let (name, actual) = (trace.name, (subject.play)(trace)?);
        let actual: Vec<&str> = actual.lines().collect();
        ensure!(actual.len() == expected.len(), "{name}: {} lines of {}", actual.len(), expected.len());
        let mut equal = 0;
        for (number, (actual, expected)) in actual.iter().zip(expected).enumerate() {
            ensure!(agree(actual, expected), "{name}, line {number}:\n  {actual}\ninstead of\n  {expected}");
            equal += usize::from(actual == expected);
        }
        eprintln!("{}, {name}: {equal} of {} lines equal to the last digit", subject.name, expected.len());
        ensure!(equal as f64 >= EQUAL * expected.len() as f64, "{name}: only {equal} lines are equal");
    }
    Ok(())
}

fn agree(actual: &str, expected: &str) -> bool {
    // A fractional part of zero is not written, so leave out digits and points.
    let form = |text: &str| text.replace(|c: char| c.is_ascii_digit() || c == '.', "");
    let fields = |text: &str| text.split([';', ',', '\t', '{', '}']).map(str::to_owned).collect::<Vec<_>>();
    let (actual_fields, expected_fields) = (fields(actual), fields(expected));
    form(actual) == form(expected)
        && actual_fields.len() == expected_fields.len()
        && actual_fields
            .iter()
            .zip(&expected_fields)
            .all(|(actual, expected)| actual == expected || near(actual, expected))
}

/// Whether two fields with the same key are close enough, if they may differ.
fn near(actual: &str, expected: &str) -> bool {
    let pair = |field: &str| {
        let (key, value) = field.rsplit_once(['=', ':'])?;
        let key = key.rsplit(['.', ' ']).next()?.trim_matches('"').to_owned();
        Some((key, value.parse::<f64>().ok()?))
    };
    let (Some((key, actual)), Some((same, expected))) = (pair(actual), pair(expected)) else { return false };
    let within = ROUNDED.iter().find(|(name, _)| *name == key);
    // Allow half as much again, because both decimal fractions are rounded.
    key == same && within.is_some_and(|(_, by)| (actual - expected).abs() <= by * 1.5)
}

#[test]
fn only_rounded_values_may_differ() {
    let line = "1;4000;10.0.0.7:80;fail=7;up=3;base=40;knee=2;rse=7\tTEXT application_utilization=0.100000,rps_fractional=12.500,eps=0";
    assert!(agree(line, line));
    for (from, to, agrees) in [
        ("base=40", "base=41", true),
        ("base=40", "base=42", false),
        ("rse=7", "rse=6", true),
        ("rse=7", "rse=5", false),
        ("fail=7", "fail=8", true),
        ("knee=2", "knee=3", false),
        ("1;4000", "2;4000", false),
        ("4000", "4001", false),
        ("up=3", "up=4", false),
        ("=12.500", "=12.501", true),
        ("=12.500", "=12.502", false),
        ("n=0.100000", "n=0.100001", true),
        ("TEXT ", "JSON ", false),
        ("10.0.0.7:80", "10.0.0.7:81", false),
        (";base", "; base", false),
    ] {
        assert_eq!(agree(&line.replace(from, to), line), agrees, "{from} as {to}");
    }
}
