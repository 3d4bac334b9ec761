//! Fleets without a fault, on which Prequal must not be worse than the best of Envoy's own policies. They have one or
//! two kinds of replicas, constant or varying service times, and a load that makes requests wait.
//!
//! A replica serves a limited number of requests at a time, and any number may wait. Requests arrive open loop
//! (Poisson), through one Envoy with two workers or spread over four with one worker each. `fleet` can also have
//! replicas whose requests share cores, and a closed loop through one Envoy, in which a fixed number of connections
//! saturates the replicas.

use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Error, Result, ensure};
use clap::Args;

use super::{FIRST, Topologies};
use crate::arm::Arm;
use crate::backends::{Fleet, ReplicaSpec, Service, Times};
use crate::load::Spread;
use crate::passes::Length;
use crate::scenario::{Goal, Load, Marked, Scenario};

/// Limited because each replica has an agent, which is a process.
const MOST_REPLICAS: u16 = 100;

/// Duration and topologies of one of these scenarios.
#[derive(Args, Clone, Debug)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(super) length: Length,
    /// Number of Envoys that share the load; each of four has one worker
    #[arg(long, default_value = "both")]
    pub(super) envoys: Topologies,
    /// Workers of a single Envoy
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(super) workers: u32,
    /// How requests are spread over several Envoys
    #[arg(long, default_value = "in-turn")]
    pub(super) spread: Spread,
}

/// Arguments of `e2e fleet`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Any {
    /// Number of replicas
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=i64::from(MOST_REPLICAS)))]
    replicas: u16,
    /// Requests that a replica serves at a time
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=1000), required_unless_present = "cores")]
    slots: Option<u16>,
    /// Cores of a replica, in place of --slots: all its requests are served at once and share them
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=1000), conflicts_with = "slots")]
    cores: Option<u16>,
    /// Service times in ms: exact:MS, exp:MEAN, lognormal:MEAN,SIGMA or mix:LOW-HIGH,LOW-HIGH,SHARE
    #[arg(long, value_name = "TIMES")]
    service: Times,
    /// Another kind of replica, as REPLICASxSLOTS:TIMES (2x1:exp:40), or with shared cores as REPLICASxCORESc:TIMES
    /// (2x1c:exp:40). May be repeated. The share of all but the first kind is shown
    #[arg(long, value_name = "GROUP")]
    and: Vec<ReplicaGroup>,
    /// Weights of the replicas in Envoy's configuration, one per kind, comma-separated
    #[arg(long, value_name = "WEIGHTS", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=128))]
    weights: Vec<u32>,
    /// Load as a fraction of what the whole fleet can serve
    #[arg(long, value_name = "PART", value_parser = load, required_unless_present = "connections")]
    load: Option<f64>,
    /// Closed loop, in place of --load: number of connections, each of which sends its next request once the previous
    /// one is answered. Needs --envoys 1
    #[arg(long, value_name = "COUNT", conflicts_with = "load", value_parser = clap::value_parser!(u16).range(1..=1000))]
    connections: Option<u16>,
    /// Idle WebSockets that are open during the load, on average per replica
    #[arg(long, value_name = "COUNT", default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=200))]
    streams: u16,
    #[command(flatten)]
    pub(super) run: RunArgs,
}

impl Any {
    /// Refuses combinations of options that the command line's parser cannot refuse.
    pub(super) fn check(&self) -> Result<()> {
        let one = self.run.envoys.list() == [1];
        ensure!(
            self.connections.is_none() || one,
            "--connections needs --envoys 1: all connections go to one Envoy"
        );
        ensure!(
            self.weights.is_empty() || self.weights.len() == 1 + self.and.len(),
            "--weights needs one weight per kind of replica, {} in all, not {}",
            1 + self.and.len(),
            self.weights.len()
        );
        Ok(())
    }
}

/// Identical replicas.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ReplicaGroup {
    replicas: u16,
    serving: Serving,
    times: Times,
    weight: u32,
}

/// What limits a replica.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Serving {
    /// It serves this many requests at a time; others wait.
    Slots(u16),
    /// It serves all requests at once; they share this many cores.
    Cores(u16),
}

impl Serving {
    fn requests(self) -> u16 {
        match self {
            Self::Slots(count) | Self::Cores(count) => count,
        }
    }
}

impl ReplicaGroup {
    /// Requests per second that the group can serve.
    fn capacity(self) -> f64 {
        f64::from(self.replicas) * f64::from(self.serving.requests()) * 1e3 / self.times.mean_ms()
    }

