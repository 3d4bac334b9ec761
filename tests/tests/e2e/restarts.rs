//! Backends that die and come back behind agents that keep running, and agents that shut down: the effect on users'
//! requests.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use prequal_testbed::{
    Agent, AgentOptions, Backend, Body, Client, Envoy, EnvoyConfig, Fleet, Killable, Reply, Request,
    Response, bed, block_on, eventually, handle, workspace_root,
};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use crate::support::{assert_no_prequal_headers, warm};

const SECOND: Duration = Duration::from_secs(1);

/// Backends in separate processes, each behind its agent.
struct Pods(Vec<(Agent, Killable)>);

impl Pods {
    fn start(count: usize, delay: Duration) -> Result<Self> {
        let program = Path::new(env!("CARGO_BIN_EXE_killable-backend"));
        let pod = || {
            let backend = Killable::start(program, delay)?;
            Ok((Agent::start(backend.addr())?, backend))
        };
        (0..count).map(|_| pod()).collect::<Result<_>>().map(Self)
    }

    fn envoy(&self, config: impl FnOnce(EnvoyConfig) -> Result<EnvoyConfig>) -> Result<Envoy> {
        let addrs: Vec<_> = self.0.iter().map(|(agent, _)| agent.addr()).collect();
        let envoy = Envoy::start(config(EnvoyConfig::for_replicas(&addrs)?)?)?;
        warm(&envoy, addrs.len() as u64);
        Ok(envoy)
    }
}

/// Requests at a steady rate, until stopped.
struct Load {
    stop: Arc<AtomicBool>,
    answers: tokio::task::JoinHandle<Vec<Result<Response>>>,
}

impl Load {
    fn start(client: Client, per_second: u32, request: Request) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let answers = handle().spawn(async move {
            let mut ticks = tokio::time::interval(SECOND / per_second);
            // On a slow machine, send fewer requests instead of many at once.
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let mut sent = JoinSet::new();
            while !stopped.load(Ordering::Relaxed) {
                ticks.tick().await;
                let (client, request) = (client.clone(), request.clone());
                sent.spawn(async move { client.send_async(request).await });
            }
            sent.join_all().await
        });
        Self { stop, answers }
    }

    /// Requests that were not answered with 200.
    fn failures(self) -> Vec<String> {
        self.stop.store(true, Ordering::Relaxed);
        let answers = block_on(self.answers).expect("the load ran");
        assert!(!answers.is_empty(), "nothing was sent");
        let failures = answers.iter().filter_map(|answer| match answer {
            Ok(answer) if answer.status == 200 => None,
            Ok(answer) => Some(format!("{} {}", answer.status, answer.text().trim())),
            Err(error) => Some(format!("{error:#}")),
        });
        failures.collect()
    }
}

/// The shipped policy for requests that may be served twice.
fn idempotent(config: EnvoyConfig) -> Result<EnvoyConfig> {
    let path = workspace_root().join("envoy-configs/static/retry-idempotent.yaml");
    let mut shipped: serde_json::Value = yaml_serde::from_str(&std::fs::read_to_string(path)?)?;
    Ok(config.edit(|config| config.route_mut()["retry_policy"] = shipped["retry_policy"].take()))
}

/// Requests that this agent could not forward.
fn refused(agent: &Agent) -> Result<f64> {
    let name = "prequal_agent_upstream_errors_total{reason=\"connect\"}";
    agent.metrics()?.get(name).copied().context("no such metric")
}

/// Ends one backend after the other, and restarts each once its agent has failed to forward a request to it.
/// `PREQUAL_ROUNDS` (default 1) sets the number of rounds.
fn end_each(pods: &mut Pods, end: fn(&mut Killable) -> Result<()>) -> Result<()> {
    let rounds = std::env::var("PREQUAL_ROUNDS").map_or(Ok(1), |rounds| rounds.parse())?;
    for _ in 0..rounds {
        for (agent, backend) in &mut pods.0 {
            let before = refused(agent)?;
            end(backend)?;
            eventually("a request is refused", 30 * SECOND, || (refused(agent).ok()? > before).then_some(()));
            backend.restart()?;
            eventually("the agent has found it", 30 * SECOND, || {
                (*agent.metrics().ok()?.get("prequal_agent_failing_ratio")? < 0.1).then_some(())
            });
        }
    }
    Ok(())
}

fn kill(backend: &mut Killable) -> Result<()> {
    backend.kill();
    Ok(())
}

/// Lets the backend finish its requests.
fn stop(backend: &mut Killable) -> Result<()> {
    backend.terminate(10 * SECOND)
}

