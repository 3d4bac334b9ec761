//! The probe pool: recent load reports of replicas, and the rule that picks one (paper §4).
//!
//! [`PoolState`] *is* the blob that the workers of an Envoy share, except for vacant entries: fixed layout, fixed
//! arrays, plain bytes. Picking and recording never allocate.
//!
//! - **Select by predicted latency** (`pool/predicted.rs`): the lowest cost wins, and costs that are nearly as low
//!   count as equal. Among equals, replicas below their knee ([`crate::server::capacity`]) take turns if requests take
//!   almost the same time; otherwise, and beyond the knee, the lowest RIF wins. Occasionally a replica that looks worse
//!   is tried.
//! - **Select by hot and cold** (lexicographic): an entry is *hot* when its RIF exceeds ([`HotRule::Gt`], §4) or
//!   reaches ([`HotRule::Ge`], §5.3) θ, the `q_rif` quantile of recently reported RIFs. If any entry is cold, the cold
//!   entry with the lowest latency wins; otherwise the lowest RIF wins. With fewer than two entries (one, if all other
//!   replicas are ejected), the pool makes no choice, and the caller's own policy places the request.
//! - **Unknown latency**: with hot and cold, an idle replica that reports no latency ranks first. Picking it raises its
//!   RIF in the pool, so it gets one request; then, as a *busy* unknown, it ranks last until it has answered. This
//!   brings traffic back to a recovered replica (`docs/design/adr/0002-unknown-latency.md`). With predicted latency,
//!   a replica of unknown latency counts as typically fast, and gets one request at a time.
//! - **An entry leaves the pool** when it is too old (`PoolState::age_limit`), is used up
//!   ([`crate::client::pool::reuse`]), is replaced by a newer report of the same replica, is the oldest when another
//!   replica's report needs room, or is removed: `r_remove` per pick, the oldest and the worst alternately.
//! - **Envoy's own placement** stays in force ([`crate::client::members`]): an entry also leaves once the policy's
//!   samples no longer meet its replica. Where weights differ, entries that count as equal share by weight. With hot and
//!   cold, their RIF relative to the weight and chance decide; with predicted latency, turns relative to the weight do.
//!   A slow replica is still avoided, and so is one that is beyond its knee. When Envoy refuses most choices, because
//!   it knows of failures that the probe cluster's policy does not know, steering pauses for a second.
//! - **Ejected replicas** ([`crate::client::ejection`]) are not in the pool: the caller does not record their reports.
//! - **A young replica** takes a share that grows with its age over [`PoolSettings::slow_start_ms`]. This does not
//!   apply while at least half of the pool is young, because then the whole fleet is new.
//! - **Probes due** are decided in the same step ([`Budget`]).

use std::borrow::Cow;

use bytemuck::Zeroable;
use rand::Rng;

use crate::client::ejection::{EjectionTable, Trial};
use crate::client::members::Placement;
use crate::shared::blob::{Blob, BlobError, Tag};
use crate::shared::endpoint::Endpoint;
use crate::shared::time::{Micros, Stamp};
use crate::wire::load::{Load, Source};

mod choose;
mod cooldown;
mod entry;
mod noise;
mod predicted;
mod probes;
mod rank;
pub mod reuse;
mod sent;
mod settings;

pub use choose::Ranking;
use cooldown::{Cooldown, MAX_COOLDOWNS, REFUSAL_WEIGHT};
pub use entry::Candidate;
use entry::{Entry, UNKNOWN};
use noise::Noise;
use predicted::{Predicted, Trials};
use probes::{Clock, GROWING_MS};
use rank::{Order, Scored, Theta, lowest_with_slow_start};
use reuse::{reuse_budget, round_randomly};
use sent::Sent;
pub use settings::{Budget, HotRule, MAX_HISTORY, MAX_POOL, PoolSettings};
use settings::{CROWD, FULL_SHARE};

/// Rule that made the choice.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Branch {
    /// Hot and cold: the lowest latency among the cold replicas. Predicted latency: the best replica is not saturated.
    Cold,
    /// Hot and cold: the lowest RIF, because all replicas were hot. Predicted latency: even the best is beyond its
    /// knee.
    Hot,
    /// A replica that looks slower got the request, so that its estimate can improve. A trial of an ejected replica
    /// ([`Pick::trial`]) counts as [`Self::Cold`] instead.
    Trial,
    /// The pool made no choice, for example because it has fewer than two entries.
    Fallback,
    /// The best of the answers that the request waited for ([`crate::client::sync_mode`]).
    Sync,
    /// The lowest score ([`PoolState::pick_scored`]), or a rule that does not use the pool.
    Scored,
    /// The request is part of the share of the replicas without an agent. It goes to one of them, or, if they are to be
    /// discovered, where the caller's own policy sends it.
    Agentless,
}

