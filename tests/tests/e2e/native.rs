//! The native module (`docs/guide/native.md`) in a real Envoy: what the other themes test for the WebAssembly filter,
//! and what only the native module does.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use prequal_testbed::{
    Body, Envoy, EnvoyConfig, FILTER_NAME, Fleet, MinimalRoot, Reply, Request, SHIM_NAME, dist_dir,
    eventually, needs, workspace_root,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{SERVING, assert_all_ok, assert_no_prequal_headers, bed, endpoint, set, warm};

/// The clusters that share the replicas' addresses.
const BOTH: [&str; 2] = [SERVING, "replicas-agent"];

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// The file for the native module equals the filter's, apart from the parts that belong to only one of them.
#[test]
fn the_native_file_differs_from_the_filters_only_in_its_parts() -> Result<()> {
    let remove = |object: &mut Value, key: &str| {
        let removed = object.as_object_mut().and_then(|object| object.remove(key));
        assert!(removed.is_some(), "there is no `{key}`");
    };
    let mut filter = EnvoyConfig::shipped()?.edit(|config| {
        [FILTER_NAME, SHIM_NAME].iter().for_each(|name| config.remove_filter(name));
        remove(&mut config.http_mut()["route_config"], "request_headers_to_remove");
        remove(config.cluster_mut(SERVING), "lb_policy");
    });
    let mut native = EnvoyConfig::native()?.edit(|config| {
        remove(config.root_mut(), "bootstrap_extensions");
        remove(&mut config.router_mut()["typed_config"], "upstream_log");
        let serving = config.cluster_mut(SERVING);
        remove(serving, "load_balancing_policy");
        let options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
        remove(&mut serving["typed_extension_protocol_options"][options], "http_filters");
    });
    assert_eq!(native.root_mut(), filter.root_mut());
    Ok(())
}

#[test]
fn requests_go_where_capacity_is_and_every_count_adds_up() -> Result<()> {
    bed!();
    let fleet = Fleet::start([5, 5, 5, 150].map(|delay| Reply::ok().delay(ms(delay))))?;
    let envoy = Envoy::start(EnvoyConfig::native_for_replicas(&fleet.addrs())?.concurrency(2))?;
    warm(&envoy, 4);
    fleet.clear();
    let answers = envoy.client().burst(400, 8, |_| Request::get("/"));
    assert_all_ok(&answers);
    answers.iter().flatten().for_each(|answer| assert_no_prequal_headers(&answer.headers));
    // A trial or two may reach the slow replica; round robin sends it 100 requests.
    assert!(fleet.served()[3] <= 12, "{:?}", fleet.served());
    let rest = eventually("every request and probe is accounted for", Duration::from_secs(5), || {
        let now = envoy.prequal(SERVING).ok()?;
        (now.requests_open() == 0 && now.probes_open() == 0).then_some(now)
    });
    assert!(rest.probes("used") > 0 && rest.reports("used") >= 400, "{rest:#?}");
    assert_eq!(rest.outcomes("answer"), rest.picks.values().sum::<u64>(), "{rest:#?}");
    fleet.assert_idle();
    Ok(())
}

/// Without the prober there are no probes and no metrics, and the module logs that. The reports on responses suffice to
/// balance.
#[test]
fn without_a_prober_responses_alone_report_load() -> Result<()> {
    bed!();
    let fleet = Fleet::start([5, 5, 5, 150].map(|delay| Reply::ok().delay(ms(delay))))?;
    let config = EnvoyConfig::native_for_replicas(&fleet.addrs())?.edit(|config| {
        _ = config.root_mut().as_object_mut().expect("an object").remove("bootstrap_extensions")
    });
    let envoy = Envoy::start(config)?;
    eventually("the slow replica is left alone", Duration::from_secs(10), || {
        fleet.clear();
        assert_all_ok(&envoy.client().burst(400, 4, |_| Request::get("/")));
        // The fallback compares only requests in flight. It sends the slow replica at least one request in 16, because
        // it draws two of the four replicas, and both draws may give the slow one.
        (fleet.served()[3] <= 4).then_some(())
    });
    assert_eq!(envoy.prequal(SERVING)?.probes("sent"), 0);
    assert!(envoy.log().contains("no bootstrap extension of Prequal"), "{}", envoy.log());
    Ok(())
}