    fn text(self) -> String {
        let plural = if self.serving.requests() == 1 { "" } else { "s" };
        let serving = match self.serving {
            Serving::Slots(slots) => format!("{slots} slot{plural}"),
            Serving::Cores(cores) => format!("{cores} shared core{plural}"),
        };
        let weight = if self.weight == 1 { String::new() } else { format!(", weight {}", self.weight) };
        format!("{} replicas with {serving}, {}{weight}", self.replicas, self.times)
    }

    fn replica(self) -> ReplicaSpec {
        let times = self.times;
        ReplicaSpec::new(match self.serving {
            Serving::Slots(slots) => Service::Queue { slots: slots.into(), times },
            Serving::Cores(cores) => Service::Cores { cores: cores.into(), times },
        })
        .with_weight(self.weight)
    }
}

impl FromStr for ReplicaGroup {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let form = || {
            format!(
                "`{text}` is not REPLICASxSLOTS:TIMES or REPLICASxCORESc:TIMES, such as 2x1:exp:40 or 2x1c:exp:40"
            )
        };
        let (size, times) = text.split_once(':').with_context(form)?;
        let (replicas, serving) = size.split_once('x').with_context(form)?;
        let replicas: u16 = replicas.parse().with_context(form)?;
        let serving = match serving.strip_suffix('c') {
            Some(cores) => Serving::Cores(cores.parse().with_context(form)?),
            None => Serving::Slots(serving.parse().with_context(form)?),
        };
        ensure!(
            (1..=MOST_REPLICAS).contains(&replicas),
            "from 1 to {MOST_REPLICAS} replicas, not {replicas}"
        );
        let requests = serving.requests();
        ensure!((1..=1000).contains(&requests), "from 1 to 1000 slots or cores, not {requests}");
        Ok(Self { replicas, serving, times: times.parse()?, weight: 1 })
    }
}

fn load(text: &str) -> Result<f64> {
    let load: f64 = text.parse().with_context(|| format!("`{text}` is not a number"))?;
    ensure!(load > 0.0 && load < 1.0, "a load must be above 0 and below 1; from 1 on, the queues only grow");
    Ok(load)
}

fn exponential(replicas: u16, slots: u16, mean_ms: f64) -> ReplicaGroup {
    ReplicaGroup {
        replicas,
        serving: Serving::Slots(slots),
        times: Times::Exponential { mean_ms },
        weight: 1,
    }
}

/// Identical, busy replicas.
pub(crate) fn equal(seconds: Duration) -> Scenario {
    scenario("equal", &[exponential(16, 4, 40.0)], 1280, None, seconds)
}

/// Identical replicas, so busy that a request sent to the wrong replica waits.
pub(super) fn equal_90(seconds: Duration) -> Scenario {
    let mut scenario = scenario("equal-90", &[exponential(10, 3, 20.0)], 1350, None, seconds);
    scenario.goals.push(Goal::P99OfBest(0.8));
    scenario
}

/// Identical replicas, but one request in ten takes twenty times as long as the others.
pub(super) fn mix(seconds: Duration) -> Scenario {
    let times = Times::Mix { usual: [5.0, 15.0], other: [100.0, 300.0], other_share: 0.1 };
    let group = ReplicaGroup { replicas: 8, serving: Serving::Slots(4), times, weight: 1 };
    scenario("mix", &[group], 772, None, seconds)
}

/// Half of the replicas are half as fast.
pub(super) fn generations(seconds: Duration) -> Scenario {
    let groups = [exponential(8, 4, 40.0), exponential(8, 4, 80.0)];
    scenario("generations", &groups, 960, Some("the slow half"), seconds)
}

/// Two replicas are as fast as the others, but have a quarter of their slots.
pub(super) fn queue(seconds: Duration) -> Scenario {
    let groups = [exponential(14, 4, 40.0), exponential(2, 1, 40.0)];
    scenario("queue", &groups, 800, Some("the small pair"), seconds)
}

/// Identical replicas and identical requests: round robin is hard to beat.
pub(super) fn constant(seconds: Duration) -> Scenario {
    let times = Times::Exactly { ms: 40.0 };
    let group = ReplicaGroup { replicas: 12, serving: Serving::Slots(4), times, weight: 1 };
    scenario("constant", &[group], 1080, None, seconds)
}

/// Identical replicas, rarely busy: each must get some requests. The whole run is judged.
pub(super) fn idle(seconds: Duration) -> Scenario {
    let times = Times::Exactly { ms: 10.0 };
    let group = ReplicaGroup { replicas: 4, serving: Serving::Slots(4), times, weight: 1 };
    Scenario {
        title: format!("{}, 20 requests/s", group.text()),
        load: Load::constant(20),
        judged: Duration::ZERO..seconds,
        goals: vec![Goal::LeastPart(0.5), Goal::NoneFailed],
        ..scenario("idle", &[group], 20, None, seconds)
    }
}