/// The choice for one request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Pick {
    /// The replica, or `None` to fall back.
    pub replica: Option<Endpoint>,
    /// Rule that made the choice.
    pub branch: Branch,
    /// Latency expected from the replica's report, microseconds; `None` if unknown.
    pub latency_us: Option<u32>,
    /// Whether the request is a trial of an ejected replica ([`crate::client::ejection`]).
    pub trial: bool,
    /// Whether the replica is not a member yet; its first request shows whether Envoy knows it.
    pub verify: bool,
    /// Placement of the replica according to the pool; the report on the response is recorded with it.
    pub placement: Placement,
    /// Probes to send now.
    pub probes: ProbesDue,
}

impl Pick {
    /// Leaves the choice to the caller's own policy.
    pub(crate) fn fallback(placement: Placement, probes: ProbesDue) -> Self {
        Self {
            replica: None,
            branch: Branch::Fallback,
            latency_us: None,
            trial: false,
            verify: false,
            placement,
            probes,
        }
    }
}

impl Default for Pick {
    fn default() -> Self {
        Self::fallback(Placement::even(0), ProbesDue::default())
    }
}

/// Number of probes to send.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ProbesDue {
    /// Probes addressed to distinct sampled replicas.
    pub addressed: u32,
    /// Probes without an address, which go to a replica that the probe cluster's policy chooses.
    pub discovery: u32,
}

impl ProbesDue {
    /// Whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.addressed == 0 && self.discovery == 0
    }
}

/// Pool, RIF history, probe clock and rates of one upstream cluster; the bytes of the shared blob.
#[derive(Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct PoolState {
    tag: Tag,
    entry_count: u16,
    history_count: u16,
    history_next: u16,
    /// 1 when the next removal takes the worst entry, 0 for the oldest.
    remove_worst: u16,
    /// Number of picks so far, wrapping.
    picks: u16,
    remove_credit: f32,
    noise: Noise,
    trials: Trials,
    /// Moving averages per pick.
    reports_per_pick: f32,
    new_per_pick: f32,
    /// Moving average of the time between two picks, milliseconds. Pauses of [`IDLE_MS`] or more do not count.
    gap_ms: f32,
    reports_since_pick: u32,
    new_since_pick: u32,
    members: u32,
    /// Number of samples of the policy so far, see [`crate::client::members`].
    samples: u32,
    /// Moving average of the choices that Envoy refused, per pick.
    refusals_per_pick: f32,
    /// 1 while steering pauses; the pause began at `paused_at`.
    paused: u32,
    paused_at: Stamp,
    last_pick: Stamp,
    /// Time of the first pick after a long idle time.
    busy_since: Stamp,
    clock: Clock,
    members_changed: Stamp,
    /// Number of members before the fleet last grew.
    settled: u32,
    cooldown_count: u32,
    /// 1 while the ejection table must be consulted.
    ejections: u16,
    /// Number of replicas that the ejection table excludes.
    ejected: u16,
    /// Version of the ejection table that the two fields above come from.
    ejections_version: u32,
    cooldowns: [Cooldown; MAX_COOLDOWNS],
    history_at: [Stamp; MAX_HISTORY],
    history_rif: [u16; MAX_HISTORY],
    /// Last field: the blob ends with the occupied entries.
    entries: [Entry; MAX_POOL],
}

/// Summary of the pool, for metrics and tests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PoolView {
    /// Number of entries.
    pub occupancy: usize,
    /// θ; `None` with an empty history or at `q_rif` 0 or 1.
    pub theta: Option<u16>,
    /// Number of replicas in use.
    pub members: u32,
    /// Median age of the entries, milliseconds; `None` without entries.
    pub median_age_ms: Option<u32>,
}

impl Default for PoolState {
    fn default() -> Self {
        Self::new()
    }
}

impl PoolState {
    /// Returns an empty pool.
    pub fn new() -> Self {
        Self { tag: Self::TAG, reports_per_pick: 1.0, clock: Clock::new(), ..Self::zeroed() }
    }

