//! The values of the chart `charts/prequal`: with any values its objects match the schema and are consistent; errors
//! name wrong and missing values; docs/guide/kubernetes.md lists all values.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use prequal_core::config::Config;
use prequal_testbed::manifests::parse;
use prequal_testbed::{dist_dir, missing_file, needs, workspace_root};
use serde_json::Value;

use crate::helm::{Helm, NEEDED, agent, arguments, chart, filter_settings, text};
use crate::kubernetes::assert_restricted;
use crate::schemas::check;

/// Values (in addition to those without a default), and flags that set the version of Kubernetes to assume.
const MATRIX: &[(&[&str], &[&str])] = &[
    (&[], &["--kube-version=1.28.0"]),
    (
        &["agent.mode=native", "agent.readyCheck=http:/healthz", "agent.args={--max-connections=500}"],
        &["--kube-version=1.29.3"],
    ),
    (
        &[
            "agent.orca.format=binary",
            "agent.orca.for=grpc",
            "agent.orca.streams=100000",
            "agent.orca.limit=8",
        ],
        &[],
    ),
    (&["agent.orca.streams=1", "agent.args={--orca=text,--orca-window-ms=1000}"], &[]),
    (
        &[
            "agent.mode=native",
            "replicas.pod.initContainers[0].name=migrate",
            "replicas.pod.initContainers[0].image=x:1",
        ],
        &[],
    ),
    (
        &[
            "nameOverride=other",
            "clusterDomain=example.internal",
            "agent.port=18080",
            "agent.adminPort=19102",
            "agent.appPort=3000",
            "edge.settings.mode=sync",
            "edge.settings.hint.header=x-session-id",
            "edge.maxConnections=20",
            "edge.concurrency=4",
            "edge.replicas=1",
            "edge.service.type=LoadBalancer",
            "edge.service.annotations.a=b",
            "edge.podLabels.team=a",
            "edge.podAnnotations.a=b",
            "edge.pod.priorityClassName=high",
        ],
        &[],
    ),
    (
        &[
            "edge.module.from=imageVolume",
            "networkPolicy.agentClients[0].podSelector.matchLabels.a=b",
            "networkPolicy.edgeClients[0].ipBlock.cidr=10.0.0.0/8",
            "networkPolicy.monitoringNamespace=observability",
            "replicas.app.command={/serve}",
            "replicas.app.env[0].name=A",
            "replicas.app.env[0].value=b",
            "replicas.app.extra.lifecycle.preStop.sleep.seconds=50",
            "replicas.podLabels.team=a",
            "replicas.podAnnotations.a=b",
            "replicas.pod.volumes[0].name=scratch",
            "agent.extra.env[0].name=RUST_LOG",
            "agent.extra.env[0].value=info",
        ],
        &["--kube-version=1.33.0"],
    ),
    (
        &["edge.module.from=native", "edge.settings.pool_size=20", "agent.port=18080"],
        &["--kube-version=1.33.0"],
    ),
    (
        &["replicas.deployment=false", "replicas.selectorLabels.app=mine", "edge.module.from=initContainer"],
        &[],
    ),
    (
        &[
            "replicas.enabled=false",
            "edge.upstream.host=mine.default.svc.cluster.local.",
            "edge.upstream.port=9090",
        ],
        &[],
    ),
    (
        &[
            "edge.enabled=false",
            "networkPolicy.enabled=false",
            "monitoring.dashboard.enabled=false",
            "monitoring.rules.labels.role=alert-rules",
        ],
        &[],
    ),
];

fn agent_program() -> PathBuf {
    dist_dir().join("probe-agent")
}

