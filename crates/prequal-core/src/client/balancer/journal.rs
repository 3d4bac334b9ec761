//! Pending updates, and the transaction that applies them.

use rand::Rng;

use crate::client::count::{Count, Counters};
use crate::client::ejection::{Change, EjectionTable, Event, Trial};
use crate::client::members::Placement;
use crate::client::pool::{PoolSettings, PoolState};
use crate::client::store::{Store, Value};
use crate::shared::cas::UpdateEnd;
use crate::shared::endpoint::Endpoint;
use crate::shared::time::{Micros, Stamp};
use crate::wire::load::Load;

/// Maximum number of pending updates. Under load the next pick applies them within a millisecond.
const MAX_PENDING: usize = 64;
/// Time for which a replica gets no requests after it failed or the proxy refused to use it, milliseconds.
const COOLDOWN_MS: u32 = 1000;

/// Weight of a transaction in the moving average of conflicts, which covers some 16 transactions.
const CONFLICT_WEIGHT: f32 = 1.0 / 16.0;
/// Number of conflicts per transaction beyond which the workers write too often.
const MOST_CONFLICTS: f32 = 0.1;

/// A change to the pool or the ejection table.
#[derive(Clone, Copy, Debug)]
pub(super) enum Update {
    Report(Micros, Endpoint, Load, Placement),
    /// A request provided evidence about the health of its replica.
    Health(Micros, Endpoint, Event),
    /// The replica has failed a request, which is no longer in flight.
    Left(Micros, Endpoint),
    /// A probe reply names a candidate.
    Introduce(Micros, Endpoint),
    Forget(Endpoint),
    /// The replica failed.
    CoolDown(Micros, Endpoint),
    /// The proxy refused to use the replica.
    Refused(Micros, Endpoint),
    EndCooldown(Endpoint),
    /// The number of replicas in use, and the number of samples of Envoy's own policy (`members.rs`).
    Members(Micros, u32, u32),
}

/// The pool, the ejection table, and one worker's pending updates to them.
pub(super) struct Journal<S: Store> {
    pub(super) pool: S::Value<PoolState>,
    ejections: S::Value<EjectionTable>,
    /// The ejection table as this worker last read it. It is up to date while [`PoolState::follows`] accepts it.
    pub(super) table: EjectionTable,
    /// Time at which the table was read, and the number of milliseconds from then until a trial may be due.
    next_trial: Option<(Stamp, u32)>,
    pending: Vec<Update>,
    /// Number of updates at the front of `pending` that the ejection table already contains. If writing the pool fails,
    /// they are applied to the pool again but not to the table.
    in_table: usize,
    /// Whether the last transaction had to consult the ejection table.
    pub(super) watched: bool,
    /// Mean number of conflicts with other workers per transaction.
    conflicts: f32,
}

impl<S: Store> Journal<S> {
    pub(super) fn new(store: &S) -> Self {
        Self {
            pool: store.open("pool"),
            ejections: store.open("ejections"),
            table: EjectionTable::new(),
            next_trial: None,
            pending: Vec::new(),
            in_table: 0,
            watched: false,
            conflicts: 0.0,
        }
    }

    pub(super) fn push(&mut self, counters: &impl Counters, update: Update) {
        if self.pending.len() < MAX_PENDING {
            self.pending.push(update);
        } else {
            counters.count(Count::Dropped(1));
        }
    }

    /// Whether the workers write the pool so often that their writes conflict.
    pub(super) fn is_contended(&self) -> bool {
        self.conflicts > MOST_CONFLICTS
    }

