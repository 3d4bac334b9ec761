//! The filter's statistics, read back from the text of Envoy's `/stats`.
//!
//! The filter (`crates/prequal-filter/src/metrics.rs`) puts labels into names, because the metrics of a wasm module
//! have no labels: `wasmcustom.prequal_picks_total.cluster=replicas.branch=cold: 3`. The demo's page, `prequal top`
//! and the tests use this crate to read them. It only parses text; its users decide how the text is fetched, and how
//! often.

/// Path to request from the admin interface. The answer has only the statistics whose names contain `prequal_`.
pub const PATH: &str = "/stats?filter=prequal_";

/// Prefixes that Envoy gives to the statistics of a WebAssembly module and of a dynamic module.
const PREFIXES: [&str; 2] = ["wasmcustom.", "dynamicmodulescustom."];

/// One counter or gauge of the filter.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Sample<'a> {
    /// Name without the prefix `prequal_`, such as `picks_total`.
    pub metric: &'a str,
    /// Serving cluster, spelled as in the filter's statistics: see [`label`].
    pub cluster: &'a str,
    /// Value of the second label (branch, result, class, end or reason); empty if there is none.
    pub kind: &'a str,
    /// Value of the counter or gauge.
    pub value: u64,
}

/// Returns the counters and gauges of clusters in a text in the format of `/stats`. All other lines are skipped,
/// including histograms and the metrics of the inbound role.
pub fn samples(text: &str) -> impl Iterator<Item = Sample<'_>> {
    text.lines().filter_map(sample)
}

fn sample(line: &str) -> Option<Sample<'_>> {
    let (name, value) = line.rsplit_once(": ")?;
    let name = PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name);
    let (metric, labels) = name.strip_prefix("prequal_")?.split_once(".cluster=")?;
    let (cluster, kind) = match labels.split_once('.') {
        Some((cluster, second)) => (cluster, second.split_once('=')?.1),
        None => (labels, ""),
    };
    Some(Sample { metric, cluster, kind, value: value.trim().parse().ok()? })
}

/// Returns the name of a cluster as the filter writes it into a label. A dot would end the label's value.
pub fn label(cluster: &str) -> String {
    cluster.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filters_statistics_are_read_and_nothing_else() {
        let text = "\
            cluster.replicas.upstream_rq_total: 7\n\
            wasmcustom.prequal_picks_total.cluster=replicas.branch=cold: 3\n\
            wasmcustom.prequal_theta_rif.cluster=a_b: 18446744073709551615\n\
            dynamicmodulescustom.prequal_probes_total.cluster=x.result=used: 1\n\
            wasmcustom.prequal_sync_wait_us.cluster=replicas: P0(nan,0) P25(nan,0)\n\
            wasmcustom.prequal_picks_total.cluster=x.broken: 1\n\
            prequal_members.cluster=x: -1\nprequal_: \n: \n";
        let sample = |metric, cluster, kind, value| Sample { metric, cluster, kind, value };
        assert_eq!(
            samples(text).collect::<Vec<_>>(),
            [
                sample("picks_total", "replicas", "cold", 3),
                sample("theta_rif", "a_b", "", u64::MAX),
                sample("probes_total", "x", "used", 1),
            ]
        );
    }

    #[test]
    fn a_label_has_no_dots() {
        assert_eq!(label("outbound|80||my-app.svc"), "outbound_80__my-app_svc");
    }
}