#[test]
fn a_dead_backend_fails_only_requests_in_flight_there() -> Result<()> {
    bed!();
    let mut pods = Pods::start(3, Duration::from_millis(5))?;
    let envoy = pods.envoy(Ok)?;
    // Requests are retried even if their body is still arriving, or exceeds Envoy's buffers.
    let load = Load::start(envoy.client(), 100, Request::post("/", vec![b'x'; 100_000]));
    end_each(&mut pods, kill)?;
    // A backend that is stopped finishes its requests, but a new request may arrive on an idle connection just as that
    // connection closes.
    end_each(&mut pods, stop)?;
    let failures = load.failures();
    let working = |failure: &&String| failure.contains("backend closed the connection before a response");
    assert_eq!(failures.iter().filter(working).count(), failures.len(), "{failures:#?}");
    assert!(envoy.stat("cluster.replicas.upstream_rq_retry_success")? >= 3, "nothing was retried");
    // If no replica is left, clients get the agents' own message.
    pods.0.iter_mut().for_each(|(_, backend)| backend.kill());
    let answer = envoy.client().get("/")?;
    assert_eq!(answer.status, 502);
    assert_no_prequal_headers(&answer.headers);
    Ok(())
}

#[test]
fn a_dead_backend_fails_no_idempotent_request() -> Result<()> {
    bed!();
    // The delay is long enough for all backends to be serving requests when they die.
    let mut pods = Pods::start(3, Duration::from_millis(100))?;
    let envoy = pods.envoy(idempotent)?;
    let load = Load::start(envoy.client(), 100, Request::get("/"));
    end_each(&mut pods, kill)?;
    end_each(&mut pods, stop)?;
    let failures = load.failures();
    assert!(failures.is_empty(), "{failures:#?}");
    let name = "prequal_agent_upstream_errors_total{reason=\"reset\"}";
    let died = |agent: &Agent| agent.metrics().is_ok_and(|metrics| metrics[name] > 0.0);
    assert!(pods.0.iter().any(|(agent, _)| died(agent)), "nothing was at work");
    Ok(())
}

#[test]
fn neither_client_nor_backend_can_force_a_retry() -> Result<()> {
    bed!();
    let fleet = Fleet::uniform(2, &Reply::status(503).header("x-prequal-failure", "unsent"))?;
    let envoy = Envoy::start(idempotent(EnvoyConfig::for_replicas(&fleet.addrs())?)?)?;
    let answer = envoy.client().send(Request::get("/").header("x-prequal-failure", "unsent"))?;
    assert_eq!(answer.status, 503);
    assert_no_prequal_headers(&answer.headers);
    assert_eq!(fleet.served().iter().sum::<u64>(), 1);
    for seen in fleet.iter().flat_map(|replica| replica.backend.seen()) {
        assert_no_prequal_headers(&seen.headers);
    }
    Ok(())
}

/// Replaces each agent in turn with one that has `options`, as a rollout does. Meanwhile clients continue over both
/// protocols; their failures are returned. `discover` gets the remaining addresses half a second after SIGTERM, while
/// the agent still serves, and all addresses once the new agent is there.
fn roll_out(
    pods: &mut VecDeque<(Agent, Backend)>,
    clients: [Client; 2],
    options: impl Fn(SocketAddr) -> AgentOptions,
    mut discover: impl FnMut(&[SocketAddr]) -> Result<()>,
) -> Result<Vec<String>> {
    let request = Request::post("/", vec![b'x'; 1000]);
    let mut loads = Vec::new();
    for (protocol, client) in ["HTTP/1.1", "HTTP/2"].into_iter().zip(clients) {
        loads.push((protocol, Load::start(client, 50, request.clone())));
    }
    for _ in 0..pods.len() {
        std::thread::sleep(SECOND);
        let (mut agent, backend) = pods.pop_front().context("a pod")?;
        let addr = agent.addr();
        let ended = std::thread::spawn(move || agent.terminate(30 * SECOND));
        std::thread::sleep(SECOND / 2);
        discover(&addrs(pods))?;
        let status = ended.join().expect("no panic").context("the agent still runs")?;
        ensure!(status.success(), "{status}");
        pods.push_back((Agent::start_with(backend.addr(), &options(addr))?, backend));
        discover(&addrs(pods))?;
    }
    std::thread::sleep(SECOND);
    let failures = loads.into_iter().flat_map(|(protocol, load)| {
        load.failures().into_iter().map(move |failure| format!("{protocol}: {failure}"))
    });
    Ok(failures.collect())
}

fn addrs(pods: &VecDeque<(Agent, Backend)>) -> Vec<SocketAddr> {
    pods.iter().map(|(agent, _)| agent.addr()).collect()
}

