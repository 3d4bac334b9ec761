//! The inbound role's table of slots: any bytes are refused, or yield a table in which VMs come, go and die. What is
//! written is accepted again.
#![no_main]

use prequal_core::server::inbound::slots::{Claim, MAX_SLOTS, Slots, can_judge};
use prequal_core::shared::blob::Blob as _;
use prequal_fuzz::{START, Script, nearly, replica, survives};

fn seeds() -> Vec<Vec<u8>> {
    [0, 1, 5, 128]
        .map(|vms| {
            let mut slots = Slots::default();
            for vm in 0..vms {
                slots.claim(START);
                slots.list(replica(vm % 40));
            }
            let script =
                [1, 0, 1, 1, 0, 2, 3, 1, 5, 2, 0, 3, 130, 3, 4, 1, 9, 4, 10, 0, 1, 0, 40, 2, 1, 3, 3];
            Script::join(&script, &slots.encode())
        })
        .to_vec()
}

fn run(data: &[u8]) {
    let (mut script, blob) = Script::split(data);
    let Some(mut slots) = nearly::<Slots>(blob) else { return };
    survives(&slots);
    let (mut now, mut claims) = (START, Vec::<Claim>::new());
    while !script.is_over() {
        let last = now;
        script.pass(&mut now);
        match script.byte() % 4 {
            0 => claims.extend(slots.claim(now)),
            1 => drop(slots.list(script.replica())),
            2 if !claims.is_empty() => {
                let at = usize::from(script.byte()) % claims.len();
                if !slots.renew(claims[at], now) {
                    claims.swap_remove(at);
                }
            }
            _ => {
                if can_judge(Some(last), now) {
                    assert!(slots.expire(now) as usize <= MAX_SLOTS);
                }
            }
        }
        assert!(claims.iter().all(|claim| claim.index < MAX_SLOTS && claim.index < slots.used()));
        assert!((slots.used()..MAX_SLOTS + 2).all(|index| slots.is_free(index)));
        survives(&slots);
    }
}

prequal_fuzz::target!(seeds, run);
