//! Handles the start, the response and the end of each request, and every tick. `probing.rs` handles probes, `notes.rs`
//! the membership, and `journal.rs` the transaction on the shared state.

use rand::Rng;

mod agentless;
mod doubt;
mod journal;
mod notes;
mod probing;
mod request;
#[cfg(test)]
mod tests;

pub use request::{Request, Witness};

use super::count::{Class, Count, Counters, ReportEnd};
use super::rules::Rules;
use super::store::{Store, Value};
use crate::client::ejection::EjectionSettings;
use crate::client::ejection::flights::{Flight, Flights};
use crate::client::members::{Evidence, Members, Note, Placement, View};
use crate::client::policies::Done;
use crate::client::pool::{Branch, Pick, PoolView, ProbesDue};
use crate::client::settings::{ClusterConfig, Shim};
use crate::client::sync_mode::Answer;
use crate::shared::endpoint::Endpoint;
use crate::shared::outcome::Outcome;
use crate::shared::time::Micros;
use crate::wire::load::{Load, Source};
use crate::wire::orca::backend::BackendReport;
use crate::wire::report::{LoadReport, ReportError};
use agentless::{Agentless, Chooser};
use doubt::Doubt;
use journal::{Journal, Update};

/// If a worker's last two picks were closer together than this, it is likely to pick again within that time,
/// microseconds.
const SOON_US: u64 = 1000;

/// Balances the requests of one worker to one upstream cluster.
pub struct Balancer<S: Store, C> {
    config: ClusterConfig,
    shim: Shim,
    counters: C,
    journal: Journal<S>,
    /// The shared membership.
    members: S::Value<Members>,
    /// Version of the shared membership that this worker adopted last.
    adopted: Option<u32>,
    /// This worker's copy of the membership.
    membership: View,
    rules: Rules,
    /// This worker's requests in flight.
    flights: Flights,
    doubt: Doubt,
    agentless: Agentless,
    /// Time of the last pick.
    picked: Micros,
    /// Whether that pick came within [`SOON_US`] after the one before it.
    busy: bool,
    /// See [`Self::with_known_fleet`].
    known_fleet: bool,
    /// See [`Self::is_resting`].
    resting: bool,
}

/// The result of a tick.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tick {
    /// The state of the pool.
    pub view: PoolView,
    /// Number of ejected replicas.
    pub ejected: u32,
    /// Number of replicas known to have no agent.
    pub agentless: u32,
    /// Whether most replicas are bad: more than half of them would be ejected (in that case, none is), or have recently
    /// failed at least half of their requests.
    pub panic: bool,
    /// Probes to send because no requests have come.
    pub probes: ProbesDue,
}

impl<S: Store, C: Counters> Balancer<S, C> {
    /// Creates a balancer over the values in `store`, which it shares with other workers' balancers.
    pub fn new(mut config: ClusterConfig, shim: Shim, store: &S, counters: C, now: Micros) -> Self {
        let endpoints = std::mem::take(&mut config.endpoints);
        let mut balancer = Self {
            journal: Journal::new(store),
            members: store.open("members"),
            adopted: None,
            membership: View::default(),
            rules: Rules::new(config.choice.rule),
            flights: Flights::new(),
            doubt: Doubt::default(),
            agentless: Agentless::default(),
            picked: now,
            busy: false,
            known_fleet: false,
            resting: false,
            config,
            shim,
            counters,
        };
        for replica in endpoints {
            balancer.note(now, Note::Confirmed { replica, evidence: Evidence::Served });
        }
        balancer.share_members(now);
        balancer
    }

    /// Declares that the proxy provides the fleet ([`Self::set_fleet`]). Reports are then recorded with the replica's
    /// current placement instead of its placement when the request was placed.
    #[must_use]
    pub fn with_known_fleet(self) -> Self {
        Self { known_fleet: true, ..self }
    }

    /// Returns the cluster's settings, without the list of endpoints.
    pub fn config(&self) -> &ClusterConfig {
        &self.config
    }

    /// Returns whether another tick would change nothing: no update is pending, and the cluster is not in use.
    pub fn is_resting(&self) -> bool {
        self.resting
    }

