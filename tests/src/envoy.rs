//! A real Envoy as a child process, its statistics, and changes to its configuration while it runs.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::client::{Client, http_get};
use crate::config::{EnvoyConfig, envoy_binary, lb_endpoint};
use crate::counters::Prequal;
use crate::discovery::{eds, eds_path, file_source, lds, move_endpoints_to_file, write_atomically};
use crate::minimal::envoy_in;
use crate::process::{Process, cpu_time};
use crate::runtime::eventually;

/// Maximum start time of Envoy: it compiles the module once for the main thread and once per worker.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Seconds that an Envoy keeps running after another has taken over ([`Envoy::hot_restart`]). It drains for two of
/// them.
pub const PARENT_SHUTDOWN_S: u64 = 5;

/// A running Envoy; it stops on drop.
#[derive(Debug)]
pub struct Envoy {
    addr: SocketAddr,
    admin: SocketAddr,
    admin_client: Client,
    listener: Value,
    version: u64,
    life: Life,
    process: Process,
    dir: TempDir,
}

/// The parameters of hot restart.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Life {
    /// No other process takes over.
    Single,
    /// One of a chain of processes that share `base_id`.
    Chained { base_id: u64, epoch: u32 },
}

/// Maximum number of idle probes of one cluster in flight at a time, with two workers. A test that checks whether
/// counters balance must allow for this many.
pub const IDLE_PROBES: u64 = 4;

impl Envoy {
    /// Starts Envoy and waits until it is ready to serve. The error contains the end of Envoy's log.
    pub fn start(config: EnvoyConfig) -> Result<Self> {
        Self::launch(config, Life::Single)
    }

    /// Like [`Self::start`], but another process can take over; see [`Self::hot_restart`].
    pub fn start_restartable(config: EnvoyConfig) -> Result<Self> {
        // Envoy can choose a base id itself (`--use-dynamic-base-id`), but reports it only in a file. An id derived
        // from the process id is unique, too.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let base_id = u64::from(std::process::id()) * 100 + NEXT.fetch_add(1, Ordering::Relaxed);
        Self::launch(config, Life::Chained { base_id, epoch: 0 })
    }

    /// Starts another process with `config`, which takes over the listener at the same address, and waits until it is
    /// ready. From then on the old process accepts no new connections. It ends [`PARENT_SHUTDOWN_S`] later: see
    /// [`Self::wait_for_end`]. The new process has its own statistics.
    pub fn hot_restart(&self, config: EnvoyConfig) -> Result<Self> {
        let Life::Chained { base_id, epoch } = self.life else { bail!("not started for a hot restart") };
        let port = self.addr.port();
        let config = config
            .edit(|config| config.listener_mut()["address"]["socket_address"]["port_value"] = json!(port));
        Self::launch(config, Life::Chained { base_id, epoch: epoch + 1 })
    }

    /// Sends SIGTERM and waits until the process has ended; fails after `limit`.
    pub fn terminate(&mut self, limit: Duration) -> Result<()> {
        let status = self.process.terminate(limit);
        status.with_context(|| format!("Envoy still runs {limit:?} after SIGTERM"))?;
        Ok(())
    }

