//! The live page: collects data once a second, serves it, and switches faults on.
//!
//! It sends requests to programs, but never to the container engine. Orders that only the engine can carry out wait
//! here until `cargo xtask` on the host fetches them. A browser on another site cannot switch anything: an order needs
//! a header that forms cannot send, and a `Host` that names this machine.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use bytes::Bytes;
use http::{Method, Response, StatusCode, header};
use http_body_util::Full;
use serde_json::{Value, json};

use crate::faults::{By, FAULTS, Fault, SINKHOLE_SHARE, SLOW_FACTOR, Target};
use crate::page::endpoints::Endpoints;
use crate::page::state::{Active, State};
use crate::service::{ADMIN_PORT, MAX_SECONDS};
use crate::web::{self, Call, Client};
use crate::{antagonist, load};

mod collect;
mod endpoints;
mod metrics;
mod state;

/// Serves the live page, and writes the endpoints that both Envoys read.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    /// Address on which the page is served
    #[arg(long, default_value_t = SocketAddr::from(([0, 0, 0, 0], load::PORT)))]
    listen: SocketAddr,
    /// Number of replicas, including a spare one, which is the last
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u16).range(3..=99))]
    replicas: u16,
    /// Numbers of the replicas that have an antagonist beside them
    #[arg(long, value_delimiter = ',', default_value = "7,8")]
    antagonists: Vec<u16>,
    /// The endpoints file that both Envoys watch
    #[arg(long, default_value = "/eds/replicas.json")]
    endpoints: PathBuf,
}

/// Header that every order must have, with any value.
const ORDER_HEADER: &str = "x-prequal-demo";

/// The controller on the host counts as present for this long after its last request.
const CONTROLLER: Duration = Duration::from_secs(5);

/// Time within which a program must answer the page.
const TIMEOUT: Duration = Duration::from_secs(2);

struct Page {
    args: Args,
    client: Client,
    state: Mutex<State>,
}

pub(crate) async fn run(args: Args) -> Result<()> {
    let listen = args.listen;
    let page = Arc::new(Page {
        state: Mutex::new(State::new(Endpoints::new(args.replicas, args.endpoints.clone()))),
        client: Client::new(),
        args,
    });
    tokio::spawn(collect::for_ever(page.clone()));
    web::serve(listen, move |call| {
        let page = page.clone();
        async move { page.answer(&call).await }
    })
    .await
}

impl Page {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn answer(self: Arc<Self>, call: &Call) -> Response<Full<Bytes>> {
        let host = call.headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
        if !of_this_machine(host) {
            return web::text(
                StatusCode::MISDIRECTED_REQUEST,
                "this page can be opened only from the machine on which it runs\n",
            );
        }
        match (&call.method, call.path.as_str()) {
            (&Method::GET, "/") => {
                web::typed(StatusCode::OK, "text/html; charset=utf-8", include_str!("../web/index.html"))
            }
            (&Method::GET, "/app.js") => {
                web::typed(StatusCode::OK, "text/javascript; charset=utf-8", include_str!("../web/app.js"))
            }
            (&Method::GET, "/style.css") => {
                web::typed(StatusCode::OK, "text/css; charset=utf-8", include_str!("../web/style.css"))
            }
            (&Method::GET, "/healthz") => web::text(StatusCode::OK, "ok\n"),
            (&Method::GET, "/api/state") => {
                let since = call.query("since").and_then(|text| text.parse().ok()).unwrap_or(0);
                web::json(&self.state().json(since))
            }
            (&Method::GET, "/api/faults") => {
                web::json(&FAULTS.iter().map(Fault::json).collect::<Vec<_>>().into())
            }
            (&Method::GET, "/metrics") => web::typed(
                StatusCode::OK,
                "text/plain; version=0.0.4; charset=utf-8",
                metrics::text(&self.state()),
            ),
            (&Method::GET, path) if path.starts_with("/metrics/") => self.passed_on(path).await,
            (&Method::POST, _) if !call.headers.contains_key(ORDER_HEADER) => {
                web::text(StatusCode::FORBIDDEN, "an order needs the header x-prequal-demo\n")
            }
            (&Method::POST, "/api/fault") => self.switch_on(call).await,
            (&Method::POST, "/api/baseline") => self.choose_baseline(call).await,
            (&Method::POST, "/api/orders") => {
                let mut state = self.state();
                state.controller = Some(Instant::now());
                web::json(&state.orders.drain(..).collect::<Vec<_>>().into())
            }
            (&Method::POST, "/api/failed") => self.failed(call),
            _ => web::text(StatusCode::NOT_FOUND, "not found\n"),
        }
    }

