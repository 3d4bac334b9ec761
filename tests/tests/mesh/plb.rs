//! `envoy-configs/plb/`: the DaemonSet matches the schema and has the rights of `plb.service`.
//! crates/plb-netlink/tests/host/rights.rs tests that these rights are sufficient and that none is superfluous.

use anyhow::{Context as _, Result};
use prequal_testbed::manifests::{documents, find};
use prequal_testbed::workspace_root;
use serde_json::{Value, json};

use crate::schemas::check;

#[test]
fn the_daemonset_matches_the_schema_and_has_the_rights_of_the_unit() -> Result<()> {
    let objects = documents("plb/daemonset.yaml")?;
    for object in &objects {
        check(object)?;
    }
    // A cluster that does not validate would silently drop a misspelt field. Without `hostPID`, the daemon cannot read
    // the pins.
    let mut misspelt = find(&objects, "DaemonSet", "plb");
    misspelt["spec"]["template"]["spec"]["hostPid"] = json!(true);
    assert!(format!("{:#}", check(&misspelt).expect_err("an unknown field")).contains("hostPid"));

    let namespace = find(&objects, "Namespace", "plb");
    assert_eq!(namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"], "privileged");
    let set = find(&objects, "DaemonSet", "plb");
    assert_eq!(set["metadata"]["namespace"], "plb");
    assert_eq!(set["spec"]["selector"]["matchLabels"], set["spec"]["template"]["metadata"]["labels"]);
    let pod = &set["spec"]["template"]["spec"];
    // Without these the daemon sees only itself, or moves no connection.
    assert_eq!((&pod["hostNetwork"], &pod["hostPID"]), (&json!(true), &json!(true)));
    let container = &pod["containers"][0];
    let security = &container["securityContext"];
    assert_eq!(security["runAsUser"], 0);
    assert_eq!(security["allowPrivilegeEscalation"], false);
    assert_eq!(security["readOnlyRootFilesystem"], true);
    assert_eq!(security["capabilities"]["drop"], json!(["ALL"]));

    let unit = std::fs::read_to_string(workspace_root().join("envoy-configs/plb/plb.service"))?;
    let setting = |name: &str| -> Result<String> {
        let line = unit.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        line.map(str::to_owned).context(name.to_owned())
    };
    let granted = setting("AmbientCapabilities")?.replace("CAP_", "");
    let granted: Vec<Value> = granted.split_whitespace().map(|name| json!(name)).collect();
    assert_eq!(security["capabilities"]["add"], json!(granted));
    let command: Vec<&str> = [&container["command"], &container["args"]]
        .into_iter()
        .filter_map(Value::as_array)
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    assert_eq!(setting("ExecStart")?.trim_start_matches("/usr/local/bin"), command.join(" "));
    Ok(())
}
