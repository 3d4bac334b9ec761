//! Decides how many probes are due, with or without a request. [`crate::client::members`] chooses the replicas that are
//! probed, and the adapter sends the probes.

use super::entry::Entry;
use super::{Budget, PoolSettings, PoolState, ProbesDue};
use crate::shared::time::{Micros, Stamp};

impl PoolState {
    /// Returns the probes to send if there has been neither a request nor a probe for `interval_ms`.
    ///
    /// The caller writes the state back with compare-and-swap, so that only one of several workers sends probes per
    /// interval.
    pub fn idle_probes(&mut self, settings: &PoolSettings, now: Micros, interval_ms: u32) -> ProbesDue {
        let stamp = now.stamp();
        if stamp.distance_ms(self.last_pick) < interval_ms {
            return ProbesDue::default();
        }
        let due = self.clock.idle(stamp, interval_ms, settings.attainable(self.available()) as u32);
        if settings.verified_probes {
            ProbesDue { addressed: 0, discovery: due }
        } else {
            ProbesDue { addressed: due.saturating_sub(1), discovery: due.min(1) }
        }
    }

    /// Whether nothing changes until the next request or report: the pool is empty, and no idle probes are left.
    pub fn is_at_rest(&self, interval_ms: u32) -> bool {
        self.entry_count == 0 && (interval_ms == 0 || self.clock.idle_left() == 0)
    }

    /// Number of replicas that the pool may choose from; 0 while none are known.
    fn available(&self) -> u32 {
        self.members.saturating_sub(self.ejected.into()).max(self.members.min(1))
    }

    pub(super) fn probes_due(&mut self, settings: &PoolSettings, now: Stamp) -> ProbesDue {
        let (pays, wanted) = match settings.budget {
            // As in the paper, discovery is added on top.
            Budget::Fixed { r_probe } => (SAVED.into(), r_probe),
            Budget::Adaptive { target_age_ms, max_probes_per_query } => {
                let size = settings.attainable(self.available());
                let young =
                    self.entries().iter().filter(|e| now.distance_ms(e.received) <= target_age_ms).count();
                let wanted = if young * 2 < size || self.needs_others() {
                    max_probes_per_query
                } else if settings.verified_probes {
                    0.0
                } else {
                    let elapsed = now.distance_ms(self.last_pick).min(settings.max_age_ms);
                    let explore = f64::from(elapsed) * size as f64 / f64::from(settings.max_age_ms.max(1));
                    explore.min(max_probes_per_query)
                };
                (max_probes_per_query, wanted)
            }
        };
        let samples = self.samples_wanted(settings, now);
        self.clock.request(now, pays as f32, wanted as f32, samples)
    }

    /// Whether every known replica is saturated while others are not known. Some of those are probably idle, but only
    /// probes can tell: a replica without requests sends no responses.
    fn needs_others(&self) -> bool {
        !self.is_whole() && self.entries().iter().all(Entry::is_saturated)
    }

    /// Number of discovery probes wanted. They find replicas that get no requests. With reports on responses alone, the
    /// first two replicas to answer would get all requests, and an ejected replica would get no trial.
    fn samples_wanted(&self, settings: &PoolSettings, now: Stamp) -> f32 {
        if settings.discovery_interval_ms == PoolSettings::NO_DISCOVERY {
            return 0.0;
        }
        let growing = self.members == 0 || now.distance_ms(self.members_changed) < GROWING_MS;
        let members = self.members as f32;
        let rate = if growing {
            (members * 6.0).clamp(80.0, 1000.0)
        } else {
            (1000.0 / settings.discovery_interval_ms.max(1) as f32).max((members / 4.0).min(MOST_SAMPLES))
        };
        let wanted = self.clock.since_sample(now) as f32 * rate / 1000.0;
        if growing {
            return wanted;
        }
        if settings.verified_probes {
            let together = (rate / MOST_BURSTS).floor();
            return if wanted.min(self.clock.saved) < together { 0.0 } else { wanted };
        }
        // Without verified probes, discovery probes provide no load. Most of the probes that rare requests pay for must
        // provide one.
        match wanted {
            _ if !self.picks.is_multiple_of(4) => 0.0,
            2.0.. => 1.0,
            _ => wanted,
        }
    }
}

/// Timing of all probes of a cluster. Requests pay for probes. Probes that are paid for but not needed are saved, and
/// some of them are sent when no requests come. A cluster that gets no requests therefore soon gets no probes, and rare
/// requests cause no more probes each than frequent ones.
///
/// While no probe is answered, probes are sent only each time the silence has doubled.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Clock {
    saved: f32,
    /// Fraction of an addressed probe that is carried over to the next request.
    wanted: f32,
    /// Time of the last probes, and of the last discovery probes.
    probed: Stamp,
    sampled: Stamp,
    /// Number of probes since the last report, and the time when the first of them was sent.
    unanswered: u32,
    asked: Stamp,
}

