//! The chart `charts/prequal`: Helm's output equals Kustomize's output for `envoy-configs/kubernetes/`, its Envoy
//! passes the same test, and the agent is injected into a user's chart as documented. `values.rs` tests its values.
//!
//! Not tested here: installing it in a cluster.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use prequal_testbed::manifests::{find, parse};
use prequal_testbed::{bed, workspace_root};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::headless;
use crate::helm::{Helm, NEEDED, agent, arguments, chart, filter_settings, text};
use crate::kubernetes::{FOLDERS, kustomize};
use crate::schemas::{check, differences};

/// An object by kind and name, without what Helm adds: the release name as a prefix, labels, and a checksum where
/// Kustomize adds a hash to the ConfigMap's name.
fn canonical(object: &Value) -> (String, Value) {
    let mut object = object.clone();
    let short = |name: &str| {
        let name = name.strip_prefix("shop-").unwrap_or(name);
        if name.starts_with("envoy-") { "envoy".to_owned() } else { name.to_owned() }
    };
    let name = short(text(&object, "/metadata/name"));
    object["metadata"]["name"] = json!(name);
    object["metadata"].as_object_mut().expect("metadata").remove("labels");
    if let Some(annotations) = object.pointer_mut("/spec/template/metadata/annotations") {
        annotations.as_object_mut().expect("annotations").remove("checksum/config");
    }
    if let Some(volumes) = object.pointer_mut("/spec/template/spec/volumes").and_then(Value::as_array_mut) {
        // Kustomize's patches put their volumes first.
        volumes.sort_by_key(|volume| volume["name"].to_string());
        if let Some(config) = volumes[0].pointer_mut("/configMap/name") {
            *config = json!(short(config.as_str().expect("a name")));
        }
    }
    if let Some(config) = object.pointer_mut("/data/envoy.yaml") {
        *config = json!(
            config
                .as_str()
                .expect("a text")
                .replace("\"shop-replicas.prequal.svc.cluster.local.\"", REPLICAS)
        );
    }
    one_label(&mut object);
    (format!("{} {name}", text(&object, "/kind")), object)
}

const REPLICAS: &str = "replicas.prequal.svc.cluster.local.";

/// Uses `app` instead of the labels that charts have.
fn one_label(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            if let Some(component) = fields.remove("app.kubernetes.io/component") {
                fields.retain(|name, _| !name.starts_with("app.kubernetes.io/") && name != "helm.sh/chart");
                fields.insert("app".to_owned(), component);
            }
            fields.values_mut().for_each(one_label);
        }
        Value::Array(items) => items.iter_mut().for_each(one_label),
        _ => {}
    }
}

/// Chart and Kustomize files must agree: an edit to only one of them fails here.
#[test]
fn the_chart_makes_what_kustomize_makes() -> Result<()> {
    let Some(helm) = Helm::find()? else { return Ok(()) };
    // The overlays take the module from the user's own image.
    let overlays: [&[&str]; 4] = [
        &[],
        &["edge.module.from=initContainer"],
        &["edge.module.from=imageVolume", "edge.module.imageVolume.file=prequal_filter.wasm"],
        &["edge.module.from=native"],
    ];
    for (folder, values) in FOLDERS.into_iter().zip(overlays) {
        let Some(kustomized) = kustomize(folder)? else { return Ok(()) };
        let mut expected: BTreeMap<String, Value> = kustomized.iter().map(canonical).collect();
        // Helm does not create it (`--create-namespace`).
        expected.remove("Namespace prequal").context("the namespace")?;
        let rendered = helm.objects(&chart(), &[&NEEDED, values].concat(), &[])?;
        let mut found: BTreeMap<String, Value> = rendered.iter().map(canonical).collect();
        for (name, key, file) in [
            ("ConfigMap dashboard", "grafana-prequal.json", "observability/grafana-prequal.json"),
            ("ConfigMap rules", "prequal-alerts.yaml", "observability/prequal-alerts.yaml"),
        ] {
            let map = found.remove(name).context(name)?;
            let shipped = std::fs::read_to_string(workspace_root().join("envoy-configs").join(file))?;
            assert_eq!(map["data"][key].as_str().context(name)?.trim_end(), shipped.trim_end(), "{name}");
        }
        assert!(found.keys().eq(expected.keys()), "{folder}: {:?}, {:?}", found.keys(), expected.keys());
        for (name, object) in &expected {
            let (mut ours, mut theirs) = (found.remove(name).with_context(|| name.clone())?, object.clone());
            // Texts must be equal; only the end of the last line may differ.
            for object in [&mut ours, &mut theirs] {
                if let Some(text) = object.pointer_mut("/data/envoy.yaml") {
                    *text = text.as_str().context("a text")?.trim_end().lines().collect();
                }
            }
            let mut differ = Vec::new();
            differences("", &ours, &theirs, &mut differ);
            assert!(
                differ.is_empty(),
                "{folder}: {name}: the chart's beside Kustomize's: {}",
                differ.join("; ")
            );
        }
    }
    Ok(())
}

