//! Replicas without an agent beside others that have one, as happens while agents are rolled out.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use prequal_testbed::{Agent, AgentOptions, Backend, Envoy, EnvoyConfig, Fleet, Reply, Request, eventually};

use crate::support::{SERVING, assert_all_ok, bed, is_probe, stand_in};

/// Replicas with an agent, and backends that Envoy reaches without one.
struct Mixed {
    with: Fleet,
    without: Vec<Backend>,
}

impl Mixed {
    fn start(with: usize, without: usize) -> Result<Self> {
        let reply = Reply::ok().delay(Duration::from_millis(20));
        let without = (0..without).map(|_| Backend::start(reply.clone())).collect::<Result<_>>()?;
        Ok(Self { with: Fleet::uniform(with, &reply)?, without })
    }

    fn addrs(&self) -> Vec<SocketAddr> {
        self.with.addrs().into_iter().chain(self.without.iter().map(Backend::addr)).collect()
    }

    /// Sends 400 requests, eight at a time, and returns how many of them each replica served, those with an agent
    /// first.
    fn burst(&self, envoy: &Envoy) -> Vec<usize> {
        self.with.clear();
        self.without.iter().for_each(Backend::clear);
        assert_all_ok(&envoy.client().burst(400, 8, |_| Request::get("/")));
        let backends = self.with.iter().map(|replica| &replica.backend).chain(&self.without);
        backends.map(|backend| backend.seen().iter().filter(|seen| seen.path == "/").count()).collect()
    }
}

/// Asserts that each replica gets its share, and that the filter notices when a replica gets an agent.
fn assert_shares(config: impl FnOnce(&[SocketAddr]) -> Result<EnvoyConfig>) -> Result<()> {
    let mut fleet = Mixed::start(4, 2)?;
    let envoy = Envoy::start(config(&fleet.addrs())?)?;
    let wait_for = |fleet: &Mixed, members, agentless| {
        eventually("the filter knows which replicas have an agent", Duration::from_secs(15), || {
            fleet.burst(&envoy);
            let now = envoy.prequal(SERVING).ok()?;
            let known = (now.other("prequal_members"), now.other("prequal_agentless"));
            (known == (members, agentless)).then_some(())
        });
    };
    wait_for(&fleet, 4, 2);
    let before = envoy.prequal(SERVING)?.picks("agentless");
    let served = fleet.burst(&envoy);
    assert!(served.iter().all(|count| (33..=133).contains(count)), "half to twice 67: {served:?}");
    assert!(envoy.prequal(SERVING)?.picks("agentless") - before >= 66);

    let bare = fleet.without.remove(0);
    let options = AgentOptions { listen: bare.addr().to_string(), ..AgentOptions::default() };
    bare.finish();
    let backend = Backend::start(Reply::ok())?;
    let _agent = Agent::start_with(backend.addr(), &options)?;
    wait_for(&fleet, 5, 1);
    Ok(())
}

#[test]
fn each_gets_its_share() -> Result<()> {
    bed!();
    assert_shares(EnvoyConfig::for_replicas)
}

#[test]
fn each_gets_its_share_from_the_native_module() -> Result<()> {
    bed!();
    assert_shares(EnvoyConfig::native_for_replicas)
}

/// A replica without an agent answers probes with 404, or as it answers everything else.
#[test]
fn an_answer_to_a_probe_shows_that_there_is_no_agent() -> Result<()> {
    bed!();
    for probed in [404, 200] {
        let fleet = Mixed::start(3, 0)?;
        let bare =
            stand_in(move |_| Reply::status(probed), |_| Reply::ok().delay(Duration::from_millis(20)))?;
        let mut all = fleet.addrs();
        all.push(bare.addr());
        let envoy = Envoy::start(EnvoyConfig::for_replicas(&all)?)?;
        eventually("the filter knows which replica has no agent", Duration::from_secs(15), || {
            fleet.burst(&envoy);
            let now = envoy.prequal(SERVING).ok()?;
            ((now.other("prequal_members"), now.other("prequal_agentless")) == (3, 1)).then_some(())
        });
        bare.clear();
        let served = fleet.burst(&envoy);
        let to_bare = bare.seen().iter().filter(|seen| !is_probe(seen)).count();
        assert!((50..=200).contains(&to_bare), "{to_bare} and {served:?}");
        let after = envoy.prequal(SERVING)?;
        let refused = (after.other("prequal_ejected"), after.other("prequal_diverted_total"));
        assert_eq!(refused, (0, 0), "{after:#?}");
    }
    Ok(())
}

#[test]
fn a_majority_without_agents_is_balanced_by_envoy() -> Result<()> {
    bed!();
    let fleet = Mixed::start(2, 4)?;
    let envoy = Envoy::start(EnvoyConfig::for_replicas(&fleet.addrs())?)?;
    eventually("the filter knows that most replicas have no agent", Duration::from_secs(15), || {
        fleet.burst(&envoy);
        (envoy.prequal(SERVING).ok()?.other("prequal_agentless") == 4).then_some(())
    });
    let before = envoy.prequal(SERVING)?.steered();
    let served = fleet.burst(&envoy);
    assert_eq!(envoy.prequal(SERVING)?.steered(), before, "Envoy's own policy places every request");
    assert!(served.iter().all(|count| *count >= 33), "{served:?}");
    Ok(())
}