impl Clock {
    pub(super) const fn new() -> Self {
        let never = Stamp(0);
        Self { saved: SAVED, wanted: 0.0, probed: never, sampled: never, unanswered: 0, asked: never }
    }

    /// Whether a blob may hold these numbers.
    pub(super) fn is_sound(&self) -> bool {
        [self.saved, self.wanted].iter().all(|probes| (0.0..=SAVED).contains(probes))
    }

    /// Handles a request that pays for `pays` probes and wants `addressed` probes and `samples` discovery probes.
    fn request(&mut self, now: Stamp, pays: f32, addressed: f32, samples: f32) -> ProbesDue {
        self.saved = (self.saved + pays).min(SAVED);
        // Rounded deterministically (§4, footnote 7).
        let wanted = self.wanted + addressed;
        self.wanted = wanted.fract();
        if self.is_silent(now) {
            return ProbesDue::default();
        }
        let discovery = samples.min(BURST).min(self.saved).floor();
        let addressed = wanted.min(self.saved - discovery).floor();
        if discovery > 0.0 {
            // The remaining fraction counts for the next probe.
            let left = if samples < BURST { 1.0 - discovery / samples } else { 0.0 };
            self.sampled = Stamp(now.0.wrapping_sub((self.since_sample(now) as f32 * left) as u32));
        }
        self.send(now, addressed + discovery);
        ProbesDue { addressed: addressed as u32, discovery: discovery as u32 }
    }

    /// Handles an interval without a request: one pool's worth of probes is wanted.
    fn idle(&mut self, now: Stamp, interval_ms: u32, pool: u32) -> u32 {
        if now.distance_ms(self.probed) < interval_ms || self.is_silent(now) {
            return 0;
        }
        let due = pool.min(self.idle_left());
        self.send(now, due as f32);
        due
    }

    /// Number of probes available without a request; some are kept for the request that ends the pause.
    fn idle_left(&self) -> u32 {
        (self.saved - BURST) as u32
    }

    /// Records that a report has arrived, or the name of a candidate.
    pub(super) fn answered(&mut self) {
        self.unanswered = 0;
    }

    fn since_sample(&self, now: Stamp) -> u32 {
        now.distance_ms(self.sampled)
    }

    fn is_silent(&self, now: Stamp) -> bool {
        let silence = self.probed.distance_ms(self.asked);
        self.unanswered >= PATIENCE
            && silence >= PATIENCE_MS
            && now.distance_ms(self.probed) < silence.min(LONGEST_MS)
    }

    fn send(&mut self, now: Stamp, probes: f32) {
        if probes <= 0.0 {
            return;
        }
        // A long gap between rare requests is not silence.
        if self.unanswered == 0 || now.distance_ms(self.probed) > 2 * LONGEST_MS {
            (self.asked, self.unanswered) = (now, 0);
        }
        self.unanswered = self.unanswered.saturating_add(probes as u32);
        self.saved -= probes;
        // A late worker must not set `probed` back, but a step of the clock must.
        let late_ms = self.probed.0.wrapping_sub(now.0);
        if !(1..LATE_MS).contains(&late_ms) {
            self.probed = now;
        }
    }
}

/// Time after a replica comes into use during which the policy is sampled at a high rate, milliseconds.
pub(super) const GROWING_MS: u32 = 2000;
/// Maximum rate of discovery probes in a settled fleet, per second. At this rate a thousand replicas are sampled in
/// 10 s.
const MOST_SAMPLES: f32 = 105.0;
/// Maximum number of times per second that a settled fleet is sampled. If more samples are due, several are sent
/// together: a probe right after another costs half as much, because the caches are warm.
const MOST_BURSTS: f32 = 15.0;
/// Maximum number of saved probes; all but [`BURST`] of them may go out without a request.
const SAVED: f32 = 32.0;
/// Maximum number of discovery probes with one request.
const BURST: f32 = 8.0;
/// Number of unanswered probes below which silence may be chance. A silence shorter than [`PATIENCE_MS`] may be chance
/// too.
const PATIENCE: u32 = 16;
const PATIENCE_MS: u32 = 1000;
/// Maximum delay of a late worker, milliseconds; a longer one means that the clock has stepped.
const LATE_MS: u32 = 10_000;
/// Maximum pause while no probe is answered, milliseconds.
const LONGEST_MS: u32 = 60_000;

#[cfg(test)]
mod tests {
    use super::*;

    const EACH: f32 = 0.7;

    fn all(due: ProbesDue) -> u32 {
        due.addressed + due.discovery
    }

