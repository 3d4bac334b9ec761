//! The processes of one run: replicas, an agent in front of each, and the Envoys that share them, or other load
//! balancers in their place.
//!
//! Every arm has the agents in the path. Every Envoy starts from the shipped configuration, without its retries. A
//! baseline has a policy of Envoy's own, and lacks Prequal's filters and probe cluster. Dropping a [`Deployment`] ends
//! all its processes.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use prequal_testbed::{Agent, AgentOptions, Envoy, EnvoyConfig, Policy, target_dir};
use serde_json::json;
use tokio::net::TcpSocket;

use crate::arm::Arm;
use crate::backends::{Backends, Change, Fleet, KEY_HEADER, Service};
use crate::peer;
use crate::process::{cores, resident_kib};

/// The serving cluster of the shipped configuration.
pub(crate) const CLUSTER: &str = "replicas";
/// Its probe cluster.
const PROBE_CLUSTER: &str = "replicas-agent";

/// Rules that send no probes.
const PROBE_FREE: [&str; 2] = ["peak_ewma", "zuul_choice_of_two"];
/// Requests in flight at which Zuul's rule considers a replica fully used, in the filter and in the agents' reports.
const ZUUL_MAX_IN_FLIGHT: u32 = 100;

/// Whether Prequal's arms run as a native dynamic module instead of the WebAssembly filter.
pub(crate) static NATIVE: AtomicBool = AtomicBool::new(false);

/// A running deployment, ready for requests.
pub(crate) struct Deployment {
    backends: Backends,
    agent_args: Vec<String>,
    agents: Vec<Mutex<Front>>,
    envoys: Vec<Envoy>,
    /// In place of Envoys.
    peers: Vec<peer::RunningPeer>,
}

/// Counters of the filter.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counted {
    /// Probes sent.
    pub(crate) probes: u64,
    /// Number of ejections, for any reason.
    pub(crate) ejections: u64,
}

/// What agents have done since they started.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AgentsWork {
    /// Probes answered.
    pub(crate) probes: f64,
    /// Requests that ended.
    pub(crate) requests: f64,
    pub(crate) cpu: Duration,
}

impl AgentsWork {
    /// The work since an earlier reading.
    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            probes: self.probes - before.probes,
            requests: self.requests - before.requests,
            cpu: self.cpu.saturating_sub(before.cpu),
        }
    }
}

/// An event that affects one replica.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ReplicaEvent {
    Backend(u16, Change),
    /// The agent ends at once and its port refuses connections.
    AgentGone(u16),
    /// The agent starts again on its port.
    AgentBack(u16),
}

/// The holder of the port on which a replica gets its requests.
enum Front {
    Agent(Agent),
    /// No agent listens; the socket keeps other processes from taking the port.
    Kept {
        address: SocketAddr,
        _socket: TcpSocket,
    },
}

impl Deployment {
    /// Starts new processes and waits until they serve; each Envoy, or peer in its place, has `workers` workers.
    pub(crate) async fn start(arm: Arm, envoys: usize, workers: u32, fleet: &Fleet) -> Result<Self> {
        let fleet = fleet.clone();
        tokio::task::spawn_blocking(move || {
            let backends = Backends::start(&fleet)?;
            let agent_args = agent_args(arm, &fleet);
            let agents = start_agents(&backends.addresses, &agent_args)?;
            let addresses: Vec<SocketAddr> = agents.iter().map(Agent::addr).collect();
            let agents = agents.into_iter().map(|agent| Mutex::new(Front::Agent(agent))).collect();
            let mut deployment = Self { backends, agent_args, agents, envoys: Vec::new(), peers: Vec::new() };
            if let Arm::Peer(peer) = arm {
                let start = |_| peer::RunningPeer::start(peer, &addresses, workers);
                deployment.peers = (0..envoys).map(start).collect::<Result<_>>()?;
            } else {
                let config = |_| Ok(config(arm, &addresses, &fleet)?.concurrency(workers));
                deployment.envoys = start_envoys((0..envoys).map(config).collect::<Result<_>>()?)?;
            }
            Ok(deployment)
        })
        .await?
    }

