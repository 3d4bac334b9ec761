//! Synchronous mode (paper §4): a request probes `d` replicas and waits until `d − 1` usable answers have arrived, all
//! probes have ended, or the deadline has passed. The rule of [`crate::client::pool`] then chooses among the answers
//! ([`crate::client::pool::PoolState::pick_among`]). θ comes from the RIFs of earlier answers.
//!
//! A request with a hint also waits for the answer of the hint's first home ([`crate::wire::hint`]), because that
//! answer usually decides. Before the deadline, such a request compares at least two answers.
//!
//! The adapter sends the probes and keeps the request waiting. If no answer is usable, the pool chooses. The pool holds
//! the answers to earlier requests, including late ones.

use bytemuck::Zeroable;

mod waits;

pub use waits::{Wait, Waits};

use crate::client::members::{Placement, Target};
use crate::shared::endpoint::Endpoint;
use crate::wire::hint::HOMES;
use crate::wire::load::Load;

/// Maximum number of replicas probed per request.
pub const MAX_ASKED: usize = 8;
/// Longest deadline, milliseconds.
pub const MAX_DEADLINE_MS: u32 = 1000;

/// Settings of the synchronous mode.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SyncSettings {
    /// Number of probes per request, 2 to [`MAX_ASKED`]. Default 3 (the paper: 3 to 5).
    pub d: usize,
    /// Longest wait of a request, milliseconds, 1 to [`MAX_DEADLINE_MS`]. Default 3.
    pub deadline_ms: u32,
}

impl Default for SyncSettings {
    fn default() -> Self {
        Self { d: 3, deadline_ms: 3 }
    }
}

/// A usable answer: [`crate::client::Balancer`] has checked that it is valid for that replica.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Answer {
    /// The replica that answered.
    pub replica: Endpoint,
    /// The load that it reported.
    pub load: Load,
    /// Its placement according to the membership.
    pub placement: Placement,
    /// Its place among the homes of the request's hint, 0 for the first; `None` if it is none of them.
    pub home: Option<u8>,
}

/// Why a request stopped waiting.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Ending {
    /// Enough usable answers came.
    Enough,
    /// Every probe has ended, some without a usable answer.
    AllEnded,
    /// The deadline passed.
    Deadline,
}

/// The answers that one waiting request has received.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    needed: usize,
    open: usize,
    count: usize,
    homes: [Option<Endpoint>; HOMES],
    answers: [Answer; MAX_ASKED],
}

impl Waiting {
    /// Creates the state of a request that has probed `asked` replicas, where the settings ask for `d`.
    ///
    /// It needs `d − 1` answers. If fewer than `d` replicas were probed, it needs one answer fewer than there were
    /// probes, but at least two, because a comparison needs two (never more than `d − 1` or `asked`).
    pub fn new(d: usize, asked: usize) -> Self {
        let needed = asked.saturating_sub(1).max(2).min(d.saturating_sub(1)).min(asked).max(1);
        let vacant = Answer {
            replica: Endpoint::zeroed(),
            load: Load::at_face_value(0, None),
            placement: Placement::even(0),
            home: None,
        };
        Self { needed, open: asked, count: 0, homes: [None; HOMES], answers: [vacant; MAX_ASKED] }
    }

    /// Like [`Self::new`], for a request that has also probed the `homes` of its hint. With homes, it needs two answers
    /// even if `d` is 2.
    pub fn for_homes(d: usize, asked: usize, homes: [Option<Target>; HOMES]) -> Self {
        let waiting = Self::new(d, asked);
        let homes = homes.map(|home| home.map(|home| home.replica));
        let needed = if homes == [None; HOMES] { waiting.needed } else { waiting.needed.max(2).min(asked) };
        Self { needed, homes, ..waiting }
    }

    /// Records that a probe has ended, with or without a usable answer. Returns why the wait is over, once it is.
    pub fn ended(&mut self, answer: Option<Answer>) -> Option<Ending> {
        self.open = self.open.saturating_sub(1);
        if let Some(answer) = answer {
            self.take(answer);
        }
        if self.count >= self.needed && self.first_home_answered() {
            Some(Ending::Enough)
        } else if self.open == 0 {
            Some(Ending::AllEnded)
        } else {
            None
        }
    }

