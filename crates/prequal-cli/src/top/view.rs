//! The change between two readings, and its text.

use std::fmt::Write as _;

use super::scrape::{HostStatus, Scrape};

/// One serving cluster of one Envoy.
#[derive(Clone, Debug)]
pub(super) struct View {
    pub(super) envoy: String,
    /// Name as the filter writes it into its statistics: every character except letters, digits and dashes is `_`.
    pub(super) cluster: String,
    /// Choices per second by branch, in the order of [`BRANCHES`].
    pub(super) picks: [f64; 7],
    pub(super) sent: f64,
    used: f64,
    failed: f64,
    undispatched: f64,
    /// Current values of gauges: entries in the pool, θ, known replicas, ejected replicas.
    pub(super) pool: u64,
    theta: u64,
    pub(super) members: u64,
    pub(super) ejected: u64,
    /// Whether more than half of the replicas would be ejected, or have recently failed at least half of their
    /// requests.
    pub(super) panic: bool,
    /// Totals since Envoy started, and changes in the interval, in the order of [`REPLICA_EVENTS`].
    replica_events: [(u64, u64); 4],
    /// The same, in the order of [`FILTER_EVENTS`].
    filter_events: [(u64, u64); 2],
    reloads: (u64, u64),
    pub(super) replicas: Vec<Replica>,
}

/// One replica of the cluster.
#[derive(Clone, Debug)]
pub(super) struct Replica {
    pub(super) address: String,
    /// Number of this Envoy's requests in flight now.
    pub(super) active: u64,
    pub(super) success: f64,
    pub(super) errors: f64,
    /// Share of the requests that ended in the interval, 0 to 1.
    pub(super) share: f64,
    /// Reasons why Envoy does not use the replica; empty if there are none.
    pub(super) trouble: String,
}

/// Values of `branch` in `prequal_picks_total`.
pub(super) const BRANCHES: [&str; 7] = ["cold", "hot", "sync", "scored", "trial", "agentless", "fallback"];

/// A rare event: its displayed name, and its counter.
type Event = (&'static str, &'static str);

/// Events that affect replicas.
const REPLICA_EVENTS: [Event; 4] = [
    ("diverted", "diverted_total"),
    ("ejections", "ejections_total"),
    ("trials", "trials_total"),
    ("returned", "returned_total"),
];

/// Events that affect the filter itself.
const FILTER_EVENTS: [Event; 2] =
    [("writes given up", "cas_giveups_total"), ("blobs replaced", "blob_replaced_total")];

impl View {
    /// Returns all clusters that the filter balances, by name.
    pub(super) fn between(envoy: &str, before: &Scrape, now: &Scrape) -> Vec<Self> {
        let seconds = now.at.saturating_duration_since(before.at).as_secs_f64().max(1e-3);
        let mut clusters: Vec<&String> = now.samples.keys().map(|(_, cluster, _)| cluster).collect();
        clusters.sort_unstable();
        clusters.dedup();
        clusters.into_iter().map(|cluster| Self::of(envoy, cluster, before, now, seconds)).collect()
    }

    fn of(envoy: &str, cluster: &str, before: &Scrape, now: &Scrape, seconds: f64) -> Self {
        let total = |scrape: &Scrape, metric: &str, wanted: &dyn Fn(&str) -> bool| -> u64 {
            let of =
                |(name, of, kind): &(String, String, String)| name == metric && of == cluster && wanted(kind);
            scrape
                .samples
                .iter()
                .filter(|(key, _)| of(key))
                .map(|(_, value)| *value)
                .fold(0, u64::saturating_add)
        };
        let change = |metric: &str, wanted: &dyn Fn(&str) -> bool| {
            grown(total(before, metric, wanted), total(now, metric, wanted))
        };
        let rate = |metric: &str, wanted: &dyn Fn(&str) -> bool| change(metric, wanted) as f64 / seconds;
        let any = |_: &str| true;
        let probes = |wanted: &dyn Fn(&str) -> bool| rate("probes_total", wanted);
        Self {
            envoy: envoy.to_owned(),
            cluster: cluster.to_owned(),
            picks: BRANCHES.map(|branch| rate("picks_total", &|kind| kind == branch)),
            sent: probes(&|kind| kind == "sent"),
            used: probes(&|kind| kind == "used"),
            failed: probes(&|kind| !matches!(kind, "sent" | "used" | "undispatched")),
            undispatched: probes(&|kind| kind == "undispatched"),
            pool: total(now, "pool_occupancy", &any),
            theta: total(now, "theta_rif", &any),
            members: total(now, "members", &any),
            ejected: total(now, "ejected", &any),
            panic: total(now, "panic", &any) > 0,
            replica_events: REPLICA_EVENTS
                .map(|(_, metric)| (total(now, metric, &any), change(metric, &any))),
            filter_events: FILTER_EVENTS.map(|(_, metric)| (total(now, metric, &any), change(metric, &any))),
            reloads: (now.reloads, grown(before.reloads, now.reloads)),
            replicas: replicas(cluster, before, now, seconds),
        }
    }