    /// Sends requests at these times, each wanting as many probes as possible. `answers` returns whether any earlier
    /// probe is answered.
    fn requests(
        clock: &mut Clock,
        times: impl Iterator<Item = u32>,
        answers: impl Fn(u32) -> bool,
    ) -> Vec<(u32, u32)> {
        let mut request = |at| {
            if answers(at) {
                clock.answered();
            }
            (at, all(clock.request(Stamp(at), EACH, 1.0, 8.0)))
        };
        times.map(&mut request).filter(|(_, probes)| *probes > 0).collect()
    }

    fn total(sent: &[(u32, u32)]) -> u32 {
        sent.iter().map(|(_, probes)| probes).sum()
    }

    #[test]
    fn probes_are_proportional_to_requests_at_any_rate() {
        for gap in [1, 200, 5_000, 300_000] {
            let mut clock = Clock::new();
            let mut probes = 0;
            for n in 1..=1000 {
                probes += total(&requests(&mut clock, std::iter::once(n * gap), |_| true));
                // Each worker checks four times a second.
                probes += (0..gap)
                    .step_by(250)
                    .map(|after| clock.idle(Stamp(n * gap + after), 1000, 24))
                    .sum::<u32>();
            }
            assert!((690..=700 + SAVED as u32).contains(&probes), "one request every {gap} ms: {probes}");
        }
    }

    #[test]
    fn an_idle_cluster_is_not_probed_until_the_next_request() {
        let mut clock = Clock::new();
        let idle = |clock: &mut Clock, from: u32, hours: u32| -> Vec<u32> {
            let times = (from..from + hours * 3_600_000).step_by(250);
            times.map(|at| clock.idle(Stamp(at), 1000, 16)).filter(|due| *due > 0).collect()
        };
        assert_eq!(idle(&mut clock, 5_000, 10), [16, 8], "a pool's worth per interval, and then none");
        assert_eq!(all(clock.request(Stamp(60_000_000), EACH, 1.0, 8.0)), 8, "those kept for this request");
        assert!(idle(&mut clock, 60_001_000, 1).is_empty());
        // Many requests that need no probes pay for the probes of the next pause.
        (0..1000).for_each(|n| assert_eq!(all(clock.request(Stamp(70_000_000 + n), EACH, 0.0, 0.0)), 0));
        assert_eq!(idle(&mut clock, 70_002_000, 1), [16, 8]);
    }

    #[test]
    fn an_interval_has_no_more_idle_probes_than_there_are_replicas() {
        let mut clock = Clock::new();
        let mut second = |second: u32| {
            clock.answered();
            clock.idle(Stamp(second * 1000), 1000, 3)
        };
        let sent: Vec<u32> = (1..=20).map(&mut second).collect();
        assert_eq!(sent[..9], [3, 3, 3, 3, 3, 3, 3, 3, 0]);
    }

    #[test]
    fn without_answers_probes_back_off_to_one_a_minute() {
        let mut clock = Clock::new();
        let sent = requests(&mut clock, (10_000..610_000).step_by(10), |_| false);
        let late: Vec<u32> = sent.iter().map(|(at, _)| at - 10_000).filter(|at| *at >= 1000).collect();
        assert!(late.is_sorted_by(|one, next| next - one == LONGEST_MS.min(*one)), "{late:?}");
        assert!(total(&sent) < 110 + 9 * late.len() as u32 && late.len() <= 16, "{sent:?}");
    }

    #[test]
    fn the_first_answer_after_a_silence_ends_the_pause() {
        let mut clock = Clock::new();
        let sent = requests(&mut clock, (10_000..70_000).step_by(10), |at| at >= 60_000);
        let at_full_rate: Vec<_> = sent.into_iter().filter(|(at, _)| *at >= 60_000).collect();
        assert_eq!(at_full_rate[0].0, 60_000);
        assert!((690..=740).contains(&total(&at_full_rate)), "{}", total(&at_full_rate));
    }

    #[test]
    fn lost_probes_and_rare_requests_do_not_count_as_silence() {
        let mut clock = Clock::new();
        // One probe in ten is answered.
        let sent = requests(&mut clock, (0..100_000).step_by(10), |at| at % 100 == 0);
        assert!(total(&sent) >= 7000);
        // One request every three minutes, and no probe is answered.
        let sent = requests(&mut clock, (200_000..40_000_000).step_by(180_000), |_| false);
        assert!(total(&sent) >= 150, "{}", total(&sent));
    }

    #[test]
    fn a_clock_that_steps_pauses_for_a_minute_at_most() {
        for (before, after) in [(1_000_000_000, 10_000_000), (10_000_000, 1_000_000_000)] {
            let mut clock = Clock::new();
            requests(&mut clock, (before..before + 100_000).step_by(10), |_| false);
            let sent = requests(&mut clock, (after..after + 2 * LONGEST_MS + 10).step_by(10), |_| false);
            assert!(sent.len() >= 2 && total(&sent) < 200, "{sent:?}");
        }
    }
}
