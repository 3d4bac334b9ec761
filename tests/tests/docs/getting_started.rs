//! Runs the commands of the getting-started page exactly as shown.

use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use prequal_testbed::{bed, dist_dir, envoy_binary, missing_program, needs, workspace_root};

use crate::blocks;

pub const PAGE: &str = "docs/guide/getting-started.md";

/// A multiple of ten, such as 12340. This port and the next three are free.
fn ten_ports() -> u16 {
    let free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    loop {
        let any = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a port");
        let ten = any.port() / 10 * 10;
        if (ten..ten + 4).all(free) {
            return ten;
        }
    }
}

#[test]
fn the_getting_started_page_works_line_by_line() -> Result<()> {
    bed!(&[dist_dir().join("prequal")]);
    needs!(missing_program(&["awk", "bash", "curl", "python3"]));
    let blocks = blocks(Path::new(PAGE))?;
    let typed: String = blocks.iter().filter(|b| b.language == "sh").map(|b| b.text.as_str()).collect();
    // Replacements: programs that are already built and fetched, ports that are free, files that are removed with the
    // test.
    let scratch = tempfile::TempDir::new()?;
    let (backends, agents, envoy) = (ten_ports(), ten_ports(), ten_ports());
    let mut script = typed;
    for (shown, here) in [
        ("cargo xtask build\n", "true\n".to_owned()),
        ("cargo xtask envoy", format!("echo {}", envoy_binary().display())),
        ("$PWD/target/dist", dist_dir().display().to_string()),
        ("900$i", format!("{}$i", backends / 10)),
        (":808", format!(":{}", agents / 10)),
        (":10000", format!(":{envoy}")),
        (":9901", format!(":{}", envoy + 1)),
        ("target/first.", format!("{}/first.", scratch.path().display())),
        ("\"$ENVOY\" -c", "\"$ENVOY\" --disable-hot-restart --concurrency 1 -c".to_owned()),
    ] {
        assert!(script.contains(shown), "the page no longer says `{shown}`");
        script = script.replace(shown, &here);
    }
    // Make sure that nothing is left running, whatever happens.
    let script = format!(
        "set -euo pipefail\ntrap 'kill -CONT $(jobs -p) || true; kill $(jobs -p) || true' EXIT\n{script}"
    );
    let output = Command::new("bash").arg("-c").arg(&script).current_dir(workspace_root()).output()?;
    let shown = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{shown}\n{errors}");
    let counts = shown.lines().find_map(|line| line.strip_suffix(" after more than a second"));
    let (answers, slow) = counts.and_then(|counts| counts.split_once(" answers, ")).context("no counts")?;
    let (answers, slow): (usize, usize) = (answers.parse()?, slow.parse()?);
    // Answers that may be late: those of the trials after 1 and 3 s, and one for each of the four clients, if the
    // stalled replica already had its request.
    assert!(answers >= 100 && (1..=8).contains(&slow), "{slow} of {answers} waited\n{shown}\n{errors}");
    assert!(shown.contains("cold") && shown.contains("ejected"), "{shown}");
    Ok(())
}
