//! Tests that rendering yields the shipped configuration, and that every variant of it passes the checks.

use clap::Parser as _;
use serde_json::{Value, json};

use super::render::{NATIVE, SHIPPED};
use super::spec::Spec;
use super::{Args, rendered};
use crate::{check, read};

#[derive(clap::Parser)]
struct Line {
    #[command(flatten)]
    args: Args,
}

fn args(line: &str) -> Args {
    Line::parse_from(std::iter::once("config").chain(line.split_whitespace())).args
}

fn render(spec: &str, line: &str) -> Result<String, String> {
    let spec = if spec.is_empty() { Spec::default() } else { Spec::read(read::text(spec).unwrap()).unwrap() };
    rendered(spec, &args(line)).map_err(|mistakes| mistakes.to_string())
}

/// Returns a configuration as a tree, in which the filter's settings are also a tree.
fn tree(text: &str) -> Value {
    let mut root = read::text(text).unwrap();
    let value = root.pointer_mut(SETTINGS).unwrap();
    *value = serde_json::from_str(value.as_str().unwrap()).unwrap();
    root
}

const MANAGER: &str = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config";
const SETTINGS: &str = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters/1/\
                        typed_config/config/configuration/value";

#[test]
fn shipped_values_yield_the_shipped_file() {
    let hosts = "--cluster replicas=127.0.0.1:8081,127.0.0.1:8082";
    let spelled = "--listen 127.0.0.1:10000 --admin 127.0.0.1:9901 --wasm target/dist/prequal_filter.wasm \
                   --shim stateful_session --route /=replicas";
    for line in [hosts.to_owned(), format!("{hosts} {spelled}")] {
        let text = render("", &line).unwrap();
        assert_eq!(tree(&text), tree(SHIPPED), "{line}");
        assert!(text.starts_with("# Envoy with Prequal in front of: replicas.\n"), "{text}");
    }
}

