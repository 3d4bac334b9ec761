//! The inbound role's log of ended requests: any bytes are refused, or yield a log that workers read and append to.
//! What is written is accepted again.
#![no_main]

use prequal_core::server::inbound::ended::{EndedLog, ReadPosition};
use prequal_core::server::replica::Replica;
use prequal_core::server::tracker::{Present, TrackerConfig};
use prequal_core::shared::blob::Blob as _;
use prequal_core::shared::outcome::Outcome;
use prequal_core::wire::report::LoadReport;
use prequal_fuzz::{START, Script, nearly, replica, survives};

const OUTCOMES: [Outcome; 4] = [Outcome::Success, Outcome::Failure, Outcome::Aborted, Outcome::Streaming];

fn seeds() -> Vec<Vec<u8>> {
    [0_u16, 1, 10, 200]
        .map(|requests| {
            let (mut log, mut seen) = (EndedLog::default(), ReadPosition::default());
            let mut replica = Replica::new(TrackerConfig::default(), Some(START));
            for n in 0..requests {
                let now = START.plus(u64::from(n) * 3_000);
                let ticket = replica.tracker.start(now);
                let outcome = OUTCOMES[usize::from(n) % 4];
                let ended = replica.finish(ticket, now.plus(20_000 + u64::from(n)), outcome);
                log.begin(&replica, now);
                log.append(&mut seen, ended);
            }
            let script = [0, 3, 0, 1, 0, 1, 1, 2, 20, 0, 3, 2, 1, 5, 1, 4, 1, 1, 2, 3, 130, 0, 2, 1, 9];
            Script::join(&script, &log.encode())
        })
        .to_vec()
}

fn run(data: &[u8]) {
    let (mut script, blob) = Script::split(data);
    let Some(mut log) = nearly::<EndedLog>(blob) else { return };
    survives(&log);
    let mut now = START;
    let worker = || (Replica::new(TrackerConfig::default(), None), ReadPosition::default(), Vec::new());
    let mut workers = [worker(), worker()];
    let endpoint = replica(1);
    while !script.is_over() {
        script.pass(&mut now);
        let (replica, seen, open) = &mut workers[usize::from(script.bit())];
        match script.byte() % 5 {
            0 => open.push(replica.tracker.start(now)),
            1 if !open.is_empty() => {
                let ticket = open.swap_remove(usize::from(script.byte()) % open.len());
                let ended = replica.finish(ticket, now, OUTCOMES[usize::from(script.byte() % 4)]);
                log.begin(replica, now);
                log.read(seen, replica);
                log.append(seen, ended);
            }
            2 => drop(log.set_up(script.bit(), now)),
            3 => drop(log.probed_at(endpoint, script.replica())),
            _ => {
                log.read(seen, replica);
                let present = Present { rif: script.word() % 1000, away: 0 };
                let report = replica.report_at(now, present, endpoint, log.probe_endpoint(endpoint), None);
                let printed = report.to_string();
                assert_eq!(LoadReport::parse(&printed), Ok(report), "{printed}");
            }
        }
        survives(&log);
    }
}

prequal_fuzz::target!(seeds, run);
