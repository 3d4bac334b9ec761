//! Checks that the tables of docs/reference/configuration.md equal what the code generates: the filter's from
//! `prequal_core::config::KEYS`, the agent's from its command line. `cargo xtask reference` writes them.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use clap::CommandFactory as _;
use prequal_core::config::{KEYS, Key, Scope, Values};
use prequal_testbed::workspace_root;
use serde_json::Value;

/// Set by `cargo xtask reference`.
const WRITE: &str = "PREQUAL_WRITE_REFERENCE";

const PROFILES: [&str; 4] = ["default", "paper", "small", "inference"];

#[test]
fn the_tables_match_what_the_code_generates() -> Result<()> {
    let path = workspace_root().join("docs/reference/configuration.md");
    let before = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let mut after = before.clone();
    for (name, table) in [
        ("filter", filter(true)),
        ("experiments", filter(false)),
        ("profiles", profiles()),
        ("inbound", inbound()),
        ("agent", agent()),
    ] {
        after = with_table(&after, name, &table).with_context(|| format!("table {name}"))?;
    }
    if std::env::var_os(WRITE).is_some() {
        return Ok(fs::write(&path, after)?);
    }
    let stale = before.lines().zip(after.lines()).find(|(is, ought)| is != ought);
    ensure!(
        before == after,
        "docs/reference/configuration.md is not what the code generates: run `cargo xtask reference`. First difference: {stale:#?}"
    );
    Ok(())
}

/// `text` with `table` between its markers.
fn with_table(text: &str, name: &str, table: &[Vec<String>]) -> Result<String> {
    let (before, rest) =
        text.split_once(&format!("<!-- table: {name} -->\n")).context("no line where it begins")?;
    let (_, after) = rest.split_once("<!-- end -->\n").context("no line where it ends")?;
    let mut lines: Vec<String> = table.iter().map(|row| format!("| {} |\n", row.join(" | "))).collect();
    lines.insert(1, format!("|{}\n", "---|".repeat(table[0].len())));
    // Write empty cells without two spaces.
    let lines = lines.concat().replace("|  |", "| |").replace("|  |", "| |");
    Ok(format!("{before}<!-- table: {name} -->\n{lines}<!-- end -->\n{after}"))
}

fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(str::to_owned).to_vec()
}

/// The keys of the outbound role: either those for everyday use, or the others.
fn filter(everyday: bool) -> Vec<Vec<String>> {
    let mut table = vec![row(["key", "where", "unit", "range", "default", "meaning", "source"])];
    for key in KEYS.iter().filter(|key| key.scope != Scope::Inbound && key.everyday == everyday) {
        let place = match key.scope {
            Scope::Cluster => "cluster",
            Scope::Both => "both",
            Scope::Top | Scope::Outbound | Scope::Inbound => "top",
        };
        let needs = key.needs.map(|(key, value)| format!(", `{key}: {value}`")).unwrap_or_default();
        table.push(row([
            &code(key.name),
            &format!("{place}{needs}"),
            key.unit,
            &range(key.values),
            &default(key, "default"),
            key.meaning,
            key.source,
        ]));
    }
    table
}

/// The keys whose default differs between profiles.
fn profiles() -> Vec<Vec<String>> {
    let mut table = vec![row(["key", "`default`", "`paper`", "`small`", "`inference`"])];
    for key in KEYS.iter().filter(|key| key.scope == Scope::Both) {
        let values = PROFILES.map(|profile| key.default_under(profile));
        let differs = values.iter().any(|value| value.is_some() && *value != values[0]);
        if differs {
            let cells = values.iter().map(|value| value.as_ref().map(shown).unwrap_or_default());
            table.push(std::iter::once(code(key.name)).chain(cells).collect());
        }
    }
    table
}

fn inbound() -> Vec<Vec<String>> {
    let mut table = vec![row(["key", "unit", "range", "default", "meaning"])];
    for key in KEYS.iter().filter(|key| key.scope == Scope::Inbound) {
        let (range, default) = (range(key.values), default(key, "default"));
        table.push(row([&code(key.name), key.unit, &range, &default, key.meaning]));
    }
    table
}

/// The agent's flags. The meaning includes the range, as in `--help`; the agent's own tests compare ranges with the
/// parser.
fn agent() -> Vec<Vec<String>> {
    let mut table = vec![row(["flag", "value", "default", "meaning"])];
    for arg in probe_agent::cli::Cli::command().get_arguments() {
        let Some(flag) = arg.get_long() else { continue };
        let choices: Vec<String> =
            arg.get_possible_values().iter().map(|choice| code(choice.get_name())).collect();
        let value = match arg.get_value_names() {
            _ if !arg.get_action().takes_values() => String::new(),
            _ if !choices.is_empty() => choices.join(", "),
            names => code(&names.unwrap_or_default().concat()),
        };
        let default = match arg.get_default_values().first() {
            _ if arg.is_required_set() => "required".to_owned(),
            Some(default) => code(&default.to_string_lossy()),
            None => String::new(),
        };
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        table.push(row([&code(&format!("--{flag}")), &value, &default, &help]));
    }
    table
}

fn default(key: &Key, profile: &str) -> String {
    match key.absent {
        Some(words) => words.to_owned(),
        None => key.default_under(profile).as_ref().map(shown).unwrap_or_default(),
    }
}

fn range(values: Values) -> String {
    match values {
        Values::Whole(low, high) => format!("{} to {}", grouped(low.into()), grouped(high.into())),
        Values::Number(low, high) => format!("{} to {}", grouped(low), grouped(high)),
        Values::NumberOrOff(low, high) => format!("0 (off), {} to {}", grouped(low), grouped(high)),
        Values::Bool => "`true`, `false`".to_owned(),
        Values::OneOf(choices) => choices.iter().map(|choice| code(choice)).collect::<Vec<_>>().join(", "),
        Values::Many(0, most) => format!("up to {}", grouped(most as f64)),
        Values::Many(least, most) => format!("{least} to {}", grouped(most as f64)),
        Values::Form(words) => words.to_owned(),
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Number(number) => grouped(number.as_f64().unwrap_or_default()),
        Value::String(text) => code(text),
        other => code(&other.to_string()),
    }
}

fn code(text: &str) -> String {
    format!("`{text}`")
}

/// At most three decimals; numbers of five or more digits are grouped in threes.
fn grouped(number: f64) -> String {
    let text = format!("{}", (number * 1000.0).round() / 1000.0);
    let (whole, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
    if whole.len() < 5 {
        return text;
    }
    let groups: Vec<&str> =
        whole.as_bytes().rchunks(3).rev().filter_map(|g| std::str::from_utf8(g).ok()).collect();
    groups.join(" ") + rest
}