    /// Chooses a replica for one request by hot and cold, and returns how many probes to send.
    pub fn pick<G: Rng>(&mut self, settings: &PoolSettings, now: Micros, rng: &mut G) -> Pick {
        let probes = self.begin_pick(settings, now.stamp());
        let rule = self.hot_and_cold(settings, now.stamp(), self.entries());
        self.pick_first(settings, now, rng, probes, &rule, None)
    }

    /// Like [`Self::pick`], by predicted latency.
    pub fn pick_predicted<G: Rng>(&mut self, settings: &PoolSettings, now: Micros, rng: &mut G) -> Pick {
        let probes = self.begin_pick(settings, now.stamp());
        let rule = self.predicted(now.stamp(), self.entries());
        let mut trials = self.trials;
        let tried = rule.trial(self.entries(), &mut trials, rng);
        self.trials = trials;
        self.pick_first(settings, now, rng, probes, &rule, tried)
    }

    /// Like [`Self::pick`], by a caller's ranking: the entry with the lowest `score` is chosen, the highest is the
    /// worst. Scores must not be NaN. All other rules of the pool apply (paper §5.2: Linear and C3 on Prequal's
    /// probing).
    pub fn pick_scored<G: Rng>(
        &mut self,
        settings: &PoolSettings,
        now: Micros,
        rng: &mut G,
        score: impl Fn(&Candidate) -> f64,
    ) -> Pick {
        let stamp = now.stamp();
        let probes = self.begin_pick(settings, stamp);
        self.pick_first(settings, now, rng, probes, &Scored(score, stamp), None)
    }

    /// Returns the choice for a request that is a trial of an ejected replica ([`crate::client::ejection`]).
    pub fn pick_trial(&mut self, settings: &PoolSettings, trial: Trial, now: Micros) -> Pick {
        let fallback = Pick::fallback(trial.placement, self.begin_pick(settings, now.stamp()));
        Pick { replica: Some(trial.replica), branch: Branch::Cold, trial: true, ..fallback }
    }

    /// Returns the choice for a request that goes to an agentless replica, or with `None` to the caller's own policy.
    /// While the pool cannot choose, that policy places all requests, on all replicas.
    pub fn pick_unreported(
        &mut self,
        settings: &PoolSettings,
        replica: Option<Endpoint>,
        now: Micros,
    ) -> Pick {
        let stamp = now.stamp();
        let fallback = Pick::fallback(Placement::even(self.samples), self.begin_pick(settings, stamp));
        let replica = replica.filter(|_| self.can_choose(stamp));
        let branch = if replica.is_some() { Branch::Agentless } else { Branch::Fallback };
        Pick { replica, branch, ..fallback }
    }

    /// Adopts the state of the ejection table and removes ejected replicas from the pool.
    pub fn exclude(&mut self, ejections: &EjectionTable, now: Micros) {
        self.ejections = ejections.is_active(now).into();
        self.ejected = u16::try_from(ejections.ejected()).unwrap_or(u16::MAX);
        self.ejections_version = ejections.version();
        let mut index = 0;
        while let Some(entry) = self.entries().get(index) {
            if ejections.is_ejected(entry.endpoint) { self.remove(index) } else { index += 1 }
        }
    }

    /// Whether the ejection table must be consulted.
    pub fn has_ejections(&self) -> bool {
        self.ejections == 1
    }

    /// Whether the pool last excluded replicas according to this version of the ejection table.
    pub fn follows(&self, ejections: &EjectionTable) -> bool {
        ejections.version() != 0 && self.ejections_version == ejections.version()
    }

    /// Number of replicas that the ejection table excludes.
    pub fn ejected(&self) -> u32 {
        self.ejected.into()
    }

    /// Number of replicas in use and of samples of the policy, as given to [`Self::set_members`].
    pub fn membership(&self) -> (u32, u32) {
        (self.members, self.samples)
    }

    /// Lower median of the shares of failures that the pool's other replicas reported, per mille; 0 without any.
    pub fn failing_beside(&self, replica: Endpoint) -> u16 {
        let mut shares = [0; MAX_POOL];
        let mut count = 0;
        let others = self.entries().iter().filter(|entry| entry.endpoint != replica && entry.unproven == 0);
        for (slot, other) in shares.iter_mut().zip(others) {
            *slot = other.failing;
            count += 1;
        }
        let shares = shares.get_mut(..count).unwrap_or_default();
        shares.sort_unstable();
        shares.get(count.saturating_sub(1) / 2).copied().unwrap_or(0)
    }