/// If Envoy refuses a probe's callout, it reports the end of the callout before it returns the callout's id.
#[test]
fn probes_that_envoy_refuses_at_once_are_counted_and_cost_nothing() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(2, &Reply::ok())?;
    let shut = json!({"thresholds": [{"max_connections": 0, "max_pending_requests": 0, "max_requests": 0}]});
    let full = EnvoyConfig::native_for_replicas(&fleet.addrs())?
        .edit(|config| config.cluster_mut(BOTH[1])["circuit_breakers"] = shut);
    let empty = EnvoyConfig::native_for_replicas(&fleet.addrs())?.endpoints(BOTH[1], &[]);
    let absent = set(EnvoyConfig::native_for_replicas(&fleet.addrs())?, "probe_cluster", "no-such-cluster");
    for (what, config) in [("full", full), ("empty", empty), ("absent", absent)] {
        let envoy = Envoy::start(config)?;
        let refused = eventually("a probe is refused", Duration::from_secs(10), || {
            assert_all_ok(&envoy.client().burst(50, 4, |_| Request::get("/")));
            let now = envoy.prequal(SERVING).ok()?;
            (now.probes("undispatched") > 0).then_some(now)
        });
        assert_eq!((refused.probes("used"), refused.probes("sent")), (0, 0), "{what}: {refused:#?}");
        assert!(refused.reports("used") > 0, "{what}: responses still report load");
        assert!(!envoy.log().contains("panic"), "{what}: {}", envoy.log());
    }
    Ok(())
}

/// The module chooses a host for each attempt, and counts the failure of each attempt.
#[test]
fn a_dead_agent_costs_retries_and_no_request() -> Result<()> {
    bed!();
    // The replica that will die is the fastest, so it is preferred.
    let mut fleet = Fleet::start([1, 10, 10, 10].map(|delay| Reply::ok().delay(ms(delay))))?;
    let envoy = Envoy::start(EnvoyConfig::native_for_replicas(&fleet.addrs())?)?;
    warm(&envoy, 4);
    eventually("the fastest is preferred", Duration::from_secs(5), || {
        fleet.clear();
        assert_all_ok(&envoy.client().burst(40, 2, |_| Request::get("/")));
        (fleet.served()[0] > 20).then_some(())
    });
    fleet[0].agent.kill();
    fleet.clear();
    assert_all_ok(&envoy.client().burst(400, 8, |_| Request::get("/")));
    assert_eq!(fleet.served()[0], 0);
    let retried = envoy.stat("cluster.replicas.upstream_rq_retry")?;
    let after = envoy.prequal(SERVING)?;
    assert!(retried > 0, "the dead replica was never chosen: nothing was tested");
    assert!(retried <= 40, "it was chosen again and again: {retried} retries");
    assert_eq!(
        after.outcomes("upstream_failure"),
        retried,
        "each failed attempt is the replica's: {after:#?}"
    );
    Ok(())
}

#[test]
fn the_end_of_an_attempt_is_blamed_on_the_right_party() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(2, &Reply::ok())?;
    let config = EnvoyConfig::native_for_replicas(&fleet.addrs())?;
    let envoy = Envoy::start(set(config, "idle_probe_interval_ms", 0))?;
    warm(&envoy, 2);
    let counted = |answers: u64, failures: u64, aborts: u64| {
        let before = envoy.prequal(SERVING).expect("stats");
        move |envoy: &Envoy| {
            eventually("the outcomes are counted", Duration::from_secs(5), || {
                let now = envoy.prequal(SERVING).ok()?;
                let more = ["answer", "upstream_failure", "client_abort"]
                    .map(|class| now.outcomes(class) - before.outcomes(class));
                (more == [answers, failures, aborts]).then_some(())
            });
        }
    };
    let wait = counted(0, 10, 0);
    fleet.iter().for_each(|replica| replica.backend.set(Reply::status(500)));
    envoy.client().burst(10, 2, |_| Request::get("/"));
    wait(&envoy);
    let wait = counted(0, 0, 3);
    fleet.iter().for_each(|replica| replica.backend.set(Reply::ok().delay(ms(2000))));
    (0..3).for_each(|_| _ = envoy.client().abandon(Request::get("/"), ms(100)));
    wait(&envoy);
    // A reset in the middle of a body.
    let wait = counted(0, 2, 0);
    fleet.iter().for_each(|replica| replica.backend.set(Reply::ok().body(Body::Broken("cut".into()))));
    envoy.client().burst(2, 1, |_| Request::get("/"));
    wait(&envoy);
    Ok(())
}