#[test]
fn helm_lints_the_chart() -> Result<()> {
    let Some(helm) = Helm::find()? else { return Ok(()) };
    let chart = chart();
    let values: Vec<&str> = NEEDED.iter().flat_map(|value| ["--set", value]).collect();
    let arguments = [&["lint", "--strict", chart.to_str().context("UTF-8")?], &values[..]].concat();
    let output = helm.run(&arguments)?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(!said.contains("[WARNING]") && !said.contains("[ERROR]"), "{said}");
    Ok(())
}

/// The chart is released with everything else, under the same version.
#[test]
fn the_charts_version_is_the_releases() -> Result<()> {
    let read = |file: &str| -> Result<Value> {
        let text = std::fs::read_to_string(chart().join(file))?;
        Ok(parse(&text)?.remove(0))
    };
    let version = env!("CARGO_PKG_VERSION");
    let (about, values) = (read("Chart.yaml")?, read("values.yaml")?);
    assert_eq!((&about["version"], &about["appVersion"]), (&json!(version), &json!(version)));
    for pointer in ["/agent", "/edge/module/initContainer", "/edge/module/imageVolume", "/edge/module/native"]
    {
        assert_eq!(values.pointer(&format!("{pointer}/image/tag")), Some(&json!(version)), "{pointer}");
    }
    Ok(())
}

/// The chart's Envoy, with other names, ports and settings than Kustomize's, in front of agents with the chart's flags.
#[test]
fn the_filter_follows_the_charts_pods() -> Result<()> {
    bed!();
    let Some(helm) = Helm::find()? else { return Ok(()) };
    let values = [
        "nameOverride=web",
        "clusterDomain=example.internal",
        "agent.port=18080",
        "agent.mode=native",
        "agent.args={--report=always}",
        "edge.settings.pool_size=20",
    ];
    let objects = helm.objects(&chart(), &[&NEEDED, &values[..]].concat(), &["--namespace=shop"])?;
    let service = find(&objects, "Service", "web-replicas");
    let name = format!(
        "{}.{}.svc.example.internal",
        text(&service, "/metadata/name"),
        text(&service, "/metadata/namespace")
    );
    let config = find(&objects, "ConfigMap", "web-envoy");
    let root = parse(text(&config, "/data/envoy.yaml"))?.remove(0);
    for cluster in 0..2 {
        let endpoint = &root["static_resources"]["clusters"][cluster]["load_assignment"]["endpoints"][0];
        let address = &endpoint["lb_endpoints"][0]["endpoint"]["address"]["socket_address"];
        assert_eq!(
            *address,
            json!({"address": format!("{name}."), "port_value": service["spec"]["ports"][0]["port"]})
        );
    }
    assert!(filter_settings(&root)?.contains("\"pool_size\":20"), "{}", filter_settings(&root)?);
    let replicas = find(&objects, "Deployment", "web-replicas");
    // The test bed has its own addresses.
    let own = ["--listen", "--advertise", "--admin", "--upstream"];
    let (container, _) = agent(&replicas["spec"]["template"]["spec"])?;
    let mut flags = arguments(container);
    flags.retain(|flag| !own.iter().any(|own| flag.starts_with(&format!("{own}="))));
    assert!(flags.len() == 3, "{flags:?}");
    headless::assert_followed(root, &name, &flags)
}