    /// Whether there are enough entries to choose from, and steering does not pause.
    fn can_choose(&mut self, stamp: Stamp) -> bool {
        // If all replicas but one are ejected, that one is the choice.
        let enough = self.members.saturating_sub(self.ejected.into()).clamp(1, 2);
        let enough = if self.ejected == 0 { 2 } else { enough as u16 };
        self.entry_count >= enough && !self.is_paused(stamp)
    }

    /// Performs the first steps that are common to all picks.
    fn begin_pick(&mut self, settings: &PoolSettings, stamp: Stamp) -> ProbesDue {
        self.expire(settings, stamp);
        self.update_rates();
        let probes = self.probes_due(settings, stamp);
        let gap_ms = stamp.distance_ms(self.last_pick);
        if gap_ms >= IDLE_MS {
            self.busy_since = stamp;
        } else {
            self.gap_ms += (gap_ms as f32 - self.gap_ms) * GAP_WEIGHT;
        }
        self.last_pick = stamp;
        probes
    }

    fn predicted(&self, now: Stamp, entries: &[Entry]) -> Predicted {
        Predicted::over(entries, self.picks, &self.noise, self.has_grown(now), now)
    }

    /// Picks the entry at index `tried` if there is one, otherwise the first entry in `order`.
    fn pick_first<O: Order, G: Rng>(
        &mut self,
        settings: &PoolSettings,
        now: Micros,
        rng: &mut G,
        probes: ProbesDue,
        order: &O,
        tried: Option<usize>,
    ) -> Pick {
        let stamp = now.stamp();
        let mut pick = Pick::fallback(Placement::even(self.samples), probes);
        let learning = self.is_learning(settings, stamp) && (self.has_grown(stamp) || !self.is_whole());
        self.picks = self.picks.wrapping_add(1);
        let picks = self.picks;
        if self.can_choose(stamp)
            && let Some((index, branch, gave_way)) = self.first_or_tried(order, tried, rng)
            && !(branch == Branch::Hot && self.overflows(settings, stamp, index))
            && let Some(entry) = self.entries.get_mut(index)
            && !(learning && entry.at_server() >= u32::from(CROWD))
        {
            pick.replica = Some(entry.endpoint);
            pick.latency_us = order.latency_us(entry);
            pick.branch = branch;
            pick.verify = entry.unproven == 1;
            pick.placement = entry.placement();
            // RIF compensation (§4): this request is on its way to the replica.
            entry.rif = entry.rif.saturating_add(1);
            entry.sent.count(now);
            entry.chosen = picks;
            entry.uses_left = entry.uses_left.saturating_sub(1);
            let (chosen, used_up) = (entry.endpoint, entry.uses_left == 0);
            if let Some(young) = gave_way.and_then(|young| self.entries.get_mut(young)) {
                // This counts as the young replica's turn.
                young.chosen = picks;
            }
            if pick.verify {
                // The candidate gets no other request until this one has been answered, even if probes name it again.
                self.cool_down(chosen, now, VERIFY_MS);
            } else if used_up {
                self.remove(index);
            }
        }
        self.remove_some(settings, rng, order);
        pick
    }

    fn first_or_tried<O: Order, G: Rng>(
        &self,
        order: &O,
        tried: Option<usize>,
        rng: &mut G,
    ) -> Option<(usize, Branch, Option<usize>)> {
        if let Some(tried) = tried {
            return Some((tried, Branch::Trial, None));
        }
        let first = lowest_with_slow_start(self.entries(), order, rng)?;
        let branch = order.branch(self.entries().get(first.index)?, &first.rank);
        Some((first.index, branch, first.gave_way))
    }

