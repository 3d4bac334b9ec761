//! One worker's copy of the shared membership, with the notes that it has not shared yet. The caller decides when to
//! share.

use super::{Evidence, Members};
use crate::shared::endpoint::Endpoint;
use crate::shared::time::Micros;

/// Maximum number of waiting notes: about as many as there are samples between two ticks at the highest sampling rate.
const MAX_NOTES: usize = 256;
/// Notes are shared once their number reaches the number of members divided by this. In a small fleet, notes are
/// therefore shared at once. Sharing takes time in proportion to the number of members. So up to four times
/// [`MAX_NOTES`] members, each note costs as much time as sharing a membership of this many members, whatever the size
/// of the fleet. Each worker holds back notes for at most about a quarter of a round.
const PART: usize = 4;

/// A worker's observation about the membership.
#[derive(Clone, Copy, Debug)]
pub enum Note {
    /// See [`Members::sample_met`].
    Sampled {
        /// The replica that was met.
        replica: Endpoint,
        /// Its probe endpoint, if that differs.
        probe: Option<Endpoint>,
    },
    /// See [`Members::observe`].
    Observed {
        /// The replica that was observed.
        replica: Endpoint,
        /// Its probe endpoint, if that differs.
        probe: Option<Endpoint>,
        /// How it became known.
        evidence: Evidence,
    },
    /// See [`Members::confirm`].
    Confirmed {
        /// The replica that served.
        replica: Endpoint,
        /// How it was chosen.
        evidence: Evidence,
    },
    /// See [`Members::served_unreported`].
    Unreported(Endpoint),
    /// See [`Members::has_reported`].
    Reported(Endpoint),
    /// See [`Members::renew`].
    Alive(Endpoint),
    /// See [`Members::remove`].
    Left(Endpoint),
}

impl Note {
    /// Applies the note. Returns whether anything changed.
    fn apply(self, members: &mut Members, at: Micros) -> bool {
        match self {
            Self::Sampled { replica, probe } => {
                members.sample_met(replica, probe, at);
                true
            }
            Self::Observed { replica, probe, evidence } => members.observe(replica, probe, evidence, at),
            Self::Confirmed { replica, evidence } => members.confirm(replica, evidence, at),
            Self::Unreported(replica) => members.served_unreported(replica, at),
            Self::Reported(replica) => members.has_reported(replica, at),
            Self::Alive(replica) => members.renew(replica, at),
            Self::Left(replica) => members.remove(replica),
        }
    }

    /// Whether there was no room for the note's replica.
    fn is_refused(self, members: &Members) -> bool {
        match self {
            Self::Sampled { replica, .. }
            | Self::Observed { replica, .. }
            | Self::Confirmed { replica, .. } => members.get(replica).is_none(),
            Self::Unreported(replica) => members.get(replica).is_none(),
            Self::Reported(_) | Self::Alive(_) | Self::Left(_) => false,
        }
    }
}

/// Counts of what did not fit.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Lost {
    /// Number of times that there was no room for a replica: [`super::MAX_MEMBERS`], [`super::MAX_CANDIDATES`].
    pub refused: u32,
    /// Number of notes dropped because too many were waiting to be shared.
    pub dropped: u32,
}

/// A worker's copy of the membership. The copy includes the worker's notes at once. The notes are shared when there are
/// enough of them or at the next tick: reading and writing a large membership for every sample would be expensive.
#[derive(Debug, Default)]
pub struct View {
    members: Members,
    notes: Vec<(Micros, Note)>,
    lost: Lost,
    /// Number of notes that the last [`Self::share`] found no room for.
    refused: u32,
}

impl View {
    /// Returns the membership as this worker knows it.
    pub fn members(&self) -> &Members {
        &self.members
    }

