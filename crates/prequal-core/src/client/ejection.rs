//! The ejection table: replicas that get no ordinary requests for a while, and how they are readmitted.
//!
//! [`EjectionTable`] is a separate blob beside the pool's, shared by the workers of an Envoy. It outlives pool entries.
//! It encodes only the records that it holds, but with hundreds of replicas those are many bytes. Each worker therefore
//! keeps a copy. It rereads the blob only when the pool follows another version
//! ([`crate::client::pool::PoolState::follows`]), when the worker has an event to record, when a trial may be due, and
//! at ticks while [`EjectionTable::is_active`]. [`flights`] tracks one worker's own requests.
//!
//! A replica is **ejected** for one of these [`Reason`]s:
//!
//! - *failing*: of the last [`MEMORY`] requests that this Envoy sent to the replica (fading over 10 s), at least two
//!   have failed, and their share exceeds that of the other replicas by at least
//!   [`EjectionSettings::failure_share`]. The rule uses a share, not a run of failures, because a replica that fails
//!   every third request hardly ever fails five in a row. One failure in a thousand never ejects a replica.
//! - *reported*: the replica itself reports failures, and the others do not. A replica that lies about this hurts only
//!   itself.
//! - *unresponsive*: a request has waited longer than its limit ([`flights`]), and no request sent after it has been
//!   answered.
//!
//! **Trials** readmit a replica. A trial is one request, sent after 1, 2 and 4 s and then every 8 s, but only if the
//! replica has reported (to a probe) since the last trial. A trial that is answered only slightly late restarts this
//! back-off, once. If the answer is late and the replica itself reports such a latency, the back-off becomes 8 s
//! immediately; a replica that had reported itself slow before its ejection is readmitted instead. An unresponsive
//! replica is readmitted after one answer in time, to a trial or to an earlier request. A failing replica is readmitted
//! after [`STREAK`] successful trials in a row, once it also reports few enough failures. These trials follow one
//! another quickly. One trial would not be enough: a replica that fails half of its requests passes every other trial.
//! A readmitted replica is usually **vouched** for: for 15 s, the latency that this client sees replaces the reported
//! one if it is lower, because the reported one still includes the time before the readmission.
//!
//! **The others** show which failures are not a replica's own fault, such as those of a dependency that all replicas
//! share. The rule takes the *median* of their shares of failures, so that up to half of the fleet can be bad without
//! excusing each other. Only replicas with evidence from the last 10 s count. If the others fail as well, a replica is
//! ejected only if it has failed more requests than chance explains. An ejected replica that fails no more than the
//! others is readmitted at its next report.
//!
//! **Panic**: when more than half of the replicas in use would be ejected, no replica is. In that case the replicas are
//! not the cause, or there is nowhere else to send the requests.

use std::borrow::Cow;
use std::mem;

use bytemuck::Zeroable;
use rand::Rng;

use crate::client::members::Placement;
use crate::shared::blob::{Blob, BlobError, Tag};
use crate::shared::capacity::Capacity;
use crate::shared::endpoint::Endpoint;
use crate::shared::time::{Micros, Stamp};
use crate::wire::load::Load;

pub mod flights;

/// Maximum number of replicas in the table: a whole fleet of a thousand. Records that a larger fleet loses are counted
/// ([`EjectionTable::take_lost`]).
pub const MAX_EJECTIONS: usize = 1024;
/// Number of recent requests that the share of failures covers.
pub const MEMORY: f32 = 32.0;
/// Number of successful trials in a row that readmit a failing replica.
pub const STREAK: u8 = 5;

/// Checked settings; ranges are those of [`crate::config`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EjectionSettings {
    /// Share of failed requests, beyond that of the others, at which a replica is ejected, 0.02 to 1; 0: never.
    pub failure_share: f64,
    /// A request that has waited this many times the 90th percentile of response times, and longer than the 99th, is a
    /// sign of an unresponsive replica. 1 to 100; 0: never.
    pub wait_factor: f64,
}

impl EjectionSettings {
    /// Both rules off.
    pub const OFF: Self = Self { failure_share: 0.0, wait_factor: 0.0 };

