//! The profiles: named sets of defaults. `docs/reference/configuration.md` explains why they differ.

use super::Settings;
use crate::client::ejection::EjectionSettings;
use crate::client::pool::{Budget, HotRule, MAX_HISTORY, PoolSettings};
use crate::client::settings::{ChoiceSettings, Mode, ProbeSettings, Rule};
use crate::client::sync_mode::SyncSettings;
use crate::wire::hint::HintSource;

/// A named set of defaults.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Profile {
    /// Prequal's defaults: adaptive budget, reports on responses, a pool that holds a whole fleet of up to 64.
    Default,
    /// The baseline of the paper's testbed (§5): fixed `r_probe` = 3, `r_remove` = 1, hot if RIF ≥ θ, probes only.
    Paper,
    /// For fleets of at most 16 replicas: fewer probes.
    Small,
    /// For requests that take seconds, on replicas with a cache: synchronous with a hint, higher age limits.
    Inference,
}

/// Header from which `profile: inference` takes its hint.
const INFERENCE_HINT: &str = "x-session-id";

impl Profile {
    pub(super) const NAMES: &[(&str, Self)] = &[
        ("default", Self::Default),
        ("paper", Self::Paper),
        ("small", Self::Small),
        ("inference", Self::Inference),
    ];

    /// Returns the pool's settings under this profile.
    pub fn pool_settings(self) -> PoolSettings {
        let default = PoolSettings {
            pool_size: 24,
            max_age_ms: 2000,
            q_rif: 0.95,
            hot: HotRule::Ge,
            delta: 1.0,
            r_remove: 1.0,
            scale_removal: true,
            reuse_cap: 64,
            budget: Budget::Adaptive { target_age_ms: 500, max_probes_per_query: 0.7 },
            discovery_interval_ms: 200,
            verified_probes: false,
            rif_history: MAX_HISTORY,
            theta_of_probes: false,
            burst_guard: true,
            ejection: EjectionSettings { failure_share: 0.1, wait_factor: 2.0 },
            slow_start_ms: 10_000,
        };
        match self {
            Self::Default => default,
            Self::Paper => PoolSettings {
                pool_size: 16,
                max_age_ms: 1000,
                q_rif: 0.840_896_415_253_714_5, // 2^(−1/4)
                scale_removal: false,
                theta_of_probes: true,
                budget: Budget::Fixed { r_probe: 3.0 },
                ejection: EjectionSettings::OFF,
                slow_start_ms: 0,
                burst_guard: false,
                ..default
            },
            Self::Small => PoolSettings {
                max_age_ms: 2000,
                budget: Budget::Adaptive { target_age_ms: 1000, max_probes_per_query: 0.5 },
                discovery_interval_ms: 500,
                ..default
            },
            Self::Inference => PoolSettings {
                max_age_ms: 5000,
                budget: Budget::Adaptive { target_age_ms: 2000, max_probes_per_query: 1.0 },
                ..default
            },
        }
    }

    fn choice_settings(self) -> ChoiceSettings {
        let default = ChoiceSettings::default();
        match self {
            Self::Inference => ChoiceSettings {
                mode: Mode::Sync,
                sync: SyncSettings { d: 3, deadline_ms: 20 },
                hint: Some(HintSource { header: Some(INFERENCE_HINT.into()), path_segment: None }),
                ..default
            },
            Self::Paper => ChoiceSettings { rule: Rule::Hcl, ..default },
            Self::Default | Self::Small => default,
        }
    }

    pub(super) fn settings(self) -> Settings {
        Settings { pool: self.pool_settings(), probe: self.probe_settings(), choice: self.choice_settings() }
    }

    /// Returns the probes' settings under this profile.
    pub fn probe_settings(self) -> ProbeSettings {
        let default = ProbeSettings { timeout_ms: 20, idle_interval_ms: 1000, piggyback: true };
        match self {
            Self::Default | Self::Small => default,
            Self::Paper => ProbeSettings { piggyback: false, ..default },
            Self::Inference => ProbeSettings { timeout_ms: 100, ..default },
        }
    }
}