    /// Ends all processes, without blocking the runtime's threads.
    pub(crate) async fn stop(self) {
        // The panic hook has printed any panic in a drop; there is nothing to add.
        let _ = tokio::task::spawn_blocking(move || drop(self)).await;
    }

    /// Carries out `event` and returns once it is in effect. Blocks.
    pub(crate) fn apply(&self, event: ReplicaEvent) -> Result<()> {
        let (replica, gone) = match event {
            ReplicaEvent::Backend(replica, change) => return self.backends.change(replica, change),
            ReplicaEvent::AgentGone(replica) => (replica, true),
            ReplicaEvent::AgentBack(replica) => (replica, false),
        };
        let index = usize::from(replica);
        let (front, upstream) =
            self.agents.get(index).zip(self.backends.addresses.get(index)).context("no such replica")?;
        let mut front = front.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *front {
            Front::Agent(agent) if gone => {
                let address = agent.addr();
                agent.kill();
                let socket = TcpSocket::new_v4()?;
                socket.set_reuseaddr(true)?;
                socket.bind(address)?;
                *front = Front::Kept { address, _socket: socket };
            }
            Front::Kept { address, .. } if !gone => {
                let options = AgentOptions { listen: address.to_string(), ..agent_options(&self.agent_args) };
                *front = Front::Agent(Agent::start_with(*upstream, &options)?);
            }
            _ => bail!("{event:?}: already in that state"),
        }
        Ok(())
    }

    /// Number of Envoys, or of peers in their place.
    pub(crate) fn envoys(&self) -> usize {
        self.envoys.len() + self.peers.len()
    }

    /// The addresses for requests, one per Envoy or peer.
    pub(crate) fn targets(&self) -> Vec<SocketAddr> {
        let peers = self.peers.iter().map(peer::RunningPeer::address);
        self.envoys.iter().map(Envoy::addr).chain(peers).collect()
    }

    /// Admin address of one Envoy.
    pub(crate) fn admin(&self, envoy: usize) -> SocketAddr {
        self.envoys[envoy].admin()
    }

    /// CPU time of all Envoys or peers together so far.
    pub(crate) fn proxy_cpu(&self) -> Result<Duration> {
        let peers = self.peers.iter().map(peer::RunningPeer::cpu_time);
        self.envoys.iter().map(Envoy::cpu_time).chain(peers).sum()
    }

    /// Mean resident memory of an Envoy, KiB.
    pub(crate) fn envoy_resident_kib(&self) -> Result<f64> {
        let total: u64 = self.envoys.iter().map(|envoy| resident_kib(envoy.pid())).sum::<Result<_>>()?;
        Ok(total as f64 / self.envoys.len() as f64)
    }

    /// The work of all running agents together so far. Blocks for a moment.
    pub(crate) fn agents_work(&self) -> Result<AgentsWork> {
        let mut work = AgentsWork::default();
        for front in &self.agents {
            let front = front.lock().unwrap_or_else(PoisonError::into_inner);
            let Front::Agent(agent) = &*front else { continue };
            for (name, value) in agent.metrics()? {
                if name.starts_with("prequal_agent_probes_total{") {
                    work.probes += value;
                } else if name.starts_with("prequal_agent_requests_total{") {
                    work.requests += value;
                }
            }
            work.cpu += agent.cpu_time()?;
        }
        Ok(work)
    }

    /// The counters of all filters together so far; zero in a baseline.
    pub(crate) fn counted(&self) -> Result<Counted> {
        tokio::task::block_in_place(|| {
            // In parallel, because each reading waits for the workers' next report.
            let readings: Vec<_> = std::thread::scope(|scope| {
                let read = |envoy| scope.spawn(move || Envoy::prequal(envoy, CLUSTER));
                let threads: Vec<_> = self.envoys.iter().map(read).collect();
                threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
            });
            let mut counted = Counted::default();
            for reading in readings {
                let Ok(counters) = reading else { bail!("reading an Envoy's counters panicked, see above") };
                let counters = counters?;
                counted.probes += counters.probes("sent");
                counted.ejections += ["failing", "reported", "unresponsive"]
                    .map(|reason| counters.other(&format!("prequal_ejections_total.{reason}")))
                    .iter()
                    .sum::<u64>();
            }
            Ok(counted)
        })
    }
}