    /// Whether this reported share of failures, per mille, ejects a replica while the others report none.
    pub fn believes(&self, failing: u16) -> bool {
        let least = f64::from(MIN_REPORTED).max(self.failure_share * 1000.0);
        self.failure_share > 0.0 && f64::from(failing) >= least
    }

    /// Like [`Self::believes`], while the others report a share of `others`. The shares may cover few requests, so the
    /// difference must also be more than chance explains.
    fn believes_beside(&self, failing: u16, others: u16) -> bool {
        let [failed, expected] = [failing, others].map(|share| f32::from(share) / 1000.0 * REPORTED_TOTAL);
        self.believes(failing.saturating_sub(others)) && stands_out(failed, REPORTED_TOTAL, expected, 0.0)
    }

    /// Whether this share of failures, per mille, is small enough for a replica to come back.
    fn forgives(&self, failing: u16) -> bool {
        f64::from(failing) < self.failure_share * 1000.0
    }
}

/// Reason for an ejection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Reason {
    /// Too many of this Envoy's requests to the replica fail.
    Failing,
    /// The replica reports that too many of its requests fail.
    Reported,
    /// The replica does not answer.
    Unresponsive,
}

/// Evidence about a replica: from a request, or from a missing answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event {
    /// A failure caused by the replica: 5xx, gRPC error, reset, refused, timed out. `requests` counts this worker's
    /// requests to the replica since the replica's last failure, faded as in [`flights`].
    Failed {
        /// Number of successful requests since the last failure.
        requests: f32,
        /// Number of other replicas that have recently answered this worker, without a failure.
        well: u32,
        /// Whether the request was a trial.
        trial: bool,
    },
    /// A request is overdue, and no request sent after it was answered.
    Unresponsive {
        /// Whether the request is a trial.
        trial: bool,
        /// Whether the replica had reported an ordinary latency (at most twice the typical one) when the request was
        /// sent.
        ordinary: bool,
    },
    /// An answer.
    Answered {
        /// Time from request to answer, microseconds.
        latency_us: u32,
        /// Comparison of the latency with its limit.
        in_time: Timing,
        /// Whether the request was a trial.
        trial: bool,
    },
}

/// Comparison of an answer's latency with its limit.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Timing {
    /// Within the limit.
    InTime,
    /// Beyond the limit but within twice the limit, perhaps by bad luck.
    Narrow,
    /// Later than twice the limit.
    Late,
    /// Later than twice the limit, but expected: the replica reports such a latency itself.
    Slow,
}

/// Result of an event, for metrics.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Change {
    /// Nothing that other workers need; the blob need not be written.
    None,
    /// Counts have changed.
    Noted,
    /// The replica is ejected from now on.
    Ejected(Reason),
    /// The replica is readmitted.
    Returned(Reason),
}

/// A request that tests whether an ejected replica has recovered.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Trial {
    /// The replica that gets the request.
    pub replica: Endpoint,
    /// Its placement when it was last heard from.
    pub placement: Placement,
}

/// Ejection table of one upstream cluster.
#[derive(Default)]
pub struct EjectionTable {
    /// Number of replicas in use; decides when too many are ejected.
    members: u32,
    /// Number of healthy replicas besides the one that failed last, as seen by the worker that recorded the failure.
    well: u32,
    version: u32,
    /// Sorted by endpoint.
    records: Vec<Record>,
    /// Number of records lost because the table was full. Not part of the blob.
    lost: u32,
    /// Number of samples of Envoy's own policy so far. It shows which replicas are out of use. Not part of the blob.
    samples: u32,
}

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct TableHeader {
    tag: Tag,
    record: u16,
    members: u32,
    well: u32,
    version: u32,
}

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Record {
    endpoint: Endpoint,
    /// Faded counts as of `updated`.
    failed: f32,
    total: f32,
    updated: Stamp,
    /// Time of the last ejection or readmission, or when the last trial was sent or ended.
    since: Stamp,
    backoff_ms: u32,
    /// Time since which the replica is vouched for, and the latency seen since, microseconds.
    vouched_at: Stamp,
    vouched_us: u32,
    heard_at: Stamp,
    /// From its [`Placement`].
    sampled: u32,
    weight: u16,
    /// 0: not ejected; otherwise a [`Reason`].
    reason: u8,
    streak: u8,
    /// 1 once heard from since the last trial.
    heard: u8,
    /// 1 while vouched for.
    vouched: u8,
    /// The share of failures that it last reported, beyond that of the others, per mille.
    reported: u16,
    /// 1: vouch for the replica when it is readmitted.
    vouch: u8,
    /// 1 while a narrowly late trial may still restart the back-off.
    chance: u8,
    padding: [u8; 2],
}

