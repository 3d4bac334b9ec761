//! Dashboard, rules, scrape configurations and docs/guide/operations.md, as shipped: `promtool` accepts them, and on a
//! live fleet every query returns data and every alert can fire.

mod live;
mod operations;
mod rollout;
mod shipped;

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use prequal_testbed::manifests::{documents, find};
use prequal_testbed::{Prometheus, eventually, missing_prometheus, needs, prometheus_tool};
use serde_json::{Value, json};

#[test]
fn promtool_accepts_the_rules_and_their_tests_pass() -> Result<()> {
    needs!(missing_prometheus());
    for arguments in [
        ["check", "rules", "prequal-alerts.yaml"],
        ["test", "rules", "prequal-alerts.test.yaml"],
        ["check", "config", "prometheus.yml"],
    ] {
        let ran = Command::new(prometheus_tool("promtool"))
            .args(arguments)
            .current_dir(shipped::folder())
            .output()?;
        ensure!(
            ran.status.success(),
            "promtool {arguments:?}:\n{}{}",
            String::from_utf8_lossy(&ran.stdout),
            String::from_utf8_lossy(&ran.stderr)
        );
    }
    Ok(())
}

#[test]
fn every_alert_says_what_it_means_and_is_tested() -> Result<()> {
    let rules = shipped::rules()?;
    let headings = operations::headings()?;
    let tests = shipped::text("prequal-alerts.test.yaml")?;
    for rule in &rules {
        let Some(alert) = &rule.alert else { continue };
        let annotation = |name: &str| rule.annotations[name].as_str().unwrap_or_default().to_owned();
        assert!(!annotation("summary").is_empty() && !annotation("description").is_empty(), "{alert}");
        assert!(["warning", "critical"].contains(&rule.severity.as_str()), "{alert}: {}", rule.severity);
        assert_eq!(annotation("runbook_url"), format!("docs/guide/operations.md#{}", alert.to_lowercase()));
        assert!(headings.contains(alert), "docs/guide/operations.md has no heading {alert}");
        assert!(tests.contains(&format!("alertname=\"{alert}\"")), "no unit test of {alert}");
    }
    let alerts: BTreeSet<_> = rules.iter().filter_map(|rule| rule.alert.clone()).collect();
    let stale = headings.iter().find(|heading| heading.starts_with("Prequal") && !alerts.contains(*heading));
    assert_eq!(stale, None, "docs/guide/operations.md has a heading for an alert that does not exist");
    Ok(())
}

/// Debian's Prometheus lacks Kubernetes discovery, so the test lists the targets that it would find and runs the
/// shipped relabelling on them.
#[test]
fn pods_become_the_targets_that_the_rules_expect() -> Result<()> {
    needs!(missing_prometheus());
    // The labels into which Kubernetes discovery turns the shipped pods' annotations.
    let pod = |name: &str, phase: &str, file: &str, deployment: &str| -> Result<Value> {
        let mut labels = json!({
            "__meta_kubernetes_namespace": "shop",
            "__meta_kubernetes_pod_name": name,
            "__meta_kubernetes_pod_phase": phase,
            "__meta_kubernetes_pod_ip": "127.0.0.1",
        });
        let pod = &find(&documents(file)?, "Deployment", deployment)["spec"]["template"];
        for (key, value) in pod["metadata"]["annotations"].as_object().into_iter().flatten() {
            let key = key.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
            labels[format!("__meta_kubernetes_pod_annotation_{key}")] = value.clone();
        }
        Ok(json!({"targets": [format!("127.0.0.1:{}", 1 + name.len())], "labels": labels}))
    };
    let over_ipv6 = |mut pod: Value| {
        pod["labels"]["__meta_kubernetes_pod_ip"] = json!("fd00::6");
        pod
    };
    let pods = json!([
        pod("edge", "Running", "kubernetes/base/edge.yaml", "edge")?,
        over_ipv6(pod("edge-6", "Running", "kubernetes/base/edge.yaml", "edge")?),
        over_ipv6(pod("replica-6", "Running", "kubernetes/base/replicas.yaml", "replicas")?),
        pod("replica-0", "Running", "kubernetes/base/replicas.yaml", "replicas")?,
        pod("replica-1", "Pending", "kubernetes/base/replicas.yaml", "replicas")?,
        pod("mesh-replica", "Running", "istio/server-agent.yaml", "replicas")?,
        pod("database", "Running", "istio/server-inbound.yaml", "replicas")?,
    ]);
    let mut config = shipped::yaml("prometheus-kubernetes.yml")?;
    config["rule_files"] = json!(["rules.yaml"]);
    for job in config["scrape_configs"].as_array_mut().into_iter().flatten() {
        let roles = job.as_object_mut().and_then(|job| job.remove("kubernetes_sd_configs"));
        assert_eq!(roles, Some(json!([{"role": "pod"}])));
        job["static_configs"] = pods.clone();
    }
    let prometheus = Prometheus::start(&config, &shipped::text("prequal-alerts.yaml")?)?;
    let found: BTreeSet<String> = eventually("Prometheus has its targets", Duration::from_secs(20), || {
        let targets = prometheus.api("targets?state=active").ok()?["activeTargets"].as_array()?.clone();
        let shown = |target: &Value| format!("{} {}", target["scrapeUrl"], target["labels"]);
        (targets.len() == 5).then(|| targets.iter().map(shown).collect())
    });
    let expected = [
        concat!(
            r#""http://127.0.0.1:9902/stats/prometheus?filter=%5E%28%28wasm%7Cdynamicmodules%29custom%5C.prequal_%7Cwasm%5C.prequal%5C.%29" "#,
            r#"{"instance":"shop/edge","job":"prequal-envoy"}"#
        ),
        concat!(
            r#""http://[fd00::6]:9902/stats/prometheus?filter=%5E%28%28wasm%7Cdynamicmodules%29custom%5C.prequal_%7Cwasm%5C.prequal%5C.%29" "#,
            r#"{"instance":"shop/edge-6","job":"prequal-envoy"}"#
        ),
        concat!(
            r#""http://127.0.0.1:9102/metrics" "#,
            r#"{"cluster":"replicas","instance":"shop/replica-0","job":"prequal-agents"}"#
        ),
        concat!(
            r#""http://[fd00::6]:9102/metrics" "#,
            r#"{"cluster":"replicas","instance":"shop/replica-6","job":"prequal-agents"}"#
        ),
        concat!(
            r#""http://127.0.0.1:9102/metrics" {"cluster":"outbound_8080__replicas_demo_svc_cluster_local","#,
            r#""instance":"shop/mesh-replica","job":"prequal-agents"}"#
        ),
    ];
    assert_eq!(found, expected.map(str::to_owned).into());
    Ok(())
}
