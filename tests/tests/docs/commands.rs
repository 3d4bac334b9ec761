//! Checks the commands in blocks and between backticks. Each is run here or by the test that [`ELSEWHERE`] names, or is
//! parsed by its own program. [`NOT_RUN`] lists the commands for which neither is possible, with the reasons. Any other
//! command fails the test.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use prequal_testbed::{
    Envoy, EnvoyConfig, Fleet, Reply, bed, dist_dir, eventually, missing_file, missing_program, needs,
    workspace_root,
};
use serde_json::Value;

use crate::getting_started;
use crate::{all_blocks, documents, read};

/// Commands for other projects' programs, and the test or step that runs each.
const ELSEWHERE: &[(&str, &str)] = &[
    ("cd envoy-configs/compose", "nothing to test"),
    ("docker-compose up --build --detach", "step `compose` of cargo xtask test"),
    ("docker-compose down --volumes", "step `compose`"),
    ("apt-get install --no-install-recommends docker.io docker-compose iptables debootstrap", ".ci/run"),
    ("apt-get install --no-install-recommends gcc-aarch64-linux-gnu libc6-dev-arm64-cross", ".ci/run"),
    ("cargo build --release -p plb-netlink", "step `release` builds the program for its archive"),
    ("cargo deny", "step `deps` of cargo xtask test"),
    ("cargo publish --dry-run", "step `crates`"),
    ("cargo test -p prequal-testbed --test mesh", "step `test`"),
    ("cargo test -p prequal-testbed --test e2e native::it_needs", "step `test`"),
    (
        "cargo run -p prequal-testbed --example refresh_schemas -- \"$DIR/kubernetes/customresourcedefinitions.gen.yaml\"",
        "it changes files: lint compiles it",
    ),
    ("promtool test rules prequal-alerts.test.yaml", "promtool_accepts_the_rules_and_their_tests_pass"),
    (
        "helm install prequal charts/prequal --namespace prequal --set registry=ghcr.io/you/prequal --set replicas.app.image=ghcr.io/you/shop:1.0.0",
        "the_documented_install_command_renders, without a cluster",
    ),
    ("helm lint", "helm_lints_the_chart"),
    ("helm push target/release-dist/prequal-0.1.0.tgz oci://REGISTRY", "step `release`"),
    ("sha256sum --check", "step `release`"),
    (
        "openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out release.key",
        "step `release`, and the tests of xtask",
    ),
    ("openssl pkey -in release.key -pubout -out release.pub", "step `release`, and the tests of xtask"),
    (
        "skopeo copy oci:target/release-dist/prequal_filter-0.1.0.oci:0.1.0 docker://REGISTRY/prequal_filter:0.1.0",
        "step `release`, with a registry of its own",
    ),
    (
        "skopeo copy --all oci:target/release-dist/probe-agent-0.1.0.oci:0.1.0 docker://REGISTRY/probe-agent:0.1.0",
        "step `release`",
    ),
    (
        "skopeo copy --all oci:target/release-dist/prequal_native-0.1.0.oci:0.1.0 docker://REGISTRY/prequal_native:0.1.0",
        "step `release`",
    ),
    ("envoy --mode validate", "documented_yaml_works"),
    ("curl -s 'http://127.0.0.1:9901/config_dump?include_eds'", "an_envoy_answers_the_documented_queries"),
    ("curl -s localhost:9902/stats/prometheus", "an_envoy_answers_the_documented_queries"),
    ("grep -E 'prequal_(picks|probes|members|diverted)'", "an_envoy_answers_the_documented_queries"),
    ("head -n 1", "nothing to test"),
];