    /// Passes on another program's `/metrics`, for a Prometheus on the host that cannot reach the containers.
    async fn passed_on(&self, path: &str) -> Response<Full<Bytes>> {
        let url = match path.split('/').skip(2).collect::<Vec<_>>().as_slice() {
            ["envoy", side] if load::SIDES.contains(side) => {
                format!("http://envoy-{side}:{}/stats/prometheus", collect::ENVOY_ADMIN)
            }
            ["replica", number]
                if number.parse().is_ok_and(|n: u16| (1..=self.args.replicas).contains(&n)) =>
            {
                format!("http://replica-{number}:{}/metrics", collect::AGENT_ADMIN)
            }
            _ => return web::text(StatusCode::NOT_FOUND, "/metrics/envoy/SIDE or /metrics/replica/NUMBER\n"),
        };
        match self.client.get(&url, TIMEOUT).await {
            Ok(answer) => web::typed(answer.status, "text/plain; version=0.0.4; charset=utf-8", answer.body),
            Err(error) => web::text(StatusCode::BAD_GATEWAY, format!("{error:#}\n")),
        }
    }

    /// `POST /api/fault?name=slow[&replica=3][&seconds=20][&by=host]`; with `by=host` the caller can act on containers
    /// itself.
    async fn switch_on(&self, call: &Call) -> Response<Full<Bytes>> {
        let order = match self.checked(call) {
            Ok(order) => order,
            Err(why) => return web::text(StatusCode::BAD_REQUEST, why + "\n"),
        };
        let caller_acts = call.query("by") == Some("host");
        if order.fault.by == By::Host && !caller_acts && !self.state().controlled(CONTROLLER) {
            let why = "this fault needs the container engine, which no container may use: keep \
                       `cargo xtask compose` running on the host, or type `cargo xtask fault` there\n";
            return web::text(StatusCode::SERVICE_UNAVAILABLE, why);
        }
        if order.fault.by == By::Page
            && let Err(error) = self.act(&order).await
        {
            return web::text(StatusCode::BAD_GATEWAY, format!("{error:#}\n"));
        }
        let mut state = self.state();
        let id = state.begin(&order);
        let reply = json!({
            "id": id,
            "name": order.fault.name,
            "by": if order.fault.by == By::Host { "host" } else { "page" },
            "replica": order.replica,
            "seconds": order.seconds,
        });
        if order.fault.by == By::Host && !caller_acts {
            state.orders.push(reply.clone());
        }
        web::json(&reply)
    }

    fn checked(&self, call: &Call) -> Result<Active, String> {
        let name = call.query("name").unwrap_or_default();
        let fault = Fault::named(name).ok_or_else(|| {
            let names: Vec<&str> = FAULTS.iter().map(|fault| fault.name).collect();
            format!("`name` must be one of {}", names.join(", "))
        })?;
        let seconds = match call.query("seconds") {
            _ if fault.seconds == 0 => 0,
            None => fault.seconds,
            Some(text) => text
                .parse()
                .ok()
                .filter(|seconds| (1..=MAX_SECONDS).contains(seconds))
                .ok_or_else(|| format!("`seconds` must be 1 to {MAX_SECONDS}"))?,
        };
        let spare = self.args.replicas;
        let asked = call.query("replica").map(|text| text.parse::<u16>().unwrap_or(0));
        let replica = match fault.target {
            Target::Only if fault.name == "endpoint-add" => Some(spare),
            Target::Only => None,
            Target::Replica(usual) => {
                let number = asked.unwrap_or(usual);
                if !(1..=spare).contains(&number) {
                    return Err(format!("`replica` must be 1 to {spare}"));
                }
                Some(number)
            }
            Target::Neighboured(usual) => {
                let number = asked.unwrap_or(usual);
                if !self.args.antagonists.contains(&number) {
                    let known: Vec<String> = self.args.antagonists.iter().map(u16::to_string).collect();
                    return Err(format!("`replica` must be one with an antagonist: {}", known.join(", ")));
                }
                Some(number)
            }
        };
        Ok(Active { id: 0, fault, replica, seconds, begun: Instant::now() })
    }

    /// Sends the order to the program concerned.
    async fn act(&self, order: &Active) -> Result<()> {
        let (seconds, replica) = (order.seconds, order.replica.unwrap_or_default());
        let service = format!("http://replica-{replica}:{ADMIN_PORT}");
        let url = match order.fault.name {
            "slow" => format!("{service}/fault/slow?factor={SLOW_FACTOR}&seconds={seconds}"),
            "sinkhole" => format!("{service}/fault/sinkhole?share={SINKHOLE_SHARE}&seconds={seconds}"),
            "hang" => format!("{service}/fault/hang?seconds={seconds}"),
            "antagonist" => {
                format!("http://antagonist-{replica}:{}/burn?seconds={seconds}", antagonist::PORT)
            }
            "crash" => {
                self.client.get(&format!("{service}/healthz"), TIMEOUT).await?;
                // The service exits without answering.
                let _ = self.client.post(&format!("{service}/fault/crash"), TIMEOUT).await;
                return Ok(());
            }
            "envoy-restart" => {
                format!("http://envoy-prequal:{}/quitquitquit", collect::ENVOY_ADMIN)
            }
            "endpoint-remove" | "endpoint-add" => {
                let end = Instant::now() + Duration::from_secs(seconds);
                let mut state = self.state();
                if order.fault.name == "endpoint-add" {
                    state.endpoints.bring_in(end);
                } else {
                    state.endpoints.take_out(replica, end);
                }
                return state.endpoints.write();
            }
            other => anyhow::bail!("`{other}` is not a fault that the page carries out"),
        };
        let answer = self.client.post(&url, TIMEOUT).await?;
        anyhow::ensure!(answer.status.is_success(), "{url} answered {}", answer.status);
        Ok(())
    }