#[test]
fn values_go_where_they_belong() {
    let spec = "
        listen: 0.0.0.0:80
        admin: '[::1]:9000'
        wasm: /opt/prequal.wasm
        tls: {certificate: cert.pem, key: key.pem}
        settings: {profile: small}
        clusters:
        - {name: web, hosts: ['10.0.0.1:80', '[fd00::1]:80']}
        - {name: api, hosts: ['api.internal:8080'], prefix: /api, probe_port: 9000, settings: {mode: sync, hint: {header: x-session-id}}}
        - {name: old, hosts: ['10.0.0.9:80'], prefix: /old, settings: {rule: peak_ewma}}";
    let root = tree(&render(spec, "").unwrap());
    assert_eq!(root["admin"]["address"], json!({"socket_address": {"address": "::1", "port_value": 9000}}));
    let listener = &root["static_resources"]["listeners"][0];
    assert_eq!(listener["address"], json!({"socket_address": {"address": "0.0.0.0", "port_value": 80}}));
    let tls = &listener["filter_chains"][0]["transport_socket"]["typed_config"]["common_tls_context"];
    assert_eq!(tls["tls_certificates"][0]["private_key"]["filename"], "key.pem");
    let manager = root.pointer(MANAGER).unwrap();
    let routes = manager["route_config"]["virtual_hosts"][0]["routes"].as_array().unwrap();
    assert_eq!(routes[0]["direct_response"]["status"], 404);
    let leading: Vec<_> = routes[1..]
        .iter()
        .map(|route| {
            (route["match"]["prefix"].as_str().unwrap(), route["route"]["cluster"].as_str().unwrap())
        })
        .collect();
    assert_eq!(leading, [("/api", "api"), ("/old", "old"), ("/", "web")]);
    let module = &manager["http_filters"][1]["typed_config"]["config"]["vm_config"]["code"]["local"];
    assert_eq!(module["filename"], "/opt/prequal.wasm");
    assert_eq!(
        root.pointer(SETTINGS).unwrap(),
        &json!({"profile": "small", "shim": "stateful_session", "clusters": [
            {"cluster": "web", "probe_cluster": "web-agent", "verified_probes": true},
            {"cluster": "api", "probe_cluster": "api-agent", "verified_probes": true, "mode": "sync",
                "hint": {"header": "x-session-id"}},
            {"cluster": "old", "probe_cluster": "old-agent", "rule": "peak_ewma"},
        ]})
    );
    let clusters = root["static_resources"]["clusters"].as_array().unwrap();
    let of = |name: &str| clusters.iter().find(|cluster| cluster["name"] == name);
    let port = |name: &str| {
        of(name).unwrap()["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]
            ["socket_address"]["port_value"]
            .clone()
    };
    assert_eq!(
        (port("api"), port("api-agent"), port("web"), port("web-agent")),
        (8080.into(), 9000.into(), 80.into(), 80.into())
    );
    assert_eq!(
        (&of("api").unwrap()["type"], &of("web").unwrap()["type"]),
        (&json!("STRICT_DNS"), &json!("STATIC"))
    );
    assert_eq!(of("old-agent"), None, "nothing is probed there");
}

#[test]
fn shipped_values_yield_the_shipped_native_file() {
    let tree = |text: &str| {
        let mut root = read::text(text).unwrap();
        let settings = native_settings(&root, 0);
        *root.pointer_mut(&native_path(0)).unwrap() = settings;
        root
    };
    let text = render("", "--native --cluster replicas=127.0.0.1:8081,127.0.0.1:8082").unwrap();
    assert_eq!(tree(&text), tree(NATIVE));
    assert!(
        text.contains("ENVOY_DYNAMIC_MODULES_SEARCH_PATH") && text.contains("envoy-native.yaml"),
        "{text}"
    );
}

#[test]
fn a_detour_is_the_part_that_the_shipped_native_file_has_as_a_comment() {
    let mut shown = false;
    let uncommented = |line: &str| {
        let comment = line.trim_start().strip_prefix("# ");
        shown = comment.is_some_and(|text| {
            shown && text.starts_with("  ") || ["- name: prequal-detour", "common_lb_config:"].contains(&text)
        });
        if shown { line.replacen("# ", "", 1) } else { line.to_owned() }
    };
    let shipped: Vec<String> = NATIVE.lines().map(uncommented).collect();
    let tree = |text: &str| {
        let mut root = read::text(text).unwrap();
        let settings = native_settings(&root, 0);
        *root.pointer_mut(&native_path(0)).unwrap() = settings;
        root
    };
    let text = render("", "--native --detour --cluster replicas=127.0.0.1:8081,127.0.0.1:8082").unwrap();
    assert_eq!(tree(&text), tree(&shipped.join("\n")));
    assert!(tree(&text) != tree(NATIVE), "nothing was uncommented");
    let spec = "{native: true, detour: true, clusters: [{name: a, hosts: ['1.1.1.1:2']}, {name: b, hosts: ['1.1.1.1:3'], prefix: /b}]}";
    let root = read::text(&render(spec, "").unwrap()).unwrap();
    for cluster in [0, 2] {
        let statuses = format!("/static_resources/clusters/{cluster}/common_lb_config/override_host_status");
        assert!(root.pointer(&statuses).is_some(), "cluster {cluster}");
    }
}

/// Returns the pointer to the settings of a cluster's policy.
fn native_path(cluster: usize) -> String {
    format!(
        "/static_resources/clusters/{cluster}/load_balancing_policy/policies/0/typed_extension_config/typed_config/\
         lb_policy_config/value"
    )
}

fn native_settings(root: &Value, cluster: usize) -> Value {
    serde_json::from_str(root.pointer(&native_path(cluster)).unwrap().as_str().unwrap()).unwrap()
}

#[test]
fn each_native_policy_has_the_entry_about_its_cluster() {
    let spec = "
        native: true
        settings: {profile: small}
        clusters:
        - {name: web, hosts: ['10.0.0.1:80'], settings: {rule: peak_ewma}}
        - {name: api, hosts: ['api.internal:8080'], prefix: /api, settings: {max_age_ms: 900}}";
    let text = render(spec, "").unwrap();
    let root = read::text(&text).unwrap();
    assert_eq!(
        native_settings(&root, 0),
        json!({"profile": "small", "clusters": [
            {"cluster": "web", "probe_cluster": "web-agent", "rule": "peak_ewma"}]})
    );
    assert_eq!(
        native_settings(&root, 1),
        json!({"profile": "small", "clusters": [
            {"cluster": "api", "probe_cluster": "api-agent", "verified_probes": true, "max_age_ms": 900}]})
    );
    assert_eq!(check::check(&root, false).unwrap(), []);
}

#[test]
fn the_native_module_and_the_filter_refuse_what_belongs_to_the_other() {
    for (spec, line, part) in [
        ("", "--mode sync", "settings: `clusters[0].mode` \"sync\" needs the WebAssembly filter"),
        ("", "--profile inference", "needs the WebAssembly filter"),
        ("{wasm: a}", "", "`wasm` belongs to the filter"),
        ("{shim: override_host}", "", "`shim` belongs to the filter"),
    ] {
        let error = render(spec, &format!("--native --cluster a=10.0.0.1:80 {line}")).unwrap_err();
        assert!(error.contains(part), "{part} is not in: {error}");
    }
    let error = render("", "--detour --cluster a=10.0.0.1:80").unwrap_err();
    assert!(error.contains("`detour` belongs to the native module"), "{error}");
    let line = ["config", "--native", "--wasm", "a", "--cluster", "a=1.1.1.1:1"];
    assert!(Line::try_parse_from(line).is_err());
}

#[test]
fn flags_override_the_file() {
    let spec =
        "{listen: '1.1.1.1:1', settings: {profile: small}, clusters: [{name: a, hosts: ['1.1.1.1:2']}]}";
    let root = tree(&render(spec, "--listen 2.2.2.2:2 --profile inference --hint path_segment:2").unwrap());
    assert_eq!(root["static_resources"]["listeners"][0]["address"]["socket_address"]["address"], "2.2.2.2");
    let settings = root.pointer(SETTINGS).unwrap();
    assert_eq!((&settings["profile"], &settings["hint"]), (&json!("inference"), &json!({"path_segment": 2})));
}

#[test]
fn no_value_escapes_the_leading_comment() {
    let spec = "{wasm: \"a\\nb: c\", admin: '[::1]:9901', clusters: [{name: a, hosts: ['1.1.1.1:2']}]}";
    let text = render(spec, "").unwrap();
    let (head, body) = text.split_once("\nnode:").unwrap();
    assert!(head.lines().all(|line| line.starts_with('#')), "{head}");
    assert!(head.contains("prequal top http://[::1]:9901") && body.contains("address: ::1"), "{text}");
}

#[test]
fn every_variant_passes_the_checks() {
    for line in [
        "",
        "--shim override_host",
        "--probe-port 9000",
        "--profile inference",
        "--profile paper --shim override_host",
        "--mode sync --hint path_segment:1",
        "--cluster b=b.internal:80,c.internal:80 --route /b=b",
        "--native",
        "--native --detour",
        "--native --probe-port 9000 --profile small",
        "--native --cluster b=b.internal:80,c.internal:80 --route /b=b --tls-cert a --tls-key b",
        "--tls-cert a --tls-key b",
    ] {
        let text = render("", &format!("--cluster a=10.0.0.1:80,10.0.0.2:80 {line}")).unwrap();
        let mut findings = check::check(&read::text(&text).unwrap(), false).unwrap();
        findings.retain(|finding| finding.code.name != "module-missing");
        assert_eq!(findings, [], "{line}");
    }
}

#[test]
fn all_mistakes_are_named_at_once() {
    let error = render(
        "{listen: here, settings: {profile: huge}, clusters: [
            {name: a, hosts: ['0.0.0.0:80', '1.2.3:4', 'x:0', 'a b:1', '1.1.1.1:1', '1.1.1.1:1'], prefix: a},
            {name: a, hosts: [], probe_port: 70000}, {name: a-agent, hosts: ['x:1'], prefix: a, settings: {q_rif: 7}}]}",
        "--admin 1.1.1.1 --shim none --cluster x --route /x=nobody --hint x",
    )
    .unwrap_err();
    for part in [
        "`listen` must be",
        "`admin` must be",
        "--cluster must",
        "--route must",
        "--hint must",
        "`0.0.0.0:80`",
        "`1.2.3:4`",
        "`x:0`",
        "`a b:1`",
        "`1.1.1.1:1` twice",
        "clusters[1].name",
        "clusters[1]` needs a `prefix`",
        "clusters[2].name",
        "clusters[0].prefix` must begin",
        "leads to two clusters",
        "`shim` must be one of",
        "`profile` must be one of",
        "q_rif` must be a number",
    ] {
        assert!(error.contains(part), "{part} is not in: {error}");
    }
    assert!(render("", "").unwrap_err().contains("no cluster"));
    assert!(render("", "--cluster a=1.1.1.1:1 --hint header:x").unwrap_err().contains("\"mode\": \"sync\""));
}