#[test]
fn endpoints_come_and_go_through_eds() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(3, &Reply::ok().delay(ms(2)))?;
    let all = fleet.addrs();
    let config = EnvoyConfig::native_for_replicas(&all[..2])?.eds(&BOTH).concurrency(2);
    let mut envoy = Envoy::start(config)?;
    warm(&envoy, 2);
    assert_eq!(fleet.served()[2], 0);
    BOTH.iter().try_for_each(|cluster| envoy.set_endpoints(cluster, &all))?;
    warm(&envoy, 3);
    eventually("the newcomer is served", Duration::from_secs(10), || {
        assert_all_ok(&envoy.client().burst(20, 4, |_| Request::get("/")));
        (fleet.served()[2] >= 10).then_some(())
    });
    BOTH.iter().try_for_each(|cluster| envoy.set_endpoints(cluster, &all[1..]))?;
    // Workers learn of the change a moment after the main thread.
    eventually("the one that left is not served", Duration::from_secs(5), || {
        fleet.clear();
        assert_all_ok(&envoy.client().burst(100, 4, |_| Request::get("/")));
        (fleet.served()[0] == 0 && envoy.prequal(SERVING).ok()?.other("prequal_members") == 2).then_some(())
    });
    // No host at all: an error, not a crash; and the fleet comes back.
    BOTH.iter().try_for_each(|cluster| envoy.set_endpoints(cluster, &[]))?;
    eventually("there is no host", Duration::from_secs(5), || {
        (envoy.client().get("/").ok()?.status == 503).then_some(())
    });
    BOTH.iter().try_for_each(|cluster| envoy.set_endpoints(cluster, &all))?;
    eventually("the fleet is back", Duration::from_secs(5), || {
        let answers = envoy.client().burst(20, 4, |_| Request::get("/"));
        answers.iter().all(|answer| answer.as_ref().is_ok_and(|answer| answer.status == 200)).then_some(())
    });
    Ok(())
}

/// Priorities, weights and health come from Envoy's own host sets.
#[test]
fn priorities_weights_and_health_are_envoys() -> Result<()> {
    bed!();
    // Long compared with the delays of a busy machine. Otherwise a second request seems to wait, and weights count less.
    let fleet = Fleet::uniform(4, &Reply::ok().delay(ms(20)))?;
    let all = fleet.addrs();
    let host = |index: usize, weight: u32, health: &str| endpoint(all[index], weight, health);
    let levels = |health: &str| {
        json!([
            {"priority": 0, "lb_endpoints": [host(0, 3, health), host(1, 1, health)]},
            {"priority": 1, "lb_endpoints": [host(2, 1, "HEALTHY"), host(3, 1, "HEALTHY")]},
        ])
    };
    let mut envoy = Envoy::start(EnvoyConfig::native_for_replicas(&all)?.eds(&BOTH))?;
    let apply = |envoy: &mut Envoy, levels: &Value| {
        BOTH.iter().try_for_each(|cluster| envoy.set_localities(cluster, levels))
    };
    apply(&mut envoy, &levels("HEALTHY"))?;
    eventually("only the first priority is used", Duration::from_secs(5), || {
        fleet.clear();
        assert_all_ok(&envoy.client().burst(100, 2, |_| Request::get("/")));
        (fleet.served()[2..] == [0, 0]).then_some(())
    });
    eventually("three quarters go to the first host", Duration::from_secs(30), || {
        fleet.clear();
        assert_all_ok(&envoy.client().burst(400, 2, |_| Request::get("/")));
        (270..=330).contains(&fleet.served()[0]).then_some(())
    });
    // One of two is unhealthy: the first priority keeps 70 % (1.4 times 50).
    let half = json!([
        {"priority": 0, "lb_endpoints": [host(0, 1, "HEALTHY"), host(1, 1, "UNHEALTHY")]},
        {"priority": 1, "lb_endpoints": [host(2, 1, "HEALTHY"), host(3, 1, "HEALTHY")]},
    ]);
    apply(&mut envoy, &half)?;
    eventually("70 % and 30 % go to the two priorities", Duration::from_secs(10), || {
        fleet.clear();
        assert_all_ok(&envoy.client().burst(400, 2, |_| Request::get("/")));
        let served = fleet.served();
        (served[1] == 0 && (250..=310).contains(&served[0])).then_some(())
    });
    apply(&mut envoy, &levels("UNHEALTHY"))?;
    eventually("the second priority takes over", Duration::from_secs(5), || {
        fleet.clear();
        assert_all_ok(&envoy.client().burst(100, 2, |_| Request::get("/")));
        (fleet.served()[..2] == [0, 0]).then_some(())
    });
    Ok(())
}