    /// Records a report of `endpoint`. The caller has checked that the report can be attributed to that replica.
    /// `placement` is the replica's placement according to the membership, or to the pick that led to the report.
    pub fn record(
        &mut self,
        settings: &PoolSettings,
        now: Micros,
        endpoint: Endpoint,
        load: Load,
        placement: Placement,
        rng: &mut impl Rng,
    ) {
        let stamp = now.stamp();
        self.reports_since_pick = self.reports_since_pick.saturating_add(1).min(MAX_RATE);
        self.clock.answered();
        // A response to a request sent long ago must not replace a newer placement of the replica.
        let old = self.entries().iter().find(|entry| entry.endpoint == endpoint).copied();
        let known = old.map(|old| old.placement());
        let placement = known.filter(|known| self.newer(known, &placement)).unwrap_or(placement);
        self.trials.reported(endpoint, load.capacity);
        let mut entry = Entry::new(settings, endpoint, load, placement, stamp);
        if let Some(old) = old {
            self.noise.reported(&old, &entry);
        }
        if load.source == Source::Probe || !settings.theta_of_probes {
            self.remember_rif(settings, stamp, entry.load());
        }
        if let Some(old) = old {
            entry.rif = self.with_uncounted(settings, &old, entry.rif, load.source, now);
        }
        if self.is_cooling_down(endpoint, stamp) || !placement.is_in_use(self.samples, self.members) {
            return;
        }
        self.expire(settings, stamp);
        let room = self.room(settings, stamp);
        let b_reuse = reuse_budget(
            room as f64,
            f64::from(self.members),
            f64::from(self.reports_per_pick),
            self.removal_rate(settings, room),
            settings.delta,
            f64::from(settings.reuse_cap),
        );
        let uses_left = u16::try_from(round_randomly(b_reuse, rng)).unwrap_or(u16::MAX).max(1);
        self.insert(settings, stamp, Entry { uses_left, ..entry });
    }

    /// Returns the RIF of a replica that has just reported `reported`, including the pool's own requests that the
    /// report cannot count. `old` is the replica's entry.
    fn with_uncounted(
        &self,
        settings: &PoolSettings,
        old: &Entry,
        reported: u16,
        source: Source,
        now: Micros,
    ) -> u16 {
        match (source, settings.budget) {
            // The pool's own count usually includes all of them. So on a network with a short round trip, a request
            // that the report does count is not added to it.
            (Source::Response, _) => {
                let left = old.rif.saturating_sub(1);
                reported.saturating_add(old.sent.uncounted(now)).min(left.max(reported))
            }
            // A probe that was sent with a request may overtake it, and then its reply does not count the request. If
            // the request came first, the reply does count it, so nothing is added beyond the pool's own count.
            (Source::Probe, Budget::Adaptive { .. }) => {
                let latest = old.chosen == self.picks && old.sent.is_recent(now);
                let missed = old.sent.uncounted(now).max(latest.into());
                reported.saturating_add(missed).min(old.rif.max(reported))
            }
            (Source::Probe, Budget::Fixed { .. }) => reported,
        }
    }

    /// Adds a candidate, so that it gets one request. Its report is not trusted yet.
    pub fn introduce(&mut self, settings: &PoolSettings, now: Micros, endpoint: Endpoint) {
        let stamp = now.stamp();
        self.clock.answered();
        if self.is_cooling_down(endpoint, stamp) || self.replicas().any(|replica| replica == endpoint) {
            return;
        }
        let entry = Entry {
            endpoint,
            latency_us: UNKNOWN,
            base_us: UNKNOWN,
            knee: 1,
            chosen: 0,
            received: stamp,
            sampled: self.samples,
            weight: Placement::UNIT,
            rif: 0,
            away: 0,
            uses_left: 1,
            unproven: 1,
            share: FULL_SHARE,
            failing: 0,
            flags: 0,
            rse_percent: 0,
            sent: Sent::default(),
        };
        self.insert(settings, stamp, entry);
    }

    fn insert(&mut self, settings: &PoolSettings, stamp: Stamp, entry: Entry) {
        let endpoint = entry.endpoint;
        if let Some(old) = self.entries_mut().iter_mut().find(|old| old.endpoint == endpoint) {
            *old = Entry { chosen: old.chosen, sent: old.sent, ..entry };
            return;
        }
        self.new_since_pick = self.new_since_pick.saturating_add(1).min(MAX_RATE);
        self.expire(settings, stamp);
        while usize::from(self.entry_count) >= self.capacity(settings, stamp) {
            let Some(oldest) = self.oldest(stamp) else { break };
            self.remove(oldest);
        }
        if let Some(slot) = self.entries.get_mut(usize::from(self.entry_count)) {
            *slot = entry;
            self.entry_count += 1;
        }
    }