    /// Whether any updates are pending.
    pub(super) fn waits(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Runs one transaction: applies the pending updates, runs `action`, and writes the pool if `action` asks for it.
    /// Returns the result of `action`, and whether the pool was written. If the ejection table had to be consulted,
    /// `action` also receives the table, and the trial if this request is to be one.
    pub(super) fn transact<T, G: Rng>(
        &mut self,
        settings: &PoolSettings,
        counters: &impl Counters,
        now: Micros,
        request: bool,
        rng: &mut G,
        mut action: impl FnMut(&mut PoolState, Option<(&EjectionTable, Option<Trial>)>, &mut G) -> (T, bool),
    ) -> (T, bool) {
        let Self { pool, ejections, table, next_trial, pending, in_table, watched, conflicts } = self;
        let (mut looked, mut trial) = (false, None);
        let updated = pool.transact(!request, |pool| {
            let active = pool.has_ejections();
            let stale = active && !pool.follows(table);
            let trial_due =
                || next_trial.is_some_and(|(read, wait_ms)| now.stamp().distance_ms(read) >= wait_ms);
            let concerns = || {
                let known = active.then_some(&*table);
                *in_table > 0 || pending.iter().any(|update| update.concerns_ejections(settings, known))
            };
            // After a conflict on the pool, the table already has this worker's updates.
            let look = stale || (!looked && (active && (!request || trial_due()) || concerns()));
            if look {
                let given = update_ejections(
                    ejections, table, settings, counters, pending, in_table, pool, now, request, rng,
                );
                // After a conflict, the replica of the trial may have returned in the meantime.
                trial = given.or(trial).filter(|trial| table.is_ejected(trial.replica));
                let wait_ms = table.next_trial_ms(&settings.ejection, now);
                *next_trial = wait_ms.map(|wait_ms| (now.stamp(), wait_ms));
                looked = true;
            }
            *watched = active || looked;
            for update in pending.iter() {
                update.apply(settings, pool, watched.then_some(&*table), rng);
            }
            let (members, samples) = pool.membership();
            if *watched && (table.set_members(members, samples) || looked) {
                pool.exclude(table, now);
            }
            action(pool, watched.then_some((&*table, trial)), rng)
        });
        counters.updated(&updated);
        *conflicts += (updated.conflicts as f32 - *conflicts) * CONFLICT_WEIGHT;
        let written = updated.end == UpdateEnd::Written;
        if written {
            pending.clear();
            *in_table = 0;
        }
        (updated.result, written)
    }
}

/// Applies the updates that the ejection table does not contain yet. If this is a request and a trial is due, takes and
/// returns the trial. Sets `copy` to the table as written.
#[allow(clippy::too_many_arguments, reason = "the parts of one transaction")]
fn update_ejections<G: Rng>(
    ejections: &mut impl Value<EjectionTable>,
    copy: &mut EjectionTable,
    settings: &PoolSettings,
    counters: &impl Counters,
    updates: &[Update],
    in_table: &mut usize,
    pool: &PoolState,
    now: Micros,
    request: bool,
    rng: &mut G,
) -> Option<Trial> {
    let settings = &settings.ejection;
    let (members, samples) = pool.membership();
    let mut changes = [Change::None; MAX_PENDING];
    let updated = ejections.update(|table| {
        table.set_members(members, samples);
        let mut changed = false;
        for (update, slot) in updates.iter().skip(*in_table).zip(&mut changes) {
            *slot = match *update {
                Update::Health(at, replica, event) => table.apply(settings, at, replica, event),
                Update::Report(at, replica, Load { failing, .. }, placement) => {
                    table.heard(settings, at, replica, failing, pool.failing_beside(replica), placement)
                }
                Update::Forget(replica) if table.forget(replica) => Change::Noted,
                _ => Change::None,
            };
            changed |= *slot != Change::None;
        }
        // The tick removes old records, to keep the table small.
        changed |= !request && table.expire(now);
        let trial = if request { table.take_trial(settings, now, rng) } else { None };
        let lost = table.take_lost();
        changed |= trial.is_some();
        if changed {
            table.changed();
        }
        copy.clone_from(table);
        ((trial, lost), changed)
    });
    counters.updated(&updated);
    let (trial, lost) = updated.result;
    if updated.end == UpdateEnd::GivenUp {
        copy.disown();
        // For all other workers, the trial is still due.
        return None;
    }
    *in_table = updates.len();
    for change in changes {
        counters.count(Count::Ejection(change));
    }
    counters.count(Count::Overflow(lost));
    trial
}

impl Update {
    /// Whether this update may change the ejection table. `table` is the worker's copy, or `None` if no replica is
    /// ejected or watched.
    fn concerns_ejections(&self, settings: &PoolSettings, table: Option<&EjectionTable>) -> bool {
        match *self {
            Self::Health(at, replica, Event::Answered { .. }) => {
                table.is_none_or(|table| table.watches(replica, at))
            }
            Self::Health(..) => true,
            Self::Report(at, replica, load, _) => {
                settings.ejection.believes(load.failing)
                    || table.is_some_and(|table| table.listens_to(replica, at))
            }
            Self::Forget(replica) => table.is_some_and(|table| table.knows(replica)),
            _ => false,
        }
    }

    fn apply(
        self,
        settings: &PoolSettings,
        pool: &mut PoolState,
        ejections: Option<&EjectionTable>,
        rng: &mut impl Rng,
    ) {
        match self {
            Self::Report(at, replica, load, placement) => {
                let load = ejections.map_or(Some(load), |table| table.admit(at, replica, load));
                if let Some(load) = load {
                    pool.record(settings, at, replica, load, placement, rng);
                }
            }
            // A replica that fails at once looks idle, and attracts requests. If many do so, none may be ejected. The
            // next report may bring the replica back.
            Self::Health(at, replica, Event::Failed { .. })
                if ejections.is_some_and(|table| table.is_bad(replica, at)) =>
            {
                pool.forget(replica);
            }
            Self::Health(..) => {}
            Self::Left(at, replica) => pool.left(replica, at),
            Self::Introduce(_, replica) if ejections.is_some_and(|table| table.is_ejected(replica)) => {}
            Self::Introduce(at, replica) => pool.introduce(settings, at, replica),
            Self::Forget(replica) => pool.forget(replica),
            Self::CoolDown(at, replica) => pool.cool_down(replica, at, COOLDOWN_MS),
            Self::Refused(at, replica) => pool.refused(replica, at, COOLDOWN_MS),
            Self::EndCooldown(replica) => pool.end_cooldown(replica),
            Self::Members(at, count, samples) => pool.set_members(count, samples, at),
        }
    }
}