#[test]
fn with_any_values_every_object_matches_the_schema() -> Result<()> {
    needs!(missing_file(&[agent_program()], "cargo xtask build"));
    let Some(helm) = Helm::find()? else { return Ok(()) };
    for (values, flags) in MATRIX {
        let objects = helm.objects(&chart(), &[&NEEDED, *values].concat(), flags)?;
        (|| {
            objects.iter().try_for_each(check)?;
            selectors_match(&objects)?;
            ports_exist(&objects)?;
            for deployment in objects.iter().filter(|object| object["kind"] == "Deployment") {
                let pod = &deployment["spec"]["template"]["spec"];
                // One case adds a user's container, which the chart does not restrict.
                if !values.iter().any(|value| value.contains("initContainers")) {
                    assert_restricted(pod);
                }
            }
            let config = objects.iter().find_map(|object| object["data"]["envoy.yaml"].as_str());
            if let Some(config) = config {
                Config::parse(&filter_settings(&parse(config)?[0])?).context("the filter's settings")?;
            }
            agent_accepts(&objects)
        })()
        .with_context(|| format!("{values:?} {flags:?}"))?;
    }
    Ok(())
}

fn labels(value: &Value) -> BTreeSet<(String, String)> {
    let labels = value.as_object().into_iter().flatten();
    labels.map(|(name, value)| (name.clone(), value.as_str().unwrap_or_default().to_owned())).collect()
}

/// Checks that a Deployment's selector matches its own pods, and that every other selector matches pods of a Deployment
/// or of the user.
fn selectors_match(objects: &[Value]) -> Result<()> {
    let deployments: Vec<&Value> = objects.iter().filter(|object| object["kind"] == "Deployment").collect();
    let mut pods = vec![[("app".to_owned(), "mine".to_owned())].into()];
    for deployment in deployments {
        let pod = labels(&deployment["spec"]["template"]["metadata"]["labels"]);
        ensure!(labels(&deployment["spec"]["selector"]["matchLabels"]).is_subset(&pod), "{deployment:#}");
        pods.push(pod);
    }
    for object in objects {
        let selector = match text(object, "/kind") {
            "Service" => &object["spec"]["selector"],
            "PodDisruptionBudget" => &object["spec"]["selector"]["matchLabels"],
            "NetworkPolicy" => &object["spec"]["podSelector"]["matchLabels"],
            _ => continue,
        };
        let selector = labels(selector);
        let found = pods.iter().any(|pod| selector.is_subset(pod));
        ensure!(!selector.is_empty() && found, "it selects no pod: {object:#}");
    }
    Ok(())
}

/// Checks that every port of a Service or a NetworkPolicy is a number, or the name of a port of an ordinary container.
/// The names of a native sidecar's ports do not work with every network plug-in (kubernetes#125285), and in Services
/// only from Kubernetes 1.32 on (kubernetes#127958).
fn ports_exist(objects: &[Value]) -> Result<()> {
    let items = |value: &Value| value.as_array().cloned().unwrap_or_default();
    for object in objects {
        let (selector, ports): (_, Vec<Value>) = match text(object, "/kind") {
            "Service" => {
                let ports = items(&object["spec"]["ports"]);
                (&object["spec"]["selector"], ports.iter().map(|port| port["targetPort"].clone()).collect())
            }
            "NetworkPolicy" => {
                let rules = items(&object["spec"]["ingress"]);
                let ports = rules.iter().flat_map(|rule| items(&rule["ports"]));
                let ports = ports.map(|port| port["port"].clone()).collect();
                (&object["spec"]["podSelector"]["matchLabels"], ports)
            }
            _ => continue,
        };
        let selected = objects.iter().filter(|object| object["kind"] == "Deployment").filter(|deployment| {
            labels(selector).is_subset(&labels(&deployment["spec"]["template"]["metadata"]["labels"]))
        });
        let containers =
            selected.flat_map(|deployment| items(&deployment["spec"]["template"]["spec"]["containers"]));
        let names: Vec<Value> = containers
            .flat_map(|container| items(&container["ports"]))
            .map(|port| port["name"].clone())
            .collect();
        ensure!(!ports.is_empty(), "{object:#}");
        for port in ports {
            ensure!(
                port.is_number() || names.contains(&port),
                "port {port} is not among {names:?}: {object:#}"
            );
        }
    }
    Ok(())
}