/// ORCA is off by default. Each value becomes a flag of the agent; `values.rs` checks that the agent accepts it.
#[test]
fn the_values_for_orca_are_the_agents_flags() -> Result<()> {
    let Some(helm) = Helm::find()? else { return Ok(()) };
    let flags = |values: &[&str]| -> Result<Vec<String>> {
        let objects = helm.objects(&chart(), &[&NEEDED, values].concat(), &[])?;
        let replicas = find(&objects, "Deployment", "shop-replicas");
        let (container, _) = agent(&replicas["spec"]["template"]["spec"])?;
        let mut flags = arguments(container);
        flags.retain(|flag| flag.starts_with("--orca"));
        Ok(flags)
    };
    assert!(flags(&[])?.is_empty());
    assert_eq!(flags(&["agent.orca.format=json"])?, ["--orca=json"]);
    assert_eq!(flags(&["agent.orca.streams=100"])?, ["--orca-streams=100"]);
    let all =
        ["agent.orca.format=text", "agent.orca.for=http", "agent.orca.streams=1000000", "agent.orca.limit=8"];
    assert!(flags(&all).is_err(), "more streams than the agent takes");
    let all = [
        "agent.orca.format=text",
        "agent.orca.for=http",
        "agent.orca.streams=100000",
        "agent.orca.limit=1000000",
    ];
    let expected = ["--orca=text", "--orca-for=http", "--orca-limit=1000000", "--orca-streams=100000"];
    assert_eq!(flags(&all)?, expected);
    Ok(())
}

/// A native sidecar starts before the application and ends after it; the rest of the pod is the same.
#[test]
fn a_native_sidecar_is_an_init_container_that_keeps_running() -> Result<()> {
    let Some(helm) = Helm::find()? else {
        return Ok(());
    };
    let pod = |values: &[&str]| -> Result<Value> {
        let objects = helm.objects(&chart(), &[&NEEDED, values].concat(), &[])?;
        Ok(find(&objects, "Deployment", "shop-replicas")["spec"]["template"]["spec"].clone())
    };
    let (beside, mut native) = (pod(&[])?, pod(&["agent.mode=native"])?);
    let mut sidecar = native["initContainers"][0].clone();
    native.as_object_mut().context("a pod")?.remove("initContainers");
    assert_eq!(
        sidecar.as_object_mut().context("a container")?.remove("restartPolicy"),
        Some(json!("Always"))
    );
    // When a native sidecar is asked to end, no request is left, so it needs no delay.
    let args = sidecar["args"].as_array_mut().context("flags")?;
    let delay = args.iter_mut().find(|flag| **flag == "--drain-delay-ms=0").context("no delay")?;
    *delay = json!("--drain-delay-ms=10000");
    native["containers"].as_array_mut().context("containers")?.push(sidecar);
    assert_eq!(native, beside);
    Ok(())
}

