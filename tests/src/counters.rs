//! A snapshot of the filter's counters.

use std::collections::BTreeMap;

/// The filter's counters of one cluster: a snapshot.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Prequal {
    /// `prequal_picks_total` by branch.
    pub picks: BTreeMap<String, u64>,
    /// `prequal_probes_total` by result.
    pub probes: BTreeMap<String, u64>,
    /// `prequal_reports_total` by result.
    pub reports: BTreeMap<String, u64>,
    /// `prequal_outcomes_total` by class.
    pub outcomes: BTreeMap<String, u64>,
    /// `prequal_sync_waits_total` by ending.
    pub waits: BTreeMap<String, u64>,
    /// All other metrics of the cluster by name, with a label's value appended after a dot.
    pub other: BTreeMap<String, u64>,
}

impl Prequal {
    /// Reads the counters with the label `cluster` from a page of Envoy's statistics.
    pub(crate) fn read(page: &str, cluster: &str) -> Self {
        let mut found = Self::default();
        for sample in prequal_stats::samples(page).filter(|sample| sample.cluster == cluster) {
            let into = match (sample.metric, sample.kind) {
                (_, "") => &mut found.other,
                ("picks_total", _) => &mut found.picks,
                ("probes_total", _) => &mut found.probes,
                ("reports_total", _) => &mut found.reports,
                ("outcomes_total", _) => &mut found.outcomes,
                ("sync_waits_total", _) => &mut found.waits,
                (metric, kind) => {
                    found.other.insert(format!("prequal_{metric}.{kind}"), sample.value);
                    continue;
                }
            };
            let name = if sample.kind.is_empty() {
                format!("prequal_{}", sample.metric)
            } else {
                sample.kind.to_owned()
            };
            into.insert(name, sample.value);
        }
        found
    }

    /// Picks of one branch: `cold`, `hot`, `sync`, `scored`, `trial`, `agentless` or `fallback`.
    pub fn picks(&self, branch: &str) -> u64 {
        self.picks.get(branch).copied().unwrap_or(0)
    }

    /// Picks that named a replica, except picks of agentless replicas.
    pub fn steered(&self) -> u64 {
        ["cold", "hot", "sync", "scored", "trial"].map(|branch| self.picks(branch)).iter().sum()
    }

    /// Probes with one result.
    pub fn probes(&self, result: &str) -> u64 {
        self.probes.get(result).copied().unwrap_or(0)
    }

    /// Probes whose outcome is known: used, rejected for any reason, timed out, refused.
    pub fn probes_settled(&self) -> u64 {
        let settled = |result: &str| {
            matches!(result, "used" | "timeout" | "refused") || result.starts_with("rejected_")
        };
        self.probes.iter().filter(|(result, _)| settled(result)).map(|(_, count)| count).sum()
    }

    /// Counted picks minus counted ends of requests; negative if more ends were counted.
    pub fn requests_open(&self) -> i64 {
        difference(self.picks.values().sum(), self.outcomes.values().sum())
    }

    /// Probes sent minus probes whose result is known; negative if more results are known.
    pub fn probes_open(&self) -> i64 {
        difference(self.probes("sent"), self.probes_settled())
    }

    /// Probes rejected for any reason.
    pub fn probes_rejected(&self) -> u64 {
        self.probes.iter().filter(|(result, _)| result.starts_with("rejected_")).map(|(_, count)| count).sum()
    }

    /// Piggybacked reports with one result.
    pub fn reports(&self, result: &str) -> u64 {
        self.reports.get(result).copied().unwrap_or(0)
    }

    /// Requests that ended in one class: `answer`, `upstream_failure`, `client_abort` or `local`.
    pub fn outcomes(&self, class: &str) -> u64 {
        self.outcomes.get(class).copied().unwrap_or(0)
    }

    /// Waits of synchronous requests with one ending: `enough`, `all_ended`, `deadline`, `unasked` or `aborted`.
    pub fn waits(&self, ending: &str) -> u64 {
        self.waits.get(ending).copied().unwrap_or(0)
    }

    /// Any other metric, for instance `prequal_members`.
    pub fn other(&self, name: &str) -> u64 {
        self.other.get(name).copied().unwrap_or(0)
    }
}

fn difference(more: u64, less: u64) -> i64 {
    more.wrapping_sub(less).cast_signed()
}
