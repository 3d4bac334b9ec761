//! The pool's blob: any bytes are refused, or yield a pool for picks, reports and probes. What is written is accepted
//! again.
#![no_main]

use prequal_core::client::members::Placement;
use prequal_core::client::pool::{Candidate, PoolSettings, PoolState};
use prequal_core::config::Profile;
use prequal_core::shared::blob::Blob as _;
use prequal_core::shared::capacity::Capacity;
use prequal_core::shared::time::Micros;
use prequal_core::wire::load::{Load, Source};
use prequal_fuzz::{START, Script, nearly, replica, survives};
use rand::SeedableRng;
use rand::rngs::SmallRng;

const PROFILES: [Profile; 4] = [Profile::Default, Profile::Paper, Profile::Small, Profile::Inference];

fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for (number, profile) in (0..).zip(PROFILES) {
        for entries in [0, 2, 9, 40] {
            let settings = profile.pool_settings();
            let (mut pool, mut rng) = (PoolState::new(), SmallRng::seed_from_u64(7));
            pool.set_members(entries, 0, START);
            for n in 0..entries {
                let load = Load::at_face_value(n % 5, (n % 3 > 0).then_some(10_000 + n * 100));
                let at = Micros::from_millis(1_000_000 + u64::from(n));
                pool.record(&settings, at, replica(n as u16), load, Placement::even(0), &mut rng);
                pool.pick_predicted(&settings, at, &mut rng);
            }
            let script =
                [number, 0, 1, 1, 1, 2, 2, 10, 3, 3, 4, 4, 1, 5, 6, 7, 8, 9, 9, 9, 10, 1, 0, 2, 0, 1, 0];
            seeds.push(Script::join(&script, &pool.encode()));
        }
    }
    seeds
}

fn step(
    script: &mut Script<'_>,
    pool: &mut PoolState,
    settings: &PoolSettings,
    now: Micros,
    rng: &mut SmallRng,
) {
    match script.byte() % 12 {
        0 => _ = pool.pick(settings, now, rng),
        1 => _ = pool.pick_predicted(settings, now, rng),
        2 => _ = pool.pick_scored(settings, now, rng, |candidate: &Candidate| f64::from(candidate.rif)),
        3 => {
            let load = Load {
                rif: script.word() % 1_000_001,
                away: script.byte().into(),
                latency_us: script.bit().then(|| script.word() % 3_600_000_001),
                capacity: script.bit().then(|| Capacity {
                    base_us: script.word() % 3_600_000_000 + 1,
                    knee: u16::from(script.byte()) + 1,
                    open: script.bit(),
                    steady: script.bit(),
                    rse_percent: script.byte(),
                }),
                up_s: script.bit().then(|| script.byte().into()),
                failing: u16::from(script.byte()) % 1001,
                source: if script.bit() { Source::Probe } else { Source::Response },
            };
            let placement = Placement::even(script.byte().into());
            pool.record(settings, now, script.replica(), load, placement, rng);
        }
        4 => pool.introduce(settings, now, script.replica()),
        5 => pool.forget(script.replica()),
        6 => pool.refused(script.replica(), now, 1000),
        7 => pool.cool_down(script.replica(), now, 1000),
        8 => pool.set_members(script.byte().into(), script.word(), now),
        9 => _ = pool.idle_probes(settings, now, 1000),
        10 => pool.end_cooldown(script.replica()),
        _ => _ = pool.view(settings, now),
    }
}

fn run(data: &[u8]) {
    let (mut script, blob) = Script::split(data);
    // The blob is decoded twice: as it is, and after fixing the fields that a fuzzer would get right only by chance.
    if let Ok(pool) = PoolState::decode(blob) {
        survives(&pool);
    }
    let Some(mut pool) = nearly::<PoolState>(blob) else { return };
    let settings = PROFILES[usize::from(script.byte() % 4)].pool_settings();
    let (mut now, mut rng) = (START, SmallRng::seed_from_u64(1));
    while !script.is_over() {
        script.pass(&mut now);
        step(&mut script, &mut pool, &settings, now, &mut rng);
        survives(&pool);
    }
    pool.pick_predicted(&settings, now, &mut rng);
    survives(&pool);
}

prequal_fuzz::target!(seeds, run);
