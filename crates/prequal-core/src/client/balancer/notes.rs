//! The notes that a worker takes about the membership, and when workers share them. `members.rs` defines their effect.

use rand::Rng;

use super::Balancer;
use super::journal::Update;
use crate::client::count::{Count, Counters};
use crate::client::members::{Evidence, Note, Placement};
use crate::client::store::{Store, Value};
use crate::shared::cas::UpdateEnd;
use crate::shared::endpoint::Endpoint;
use crate::shared::time::Micros;
use crate::wire::report::LoadReport;

impl<S: Store, C: Counters> Balancer<S, C> {
    /// Replaces the membership with `fleet`: each replica, in any order, with its weight in units of 1/16 of the mean.
    /// This is for a proxy that provides its host set. Call it on one worker only, because the workers' host sets
    /// differ for a moment after a change. The other workers adopt the result at their next tick.
    pub fn set_fleet<G: Rng>(&mut self, now: Micros, fleet: &mut Vec<(Endpoint, u16)>, rng: &mut G) {
        fleet.sort_unstable();
        fleet.dedup_by_key(|(replica, _)| *replica);
        let updated = self.members.update(|stored| {
            let before = stored.assign(fleet, now);
            let changed = before.is_some();
            (before.map(|before| (before, stored.clone())), changed)
        });
        self.counters.updated(&updated);
        let (UpdateEnd::Written, Some((before, members))) = (updated.end, updated.result) else { return };
        let (count, samples) = (members.count(), members.samples());
        self.counters.count(Count::Refused(fleet.len().saturating_sub(count as usize) as u32));
        self.push(Update::Members(now, count, samples));
        for left in before.endpoints_in_use().filter(|replica| !members.contains(*replica)) {
            self.push(Update::Forget(left));
            self.apply(now, rng);
        }
        self.membership.adopt(members);
        self.rules.set_members(self.membership.members(), now);
        self.apply(now, rng);
    }

    /// Records that, according to the proxy, the replica served a request, with `report` on the response if there was
    /// one. Returns its placement.
    pub(super) fn confirm(
        &mut self,
        now: Micros,
        replica: Endpoint,
        report: Option<&LoadReport>,
        evidence: Evidence,
    ) -> Placement {
        let note = match report {
            Some(report) => Note::Observed { replica, probe: report.probe_endpoint, evidence },
            None => Note::Confirmed { replica, evidence },
        };
        if self.note(now, note) {
            self.push(Update::EndCooldown(replica));
        }
        self.membership.members().placement(replica)
    }

    /// Records that the replica has left the cluster, or never belonged to it.
    pub(super) fn forget(&mut self, now: Micros, replica: Endpoint) {
        self.note(now, Note::Left(replica));
        self.push(Update::Forget(replica));
    }

    /// Takes a note. Returns whether it changed anything.
    pub(super) fn note(&mut self, at: Micros, note: Note) -> bool {
        let changed = self.membership.note(at, note);
        self.resting &= !changed;
        if changed && self.membership.is_due() {
            self.share_members(at);
        }
        changed
    }

    /// Shares this worker's notes. If there are none, adopts what others have shared.
    pub(super) fn share_members(&mut self, now: Micros) {
        let Self { membership: view, members, rules, counters, .. } = self;
        let lost = view.take_lost();
        counters.count(Count::Refused(lost.refused));
        counters.count(Count::Dropped(lost.dropped));
        let mut shared = None;
        if view.has_updates(now) {
            let updated = members.update(|stored| ((), view.share(stored, now)));
            counters.updated(&updated);
            // If the write was given up because others wrote too often, the notes are shared next time.
            if updated.end != UpdateEnd::GivenUp {
                view.shared();
            }
            let members = view.members();
            shared = (updated.end == UpdateEnd::Written)
                .then(|| Update::Members(now, members.count(), members.samples()));
        } else if let Some(newer) = members.newer(&mut self.adopted) {
            counters.updated(&newer);
            view.adopt(newer.result);
        } else {
            return;
        }
        rules.set_members(view.members(), now);
        if let Some(update) = shared {
            self.push(update);
        }
    }
}
