//! The replicas of an agent: one reading of its `/metrics`. An agent that serves several replicas (`--replica`)
//! distinguishes them by the label `replica`.

use std::fmt::Write as _;

use anyhow::{Result, ensure};

use super::scrape::Admin;

/// One replica, as its agent reports it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Agent {
    /// Requests in flight.
    pub(super) rif: f64,
    /// Latency of a request while no request waits, milliseconds; `None` until the replica has served one.
    pub(super) base_ms: Option<f64>,
    /// Number of requests in flight beyond which further ones only wait; `None` until the replica has served a request.
    pub(super) knee: Option<f64>,
    /// Whether the replica has shown no saturation: the knee may be higher.
    pub(super) open: bool,
    /// Share of recent requests that the replica failed, 0 to 1.
    pub(super) failing: f64,
}

/// The replicas of one agent, by name.
pub(super) type Replicas = Vec<(String, Agent)>;

/// Headings of the columns of [`Agent::cells`].
pub(super) const HEADINGS: [&str; 4] = ["   rif", "  base ms", "saturates at", "failing"];

/// Returns the replicas of one agent, each with its name: the address of the admin port, followed by the replica's
/// label, if any.
///
/// # Errors
/// If the admin port does not answer, or is not an agent's.
pub(super) fn scrape(admin: &Admin) -> Result<Replicas> {
    let page = admin.get("/metrics", "an agent's admin interface")?;
    let replicas = Agent::read(&page);
    ensure!(
        !replicas.is_empty(),
        "{}: this is not an agent's admin interface: no `prequal_agent_rif`",
        admin.url
    );
    let named = |(replica, agent)| match replica {
        "" => (admin.url.clone(), agent),
        replica => (format!("{} {replica}", admin.url), agent),
    };
    Ok(replicas.into_iter().map(named).collect())
}

impl Agent {
    /// Reads every replica of a page, with its label. The label is empty for an agent with a single replica.
    fn read(page: &str) -> Vec<(&str, Self)> {
        let all = |name| page.lines().filter_map(move |line| sample(line, name));
        let replicas = all("prequal_agent_rif").map(|(replica, rif)| {
            let value = |name| all(name).find(|(of, _)| *of == replica).map(|(_, value)| value);
            let agent = Self {
                rif,
                base_ms: value("prequal_agent_base_latency_seconds").map(|seconds| seconds * 1e3),
                knee: value("prequal_agent_knee"),
                open: value("prequal_agent_knee_open") == Some(1.0),
                failing: value("prequal_agent_failing_ratio").unwrap_or(0.0),
            };
            (replica, agent)
        });
        replicas.collect()
    }

    /// Returns the cells, as wide as [`HEADINGS`].
    pub(super) fn cells(&self) -> [String; 4] {
        let known = |value: Option<f64>, digits: usize| {
            value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
        };
        [
            format!("{:6.0}", self.rif),
            format!("{:>9}", known(self.base_ms, 1)),
            format!("{:>12}", known(self.knee, 0) + if self.open { "+" } else { "" }),
            format!("{:6.1}%", self.failing * 100.0),
        ]
    }
}

/// Returns the label `replica` and the value of a sample that has no other label.
fn sample<'a>(line: &'a str, name: &str) -> Option<(&'a str, f64)> {
    let rest = line.strip_prefix(name)?;
    let (replica, value) = match rest.strip_prefix("{replica=\"") {
        Some(labelled) => labelled.rsplit_once("\"} ")?,
        None => ("", rest.strip_prefix(' ')?),
    };
    Some((replica, value.parse().ok()?))
}

/// Returns all agents as plain text.
pub(super) fn text(agents: &[(String, Agent)]) -> String {
    let width = agents.iter().map(|(url, _)| url.len()).max().unwrap_or(0).max(5);
    let mut text = format!("{:width$}  {}\n", "agent", HEADINGS.join("  "));
    for (url, agent) in agents {
        let _ = writeln!(text, "{url:width$}  {}", agent.cells().join("  "));
    }
    text
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const PAGE: &str = "# HELP prequal_agent_rif Requests in flight.\n\
        prequal_agent_rif 3\nprequal_agent_base_latency_seconds 0.0401\nprequal_agent_knee 4\nprequal_agent_knee_open 1\n\
        prequal_agent_failing_ratio 0.25\nprequal_agent_requests_total{class=\"success\"} 7\n";

    pub(in crate::top) fn agent() -> Agent {
        Agent::read(PAGE).remove(0).1
    }

    #[test]
    fn a_page_is_read_and_shown() {
        let idle = Agent::read("prequal_agent_rif 0\nprequal_agent_rifle 9\n").remove(0).1;
        let text = text(&[("http://10.0.0.1:9902".into(), agent()), ("http://b:1".into(), idle)]);
        assert_eq!(
            text,
            "agent                    rif    base ms  saturates at  failing\n\
             http://10.0.0.1:9902       3       40.1            4+    25.0%\n\
             http://b:1                 0          -             -     0.0%\n"
        );
        assert_eq!(Agent::read("up 1\n"), []);
    }

    #[test]
    fn every_replica_of_a_page_is_read() {
        let page = "prequal_agent_rif{replica=\"127.0.0.1:81\"} 3\nprequal_agent_rif{replica=\"unix:/a b\"} 5\n\
            prequal_agent_knee{replica=\"unix:/a b\"} 4\nprequal_agent_failing_ratio{replica=\"127.0.0.1:81\"} 0.5\n";
        let read = Agent::read(page);
        let shown: Vec<_> =
            read.iter().map(|(replica, agent)| (*replica, agent.rif, agent.knee, agent.failing)).collect();
        assert_eq!(shown, [("127.0.0.1:81", 3.0, None, 0.5), ("unix:/a b", 5.0, Some(4.0), 0.0)]);
    }
}