    /// Takes a note. Returns whether it changed anything. No note is taken while 256 are waiting.
    pub fn note(&mut self, at: Micros, note: Note) -> bool {
        if self.notes.len() >= MAX_NOTES {
            self.lost.dropped += 1;
            return false;
        }
        let changed = note.apply(&mut self.members, at);
        if changed {
            self.notes.push((at, note));
        } else if note.is_refused(&self.members) {
            self.lost.refused += 1;
        }
        changed
    }

    /// Whether the notes must be shared at once.
    pub fn is_due(&self) -> bool {
        self.notes.len() >= (self.members.list.len() / PART).clamp(1, MAX_NOTES)
    }

    /// Whether there is anything to share at a tick.
    pub fn has_updates(&self, now: Micros) -> bool {
        !self.notes.is_empty() || self.members.is_expired(now)
    }

    /// Applies the notes to the `stored` membership, forgets the replicas there that have not been heard from for too
    /// long, and adopts the result. Returns whether it must be written; once it is written, call [`Self::shared`].
    pub fn share(&mut self, stored: &mut Members, now: Micros) -> bool {
        // An idle period must be excused before the notes are applied. Otherwise one fresh note would end it, and the
        // other members would expire.
        let mut changed = stored.excuse(now);
        self.refused = 0;
        for (at, note) in &self.notes {
            changed |= note.apply(stored, *at);
            self.refused += u32::from(note.is_refused(stored));
        }
        changed |= stored.expire(now);
        self.members.clone_from(stored);
        changed
    }

    /// Records that the last shared state has been written or did not need writing.
    pub fn shared(&mut self) {
        self.notes.clear();
        self.lost.refused += std::mem::take(&mut self.refused);
    }

    /// Adopts the state that others have written. Call it only if there is nothing to share.
    pub fn adopt(&mut self, members: Members) {
        self.members = members;
    }

