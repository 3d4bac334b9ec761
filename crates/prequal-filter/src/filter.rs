//! What the root and the streams of one worker share: settings, metrics, and news that wait for the next transaction.
//!
//! Reports wait here and are applied in the same read-modify-write as the next pick, so a request costs one
//! transaction on shared data (`docs/adr/0001-root-owned-probes.md`).

use std::cell::{Cell, RefCell};
use std::mem;

use prequal_core::config::{ClusterConfig, FilterConfig, Mode, Shim};
use prequal_core::endpoint::Endpoint;
use prequal_core::exceptions::flights::{Flight, Flights};
use prequal_core::exceptions::{Change, Event, ExceptionSettings, Exceptions, Trial};
use prequal_core::members::{Evidence, Members, Standing};
use prequal_core::pool::{Load, Pick, PoolState, ProbesDue, Ranking};
use prequal_core::report::LoadReport;
use prequal_core::sync::Answer;
use prequal_core::time::Micros;
use rand::SeedableRng;
use rand::rngs::SmallRng;

use crate::metrics::Metrics;
use crate::rule::RuleState;
use crate::steer::Choice;
use crate::store::Store;
use crate::sync::{Waits, route_name};

/// News that wait at most: under load the next pick takes them within a millisecond.
const MAX_PENDING: usize = 64;

/// A replica that Envoy did not use when asked to, or that failed, is left alone this long.
pub(crate) const BAR_MS: u32 = 1000;

/// One generation of the filter on one worker. A configuration update makes a new one beside it.
pub(crate) struct Filter {
    pub(crate) root_id: u32,
    pub(crate) shim: Shim,
    pub(crate) clusters: Vec<Cluster>,
    /// Set once a request went to a cluster that is not configured: from then on the cluster is looked up first.
    pub(crate) look_up_cluster: Cell<bool>,
    pub(crate) rng: RefCell<SmallRng>,
    pub(crate) waits: Waits,
}

/// One upstream cluster.
pub(crate) struct Cluster {
    pub(crate) config: ClusterConfig,
    pub(crate) metrics: Metrics,
    pub(crate) store: Store,
    pub(crate) rule: RuleState,
    pending: RefCell<Vec<News>>,
    /// This worker's requests in flight.
    flights: RefCell<Flights>,
    /// The exceptions table had something to look at in the last transaction.
    exceptions: Cell<bool>,
    /// Probes that picks have asked for and the root has not sent yet.
    pub(crate) probes_due: Cell<ProbesDue>,
}

/// What changes the pool.
#[derive(Clone, Copy, Debug)]
enum News {
    Report {
        at: Micros,
        replica: Endpoint,
        load: Load,
        failing: u16,
        standing: Standing,
    },
    /// What a request told of the health of its replica.
    Health {
        at: Micros,
        replica: Endpoint,
        event: Event,
    },
    /// A reply names a candidate.
    Introduce {
        at: Micros,
        replica: Endpoint,
    },
    Forget(Endpoint),
    Bar {
        at: Micros,
        replica: Endpoint,
    },
    Refused {
        at: Micros,
        replica: Endpoint,
    },
    Unbar(Endpoint),
    Members {
        at: Micros,
        count: u32,
        samples: u32,
    },
}

impl Filter {
    pub(crate) fn new(root_id: u32, root_name: &str, config: FilterConfig, now: Micros) -> Self {
        let clusters: Vec<Cluster> =
            config.clusters.into_iter().map(|cluster| Cluster::new(root_name, cluster, now)).collect();
        // Workers start within milliseconds of each other: time alone would give them one sequence.
        let seed = now.0 ^ (u64::from(root_id) << 48) ^ ((&raw const clusters as u64) << 20);
        Self {
            root_id,
            shim: config.shim,
            look_up_cluster: Cell::new(clusters.len() > 1),
            clusters,
            rng: RefCell::new(SmallRng::seed_from_u64(seed)),
            waits: Waits::default(),
        }
    }

    /// Whether the request that is the effective context waits for probes of its own.
    pub(crate) fn mode(&self, cluster: &Cluster) -> Mode {
        let choice = &cluster.config.choice;
        // The property is read only where a route can differ.
        let of_route = (!choice.route_modes.is_empty()).then(route_name).flatten();
        let of_route = of_route.and_then(|route| choice.route_modes.iter().find(|(name, _)| *name == route));
        of_route.map_or(choice.mode, |(_, mode)| *mode)
    }

