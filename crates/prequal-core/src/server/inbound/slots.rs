//! Slots: a place for the counts of each Wasm VM, and a heartbeat that shows whether the VM is still alive.
//!
//! The table is a blob in shared data. The counts are kept elsewhere, in one gauge per slot, which only the slot's
//! owner writes, as an absolute value. A dead VM stops writing. Once its heartbeat is older than [`DEAD_MS`], any other
//! VM frees the slot, and every reader sets the gauges of free slots to zero. A VM that had merely hung finds that it
//! has lost its slot, and claims another. Its counts are then correct again, because they never depended on the gauge.
//!
//! The table also lists the replicas that are counted, so that every VM knows which gauges exist. Even a VM that serves
//! no requests, such as the one on Envoy's main thread, cleans up after the others.
//!
//! Time is the host's clock, which may step. After a step all heartbeats look old at once, so a VM frees no slot if its
//! own last heartbeat looks wrong ([`can_judge`]).

use std::borrow::Cow;

use bytemuck::Zeroable;

use crate::shared::blob::{Blob, BlobError, Tag, read_plain};
use crate::shared::endpoint::Endpoint;
use crate::shared::time::{Micros, Stamp};

/// Number of slots in a table. Further VMs count only for themselves until a slot is free.
pub const MAX_SLOTS: usize = 128;
/// Maximum number of replicas in a table. Further replicas are not counted.
pub const MAX_REPLICAS: usize = 64;
/// Interval at which a living VM renews its heartbeat, milliseconds.
pub const HEARTBEAT_MS: u32 = 500;
/// Age of a heartbeat beyond which its VM counts as dead, milliseconds.
pub const DEAD_MS: u32 = 2000;
/// Time for which a freed slot is not reassigned, so that every VM sees that it is free, milliseconds.
const REST_MS: u32 = 2 * HEARTBEAT_MS;

/// Assignment of VMs to slots. It is plain data, and its bytes are the blob in shared data.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Slots {
    tag: Tag,
    /// Number of slots that have ever had an owner. These slots come first in the table.
    used: u16,
    /// Number of claims so far, modulo 2^32.
    claims: u32,
    count: u32,
    slots: [Slot; MAX_SLOTS],
    /// The first `count` entries are in use.
    replicas: [Endpoint; MAX_REPLICAS],
}

#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Slot {
    /// Number of the claim; 0 while the slot is free.
    owner: u32,
    /// Last heartbeat, or the time when the slot became free.
    beat: Stamp,
}

/// A slot that a VM has claimed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Claim {
    /// Index of the slot, below [`MAX_SLOTS`].
    pub index: usize,
    owner: u32,
}

impl Default for Slots {
    fn default() -> Self {
        Self { tag: Self::TAG, ..Self::zeroed() }
    }
}

impl Slots {
    /// Returns the number of slots that have ever had an owner. These slots come first in the table.
    pub fn used(&self) -> usize {
        usize::from(self.used)
    }

    /// Whether no VM counts in this slot.
    pub fn is_free(&self, index: usize) -> bool {
        self.slots.get(index).is_none_or(|slot| slot.owner == 0)
    }

    /// Returns the replicas that are counted.
    pub fn replicas(&self) -> &[Endpoint] {
        self.replicas.get(..self.count as usize).unwrap_or(&self.replicas)
    }

    /// Lists a replica. Returns whether it is new, or `None` if there is no room.
    pub fn list(&mut self, replica: Endpoint) -> Option<bool> {
        if self.replicas().contains(&replica) {
            return Some(false);
        }
        *self.replicas.get_mut(self.count as usize)? = replica;
        self.count += 1;
        Some(true)
    }

    /// Gives a VM a slot; `None` if no slot is available now.
    pub fn claim(&mut self, now: Micros) -> Option<Claim> {
        let (stamp, used) = (now.stamp(), self.used());
        let rested = |slot: &Slot, index: usize| index >= used || stamp.distance_ms(slot.beat) >= REST_MS;
        let index =
            self.slots.iter().enumerate().position(|(index, slot)| slot.owner == 0 && rested(slot, index))?;
        // 0 means that the slot is free.
        self.claims = self.claims.wrapping_add(1).max(1);
        let owner = self.claims;
        *self.slots.get_mut(index)? = Slot { owner, beat: stamp };
        self.used = self.used.max(index as u16 + 1);
        Some(Claim { index, owner })
    }