    /// Records that a request to the replica has failed. The report on the response does not count, because a replica
    /// that fails at once looks idle and fast. But the request is no longer in flight, and the entry counts as fresh, so
    /// that the replica keeps its turn. This also applies to a replica that did not answer: ejection deals with it.
    pub(crate) fn left(&mut self, endpoint: Endpoint, now: Micros) {
        if let Some(entry) = self.entries_mut().iter_mut().find(|entry| entry.endpoint == endpoint) {
            entry.rif = entry.rif.saturating_sub(1);
            entry.received = now.stamp();
        }
    }

    /// Removes the entry of a replica that has left.
    pub fn forget(&mut self, endpoint: Endpoint) {
        if let Some(index) = self.entries().iter().position(|entry| entry.endpoint == endpoint) {
            self.remove(index);
        }
    }

    /// Sets how many replicas are in use and how many samples of the policy were taken.
    pub fn set_members(&mut self, members: u32, samples: u32, now: Micros) {
        if members > self.members {
            if now.stamp().distance_ms(self.members_changed) >= GROWING_MS {
                self.settled = self.members;
            }
            self.members_changed = now.stamp();
        }
        (self.members, self.samples) = (members, samples);
    }

    /// Whether the latest pick chose this replica, and its request is still on the way. If a probe overtook the
    /// request, its reply would not count the request, and would replace a RIF that does.
    pub(crate) fn is_latest_pick(&self, endpoint: Endpoint, now: Micros) -> bool {
        let is_latest = |entry: &Entry| entry.chosen == self.picks && entry.sent.uncounted(now) > 0;
        self.entries().iter().any(|entry| entry.endpoint == endpoint && is_latest(entry))
    }

    /// Whether the replica has a report younger than `age_ms`: probing it would add little.
    pub fn heard_within(&self, endpoint: Endpoint, now: Micros, age_ms: u32) -> bool {
        let stamp = now.stamp();
        self.entries().iter().any(|e| e.endpoint == endpoint && stamp.distance_ms(e.received) < age_ms)
    }

    /// Returns a summary of the pool.
    pub fn view(&self, settings: &PoolSettings, now: Micros) -> PoolView {
        let theta = match self.theta(settings, now.stamp()) {
            Theta::At(theta, _) => u16::try_from(theta).ok(),
            Theta::AllHot | Theta::NoneHot => None,
        };
        let mut ages = [0; MAX_POOL];
        for (age, entry) in ages.iter_mut().zip(self.entries()) {
            *age = now.stamp().distance_ms(entry.received);
        }
        let ages = ages.get_mut(..usize::from(self.entry_count)).unwrap_or_default();
        ages.sort_unstable();
        let median_age_ms = ages.get(ages.len() / 2).copied();
        PoolView { occupancy: usize::from(self.entry_count), theta, members: self.members, median_age_ms }
    }