/// Checks that the real agent accepts the flags of its container, and that the container's ports and the pod's times
/// are consistent.
fn agent_accepts(objects: &[Value]) -> Result<()> {
    let replicas = objects.iter().find(|object| {
        object["kind"] == "Deployment" && text(object, "/metadata/name").ends_with("-replicas")
    });
    let Some(replicas) = replicas else { return Ok(()) };
    let pod = &replicas["spec"]["template"]["spec"];
    let (container, native) = agent(pod)?;
    ensure!(native == (container["restartPolicy"] == "Always"), "{container:#}");
    // Flags are parsed in order: help is printed only if everything before it is valid.
    let output = Command::new(agent_program()).args(arguments(container)).arg("--help").output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let value = |flag: &str| {
        let arguments = arguments(container);
        let found = arguments.iter().find_map(|argument| argument.strip_prefix(flag)?.strip_prefix('='));
        found.map(str::to_owned).with_context(|| flag.to_owned())
    };
    let port = container["ports"][0]["containerPort"].to_string();
    ensure!(value("--listen")?.ends_with(&format!(":{port}")), "{container:#}");
    ensure!(value("--advertise")?.ends_with(&format!(":{port}")), "{container:#}");
    let admin = container["ports"][1]["containerPort"].to_string();
    ensure!(value("--admin")?.ends_with(&format!(":{admin}")), "{container:#}");
    let annotations = &replicas["spec"]["template"]["metadata"]["annotations"];
    ensure!(annotations["prequal.io/agent-admin"] == admin, "{annotations:#}");

    let milliseconds = |flag: &str| Ok::<u64, anyhow::Error>(value(flag)?.parse()?);
    let drain = milliseconds("--drain-delay-ms")? + milliseconds("--drain-timeout-ms")?;
    let stop = &pod["containers"][0]["lifecycle"]["preStop"];
    // Before Kubernetes 1.30, `preStop` runs a program that sleeps.
    let sleep = match stop["sleep"]["seconds"].as_u64() {
        Some(seconds) => seconds,
        None => stop["exec"]["command"][1].as_str().context("a sleep")?.parse()?,
    };
    let grace = pod["terminationGracePeriodSeconds"].as_u64().context("a grace period")?;
    ensure!(drain <= sleep * 1000 && sleep < grace, "{drain} ms, {sleep} s, {grace} s");
    Ok(())
}

