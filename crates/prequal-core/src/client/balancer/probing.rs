//! Selects the replicas to probe, and decides how much of a reply to trust.

use std::iter::repeat_n;

use rand::Rng;

use super::Balancer;
use super::journal::{Journal, Update};
use crate::client::count::{Count, Counters, ProbeEnd};
use crate::client::members::{Evidence, Note, Placement, Target};
use crate::client::pool::ProbesDue;
use crate::client::reply::Reply;
use crate::client::store::{Store, Value};
use crate::client::sync_mode::{Answer, Waiting};
use crate::shared::endpoint::Endpoint;
use crate::shared::time::Micros;
use crate::wire::hint::{HOMES, HintHash};
use crate::wire::load::{Load, Source};
use crate::wire::report::LoadReport;

/// One in this many samples of replicas to probe includes those that have just reported.
const SAMPLES_WITH_FRESH: u32 = 16;

impl<S: Store, C: Counters> Balancer<S, C> {
    /// Returns the targets of the probes that are due: distinct sampled replicas, and `None` for each probe whose
    /// replica the probe cluster's policy chooses.
    pub fn targets<G: Rng>(&mut self, due: ProbesDue, now: Micros, rng: &mut G) -> Vec<Option<Target>> {
        let addressed = due.addressed as usize;
        let mut targets = Vec::new();
        if addressed > 0 {
            let Self { config, counters, journal, membership, .. } = self;
            // If only the reports of probes are used, the sample is uniform (paper §4). Otherwise it leaves out the
            // replica that gets the request for which the probes are due, and most samples also leave out replicas that
            // have just reported. The others do not, so that a replica with frequent reports on responses is still
            // probed, and a blocked path to its probe port is noticed.
            let piggyback = config.probe.piggyback;
            let spares_fresh = piggyback && !rng.random_ratio(1, SAMPLES_WITH_FRESH);
            let fresh_ms = config.pool.max_age_ms / 10;
            let read = journal.pool.update(|pool| {
                let skip = |replica| {
                    (piggyback && pool.is_latest_pick(replica, now))
                        || (spares_fresh && pool.heard_within(replica, now, fresh_ms))
                };
                (membership.members().sample(addressed, &mut *rng, skip), false)
            });
            counters.updated(&read);
            targets = read.result;
        }
        // If there is no replica to address, every probe is a discovery probe.
        let unaddressed = due.discovery as usize + if targets.is_empty() { addressed } else { 0 };
        targets.into_iter().map(Some).chain(repeat_n(None, unaddressed)).collect()
    }

    /// Returns the replicas to probe for a request that is to wait for its own probes, and the state of its wait. With
    /// fewer than two replicas there is nothing to compare.
    ///
    /// The homes of the request's hint (`wire/hint.rs`) come first, at most `d` − 1 of them. The others are drawn at
    /// random.
    pub fn ask<G: Rng>(&mut self, hint: Option<HintHash>, rng: &mut G) -> (Vec<Target>, Waiting) {
        let Journal { watched, table, .. } = &self.journal;
        let (members, d) = (self.membership.members(), self.config.choice.sync.d);
        // The answer of an ejected replica would count as one of `d` but could not be used.
        let skip = |replica| *watched && table.is_ejected(replica);
        let mut homes = hint.map_or([None; HOMES], |hint| members.homes(hint, skip));
        homes.iter_mut().skip(d.saturating_sub(1)).for_each(|home| *home = None);
        let mut targets: Vec<Target> = homes.iter().flatten().copied().collect();
        let is_home = |replica| homes.iter().flatten().any(|home| home.replica == replica);
        let others = d.saturating_sub(targets.len());
        targets.extend(members.sample_in_use(others, rng, |replica| skip(replica) || is_home(replica)));
        let waiting = Waiting::for_homes(d, targets.len(), homes);
        (targets, waiting)
    }

    /// Handles the reply to a probe of `asked` (`None` if the probe had no address). Updates the membership, and
    /// returns the load of the replica that answered if it can be trusted. Even a rejected reply can provide a load:
    /// that of a host other than the one asked. The load in the reply to a `hinted` probe is scaled for one query, so
    /// it is not recorded as the replica's load.
    pub fn replied(
        &mut self,
        now: Micros,
        asked: Option<Target>,
        hinted: bool,
        reply: Result<Reply, ProbeEnd>,
    ) -> Option<Answer> {
        let (report, host) = match reply {
            Ok(Reply { report, host }) => (report, host),
            Err(end) => (Err(end), None),
        };
        match report {
            Ok(_) => {}
            Err(ProbeEnd::BadReport(_)) => self.sample_met_unread(now, asked, host),
            Err(end) => self.find_unreported(now, asked, host, end),
        }
        let taken = report.and_then(|report| match self.config.pool.verified_probes {
            true => self.take_verified(now, asked, &report, host),
            false => self.take_unverified(now, asked, &report),
        });
        let (answer, end) = taken.unwrap_or_else(|end| (None, end));
        if let Some(answer) = answer {
            self.flights.heard(answer.replica);
        }
        if let (Some(answer), Ok(report), false) = (answer, &report, hinted) {
            self.report(now, answer.replica, report, answer.placement, Source::Probe);
        }
        self.counters.count(Count::Probe(end));
        answer
    }

