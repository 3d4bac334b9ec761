//! The ejection table's blob: any bytes are refused, or yield a table that requests can update. What is written is
//! accepted again.
#![no_main]

use prequal_core::client::ejection::{EjectionSettings, EjectionTable, Event, Timing};
use prequal_core::client::members::Placement;
use prequal_core::shared::blob::Blob as _;
use prequal_core::shared::time::Micros;
use prequal_core::wire::load::Load;
use prequal_fuzz::{START, Script, nearly_records, replica, survives};
use rand::SeedableRng;
use rand::rngs::SmallRng;

const SETTINGS: EjectionSettings = EjectionSettings { failure_share: 0.1, wait_factor: 2.0 };

/// Returns the size of a replica's record in the blob, bytes.
fn record() -> usize {
    let mut one = EjectionTable::new();
    one.apply(&SETTINGS, START, replica(0), Event::Unresponsive { trial: false, ordinary: true });
    one.encode().len() - EjectionTable::new().encode().len()
}

fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for count in [0_u16, 1, 4, 20] {
        let mut table = EjectionTable::new();
        table.set_members(40, 0);
        for n in 0..count {
            for failure in 0..=n % 4 {
                let now = Micros::from_millis(1_000_000 + u64::from(failure));
                let event = match n % 3 {
                    0 => Event::Unresponsive { trial: false, ordinary: n % 2 == 0 },
                    _ => Event::Failed { requests: f32::from(n), well: 10, trial: false },
                };
                table.apply(&SETTINGS, now, replica(n), event);
            }
            table.heard(&SETTINGS, START, replica(n), 500 * (n % 2), 0, Placement::even(0));
        }
        table.changed();
        let script = [
            1, 0, 1, 4, 0, 1, 1, 0, 1, 2, 9, 0, 2, 0, 1, 9, 9, 3, 3, 1, 200, 1, 4, 130, 140, 5, 6, 7, 8, 2,
            1, 1,
        ];
        seeds.push(Script::join(&script, &table.encode()));
        // A replica that fails every request, until all requests that its record remembers are failures.
        let failing: Vec<u8> = [0, 0, 3, 0, 0, 0, 9, 3].repeat(31);
        seeds.push(Script::join(&failing, &table.encode()));
    }
    seeds
}

fn event(script: &mut Script<'_>) -> Event {
    let trial = script.bit();
    match script.byte() % 3 {
        0 => Event::Failed { requests: script.byte().into(), well: script.byte().into(), trial },
        1 => Event::Unresponsive { trial, ordinary: script.bit() },
        _ => {
            let timings = [Timing::InTime, Timing::Narrow, Timing::Late, Timing::Slow];
            let in_time = timings[usize::from(script.byte() % 4)];
            Event::Answered { latency_us: script.word(), in_time, trial }
        }
    }
}

fn run(data: &[u8]) {
    let (mut script, blob) = Script::split(data);
    if let Ok(table) = EjectionTable::decode(blob) {
        survives(&table);
    }
    let Some(mut table) = nearly_records::<EjectionTable>(blob, record(), false) else { return };
    let (mut now, mut rng) = (START, SmallRng::seed_from_u64(1));
    while !script.is_over() {
        script.pass(&mut now);
        match script.byte() % 8 {
            0..=2 => {
                let (replica, event) = (script.replica(), event(&mut script));
                table.apply(&SETTINGS, now, replica, event);
            }
            3 => {
                let (failing, others) =
                    (u16::from(script.byte()) * 4 % 1001, u16::from(script.byte()) * 4 % 1001);
                table.heard(
                    &SETTINGS,
                    now,
                    script.replica(),
                    failing,
                    others,
                    Placement::even(script.word()),
                );
            }
            4 => drop(table.take_trial(&SETTINGS, now, &mut rng)),
            5 => drop(table.expire(now)),
            6 => drop(table.forget(script.replica())),
            _ => {
                table.set_members(script.byte().into(), script.word());
                table.changed();
            }
        }
        survives(&table);
        let replica = script.replica();
        table.admit(now, replica, Load::at_face_value(3, Some(1000)));
        assert!(!(table.panics() && table.is_ejected(replica)), "ejected in panic");
        table.next_trial_ms(&SETTINGS, now);
        table.most_fail(now);
    }
}

prequal_fuzz::target!(seeds, run);
