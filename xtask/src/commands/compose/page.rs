//! A client for the live page's API, with only the HTTP that it needs.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use crate::commands::compose::engine::Project;
use crate::progress;

/// A page that is up.
#[derive(Clone, Debug)]
pub(crate) struct Page {
    pub(crate) address: SocketAddr,
}

/// A fault that was switched on.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    pub(crate) id: u64,
    pub(crate) name: String,
    /// 0 if the fault targets no replica.
    pub(crate) replica: u64,
    pub(crate) seconds: u64,
    /// Whether the host carries it out.
    pub(crate) by_host: bool,
}

impl Page {
    pub(crate) fn of(project: &Project) -> Result<Self> {
        let address = project.port("page", 8090)?;
        Ok(Self { address: address.parse().with_context(|| format!("not an address: {address}"))? })
    }

    /// Waits until every replica answers and both sides have a full window.
    pub(crate) fn wait_until_ready(&self, limit: Duration) -> Result<()> {
        let started = Instant::now();
        progress::silently("waiting for the fleet", || {
            loop {
                let why = match self.state(0) {
                    Err(error) => format!("{error:#}"),
                    Ok(state) => match not_ready(&state) {
                        None => return Ok(()),
                        Some(why) => why,
                    },
                };
                ensure!(started.elapsed() < limit, "not ready after {} s: {why}", limit.as_secs());
                std::thread::sleep(Duration::from_millis(500));
            }
        })
    }

    /// The page's whole state, with the windows that end after the second `since`.
    pub(crate) fn state(&self, since: u64) -> Result<Value> {
        self.call("GET", &format!("/api/state?since={since}"), "")
    }

    /// The list of faults.
    pub(crate) fn faults(&self) -> Result<Value> {
        self.call("GET", "/api/faults", "")
    }

    /// Switches a fault on; if the host must carry it out, that is left to the caller.
    pub(crate) fn switch_on(&self, name: &str, replica: Option<u64>, seconds: Option<u64>) -> Result<Order> {
        let mut path = format!("/api/fault?by=host&name={name}");
        if let Some(replica) = replica {
            path += &format!("&replica={replica}");
        }
        if let Some(seconds) = seconds {
            path += &format!("&seconds={seconds}");
        }
        order(&self.call("POST", &path, "")?).context("the page did not name the fault")
    }

    /// Orders given on the page that the page cannot carry out itself.
    pub(crate) fn orders(&self) -> Result<Vec<Order>> {
        let orders = self.call("POST", "/api/orders", "")?;
        Ok(orders.as_array().into_iter().flatten().filter_map(order).collect())
    }

    /// Reports to the page that an order could not be carried out.
    pub(crate) fn failed(&self, id: u64, why: &str) -> Result<()> {
        self.call("POST", &format!("/api/failed?id={id}"), why).map(drop)
    }

    fn call(&self, method: &str, path: &str, body: &str) -> Result<Value> {
        let mut stream = TcpStream::connect_timeout(&self.address, TIMEOUT)
            .with_context(|| format!("no page at {}: `cargo xtask compose` starts it", self.address))?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nhost: {}\r\nx-prequal-demo: xtask\r\nconnection: close\r\n\
             content-length: {}\r\n\r\n{body}",
            self.address,
            body.len()
        )?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).with_context(|| format!("{path}: incomplete answer"))?;
        let answer = String::from_utf8(answer).context("the page's answer is not text")?;
        let (head, body) = answer.split_once("\r\n\r\n").context("the page's answer is not HTTP")?;
        if !head.starts_with("HTTP/1.1 200") {
            bail!("{}", if body.trim().is_empty() { head } else { body.trim() });
        }
        Ok(serde_json::from_str(body)?)
    }
}

fn not_ready(state: &Value) -> Option<String> {
    let replicas = state["replicas"].as_array().into_iter().flatten();
    let down: Vec<String> = replicas
        .filter(|replica| replica["up"] != true)
        .map(|replica| replica["number"].to_string())
        .collect();
    if !down.is_empty() {
        return Some(format!("agents that do not answer: {}", down.join(", ")));
    }
    ["prequal", "baseline"].into_iter().find_map(|side| {
        let newest = state["sides"][side]["windows"].as_array().and_then(|windows| windows.last());
        let samples = newest.and_then(|window| window["samples"].as_u64()).unwrap_or(0);
        let failed = newest.and_then(|window| window["failed"].as_u64()).unwrap_or(0);
        let wanted = state["rate"].as_u64().unwrap_or(0).max(1) * 4;
        (samples < wanted || failed > 0)
            .then(|| format!("{side}: {samples} requests in the last 5 s, {failed} of them failed"))
    })
}

fn order(order: &Value) -> Option<Order> {
    Some(Order {
        id: order["id"].as_u64()?,
        name: order["name"].as_str()?.to_owned(),
        replica: order["replica"].as_u64().unwrap_or(0),
        seconds: order["seconds"].as_u64()?,
        by_host: order["by"] == "host",
    })
}

const TIMEOUT: Duration = Duration::from_secs(10);