impl Record {
    fn reason(&self) -> Option<Reason> {
        match self.reason {
            1 => Some(Reason::Failing),
            2 => Some(Reason::Reported),
            3 => Some(Reason::Unresponsive),
            _ => None,
        }
    }

    fn placement(&self) -> Placement {
        Placement { sampled: self.sampled, weight: self.weight }
    }

    fn is_vouched(&self, now: Stamp) -> bool {
        self.vouched == 1 && now.distance_ms(self.vouched_at) < VOUCHED_MS
    }

    fn is_active(&self, now: Stamp) -> bool {
        self.reason != 0 || self.is_vouched(now)
    }

    fn was_heard(&self, now: Stamp) -> bool {
        self.heard == 1 && now.distance_ms(self.heard_at) < HEARD_EVERY_MS
    }

    /// Fades the counts up to `now`. Not called while the replica is ejected, so its counts keep their size.
    fn fade(&mut self, now: Stamp) {
        let keep = fading(now.distance_ms(self.updated));
        self.failed *= keep;
        self.total *= keep;
    }

    fn count(&mut self, now: Stamp, failed: f32, total: f32) {
        self.updated = now;
        self.failed += failed;
        self.total += total;
        if self.total > MEMORY {
            self.failed *= MEMORY / self.total;
            self.total = MEMORY;
        }
    }

    /// Ejects a replica that was in use after `samples` samples of the policy.
    fn eject(&mut self, reason: Reason, vouch: bool, samples: u32, now: Stamp) -> Change {
        // A relapse doubles the previous back-off, except for an unresponsive replica, which may only have paused.
        let relapsed = reason != Reason::Unresponsive && now.distance_ms(self.since) < VOUCHED_MS;
        let backoff_ms = if relapsed { self.backoff_ms.saturating_mul(2) } else { 0 };
        self.backoff_ms = backoff_ms.clamp(MIN_BACKOFF_MS, MAX_BACKOFF_MS);
        self.reason = match reason {
            Reason::Failing => 1,
            Reason::Reported => 2,
            Reason::Unresponsive => 3,
        };
        (self.since, self.streak, self.heard, self.vouched) = (now, 0, 0, 0);
        (self.vouch, self.chance) = (vouch.into(), vouch.into());
        // This placement applies until the replica is heard from.
        let Placement { sampled, weight } = Placement::even(samples);
        (self.sampled, self.weight) = (sampled, weight);
        Change::Ejected(reason)
    }

    fn back_off(&mut self) {
        self.backoff_ms = self.backoff_ms.saturating_mul(2).clamp(MIN_BACKOFF_MS, MAX_BACKOFF_MS);
    }

    fn trial_failed(&mut self, now: Stamp) {
        self.back_off();
        (self.since, self.streak, self.heard) = (now, 0, 0);
    }

    /// Readmits a failing replica after enough successful trials in a row, if the replica agrees.
    fn readmit_if_well(&mut self, settings: &EjectionSettings, now: Stamp) -> Change {
        if self.streak >= STREAK && self.agrees(settings) { self.readmit(now) } else { Change::Noted }
    }

    fn readmit(&mut self, now: Stamp) -> Change {
        let Some(reason) = self.reason() else { return Change::None };
        (self.reason, self.streak, self.since) = (0, 0, now);
        (self.failed, self.total) = (0.0, 0.0);
        (self.vouched, self.vouched_at) = (self.vouch, now);
        Change::Returned(reason)
    }

