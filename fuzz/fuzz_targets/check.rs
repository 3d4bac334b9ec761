//! `prequal check`: any file is refused or checked, in bounded time.
#![no_main]

/// The command's own source files, because the command is a program without a library. Its other modules are left out.
#[path = "../../crates/prequal-cli/src"]
#[allow(dead_code, unreachable_pub, unused_imports, reason = "only the part that reads files is run")]
mod cli {
    pub(crate) mod check;
    pub(crate) mod read;
}

// The names by which those files refer to each other.
pub(crate) use cli::{check, read};

fn seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> = [
        include_str!("../../envoy-configs/static/envoy.yaml"),
        include_str!("../../envoy-configs/static/envoy-inbound.yaml"),
        "a: &x {b: 1}\nc: *x",
        "!ignore a: &x {b: 1}\nc: *x\n---\nd: 2",
        "resources:\n- \"@type\": type.googleapis.com/envoy.config.cluster.v3.Cluster\n  name: replicas\n",
        r#"{"staticResources":{"listeners":[],"clusters":[]}}"#,
        r#"{"configs":[{"@type":"type.googleapis.com/envoy.admin.v3.BootstrapConfigDump","bootstrap":{}}]}"#,
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec();
    // The shipped file several times, each time without twelve of its lines.
    let shipped = include_str!("../../envoy-configs/static/envoy.yaml");
    let lines: Vec<&str> = shipped.lines().filter(|line| !line.trim_start().starts_with('#')).collect();
    for cut in (0..lines.len().saturating_sub(12)).step_by(12) {
        let kept = [&lines[..cut], &lines[cut + 12..]].concat();
        seeds.push(kept.join("\n").into_bytes());
    }
    seeds
}

fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(root) = read::text(text) else { return };
    for must_be_dump in [false, true] {
        if let Ok(findings) = check::check(&root, must_be_dump) {
            assert!(findings.iter().all(|finding| !finding.code.name.is_empty()));
        }
    }
}

prequal_fuzz::target!(seeds, run);