    /// Chooses for one request of a cluster: among `answers` if it has waited for them, else from the pool.
    pub(crate) fn choose(&self, cluster: &Cluster, now: Micros, answers: &[Answer]) -> Choice {
        let rule = cluster.config.choice.rule;
        let mut rng = self.rng.borrow_mut();
        let mut choice = if rule.is_probe_free() {
            let pick = cluster.rule.pick_without_probes(cluster, now, &mut rng);
            Choice { pick, runner_up: None, flight: None }
        } else {
            cluster.find_silent(now);
            cluster.rule.ranked(rule, |ranking| self.choose_ranked(cluster, now, answers, ranking, &mut rng))
        };
        choice.flight = cluster.sent(now, &choice.pick);
        cluster.rule.sent(choice.pick.replica);
        cluster.metrics.picked(choice.pick.branch);
        if choice.pick.trial {
            cluster.metrics.trials.one();
        }
        choice
    }

    fn choose_ranked(
        &self,
        cluster: &Cluster,
        now: Micros,
        answers: &[Answer],
        ranking: Ranking<'_>,
        rng: &mut SmallRng,
    ) -> Choice {
        let settings = &cluster.config.pool;
        let (choice, _) = cluster.transact(rng, now, true, |pool, exceptions, rng| {
            let admitted: Vec<Answer>;
            let (answers, trial) = match exceptions {
                None => (answers, None),
                Some((table, trial)) => {
                    pool.exclude(table, now);
                    admitted =
                        answers.iter().filter(|answer| !table.is_out(answer.replica)).copied().collect();
                    (&admitted[..], trial)
                }
            };
            let pick = match trial {
                Some(trial) => pool.pick_trial(settings, trial, now),
                None if answers.is_empty() => pool.pick_by(settings, now, ranking, rng),
                None => pool.pick_among(settings, now, answers, ranking, rng),
            };
            let runner_up = match (self.shim, pick.replica) {
                (Shim::OverrideHost, Some(chosen)) => {
                    pool.runner_up(settings, now, chosen, answers, ranking, rng)
                }
                _ => None,
            };
            (Choice { pick, runner_up, flight: None }, true)
        });
        choice
    }

    /// Takes the waiting news into the pool, refreshes the gauges, and says which probes are due for lack of requests.
    ///
    /// Every VM ticks, the main thread's too: the compare-and-swap lets one of them take the idle probes.
    pub(crate) fn flush(&self, cluster: &Cluster, now: Micros) -> ProbesDue {
        let settings = &cluster.config.pool;
        let interval = cluster.config.probe.idle_interval_ms;
        let probe_free = cluster.config.choice.rule.is_probe_free();
        let waiting = !cluster.pending.borrow().is_empty();
        let mut rng = self.rng.borrow_mut();
        if !probe_free {
            cluster.find_silent(now);
        }
        let ((view, probes, out, panic), written) =
            cluster.transact(&mut rng, now, false, |pool, exceptions, _| {
                let watched = exceptions.is_some();
                let panic = exceptions.is_some_and(|(table, _)| table.panics());
                if let Some((table, _)) = exceptions {
                    pool.exclude(table, now);
                }
                let probes = if interval == 0 || probe_free {
                    ProbesDue::default()
                } else {
                    pool.idle_probes(settings, now, interval)
                };
                (
                    (pool.view(settings, now), probes, pool.out(), panic),
                    waiting || watched || !probes.is_empty(),
                )
            });
        cluster.metrics.occupancy.set(view.occupancy as u64);
        cluster.metrics.theta.set(u64::from(view.theta.unwrap_or(0)));
        cluster.metrics.members.set(u64::from(view.members));
        cluster.metrics.out.set(out.into());
        cluster.metrics.panic.set(panic.into());
        if written { probes } else { ProbesDue::default() }
    }
}

fn answer(members: &Members, replica: Endpoint, report: &LoadReport) -> Answer {
    Answer { replica, load: Load::from(report), standing: members.standing(replica) }
}

impl Cluster {
    fn new(root_name: &str, config: ClusterConfig, now: Micros) -> Self {
        let metrics = Metrics::define(&config.cluster);
        let store = Store::new(root_name, &config.cluster);
        store.seed();
        let cluster = Self {
            metrics,
            store,
            rule: RuleState::new(config.choice.rule),
            config,
            pending: RefCell::default(),
            flights: RefCell::default(),
            exceptions: Cell::new(false),
            probes_due: Cell::default(),
        };
        if !cluster.config.endpoints.is_empty() {
            let members = cluster.store.update_members(&cluster.metrics, |members| {
                let news =
                    cluster.config.endpoints.iter().map(|e| members.observe(*e, None, Evidence::Served, now));
                news.fold(false, |any, changed| any | changed)
            });
            cluster.push_members(now, &members);
        }
        cluster
    }