fn three_pods(options: &AgentOptions) -> Result<VecDeque<(Agent, Backend)>> {
    let pod = || {
        let backend = Backend::start(Reply::ok().delay(Duration::from_millis(20)))?;
        Ok((Agent::start_with(backend.addr(), options)?, backend))
    };
    (0..3).map(|_| pod()).collect()
}

#[test]
fn agents_that_shut_down_lose_no_request() -> Result<()> {
    bed!();
    // As shipped, with less time: discovery forgets the replica before the agent closes anything.
    let args = ["--drain-delay-ms=1500", "--drain-timeout-ms=10000"].map(str::to_owned).to_vec();
    let options = AgentOptions { args, ..AgentOptions::default() };
    let mut pods = three_pods(&options)?;
    let clusters = ["replicas", "replicas-agent"];
    let mut envoy = Envoy::start(EnvoyConfig::for_replicas(&addrs(&pods))?.eds(&clusters))?;
    warm(&envoy, 3);
    let clients = [envoy.client(), Client::http2(envoy.addr())];
    let failures = roll_out(
        &mut pods,
        clients,
        |_| options.clone(),
        |addrs| clusters.into_iter().try_for_each(|cluster| envoy.set_endpoints(cluster, addrs)),
    )?;
    assert!(failures.is_empty(), "{failures:#?}");
    Ok(())
}

/// Envoy holds the end of a response until the client reads it. If the agent closed its connection meanwhile, Envoy
/// would break the response off.
#[test]
fn a_client_that_reads_slowly_gets_its_whole_response_from_an_agent_that_shuts_down() -> Result<()> {
    bed!();
    const LENGTH: usize = 150_000;
    let backend = Backend::start(Reply::ok())?;
    backend.set_handler(|seen| match seen.path.as_str() {
        "/big" => Reply::ok().body(Body::Full(vec![b'b'; LENGTH].into())),
        _ => Reply::ok().reads_first(),
    });
    let mut agent = Agent::start(backend.addr())?;
    let envoy = Envoy::start(EnvoyConfig::for_replicas(&[agent.addr()])?)?;
    let addr = envoy.addr();
    let uri = move |path| format!("http://{addr}{path}");
    let (mut client, answer) = block_on(async move {
        let stream = tokio::net::TcpStream::connect(addr).await?;
        let (mut client, connection) = h2::client::handshake(stream).await?;
        tokio::spawn(connection);
        let request = http::Request::get(uri("/big")).body(())?;
        let answer = client.send_request(request, true)?.0.await?;
        anyhow::Ok((client, answer))
    })?;
    // The agent has sent everything, but the client's window is smaller than the response.
    eventually("the agent has nothing left to do", 10 * SECOND, || (agent.rif().ok()? == 0).then_some(()));
    let (upload, mut body) = client.send_request(http::Request::post(uri("/")).body(())?, false)?;
    body.send_data("first".into(), false)?;
    eventually("the agent has the upload", 10 * SECOND, || (agent.rif().ok()? == 1).then_some(()));
    let ended = std::thread::spawn(move || agent.terminate(30 * SECOND));
    eventually("Envoy knows that the agent shuts down", 10 * SECOND, || {
        (envoy.stat("cluster.replicas.upstream_cx_close_notify").ok()? > 0).then_some(())
    });
    body.send_data("last".into(), true)?;
    assert_eq!(block_on(upload)?.status(), 200);
    std::thread::sleep(SECOND / 2);
    let length = block_on(async move {
        let (mut body, mut length) = (answer.into_body(), 0);
        while let Some(part) = body.data().await.transpose().context("the response was broken off")? {
            length += part.len();
            body.flow_control().release_capacity(part.len())?;
        }
        anyhow::Ok(length)
    })?;
    assert_eq!(length, LENGTH);
    let status = ended.join().expect("no panic").context("the agent still runs")?;
    ensure!(status.success(), "{status}");
    Ok(())
}

/// Envoy is not notified that the agent shuts down: it continues to use its existing connections, and these end with
/// their next response.
#[test]
fn agents_that_shut_down_without_notice_lose_no_request() -> Result<()> {
    bed!();
    let mut pods = three_pods(&AgentOptions::default())?;
    let envoy = Envoy::start(EnvoyConfig::for_replicas(&addrs(&pods))?)?;
    warm(&envoy, 3);
    let clients = [envoy.client(), Client::http2(envoy.addr())];
    let options = |addr: SocketAddr| AgentOptions { listen: addr.to_string(), ..AgentOptions::default() };
    let failures = roll_out(&mut pods, clients, options, |_| Ok(()))?;
    assert!(failures.is_empty(), "{failures:#?}");
    Ok(())
}