/// Commands that no test runs, and why.
const NOT_RUN: &[(&str, &str)] = &[
    ("istioctl -n demo proxy-config listeners \"$P\" --port 8080 -o json", NO_ISTIOCTL),
    ("istioctl -n demo proxy-config clusters \"$P\" --port 8081 -o json", NO_ISTIOCTL),
    ("istioctl -n demo proxy-config endpoints \"$P\" --port 8081", NO_ISTIOCTL),
    ("istioctl proxy-config routes -o json", NO_ISTIOCTL),
    ("istioctl analyze", NO_ISTIOCTL),
    ("istioctl proxy-status", NO_ISTIOCTL),
    ("grep '\"name\"'", "it reads istioctl's output"),
    ("cargo bench -p prequal-bench --bench conflicts", "it takes minutes; `cargo xtask test` compiles it"),
    (
        "cosign sign --key cosign.key REGISTRY/prequal_filter@sha256:DIGEST",
        "it takes an account at a registry, and cosign",
    ),
    ("cargo info NAME", "it asks a public registry"),
    ("cargo publish -p prequal-policy -p plb-netlink -p probe-agent", "it publishes"),
    ("skopeo inspect docker://docker.io/envoyproxy/envoy:v1.40.0", "it asks a public registry"),
    ("go mod download -json istio.io/api@v1.31.1", "it fetches; only needed to refresh the schemas"),
];

const NO_ISTIOCTL: &str = "no package registry has istioctl";

/// Programs whose commands are searched for between backticks.
const PROGRAMS: &[&str] = &[
    "apt-get",
    "cargo",
    "cosign",
    "curl",
    "docker",
    "docker-compose",
    "envoy",
    "go",
    "helm",
    "istioctl",
    "kubectl",
    "kustomize",
    "plb",
    "prequal",
    "probe-agent",
    "promtool",
    "sha256sum",
    "skopeo",
];

struct Shown {
    command: String,
    place: String,
}

/// Every command on the pages for users and on the schemas' page, except on the page that another test runs as a whole.
fn shown() -> Result<Vec<Shown>> {
    let is_checked = |place: &str| {
        ["README.md", "docs/", "tests/schemas"].iter().any(|start| place.starts_with(start))
            && !place.starts_with(getting_started::PAGE)
    };
    let mut found = Vec::new();
    for block in all_blocks("sh")?.iter().filter(|block| is_checked(&block.place)) {
        let parts = of_block(&block.text).into_iter();
        found.extend(parts.map(|command| Shown { command, place: block.place.clone() }));
    }
    for document in documents()?.iter().filter(|document| is_checked(&document.display().to_string())) {
        let mut line = 1;
        for (index, span) in without_blocks(&read(document)?).split('`').enumerate() {
            let program = span.split_whitespace().next().unwrap_or_default();
            if index % 2 == 1 && span.contains(char::is_whitespace) && PROGRAMS.contains(&program) {
                let command = span.split_whitespace().collect::<Vec<_>>().join(" ");
                found.push(Shown { command, place: format!("{}:{line}", document.display()) });
            }
            line += span.matches('\n').count();
        }
    }
    Ok(found)
}

/// The text with the lines of code blocks emptied.
fn without_blocks(text: &str) -> String {
    let mut inside = false;
    let mut kept = String::new();
    for line in text.lines() {
        let fence = line.trim_start().starts_with("```");
        inside ^= fence;
        kept.push_str(if inside || fence { "" } else { line });
        kept.push('\n');
    }
    kept
}

/// Commands of a block: without comments, with continued lines joined, and without pipes, background marks and
/// `NAME=$(...)`.
fn of_block(text: &str) -> Vec<String> {
    let joined = text.replace("\\\n", " ");
    let lines = joined.lines().map(|line| line.split(" #").next().unwrap_or_default().trim());
    let parts = lines.filter(|line| !line.starts_with('#')).flat_map(|line| {
        let line = line.split_once("=$(").map_or(line, |(_, inner)| inner.trim_end_matches(')'));
        line.split(" | ").collect::<Vec<_>>()
    });
    parts
        .map(|part| part.trim().trim_end_matches('&').trim().to_owned())
        .filter(|part| !part.is_empty())
        .collect()
}