    /// Renews the heartbeat of the slot's owner. Returns false if the slot no longer belongs to it.
    pub fn renew(&mut self, claim: Claim, now: Micros) -> bool {
        match self.slots.get_mut(claim.index) {
            Some(slot) if slot.owner == claim.owner => {
                slot.beat = now.stamp();
                true
            }
            _ => false,
        }
    }

    /// Frees the slots of dead VMs and returns their number. Call it only on a VM that [`can_judge`].
    pub fn expire(&mut self, now: Micros) -> u32 {
        let stamp = now.stamp();
        let mut freed = 0;
        for slot in self.slots.iter_mut().filter(|slot| slot.owner != 0) {
            if stamp.distance_ms(slot.beat) > DEAD_MS {
                *slot = Slot { owner: 0, beat: stamp };
                freed += 1;
            }
        }
        freed
    }
}

/// Whether a VM whose previous tick was at `last` can decide at `now` which VMs are dead. It cannot if the clock has
/// stepped since, or if the VM itself hung.
pub fn can_judge(last: Option<Micros>, now: Micros) -> bool {
    last.is_some_and(|last| {
        now >= last && now.saturating_since(last) <= u64::from(DEAD_MS - HEARTBEAT_MS) * 1000
    })
}

impl Blob for Slots {
    const TAG: Tag = Tag::new(u32::from_le_bytes(*b"pqsl"), 1);

    fn decode(bytes: &[u8]) -> Result<Self, BlobError> {
        let table: Self = read_plain(bytes)?;
        let listed = table.replicas.get(..table.count as usize).ok_or(BlobError::Content)?;
        if !listed.iter().all(Endpoint::is_valid) {
            return Err(BlobError::Content);
        }
        if table.used() > MAX_SLOTS || table.slots.iter().skip(table.used()).any(|slot| slot.owner != 0) {
            return Err(BlobError::Content);
        }
        Ok(table)
    }

    fn encode(&self) -> Cow<'_, [u8]> {
        bytemuck::bytes_of(self).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const START: u64 = 1_000_000;

    fn at(ms: u64) -> Micros {
        Micros::from_millis(START + ms)
    }

    #[test]
    fn every_vm_gets_a_slot_of_its_own_until_all_are_taken() {
        let mut table = Slots::default();
        let claims: Vec<Claim> = (0..MAX_SLOTS).map(|_| table.claim(at(0)).unwrap()).collect();
        assert!(claims.iter().enumerate().all(|(index, claim)| claim.index == index));
        assert_eq!((table.claim(at(0)), table.used()), (None, MAX_SLOTS));
        assert!(claims.iter().all(|claim| table.renew(*claim, at(500))));
        assert_eq!(table.expire(at(1000)), 0);
        assert_eq!(table.expire(at(2501)), MAX_SLOTS as u32);
    }

    #[test]
    fn replicas_are_listed_once_and_no_more_than_fit() {
        let mut table = Slots::default();
        let replica = |port: usize| format!("[2001:db8::1]:{port}").parse::<Endpoint>().unwrap();
        for port in 1..=MAX_REPLICAS {
            assert_eq!((table.list(replica(port)), table.list(replica(1))), (Some(true), Some(false)));
        }
        assert_eq!((table.list(replica(99)), table.list(replica(64))), (None, Some(false)));
        assert_eq!(Slots::decode(&table.encode()).unwrap().replicas(), table.replicas());
        assert!(Slots::decode(&Slots { count: 65, ..table }.encode()).is_err());
        assert!(Slots::decode(&Slots { count: 1, ..Slots::default() }.encode()).is_err(), "no endpoint");
    }