/// The fleet that the command line describes.
pub(super) fn any(fleet: &Any, seconds: Duration) -> Scenario {
    let serving = fleet.cores.map(Serving::Cores).or(fleet.slots.map(Serving::Slots));
    let serving = serving.expect("the command line has one of the two");
    let first = ReplicaGroup { replicas: fleet.replicas, serving, times: fleet.service, weight: 1 };
    let mut groups: Vec<ReplicaGroup> = std::iter::once(first).chain(fleet.and.iter().copied()).collect();
    for (group, weight) in groups.iter_mut().zip(&fleet.weights) {
        group.weight = *weight;
    }
    let capacity: f64 = groups.iter().map(|group| group.capacity()).sum();
    let per_second = (fleet.load.unwrap_or_default() * capacity).round().max(1.0) as u32;
    let marked = (!fleet.and.is_empty()).then_some("the other kinds");
    let mut open = scenario("fleet", &groups, per_second, marked, seconds);
    if fleet.streams > 0 {
        open.streams = usize::from(fleet.streams) * open.fleet.len();
        open.title += &format!(", {} idle streams", open.streams);
    }
    match fleet.connections {
        Some(connections) => Scenario {
            title: format!("{}; {connections} closed-loop connections", text(&groups)),
            load: Load::Closed { connections: connections.into() },
            ..open
        },
        None => open,
    }
}

fn text(groups: &[ReplicaGroup]) -> String {
    let texts: Vec<String> = groups.iter().map(|group| group.text()).collect();
    texts.join(", and ")
}

