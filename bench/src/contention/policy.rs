//! The policies that the load ramp compares: in a real Envoy, and their counterparts in the simulator.

use std::net::SocketAddr;

use anyhow::Result;
use prequal_core::client::policies::linear::{ALPHA_US, Linear};
use prequal_core::client::policies::peak_ewma::Scan;
use prequal_core::client::settings::Rule;
use prequal_testbed::EnvoyConfig;
use serde_json::json;

use super::scale::DEADLINE;
use crate::arm::Arm;
use crate::backends::Fleet;
use crate::deployment::{self, CLUSTER};
use crate::sim::balancer::{self as simulated, Prequal};
use crate::sim::plans::{ours, paper};
use crate::sim::policies::cswrr::Settings;

/// A policy.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Policy {
    /// The paper's weighted round robin: weights are queries per second over CPU utilisation, and errors do not count.
    /// In Envoy it is `client_side_weighted_round_robin`, fed with the CPU utilisation that replicas report.
    Wrr,
    /// The same Envoy policy, fed by the agents, which count requests but do not know CPU time.
    Cswrr,
    TwoChoices,
    FullScan,
    /// The filter as shipped.
    Prequal,
    /// The filter with the paper's profile.
    Paper,
    /// Another selection rule of the filter, to compare with the paper's figure 7.
    Rule(&'static str),
}

impl Policy {
    /// The comparison of figure 6.
    pub(super) const RAMP: [Self; 6] =
        [Self::Wrr, Self::Cswrr, Self::TwoChoices, Self::FullScan, Self::Paper, Self::Prequal];
    /// All policies. The simulator has its own version of each.
    pub(super) const ALL: [Self; 10] = [
        Self::Wrr,
        Self::Cswrr,
        Self::TwoChoices,
        Self::FullScan,
        Self::Rule("peak_ewma"),
        Self::Rule("linear"),
        Self::Rule("c3"),
        Self::Rule("rif_only"),
        Self::Paper,
        Self::Prequal,
    ];

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Wrr => "wrr (CPU)",
            Self::Paper => "prequal (paper)",
            Self::Cswrr | Self::TwoChoices | Self::FullScan | Self::Prequal | Self::Rule(_) => {
                self.arm().label()
            }
        }
    }

    fn arm(self) -> Arm {
        match self {
            Self::Wrr | Self::Cswrr => Arm::Cswrr,
            Self::TwoChoices => Arm::LeastRequest,
            Self::FullScan => Arm::FullScan,
            Self::Prequal | Self::Paper => Arm::Prequal,
            Self::Rule(rule) => Arm::Rule(rule),
        }
    }

    /// Arguments of the agents.
    pub(super) fn agent_args(self) -> Vec<String> {
        let args: &[&str] = match self {
            Self::Wrr => &["--orca", "text", "--orca-from-backend", "utilization"],
            Self::Cswrr => &["--orca", "text"],
            _ => &[],
        };
        args.iter().map(|arg| (*arg).to_owned()).collect()
    }

    /// Envoy's configuration.
    pub(super) fn envoy(self, replicas: &[SocketAddr]) -> Result<EnvoyConfig> {
        let config = deployment::config(self.arm(), replicas, &Fleet::default())?
            .edit(|config| config.route_mut()["timeout"] = json!(format!("{}s", DEADLINE.as_secs())));
        Ok(match self {
            Self::Wrr => config.edit(|config| {
                let policy = &mut config.cluster_mut(CLUSTER)["load_balancing_policy"]["policies"][0];
                policy["typed_extension_config"]["typed_config"]["error_utilization_penalty"] = json!(0.0);
            }),
            Self::Paper => {
                config.filter_settings(|settings| settings["clusters"][0]["profile"] = json!("paper"))
            }
            _ => config,
        })
    }

    /// The counterpart in the simulator. As in reality, replicas are learned, and agents estimate latency as shipped.
    pub(super) fn simulated(self) -> simulated::SimArm {
        let learned = |prequal: Prequal| {
            let mut prequal = Prequal { paper_tracker: false, learn: true, ..prequal };
            prequal.pool.verified_probes = true;
            simulated::SimArm::Prequal(prequal)
        };
        match self {
            Self::Wrr => simulated::SimArm::WeightedRoundRobin,
            // The testbed's configuration has this blackout.
            Self::Cswrr => simulated::SimArm::Cswrr(Settings { blackout_ms: 1000, ..Settings::DEFAULT }),
            Self::TwoChoices => simulated::SimArm::LeastLoadedPo2c,
            Self::FullScan => simulated::SimArm::LeastLoaded,
            Self::Prequal => learned(ours()),
            Self::Paper => learned(paper()),
            Self::Rule("peak_ewma") => simulated::SimArm::PeakEwma(Scan::TwoChoices),
            Self::Rule(name) => {
                let rule = match name {
                    "c3" => Rule::C3 { clients: 1 },
                    "linear" => Rule::Linear(Linear { lambda: 0.5, alpha_us: ALPHA_US }),
                    _ => Rule::RifOnly,
                };
                learned(Prequal { rule, ..ours() })
            }
        }
    }
}