    /// Time between trials, milliseconds. Trials of a streak follow each other quickly, unless the replica reports that
    /// it still fails.
    fn wait_ms(&self, settings: &EjectionSettings) -> u32 {
        if self.streak > 0 && self.agrees(settings) { STREAK_GAP_MS } else { self.backoff_ms }
    }

    /// Whether the replica reports few enough failures to return.
    fn agrees(&self, settings: &EjectionSettings) -> bool {
        settings.forgives(self.reported)
    }

    /// Whether the replica fails a larger share of its requests than the others.
    fn stands_out(&self, beside: Others, settings: &EjectionSettings) -> bool {
        let share = settings.failure_share as f32;
        // The fewer others there are, the less certain is their median.
        let usual = beside.share * (1.0 + (beside.count.max(1) as f32).sqrt().recip());
        stands_out(self.failed, self.total, self.total * usual, share)
    }

    /// Returns the replica's share of failures if that is recent. The failures are divided by at least [`MIN_TOTAL`]
    /// requests, so that few requests never make a share of 1.
    fn recent_share(&self, now: Stamp) -> Option<f32> {
        let age = now.distance_ms(self.updated);
        let keep = fading(age);
        (age < FADES_MS as u32).then(|| self.failed * keep / (self.total * keep).max(MIN_TOTAL))
    }

    /// Whether the replica has recently failed at least half of its requests.
    fn fails_half(&self, now: Stamp) -> bool {
        self.failed >= MIN_FAILED && self.recent_share(now).is_some_and(|share| share >= 0.5)
    }
}

/// Whether `failed` of `total` requests exceed the `expected` failures by at least `share` of the requests, and by more
/// than chance according to a likelihood ratio.
fn stands_out(failed: f32, total: f32, expected: f32, share: f32) -> bool {
    let excess = failed - expected;
    excess >= share * total && failed * (failed / expected).ln() - excess >= EVIDENCE
}

/// Evidence about the replicas other than a given one.
#[derive(Clone, Copy, Debug)]
struct Others {
    /// The median of their shares of failures, rounded down.
    share: f32,
    /// Number of replicas with evidence.
    count: u32,
}

impl Clone for EjectionTable {
    fn clone(&self) -> Self {
        Self { records: self.records.clone(), ..*self }
    }

    /// Reuses the existing allocation.
    fn clone_from(&mut self, other: &Self) {
        let Self { members, well, version, lost, samples, ref records } = *other;
        (self.members, self.well, self.version, self.lost) = (members, well, version, lost);
        self.samples = samples;
        self.records.clone_from(records);
    }
}

impl EjectionTable {
    /// Returns an empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets how many replicas are in use and how many samples of the policy were taken. Returns whether that changes
    /// anything.
    pub fn set_members(&mut self, members: u32, samples: u32) -> bool {
        let before = (self.members, self.samples);
        (self.members, self.samples) = (members, samples);
        before != (members, samples)
    }

    /// Returns the version number, from 1; 0 marks a copy that was never written.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Starts a new version. Call it once per write.
    pub fn changed(&mut self) {
        self.version = self.version.wrapping_add(1).max(1);
    }

    /// Marks this copy as never written.
    pub fn disown(&mut self) {
        self.version = 0;
    }

    fn position(&self, replica: Endpoint) -> Result<usize, usize> {
        self.records.binary_search_by_key(&replica, |record| record.endpoint)
    }

    fn get(&self, replica: Endpoint) -> Option<&Record> {
        self.records.get(self.position(replica).ok()?)
    }

    fn get_mut(&mut self, replica: Endpoint) -> Option<&mut Record> {
        let index = self.position(replica).ok()?;
        self.records.get_mut(index)
    }

    /// Whether the table has a record of `replica`.
    pub fn knows(&self, replica: Endpoint) -> bool {
        self.get(replica).is_some()
    }

    /// Whether an answer from `replica` may change its record.
    pub fn watches(&self, replica: Endpoint, now: Micros) -> bool {
        self.get(replica).is_some_and(|record| record.is_active(now.stamp()))
    }

