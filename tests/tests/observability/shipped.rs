//! The files of envoy-configs/observability, read as data.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use prequal_testbed::workspace_root;
use serde_json::Value;

/// The window of rates in the tests. The rules use `[5m]`, the dashboard uses Grafana's variables.
pub const WINDOW: &str = "3s";

/// A rule of prequal-alerts.yaml.
#[derive(Clone, Debug)]
pub struct Rule {
    /// The alert's name; `None` for a recording rule.
    pub alert: Option<String>,
    /// The expression, with the tests' window.
    pub expr: String,
    pub severity: String,
    pub annotations: Value,
}

/// A query of the dashboard.
#[derive(Clone, Debug)]
pub struct Query {
    /// Title of the panel, and the name of the query in it.
    pub name: String,
    /// The expression, with every variable replaced.
    pub expr: String,
}

pub fn folder() -> PathBuf {
    workspace_root().join("envoy-configs/observability")
}

pub fn text(file: &str) -> Result<String> {
    let path = folder().join(file);
    std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

pub fn yaml(file: &str) -> Result<Value> {
    yaml_serde::from_str(&text(file)?).with_context(|| format!("{file} is not YAML"))
}

/// prequal-alerts.yaml with the tests' window.
pub fn rules_text() -> Result<String> {
    Ok(text("prequal-alerts.yaml")?.replace("[5m]", &format!("[{WINDOW}]")))
}

pub fn rules() -> Result<Vec<Rule>> {
    let file: Value = yaml_serde::from_str(&rules_text()?)?;
    let groups = file["groups"].as_array().context("no groups")?;
    let rules = groups.iter().filter_map(|group| group["rules"].as_array()).flatten();
    rules
        .map(|rule| {
            Ok(Rule {
                alert: rule["alert"].as_str().map(str::to_owned),
                expr: rule["expr"].as_str().context("a rule without an expression")?.to_owned(),
                severity: rule["labels"]["severity"].as_str().unwrap_or_default().to_owned(),
                annotations: rule["annotations"].clone(),
            })
        })
        .collect()
}

pub fn dashboard() -> Result<Value> {
    serde_json::from_str(&text("grafana-prequal.json")?).context("the dashboard is not JSON")
}

/// Every query of every panel.
pub fn queries(dashboard: &Value) -> Result<Vec<Query>> {
    let mut found = Vec::new();
    for panel in dashboard["panels"].as_array().context("no panels")? {
        let title = panel["title"].as_str().context("a panel without a title")?;
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expr = target["expr"].as_str().context("a target without a query")?;
            let name = format!("{title} {}", target["refId"].as_str().unwrap_or_default());
            found.push(Query { name, expr: replaced(expr)? });
        }
    }
    Ok(found)
}

/// `query` as Grafana would send it with every variable set to "All".
pub fn replaced(query: &str) -> Result<String> {
    let query = query
        .replace("$__rate_interval", WINDOW)
        .replace("$__range", "30s")
        .replace("$cluster", ".*")
        .replace("$envoy", ".*")
        .replace("$agent", ".*");
    anyhow::ensure!(!query.contains('$'), "an unknown variable in {query}");
    Ok(query)
}