/// One thread per agent: agents share the machine with what is measured.
fn agent_options(args: &[String]) -> AgentOptions {
    let threads = ["--threads", "1"].map(str::to_owned);
    AgentOptions {
        args: threads.into_iter().chain(args.iter().cloned()).collect(),
        ..AgentOptions::default()
    }
}

/// The extra arguments that an arm needs for its agents.
fn agent_args(arm: Arm, fleet: &Fleet) -> Vec<String> {
    let entries = fleet.0.iter().find_map(|replica| match replica.service {
        Service::Cache { entries, .. } => Some(entries),
        Service::Inference { engine, .. } => Some(engine.contexts()),
        _ => None,
    });
    match (arm, entries) {
        // The agent remembers as many hints as the replica's cache has entries.
        (Arm::Hinted(_) | Arm::InferenceHinted(_), Some(entries)) => {
            vec!["--hint-cache".to_owned(), entries.to_string()]
        }
        (Arm::Rule(rule), _) if rule.starts_with("zuul") => {
            vec!["--netflix-utilization".to_owned(), ZUUL_MAX_IN_FLIGHT.to_string()]
        }
        // These reports give the policy its weights.
        (Arm::Cswrr, _) => ["--orca", "text"].map(str::to_owned).into(),
        (Arm::CswrrOutOfBand, _) => ["--orca-streams", "100"].map(str::to_owned).into(),
        _ => Vec::new(),
    }
}

/// One agent per replica, with extra arguments.
pub(crate) fn start_agents(upstreams: &[SocketAddr], args: &[String]) -> Result<Vec<Agent>> {
    upstreams.iter().map(|upstream| Agent::start_with(*upstream, &agent_options(args))).collect()
}

/// Starts several Envoys, a few at a time: compiling the module takes most of the time, and an Envoy that gets too
/// little of the CPU would not be ready within the time limit.
pub(crate) fn start_envoys(configs: Vec<EnvoyConfig>) -> Result<Vec<Envoy>> {
    let at_a_time = 2 * cores();
    let mut envoys = Vec::with_capacity(configs.len());
    let mut configs = configs.into_iter().peekable();
    while configs.peek().is_some() {
        let threads: Vec<_> = configs
            .by_ref()
            .take(at_a_time)
            .map(|config| std::thread::spawn(move || Envoy::start(config)))
            .collect();
        for thread in threads {
            let Ok(envoy) = thread.join() else { bail!("starting Envoy panicked, see above") };
            envoys.push(envoy.context("starting Envoy")?);
        }
    }
    Ok(envoys)
}