    /// Returns the choices per second.
    pub(super) fn queries(&self) -> f64 {
        self.picks.iter().sum()
    }

    /// Returns the share of the choices that fell back to Envoy's own policy, 0 to 1.
    pub(super) fn fallback(&self) -> f64 {
        let picks = BRANCHES.iter().zip(self.picks).find(|(branch, _)| **branch == "fallback");
        part(picks.map_or(0.0, |(_, rate)| rate), self.queries())
    }

    /// Returns the probes per choice.
    pub(super) fn probes_per_query(&self) -> f64 {
        part(self.sent, self.queries())
    }

    /// Returns everything except the replicas, one topic per line.
    pub(super) fn lines(&self) -> Vec<String> {
        let branches: Vec<String> =
            BRANCHES.iter().zip(self.picks).map(|(branch, rate)| format!("{branch} {rate:.1}")).collect();
        let event = |name: &str, (total, new): (u64, u64)| format!("{name} {total} (+{new})");
        let events = |names: &[Event], counts: &[(u64, u64)]| -> String {
            let each = names.iter().zip(counts).map(|((name, _), count)| event(name, *count));
            each.collect::<Vec<_>>().join(", ")
        };
        vec![
            format!("picks/s      {:.1}: {}", self.queries(), branches.join(", ")),
            format!(
                "probes/s     {:.1}: used {:.1}, failed {:.1}; unsent {:.1}; per query {:.2}",
                self.sent,
                self.used,
                self.failed,
                self.undispatched,
                self.probes_per_query()
            ),
            format!(
                "now          pool {}, theta {}, members {}, ejected {}{}",
                self.pool,
                self.theta,
                self.members,
                self.ejected,
                if self.panic { ": PANIC, most replicas fail" } else { "" }
            ),
            format!("since start  {}", events(&REPLICA_EVENTS, &self.replica_events)),
            format!(
                "internal     {}, {}",
                events(&FILTER_EVENTS, &self.filter_events),
                event("vm reloads", self.reloads)
            ),
        ]
    }

    /// Returns the whole view as plain text.
    pub(super) fn text(&self) -> String {
        let mut text = format!("{} {}\n", self.envoy, self.cluster);
        for line in self.lines() {
            let _ = writeln!(text, "  {line}");
        }
        let width = self.replicas.iter().map(|replica| replica.address.len()).max().unwrap_or(0).max(7);
        let _ = writeln!(text, "  {:width$}  active  success/s  errors/s   share", "replica");
        for Replica { address, active, success, errors, share, trouble } in &self.replicas {
            let percent = share * 100.0;
            let line = format!(
                "  {address:width$}  {active:6}  {success:9.1}  {errors:8.1}  {percent:5.1}%  {trouble}"
            );
            let _ = writeln!(text, "{}", line.trim_end());
        }
        text
    }
}