/// The blocks of docs/guide/kubernetes.md as files of a chart that depends on this one.
#[test]
fn the_agent_is_injected_as_documented() -> Result<()> {
    let Some(helm) = Helm::find()? else { return Ok(()) };
    let page = std::fs::read_to_string(workspace_root().join("docs/guide/kubernetes.md"))?;
    let section = page.split("### The agent in your own chart").nth(1).context("the section")?;
    let block = |language: &str, index: usize| -> Result<&str> {
        let fence = format!("```{language}\n");
        let block = section.split(fence.as_str()).nth(index + 1).context("a block")?;
        Ok(block.split("```").next().unwrap_or_default())
    };
    let folder = TempDir::new()?;
    std::fs::create_dir_all(folder.path().join("templates"))?;
    std::fs::create_dir_all(folder.path().join("charts"))?;
    let about = format!("apiVersion: v2\nname: shop\nversion: 2.0.0\n{}", block("yaml", 0)?);
    std::fs::write(folder.path().join("Chart.yaml"), about)?;
    std::fs::write(folder.path().join("values.yaml"), block("yaml", 1)?)?;
    std::fs::write(folder.path().join("templates/deployment.yaml"), block("gotemplate", 0)?)?;
    std::os::unix::fs::symlink(chart(), folder.path().join("charts/prequal"))?;

    let objects = helm.objects(folder.path(), &[], &[])?;
    objects.iter().try_for_each(check)?;
    let shop = find(&objects, "Deployment", "shop");
    let template = &shop["spec"]["template"];
    let (container, native) = agent(&template["spec"])?;
    assert!(native, "the page shows a native sidecar");
    let image = format!("registry.example.com/prequal/probe-agent:{}", env!("CARGO_PKG_VERSION"));
    assert_eq!(container["image"], image);
    assert!(arguments(container).contains(&"--upstream=127.0.0.1:3000".to_owned()), "{container:#}");
    assert_eq!(template["metadata"]["annotations"]["prequal.io/agent-admin"], "9102");
    assert_eq!(template["spec"]["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"], 45);
    assert_eq!(template["spec"]["terminationGracePeriodSeconds"], 60);
    // The Service that Envoy resolves selects these pods and uses the agent's port.
    let service = find(&objects, "Service", "shop-replicas");
    assert_eq!(service["spec"]["selector"], template["metadata"]["labels"]);
    assert_eq!(service["spec"]["ports"][0]["targetPort"], container["ports"][0]["containerPort"]);
    assert_eq!(service["spec"]["clusterIP"], "None");

    // Values with which the agent cannot be injected are refused with the reason.
    for (values, expected) in [
        ("prequal.agent.container=shopp", "agent.container: the deployment has no container `shopp`"),
        ("prequal.agent.mod=native", "additional properties 'mod' not allowed"),
        ("prequal.registry=", "registry is missing"),
    ] {
        let output = helm.template(folder.path(), &[values], &[])?;
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(expected), "{values}: {error}");
    }
    Ok(())
}

/// The line that installs the chart, with `template` instead of `install`.
#[test]
fn the_documented_install_command_renders() -> Result<()> {
    let Some(helm) = Helm::find()? else { return Ok(()) };
    let page = std::fs::read_to_string(workspace_root().join("docs/guide/kubernetes.md"))?;
    let line = page.lines().find_map(|line| line.strip_prefix("helm install prequal charts/prequal "));
    let chart = chart();
    let mut arguments = vec!["template", "prequal", chart.to_str().context("UTF-8")?];
    arguments.extend(line.context("the line")?.split(' '));
    let output = helm.run(&arguments)?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let objects = parse(&String::from_utf8(output.stdout)?)?;
    objects.iter().try_for_each(check)?;
    let edge = find(&objects, "Deployment", "prequal-edge");
    // The ConfigMap that the page's previous command creates.
    let module = &edge["spec"]["template"]["spec"]["volumes"][1]["configMap"]["name"];
    assert!(module == "prequal-filter" && page.contains(" create configmap prequal-filter "), "{module}");
    Ok(())
}

/// The links point to the shipped files, even if a checkout has turned them into copies.
#[test]
fn the_charts_files_are_the_shipped_ones() -> Result<()> {
    for (file, shipped) in [
        ("envoy.yaml", "kubernetes/base/envoy.yaml"),
        ("envoy-native.yaml", "kubernetes/overlays/native/envoy.yaml"),
        ("grafana-prequal.json", "observability/grafana-prequal.json"),
        ("prequal-alerts.yaml", "observability/prequal-alerts.yaml"),
    ] {
        let shipped = std::fs::read(workspace_root().join("envoy-configs").join(shipped))?;
        assert!(std::fs::read(chart().join("files").join(file))? == shipped, "{file}");
    }
    Ok(())
}
