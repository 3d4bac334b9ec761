//! The ejection table: replicas that no pick may choose for a while, and what readmits them.
//!
//! [`EjectionTable`] is a blob of its own beside the pool's, shared by the workers of an Envoy. It outlives pool
//! entries. Its bytes are no more than what it holds, and with hundreds of replicas those are many: each worker keeps a copy,
//! and reads it anew only once the pool follows another version ([`crate::pool::PoolState::follows`]), or where it has
//! something to tell. What one worker sees of its own requests is in [`flights`].
//!
//! A replica is **ejected** for one of these [`Reason`]s:
//!
//! - *failing*: of the requests that this Envoy sent there lately (the last [`MEMORY`], fading over 10 s) at least
//!   [`EjectionSettings::failure_share`] more failed than at the others, and at least two. A share, not a run of
//!   failures: a replica that fails every third request hardly ever fails five in a row. One failure in a thousand
//!   never gets there.
//! - *reported*: the replica says so itself, and the others do not. It hurts only itself if it lies.
//! - *unresponsive*: a request has waited for longer than any should, and nothing sent after it has been answered.
//!
//! **Trials** let it back: one request at a time, after 1, 2, 4 and then every 8 s, once the replica has been heard of (by
//! a probe) since the last. One that came back only a little late starts that over, once; one that came back late from a
//! replica that reports itself as slow as that goes on to 8 s at once. An unresponsive replica is back after
//! one answer in time, of a trial or of a request from before; a failing one after [`STREAK`] trials in a row, which follow
//! each other quickly (half-failing replicas pass a single trial every other time), and once it does not report failures
//! either. A replica that is back after it was unresponsive is **vouched** for: for 15 s its latency is what this
//! client sees if that is less than what it reports, which still includes that time.
//!
//! **The others** stand for what is no replica's own fault, such as a dependency that all of them share: the *median* of
//! their shares of failures, so that up to half of the fleet can be bad without excusing each other. Only those of which
//! there is evidence of the last 10 s count, and where they fail as well, more must have failed than chance would have.
//! A replica that turns out to fail like the others is back at its next report.
//!
//! **Panic**: when more than half of the fleet would be ejected, nobody is. Then it is not the replicas, or there is
//! nowhere else to go.

use std::borrow::Cow;
use std::mem;

use bytemuck::Zeroable;
use rand::Rng;

use crate::blob::{Blob, BlobError, Tag};
use crate::capacity::Capacity;
use crate::endpoint::Endpoint;
use crate::load::Load;
use crate::members::Placement;
use crate::time::{Micros, Stamp};

pub mod flights;

/// Most replicas in the table: all of a fleet of a thousand. What a larger fleet loses is counted
/// ([`EjectionTable::take_lost`]).
pub const MAX_EJECTIONS: usize = 1024;
/// Requests that the share of failures looks back on.
pub const MEMORY: f32 = 32.0;
/// Trials in a row that let a failing replica back in.
pub const STREAK: u8 = 5;

/// Checked settings; ranges are those of [`crate::config`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EjectionSettings {
    /// Share of failed requests, beyond that of the others, from which on a replica is ejected, 0.02 to 1; 0: never.
    pub failure_share: f64,
    /// A request that has waited this many times as long as nine in ten do, and longer than 99 in 100, is a sign of an
    /// unresponsive replica, 1 to 100; 0: never.
    pub wait_factor: f64,
}

impl EjectionSettings {
    /// Neither rule.
    pub const OFF: Self = Self { failure_share: 0.0, wait_factor: 0.0 };

    /// Whether a replica that reports this share of failures, per mille, is ejected for it while the others report
    /// none.
    pub fn believes(&self, failing: u16) -> bool {
        let least = f64::from(MIN_REPORTED).max(self.failure_share * 1000.0);
        self.failure_share > 0.0 && f64::from(failing) >= least
    }