    /// Returns the counters.
    pub fn counters(&self) -> &C {
        &self.counters
    }

    /// Chooses a replica for a request: among `answers` if the request has waited for its own probes, otherwise from
    /// the pool. `whole` is false while the client is still sending the request.
    pub fn begin<G: Rng>(&mut self, now: Micros, answers: &[Answer], whole: bool, rng: &mut G) -> Request {
        self.resting = false;
        self.busy = now.saturating_since(self.picked) < SOON_US;
        self.picked = now;
        let mut request = if self.config.choice.rule.is_probe_free() {
            let pick = self.rules.pick(now, self.config.pool.discovery_interval_ms, rng);
            Request { pick, began: now, ..Request::default() }
        } else {
            self.find_unresponsive(now);
            self.choose(now, answers, rng)
        };
        request.flight = self.sent(now, &request.pick, whole);
        self.rules.sent(request.pick.replica);
        if let (Branch::Agentless, Some(replica)) = (request.pick.branch, request.pick.replica) {
            self.agentless.sent(replica);
        }
        if request.explores() {
            self.agentless.explorer_sent();
        }
        self.counters.count(Count::Pick(request.pick.branch));
        if request.pick.trial {
            self.counters.count(Count::Trial);
        }
        request
    }

    /// Records that the client has sent the whole request. From now on, the request waits for its replica.
    pub fn completed(&mut self, request: &Request, proxy: &impl Witness) {
        if let Some(flight) = &request.flight {
            self.flights.completed(flight, proxy.now());
        }
    }

