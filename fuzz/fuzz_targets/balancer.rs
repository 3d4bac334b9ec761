//! A worker's balancer over damaged shared data: it still serves requests, and everything that it writes is accepted
//! again (`Host` checks every write).
#![no_main]

use prequal_core::client::members::{Placement, Target};
use prequal_core::client::reply::Reply;
use prequal_core::client::settings::{ChoiceSettings, ClusterConfig, Mode, Rule, Shim};
use prequal_core::client::sync_mode::Answer;
use prequal_core::client::{Balancer, Class, ProbeEnd, Request, Witness};
use prequal_core::config::Profile;
use prequal_core::shared::endpoint::Endpoint;
use prequal_core::shared::time::Micros;
use prequal_core::wire::hint::HintSource;
use prequal_core::wire::load::Load;
use prequal_core::wire::report::LoadReport;
use prequal_fuzz::{Host, START, Script, replica};
use rand::SeedableRng;
use rand::rngs::SmallRng;

const BLOBS: [&str; 3] = ["pool", "members", "ejections"];

fn config(rule: Rule, endpoints: u16) -> ClusterConfig {
    let profile = Profile::Default;
    ClusterConfig {
        cluster: "service".into(),
        probe_cluster: "probes".into(),
        pool: profile.pool_settings(),
        probe: profile.probe_settings(),
        choice: ChoiceSettings { rule, mode: Mode::Async, ..ChoiceSettings::default() },
        endpoints: (0..endpoints).map(replica).collect(),
    }
}

/// What the proxy reports about a request.
struct Proxy {
    now: Micros,
    served: Option<Endpoint>,
    class: Class,
    attempts: u64,
}

impl Witness for Proxy {
    fn now(&self) -> Micros {
        self.now
    }

    fn is_ours(&self) -> bool {
        self.attempts != 7
    }

    fn served_by(&self) -> Option<Endpoint> {
        self.served
    }

    fn class(&self) -> Class {
        self.class
    }

    fn attempts(&self) -> u64 {
        self.attempts
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let host = Host::default();
    let mut balancer =
        Balancer::new(config(Rule::Predicted, 5), Shim::StatefulSession, &host.store(), (), START);
    let mut rng = SmallRng::seed_from_u64(3);
    for n in 0..20 {
        let at = replica(n % 5);
        let report =
            LoadReport::parse(format!("{n};20000;{at};base=9000;knee=3")).map_err(ProbeEnd::BadReport);
        let target = Target { replica: at, probe: at };
        let now = START.plus(u64::from(n) * 5000);
        balancer.replied(now, Some(target), false, Ok(Reply { report, host: Some(at) }));
        let mut request = balancer.begin(now, &[], true, &mut rng);
        let proxy = Proxy { now, served: request.pick.replica, class: Class::Answer, attempts: 1 };
        balancer.response(now, &mut request, n % 4 == 0, None, &proxy);
        balancer.ended(request, true, n % 4 == 0, &proxy);
    }
    balancer.tick(START.plus(200_000), &mut rng);
    let script = [0, 0, 1, 0, 2, 1, 0, 3, 4, 1, 0, 1, 1, 2, 1, 3, 1, 2, 2, 3, 1, 4, 0, 1, 1, 5, 0].repeat(3);
    let mut seeds = vec![Script::join(&script, &[])];
    for (number, name) in (0..).zip(BLOBS) {
        for rule in 0..4 {
            let mut script = script.clone();
            (script[0], script[1]) = (rule, number);
            seeds.push(Script::join(&script, &host.bytes(name)));
        }
    }
    seeds
}

fn report(script: &mut Script<'_>) -> LoadReport {
    let (rif, latency, endpoint) = (script.byte(), script.word() % 3_600_000_000, script.replica());
    let fail = u32::from(script.byte()) * 4 % 1001;
    let text = match script.byte() % 4 {
        0 => format!("{rif};;{endpoint}"),
        1 => format!("{rif};{latency};{endpoint};fail={fail}"),
        2 => format!(
            "{rif};{latency};{endpoint};away={};base={};knee={};steady={};rse={}",
            rif / 3,
            latency / 2 + 1,
            u32::from(rif) + 1,
            rif % 2,
            fail % 256
        ),
        _ => format!("{rif};{latency};{endpoint};up={rif};probe={}", endpoint.with_port(9000)),
    };
    LoadReport::parse(text).expect("a valid report")
}

fn run(data: &[u8]) {
    let (mut script, blob) = Script::split(data);
    let rules = [Rule::Predicted, Rule::Hcl, Rule::PeakEwma, Rule::C3 { clients: 3 }];
    let rule = rules[usize::from(script.byte() % 4)];
    let damaged = BLOBS[usize::from(script.byte() % 3)];
    let host = Host::default();
    let (mut now, mut rng) = (START, SmallRng::seed_from_u64(1));
    let known = u16::from(script.byte() % 6);
    let mut balancer = Balancer::new(config(rule, known), Shim::StatefulSession, &host.store(), (), now);
    let mut open: Vec<Request> = Vec::new();
    let hints = HintSource { header: Some("x-session".into()), path_segment: None };
    host.damage(damaged, blob);
    while !script.is_over() {
        script.pass(&mut now);
        match script.byte() % 8 {
            0 | 1 => open.push(balancer.begin(now, &[], script.bit(), &mut rng)),
            2 | 3 if !open.is_empty() => {
                let mut request = open.swap_remove(usize::from(script.byte()) % open.len());
                let served = match script.byte() % 4 {
                    0 => None,
                    1 => Some(script.replica()),
                    _ => request.pick.replica,
                };
                let classes = [Class::Answer, Class::UpstreamFailure, Class::ClientAbort, Class::Local];
                let class = classes[usize::from(script.byte() % 4)];
                let proxy = Proxy { now, served, class, attempts: u64::from(script.byte() % 8) };
                let (failed, complete) = (script.bit(), script.bit());
                if script.bit() {
                    let reported = script.bit().then(|| Ok(report(&mut script)));
                    balancer.response(now, &mut request, failed, reported, &proxy);
                }
                balancer.ended(request, complete, failed, &proxy);
            }
            4 => {
                let asked = script.bit().then(|| script.replica());
                let asked = asked.map(|replica| Target { replica, probe: replica });
                let host = script.bit().then(|| script.replica());
                let reply = if script.bit() {
                    Err(ProbeEnd::Timeout)
                } else {
                    let report = if script.bit() { Ok(report(&mut script)) } else { Err(ProbeEnd::Status) };
                    Ok(Reply { report, host })
                };
                balancer.replied(now, asked, script.bit(), reply);
            }
            5 => {
                let tick = balancer.tick(now, &mut rng);
                balancer.targets(tick.probes, now, &mut rng);
            }
            6 => {
                let value = [script.byte()];
                let hint = script.bit().then(|| hints.hint(Some(&value), None)).flatten();
                let (targets, mut waiting) = balancer.ask(hint, &mut rng);
                for target in targets {
                    let load = Load::at_face_value(u32::from(script.byte()), None);
                    let placement = Placement::even(0);
                    waiting.ended(Some(Answer { replica: target.replica, load, placement, home: None }));
                }
                open.push(balancer.begin(now, waiting.answers(), true, &mut rng));
            }
            _ => host.damage(BLOBS[usize::from(script.byte() % 3)], blob),
        }
    }
    for request in open {
        let proxy = Proxy { now, served: request.pick.replica, class: Class::Answer, attempts: 1 };
        balancer.ended(request, true, false, &proxy);
    }
    balancer.tick(now, &mut rng);
}

prequal_fuzz::target!(seeds, run);