    /// Whether a report without failures may change the record: `replica` is ejected and has not reported recently.
    pub fn listens_to(&self, replica: Endpoint, now: Micros) -> bool {
        self.get(replica).is_some_and(|record| record.reason != 0 && !record.was_heard(now.stamp()))
    }

    /// Milliseconds until a trial may be due; `None` if no ejected replica has reported.
    pub fn next_trial_ms(&self, settings: &EjectionSettings, now: Micros) -> Option<u32> {
        let heard = self.records.iter().filter(|record| record.reason != 0 && record.heard == 1);
        let left =
            |record: &Record| record.wait_ms(settings).saturating_sub(now.stamp().distance_ms(record.since));
        heard.map(left).min()
    }

    /// Applies the evidence of one request about `replica`.
    pub fn apply(
        &mut self,
        settings: &EjectionSettings,
        now: Micros,
        replica: Endpoint,
        event: Event,
    ) -> Change {
        let (now, samples) = (now.stamp(), self.samples);
        let panic = self.panics();
        match event {
            Event::Failed { requests, well, trial } => {
                if settings.failure_share <= 0.0 {
                    return Change::None;
                }
                self.well = well;
                let beside = self.others_than(replica, now);
                let Some(record) = self.find_or_add(replica, now) else { return Change::None };
                if record.reason().is_none() {
                    record.fade(now);
                }
                record.count(now, 1.0, 1.0 + requests.clamp(0.0, MEMORY));
                if record.reason().is_some() {
                    if trial || panic {
                        record.trial_failed(now);
                    }
                    return Change::Noted;
                }
                if record.failed >= MIN_FAILED && record.stands_out(beside, settings) {
                    return record.eject(Reason::Failing, true, samples, now);
                }
                Change::Noted
            }
            Event::Unresponsive { trial, ordinary } => {
                let Some(record) = self.find_or_add(replica, now) else { return Change::None };
                match record.reason() {
                    None => record.eject(Reason::Unresponsive, ordinary, samples, now),
                    Some(_) if trial => {
                        record.trial_failed(now);
                        Change::Noted
                    }
                    Some(_) => Change::None,
                }
            }
            Event::Answered { latency_us, in_time, trial } => {
                let Some(record) = self.get_mut(replica) else { return Change::None };
                if record.is_vouched(now) {
                    record.vouched_us = record.vouched_us / 2 + latency_us / 2;
                    return Change::Noted;
                }
                let Some(reason) = record.reason() else { return Change::None };
                match (reason, in_time) {
                    (Reason::Unresponsive, Timing::InTime) => {
                        record.vouched_us = latency_us;
                        record.readmit(now)
                    }
                    (Reason::Unresponsive, Timing::Narrow) if trial && record.chance == 1 => {
                        (record.backoff_ms, record.since, record.chance) = (MIN_BACKOFF_MS, now, 0);
                        Change::Noted
                    }
                    // The replica is slow, not stuck: it reports this latency now and reported it before. The selection
                    // rule handles that.
                    (Reason::Unresponsive, Timing::Slow) if record.vouch == 0 => record.readmit(now),
                    // Another trial now would only be another slow request.
                    (Reason::Unresponsive, Timing::Slow) if trial => {
                        record.backoff_ms = MAX_BACKOFF_MS;
                        Change::Noted
                    }
                    (Reason::Unresponsive, _) => Change::None,
                    _ if trial || panic => {
                        record.streak = record.streak.saturating_add(1);
                        (record.since, record.heard) = (now, 1);
                        record.vouched_us = latency_us;
                        if !record.agrees(settings) {
                            // The trial passed by luck, according to the replica's own report.
                            record.back_off();
                        }
                        record.readmit_if_well(settings, now)
                    }
                    _ => Change::None,
                }
            }
        }
    }