#[test]
fn unsupported_settings_are_refused_with_their_field() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(1, &Reply::ok())?;
    let shipped = || EnvoyConfig::native_for_replicas(&fleet.addrs());
    for (config, problem) in [
        (set(shipped()?, "mode", "sync"), "clusters[0].mode"),
        (set(shipped()?, "q_rif", 2), "clusters[0].q_rif"),
        (set(shipped()?, "probe_cluster", SERVING), "clusters[0].probe_cluster"),
        (shipped()?.filter_text("{}"), "`clusters` is missing"),
        (shipped()?.filter_text("{\"role\": \"inbound\"}"), "`role` must be \"outbound\""),
    ] {
        let refused = Envoy::start(config).err().map(|error| format!("{error:#}")).unwrap_or_default();
        assert!(refused.contains(problem), "{problem}: {refused}");
    }
    Ok(())
}

/// A panic is logged and costs one request; Envoy and all other requests go on.
#[test]
fn a_panic_does_not_end_envoy() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(2, &Reply::ok())?;
    let config = EnvoyConfig::native_for_replicas(&fleet.addrs())?.native_module(&crashing_module());
    let envoy = Envoy::start(config)?;
    warm(&envoy, 2);
    for _ in 0..3 {
        assert_eq!(envoy.client().send(Request::get("/").header("x-crash-prequal", "1"))?.status, 503);
        assert_all_ok(&envoy.client().burst(20, 2, |_| Request::get("/")));
    }
    assert!(envoy.log().contains("a panic was caught"), "{}", envoy.log());
    Ok(())
}

/// Envoy's distroless image has glibc, but no `libgcc_s`, which Rust's libraries normally need to unwind.
#[test]
fn the_module_needs_only_glibc() -> Result<()> {
    bed!();
    let folder = TempDir::new()?;
    // A module that does need `libgcc_s`, to show that the library is not there.
    let needy = folder.path().join("libneedy.so");
    let flags = ["-shared", "-xc", "/dev/null", "-Wl,--no-as-needed", "-l:libgcc_s.so.1", "-o"];
    ensure!(Command::new("cc").args(flags).arg(&needy).status()?.success(), "cc built no module");
    let (shipped, crashing) = (dist_dir().join("libprequal_native.so"), crashing_module());
    let root = MinimalRoot::new(&[&shipped, &crashing, &needy])?;
    needs!(root.missing());
    let files = root.files()?;
    let named = |part: &str| files.iter().any(|file| file.to_string_lossy().contains(part));
    assert!(named("libc.so.6") && !named("libgcc"), "{files:?}");

    let fleet = Fleet::uniform(2, &Reply::ok())?;
    let start = |module: &Path| {
        let config = EnvoyConfig::native_for_replicas(&fleet.addrs())?;
        Envoy::start(config.native_module(module).inside(root.path()))
    };
    let envoy = start(&shipped)?;
    warm(&envoy, 2);
    assert_all_ok(&envoy.client().burst(20, 2, |_| Request::get("/")));
    drop(envoy);
    // The unwinder in the module works too.
    let envoy = start(&crashing)?;
    assert_eq!(envoy.client().send(Request::get("/").header("x-crash-prequal", "1"))?.status, 503);
    assert_all_ok(&envoy.client().burst(20, 2, |_| Request::get("/")));
    assert!(envoy.log().contains("a panic was caught"), "{}", envoy.log());
    drop(envoy);
    let error = start(&needy).expect_err("a module that lacks its library").to_string();
    assert!(error.contains("libgcc_s.so.1: cannot open shared object file"), "{error}");
    Ok(())
}

fn crashing_module() -> PathBuf {
    workspace_root().join("target/dist-test/libprequal_native_crash.so")
}