    /// A report that may speak for `replica`, whose placement is `standing`.
    pub(crate) fn report(&self, at: Micros, replica: Endpoint, report: &LoadReport, standing: Standing) {
        self.rule.reported(replica, report);
        self.push(News::Report { at, replica, load: Load::from(report), failing: report.failing, standing });
    }

    /// A request goes to the replica that was picked. `None` when nothing watches it.
    pub(crate) fn sent(&self, now: Micros, pick: &Pick) -> Option<Flight> {
        if self.config.pool.exceptions == ExceptionSettings::OFF || self.config.choice.rule.is_probe_free() {
            return None;
        }
        Some(self.flights.borrow_mut().sent(now, pick.replica?, pick.latency_us, pick.trial))
    }

    /// The replica has answered a request, with a report of `reported_us` perhaps, or failed it. Returns whether the
    /// request was a trial.
    pub(crate) fn landed(&self, at: Micros, flight: Flight, failed: bool, reported_us: Option<u32>) -> bool {
        let settings = &self.config.pool.exceptions;
        let Some(landed) = self.flights.borrow_mut().answered(settings, flight, at, failed) else {
            return false;
        };
        if failed || landed.trial || self.exceptions.get() {
            self.push(News::Health { at, replica: landed.replica, event: landed.event(failed, reported_us) });
        }
        landed.trial
    }

    /// The replica failed a request after it had answered it.
    pub(crate) fn failed_late(&self, at: Micros, replica: Endpoint, trial: bool) {
        if self.config.pool.exceptions.error_aversion > 0.0 {
            let requests = self.flights.borrow_mut().failed_late(replica, at);
            self.push(News::Health { at, replica, event: Event::Failed { requests, trial } });
        }
    }

    /// A request has ended and says nothing of its replica.
    pub(crate) fn gone(&self, flight: Flight) {
        self.flights.borrow_mut().gone(flight);
    }

    /// Takes note of replicas that have left this worker's requests waiting for too long.
    fn find_silent(&self, at: Micros) {
        let mut flights = self.flights.borrow_mut();
        while let Some(overdue) = flights.overdue(at) {
            self.push(News::Health { at, replica: overdue.replica, event: overdue.event() });
        }
    }

    /// The exceptions table, if there was something in it at the last transaction.
    pub(crate) fn exceptions(&self) -> Option<Exceptions> {
        self.exceptions.get().then(|| self.store.exceptions(&self.metrics))
    }

    /// A probe of `replica` was answered at its address. Load counts only of members.
    pub(crate) fn probed(&self, now: Micros, replica: Endpoint, report: &LoadReport) -> Option<Answer> {
        let members = self.hear_of(now, replica, report);
        members.contains(replica).then(|| answer(&members, replica, report))
    }

    /// Who answers probes at `host`, as far as requests have shown.
    pub(crate) fn answering_at(&self, host: Endpoint) -> Option<Endpoint> {
        self.store.members(&self.metrics).answering_at(host)
    }

    /// The probe cluster's policy chose `replica`, by Envoy's word.
    pub(crate) fn sample_met(&self, now: Micros, replica: Endpoint, report: &LoadReport) -> Answer {
        let members = self.store.update_members(&self.metrics, |members| {
            members.sample_met(replica, report.probe_endpoint, now);
            true
        });
        self.push_members(now, &members);
        answer(&members, replica, report)
    }

    /// Takes note of a name that a reply told. If it is not a member's it may be an invention: it gets one request,
    /// which shows whether Envoy knows it.
    pub(crate) fn hear_of(&self, now: Micros, replica: Endpoint, report: &LoadReport) -> Members {
        let members = self.store.update_members(&self.metrics, |members| {
            members.observe(replica, report.probe_endpoint, Evidence::Hearsay, now)
        });
        if !members.contains(replica) {
            self.push(News::Introduce { at: now, replica });
        }
        members
    }

    /// Envoy says that the replica served a request, with `report` on the response if there was one.
    pub(crate) fn confirm(
        &self,
        now: Micros,
        replica: Endpoint,
        report: Option<&LoadReport>,
        evidence: Evidence,
    ) -> Standing {
        let mut news = false;
        let members = self.store.update_members(&self.metrics, |members| {
            news = match report {
                Some(report) => members.observe(replica, report.probe_endpoint, evidence, now),
                None => members.confirm(replica, evidence, now),
            };
            news
        });
        if news {
            self.push(News::Unbar(replica));
            self.push_members(now, &members);
        }
        members.standing(replica)
    }

    /// The replica has left the cluster, or never was there.
    pub(crate) fn forget(&self, now: Micros, replica: Endpoint) {
        let members = self.store.update_members(&self.metrics, |members| members.remove(replica));
        self.push(News::Forget(replica));
        self.push_members(now, &members);
    }