    /// Waits until the process has ended by itself; fails after `limit`.
    pub fn wait_for_end(&mut self, limit: Duration) -> Result<()> {
        let start = Instant::now();
        while self.process.exited().is_none() {
            ensure!(start.elapsed() < limit, "Envoy still runs after {limit:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    fn launch(mut config: EnvoyConfig, life: Life) -> Result<Self> {
        let dir = config.root_folder.as_ref().map_or_else(TempDir::new, TempDir::new_in)?;
        let file = |name: &str| dir.path().join(name);
        let (config_path, admin_path, log_path) = (file("envoy.json"), file("admin"), file("envoy.log"));
        let listener = config.listener_mut().clone();
        for cluster in config.eds.clone() {
            move_endpoints_to_file(dir.path(), config.cluster_mut(&cluster))?;
        }
        if config.dynamic_listener {
            write_atomically(&dir.path().join("lds.json"), &lds(&listener, 0))?;
            let root = config.root_mut();
            root["static_resources"]["listeners"] = json!([]);
            root["dynamic_resources"]["lds_config"] = file_source(&dir.path().join("lds.json"));
        }
        fs::write(&config_path, config.root_mut().to_string())?;
        let mut command =
            config.root_folder.as_deref().map_or_else(|| Command::new(envoy_binary()), envoy_in);
        command.env("ENVOY_DYNAMIC_MODULES_SEARCH_PATH", &config.modules);
        // A file as Envoy sees it.
        let seen = |path: &Path| match &config.root_folder {
            Some(root) => Path::new("/").join(path.strip_prefix(root).unwrap_or(path)),
            None => path.to_owned(),
        };
        command.arg("-c").arg(seen(&config_path)).arg("--admin-address-path").arg(seen(&admin_path));
        command.args(["--concurrency", &config.concurrency.to_string()]);
        match life {
            // Several Envoys run at once, and hot restart's shared memory would make them conflict.
            Life::Single => command.arg("--disable-hot-restart"),
            Life::Chained { base_id, epoch } => command
                .args(["--base-id", &base_id.to_string(), "--restart-epoch", &epoch.to_string()])
                .args(["--parent-shutdown-time-s", &PARENT_SHUTDOWN_S.to_string()])
                .arg("--skip-hot-restart-parent-stats"),
        };
        // Connections of an updated listener close with their next response, not in the middle of one.
        command.args(["--drain-time-s", "2", "--drain-strategy", "immediate"]);
        command.args(["--log-level", &config.log_level]);
        let mut process = Process::spawn("envoy", &mut command, log_path, None)?;
        let deadline = Instant::now() + START_LIMIT;
        let mut poll = |what: &str, probe: &mut dyn FnMut() -> bool| -> Result<()> {
            while !probe() {
                if let Some(status) = process.exited() {
                    bail!("Envoy ended ({status}):\n{}", process.log());
                }
                ensure!(Instant::now() < deadline, "Envoy does not {what}:\n{}", process.log());
                std::thread::sleep(Duration::from_millis(10));
            }
            Ok(())
        };
        let mut admin = None;
        poll("open its admin port", &mut || {
            admin = fs::read_to_string(&admin_path).ok().and_then(|text| text.trim().parse().ok());
            admin.is_some()
        })?;
        let admin = admin.context("no admin address")?;
        let admin_client = Client::new(admin);
        poll("get ready", &mut || admin_client.get("/ready").is_ok_and(|reply| reply.text() == "LIVE\n"))?;
        let mut addr = None;
        poll("open its listener", &mut || {
            addr = listener_addr(&admin_client, &listener["name"]);
            addr.is_some()
        })?;
        let addr = addr.context("no listener")?;
        Ok(Self { addr, admin, admin_client, listener, version: 0, life, process, dir })
    }

    /// The address to which clients connect.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The address of the listener `name`; see [`EnvoyConfig::add_listener`].
    pub fn listener(&self, name: &str) -> Option<SocketAddr> {
        listener_addr(&self.admin_client, &json!(name))
    }

    /// The address of the admin interface.
    pub fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// An HTTP/1.1 client of the listener.
    pub fn client(&self) -> Client {
        Client::new(self.addr)
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// CPU time used so far by all threads.
    pub fn cpu_time(&self) -> Result<Duration> {
        cpu_time(self.process.pid())
    }

    /// Sends a GET for `path` to the admin interface.
    pub fn admin_get(&self, path: &str) -> Result<String> {
        http_get(self.admin, path)
    }

    /// All counters and gauges by name, as in `/stats`. Text values and histograms are omitted.
    pub fn stats(&self) -> Result<BTreeMap<String, u64>> {
        self.stats_matching("")
    }

    /// One counter or gauge; zero while Envoy does not know it.
    pub fn stat(&self, name: &str) -> Result<u64> {
        Ok(self.stats_matching(name)?.get(name).copied().unwrap_or(0))
    }

    /// The filter's metrics of `cluster`. Workers report four times a second, so this first waits until the metrics
    /// include everything counted so far.
    pub fn prequal(&self, cluster: &str) -> Result<Prequal> {
        std::thread::sleep(Duration::from_millis(300));
        let cluster = prequal_stats::label(cluster);
        Ok(Prequal::read(&self.admin_client.get(prequal_stats::PATH)?.text(), &cluster))
    }

    /// The inbound role's counts for the replica at `endpoint`: `in_flight.<slot>`, `requests.<result>`, `probes`.
    pub fn inbound(&self, endpoint: SocketAddr) -> Result<BTreeMap<String, u64>> {
        let label = endpoint.to_string().replace(|c: char| !c.is_ascii_alphanumeric() && c != '-', "_");
        let mut found = BTreeMap::new();
        for (name, value) in self.stats_matching("prequal_inbound_")? {
            let name = name.strip_prefix("wasmcustom.prequal_inbound_").unwrap_or(&name);
            let Some((metric, rest)) = name.split_once(".endpoint=") else { continue };
            let mut labels = rest.split('.');
            if labels.next() == Some(&label) {
                let value_of = |label: &str| Some(format!(".{}", label.split_once('=')?.1));
                let label = labels.next().and_then(value_of).unwrap_or_default();
                found.insert(format!("{}{label}", metric.trim_end_matches("_total")), value);
            }
        }
        Ok(found)
    }

    /// Writes new endpoints of an EDS cluster (see [`EnvoyConfig::eds`]) and waits until Envoy has read them.
    pub fn set_endpoints(&mut self, cluster: &str, addrs: &[SocketAddr]) -> Result<()> {
        let endpoints = addrs.iter().map(lb_endpoint).collect::<Vec<_>>();
        self.set_localities(cluster, &json!([{ "lb_endpoints": endpoints }]))
    }

    /// Writes new endpoints of an EDS cluster, given as the list `endpoints` of a `ClusterLoadAssignment`,
    /// and waits until Envoy has read them.
    pub fn set_localities(&mut self, cluster: &str, endpoints: &Value) -> Result<()> {
        let stat = format!("cluster.{cluster}.update_success");
        let before = self.stat(&stat)?;
        self.version += 1;
        write_atomically(&eds_path(self.dir.path(), cluster), &eds(cluster, endpoints, self.version))?;
        eventually("Envoy reads the new endpoints", Duration::from_secs(10), || {
            self.stat(&stat).is_ok_and(|now| now > before).then_some(())
        });
        Ok(())
    }

    /// Changes the listener (see [`EnvoyConfig::dynamic_listener`]) and waits until Envoy has accepted or refused it.
    /// Returns true if it was accepted.
    pub fn update_listener(&mut self, config: EnvoyConfig) -> Result<bool> {
        let mut config = config;
        self.listener = config.listener_mut().clone();
        self.version += 1;
        let names = ["listener_manager.lds.update_success", "listener_manager.lds.update_rejected"];
        let read = |envoy: &Self| Ok::<_, anyhow::Error>([envoy.stat(names[0])?, envoy.stat(names[1])?]);
        let before = read(self)?;
        write_atomically(&self.dir.path().join("lds.json"), &lds(&self.listener, self.version))?;
        let now = eventually("Envoy reads the new listener", Duration::from_secs(10), || {
            read(self).ok().filter(|now| *now != before)
        });
        let taken = now[0] > before[0];
        if taken {
            // The new listener is in use once no listener is warming.
            eventually("the new listener is active", Duration::from_secs(10), || {
                (self.stat("listener_manager.total_listeners_warming").ok()? == 0).then_some(())
            });
            self.addr = listener_addr(&self.admin_client, &self.listener["name"]).unwrap_or(self.addr);
        }
        Ok(taken)
    }

    /// The end of Envoy's log.
    pub fn log(&self) -> String {
        self.process.log()
    }

    fn stats_matching(&self, part: &str) -> Result<BTreeMap<String, u64>> {
        let filter: String = part
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || c == '_' || c == '-' { c } else { '.' })
            .collect();
        let text = self.admin_client.get(&format!("/stats?filter={filter}"))?.text();
        let numbers = text.lines().filter_map(|line| {
            let (name, value) = line.rsplit_once(": ")?;
            Some((name.to_owned(), value.parse().ok()?))
        });
        Ok(numbers.collect())
    }
}

impl Drop for Envoy {
    fn drop(&mut self) {
        if let Life::Chained { base_id, .. } = self.life {
            // Envoy leaves this file behind. Processes that have mapped it keep it; the name is only needed to take
            // over.
            let _ = fs::remove_file(format!("/dev/shm/envoy_shared_memory_{base_id}0"));
        }
    }
}

fn listener_addr(admin: &Client, name: &Value) -> Option<SocketAddr> {
    let text = admin.get("/listeners?format=json").ok()?.text();
    let found: Value = serde_json::from_str(&text).ok()?;
    let mut named = found["listener_statuses"].as_array()?.iter().filter(|status| status["name"] == *name);
    let address = &named.next_back()?["local_address"]["socket_address"];
    let ip = address["address"].as_str()?.parse().ok()?;
    let port = u16::try_from(address["port_value"].as_u64()?).ok()?;
    (port != 0).then(|| SocketAddr::new(ip, port))
}
