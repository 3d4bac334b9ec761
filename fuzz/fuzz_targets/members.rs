//! The membership's blob: any bytes are refused, or yield a membership that takes in what workers learn. What is
//! written is accepted again.
#![no_main]

use prequal_core::client::members::{Evidence, Members, Note, View};
use prequal_core::shared::blob::Blob as _;
use prequal_core::shared::time::Micros;
use prequal_fuzz::{START, Script, nearly_records, replica, survives};
use rand::SeedableRng;
use rand::rngs::SmallRng;

/// Returns the size of a member's record in the blob, bytes.
fn record() -> usize {
    let mut one = Members::default();
    one.observe(replica(0), None, Evidence::Served, START);
    one.encode().len() - Members::default().encode().len()
}

fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for count in [0, 1, 5, 30, 70] {
        let mut members = Members::default();
        for n in 0..count {
            let now = Micros::from_millis(1_000_000 + u64::from(n));
            match n % 4 {
                0 => _ = members.observe(replica(n), Some(replica(n).with_port(9000)), Evidence::Served, now),
                1 => drop(members.observe(replica(n), None, Evidence::Hearsay, now)),
                _ => members.sample_met(replica(n), None, now),
            }
        }
        let script =
            [1, 0, 1, 1, 1, 2, 0, 3, 2, 4, 3, 5, 200, 6, 7, 4, 8, 5, 31, 9, 130, 6, 7, 20, 1, 3, 3, 6];
        seeds.push(Script::join(&script, &members.encode()));
    }
    seeds
}

fn note(script: &mut Script<'_>) -> Note {
    let evidence = [Evidence::Placed, Evidence::Served, Evidence::Hearsay][usize::from(script.byte() % 3)];
    let replica = script.replica();
    let probe = script.bit().then(|| replica.with_port(u16::from(script.byte()) + 1));
    match script.byte() % 5 {
        0 => Note::Sampled { replica, probe },
        1 => Note::Observed { replica, probe, evidence },
        2 => Note::Confirmed { replica, evidence },
        3 => Note::Alive(replica),
        _ => Note::Left(replica),
    }
}

fn run(data: &[u8]) {
    let (mut script, blob) = Script::split(data);
    if let Ok(members) = Members::decode(blob) {
        survives(&members);
    }
    let Some(mut stored) = nearly_records::<Members>(blob, record(), true) else { return };
    let (mut now, mut rng, mut view) = (START, SmallRng::seed_from_u64(1), View::default());
    view.adopt(stored.clone());
    while !script.is_over() {
        script.pass(&mut now);
        for _ in 0..=script.byte() % 8 {
            let note = note(&mut script);
            view.note(now, note);
        }
        if view.is_due() || view.has_updates(now) {
            view.share(&mut stored, now);
            view.shared();
            survives(&stored);
        }
        let members = view.members();
        let count = usize::from(script.byte() % 16);
        let targets = members.sample(count, &mut rng, |_| false);
        assert!(targets.len() <= count);
        members.sample_in_use(count, &mut rng, |_| false);
        assert!(members.endpoints_in_use().count() <= members.count() as usize);
        let endpoint = script.replica();
        members.placement(endpoint);
        members.answering_at(endpoint);
    }
}

prequal_fuzz::target!(seeds, run);
