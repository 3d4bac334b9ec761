//! Tests of the command against a real Envoy: the rendered configuration runs and steers, `prequal top` shows what
//! happens, and `prequal check` reads files as Envoy does.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use prequal_testbed::{
    Agent, AgentOptions, Backend, Client, Envoy, EnvoyConfig, Fleet, Reply, Request, bed, dist_dir,
    envoy_binary, eventually, wasm_module,
};
use serde_json::{Value, json};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Runs `prequal`.
fn prequal(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_prequal")).args(args).output().expect("the built command")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns the output of `prequal`; fails unless it succeeded.
#[track_caller]
fn printed(args: &[&str]) -> String {
    let output = prequal(args);
    assert!(output.status.success(), "{args:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Returns a rendered configuration with ports chosen by the system.
fn rendered(args: &[&str]) -> String {
    let module = wasm_module();
    let module = module.to_str().expect("a plain path");
    on_free_ports(&[&["--wasm", module], args].concat())
}

fn on_free_ports(args: &[&str]) -> String {
    printed(&[&["config", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"], args].concat())
}

fn native_module() -> PathBuf {
    dist_dir().join("libprequal_native.so")
}

/// Sends requests until Envoy's filter knows `members` replicas of `cluster` and steers.
#[track_caller]
fn warm(envoy: &Envoy, cluster: &str, path: &'static str, members: u64) {
    let client = envoy.client();
    eventually(&format!("{members} members of {cluster} are learned"), Duration::from_secs(20), || {
        client.burst(10, 2, move |_| Request::get(path));
        let now = envoy.prequal(cluster).ok()?;
        (now.other("prequal_members") >= members && now.steered() > 0).then_some(())
    });
}

fn in_scratch(dir: &Path, name: &str, text: &str) -> String {
    let path = dir.join(name);
    fs::write(&path, text).expect("a scratch file");
    path.to_str().expect("a plain path").to_owned()
}

fn envoy_accepts(path: &str) -> (bool, String) {
    let output = Command::new(envoy_binary())
        .args(["--mode", "validate", "--disable-hot-restart", "--log-level", "error", "-c", path])
        .env("ENVOY_DYNAMIC_MODULES_SEARCH_PATH", dist_dir())
        .output()
        .expect("Envoy starts");
    (output.status.success(), text(&output.stderr) + &text(&output.stdout))
}

#[test]
fn a_rendered_configuration_runs_steers_and_has_no_findings() -> Result {
    bed!(&[native_module()]);
    let fleet = Fleet::start([5, 5, 5, 150].map(|ms| Reply::ok().delay(Duration::from_millis(ms))))?;
    let hosts: Vec<String> = fleet.addrs().iter().map(ToString::to_string).collect();
    let cluster = format!("svc={}", hosts.join(","));
    for (kind, config) in [
        ("stateful_session", rendered(&["--cluster", &cluster])),
        ("override_host", rendered(&["--cluster", &cluster, "--shim", "override_host"])),
        ("native", on_free_ports(&["--cluster", &cluster, "--native"])),
    ] {
        let envoy = Envoy::start(EnvoyConfig::read(&config)?)?;
        warm(&envoy, "svc", "/", 4);
        fleet.clear();
        for answer in envoy.client().burst(400, 6, |_| Request::get("/")) {
            assert_eq!(answer?.status, 200);
        }
        // An equal share would be 100.
        let served = fleet.served();
        assert!(served.iter().sum::<u64>() == 400 && served[3] <= 12, "{kind}: {served:?}");
        assert_eq!(envoy.client().get("/prequal/probe")?.status, 404);

        let dir = tempfile::tempdir()?;
        let dump = in_scratch(dir.path(), "dump.json", &envoy.admin_get("/config_dump?include_eds")?);
        let found: Value = serde_json::from_str(&printed(&["check", "--dump", "--json", &dump]))?;
        assert_eq!(found, json!({"errors": 0, "findings": []}), "{kind}");
    }
    Ok(())
}

#[test]
fn probes_on_a_port_of_their_own_work_as_rendered() -> Result {
    bed!();
    let backend = Backend::start(Reply::ok())?;
    let start = |ip: &str, probe_port: u16| {
        let options = AgentOptions {
            listen: format!("{ip}:0"),
            probe_listen: Some(format!("{ip}:{probe_port}")),
            ..AgentOptions::default()
        };
        Agent::start_with(backend.addr(), &options)
    };
    // A port that the system assigned on one address need not be free on the other.
    let (first, second) = eventually("the same port on two addresses", Duration::from_secs(20), || {
        let first = start("127.0.0.2", 0).ok()?;
        let second = start("127.0.0.3", first.probe_addr().port()).ok()?;
        Some((first, second))
    });
    let port = first.probe_addr().port().to_string();
    let hosts = format!("svc={},{}", first.addr(), second.addr());
    let envoy = Envoy::start(EnvoyConfig::read(&rendered(&["--cluster", &hosts, "--probe-port", &port]))?)?;
    warm(&envoy, "svc", "/", 2);
    let now = envoy.prequal("svc")?;
    assert!(now.probes("used") > 0 && now.probes_rejected() == 0, "{now:#?}");
    Ok(())
}

#[test]
fn envoy_accepts_every_variant() -> Result {
    bed!(&[native_module()]);
    let dir = tempfile::tempdir()?;
    let pair = rcgen::generate_simple_self_signed(vec!["localhost".into()])?;
    let cert = in_scratch(dir.path(), "cert.pem", &pair.cert.pem());
    let key = in_scratch(dir.path(), "key.pem", &pair.signing_key.serialize_pem());
    let spec = in_scratch(
        dir.path(),
        "spec.yaml",
        "settings: {profile: small}\n\
         clusters:\n\
         - {name: web, hosts: ['10.0.0.1:80', '[fd00::1]:80']}\n\
         - {name: api, hosts: ['localhost:80'], prefix: /api, probe_port: 90, settings: {rule: c3}}\n\
         - {name: old, hosts: ['10.0.0.9:80'], prefix: /old, settings: {rule: peak_ewma}}\n",
    );
    let hosts = "a=10.0.0.1:80,10.0.0.2:80";
    let variants: [&[&str]; 6] = [
        &["--cluster", hosts],
        &["--cluster", hosts, "--shim", "override_host"],
        &["--cluster", hosts, "--profile", "inference", "--hint", "header:x-chat"],
        &["--cluster", "a=localhost:80", "--probe-port", "90"],
        &["--cluster", hosts, "--tls-cert", &cert, "--tls-key", &key],
        &[&spec],
    ];
    let native: [&[&str]; 2] = [
        &["--native", "--cluster", hosts, "--profile", "small"],
        &[
            "--native",
            "--detour",
            "--cluster",
            "a=localhost:80",
            "--probe-port",
            "90",
            "--tls-cert",
            &cert,
            "--tls-key",
            &key,
        ],
    ];
    let filters = variants.map(|args| (args, rendered(args)));
    for (args, text) in filters.into_iter().chain(native.map(|args| (args, on_free_ports(args)))) {
        let path = in_scratch(dir.path(), "envoy.yaml", &text);
        let (accepted, why) = envoy_accepts(&path);
        assert!(accepted, "{args:?}: {why}");
        printed(&["check", &path]);
    }
    Ok(())
}

#[test]
fn the_native_module_refuses_the_settings_that_the_check_reports() -> Result {
    bed!(&[native_module()]);
    let dir = tempfile::tempdir()?;
    let text = on_free_ports(&["--native", "--cluster", "a=10.0.0.1:80"]);
    let verified = "\"verified_probes\": true";
    assert_eq!(text.matches(verified).count(), 1, "{text}");
    for setting in ["\"mode\": \"sync\"", "\"route_modes\": {\"slow\": \"sync\"}", "\"max_age_ms\": 7"] {
        let path = in_scratch(dir.path(), "envoy.yaml", &text.replace(verified, setting));
        let (accepted, why) = envoy_accepts(&path);
        assert!(!accepted && why.contains("prequal: configuration refused"), "{setting}: {why}");
        let output = prequal(&["check", "--json", &path]);
        let found: Value = serde_json::from_slice(&output.stdout)?;
        let codes: Vec<&Value> =
            found["findings"].as_array().ok_or("a list")?.iter().map(|f| &f["code"]).collect();
        assert!(codes.contains(&&json!("settings")), "{setting}: {found}");
    }
    Ok(())
}

#[test]
fn envoy_reads_yaml_as_the_check_does() -> Result {
    bed!();
    let dir = tempfile::tempdir()?;
    for (yaml, accepted) in [
        ("!ignore x: &a {connect_timeout: 1s}\nstatic_resources: {clusters: [{name: a}]}", true),
        ("static_resources: {clusters: [{<<: {connect_timeout: 1s}, name: a}]}", false),
        ("node: {nonsense: 1}\nnode: {id: a}", true),
        ("node: {id: a}\nnode: {nonsense: 1}", false),
        ("node: {id: a}\n---\nnode: {nonsense: 1}", true),
        ("staticResources: {clusters: [{name: a, connectTimeout: 1s}]}", true),
    ] {
        let (is, why) = envoy_accepts(&in_scratch(dir.path(), "envoy.yaml", yaml));
        assert_eq!(is, accepted, "{yaml}: {why}");
    }
    Ok(())
}

#[test]
fn a_route_that_removes_the_report_loses_it() -> Result {
    bed!();
    let fleet = Fleet::uniform(2, &Reply::ok())?;
    let config = EnvoyConfig::for_replicas(&fleet.addrs())?;
    let used = |config: EnvoyConfig| -> Result<u64> {
        let envoy = Envoy::start(config)?;
        warm(&envoy, "replicas", "/", 2);
        envoy.client().burst(100, 2, |_| Request::get("/"));
        Ok(envoy.prequal("replicas")?.reports("used"))
    };
    assert!(used(config.clone())? > 50);
    let removing = config.edit(|config| {
        config.http_mut()["route_config"]["response_headers_to_remove"] = json!(["x-prequal-load"]);
    });
    assert_eq!(used(removing)?, 0);
    Ok(())
}

/// Keeps `path` of an Envoy busy until dropped.
struct Traffic(Arc<AtomicBool>, Option<std::thread::JoinHandle<()>>);

impl Traffic {
    fn start(client: Client, path: &'static str) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                client.burst(20, 2, move |_| Request::get(path));
            }
        });
        Self(stop, Some(thread))
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        if let Some(thread) = self.1.take() {
            let _ = thread.join();
        }
    }
}

#[test]
fn top_shows_what_happens() -> Result {
    bed!();
    let (first, second) = (Fleet::uniform(3, &Reply::ok())?, Fleet::uniform(2, &Reply::ok())?);
    // Dots in the name of a cluster become underscores in the filter's statistics, but remain in /clusters.
    let config = EnvoyConfig::for_replicas(&first.addrs())?
        .add_cluster("my.other", "/other", &second.addrs())
        .filter_settings(|settings| {
            let clusters = settings["clusters"].as_array_mut().expect("a list");
            clusters.push(
                json!({"cluster": "my.other", "probe_cluster": "my.other-agent", "verified_probes": true}),
            );
        });
    let envoy = Envoy::start(config)?;
    warm(&envoy, "replicas", "/", 3);
    warm(&envoy, "my_other", "/other", 2);
    let traffic = Traffic::start(envoy.client(), "/");
    let admin = envoy.admin().to_string();
    let agent = first[0].agent.admin().to_string();
    // The filter publishes its counts every 250 ms, or less often on a busy machine. The interval must be much longer.
    let shown = printed(&["top", "--once", "--interval", "3", "--agent", &agent, &admin]);
    drop(traffic);

    let blocks: Vec<&str> = shown.split("\n\n").filter(|block| !block.trim().is_empty()).collect();
    let [other, busy, agents] = blocks[..] else { panic!("{shown}") };
    let of_agent: Vec<&str> = agents.lines().last().unwrap_or_default().split_whitespace().collect();
    let [url, _rif, base_ms, knee, failing] = of_agent[..] else { panic!("{shown}") };
    assert_eq!((url, failing), (&*format!("http://{agent}"), "0.0%"), "{shown}");
    // A plus means that the knee may be higher.
    for number in [base_ms, knee.trim_end_matches('+')] {
        assert!(number.parse::<f64>().is_ok_and(|number| number > 0.0), "{shown}");
    }
    assert!(busy.starts_with(&format!("http://{admin} replicas\n")), "{shown}");
    assert!(other.starts_with(&format!("http://{admin} my_other\n")), "{shown}");
    let number = |block: &str, line: &str, after: &str| -> f64 {
        let line = block.lines().find(|found| found.trim_start().starts_with(line)).expect(line);
        let rest = &line[line.find(after).expect(after) + after.len()..];
        let digits: String =
            rest.trim_start().chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
        digits.trim_end_matches('.').parse().unwrap_or_else(|_| panic!("{after} in {line}"))
    };
    let picks = number(busy, "picks/s", "picks/s");
    assert!(picks > 20.0, "{shown}");
    assert_eq!(number(other, "picks/s", "picks/s"), 0.0, "{shown}");
    let branches: f64 = ["cold", "hot", "sync", "scored", "trial", "agentless", "fallback"]
        .map(|branch| number(busy, "picks/s", branch))
        .iter()
        .sum();
    assert!((branches - picks).abs() < 0.5, "{shown}");
    assert!(number(busy, "probes/s", "used") > 0.0, "{shown}");
    assert_eq!((number(busy, "now", "members"), number(other, "now", "members")), (3.0, 2.0), "{shown}");
    // Each replica has its share, and the requests served by replicas match those that the filter placed.
    for (block, fleet) in [(busy, &first), (other, &second)] {
        for addr in fleet.addrs() {
            assert!(block.contains(&format!("  {addr} ")), "{addr} is not in {shown}");
        }
    }
    let rows: Vec<Vec<&str>> = busy
        .lines()
        .filter(|line| line.contains('%'))
        .map(|line| line.split_whitespace().collect())
        .collect();
    let sum = |column: usize| -> f64 {
        rows.iter().map(|row| row[column].trim_end_matches('%').parse::<f64>().expect("a number")).sum()
    };
    assert!((sum(4) - 100.0).abs() < 1.0, "{shown}");
    assert!((sum(2) - picks).abs() < 0.3 * picks, "{shown}");
    Ok(())
}

#[test]
fn top_reports_unreadable_admins() -> Result {
    let closed = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
    let output = prequal(&["top", "--once", "--interval", "0.1", &closed]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains(&format!("http://{closed} cannot be reached")), "{output:?}");

    for bad in
        [&["top", "--once", "https://x:1"][..], &["top", "--once", "--interval", "0", "x:1"], &["top", "x:1"]]
    {
        assert_eq!(prequal(bad).status.code(), Some(2), "{bad:?}");
    }
    bed!();
    for reply in [Reply::ok(), Reply::status(404)] {
        let other = Backend::start(reply)?;
        let output = prequal(&["top", "--once", "--interval", "0.1", &other.addr().to_string()]);
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).contains("this is not Envoy's admin"), "{output:?}");
    }
    for (config, why) in [
        (
            EnvoyConfig::shipped()?.without_prequal(),
            "neither Prequal's filter nor its native module is active",
        ),
        (EnvoyConfig::inbound("127.0.0.1:1".parse()?)?, "the inbound role"),
    ] {
        let envoy = Envoy::start(config)?;
        let output = prequal(&["top", "--once", "--interval", "0.1", &envoy.admin().to_string()]);
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).contains(why), "{output:?}");
    }
    Ok(())
}

#[test]
fn exit_codes_of_the_check() -> Result {
    let dir = tempfile::tempdir()?;
    let large = in_scratch(dir.path(), "large.yaml", &"a: 1\n".repeat(13 << 20));
    for (path, code, part) in [
        (in_scratch(dir.path(), "empty.yaml", ""), 2, "it is empty"),
        (in_scratch(dir.path(), "other.yaml", "a: b"), 2, "neither a bootstrap"),
        (in_scratch(dir.path(), "broken.yaml", "a: ["), 2, "at line 2 column 1"),
        (dir.path().join("absent").to_str().ok_or("plain")?.to_owned(), 2, "No such file"),
        (large, 2, "more than 32 MiB"),
        (in_scratch(dir.path(), "none.yaml", "admin: {}"), 1, "filter-missing"),
    ] {
        let output = prequal(&["check", &path]);
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        assert!((text(&output.stdout) + &text(&output.stderr)).contains(part), "{output:?}");
    }
    fs::write(dir.path().join("bytes"), [0xff, 0xfe, 0])?;
    assert_eq!(prequal(&["check", dir.path().join("bytes").to_str().ok_or("plain")?]).status.code(), Some(2));
    Ok(())
}