    /// Whether it is ejected while the others report a share of `others`. That may be of few requests.
    fn believes_beside(&self, failing: u16, others: u16) -> bool {
        let [failed, expected] = [failing, others].map(|share| f32::from(share) / 1000.0 * REPORTED_TOTAL);
        self.believes(failing.saturating_sub(others)) && stands_out(failed, REPORTED_TOTAL, expected, 0.0)
    }

    /// Whether this share of failures, per mille, is small enough for a replica to come back.
    fn forgives(&self, failing: u16) -> bool {
        f64::from(failing) < self.failure_share * 1000.0
    }
}

/// Why a replica is ejected.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Reason {
    /// Too many of our requests fail there.
    Failing,
    /// It reports that too many of its requests fail.
    Reported,
    /// It does not answer.
    Unresponsive,
}

/// What a request, or its absence of an answer, tells of a replica.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event {
    /// A failure of the replica's making: 5xx, gRPC error, reset, refused, timed out. `requests` were sent there by this
    /// worker since its last failure, faded as [`flights`] does.
    Failed {
        /// Good requests since.
        requests: f32,
        /// Other replicas that have answered this worker lately, without a failure.
        well: u32,
        /// The request was a trial.
        trial: bool,
    },
    /// A request is overdue, and nothing sent after it was answered.
    Unresponsive {
        /// The request was a trial.
        trial: bool,
        /// The replica had reported an ordinary latency until then.
        ordinary: bool,
    },
    /// An answer.
    Answered {
        /// From request to answer, microseconds.
        latency_us: u32,
        /// Within its limit.
        in_time: Timing,
        /// The request was a trial.
        trial: bool,
    },
}

/// How an answer compares with its limit.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Timing {
    /// Within it.
    InTime,
    /// Within twice the limit: bad luck, perhaps.
    Narrow,
    /// Later.
    Late,
    /// Later, and no surprise: the replica reports such a latency itself.
    Slow,
}

/// What became of an event, for metrics.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Change {
    /// Nothing that others need to know: the blob need not be written.
    None,
    /// Counts have changed.
    Noted,
    /// The replica is ejected from now on.
    Ejected(Reason),
    /// The replica is back.
    Returned(Reason),
}

/// A request that shows whether a replica is well again.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Trial {
    /// Whom it goes to.
    pub replica: Endpoint,
    /// Its placement when it was last heard of.
    pub placement: Placement,
}

/// The table of one upstream cluster.
#[derive(Default)]
pub struct EjectionTable {
    /// Replicas known: decides when too many are ejected.
    members: u32,
    /// Those that were well beside the one that failed last, to the worker that told.
    well: u32,
    version: u32,
    /// In the order of their endpoints.
    records: Vec<Record>,
    /// No part of the blob.
    lost: u32,
}

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Header {
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
    /// When it was ejected, or the last trial was sent or failed.
    since: Stamp,
    backoff_ms: u32,
    /// When it was vouched for, and the latency seen since.
    vouched_at: Stamp,
    vouched_us: u32,
    heard_at: Stamp,
    /// Of its [`Placement`].
    sampled: u32,
    weight: u16,
    /// 0: in; else a [`Reason`].
    reason: u8,
    streak: u8,
    /// 1 once heard of since the last trial.
    heard: u8,
    /// 1 while vouched for.
    vouched: u8,
    /// The share of failures that it reported last, beyond that of the others, per mille.
    reported: u16,
    /// 1: vouch for it when it is back.
    vouch: u8,
    /// 1 until a trial has failed narrowly.
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

    /// Brings the counts up to `now`. Those of an ejected replica stand still but for its trials.
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

    fn eject(&mut self, reason: Reason, vouch: bool, now: Stamp) -> Change {
        // Who fails again soon goes on with the back-off where it was. One that did not answer may have paused.
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
        Change::Ejected(reason)
    }

    fn back_off(&mut self) {
        self.backoff_ms = self.backoff_ms.saturating_mul(2).clamp(MIN_BACKOFF_MS, MAX_BACKOFF_MS);
    }

    fn trial_failed(&mut self, now: Stamp) {
        self.back_off();
        (self.since, self.streak, self.heard) = (now, 0, 0);
    }

    /// After failures: enough trials in a row went well, and the replica agrees.
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

    /// Trials of a streak follow each other quickly, unless the replica itself says that it still fails.
    fn wait_ms(&self, settings: &EjectionSettings) -> u32 {
        if self.streak > 0 && self.agrees(settings) { STREAK_GAP_MS } else { self.backoff_ms }
    }

    /// The replica does not report more failures than the others.
    fn agrees(&self, settings: &EjectionSettings) -> bool {
        settings.forgives(self.reported)
    }

    /// It fails more of its requests than the others do.
    fn stands_out(&self, beside: Others, settings: &EjectionSettings) -> bool {
        let share = settings.failure_share as f32;
        // Few others are a guess.
        let usual = beside.share * (1.0 + (beside.count.max(1) as f32).sqrt().recip());
        stands_out(self.failed, self.total, self.total * usual, share)
    }

    /// Its share of failures while that is recent. Few requests make none of 1.
    fn recent_share(&self, now: Stamp) -> Option<f32> {
        let age = now.distance_ms(self.updated);
        let keep = fading(age);
        (age < FADES_MS as u32).then(|| self.failed * keep / (self.total * keep).max(MIN_TOTAL))
    }
}