    /// Records a report of `replica`. `failing` is the share of failures that it reports, per mille, and `others` is
    /// the median of the others ([`crate::client::pool::PoolState::failing_beside`]). Call it for every report while
    /// [`Self::is_active`], and otherwise for those that [`EjectionSettings::believes`] accepts.
    pub fn heard(
        &mut self,
        settings: &EjectionSettings,
        now: Micros,
        replica: Endpoint,
        failing: u16,
        others: u16,
        placement: Placement,
    ) -> Change {
        let (now, samples) = (now.stamp(), self.samples);
        let known = self.knows(replica);
        if !known && !settings.believes(failing) {
            return Change::None;
        }
        let beside = self.others_than(replica, now);
        // Ejected replicas are not part of `others`, but their failures are known here.
        let others = others.max((beside.share * 1000.0) as u16);
        let more = failing.saturating_sub(others);
        let fails = settings.believes_beside(failing, others);
        if !known && !fails {
            return Change::None;
        }
        let Some(record) = self.find_or_add(replica, now) else { return Change::None };
        record.reported = more;
        let Some(reason) = record.reason() else {
            return if fails { record.eject(Reason::Reported, true, samples, now) } else { Change::None };
        };
        if record.was_heard(now) {
            return Change::None;
        }
        (record.heard, record.heard_at) = (1, now);
        (record.sampled, record.weight) = (placement.sampled, placement.weight);
        let like_others = match reason {
            Reason::Failing => beside.share > 0.0 && !record.stands_out(beside, settings),
            Reason::Reported => !settings.forgives(others) && settings.forgives(more),
            Reason::Unresponsive => return Change::Noted,
        };
        if like_others {
            // No answer has shown how fast the replica is, so it is not vouched for. Its counts are kept, because its
            // failures still excuse those of the others.
            record.vouch = 0;
            let counts = (record.failed, record.total);
            let change = record.readmit(now);
            (record.failed, record.total) = counts;
            return change;
        }
        record.readmit_if_well(settings, now)
    }

    /// Returns the load to record for a report of `replica`: as reported, or better while the replica is vouched for;
    /// `None` while it is ejected.
    pub fn admit(&self, now: Micros, replica: Endpoint, load: Load) -> Option<Load> {
        let Some(record) = self.get(replica) else { return Some(load) };
        if record.reason != 0 {
            return self.panics().then_some(load);
        }
        if record.is_vouched(now.stamp()) {
            let seen = record.vouched_us;
            let latency_us = load.latency_us.map(|latency| latency.min(seen));
            let capacity = load.capacity.map(|of| Capacity { base_us: of.base_us.min(seen.max(1)), ..of });
            return Some(Load { latency_us, capacity, ..load });
        }
        Some(load)
    }

    /// With a probability of 1/4, returns the due trial that has waited longest. However many replicas are ejected, at
    /// most about one request in four is a trial.
    pub fn take_trial(
        &mut self,
        settings: &EjectionSettings,
        now: Micros,
        rng: &mut impl Rng,
    ) -> Option<Trial> {
        let now = now.stamp();
        if self.panics() {
            return None;
        }
        let (samples, members) = (self.samples, self.members);
        let due = |record: &&mut Record| {
            record.reason != 0
                && record.heard == 1
                && now.distance_ms(record.since) >= record.wait_ms(settings)
                && record.placement().is_in_use(samples, members)
        };
        let waited = |record: &&mut Record| now.distance_ms(record.since);
        let record = self.records.iter_mut().filter(due).max_by_key(waited)?;
        if rng.random_range(0..4) != 0 {
            return None;
        }
        (record.since, record.heard) = (now, 0);
        Some(Trial { replica: record.endpoint, placement: record.placement() })
    }

    /// Whether `replica` is ejected now; false in a panic.
    pub fn is_ejected(&self, replica: Endpoint) -> bool {
        self.get(replica).is_some_and(|record| record.reason != 0) && !self.panics()
    }

    /// Whether `replica` is ejected, would be if there were no panic, or fails at least half of its requests, as others
    /// may do too.
    pub(crate) fn is_bad(&self, replica: Endpoint, now: Micros) -> bool {
        self.get(replica).is_some_and(|record| record.reason != 0 || record.fails_half(now.stamp()))
    }

