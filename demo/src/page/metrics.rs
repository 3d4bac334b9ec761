//! `/metrics` in Prometheus' text format: what the load generator has measured on both sides.

use std::fmt::Write as _;

use crate::load::SIDES;
use crate::page::state::State;

pub(super) fn text(state: &State) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write(&mut out, state);
    out
}

fn write(out: &mut String, state: &State) -> std::fmt::Result {
    head(out, "prequal_demo_requests_total", "counter", "Requests of the load generator that ended.")?;
    for (name, side) in SIDES.iter().zip(&state.sides) {
        for (class, count) in [("ok", side.ok), ("failed", side.failed)] {
            writeln!(out, "prequal_demo_requests_total{{side=\"{name}\",class=\"{class}\"}} {count}")?;
        }
    }
    let name = "prequal_demo_latency_seconds";
    head(out, name, "gauge", "Quantiles of the last 5 s; a failed request counts as at least 2 s.")?;
    for (side_name, side) in SIDES.iter().zip(&state.sides) {
        let Some(window) = side.windows.back() else { continue };
        for (quantile, key) in [("0.5", "p50_ms"), ("0.99", "p99_ms"), ("0.999", "p999_ms")] {
            let seconds = window[key].as_f64().unwrap_or(0.0) / 1e3;
            writeln!(out, "{name}{{side=\"{side_name}\",quantile=\"{quantile}\"}} {seconds}")?;
        }
    }
    head(out, "prequal_demo_share", "gauge", "Share of a replica in the answers of the last 5 s, 0 to 1.")?;
    for (name, side) in SIDES.iter().zip(&state.sides) {
        for replica in 1..=state.endpoints.replicas {
            let share = side.share(replica);
            writeln!(out, "prequal_demo_share{{side=\"{name}\",replica=\"{replica}\"}} {share}")?;
        }
    }
    Ok(())
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) -> std::fmt::Result {
    writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}")
}