    /// Returns the usable answers so far, one per replica.
    pub fn answers(&self) -> &[Answer] {
        self.answers.get(..self.count).unwrap_or_default()
    }

    /// Whether the first home has answered, or the request has none.
    fn first_home_answered(&self) -> bool {
        let answered = |home| self.answers().iter().any(|answer| answer.replica == home);
        self.homes.first().copied().flatten().is_none_or(answered)
    }

    fn take(&mut self, mut answer: Answer) {
        let home = self.homes.iter().position(|home| *home == Some(answer.replica));
        answer.home = home.map(|place| place as u8);
        // Two probes without an address may have reached the same replica: the newer answer counts.
        let known = self.answers().iter().position(|known| known.replica == answer.replica);
        if let Some(slot) = self.answers.get_mut(known.unwrap_or(self.count)) {
            *slot = answer;
            self.count += usize::from(known.is_none());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::pool::{Branch, PoolSettings, PoolState, Ranking};
    use crate::config::Profile;
    use crate::shared::time::Micros;
    use rand::{SeedableRng, rngs::SmallRng};

    const NOW: Micros = Micros::from_millis(5);

    fn replica(n: u16) -> Endpoint {
        format!("10.0.0.1:{}", 1000 + n).parse().unwrap()
    }

    fn answer(n: u16, rif: u32, latency_us: Option<u32>) -> Option<Answer> {
        Some(Answer {
            replica: replica(n),
            load: Load::at_face_value(rif, latency_us),
            placement: Placement::even(0),
            home: None,
        })
    }

    fn three() -> Waiting {
        let mut waiting = Waiting::new(4, 4);
        for (n, rif, latency) in [(1, 9, 5_000), (2, 2, 40_000), (3, 3, 30_000)] {
            waiting.ended(answer(n, rif, Some(latency)));
        }
        waiting
    }

    fn rng() -> SmallRng {
        SmallRng::seed_from_u64(1)
    }

    fn settings(q_rif: f64) -> PoolSettings {
        PoolSettings { q_rif, ..Profile::Paper.pool_settings() }
    }

    /// A pool that remembers the RIFs of `answers` but has no entries.
    fn pool(settings: &PoolSettings, answers: &[Answer]) -> PoolState {
        let mut pool = PoolState::new();
        pool.set_members(100, 0, Micros(0));
        for answer in answers {
            pool.record(settings, NOW, answer.replica, answer.load, answer.placement, &mut rng());
            pool.forget(answer.replica);
        }
        pool
    }

    fn decide(waiting: &Waiting, q_rif: f64) -> (Option<Endpoint>, Branch) {
        let settings = settings(q_rif);
        let mut pool = pool(&settings, waiting.answers());
        let pick = pool.pick_among(&settings, NOW, waiting.answers(), Ranking::HotCold, &mut rng());
        (pick.replica, pick.branch)
    }

    #[test]
    fn all_answers_but_one_are_enough() {
        let mut waiting = Waiting::new(3, 3);
        assert_eq!(waiting.ended(answer(1, 0, None)), None);
        assert_eq!(waiting.ended(answer(2, 0, None)), Some(Ending::Enough));
        assert_eq!(Waiting::new(2, 2).ended(answer(1, 0, None)), Some(Ending::Enough));
    }

    #[test]
    fn failed_calls_end_and_are_never_used() {
        let mut waiting = Waiting::new(3, 3);
        assert_eq!(waiting.ended(None), None);
        assert_eq!(waiting.ended(answer(1, 0, None)), None);
        assert_eq!(waiting.ended(None), Some(Ending::AllEnded));
        assert_eq!(waiting.answers().len(), 1);
    }

    #[test]
    fn fewer_probes_than_d_need_fewer_answers() {
        for (d, asked, needed) in
            [(3, 1, 1), (3, 2, 2), (2, 2, 1), (3, 3, 2), (8, 3, 2), (8, 8, 7), (5, 4, 3), (8, 0, 1)]
        {
            assert_eq!(Waiting::new(d, asked).needed, needed, "d = {d}, {asked} asked");
        }
    }

    #[test]
    fn answers_of_one_replica_count_once() {
        let mut waiting = Waiting::new(3, 3);
        assert_eq!(waiting.ended(answer(1, 5, None)), None);
        assert_eq!(waiting.ended(answer(1, 7, None)), None);
        assert_eq!(waiting.answers(), [answer(1, 7, None).unwrap()]);
        let mut many = Waiting::new(8, 8);
        for n in 0..20 {
            many.ended(answer(n, 0, None));
        }
        assert_eq!(many.answers().len(), MAX_ASKED, "no more than `MAX_ASKED` answers are kept");
    }

    /// A request with a hint whose homes are replicas 1 and 2.
    fn with_homes(d: usize) -> Waiting {
        let target = |n| Some(Target { replica: replica(n), probe: replica(n) });
        Waiting::for_homes(d, d, [target(1), target(2)])
    }

    #[test]
    fn a_request_with_a_hint_waits_for_the_first_home() {
        let mut waiting = with_homes(4);
        for n in 2..4 {
            assert_eq!(waiting.ended(answer(n, 0, None)), None);
        }
        assert_eq!(waiting.ended(answer(4, 0, None)), None, "three of four are enough otherwise");
        assert_eq!(waiting.ended(answer(1, 0, None)), Some(Ending::Enough));
        let homes: Vec<Option<u8>> = waiting.answers().iter().map(|answer| answer.home).collect();
        assert_eq!(homes, [Some(1), None, None, Some(0)]);
    }

    #[test]
    fn a_hinted_request_needs_two_answers_even_if_a_home_fails() {
        let mut waiting = with_homes(2);
        assert_eq!(waiting.ended(answer(1, 0, None)), None);
        assert_eq!(waiting.ended(answer(2, 0, None)), Some(Ending::Enough));
        let mut waiting = with_homes(3);
        assert_eq!(waiting.ended(None), None);
        assert_eq!(waiting.ended(answer(2, 0, None)), None);
        assert_eq!(waiting.ended(answer(3, 0, None)), Some(Ending::AllEnded));
    }

    #[test]
    fn answers_are_compared_by_the_pools_rule() {
        let waiting = three();
        assert_eq!(decide(&waiting, 0.9), (Some(replica(3)), Branch::Sync), "the hot one is passed over");
        assert_eq!(decide(&waiting, 0.0), (Some(replica(2)), Branch::Sync), "RIF only");
        assert_eq!(decide(&waiting, 1.0), (Some(replica(1)), Branch::Sync), "latency only");
        assert_eq!(decide(&Waiting::new(3, 3), 0.5), (None, Branch::Fallback));
    }

    #[test]
    fn without_a_usable_answer_the_pool_chooses() {
        let settings = settings(1.0);
        let mut pool = pool(&settings, &[]);
        for n in [7, 8] {
            let load = Load::at_face_value(0, Some(u32::from(n)));
            pool.record(&settings, NOW, replica(n), load, Placement::even(0), &mut rng());
        }
        pool.cool_down(replica(1), NOW, 1000);
        let cooling_down = [answer(1, 0, Some(1)).unwrap()];
        let pick = pool.pick_among(&settings, NOW, &cooling_down, Ranking::HotCold, &mut rng());
        assert_eq!((pick.replica, pick.branch), (Some(replica(7)), Branch::Cold));
    }

    #[test]
    fn the_runner_up_is_the_next_answer_then_the_pool_and_never_the_chosen() {
        let settings = settings(1.0);
        let waiting = three();
        let mut pool = pool(&settings, waiting.answers());
        let next = |pool: &PoolState, answers: &[Answer]| {
            pool.runner_up(&settings, NOW, replica(1), answers, Ranking::HotCold, &mut rng())
        };
        assert_eq!(next(&pool, waiting.answers()), Some(replica(3)));
        assert_eq!(next(&pool, &waiting.answers()[..1]), None);
        for n in [1, 9] {
            let load = Load::at_face_value(0, Some(u32::from(n)));
            pool.record(&settings, NOW, replica(n), load, Placement::even(0), &mut rng());
        }
        assert_eq!(next(&pool, &waiting.answers()[..1]), Some(replica(9)));
        assert_eq!(next(&pool, &[]), Some(replica(9)));
    }
}