    /// Returns the utilisation that a replica without an agent reports in ORCA format, from 0 to 10, where 1 means
    /// full; `None` if there is none or the configuration does not use it. `text` and `bin` are the values of the two
    /// ORCA headers.
    pub fn orca_utilisation<'a>(
        &self,
        text: impl Iterator<Item = &'a [u8]>,
        bin: impl Iterator<Item = &'a [u8]>,
    ) -> Option<f64> {
        let metric = self.config.choice.orca.as_ref()?;
        let mut report = BackendReport::read(text, bin)?.unwrap_or_default();
        report.go_by(metric);
        let micro = report.utilization_micro();
        let end = if micro.is_some() { ReportEnd::Used } else { ReportEnd::BadOrca };
        self.counters.count(Count::Report(end));
        micro.map(|micro| (micro as f64 / 1e6).min(10.0))
    }

    /// Handles the response headers, which may include a report. `failed` is true if they indicate an error.
    pub fn response(
        &mut self,
        now: Micros,
        request: &mut Request,
        failed: bool,
        report: Option<Result<LoadReport, ReportError>>,
        proxy: &impl Witness,
    ) {
        (request.failed, request.answered) = (failed, !failed);
        // An error may be the proxy's own, for a replica that did not answer in time.
        if !failed && request.explores() {
            self.agentless.explorer_ended();
        }
        if let Some(report) = &report {
            let end = match report {
                Ok(report) => self.judge_report(now, request, report, proxy),
                Err(error) => Some(ReportEnd::Bad(*error)),
            };
            if let Some(end) = end {
                self.counters.count(Count::Report(end));
            }
        }
        if request.reported {
            self.land(now, request, failed);
            return;
        }
        self.find_rescue(now, request, proxy);
        if report.is_none() && !failed {
            self.find_agentless(now, request, proxy);
        }
    }

    /// Handles the end of a request. `complete` is true if the response ended properly, `failed` if it carried an
    /// error, for example in its trailers.
    pub fn ended(&mut self, mut request: Request, complete: bool, failed: bool, proxy: &impl Witness) {
        if let (Branch::Agentless, Some(replica)) = (request.pick.branch, request.pick.replica) {
            self.agentless.ended(replica);
        }
        let unanswered = request.explores() && self.agentless.explorer_ended();
        if failed && !request.failed && request.reported {
            self.land(proxy.now(), &mut request, true);
        }
        request.failed |= failed;
        // A report and a proper end prove that the replica answered.
        let class = if request.reported && complete {
            Class::Answer
        } else if self.is_ours(&mut request, proxy) {
            self.judge_end(&mut request, proxy)
        } else {
            if let Some(chosen) = request.pick.replica {
                // A rule that counts requests in flight must count this one down.
                let now = proxy.now();
                let (latency_us, outcome) = (now.saturating_since(request.began), Outcome::Aborted);
                self.rules.done(chosen, now, &Done { latency_us, outcome, rif: None, utilisation: None });
            }
            return;
        };
        // Without reports on responses, the balancer does not see when a response begins.
        let waited = !request.answered && self.config.probe.piggyback;
        if let Some(flight) = request.flight.take() {
            match class {
                Class::ClientAbort if waited => self.flights.abandoned(flight, proxy.now()),
                _ => self.flights.gone(flight),
            }
        }
        if unanswered
            && waited
            && class != Class::Answer
            && let Some(replica) = request.served_by(proxy)
            && self.flights.unanswered(replica, request.began, proxy.now())
        {
            self.agentless.explained();
        }
        let class = if class == Class::Answer && request.failed { Class::UpstreamFailure } else { class };
        if self.config.choice.rule.keeps_state() {
            self.learn(&request, class, proxy);
        }
        self.counters.count(Count::Outcome(class));
    }

    /// Applies the pending updates. Returns the state of the pool, and the probes to send because no requests have
    /// come.
    ///
    /// Every worker ticks, even one that never gets a request. Compare-and-swap ensures that only one of them sends the
    /// idle probes.
    pub fn tick<G: Rng>(&mut self, now: Micros, rng: &mut G) -> Tick {
        // The membership is shared first, so that this tick applies its changes to the pool.
        self.share_members(now);
        let probe_free = self.config.choice.rule.is_probe_free();
        if !probe_free {
            self.find_unresponsive(now);
        }
        let settings = &self.config.pool;
        let interval = if probe_free { 0 } else { self.config.probe.idle_interval_ms };
        let waiting = self.journal.waits();
        let failing = self.journal.table.most_fail(now);
        let agentless = self.membership.members().agentless();
        let ((tick, heard, at_rest), written) =
            self.journal.transact(settings, &self.counters, now, false, rng, |pool, ejections, _| {
                pool.expire(settings, now.stamp());
                let watched = ejections.is_some();
                let panic = failing || ejections.is_some_and(|(table, _)| table.panics());
                let probes = if interval == 0 {
                    ProbesDue::default()
                } else {
                    pool.idle_probes(settings, now, interval)
                };
                let tick = Tick {
                    view: pool.view(settings, now),
                    ejected: pool.ejected(),
                    agentless,
                    panic,
                    probes,
                };
                let heard: Vec<Endpoint> = pool.alive(settings, now).collect();
                let at_rest = !watched && pool.is_at_rest(interval);
                ((tick, heard, at_rest), waiting || watched || !probes.is_empty())
            });
        // Replicas that report on responses are alive, even if they are not probed.
        for replica in heard {
            self.note(now, Note::Alive(replica));
        }
        self.resting =
            at_rest && !self.journal.waits() && self.flights.is_empty() && !self.membership.has_updates(now);
        if written { tick } else { Tick { probes: ProbesDue::default(), ..tick } }
    }

    /// Applies the pending updates, unless this worker's next pick is likely to do so within a millisecond. Call it after
    /// [`Self::response`] and [`Self::replied`], and after [`Self::ended`] if the time costs nothing to read. It is not
    /// needed after the reply to a request that waits for its probes and will soon be placed.
    ///
    /// Other workers choose from the same pool. Without this, the replica whose response this worker has received would
    /// look busy to them until this worker's next pick: 5 ms on average at 200 requests a second. If many workers share
    /// the pool, the additional writes would conflict with their picks, so the updates then wait for the next pick.
    pub fn settle<G: Rng>(&mut self, now: Micros, rng: &mut G) {
        let soon = self.busy && now.saturating_since(self.picked) < SOON_US;
        if !soon && !self.journal.is_contended() {
            self.apply(now, rng);
        }
    }

    /// Applies the pending updates now. This is for a thread that receives probe replies but places no requests.
    pub fn apply<G: Rng>(&mut self, now: Micros, rng: &mut G) {
        if self.journal.waits() {
            let settings = &self.config.pool;
            self.journal.transact(settings, &self.counters, now, false, rng, |_, _, _| ((), true));
        }
    }

    /// Returns the current state of the pool.
    pub fn view(&mut self, now: Micros) -> PoolView {
        let settings = &self.config.pool;
        self.journal.pool.update(|pool| (pool.view(settings, now), false)).result
    }

    /// Chooses by a rule that uses the pool.
    fn choose<G: Rng>(&mut self, now: Micros, answers: &[Answer], rng: &mut G) -> Request {
        let Self { config, shim, counters, journal, rules, agentless, membership, known_fleet, .. } = self;
        let settings = &config.pool;
        let usable = |replica| !(journal.watched && journal.table.is_ejected(replica));
        let members = membership.members();
        let unexplained = *known_fleet && members.unheard() > 0;
        let chooser = agentless.chooser(members, unexplained, now, usable, rng);
        rules.ranked(config.choice.rule, |ranking| {
            let chosen = journal.transact(settings, counters, now, true, rng, |pool, ejections, rng| {
                let admitted: Vec<Answer>;
                let (answers, trial) = match ejections {
                    None => (answers, None),
                    Some((table, trial)) => {
                        admitted = answers
                            .iter()
                            .filter(|answer| !table.is_ejected(answer.replica))
                            .copied()
                            .collect();
                        (&admitted[..], trial)
                    }
                };
                let pick = match (trial, chooser) {
                    (Some(trial), _) => pool.pick_trial(settings, trial, now),
                    (None, Chooser::Proxy) => pool.pick_unreported(settings, None, now),
                    (None, Chooser::Explorer) => {
                        Pick { branch: Branch::Agentless, ..pool.pick_unreported(settings, None, now) }
                    }
                    (None, Chooser::Agentless(replica)) => pool.pick_unreported(settings, Some(replica), now),
                    (None, Chooser::Pool) if answers.is_empty() => pool.pick_by(settings, now, ranking, rng),
                    (None, Chooser::Pool) => pool.pick_among(settings, now, answers, ranking, rng),
                };
                let mut request = Request { pick, began: now, ..Request::default() };
                if let (Shim::OverrideHost, Some(chosen)) = (*shim, pick.replica) {
                    request.runner_up = pool.runner_up(settings, now, chosen, answers, ranking, rng);
                }
                (request, true)
            });
            let (mut request, written) = chosen;
            if !written {
                // The probes are still due at the next request.
                request.pick.probes = ProbesDue::default();
            }
            request
        })
    }

    /// Decides whether the report on a response can be trusted. Returns `None` if the request did not go to this
    /// cluster.
    fn judge_report(
        &mut self,
        now: Micros,
        request: &mut Request,
        report: &LoadReport,
        proxy: &impl Witness,
    ) -> Option<ReportEnd> {
        request.reported_us = report.latency_us;
        let chosen = request.pick.replica;
        if let Some(named) = report.endpoint.filter(|named| chosen == Some(*named) && !request.pick.verify) {
            if self.doubt.asks(now) {
                // Another cluster can have the same replicas, and then the proxy carries out the choice there.
                if !self.is_ours(request, proxy) {
                    return None;
                }
                if request.served_by(proxy) != chosen {
                    return Some(ReportEnd::WrongEndpoint);
                }
            }
            request.reported = true;
            let placement = match self.known_fleet {
                true => self.membership.members().placement(named),
                false => request.pick.placement,
            };
            self.count(request, named, now, report, placement);
            return Some(ReportEnd::Used);
        }
        // The request was not steered, the proxy used another host, or the report names no endpoint: only the proxy
        // knows which replica answered.
        if !self.is_ours(request, proxy) {
            return None;
        }
        let Some(served) = request.served_by(proxy) else { return Some(ReportEnd::NoEndpoint) };
        if report.endpoint.is_some_and(|named| named != served) {
            return Some(ReportEnd::WrongEndpoint);
        }
        request.reported = chosen == Some(served);
        // A retry to the runner-up was steered too, so it shows nothing about the proxy's own policy.
        let on_purpose = request.reported || request.runner_up == Some(served);
        let evidence = if on_purpose { Evidence::Served } else { Evidence::Placed };
        let placement = self.confirm(now, served, Some(report), evidence);
        self.count(request, served, now, report, placement);
        Some(ReportEnd::Used)
    }

    /// Whether the request went to this cluster, according to the proxy. If not, ejection stops tracking the request,
    /// because it says nothing about the replica.
    fn is_ours(&mut self, request: &mut Request, proxy: &impl Witness) -> bool {
        let ours = *request.ours.get_or_insert_with(|| proxy.is_ours());
        if !ours && let Some(flight) = request.flight.take() {
            self.flights.gone(flight);
        }
        ours
    }

    /// Handles a response from a replica other than the chosen one: if the proxy tried more than once, the chosen one
    /// failed.
    fn find_rescue(&mut self, now: Micros, request: &mut Request, proxy: &impl Witness) {
        let Some(chosen) = request.pick.replica else { return };
        if !self.is_ours(request, proxy) || request.served_by(proxy).is_none_or(|served| served == chosen) {
            return;
        }
        self.doubt.diverted(now);
        if proxy.attempts() > 1 {
            request.rescued = true;
            self.push(Update::CoolDown(now, chosen));
            self.land(now, request, true);
        }
    }

    /// Handles a response without a report from a replica that the proxy's own policy chose, or that is known to be
    /// agentless.
    fn find_agentless(&mut self, now: Micros, request: &mut Request, proxy: &impl Witness) {
        let pool_rule = !self.config.choice.rule.is_probe_free();
        let unsteered = request.pick.replica.is_none() || request.pick.branch == Branch::Agentless;
        if !(pool_rule && unsteered && self.is_ours(request, proxy)) {
            return;
        }
        let Some(served) = request.served_by(proxy) else { return };
        if let Some(left) = request.pick.replica.filter(|chosen| *chosen != served)
            && proxy.attempts() <= 1
        {
            // The proxy refused the replica, or the replica has left.
            self.forget(now, left);
        }
        let before = self.membership.members().agentless();
        self.note(now, Note::Unreported(served));
        if self.membership.members().agentless() > before {
            self.agentless.found();
        }
    }

    /// Records the load reported on a response, unless the request failed: quick failures make a replica look
    /// idle and fast.
    fn count(
        &mut self,
        request: &Request,
        replica: Endpoint,
        now: Micros,
        report: &LoadReport,
        placement: Placement,
    ) {
        if !request.failed {
            self.report(now, replica, report, placement, Source::Response);
        }
    }

    /// Classifies the end of a request when no report proves that the chosen replica answered.
    fn judge_end(&mut self, request: &mut Request, proxy: &impl Witness) -> Class {
        let class = proxy.class();
        if class == Class::ClientAbort {
            return class;
        }
        let Some(chosen) = request.pick.replica else { return class };
        let (now, served_by) = (proxy.now(), request.served_by(proxy));
        if class == Class::Local && served_by.is_none() {
            // The proxy sent the request to no replica.
            return class;
        }
        let verify = request.pick.verify;
        let diverted = served_by.is_some_and(|served| served != chosen);
        if diverted {
            self.counters.count(Count::Diverted);
        }
        if request.rescued {
            // The failure was recorded when the headers arrived.
        } else if class == Class::UpstreamFailure || (diverted && (verify || proxy.attempts() > 1)) {
            // The replica refused, reset or timed out the request, which may have been retried elsewhere. Or the
            // replica does not exist.
            self.push(Update::CoolDown(now, chosen));
            self.land(now, request, true);
        } else if diverted {
            // The proxy's health state ruled the choice out.
            self.push(Update::Refused(now, chosen));
        } else if class == Class::Answer && served_by == Some(chosen) && request.flight.is_some() {
            // The replica answered without a report.
            self.land(now, request, request.failed);
        }
        if verify && served_by == Some(chosen) {
            self.confirm(now, chosen, None, Evidence::Served);
        } else if verify {
            self.forget(now, chosen);
        }
        class
    }

    /// Updates the rule, if it keeps state, after a request has ended.
    fn learn(&mut self, request: &Request, class: Class, proxy: &impl Witness) {
        let now = proxy.now();
        let probe_free = self.config.choice.rule.is_probe_free();
        let served = if probe_free { proxy.served_by() } else { request.pick.replica };
        let Some(chosen) = request.pick.replica else {
            // The proxy's own policy placed the request. This is how members are discovered.
            if let (true, Some(served)) = (probe_free, served) {
                self.confirm(now, served, None, Evidence::Placed);
            }
            return;
        };
        let diverted = served.is_some_and(|served| served != chosen);
        let refused = diverted && proxy.attempts() <= 1;
        let outcome = match class {
            Class::Answer if !diverted => Outcome::Success,
            Class::ClientAbort | Class::Local => Outcome::Aborted,
            // A request that the proxy did not send to the chosen replica is not that replica's failure.
            _ if refused => Outcome::Aborted,
            _ => Outcome::Failure,
        };
        // Another replica's report says nothing about the chosen one.
        let (rif, utilisation) = if diverted { (None, None) } else { request.response_load };
        let latency_us = now.saturating_since(request.began);
        self.rules.done(chosen, now, &Done { latency_us, outcome, rif, utilisation });
        if probe_free && outcome == Outcome::Success {
            self.note(now, Note::Alive(chosen));
        }
        if probe_free && refused {
            // The proxy refused the replica, or the replica has left. If it comes back, the proxy's own policy will
            // find it.
            self.forget(now, chosen);
        }
    }

    /// Records, for ejection, that a request is sent to the chosen replica. Returns `None` if ejection does not track
    /// the request.
    fn sent(&mut self, now: Micros, pick: &Pick, whole: bool) -> Option<Flight> {
        if self.config.pool.ejection == EjectionSettings::OFF || self.config.choice.rule.is_probe_free() {
            return None;
        }
        Some(self.flights.sent(now, pick.replica?, pick.latency_us, pick.trial, whole))
    }

    /// Records that the chosen replica has answered or failed the request. An answer can still turn into a failure, but
    /// no request counts as more than one failure.
    fn land(&mut self, now: Micros, request: &mut Request, failed: bool) {
        let settings = &self.config.pool.ejection;
        // Failures matter only if they can eject.
        let ejects = settings.failure_share > 0.0;
        if let Some(flight) = request.flight.take() {
            let Some(landed) = self.flights.answered(settings, flight, now, failed) else { return };
            request.trial = landed.trial;
            if failed && !request.answered {
                self.flights.unanswered(landed.replica, request.began, now);
            }
            if failed {
                self.push(Update::Left(now, landed.replica));
            }
            if if failed { ejects } else { landed.trial || self.journal.watched } {
                let event = landed.event(failed, request.reported_us);
                self.push(Update::Health(now, landed.replica, event));
            }
        } else if failed
            && ejects
            && !request.blamed
            && let Some(replica) = request.pick.replica
        {
            let event = self.flights.failed_late(replica, now, request.trial);
            self.push(Update::Health(now, replica, event));
        }
        request.blamed |= failed;
    }

    /// Records replicas that have kept this worker's requests waiting for too long.
    fn find_unresponsive(&mut self, at: Micros) {
        while let Some(overdue) = self.flights.overdue(at) {
            self.push(Update::Health(at, overdue.replica, overdue.event()));
        }
    }

    /// Records a report that is valid for `replica`, with its `placement`.
    fn report(
        &mut self,
        at: Micros,
        replica: Endpoint,
        report: &LoadReport,
        placement: Placement,
        source: Source,
    ) {
        if self.membership.members().awaits_report(replica) {
            self.note(at, Note::Reported(replica));
        }
        self.rules.reported(replica, report);
        let load = Load { source, ..Load::from(report) };
        self.push(Update::Report(at, replica, load, placement));
    }

    fn push(&mut self, update: Update) {
        self.resting = false;
        self.journal.push(&self.counters, update);
    }
}