/// Whether `failed` of `total` requests are more than the `expected` ones, by `share` of them at least and by more than
/// chance: a likelihood ratio.
fn stands_out(failed: f32, total: f32, expected: f32, share: f32) -> bool {
    let excess = failed - expected;
    excess >= share * total && failed * (failed / expected).ln() - excess >= EVIDENCE
}

/// What is known of the replicas beside one.
#[derive(Clone, Copy, Debug)]
struct Others {
    /// The median of their shares of failures, rounded down.
    share: f32,
    /// How many there is evidence of.
    count: u32,
}

impl Clone for EjectionTable {
    fn clone(&self) -> Self {
        Self { records: self.records.clone(), ..*self }
    }

    /// Into the room that there is.
    fn clone_from(&mut self, other: &Self) {
        let Self { members, well, version, lost, ref records } = *other;
        (self.members, self.well, self.version, self.lost) = (members, well, version, lost);
        self.records.clone_from(records);
    }
}

impl EjectionTable {
    /// An empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// Tells how many replicas are in use.
    pub fn set_members(&mut self, members: u32) {
        self.members = members;
    }

    /// Number of replicas in use, as set by [`Self::set_members`].
    pub fn members(&self) -> u32 {
        self.members
    }

    /// Version number, from 1. 0 marks a copy that was never written.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Starts a new version. Call it once per write.
    pub fn changed(&mut self) {
        self.version = self.version.wrapping_add(1).max(1);
    }

    /// Marks this copy as one that was never written.
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

    /// Whether an answer of `replica` may change its record.
    pub fn watches(&self, replica: Endpoint, now: Micros) -> bool {
        self.get(replica).is_some_and(|record| record.is_active(now.stamp()))
    }

    /// Whether a report without failures may change the record: `replica` is ejected and has not reported lately.
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