    /// Endpoints of the replicas that reported less than `max_age_ms` ago.
    pub(crate) fn alive(&self, settings: &PoolSettings, now: Micros) -> impl Iterator<Item = Endpoint> + '_ {
        let (stamp, limit) = (now.stamp(), settings.max_age_ms);
        self.entries().iter().filter(move |e| stamp.distance_ms(e.received) < limit).map(|e| e.endpoint)
    }

    /// Endpoints of the replicas in the pool.
    pub fn replicas(&self) -> impl Iterator<Item = Endpoint> + '_ {
        self.entries().iter().map(|entry| entry.endpoint)
    }

    /// The current entries.
    #[cfg(test)]
    pub(crate) fn candidates(&self, now: Micros) -> impl Iterator<Item = Candidate> + '_ {
        self.entries().iter().map(move |entry| entry.candidate(now.stamp()))
    }

    /// Size of the encoded blob, bytes.
    fn size(&self) -> usize {
        let vacant = MAX_POOL.saturating_sub(self.entry_count.into());
        size_of::<Self>() - vacant * size_of::<Entry>()
    }

    fn entries(&self) -> &[Entry] {
        self.entries.get(..usize::from(self.entry_count)).unwrap_or_default()
    }

    fn entries_mut(&mut self) -> &mut [Entry] {
        self.entries.get_mut(..usize::from(self.entry_count)).unwrap_or_default()
    }

    fn remove(&mut self, index: usize) {
        let Some(last) = usize::from(self.entry_count).checked_sub(1) else { return };
        if index <= last {
            self.entries.swap(index, last);
            self.entry_count -= 1;
        }
    }

    /// Removes entries that are too old, and entries of replicas that are out of use.
    pub(crate) fn expire(&mut self, settings: &PoolSettings, now: Stamp) {
        let limit = self.age_limit(settings);
        let mut index = 0;
        while let Some(entry) = self.entries().get(index) {
            if now.distance_ms(entry.received) >= limit
                || !entry.placement().is_in_use(self.samples, self.members)
            {
                self.remove(index);
            } else {
                index += 1;
            }
        }
    }

    /// Age at which reports leave the pool now, milliseconds. Normally that is `max_age_ms`. Where requests are rare,
    /// reports are kept until the client could have visited every replica several times. Otherwise, the pool would hold
    /// so few replicas that requests wait while others are idle, and slow replicas would be forgotten between requests.
    /// A fixed number of probes per request, the paper's rule, does not extend the limit.
    fn age_limit(&self, settings: &PoolSettings) -> u32 {
        let Budget::Adaptive { .. } = settings.budget else { return settings.max_age_ms };
        let rounds_ms = (ROUNDS * self.members as f32 * self.gap_ms) as u32;
        rounds_ms.min(settings.max_age_ms.saturating_mul(MOST_EXTENSION)).max(settings.max_age_ms)
    }

    fn oldest(&self, now: Stamp) -> Option<usize> {
        let age = |entry: &Entry| now.distance_ms(entry.received);
        self.entries().iter().enumerate().max_by_key(|(_, entry)| age(entry)).map(|(index, _)| index)
    }

    fn newer(&self, one: &Placement, other: &Placement) -> bool {
        let age = |placement: &Placement| self.samples.wrapping_sub(placement.sampled) as i32;
        age(one) < age(other)
    }

    /// Whether the pool holds every replica in use, so that Envoy's own policy could choose no other. The burst guard
    /// would then only replace a choice based on known loads with a random one.
    fn is_whole(&self) -> bool {
        self.members > 0 && u32::from(self.entry_count) + u32::from(self.ejected) >= self.members
    }

    /// Whether even the best replica has far more in flight than usual: requests were sent faster than reports arrive,
    /// so the pool is out of date.
    fn overflows(&self, settings: &PoolSettings, now: Stamp, index: usize) -> bool {
        let load = self.entries.get(index).map_or(0, Entry::load);
        match self.theta(settings, now) {
            Theta::At(theta, _) if settings.burst_guard && !self.is_whole() => {
                load > theta + u32::from(CROWD)
            }
            _ => false,
        }
    }

    /// Whether the burst guard is on, and the fleet is new or its latencies have been forgotten: then the few known
    /// replicas must not carry all of the load.
    fn is_learning(&self, settings: &PoolSettings, now: Stamp) -> bool {
        settings.burst_guard && (self.has_grown(now) || now.distance_ms(self.busy_since) < GROWING_MS)
    }

    /// Whether the fleet has at least doubled recently, so that replicas may exist that are not known yet.
    fn has_grown(&self, now: Stamp) -> bool {
        self.members / 2 >= self.settled && now.distance_ms(self.members_changed) < GROWING_MS
    }

    /// Index of the last entry in `order`.
    fn worst<G: Rng>(&self, rng: &mut G, order: &impl Order) -> Option<usize> {
        self.entries()
            .iter()
            .enumerate()
            .max_by_key(|(_, entry)| (order.rank(entry, rng), self.last_pick.distance_ms(entry.received)))
            .map(|(index, _)| index)
    }

    fn remove_some<G: Rng>(&mut self, settings: &PoolSettings, rng: &mut G, order: &impl Order) {
        let now = self.last_pick;
        self.remove_credit += self.removal_rate(settings, self.room(settings, now)) as f32;
        while self.remove_credit >= 1.0 {
            self.remove_credit -= 1.0;
            if settings.scale_removal && usize::from(self.entry_count) < self.capacity(settings, now) {
                continue;
            }
            let victim = if self.remove_worst == 1 { self.worst(rng, order) } else { self.oldest(now) };
            self.remove_worst ^= 1;
            if let Some(victim) = victim {
                self.remove(victim);
            }
        }
    }

    /// Maximum number of entries now.
    fn capacity(&self, settings: &PoolSettings, now: Stamp) -> usize {
        let oldest = self.entries().iter().map(|entry| now.distance_ms(entry.received)).max();
        settings.capacity(self.members, oldest)
    }

    /// Pool size from which the rates of reuse and removal are computed: the result of [`Self::capacity`]. A small
    /// fleet always fits into the pool, so its size gives the same rates without a search for the oldest report.
    fn room(&self, settings: &PoolSettings, now: Stamp) -> usize {
        if settings.holds_whole(self.members) { self.members as usize } else { self.capacity(settings, now) }
    }

    fn removal_rate(&self, settings: &PoolSettings, room: usize) -> f64 {
        if settings.scale_removal && (1..=room).contains(&(self.members as usize)) {
            0.0
        } else if settings.scale_removal {
            settings.r_remove.min(f64::from(self.new_per_pick))
        } else {
            settings.r_remove
        }
    }

    fn update_rates(&mut self) {
        const WEIGHT: f32 = 1.0 / 64.0;
        self.reports_per_pick += (self.reports_since_pick as f32 - self.reports_per_pick) * WEIGHT;
        self.new_per_pick += (self.new_since_pick as f32 - self.new_per_pick) * WEIGHT;
        self.reports_since_pick = 0;
        self.new_since_pick = 0;
        self.refusals_per_pick -= self.refusals_per_pick * REFUSAL_WEIGHT;
    }
}

