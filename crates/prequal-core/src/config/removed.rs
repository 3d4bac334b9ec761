//! Keys of earlier versions.

/// Keys that were removed or renamed, each with its replacement.
pub(super) const REMOVED: &[(&str, &str)] = &[
    ("latency_band", "rule \"predicted\" needs no band"),
    ("cold_limit", "rule \"predicted\" needs no limit"),
    ("q_rif_small", "rule \"predicted\" needs no quantile; with \"rule\": \"hcl\" set \"q_rif\""),
    ("learning_rif", "set \"burst_guard\" to true or false"),
    ("overflow_rif", "set \"burst_guard\" to true or false"),
    ("error_aversion", "its new name is \"ejection_failure_share\""),
    ("breaker", "its new name is \"ejection_wait_factor\""),
    ("ramp_ms", "its new name is \"slow_start_ms\""),
];