fn replicas(cluster: &str, before: &Scrape, now: &Scrape, seconds: f64) -> Vec<Replica> {
    let ours = |scrape: &'_ Scrape| -> Vec<HostStatus> {
        scrape.hosts.iter().filter(|host| prequal_stats::label(&host.cluster) == cluster).cloned().collect()
    };
    let earlier = ours(before);
    let mut list: Vec<Replica> = ours(now)
        .into_iter()
        .map(|host| {
            let then = earlier.iter().find(|then| then.address == host.address);
            let since =
                |value: fn(&HostStatus) -> u64| grown(then.map_or(0, value), value(&host)) as f64 / seconds;
            Replica {
                success: since(|host| host.success),
                errors: since(|host| host.errors),
                active: host.active,
                share: 0.0,
                address: host.address,
                trouble: host.trouble,
            }
        })
        .collect();
    let all: f64 = list.iter().map(|replica| replica.success + replica.errors).sum();
    for replica in &mut list {
        replica.share = part(replica.success + replica.errors, all);
    }
    list.sort_by(|a, b| a.address.cmp(&b.address));
    list
}

/// Returns the growth of a counter. If the counter is smaller than before, Envoy was restarted and began with 0.
fn grown(before: u64, now: u64) -> u64 {
    now.checked_sub(before).unwrap_or(now)
}

fn part(of: f64, all: f64) -> f64 {
    if all > 0.0 { of / all } else { 0.0 }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    /// Returns a reading of an Envoy with two replicas after `requests` requests, `seconds` seconds after `start`.
    pub(in crate::top) fn scrape(start: Instant, seconds: u64, requests: u64) -> Scrape {
        let samples = [
            ("picks_total", "cold", requests),
            ("picks_total", "fallback", requests / 4),
            ("probes_total", "sent", requests / 2),
            ("probes_total", "used", requests / 2 - 1),
            ("probes_total", "timeout", 1),
            ("probes_total", "rejected_status", 1),
            ("probes_total", "undispatched", 2),
            ("pool_occupancy", "", 2),
            ("members", "", 2),
            ("ejections_total", "unresponsive", 1),
            ("ejections_total", "failing", 2),
        ];
        let host = |address: &str, success| HostStatus {
            cluster: "my.cluster".into(),
            address: address.into(),
            success,
            active: 3,
            ..HostStatus::default()
        };
        Scrape {
            at: start + Duration::from_secs(seconds),
            samples: samples
                .map(|(name, kind, value)| ((name.into(), "my_cluster".into(), kind.into()), value))
                .into_iter()
                .collect(),
            reloads: 0,
            hosts: vec![
                host("10.0.0.2:80", requests),
                host("10.0.0.1:80", requests / 4),
                HostStatus { cluster: "other".into(), ..HostStatus::default() },
            ],
        }
    }

    #[test]
    fn rates_are_of_the_interval_and_totals_since_the_start() {
        let start = Instant::now();
        let views = View::between("http://e", &scrape(start, 0, 400), &scrape(start, 2, 800));
        assert_eq!(views.len(), 1);
        let text = views[0].text();
        assert_eq!(
            text,
            "http://e my_cluster\n\
             \x20 picks/s      250.0: cold 200.0, hot 0.0, sync 0.0, scored 0.0, trial 0.0, agentless 0.0, fallback 50.0\n\
             \x20 probes/s     100.0: used 100.0, failed 0.0; unsent 0.0; per query 0.40\n\
             \x20 now          pool 2, theta 0, members 2, ejected 0\n\
             \x20 since start  diverted 0 (+0), ejections 3 (+0), trials 0 (+0), returned 0 (+0)\n\
             \x20 internal     writes given up 0 (+0), blobs replaced 0 (+0), vm reloads 0 (+0)\n\
             \x20 replica      active  success/s  errors/s   share\n\
             \x20 10.0.0.1:80       3       50.0       0.0   20.0%\n\
             \x20 10.0.0.2:80       3      200.0       0.0   80.0%\n"
        );
    }

    #[test]
    fn panic_is_shown() {
        let start = Instant::now();
        let mut now = scrape(start, 2, 800);
        now.samples.insert(("panic".into(), "my_cluster".into(), String::new()), 1);
        let view = &View::between("e", &scrape(start, 0, 400), &now)[0];
        assert!(view.text().contains("ejected 0: PANIC, most replicas fail\n"), "{}", view.text());
    }

    #[test]
    fn a_restarted_envoy_begins_with_zero() {
        let start = Instant::now();
        let view = &View::between("e", &scrape(start, 0, 800), &scrape(start, 1, 40))[0];
        assert_eq!(view.picks[0], 40.0);
        assert_eq!((view.fallback(), view.probes_per_query()), (0.2, 0.4));
    }
}
