//! The reference of the filter's settings, `docs/configuration.md`, against the code: every key has a row and every row a
//! key, the ranges are the ones that are enforced, and the defaults are what a configuration without the key means.

use std::collections::BTreeSet;

use prequal_core::config::Config;
use serde_json::{Map, Value, json};

const DOCS: &str = include_str!("../../../docs/configuration.md");

/// One row of the first table.
struct Row<'a> {
    keys: Vec<&'a str>,
    place: &'a str,
    range: &'a str,
    default: &'a str,
    paper: &'a str,
}

fn rows() -> Vec<Row<'static>> {
    let table = DOCS.lines().skip_while(|line| !line.starts_with("| key |")).skip(2);
    table
        .take_while(|line| line.starts_with('|'))
        .map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            let [keys, place, _unit, range, default, paper, _source] = cells[..] else {
                panic!("not seven cells: {line}")
            };
            let keys = keys.split(',').map(|key| key.trim().trim_matches('`')).collect();
            Row { keys, place, range, default, paper }
        })
        .collect()
}

/// A cluster under a profile in which `place`, the second column, lets the key count.
fn context(place: &str, profile: &str) -> Map<String, Value> {
    let mut cluster = json!({"cluster": "a", "probe_cluster": "b", "profile": profile});
    for (word, key, value) in [
        ("fixed", "budget", "fixed"),
        ("adaptive", "budget", "adaptive"),
        ("sync", "mode", "sync"),
        ("`linear`", "rule", "linear"),
        ("`c3`", "rule", "c3"),
        ("`zuul_choice_of_two`", "rule", "zuul_choice_of_two"),
    ] {
        if place.contains(word) {
            cluster[key] = json!(value);
        }
    }
    cluster.as_object().unwrap().clone()
}

fn parse(cluster: &Map<String, Value>) -> Result<Config, String> {
    Config::parse(&json!({"clusters": [cluster]}).to_string()).map_err(|errors| errors.to_string())
}

fn with(place: &str, profile: &str, key: &str, value: Value) -> Result<Config, String> {
    let mut cluster = context(place, profile);
    cluster.insert(key.to_owned(), value);
    parse(&cluster)
}

/// The value that a cell begins with, as JSON; an explanation may follow. Digits are grouped by spaces.
fn value(cell: &str) -> Option<Value> {
    let text = cell.split([':', ';']).next()?.trim().trim_matches('`');
    let text = if text == "2^(−1/4)" { "0.8408964152537145" } else { text };
    match text {
        "" | "–" | "required" | "learned" | "none" => None,
        _ => Some(serde_json::from_str(&text.replace(' ', "")).unwrap_or_else(|_| json!(text))),
    }
}

/// Lowest and highest number of a range like `0 (off), 0.02 to 1`; digits are grouped by spaces.
fn bounds(cell: &str) -> Option<(f64, f64)> {
    let (low, high) = cell.split_once(" to ")?;
    let low = low.rsplit(", ").next()?.trim_end_matches(" (off)");
    let high: String = high.chars().take_while(|c| c.is_ascii_digit() || ".  ".contains(*c)).collect();
    let number = |text: &str| text.replace([' ', ' '], "").parse().ok();
    Some((number(low)?, number(&high)?))
}

fn number(value: f64) -> Value {
    if value.fract() == 0.0 { json!(value as i64) } else { json!(value) }
}

#[test]
fn every_key_has_a_row_and_every_row_a_key() {
    let known = |text: &str| -> BTreeSet<String> {
        let errors = Config::parse(text).unwrap_err().to_string();
        let line = errors.lines().find(|line| line.contains("known: ")).unwrap();
        line.split("known: ").nth(1).unwrap().split(", ").map(|key| key.trim().to_owned()).collect()
    };
    let top = known(r#"{"zzz": 1, "clusters": [{"cluster": "a", "probe_cluster": "b"}]}"#);
    let cluster = known(r#"{"clusters": [{"cluster": "a", "probe_cluster": "b", "zzz": 1}]}"#);
    let in_code: BTreeSet<String> = top.union(&cluster).cloned().collect();
    let in_docs: BTreeSet<String> =
        rows().iter().flat_map(|row| row.keys.clone()).map(str::to_owned).collect();
    assert_eq!(in_docs, in_code);
}

#[test]
fn the_ranges_are_those_that_are_enforced() {
    let mut checked = 0;
    for row in rows() {
        let Some((low, high)) = bounds(row.range).filter(|_| row.place.starts_with("both")) else { continue };
        // Lists and maps have a length and not a range.
        if value(row.default).is_none_or(|value| !value.is_number()) {
            continue;
        }
        for key in &row.keys {
            let accepted = |value: f64| with(row.place, "default", key, number(value));
            assert_eq!(accepted(low).err(), None, "{key}: the lowest of {}", row.range);
            assert_eq!(accepted(high).err(), None, "{key}: the highest of {}", row.range);
            // Not 0: it switches some off.
            for outside in [low / 2.0, high + 1.0] {
                if outside > 0.0 {
                    let error = accepted(outside).expect_err(&format!("{key} = {outside}"));
                    assert!(
                        error.contains(&format!("from {low} to {high}")),
                        "{key}: {}: {error}",
                        row.range
                    );
                }
            }
            checked += 1;
        }
    }
    assert!(checked >= 20, "{checked}");
}

#[test]
fn the_choices_are_those_that_are_known() {
    for row in rows() {
        let choices: Vec<&str> =
            row.range.split(", ").filter_map(|choice| choice.strip_prefix('`')?.strip_suffix('`')).collect();
        if choices.len() < 2 || row.range.contains('{') || !row.place.starts_with("both") {
            continue;
        }
        for key in &row.keys {
            let error = with(row.place, "default", key, json!("zzz")).expect_err(key);
            let listed: Vec<String> = choices.iter().map(|choice| format!("\"{choice}\"")).collect();
            assert!(error.contains(&listed.join(", ")), "{key}: {}: {error}", row.range);
        }
    }
}

#[test]
fn the_defaults_are_what_leaving_the_key_out_means() {
    let mut checked = 0;
    for row in rows().iter().filter(|row| row.place.starts_with("both")) {
        for (profile, cell) in [("default", row.default), ("paper", row.paper)] {
            let (Some(value), [key]) = (value(cell), &row.keys[..]) else { continue };
            let without = parse(&context(row.place, profile)).unwrap();
            let explicit = with(row.place, profile, key, value.clone());
            assert_eq!(explicit.as_ref(), Ok(&without), "{key} = {value}, profile {profile}");
            checked += 1;
        }
    }
    assert!(checked >= 40, "{checked}");
}