/// A run of `seconds` after [`FIRST`]. With a label, all replicas but those of the first group are marked.
fn scenario(
    name: &str,
    groups: &[ReplicaGroup],
    per_second: u32,
    marked: Option<&'static str>,
    seconds: Duration,
) -> Scenario {
    let capacity: f64 = groups.iter().map(|group| group.capacity()).sum();
    let fleet = groups
        .iter()
        .fold(Fleet::default(), |fleet, group| fleet.and(usize::from(group.replicas), group.replica()));
    let replicas = groups[0].replicas..fleet.len() as u16;
    Scenario {
        name: name.to_owned(),
        title: format!(
            "{}; {per_second} requests/s Poisson, {:.0} % load",
            text(groups),
            f64::from(per_second) / capacity * 100.0
        ),
        fleet,
        load: Load::poisson(per_second),
        workers: 2,
        arms: Arm::STOCK.into_iter().chain([Arm::Prequal]).collect(),
        judged: FIRST..FIRST + seconds,
        schedule: Vec::new(),
        streams: 0,
        good_within: Duration::from_millis(500),
        marked: marked.map(|label| Marked { replicas, label }),
        watch: None,
        goals: vec![Goal::NeverWorse],
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    #[derive(Parser)]
    struct CommandLine {
        #[command(flatten)]
        any: Any,
    }

    fn parsed(line: &str) -> Result<Scenario, String> {
        let line = CommandLine::try_parse_from(std::iter::once("fleet").chain(line.split_whitespace()));
        line.map(|line| any(&line.any, MINUTE)).map_err(|error| error.to_string())
    }

    #[test]
    fn every_fleet_has_its_intended_load() {
        for (scenario, replicas, load) in [
            (equal(MINUTE), 16, "80 % load"),
            (equal_90(MINUTE), 10, "90 % load"),
            (mix(MINUTE), 8, "70 % load"),
            (generations(MINUTE), 16, "80 % load"),
            (queue(MINUTE), 16, "55 % load"),
            (constant(MINUTE), 12, "90 % load"),
        ] {
            assert_eq!(scenario.fleet.len(), replicas, "{}", scenario.title);
            assert!(scenario.title.ends_with(load), "{}", scenario.title);
            assert_eq!(scenario.arms.len(), 6);
            assert_eq!((scenario.workers(1), scenario.workers(4)), (2, 1));
        }
    }

    #[test]
    fn the_second_kind_is_marked() {
        let marked = |scenario: Scenario| scenario.marked.map(|marked| (marked.replicas, marked.label));
        assert_eq!(marked(generations(MINUTE)), Some((8..16, "the slow half")));
        assert_eq!(marked(queue(MINUTE)), Some((14..16, "the small pair")));
        assert_eq!(marked(equal(MINUTE)), None);
    }

    #[test]
    fn any_fleet_can_be_described_by_options() {
        let line =
            "--replicas 14 --slots 4 --service exp:40 --and 2x1:exact:80 --load 0.5 --seconds 10 --envoys 1";
        let scenario = parsed(line).unwrap();
        assert_eq!(
            scenario.title,
            "14 replicas with 4 slots, exponential 40 ms, and 2 replicas with 1 slot, exactly 80 ms; 713 requests/s \
             Poisson, 50 % load"
        );
        let kind = |slots, times| ReplicaSpec::new(Service::Queue { slots, times });
        assert_eq!(scenario.fleet.0[13], kind(4, Times::Exponential { mean_ms: 40.0 }));
        assert_eq!(scenario.fleet.0[14], kind(1, Times::Exactly { ms: 80.0 }));
        assert_eq!((scenario.marked.unwrap().replicas, scenario.streams), (14..16, 0));
        let scenario = parsed(&format!("{line} --streams 5")).unwrap();
        assert!(scenario.title.ends_with(" 50 % load, 80 idle streams"), "{}", scenario.title);
        assert_eq!(scenario.streams, 80);
    }

    #[test]
    fn kinds_can_have_weights() {
        let line = "--replicas 2 --slots 3 --service exp:20 --and 1x1:exp:20 --load 0.5 --weights";
        let scenario = parsed(&format!("{line} 10,1")).unwrap();
        assert!(
            scenario.title.contains("exponential 20 ms, weight 10, and 1 replicas"),
            "{}",
            scenario.title
        );
        assert_eq!(scenario.fleet.0.iter().map(|replica| replica.weight).collect::<Vec<_>>(), [10, 10, 1]);

        let line = format!("fleet {line} 10,1,1");
        let wrong = CommandLine::try_parse_from(line.split_whitespace()).expect("options").any;
        let error = wrong.check().expect_err("three weights").to_string();
        assert!(error.contains("2 in all, not 3"), "{error}");
    }

    #[test]
    fn replicas_can_share_cores() {
        let line = "--replicas 8 --cores 2 --service exp:20 --and 2x1c:exp:40 --load 0.5 --envoys 1";
        let scenario = parsed(line).unwrap();
        assert_eq!(
            scenario.title,
            "8 replicas with 2 shared cores, exponential 20 ms, and 2 replicas with 1 shared core, exponential 40 ms; \
             425 requests/s Poisson, 50 % load"
        );
        let kind = |cores, mean_ms| {
            ReplicaSpec::new(Service::Cores { cores, times: Times::Exponential { mean_ms } })
        };
        assert_eq!((scenario.fleet.0[7], scenario.fleet.0[8]), (kind(2, 20.0), kind(1, 40.0)));
    }

    #[test]
    fn any_fleet_can_be_saturated_by_a_closed_loop() {
        let scenario =
            parsed("--replicas 8 --slots 4 --service exact:20 --connections 100 --envoys 1").unwrap();
        assert_eq!(scenario.title, "8 replicas with 4 slots, exactly 20 ms; 100 closed-loop connections");
        assert!(matches!(scenario.load, Load::Closed { connections: 100 }));

        let checked = |envoys| {
            let line =
                format!("fleet --replicas 8 --slots 4 --service exact:20 --connections 9 --envoys {envoys}");
            CommandLine::try_parse_from(line.split_whitespace()).expect("options").any.check()
        };
        assert!(checked("1").is_ok());
        let error = checked("both").expect_err("two topologies").to_string();
        assert!(error.contains("--envoys 1"), "{error}");
    }

    #[test]
    fn an_invalid_fleet_is_refused_with_the_reason() {
        let usual = "--replicas 2 --slots 3 --service exp:20 --load 0.9";
        for (from, to, reason) in [
            ("exp:20", "gauss:20", "unknown distribution `gauss`"),
            ("0.9", "1.0", "from 1 on, the queues only grow"),
            ("0.9", "much", "`much` is not a number"),
            ("--replicas 2", "--replicas 0", "0 is not in 1..=100"),
            ("--load", "--connections 9 --load", "cannot be used with"),
            ("--load 0.9", "", "--load <PART>"),
            ("--slots 3", "", "--slots <COUNT>"),
            ("--load", "--cores 2 --load", "cannot be used with"),
            ("--load", "--weights 0 --load", "0 is not in 1..=128"),
            ("--load", "--and 2:exp:40 --load", "REPLICASxSLOTS:TIMES"),
            ("--load", "--and 2x0c:exp:40 --load", "from 1 to 1000 slots or cores, not 0"),
            ("--load", "--and 0x1:exp:40 --load", "from 1 to 100 replicas, not 0"),
            ("--load", "--and 2x1:exp --load", "no `:`"),
        ] {
            let error = parsed(&usual.replace(from, to)).expect_err(to);
            assert!(error.contains(reason), "{to}: {error}");
        }
        assert!(parsed(usual).is_ok());
    }
}