#[expect(clippy::non_canonical_clone_impl, reason = "most of the state need not be copied")]
impl Clone for PoolState {
    fn clone(&self) -> Self {
        *self
    }

    /// Leaves out the vacant entries: with few replicas, they are most of the state.
    fn clone_from(&mut self, source: &Self) {
        let occupied = source.encode();
        if let Some(bytes) = bytemuck::bytes_of_mut(self).get_mut(..occupied.len()) {
            bytes.copy_from_slice(&occupied);
        }
    }
}

impl Blob for PoolState {
    const TAG: Tag = Tag::of_release(0x7072_6571, 16); // "preq"

    fn decode(bytes: &[u8]) -> Result<Self, BlobError> {
        let mut state = Self::zeroed();
        let too_long = BlobError::Size { got: bytes.len(), want: size_of::<Self>() };
        bytemuck::bytes_of_mut(&mut state).get_mut(..bytes.len()).ok_or(too_long)?.copy_from_slice(bytes);
        if bytes.len() != state.size() {
            return Err(BlobError::Size { got: bytes.len(), want: state.size() });
        }
        Self::TAG.check(bytes)?;
        let finite = [state.reports_per_pick, state.new_per_pick, state.refusals_per_pick]
            .iter()
            .all(|rate| (0.0..=1e6).contains(rate));
        let bounded = usize::from(state.entry_count) <= MAX_POOL
            && usize::from(state.history_count) <= MAX_HISTORY
            && usize::from(state.history_next) < MAX_HISTORY
            && state.cooldown_count as usize <= MAX_COOLDOWNS
            && state.remove_worst <= 1
            && (0.0..1.0).contains(&state.remove_credit)
            && (0.0..=IDLE_MS as f32).contains(&state.gap_ms)
            && state.reports_since_pick <= MAX_RATE
            && state.new_since_pick <= MAX_RATE
            && state.ejections <= 1
            && state.noise.is_sound()
            && state.trials.is_sound()
            && state.clock.is_sound();
        if !finite || !bounded || !state.entries().iter().all(Entry::is_sound) {
            return Err(BlobError::Content);
        }
        Ok(state)
    }

    fn encode(&self) -> Cow<'_, [u8]> {
        bytemuck::bytes_of(self).get(..self.size()).unwrap_or_default().into()
    }
}

/// Time that a candidate's first request may take before the candidate gets another, milliseconds.
const VERIFY_MS: u32 = 5000;
/// Time without a pick after which the fleet counts as new, milliseconds. It is shorter than the 15 s after which
/// agents forget their samples.
const IDLE_MS: u32 = 10_000;
/// Weight of the latest gap in the average gap between picks.
const GAP_WEIGHT: f32 = 1.0 / 32.0;
/// Where requests are rare, a report is kept for this many requests per replica.
const ROUNDS: f32 = 4.0;
/// Maximum age of a report where requests are rare, in multiples of `max_age_ms`.
const MOST_EXTENSION: u32 = 10;
/// Upper bound of the counters between two picks; a higher average is not credible.
const MAX_RATE: u32 = 10_000;

#[cfg(test)]
mod tests;