/// Envoy's configuration for an arm.
pub(crate) fn config(arm: Arm, replicas: &[SocketAddr], fleet: &Fleet) -> Result<EnvoyConfig> {
    let native = arm == Arm::Native || arm.is_prequal() && NATIVE.load(Ordering::Relaxed);
    let shipped = if native { EnvoyConfig::native_for_replicas } else { EnvoyConfig::for_replicas };
    let plain = shipped(replicas)?.edit(|config| {
        for name in [CLUSTER, PROBE_CLUSTER] {
            let endpoints = &mut config.cluster_mut(name)["load_assignment"]["endpoints"][0]["lb_endpoints"];
            for (endpoint, replica) in endpoints.as_array_mut().into_iter().flatten().zip(&fleet.0) {
                endpoint["load_balancing_weight"] = json!(replica.weight);
            }
        }
        if let Some(route) = config.route_mut().as_object_mut() {
            route.remove("retry_policy");
            // A long answer takes longer than the shipped configuration allows.
            if fleet.0.iter().any(|replica| matches!(replica.service, Service::Inference { .. })) {
                route.insert("timeout".to_owned(), json!("0s"));
            }
        }
    });
    Ok(match arm {
        Arm::EmptyModule => plain.module(&empty_module()?),
        Arm::Prequal | Arm::Native => plain,
        Arm::Hinted(d) => plain.filter_settings(|settings| {
            let cluster = &mut settings["clusters"][0];
            cluster["mode"] = json!("sync");
            cluster["sync_d"] = json!(d);
            cluster["hint"] = json!({"header": KEY_HEADER});
        }),
        Arm::Inference => plain.filter_settings(|settings| {
            settings["clusters"][0]["profile"] = json!("inference");
        }),
        Arm::InferenceHinted(d) => plain.filter_settings(|settings| {
            let cluster = &mut settings["clusters"][0];
            cluster["profile"] = json!("inference");
            cluster["sync_d"] = json!(d);
            cluster["hint"] = json!({"header": KEY_HEADER});
        }),
        Arm::Rule(rule) => plain.filter_settings(|settings| {
            let cluster = &mut settings["clusters"][0];
            cluster["rule"] = json!(rule);
            if rule.starts_with("zuul") {
                cluster["max_in_flight"] = json!(ZUUL_MAX_IN_FLIGHT);
            }
            // This setting is refused if no probes are sent.
            if PROBE_FREE.contains(&rule)
                && let Some(cluster) = cluster.as_object_mut()
            {
                cluster.remove("verified_probes");
            }
        }),
        Arm::RoundRobin => plain.without_prequal().policy(Policy::RoundRobin),
        Arm::LeastRequest => plain.without_prequal().policy(Policy::LeastRequest),
        Arm::FullScan => plain.without_prequal().policy(Policy::LeastRequestFullScan),
        Arm::Random => plain.without_prequal().policy(Policy::Random),
        Arm::Cswrr => plain.without_prequal().policy(Policy::ClientSideWeighted),
        Arm::CswrrOutOfBand => plain.without_prequal().policy(Policy::ClientSideWeighted).edit(|config| {
            let policy = &mut config.cluster_mut(CLUSTER)["load_balancing_policy"]["policies"][0];
            let settings = &mut policy["typed_extension_config"]["typed_config"];
            settings["enable_oob_load_report"] = json!(true);
            settings["oob_reporting_period"] = json!("1s");
        }),
        Arm::Peer(peer) => bail!("{} is not an Envoy", peer.label()),
        Arm::RingHash => plain.without_prequal().edit(|config| {
            config.route_mut()["hash_policy"] = json!([{"header": {"header_name": KEY_HEADER}}]);
            config.cluster_mut(CLUSTER)["lb_policy"] = json!("RING_HASH");
        }),
    })
}

/// The file of a module that does nothing.
pub(crate) fn empty_module() -> Result<PathBuf> {
    let module = wat::parse_str(include_str!("empty.wat"))?;
    let path = target_dir().join("bench/empty.wasm");
    // Do not rewrite the file: an Envoy may be reading it.
    if fs::read(&path).ok().as_ref() != Some(&module) {
        fs::create_dir_all(path.parent().context("a file in a folder")?)?;
        fs::write(&path, module)?;
    }
    Ok(path)
}

/// The file of a native module that does nothing.
pub(crate) fn empty_native_module() -> Result<PathBuf> {
    let folder = target_dir().join("bench");
    let (source, module) = (folder.join("empty.c"), folder.join("libempty_native.so"));
    fs::create_dir_all(&folder)?;
    fs::write(&source, include_str!("empty.c"))?;
    // Compile to another name, then rename: an Envoy may have loaded the file.
    let next = folder.join(format!("empty-{}.so", std::process::id()));
    let mut compile = Command::new("cc");
    compile.args(["-O2", "-shared", "-fPIC", "-o"]).arg(&next).arg(&source);
    ensure!(compile.status().context("cc")?.success(), "cc could not build {}", source.display());
    fs::rename(&next, &module)?;
    Ok(module)
}