    /// Returns and resets the counts of what did not fit.
    pub fn take_lost(&mut self) -> Lost {
        std::mem::take(&mut self.lost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::members::{MAX_CANDIDATES, MAX_MEMBERS, MEMBER_TTL_MS};
    use crate::client::pool::PoolState;
    use crate::config::Profile;
    use crate::shared::blob::Blob;
    use crate::shared::cas::{self, Place, UpdateEnd};
    use crate::wire::load::Load;
    use rand::{Rng, SeedableRng, rngs::SmallRng};
    use std::cell::{Cell, RefCell};

    fn replica(n: u32) -> Endpoint {
        let [_, a, b, c] = n.to_be_bytes();
        std::net::SocketAddr::from(([10, a, b, c], 8080)).into()
    }

    fn ms(ms: u64) -> Micros {
        Micros::from_millis(1_000_000 + ms)
    }

    fn met(n: u32) -> Note {
        Note::Sampled { replica: replica(n), probe: None }
    }

    fn served(n: u32) -> Note {
        Note::Confirmed { replica: replica(n), evidence: Evidence::Served }
    }

    fn heard_of(n: u32) -> Note {
        Note::Observed { replica: replica(n), probe: None, evidence: Evidence::Hearsay }
    }

    /// The membership as bytes, written by compare-and-swap.
    #[derive(Default)]
    struct Host {
        bytes: RefCell<Vec<u8>>,
        number: Cell<u32>,
        reads: Cell<u32>,
        /// Number of writes still to refuse.
        refuses: Cell<u32>,
    }

    impl Place<Members> for Host {
        fn read(&self) -> (Option<Members>, Option<u32>) {
            self.reads.set(self.reads.get() + 1);
            (Members::decode(&self.bytes.borrow()).ok(), Some(self.number.get()))
        }

        fn write(&self, value: &Members, number: Option<u32>) -> bool {
            if let Some(left) = self.refuses.get().checked_sub(1) {
                self.refuses.set(left);
                return false;
            }
            let fresh = number == Some(self.number.get());
            if fresh {
                *self.bytes.borrow_mut() = value.encode().to_vec();
                self.number.set(self.number.get() + 1);
            }
            fresh
        }
    }

    impl Host {
        fn members(&self) -> Members {
            self.read().0.unwrap_or_default()
        }

        fn tick(&self, view: &mut View, now: Micros) {
            if view.has_updates(now) {
                let updated = cas::update(self, |stored| ((), view.share(stored, now)));
                if updated.end != UpdateEnd::GivenUp {
                    view.shared();
                }
            } else {
                view.adopt(self.members());
            }
        }
    }

    #[test]
    fn a_tick_shares_all_notes_in_one_transaction() {
        let (host, mut view, mut other) = (Host::default(), View::default(), View::default());
        for n in 0..100 {
            assert!(view.note(ms(n.into()), met(n)));
        }
        assert_eq!((view.members().count(), host.reads.get(), other.members().count()), (100, 0, 0));
        host.tick(&mut view, ms(250));
        assert_eq!((host.reads.get(), host.number.get()), (1, 1));
        host.tick(&mut other, ms(260));
        assert_eq!((other.members().count(), other.members().samples()), (100, 100));
        host.tick(&mut view, ms(500));
        assert_eq!(host.number.get(), 1, "without an update nothing is written");
    }

    #[test]
    fn workers_count_every_sample_once() {
        let (host, mut rng) = (Host::default(), SmallRng::seed_from_u64(1));
        let mut views: Vec<View> = (0..8).map(|_| View::default()).collect();
        let mut noted = 0;
        for at in 0..2000 {
            let view = &mut views[rng.random_range(0..8)];
            if rng.random_bool(0.2) {
                host.refuses.set(rng.random_range(0..12));
                host.tick(view, ms(at));
            } else {
                noted += 1;
                assert!(view.note(ms(at), met(rng.random_range(0..40))));
            }
        }
        host.refuses.set(0);
        views.iter_mut().for_each(|view| host.tick(view, ms(2000)));
        views.iter_mut().for_each(|view| host.tick(view, ms(2001)));
        for view in &views {
            assert_eq!((view.members().samples(), view.members().count()), (noted, 40));
        }
    }

    #[test]
    fn without_samples_silent_members_are_forgotten_by_time() {
        let (host, mut view, ttl) = (Host::default(), View::default(), u64::from(MEMBER_TTL_MS));
        view.note(ms(0), served(1));
        for at in (0..ttl).step_by(250) {
            view.note(ms(at), Note::Alive(replica(2)));
            view.note(ms(at), served(2));
            host.tick(&mut view, ms(at));
        }
        assert_eq!(view.members().count(), 2);
        host.tick(&mut view, ms(ttl));
        assert_eq!((view.members().count(), host.members().count()), (1, 1));
    }

    #[test]
    fn with_samples_time_forgets_only_unsampled_members() {
        let (host, mut view, ttl) = (Host::default(), View::default(), u64::from(MEMBER_TTL_MS));
        (0..8).for_each(|n| _ = view.note(ms(0), met(n)));
        // Every 50 s there is one sample, and it meets one of the first four replicas.
        for (at, n) in (0..4 * ttl).step_by(50_000).zip((0..4).cycle()) {
            view.note(ms(at), met(n));
            host.tick(&mut view, ms(at));
        }
        assert_eq!(view.members().count(), 8, "48 samples are too few to tell");
        for n in (0..4).cycle().take(60) {
            view.note(ms(4 * ttl), met(n));
        }
        host.tick(&mut view, ms(4 * ttl));
        assert_eq!([0, 3, 4, 7].map(|n| host.members().contains(replica(n))), [true, true, false, false]);
    }

    #[test]
    fn the_first_request_after_a_long_silence_forgets_no_member() {
        let (host, mut view, ttl) = (Host::default(), View::default(), u64::from(MEMBER_TTL_MS));
        (0..8).for_each(|n| _ = view.note(ms(0), served(n)));
        host.tick(&mut view, ms(0));
        // No worker ticks while the cluster is not used.
        view.note(ms(2 * ttl), served(3));
        host.tick(&mut view, ms(2 * ttl));
        assert_eq!((view.members().count(), host.members().count()), (8, 8));
    }

    #[test]
    fn a_fleet_that_was_replaced_makes_room_for_the_next() {
        let (host, mut view) = (Host::default(), View::default());
        for n in 0..MAX_MEMBERS as u32 {
            view.note(ms(0), served(n));
            if view.is_due() {
                host.tick(&mut view, ms(0));
            }
        }
        host.tick(&mut view, ms(0));
        assert_eq!(view.take_lost(), Lost::default());
        let newcomer = MAX_MEMBERS as u32;
        view.note(ms(1), served(newcomer));
        host.tick(&mut view, ms(1));
        assert_eq!(view.take_lost(), Lost { refused: 1, dropped: 0 });
        assert_eq!((view.take_lost(), view.members().contains(replica(newcomer))), (Lost::default(), false));
        // One replica of the old fleet remains.
        for at in (1..=u64::from(MEMBER_TTL_MS)).step_by(10_000) {
            view.note(ms(at), Note::Alive(replica(0)));
            host.tick(&mut view, ms(at));
        }
        host.tick(&mut view, ms(MEMBER_TTL_MS.into()));
        view.note(ms(MEMBER_TTL_MS.into()), served(newcomer));
        assert_eq!([0, 1, newcomer].map(|n| view.members().contains(replica(n))), [true, false, true]);
    }

    #[test]
    fn a_newcomer_to_a_thousand_replicas_is_found_within_ten_seconds() {
        let (host, mut view, mut rng) = (Host::default(), View::default(), SmallRng::seed_from_u64(2));
        let (settings, mut pool) = (Profile::Default.pool_settings(), PoolState::new());
        for n in 0..1000 {
            view.note(ms(0), met(n));
            if view.is_due() {
                host.tick(&mut view, ms(0));
            }
        }
        // The newcomer joins long after the fleet was learned, at 500 requests a second. The policy is round robin and
        // has just passed the newcomer's place.
        let (began, mut turn) = (60_000, 0);
        pool.set_members(view.members().count(), view.members().samples(), ms(0));
        let found = (began..began + 20_000).step_by(2).find(|at| {
            for _ in 0..pool.pick(&settings, ms(*at), &mut rng).probes.discovery {
                view.note(ms(*at), met(turn % 1001));
                let placement = view.members().placement(replica(turn % 1001));
                let load = Load::at_face_value(0, Some(1000));
                pool.record(&settings, ms(*at), replica(turn % 1001), load, placement, &mut rng);
                turn += 1;
            }
            if at % 250 == 0 {
                host.tick(&mut view, ms(*at));
                pool.set_members(view.members().count(), view.members().samples(), ms(*at));
            }
            pool.membership().0 == 1001
        });
        let after = found.unwrap() - began;
        assert!(after <= 10_000, "after {after} ms");
    }

    #[test]
    fn notes_and_candidates_that_do_not_fit_are_counted() {
        let mut view = View::default();
        for n in 0..MAX_CANDIDATES as u32 + 3 {
            view.note(ms(0), heard_of(n));
        }
        assert_eq!(view.take_lost(), Lost { refused: 3, dropped: 0 });
        let room = (MAX_NOTES - MAX_CANDIDATES) as u32;
        for n in 0..room + 5 {
            assert_eq!(view.note(ms(0), met(n)), n < room, "{n}");
        }
        assert_eq!(view.take_lost(), Lost { refused: 0, dropped: 5 });
        // Meanwhile another worker has stored the maximum number of candidates.
        let (host, mut other) = (Host::default(), View::default());
        for n in 1000..1000 + MAX_CANDIDATES as u32 {
            other.note(ms(0), heard_of(n));
        }
        host.tick(&mut other, ms(0));
        let mut late = View::default();
        late.note(ms(0), heard_of(1));
        host.refuses.set(3);
        host.tick(&mut late, ms(0));
        assert_eq!(late.take_lost(), Lost { refused: 1, dropped: 0 });
    }
}