    /// Takes in what a request told of `replica`.
    pub fn apply(
        &mut self,
        settings: &EjectionSettings,
        now: Micros,
        replica: Endpoint,
        event: Event,
    ) -> Change {
        let now = now.stamp();
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
                    return record.eject(Reason::Failing, true, now);
                }
                Change::Noted
            }
            Event::Unresponsive { trial, ordinary } => {
                let Some(record) = self.find_or_add(replica, now) else { return Change::None };
                match record.reason() {
                    None => record.eject(Reason::Unresponsive, ordinary, now),
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
                    // Not stuck but slow, as it says and was before: that is the rule's business.
                    (Reason::Unresponsive, Timing::Slow) if record.vouch == 0 => record.readmit(now),
                    // Another trial soon would only be another slow request.
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
                            // Luck, by its own word.
                            record.back_off();
                        }
                        record.readmit_if_well(settings, now)
                    }
                    _ => Change::None,
                }
            }
        }
    }

    /// A report of `replica` came in; `failing` is the share that it reports of itself, per mille, `others` the
    /// [median of the others'](crate::pool::PoolState::failing_beside). Tell it of every report while [`Self::is_active`],
    /// and else of those that [`EjectionSettings::believes`].
    pub fn heard(
        &mut self,
        settings: &EjectionSettings,
        now: Micros,
        replica: Endpoint,
        failing: u16,
        others: u16,
        placement: Placement,
    ) -> Change {
        let now = now.stamp();
        let known = self.knows(replica);
        if !known && !settings.believes(failing) {
            return Change::None;
        }
        let beside = self.others_than(replica, now);
        // Ejected replicas are not asked, but their failures are known.
        let others = others.max((beside.share * 1000.0) as u16);
        let more = failing.saturating_sub(others);
        let fails = settings.believes_beside(failing, others);
        if !known && !fails {
            return Change::None;
        }
        let Some(record) = self.find_or_add(replica, now) else { return Change::None };
        record.reported = more;
        let Some(reason) = record.reason() else {
            return if fails { record.eject(Reason::Reported, true, now) } else { Change::None };
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
            // No answer has shown how fast it is. What it failed still excuses the others.
            record.vouch = 0;
            let counts = (record.failed, record.total);
            let change = record.readmit(now);
            (record.failed, record.total) = counts;
            return change;
        }
        record.readmit_if_well(settings, now)
    }

    /// The load to record for a report of `replica`: as reported, or better while the replica is vouched for; `None` while
    /// it is ejected.
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

    /// A trial that is due, if chance will have it: at most one request in four is one, however many replicas are
    /// ejected. `samples` and `members` are the membership's.
    pub fn take_trial(
        &mut self,
        settings: &EjectionSettings,
        now: Micros,
        samples: u32,
        members: u32,
        rng: &mut impl Rng,
    ) -> Option<Trial> {
        let now = now.stamp();
        if self.panics() {
            return None;
        }
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

    /// Whether `replica` is ejected now: never in panic.
    pub fn is_ejected(&self, replica: Endpoint) -> bool {
        self.get(replica).is_some_and(|record| record.reason != 0) && !self.panics()
    }

    /// Replicas ejected now: none in panic.
    pub fn ejected(&self) -> usize {
        if self.panics() { 0 } else { self.flagged() }
    }

    /// The replicas that it has records of, and why they are out if they are.
    #[cfg(test)]
    pub(crate) fn reasons(&self) -> impl Iterator<Item = (Endpoint, Option<Reason>)> + '_ {
        self.records.iter().map(|record| (record.endpoint, record.reason()))
    }

    /// Whether a pick, an answer or a report must look at the table.
    pub fn is_active(&self, now: Micros) -> bool {
        self.records.iter().any(|record| record.is_active(now.stamp()))
    }

    /// Drops what no longer matters; returns whether anything was.
    pub fn expire(&mut self, now: Micros) -> bool {
        let now = now.stamp();
        let before = self.records.len();
        self.records.retain(|record| {
            if record.reason != 0 {
                // Heard of no more: it has left, or will be new when it comes back.
                now.distance_ms(record.since) < FORGOTTEN_MS
                    || now.distance_ms(record.heard_at) < FORGOTTEN_MS
            } else {
                now.distance_ms(record.updated) < FORGOTTEN_MS || record.is_vouched(now)
            }
        });
        self.records.len() != before
    }

    /// Drops what is known of a replica that has left; returns whether anything was.
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
        // One that is well here may fail elsewhere.
        let well = self.well.min(self.members.saturating_sub(failing + 1));
        let count = well + failing;
        let mut left = (count.saturating_sub(1) / 2).checked_sub(well);
        let median = counts.iter().position(|count| {
            left = left.and_then(|left| left.checked_sub(*count));
            left.is_none()
        });
        Others { share: median.unwrap_or(0) as f32 / (SHARES - 1) as f32, count }
    }

    fn flagged(&self) -> usize {
        self.records.iter().filter(|record| record.reason != 0).count()
    }

    /// More than half of the fleet would be ejected, so nobody is.
    pub fn panics(&self) -> bool {
        self.flagged() * 2 > self.members as usize
    }

    /// More than half of the fleet are ejected, or fail every second request lately. Those that fail alike are not
    /// ejected, but there is nowhere better to go either.
    pub fn most_fail(&self, now: Micros) -> bool {
        // What a copy of the table still says of long ago is not counted.
        let fails = |record: &&Record| {
            record
                .recent_share(now.stamp())
                .is_some_and(|share| record.reason != 0 || (record.failed >= MIN_FAILED && share >= 0.5))
        };
        self.records.iter().filter(fails).count() * 2 > self.members as usize
    }

    /// Records lost since the last look, for lack of room: replicas that should be ejected, or counts of failures.
    pub fn take_lost(&mut self) -> u32 {
        mem::take(&mut self.lost)
    }

    /// A full table gives up the record that was touched longest ago among those that are in; with all ejected it takes
    /// no more.
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

