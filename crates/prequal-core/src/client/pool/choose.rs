//! Choices other than the ordinary pick: among the answers that a request has waited for, and for a retry.

use bytemuck::Zeroable;
use rand::Rng;

use super::predicted::AtHome;
use super::rank::{Order, Scored, lowest_with_slow_start};
use super::{Branch, Candidate, Entry, Pick, PoolSettings, PoolState};
use crate::client::sync_mode::{Answer, MAX_ASKED};
use crate::shared::endpoint::Endpoint;
use crate::shared::time::{Micros, Stamp};

/// Order in which replicas are ranked.
#[derive(Clone, Copy)]
pub enum Ranking<'a> {
    /// Predicted latency ([`crate::server::capacity`]).
    Predicted,
    /// Hot and cold (paper §4).
    HotCold,
    /// The lowest score first, as in [`PoolState::pick_scored`].
    Scored(&'a dyn Fn(&Candidate) -> f64),
}

impl PoolState {
    /// Like [`Self::pick`], by the given ranking.
    pub fn pick_by<G: Rng>(
        &mut self,
        settings: &PoolSettings,
        now: Micros,
        ranking: Ranking<'_>,
        rng: &mut G,
    ) -> Pick {
        match ranking {
            Ranking::Predicted => self.pick_predicted(settings, now, rng),
            Ranking::HotCold => self.pick(settings, now, rng),
            Ranking::Scored(score) => self.pick_scored(settings, now, rng, score),
        }
    }

    /// Chooses among `answers` by the pool's own rule (synchronous mode, see [`crate::client::sync_mode`]). Answers of
    /// replicas that are cooling down do not count. If no answer is left, or steering pauses, the pool itself chooses.
    /// With predicted latency, a home of the request's hint is chosen unless it costs far more than the others.
    ///
    /// The caller decides whether the answers are also recorded as reports in the pool ([`Self::record`]).
    pub fn pick_among<G: Rng>(
        &mut self,
        settings: &PoolSettings,
        now: Micros,
        answers: &[Answer],
        ranking: Ranking<'_>,
        rng: &mut G,
    ) -> Pick {
        let stamp = now.stamp();
        let mut usable = [Entry::zeroed(); MAX_ASKED];
        let usable = self.usable(settings, answers, stamp, &mut usable);
        let chosen = match self.is_paused(stamp) {
            true => None,
            false => self.first(settings, stamp, usable, answers, ranking, rng),
        };
        let Some(mut chosen) = chosen else { return self.pick_by(settings, now, ranking, rng) };
        let probes = self.begin_pick(settings, stamp);
        if let Ranking::Predicted = ranking {
            let rule = self.predicted(stamp, usable);
            let tried = rule.trial(usable, &mut self.trials, rng);
            if let Some(tried) = tried.and_then(|tried| usable.get(tried)) {
                chosen = Chosen { entry: *tried, latency_us: rule.latency_us(tried) };
            }
        }
        let Chosen { entry: chosen, latency_us } = chosen;
        // RIF compensation (§4), for the requests that the pool will place later.
        if let Some(entry) = self.entries_mut().iter_mut().find(|entry| entry.endpoint == chosen.endpoint) {
            entry.rif = entry.rif.saturating_add(1);
        }
        Pick {
            replica: Some(chosen.endpoint),
            branch: Branch::Sync,
            latency_us,
            ..Pick::fallback(chosen.placement(), probes)
        }
    }

    /// Chooses a replica for a retry: the best one other than `chosen`. If `chosen` is one of the answers and there are
    /// others, the replica for the retry is one of those; otherwise, it comes from the pool.
    pub fn runner_up<G: Rng>(
        &self,
        settings: &PoolSettings,
        now: Micros,
        chosen: Endpoint,
        answers: &[Answer],
        ranking: Ranking<'_>,
        rng: &mut G,
    ) -> Option<Endpoint> {
        let stamp = now.stamp();
        let mut usable = [Entry::zeroed(); MAX_ASKED];
        let usable = self.usable(settings, answers, stamp, &mut usable);
        if let Some(index) = usable.iter().position(|entry| entry.endpoint == chosen) {
            usable.swap(0, index);
            if let Some(first) = self.first(settings, stamp, usable.get(1..)?, answers, ranking, rng) {
                return Some(first.entry.endpoint);
            }
        }
        let mut others = self.entries;
        let mut count = 0;
        for entry in self.entries() {
            if let Some(slot) = others.get_mut(count)
                && entry.endpoint != chosen
                && entry.unproven == 0
            {
                *slot = *entry;
                count += 1;
            }
        }
        Some(self.first(settings, stamp, others.get(..count)?, &[], ranking, rng)?.entry.endpoint)
    }

    fn usable<'a>(
        &self,
        settings: &PoolSettings,
        answers: &[Answer],
        stamp: Stamp,
        into: &'a mut [Entry; MAX_ASKED],
    ) -> &'a mut [Entry] {
        let allowed = answers.iter().filter(|answer| !self.is_cooling_down(answer.replica, stamp));
        let mut count = 0;
        for (slot, answer) in into.iter_mut().zip(allowed) {
            *slot = Entry::new(settings, answer.replica, answer.load, answer.placement, stamp);
            count += 1;
        }
        into.get_mut(..count).unwrap_or_default()
    }

    fn first<G: Rng>(
        &self,
        settings: &PoolSettings,
        stamp: Stamp,
        entries: &[Entry],
        answers: &[Answer],
        ranking: Ranking<'_>,
        rng: &mut G,
    ) -> Option<Chosen> {
        match ranking {
            Ranking::Predicted => {
                let rule = self.predicted(stamp, entries);
                first_in(entries, &AtHome { rule, answers }, rng)
            }
            Ranking::HotCold => first_in(entries, &self.hot_and_cold(settings, stamp, entries), rng),
            Ranking::Scored(score) => first_in(entries, &Scored(score, stamp), rng),
        }
    }
}

/// The best entry, and the latency that a request can expect there.
struct Chosen {
    entry: Entry,
    latency_us: Option<u32>,
}

fn first_in<O: Order, G: Rng>(entries: &[Entry], order: &O, rng: &mut G) -> Option<Chosen> {
    let entry = *entries.get(lowest_with_slow_start(entries, order, rng)?.index)?;
    Some(Chosen { entry, latency_us: order.latency_us(&entry) })
}