    #[test]
    fn a_dead_vms_slot_is_freed_and_reused_after_a_pause() {
        let mut table = Slots::default();
        let (dead, living) = (table.claim(at(0)).unwrap(), table.claim(at(0)).unwrap());
        for ms in (500..=2000).step_by(500) {
            assert!(table.renew(living, at(ms)));
            assert_eq!(table.expire(at(ms)), 0, "at {ms}");
        }
        assert_eq!(table.expire(at(2001)), 1);
        assert!(table.is_free(dead.index) && !table.is_free(living.index));
        assert_eq!(table.claim(at(2002)).unwrap().index, 2, "others have not seen yet that it is free");
        assert_eq!(table.claim(at(3100)).unwrap().index, dead.index);
        assert!(!table.renew(dead, at(3100)), "it only hung; the slot is another's now");
        assert_eq!(table.used(), 3);
    }

    #[test]
    fn a_clock_step_expires_no_living_vm_and_delays_the_expiry_of_dead_ones() {
        for step in [3_600_000, -900_000_i64] {
            let moved = |ms: u64| Micros::from_millis((START + ms).saturating_add_signed(step));
            let mut table = Slots::default();
            let (one, two) = (table.claim(at(0)).unwrap(), table.claim(at(0)).unwrap());
            let _dead = table.claim(at(0)).unwrap();
            // Both VMs tick right after the step. Neither may judge, and both renew.
            for claim in [one, two] {
                assert!(!can_judge(Some(at(0)), moved(400)));
                assert!(table.renew(claim, moved(400)));
            }
            assert!(can_judge(Some(moved(400)), moved(900)));
            assert_eq!(table.expire(moved(900)), 1, "the third, which did not renew");
            assert!(table.renew(one, moved(900)) && table.renew(two, moved(900)));
        }
    }

    #[test]
    fn a_vm_that_has_not_ticked_lately_cannot_judge() {
        assert!(!can_judge(None, at(0)));
        assert!(can_judge(Some(at(0)), at(0)) && can_judge(Some(at(0)), at(1500)));
        assert!(!can_judge(Some(at(0)), at(1501)) && !can_judge(Some(at(1)), at(0)));
    }

    #[test]
    fn invalid_tables_are_refused() {
        let mut table = Slots::default();
        table.claim(at(0));
        assert_eq!(Slots::decode(&table.encode()).unwrap().encode(), table.encode());
        for length in [0, 1, table.encode().len() - 1, table.encode().len() + 1] {
            assert!(matches!(Slots::decode(&vec![0; length]), Err(BlobError::Size { .. })), "{length}");
        }
        assert_eq!(Slots::decode(&vec![0; size_of::<Slots>()]).unwrap_err(), BlobError::Version);
        for broken in [
            Slots { tag: Tag::new(u32::from_le_bytes(*b"pqsl"), 2), ..table },
            Slots { used: 129, ..table },
            Slots { used: 0, ..table },
        ] {
            assert!(Slots::decode(&broken.encode()).is_err());
        }
    }

    proptest! {
        #[test]
        fn no_two_vms_share_a_slot_at_any_clock(ops in proptest::collection::vec((0u8..4, any::<u64>(), 0usize..8), 0..200)) {
            let mut table = Slots::default();
            let mut claims: Vec<Claim> = Vec::new();
            for (what, now, which) in ops {
                let now = Micros(now);
                match what {
                    0 => claims.extend(table.claim(now)),
                    1 => { table.expire(now); }
                    _ => if let Some(claim) = claims.get(which) { table.renew(*claim, now); }
                }
                // Every VM that still has a slot is its only owner.
                claims.retain(|claim| table.clone().renew(*claim, now));
                let mut indices: Vec<usize> = claims.iter().map(|claim| claim.index).collect();
                indices.sort_unstable();
                indices.dedup();
                prop_assert_eq!(indices.len(), claims.len());
                prop_assert!(Slots::decode(&table.encode()).is_ok());
            }
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), size_of::<Slots>()), now: u64) {
            let mut table: Slots = bytemuck::pod_read_unaligned(&bytes);
            table.tag = Slots::TAG;
            if let Ok(mut table) = Slots::decode(&table.encode()) {
                table.expire(Micros(now));
                table.claim(Micros(now));
            }
        }
    }
}