/// What is left of a count after `ms`.
fn fading(ms: u32) -> f32 {
    (-(ms as f32) / FADES_MS).exp()
}

impl Blob for EjectionTable {
    const TAG: Tag = Tag::of_release(0x7072_656a, 3); // "prej"

    fn decode(bytes: &[u8]) -> Result<Self, BlobError> {
        let wrong_size = BlobError::Size { got: bytes.len(), want: size_of::<Header>() };
        let (header, records) = bytes.split_at_checked(size_of::<Header>()).ok_or(wrong_size)?;
        let header: Header = bytemuck::pod_read_unaligned(header);
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
        let Header { members, well, version, .. } = header;
        Ok(Self { members, well, version, records, lost: 0 })
    }

    fn encode(&self) -> Cow<'_, [u8]> {
        let record = size_of::<Record>() as u16;
        let Self { members, well, version, .. } = *self;
        let header = Header { tag: Self::TAG, record, members, well, version };
        let mut bytes = bytemuck::bytes_of(&header).to_vec();
        bytes.extend_from_slice(bytemuck::cast_slice(&self.records));
        bytes.into()
    }
}

/// Time constant of the counts.
const FADES_MS: f32 = 10_000.0;
/// Two failures a few seconds apart.
const MIN_FAILED: f32 = 1.5;
/// Requests that a share of another replica is of at least.
const MIN_TOTAL: f32 = 4.0;
/// Logarithm of the likelihood ratio from which on more failures than the others' are no chance: 10 of 32 beside a tenth.
const EVIDENCE: f32 = 4.0;
/// Shares that the median tells apart.
const SHARES: usize = 65;
/// Reported shares from which on a replica is believed, per mille: a lone failure reads 250 ([`crate::failures`]).
const MIN_REPORTED: u16 = 260;
/// Requests that a reported share is taken to be of.
const REPORTED_TOTAL: f32 = 8.0;
const MIN_BACKOFF_MS: u32 = 1000;
const MAX_BACKOFF_MS: u32 = 8000;
/// Between the trials of a streak.
const STREAK_GAP_MS: u32 = 100;
/// How long a replica is vouched for, as long as an agent remembers samples; and how soon a relapse is one.
const VOUCHED_MS: u32 = 15_000;
/// The placement of an ejected replica is renewed this often.
const HEARD_EVERY_MS: u32 = 500;
const FORGOTTEN_MS: u32 = 60_000;

#[cfg(test)]
mod tests;
