//! A replica that fails fast may attract traffic: requests that fail at once keep it idle.
//!
//! The whole duration of the fault is judged, including its first instant; then the replica heals.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, ValueEnum};

use super::compare;
use crate::arm::Arm;
use crate::backends::{Change, Fleet, ReplicaSpec};
use crate::deployment::ReplicaEvent;
use crate::passes::Length;
use crate::recovery::Watch;
use crate::scenario::{Goal, Load, Marked, Scenario};

const REPLICAS: usize = 10;
/// The failing replica.
const FAILING: u16 = 9;
/// Time before the fault, in which every policy learns the fleet.
const HEALTHY: Duration = Duration::from_secs(5);

/// Arguments of `e2e sinkhole`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Sinkhole {
    /// Only these faults, comma-separated [default: all]
    #[arg(long, value_delimiter = ',')]
    fault: Vec<Fault>,
    #[command(flatten)]
    length: Length,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Fault {
    /// Answers half of the requests with a 503 at once
    #[value(name = "50")]
    Half,
    /// Answers 30 % of the requests with a 503 at once
    #[value(name = "30")]
    Third,
    /// Answers all requests with a 503 at once
    #[value(name = "100")]
    All,
    /// The backend refuses connections; its agent answers for it
    Refused,
    /// The whole replica refuses connections, including its agent
    Gone,
}

impl Fault {
    fn text(self) -> &'static str {
        match self {
            Self::Half => "answers 503 at once to half of its requests",
            Self::Third => "answers 503 at once to 30 % of its requests",
            Self::All => "answers 503 at once to all of its requests",
            Self::Refused => "refuses its agent's connections",
            Self::Gone => "is gone, with its agent",
        }
    }

    /// The events that begin and end the fault.
    fn events(self) -> [ReplicaEvent; 2] {
        let failing = |share| ReplicaEvent::Backend(FAILING, Change::Failing(share));
        let refusing = |refuse| ReplicaEvent::Backend(FAILING, Change::Refusing(refuse));
        match self {
            Self::Half => [failing(0.5), failing(0.0)],
            Self::Third => [failing(0.3), failing(0.0)],
            Self::All => [failing(1.0), failing(0.0)],
            Self::Refused => [refusing(true), refusing(false)],
            Self::Gone => [ReplicaEvent::AgentGone(FAILING), ReplicaEvent::AgentBack(FAILING)],
        }
    }
}

/// Runs the faults one after the other.
pub(super) async fn run(sinkhole: &Sinkhole) -> Result<ExitCode> {
    let all = Fault::value_variants();
    let faults = if sinkhole.fault.is_empty() { all } else { &sinkhole.fault };
    let length = &sinkhole.length;
    let scenarios = faults.iter().map(|fault| scenario(*fault, length.seconds(60))).collect();
    compare("sinkhole", scenarios, length, 3).await
}

fn scenario(fault: Fault, seconds: Duration) -> Scenario {
    let [begin, end] = fault.events();
    let name = fault.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
    Scenario {
        name: format!("sinkhole {name}"),
        title: format!("{REPLICAS} replicas at 50 ms, 500 requests/s, one {}", fault.text()),
        fleet: Fleet::of(REPLICAS, ReplicaSpec::sleeping(50)),
        load: Load::constant(500),
        workers: 1,
        arms: Arm::USUAL.to_vec(),
        judged: HEALTHY..HEALTHY + seconds,
        schedule: vec![(HEALTHY, begin), (HEALTHY + seconds, end)],
        streams: 0,
        good_within: Duration::from_secs(1),
        marked: Some(Marked { replicas: FAILING..FAILING + 1, label: "the failing one" }),
        watch: Some(Watch { replica: FAILING, within: Duration::from_secs(10), part: 0.5 }),
        goals: vec![Goal::Good(0.99), Goal::Back],
    }
}