/// The commands with which this project's programs are called, and the paths at which the programs are built.
fn ours() -> [(&'static str, PathBuf); 4] {
    // Cargo's own folder, which `CARGO_TARGET_DIR` moves.
    let cargo = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("debug");
    [
        ("cargo xtask ", cargo.join("xtask")),
        ("plb ", cargo.join("plb")),
        ("prequal ", dist_dir().join("prequal")),
        ("probe-agent ", dist_dir().join("probe-agent")),
    ]
}

/// Splits words like a shell: text in double quotes stays together.
fn words(command: &str) -> Vec<String> {
    let mut quoted = false;
    let apart = |c: char| {
        quoted ^= c == '"';
        !quoted && c.is_whitespace()
    };
    command.split(apart).filter(|word| !word.is_empty()).map(|word| word.replace('"', "")).collect()
}

#[test]
fn every_command_is_run_or_parsed_or_listed_with_a_reason() -> Result<()> {
    let ours = ours();
    needs!(missing_program(&["git"]));
    needs!(missing_file(&ours.clone().map(|(_, program)| program), "cargo xtask test"));
    let shown = shown()?;
    let mut listed = BTreeSet::new();
    for Shown { command, place } in &shown {
        let entry = ELSEWHERE.iter().chain(NOT_RUN).find(|(known, _)| known == command);
        if let Some((known, _)) = entry {
            listed.insert(*known);
        } else if let Some((start, program)) = ours.iter().find(|(start, _)| command.starts_with(start)) {
            accepts(program, &words(&command[start.len()..]))
                .with_context(|| format!("{place}: `{command}`"))?;
        } else {
            assert!(
                command.starts_with("kubectl "),
                "{place}: `{command}`: nothing runs it. Run it in a test and list it in ELSEWHERE, or give the reason in NOT_RUN"
            );
        }
    }
    assert!(shown.len() > 60, "{}", shown.len());
    let stale = ELSEWHERE.iter().chain(NOT_RUN).find(|(known, _)| !listed.contains(known));
    assert_eq!(stale, None, "no document shows it");
    Ok(())
}

/// Checks that the program accepts these flags and arguments, followed by `--help`: the program parses them in order,
/// so it prints help only if everything before `--help` is valid. Placeholders (`NAME`, `<scenario>`, `[--quick]`) and
/// redirections are left out.
fn accepts(program: &Path, arguments: &[String]) -> Result<()> {
    let optional = arguments.iter().map(|word| word.trim_matches(['[', ']']));
    let said = optional
        .take_while(|word| !word.starts_with('>') && *word != "<")
        .filter(|word| *word != "--help" && !word.starts_with('<'))
        .map(|word| if word.len() == 1 && word.chars().all(char::is_uppercase) { "1" } else { word })
        .filter(|word| *word != "NAME");
    let output = Command::new(program).args(said).arg("--help").output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// There is no cluster, but kubectl itself parses every command, and generates the objects that it would create.
#[test]
fn kubectl_accepts_the_documented_commands() -> Result<()> {
    needs!(missing_program(&["bash", "git", "kubectl"]));
    let module = dist_dir().join("prequal_filter.wasm");
    needs!(missing_file(std::slice::from_ref(&module), "cargo xtask build"));
    let mut created = Vec::new();
    let mut checked = 0;
    for Shown { command, place } in shown()?.iter().filter(|shown| shown.command.starts_with("kubectl ")) {
        let here = command.replace("target/dist", &dist_dir().display().to_string());
        // Arguments after `--` belong to another program.
        let own = here.split(" -- ").next().unwrap_or_default();
        let ran = |more: &str| -> Result<String> {
            let output = Command::new("bash")
                .args(["-c", &format!("{own} {more}")])
                .current_dir(workspace_root())
                .env("P", "pod/client-0")
                .output()?;
            let error = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "{place}: `{command}`: {error}");
            Ok(String::from_utf8(output.stdout)?)
        };
        ran("--help")?;
        if command.contains(" create ") {
            created.push(yaml_serde::from_str::<Value>(&ran("--dry-run=client --output yaml")?)?);
        }
        let words: Vec<&str> = own.split_whitespace().collect();
        for pair in words.windows(2).filter(|pair| ["-f", "-k"].contains(&pair[0])) {
            assert!(workspace_root().join(pair[1]).exists(), "{place}: `{command}`: no {}", pair[1]);
        }
        checked += 1;
    }
    assert!(checked >= 9, "{checked}");
    let wasm = fs::read(module)?;
    let maps: Vec<&Value> = created.iter().filter(|object| object["kind"] == "ConfigMap").collect();
    let namespaces: BTreeSet<Option<&str>> =
        maps.iter().map(|map| map["metadata"]["namespace"].as_str()).collect();
    assert_eq!(namespaces, [Some("demo"), Some("prequal")].into(), "Istio's and Kubernetes' page");
    for map in maps {
        // This is the name that the manifests mount. The mesh's tests run those manifests.
        assert_eq!(map["metadata"]["name"], "prequal-filter");
        let content = map["binaryData"]["prequal_filter.wasm"].as_str().context("the module")?;
        use base64::Engine as _;
        assert!(base64::engine::general_purpose::STANDARD.decode(content)? == wasm, "another module");
    }
    assert!(
        created.iter().any(|object| object["kind"] == "Namespace" && object["metadata"]["name"] == "prequal")
    );
    Ok(())
}

/// Lines that query a running Envoy, run as shown except for its address.
#[test]
fn an_envoy_answers_the_documented_queries() -> Result<()> {
    bed!(&[dist_dir().join("prequal")]);
    needs!(missing_program(&["bash", "curl", "git"]));
    let fleet = Fleet::uniform(2, &Reply::ok())?;
    let envoy = Envoy::start(EnvoyConfig::for_replicas(&fleet.addrs())?)?;
    let client = envoy.client();
    eventually("both replicas are known", std::time::Duration::from_secs(10), || {
        let _ = client.get("/");
        (envoy.prequal("replicas").ok()?.other("prequal_members") == 2).then_some(())
    });
    let admin = envoy.admin().to_string();
    let agent = fleet[0].agent.admin().to_string();
    let mut asked = 0;
    for block in all_blocks("sh")?.iter().filter(|block| !block.place.starts_with(getting_started::PAGE)) {
        let asks = |line: &&str| {
            line.contains("127.0.0.1:9901") && !line.trim_start().starts_with("prequal config")
                || line.starts_with("curl")
        };
        for line in block.text.lines().filter(asks) {
            // The live form would run for ever.
            let once = if line.contains("prequal top http") {
                line.replace("top http", "top --once http")
            } else {
                line.to_owned()
            };
            let script = once
                .replace("127.0.0.1:9901", &admin)
                .replace("127.0.0.1:9102", &agent)
                .replace("localhost:9902", &admin)
                .replace("--interval 5", "--interval 1");
            let path = format!("{}:{}", dist_dir().display(), std::env::var("PATH")?);
            let output = Command::new("bash")
                .args(["-c", &format!("set -o pipefail; {script}")])
                .env("PATH", path)
                .output()?;
            ensure!(
                output.status.success() && output.stdout.len() > 20,
                "{}: `{line}`: {}{}",
                block.place,
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
            asked += 1;
        }
    }
    assert!(asked >= 4, "{asked}");
    Ok(())
}

#[test]
fn blocks_are_shell() -> Result<()> {
    needs!(missing_program(&["bash", "git"]));
    for block in all_blocks("sh")? {
        let output = Command::new("bash").args(["-n", "-c", &block.text]).output()?;
        ensure!(output.status.success(), "{}: {}", block.place, String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}