    /// Number of replicas in use that are ejected now; 0 in a panic.
    pub fn ejected(&self) -> usize {
        if self.panics() { 0 } else { self.flagged() }
    }

    /// The replicas that have records, and the reasons for their ejection, if any.
    #[cfg(test)]
    pub(crate) fn reasons(&self) -> impl Iterator<Item = (Endpoint, Option<Reason>)> + '_ {
        self.records.iter().map(|record| (record.endpoint, record.reason()))
    }

    /// Whether picks, answers and reports must consult the table.
    pub fn is_active(&self, now: Micros) -> bool {
        self.records.iter().any(|record| record.is_active(now.stamp()))
    }

    /// Removes records that no longer matter. Returns whether any was removed.
    pub fn expire(&mut self, now: Micros) -> bool {
        let now = now.stamp();
        let before = self.records.len();
        self.records.retain(|record| {
            if record.reason != 0 {
                // A replica that is no longer heard from has left, or will count as new when it comes back.
                now.distance_ms(record.since) < FORGOTTEN_MS
                    || now.distance_ms(record.heard_at) < FORGOTTEN_MS
            } else {
                now.distance_ms(record.updated) < FORGOTTEN_MS || record.is_vouched(now)
            }
        });
        self.records.len() != before
    }

    /// Removes the record of a replica that has left. Returns whether there was one.
    pub fn forget(&mut self, replica: Endpoint) -> bool {
        self.position(replica).map(|index| self.records.remove(index)).is_ok()
    }

    fn others_than(&self, replica: Endpoint, now: Stamp) -> Others {
        let mut counts = [0u32; SHARES];
        let mut failing = 0;
        let others = self.records.iter().filter(|record| record.endpoint != replica);
        for share in others.filter_map(|record| record.recent_share(now)) {
            failing += 1;
            if let Some(count) = counts.get_mut((share * (SHARES - 1) as f32) as usize) {
                *count += 1;
            }
        }
        // A replica that is healthy for this worker may fail for another; it must not be counted twice.
        let well = self.well.min(self.members.saturating_sub(failing + 1));
        let count = well + failing;
        let mut left = (count.saturating_sub(1) / 2).checked_sub(well);
        let median = counts.iter().position(|count| {
            left = left.and_then(|left| left.checked_sub(*count));
            left.is_none()
        });
        Others { share: median.unwrap_or(0) as f32 / (SHARES - 1) as f32, count }
    }

    /// Number of replicas in use that are ejected, or would be if there were no panic. After a fail-over, those of the
    /// old priority do not count.
    fn flagged(&self) -> usize {
        let counts =
            |record: &&Record| record.reason != 0 && record.placement().is_in_use(self.samples, self.members);
        self.records.iter().filter(counts).count()
    }

    /// Whether more than half of the replicas in use would be ejected, so that no replica is.
    pub fn panics(&self) -> bool {
        self.flagged() * 2 > self.members as usize
    }

    /// Whether more than half of the replicas would be ejected or have recently failed at least half of their requests. The
    /// second condition matters because replicas that all fail alike are not ejected.
    pub fn most_fail(&self, now: Micros) -> bool {
        let now = now.stamp();
        // A copy of the table may be out of date, so its old records do not count.
        let fails = |record: &&Record| {
            record.recent_share(now).is_some() && (record.reason != 0 || record.fails_half(now))
        };
        self.records.iter().filter(fails).count() * 2 > self.members as usize
    }

    /// Returns and resets the number of records lost because the table was full: replicas that should be ejected, or
    /// counts of failures.
    pub fn take_lost(&mut self) -> u32 {
        mem::take(&mut self.lost)
    }

    /// Finds or adds a record. A full table drops the least recently updated record of a replica that is not ejected.
    /// If all are ejected, it accepts no more.
    fn find_or_add(&mut self, replica: Endpoint, now: Stamp) -> Option<&mut Record> {
        if !self.knows(replica) {
            if self.records.len() >= MAX_EJECTIONS {
                self.lost = self.lost.saturating_add(1);
                let spare = self.records.iter().enumerate().filter(|(_, record)| record.reason == 0);
                let (index, _) = spare.max_by_key(|(_, record)| now.distance_ms(record.updated))?;
                self.records.remove(index);
            }
            let fresh =
                Record { endpoint: replica, updated: now, since: now, heard_at: now, ..Record::zeroed() };
            let place = self.position(replica).unwrap_or_else(|place| place);
            self.records.insert(place, fresh);
        }
        self.get_mut(replica)
    }
}