    /// `POST /api/baseline?policy=round_robin`. The other Envoy has both policies configured; a runtime key selects
    /// one.
    async fn choose_baseline(&self, call: &Call) -> Response<Full<Bytes>> {
        let policy = call.query("policy").unwrap_or_default();
        if !BASELINES.contains(&policy) {
            return web::text(
                StatusCode::BAD_REQUEST,
                format!("`policy` must be one of {}\n", BASELINES.join(", ")),
            );
        }
        let share = if policy == "round_robin" { 100 } else { 0 };
        let url = format!(
            "http://envoy-baseline:{}/runtime_modify?baseline.round_robin={share}",
            collect::ENVOY_ADMIN
        );
        match self.client.post(&url, TIMEOUT).await {
            Ok(answer) if answer.status.is_success() => {
                policy.clone_into(&mut self.state().baseline);
                web::json(&json!({"policy": policy}))
            }
            Ok(answer) => web::text(StatusCode::BAD_GATEWAY, format!("Envoy answered {}\n", answer.status)),
            Err(error) => web::text(StatusCode::BAD_GATEWAY, format!("{error:#}\n")),
        }
    }

    /// `POST /api/failed?id=7` with the reason as the body: the host could not carry out an order that it fetched.
    fn failed(&self, call: &Call) -> Response<Full<Bytes>> {
        let id = call.query("id").and_then(|text| text.parse().ok()).unwrap_or(0);
        let why = String::from_utf8_lossy(&call.body[..call.body.len().min(300)]).into_owned();
        self.state().failed(id, &why);
        web::json(&Value::Null)
    }
}

/// The policies that the other Envoy can use.
const BASELINES: [&str; 2] = ["least_request", "round_robin"];

/// Whether a `Host` header names this machine's loopback or the page's container. Other names indicate DNS rebinding.
fn of_this_machine(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    matches!(name, "localhost" | "127.0.0.1" | "[::1]" | "page")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> Arc<Page> {
        let args = Args {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            replicas: 9,
            antagonists: vec![7, 8],
            endpoints: PathBuf::from("unused"),
        };
        let endpoints = Endpoints::new(args.replicas, args.endpoints.clone());
        Arc::new(Page { args, client: Client::new(), state: Mutex::new(State::new(endpoints)) })
    }

    fn post(path: &str, query: &str, headers: &[(&'static str, &str)]) -> Call {
        let mut map = http::HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, value.parse().unwrap());
        }
        let (path, query) = (path.to_owned(), query.to_owned());
        Call { method: Method::POST, path, query, headers: map, body: Bytes::new() }
    }

    #[tokio::test]
    async fn orders_come_only_from_this_machine_and_need_the_header() {
        let query = "name=loss&by=host";
        for (headers, status) in [
            (vec![("host", "localhost:8090")], 403),
            (vec![("host", "evil.example:8090"), (ORDER_HEADER, "1")], 421),
            (vec![(ORDER_HEADER, "1")], 421),
            (vec![("host", "127.0.0.1:8090"), (ORDER_HEADER, "1")], 200),
        ] {
            let answer = page().answer(&post("/api/fault", query, &headers)).await;
            assert_eq!(answer.status(), status, "{headers:?}");
        }
    }

    #[tokio::test]
    async fn a_fault_that_needs_the_engine_waits_for_the_host() {
        let headers = [("host", "localhost"), (ORDER_HEADER, "1")];
        let page = page();
        let order = post("/api/fault", "name=agent-kill&replica=4&seconds=7", &headers);
        assert_eq!(page.clone().answer(&order).await.status(), 503, "no host can carry it out");
        assert_eq!(page.clone().answer(&post("/api/orders", "", &headers)).await.status(), 200);
        assert_eq!(page.clone().answer(&order).await.status(), 200);
        let orders = std::mem::take(&mut page.state().orders);
        assert_eq!(orders.len(), 1);
        assert_eq!((&orders[0]["name"], &orders[0]["replica"]), (&json!("agent-kill"), &json!(4)));
    }

    #[test]
    fn bad_orders_name_the_field_and_its_range() {
        for (query, says) in [
            ("name=flood", "`name` must be one of slow"),
            ("name=slow&replica=10", "1 to 9"),
            ("name=slow&replica=x", "1 to 9"),
            ("name=slow&seconds=0", "1 to 600"),
            ("name=antagonist&replica=1", "7, 8"),
        ] {
            let said = page().checked(&post("/api/fault", query, &[])).err().unwrap_or_default();
            assert!(said.contains(says), "{query}: {said}");
        }
    }
}
