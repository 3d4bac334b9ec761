//! What replicas say of themselves: one reading of one agent's `/metrics`.

use std::fmt::Write as _;

use anyhow::{Context as _, Result};

use super::scrape::Admin;

/// One replica, by its agent.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Agent {
    /// Requests in flight.
    pub(super) rif: f64,
    /// What a request takes while none waits, milliseconds; `None` until one was served.
    pub(super) base_ms: Option<f64>,
    /// Requests in flight beyond which more only wait; `None` until one was served.
    pub(super) knee: Option<f64>,
    /// It has shown no saturation: the knee may be higher.
    pub(super) open: bool,
    /// Share of recent requests that it failed, 0 to 1.
    pub(super) failing: f64,
}

/// What the columns of [`Agent::cells`] are.
pub(super) const HEAD: [&str; 4] = ["   rif", "  base ms", "saturates at", "failing"];

/// # Errors
/// If nobody answers, or it is no agent.
pub(super) fn scrape(admin: &Admin) -> Result<Agent> {
    let page = admin.get("/metrics", "an agent's admin")?;
    Agent::read(&page)
        .with_context(|| format!("{}: this is not an agent's admin: no `prequal_agent_rif`", admin.url))
}

impl Agent {
    fn read(page: &str) -> Option<Self> {
        let value = |name: &str| -> Option<f64> {
            page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
        };
        Some(Self {
            rif: value("prequal_agent_rif")?,
            base_ms: value("prequal_agent_base_latency_seconds").map(|seconds| seconds * 1e3),
            knee: value("prequal_agent_knee"),
            open: value("prequal_agent_knee_open") == Some(1.0),
            failing: value("prequal_agent_failing_ratio").unwrap_or(0.0),
        })
    }

    /// As wide as [`HEAD`].
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

/// All of them as plain text.
pub(super) fn text(agents: &[(String, Agent)]) -> String {
    let width = agents.iter().map(|(url, _)| url.len()).max().unwrap_or(0).max(5);
    let mut text = format!("{:width$}  {}\n", "agent", HEAD.join("  "));
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
        Agent::read(PAGE).unwrap()
    }

    #[test]
    fn a_page_is_read_and_written_down() {
        let idle = Agent::read("prequal_agent_rif 0\nprequal_agent_rifle 9\n").unwrap();
        let text = text(&[("http://10.0.0.1:9902".into(), agent()), ("http://b:1".into(), idle)]);
        assert_eq!(
            text,
            "agent                    rif    base ms  saturates at  failing\n\
             http://10.0.0.1:9902       3       40.1            4+    25.0%\n\
             http://b:1                 0          -             -     0.0%\n"
        );
        assert_eq!(Agent::read("up 1\n"), None);
    }
}