/// Returns the fraction of a count that remains after `ms`.
fn fading(ms: u32) -> f32 {
    (-(ms as f32) / FADES_MS).exp()
}

impl Blob for EjectionTable {
    const TAG: Tag = Tag::of_release(0x7072_656a, 3); // "prej"

    fn decode(bytes: &[u8]) -> Result<Self, BlobError> {
        let wrong_size = BlobError::Size { got: bytes.len(), want: size_of::<TableHeader>() };
        let (header, records) = bytes.split_at_checked(size_of::<TableHeader>()).ok_or(wrong_size)?;
        let header: TableHeader = bytemuck::pod_read_unaligned(header);
        Self::TAG.check(bytes)?;
        if usize::from(header.record) != size_of::<Record>() {
            return Err(BlobError::Version);
        }
        let records = records.chunks(size_of::<Record>());
        if records.len() > MAX_EJECTIONS {
            return Err(BlobError::Content);
        }
        let records: Result<Vec<Record>, _> = records.map(bytemuck::try_pod_read_unaligned).collect();
        let Ok(records) = records else { return Err(wrong_size) };
        let sound = |record: &Record| {
            record.endpoint.is_valid()
                && (0.0..=MEMORY).contains(&record.total)
                && (0.0..=record.total).contains(&record.failed)
                && record.reason <= 3
                && record.backoff_ms <= MAX_BACKOFF_MS
        };
        let ordered = records.is_sorted_by(|one, next| one.endpoint < next.endpoint);
        if !ordered || !records.iter().all(sound) {
            return Err(BlobError::Content);
        }
        let TableHeader { members, well, version, .. } = header;
        Ok(Self { members, well, version, records, lost: 0, samples: 0 })
    }

    fn encode(&self) -> Cow<'_, [u8]> {
        let record = size_of::<Record>() as u16;
        let Self { members, well, version, .. } = *self;
        let header = TableHeader { tag: Self::TAG, record, members, well, version };
        let mut bytes = bytemuck::bytes_of(&header).to_vec();
        bytes.extend_from_slice(bytemuck::cast_slice(&self.records));
        bytes.into()
    }
}

/// Time constant of the counts, milliseconds.
const FADES_MS: f32 = 10_000.0;
/// Minimum faded count of failures: two failures a few seconds apart reach it.
const MIN_FAILED: f32 = 1.5;
/// Minimum number of requests over which another replica's share of failures is taken.
const MIN_TOTAL: f32 = 4.0;
/// Logarithm of the likelihood ratio above which it is not chance that a replica fails more than the others. Example:
/// 10 failures in 32 requests, if the others fail a tenth.
const EVIDENCE: f32 = 4.0;
/// Number of shares that the median distinguishes.
const SHARES: usize = 65;
/// Minimum reported share that can eject a replica, per mille. A single failure is reported as 250
/// ([`crate::server::failures`]).
const MIN_REPORTED: u16 = 260;
/// Number of requests that a reported share is assumed to cover.
const REPORTED_TOTAL: f32 = 8.0;
const MIN_BACKOFF_MS: u32 = 1000;
const MAX_BACKOFF_MS: u32 = 8000;
/// Time between the trials of a streak, milliseconds.
const STREAK_GAP_MS: u32 = 100;
/// Time for which a readmitted replica is vouched for, milliseconds; agents remember samples for the same time. Also
/// the time within which a new failure is a relapse.
const VOUCHED_MS: u32 = 15_000;
/// Interval at which the placement of an ejected replica is renewed, milliseconds.
const HEARD_EVERY_MS: u32 = 500;
const FORGOTTEN_MS: u32 = 60_000;

#[cfg(test)]
mod tests;
