//! Mixed versions: other agents, a module whose blobs have another version (the crash module), hot restart and
//! roll-back. `docs/guide/upgrade.md` describes the consequences.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Result;
use prequal_testbed::{
    Agent, Backend, Client, Envoy, EnvoyConfig, Fleet, PARENT_SHUTDOWN_S, Prequal, Replica, Reply, Request,
    Response, crash_module as other_release, eventually, wasm_module,
};

use crate::support::{
    PROBE_PATH, SERVING, addrs, assert_all_ok, assert_probes_balance, bed, counted, report, set, stand_ins,
    warm, with_load,
};

const MS: Duration = Duration::from_millis(1);

#[test]
fn fields_of_a_newer_agent_are_ignored() -> Result<()> {
    bed!();
    let newer = |addr| with_load(format!("{};zzz=1;fail=0;note;up=700;weight=3.5", report(1, 900, addr)));
    let backends = stand_ins(3, newer, newer)?;
    let envoy = Envoy::start(patient(EnvoyConfig::for_replicas(&addrs(&backends))?))?;
    warm(&envoy, 3);
    assert_all_are_used(&envoy);
    Ok(())
}

/// Agents of the first release, which report three fields or the pair of headers, beside one of this release.
#[test]
fn agents_of_three_versions_share_a_fleet() -> Result<()> {
    bed!();
    let oldest = |addr| with_load(report(0, 5000, addr)).delay(5 * MS);
    let pair =
        |_| Reply::ok().header("x-prequal-rif", "0").header("x-prequal-latency-us", "5000").delay(5 * MS);
    let (with_fields, with_pair) = (stand_ins(1, oldest, oldest)?, stand_ins(1, pair, pair)?);
    let behind = Backend::start(Reply::ok().delay(5 * MS))?;
    let agent = Agent::start(behind.addr())?;
    let replicas = [with_fields[0].addr(), with_pair[0].addr(), agent.addr()];
    let envoy = Envoy::start(patient(EnvoyConfig::for_replicas(&replicas)?))?;
    warm(&envoy, 3);
    assert_all_ok(&envoy.client().burst(600, 6, |_| Request::get("/")));
    let rest = assert_all_are_used(&envoy);
    // The shares are not checked: the stand-ins' load never changes, whatever they serve.
    assert_eq!((rest.other("prequal_members"), rest.other("prequal_pool_occupancy")), (3, 3), "{rest:#?}");
    assert!(behind.seen().iter().any(|seen| seen.path == "/") && rest.picks("fallback") < 100, "{rest:#?}");
    Ok(())
}

/// Sends no probes at rest, and lets none time out, however busy the machine.
fn patient(config: EnvoyConfig) -> EnvoyConfig {
    set(set(config, "idle_probe_interval_ms", 0), "probe_timeout_ms", 5000)
}

/// Asserts that every probe was answered with a report that was used, and that every response's report was used too.
#[track_caller]
fn assert_all_are_used(envoy: &Envoy) -> Prequal {
    let rest = assert_probes_balance(envoy);
    assert!(rest.probes("used") > 0 && rest.reports("used") > 0, "{rest:#?}");
    assert_eq!(rest.probes("used"), rest.probes("sent"), "{rest:#?}");
    assert_eq!(rest.reports("used"), rest.reports.values().sum::<u64>(), "{rest:#?}");
    rest
}