/// Each case: values in addition to the required ones, flags, and what the message must say.
const WRONG: &[(&[&str], &[&str], &[&str])] = &[
    // All errors that a schema finds, at once.
    (
        &[
            "registry=https://x",
            "agent.mode=sidecar",
            "agent.port=70000",
            "agent.appPort=http",
            "agent.prot=1",
            "agent.readyCheck=https:/",
            "agent.drainDelayMs=-1",
            "agent.image.digest=sha256:1",
            "agent.orca.format=xml",
            "agent.orca.for=tcp",
            "agent.orca.streams=100001",
            "agent.orca.limit=some",
            "agent.orca.window=1",
            "edge.module.from=oci",
            "edge.service.type=Magic",
            "networkPolicy.monitoringNamespace=",
            "replicas.app.image=1",
        ],
        &[],
        &[
            "/registry",
            "/agent/mode",
            "/agent/port",
            "/agent/appPort",
            "'prot'",
            "/agent/readyCheck",
            "/agent/drainDelayMs",
            "/agent/image/digest",
            "/agent/orca/format",
            "/agent/orca/for",
            "/agent/orca/streams",
            "/agent/orca/limit",
            "'window'",
            "/edge/module/from",
            "/edge/service/type",
            "/networkPolicy/monitoringNamespace",
        ],
    ),
    // All missing values, at once.
    (&["registry=", "replicas.app.image="], &[], &["registry is missing", "replicas.app.image is missing"]),
    (
        &[
            "replicas.deployment=false",
            "edge.enabled=false",
            "agent.adminPort=8080",
            "agent.appPort=8080",
            "networkPolicy.enabled=true",
        ],
        &[],
        &[
            "replicas.selectorLabels is missing",
            "agent.adminPort",
            "agent.appPort: 8080",
            "networkPolicy.agentClients is missing",
        ],
    ),
    (
        &[
            "replicas.enabled=false",
            "edge.settings.cluster=mine",
            "edge.maxHeapBytes=536870912",
            "edge.module.from=imageVolume",
            "replicas.selectorLabels.a=b",
        ],
        &["--kube-version=1.32.0"],
        &[
            "edge.upstream.host is missing",
            "edge.settings.cluster",
            "edge.maxHeapBytes: 536870912",
            "edge.module.from: imageVolume needs Kubernetes 1.33, this is v1.32.0",
            "replicas.selectorLabels needs replicas.deployment=false",
        ],
    ),
    (&["edge.module.from=native", "edge.module.native.file=x"], &["--kube-version=1.33.0"], &["'file'"]),
    (
        &["edge.module.from=native"],
        &["--kube-version=1.32.0"],
        &["edge.module.from: native needs Kubernetes 1.33, this is v1.32.0"],
    ),
    (
        &["agent.mode=native"],
        &["--kube-version=1.28.0"],
        &["agent.mode: native sidecars need Kubernetes 1.29, this is v1.28.0"],
    ),
    (
        &["agent.appSleepSeconds=39"],
        &[],
        &["agent.appSleepSeconds: the application ends after 39 s", "40000 ms"],
    ),
    (
        &["replicas.terminationGracePeriodSeconds=45"],
        &[],
        &["terminationGracePeriodSeconds: the pod is killed after 45 s"],
    ),
    (&["agent.container=web"], &[], &["agent.container: the deployment has no container `web`"]),
    (&["agent.image.tag="], &[], &["agent.image.tag is missing"]),
    (
        &["agent.orca.for=http", "agent.orca.streams=2", "agent.args={--orca-streams=3}"],
        &[],
        &[
            "agent.orca.format is missing: agent.orca.for (http)",
            "agent.args: agent.orca already sets --orca-streams",
        ],
    ),
    (
        &["replicas.app.extra.ports[0].name=http", "replicas.app.extra.ports[0].containerPort=9000"],
        &[],
        &["container `app` has a port named `http`"],
    ),
    (
        &["replicas.app.extra.ports[0].containerPort=9102", "replicas.app.extra.ports[0].name=web"],
        &[],
        &["agent.adminPort 9102: container `app` already uses port 9102"],
    ),
];

#[test]
fn wrong_and_missing_values_are_named() -> Result<()> {
    let Some(helm) = Helm::find()? else { return Ok(()) };
    for (values, flags, expected) in WRONG {
        let output = helm.template(&chart(), &[&NEEDED, *values].concat(), flags)?;
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{values:?}");
        for expected in *expected {
            assert!(error.contains(expected), "{values:?}: no `{expected}` in: {error}");
        }
    }
    Ok(())
}

/// docs/guide/kubernetes.md has a row for every value and no other rows.
#[test]
fn the_values_in_the_table_are_the_charts() -> Result<()> {
    let text = std::fs::read_to_string(chart().join("values.yaml"))?;
    let mut expected = BTreeSet::new();
    leaves("", &parse(&text)?[0], &mut expected);
    let page = std::fs::read_to_string(workspace_root().join("docs/guide/kubernetes.md"))?;
    let table = page.split("| value |").nth(1).context("the table")?;
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let mut found = BTreeSet::new();
    for row in rows {
        let names = row.split('|').nth(1).unwrap_or_default().split('`').skip(1).step_by(2);
        found.extend(names.map(str::to_owned));
    }
    assert_eq!(found, expected);
    Ok(())
}

/// Paths of values. `resources`, `labels`, and an `image` with its fields each count as one value.
fn leaves(path: &str, value: &Value, found: &mut BTreeSet<String>) {
    let whole = ["resources", "image", "labels"].iter().any(|name| path.ends_with(&format!(".{name}")));
    match value.as_object() {
        Some(fields) if !whole && !fields.is_empty() => {
            for (name, value) in fields {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                leaves(&path, value, found);
            }
        }
        _ => {
            found.insert(path.to_owned());
        }
    }
}