    /// The replica failed.
    pub(crate) fn bar(&self, at: Micros, replica: Endpoint) {
        self.push(News::Bar { at, replica });
    }

    /// Envoy would not use the replica.
    pub(crate) fn refused(&self, at: Micros, replica: Endpoint) {
        self.push(News::Refused { at, replica });
    }

    fn push_members(&self, at: Micros, members: &Members) {
        self.rule.look_again();
        self.push(News::Members { at, count: members.count(), samples: members.samples() });
    }

    fn push(&self, news: News) {
        let mut pending = self.pending.borrow_mut();
        if pending.len() < MAX_PENDING {
            pending.push(news);
        } else {
            self.metrics.dropped_events.one();
        }
    }

    /// One transaction: the waiting news, then `action`, then the write if `action` wants it. The second value says
    /// whether it was written. The exceptions table is handed to `action` while there is something in it, with the trial
    /// that this request (if it is one) is to be.
    fn transact<T>(
        &self,
        rng: &mut SmallRng,
        now: Micros,
        request: bool,
        mut action: impl FnMut(&mut PoolState, Option<(&Exceptions, Option<Trial>)>, &mut SmallRng) -> (T, bool),
    ) -> (T, bool) {
        let mut pending = mem::take(&mut *self.pending.borrow_mut());
        let concerned = pending.iter().any(|news| self.concerns_exceptions(news));
        // Read once: on a conflict over the pool what the news did to the table is already written.
        let mut exceptions = None;
        let (result, written) = self.store.update_pool(&self.metrics, !request, |pool| {
            if exceptions.is_none() && (concerned || pool.has_exceptions()) {
                exceptions = Some(self.update_exceptions(&pending, pool, now, request, rng));
            }
            self.exceptions.set(exceptions.is_some());
            let table = exceptions.as_ref().map(|(table, _)| table);
            for news in &pending {
                self.apply(*news, pool, table, rng);
            }
            action(pool, exceptions.as_ref().map(|(table, trial)| (table, *trial)), rng)
        });
        // The buffer goes back empty, so that the path of a request does not allocate.
        if written {
            pending.clear();
        }
        *self.pending.borrow_mut() = pending;
        (result, written)
    }

    fn concerns_exceptions(&self, news: &News) -> bool {
        match news {
            News::Health { .. } => true,
            News::Report { failing, .. } => self.config.pool.exceptions.believes(*failing),
            _ => false,
        }
    }

    /// Tells the exceptions table the news, and asks for a trial if a request waits for one.
    fn update_exceptions(
        &self,
        pending: &[News],
        pool: &PoolState,
        now: Micros,
        request: bool,
        rng: &mut SmallRng,
    ) -> (Exceptions, Option<Trial>) {
        let settings = &self.config.pool.exceptions;
        let (members, samples) = pool.membership();
        let mut changes = [Change::None; MAX_PENDING];
        let (table, trial) = self.store.update_exceptions(&self.metrics, |table| {
            table.set_members(members);
            let mut written = false;
            for (news, slot) in pending.iter().zip(&mut changes) {
                *slot = match *news {
                    News::Health { at, replica, event } => table.apply(settings, at, replica, event),
                    News::Report { at, replica, failing, standing, .. } => {
                        table.heard(settings, at, replica, failing, standing)
                    }
                    News::Forget(replica) if table.forget(replica) => Change::Noted,
                    _ => Change::None,
                };
                written |= *slot != Change::None;
            }
            // The tick keeps the table small.
            written |= !request && table.expire(now);
            let trial = if request { table.take_trial(settings, now, samples, members, rng) } else { None };
            (trial, written || trial.is_some())
        });
        for change in changes {
            self.metrics.exception(change);
        }
        (table, trial)
    }

    fn apply(&self, news: News, pool: &mut PoolState, exceptions: Option<&Exceptions>, rng: &mut SmallRng) {
        match news {
            News::Report { at, replica, load, standing, .. } => {
                let load = exceptions.map_or(Some(load), |table| table.admit(at, replica, load));
                if let Some(load) = load {
                    pool.record(&self.config.pool, at, replica, load, standing, rng);
                }
            }
            // What made it attractive is no longer so; its next report may bring it back.
            News::Health { replica, event: Event::Failed { .. }, .. } => pool.forget(replica),
            News::Health { .. } => {}
            News::Introduce { at, replica } => pool.introduce(&self.config.pool, at, replica),
            News::Forget(replica) => pool.forget(replica),
            News::Bar { at, replica } => pool.bar(replica, at, BAR_MS),
            News::Refused { at, replica } => pool.refused(replica, at, BAR_MS),
            News::Unbar(replica) => pool.unbar(replica),
            News::Members { at, count, samples } => pool.set_members(count, samples, at),
        }
    }
}