/// Checks that the fields that the first release's filter reads are still there, in the same position.
#[test]
fn an_older_filter_reads_this_agent() -> Result<()> {
    bed!();
    let backend = Backend::start(Reply::ok())?;
    let agent = Agent::start(backend.addr())?;
    let client = Client::new(agent.addr());
    for path in ["/", PROBE_PATH] {
        let reply = client.get(path)?;
        let load = reply.header("x-prequal-load").expect("a report").to_owned();
        let mut fields = load.split(';');
        let mut next = || fields.next().unwrap_or_default().to_owned();
        let (rif, latency_us, endpoint) = (next(), next(), next());
        assert_eq!(rif, "0", "{load}");
        assert!(latency_us.is_empty() || latency_us.parse::<u32>().is_ok(), "{load}");
        assert_eq!(endpoint, agent.addr().to_string(), "{load}");
        assert!(fields.all(|field| field.contains('=')), "what came later has a name: {load}");
    }
    let pair = client.get(PROBE_PATH)?;
    assert_eq!(pair.header("x-prequal-rif"), Some("0"));
    assert!(pair.header("x-prequal-latency-us").is_some_and(|latency| latency.parse::<u32>().is_ok()));
    Ok(())
}

#[test]
fn an_update_to_another_blob_version_and_back_loses_no_request() -> Result<()> {
    bed!(&[other_release()]);
    let fleet = Fleet::uniform(4, &Reply::ok().delay(5 * MS))?;
    // Without idle probes, only requests fill a pool.
    let config =
        set(EnvoyConfig::for_replicas(&fleet.addrs())?.dynamic_listener(), "idle_probe_interval_ms", 0);
    let mut envoy = Envoy::start(config.clone())?;
    warm(&envoy, 4);
    let load = Load::start(&envoy);
    let mut by_policy = Vec::new();
    for module in [other_release(), wasm_module()] {
        let before = envoy.prequal(SERVING)?;
        assert!(envoy.update_listener(config.clone().module(&module))?, "{}", envoy.log());
        // The old generation drains for two seconds.
        wait_for_one_generation(&envoy)?;
        let alone = envoy.prequal(SERVING)?;
        by_policy.push(alone.picks("fallback") - before.picks("fallback"));
        let after = counted(&envoy, "it steers alone", |now| now.steered() > alone.steered() + 500);
        assert_eq!(after.picks("fallback"), alone.picks("fallback"), "{after:#?}");
        assert_eq!(after.other("prequal_blob_replaced_total"), 0, "each has blobs of its own: {after:#?}");
    }
    // Each generation began with an empty pool, or with one whose reports were old.
    assert!(by_policy[0] > 0 && by_policy.iter().all(|requests| *requests <= 40), "{by_policy:?}");
    load.stop();
    fleet.assert_idle();
    Ok(())
}

/// Waits until no old listener is draining.
fn wait_for_one_generation(envoy: &Envoy) -> Result<()> {
    let start = Instant::now();
    let draining = |what: &str| envoy.stat(&format!("listener_manager.total_{what}_draining"));
    while draining("listeners")? + draining("filter_chains")? > 0 {
        assert!(start.elapsed() < Duration::from_secs(10), "the old listener still drains");
        std::thread::sleep(10 * MS);
    }
    Ok(())
}

#[test]
fn a_hot_restart_to_another_version_and_back_loses_no_request() -> Result<()> {
    bed!(&[other_release()]);
    let fleet = Fleet::uniform(4, &Reply::ok().delay(5 * MS))?;
    let config = EnvoyConfig::for_replicas(&fleet.addrs())?;
    let mut envoys = vec![Envoy::start_restartable(config.clone())?];
    warm(&envoys[0], 4);
    let load = Load::start(&envoys[0]);
    for module in [other_release(), wasm_module()] {
        let old = envoys.last().expect("one runs");
        let before = old.prequal(SERVING)?;
        // One request is in flight at the take-over. The old process answers it.
        let addr = old.addr();
        fleet.iter().for_each(|replica| {
            replica.backend.set_handler(|seen| {
                let delay = if seen.path == "/long" { 1500 * MS } else { 5 * MS };
                Reply::ok().delay(delay)
            });
        });
        let long = send_long(&fleet, old);
        let new = old.hot_restart(config.clone().module(&module))?;
        assert_eq!(new.addr(), addr, "the same listener");

        assert_eq!(long.join().expect("it ran")?.status, 200);
        // The old process accepts no new connections on its admin interface either; this connection was opened earlier.
        let drained = old.prequal(SERVING)?;
        assert_eq!(drained.picks("fallback"), before.picks("fallback"), "it keeps its pool: {drained:#?}");

        // Nothing is inherited: Envoy makes the first choices, then the pool is filled.
        let now =
            counted(&new, "the pool refills", |now| now.other("prequal_members") == 4 && now.steered() > 500);
        assert!(now.picks("fallback") > 0, "a pool of its own, empty at first: {now:#?}");
        assert_eq!(now.other("prequal_blob_replaced_total"), 0, "no blob of the old process: {now:#?}");
        let old = envoys.last_mut().expect("one runs");
        old.wait_for_end(Duration::from_secs(PARENT_SHUTDOWN_S + 6))?;
        let alone = new.prequal(SERVING)?;
        let after = counted(&new, "it steers alone", |now| now.steered() > alone.steered() + 300);
        assert_eq!(after.picks("fallback"), alone.picks("fallback"), "{after:#?}");
        envoys.push(new);
    }
    load.stop();
    fleet.assert_idle();
    Ok(())
}