    fn take_unverified(
        &mut self,
        now: Micros,
        asked: Option<Target>,
        report: &LoadReport,
    ) -> Result<(Option<Answer>, ProbeEnd), ProbeEnd> {
        let replica = report.endpoint.ok_or(ProbeEnd::NoEndpoint)?;
        let Some(asked) = asked else {
            // The probe had no address, so the name in the report is used but not the load.
            self.hear_of(now, replica, report);
            return Ok((None, ProbeEnd::Used));
        };
        if asked.replica != replica {
            // The probe cluster does not know the host that was asked, so that host has left.
            self.forget(now, asked.replica);
            self.hear_of(now, replica, report);
            return Err(ProbeEnd::WrongEndpoint);
        }
        Ok((self.probed(now, replica, report), ProbeEnd::Used))
    }

    /// Like [`Self::take_unverified`], where the proxy says which host answered.
    fn take_verified(
        &mut self,
        now: Micros,
        asked: Option<Target>,
        report: &LoadReport,
        host: Option<Endpoint>,
    ) -> Result<(Option<Answer>, ProbeEnd), ProbeEnd> {
        let host = host.ok_or(ProbeEnd::NoHost)?;
        if let Some(asked) = asked {
            if asked.probe == host {
                if report.endpoint.is_some_and(|named| named != asked.replica) {
                    return Err(ProbeEnd::WrongEndpoint);
                }
                return Ok((self.probed(now, asked.replica, report), ProbeEnd::Used));
            }
            // The proxy does not know the host that was asked, so its policy chose another: the probe has become a
            // sample.
            self.forget(now, asked.replica);
        }
        let end = if asked.is_some() { ProbeEnd::WrongEndpoint } else { ProbeEnd::Used };
        let answering = self.membership.members().answering_at(host);
        let replica = match (answering, report.endpoint) {
            (Some(replica), Some(named)) if replica != named => return Err(ProbeEnd::WrongEndpoint),
            (Some(replica), _) => replica,
            (None, Some(named)) if named != host => {
                if report.probe_endpoint != Some(host) {
                    return Err(ProbeEnd::WrongEndpoint);
                }
                // The host is a separate probe port. A request must show that this port belongs to the named replica.
                self.hear_of(now, named, report);
                return Ok((None, end));
            }
            (None, _) => host,
        };
        Ok((Some(self.sample_met(now, replica, report)), end))
    }

    /// Handles a probe of `replica` that was answered at its address. Load counts only for members.
    fn probed(&mut self, now: Micros, replica: Endpoint, report: &LoadReport) -> Option<Answer> {
        let placement = self.hear_of(now, replica, report)?;
        Some(Answer { replica, load: Load::from(report), placement, home: None })
    }

    /// Records that the probe cluster's policy chose `replica`, according to the proxy.
    fn sample_met(&mut self, now: Micros, replica: Endpoint, report: &LoadReport) -> Answer {
        self.note(now, Note::Sampled { replica, probe: report.probe_endpoint });
        let placement = self.membership.members().placement(replica);
        Answer { replica, load: Load::from(report), placement, home: None }
    }

    /// Like [`Self::sample_met`], for a member whose report cannot be read. If such replies were ignored, the policy
    /// would seem to avoid that member, and the others would seem to have greater weights.
    fn sample_met_unread(&mut self, now: Micros, asked: Option<Target>, host: Option<Endpoint>) {
        let met = host.filter(|_| asked.is_none() && self.config.pool.verified_probes);
        if let Some((host, replica)) =
            met.and_then(|host| Some((host, self.membership.members().answering_at(host)?)))
        {
            self.note(now, Note::Sampled { replica, probe: (host != replica).then_some(host) });
        }
    }

    /// Handles a probe that ended without a report. A host that answered has no agent. Otherwise the reason is unknown.
    fn find_unreported(&mut self, now: Micros, asked: Option<Target>, host: Option<Endpoint>, end: ProbeEnd) {
        let answered = matches!(end, ProbeEnd::NoReport | ProbeEnd::Status);
        let host = if self.known_fleet { asked.map(|asked| asked.replica) } else { host };
        match host.filter(|_| answered && (self.known_fleet || self.config.pool.verified_probes)) {
            Some(host) => {
                self.note(now, Note::Unreported(host));
            }
            None if !answered && self.finds_silence(asked, now) => {}
            None => self.agentless.probe_unanswered(),
        }
    }

    /// Whether a dead or hung replica explains an unanswered probe. Such a replica does not answer requests either, but a
    /// replica without an agent does. If `asked` is `None`, the probe may have gone to any replica.
    fn finds_silence(&self, asked: Option<Target>, now: Micros) -> bool {
        let ejected = |replica| self.journal.watched && self.journal.table.is_ejected(replica);
        match asked {
            Some(Target { replica, .. }) => {
                ejected(replica) || self.flights.silent(now).any(|silent| silent == replica)
            }
            None => self.flights.silent(now).next().is_some(),
        }
    }

    /// Notes the replica that a reply names. Returns its placement if it is a member. Any other name may be invented:
    /// its endpoint gets one request, which shows whether the proxy knows it.
    fn hear_of(&mut self, now: Micros, replica: Endpoint, report: &LoadReport) -> Option<Placement> {
        let (probe, evidence) = (report.probe_endpoint, Evidence::Hearsay);
        self.note(now, Note::Observed { replica, probe, evidence });
        let members = self.membership.members();
        let placement = members.contains(replica).then(|| members.placement(replica));
        if placement.is_none() {
            self.push(Update::Introduce(now, replica));
        }
        placement
    }
}