/// A request that outlives the old process is cut off, and its agent decrements RIF.
#[test]
fn a_hot_restart_cuts_off_requests_that_outlive_the_old_process() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(2, &Reply::ok())?;
    let config = EnvoyConfig::for_replicas(&fleet.addrs())?;
    let mut old = Envoy::start_restartable(config.clone())?;
    warm(&old, 2);
    for replica in fleet.iter() {
        let longer = Duration::from_secs(PARENT_SHUTDOWN_S + 20);
        replica
            .backend
            .set_handler(move |seen| Reply::ok().delay(if seen.path == "/long" { longer } else { MS }));
    }
    let long = send_long(&fleet, &old);
    let new = old.hot_restart(config)?;
    // The new process's probes see the load that the old one's requests put on the replica.
    let probe = |addr| Ok(Client::new(addr).get(PROBE_PATH)?.header("x-prequal-rif").map(str::to_owned));
    let rifs = fleet.addrs().into_iter().map(probe).collect::<Result<Vec<_>>>()?;
    assert_eq!(rifs.iter().flatten().filter(|rif| *rif == "1").count(), 1, "{rifs:?}");
    old.wait_for_end(Duration::from_secs(PARENT_SHUTDOWN_S + 6))?;
    let cut = long.join().expect("it ran");
    assert!(!matches!(&cut, Ok(reply) if reply.status == 200), "{cut:?}");
    fleet.assert_idle();
    assert_all_ok(&new.client().burst(50, 2, |_| Request::get("/")));
    Ok(())
}

/// Sends a request to `/long`, and waits until a backend has received it.
#[track_caller]
fn send_long(fleet: &Fleet, envoy: &Envoy) -> JoinHandle<Result<Response>> {
    let client = envoy.client();
    fleet.clear();
    let long = std::thread::spawn(move || client.get("/long"));
    let arrived = |replica: &Replica| replica.backend.seen().iter().any(|seen| seen.path == "/long");
    eventually("a backend has it", Duration::from_secs(5), || fleet.iter().any(arrived).then_some(()));
    long
}

/// Traffic until [`Self::stop`], which asserts that every request was answered.
struct Load {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Result<Response>>>,
}

impl Load {
    fn start(envoy: &Envoy) -> Self {
        let client = Client::reconnecting(envoy.addr(), false);
        let stop = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut answers = Vec::new();
            while !asked.load(Ordering::Relaxed) {
                answers.extend(client.burst(100, 4, |_| Request::get("/")));
            }
            answers
        });
        Self { stop, thread }
    }

    #[track_caller]
    fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        let answers = self.thread.join().expect("the load ran");
        assert!(answers.len() > 1000, "{} requests are no load", answers.len());
        assert_all_ok(&answers);
    }
}
