//! Every selection rule through the same filter, in the scenarios that distinguish them.

use std::process::ExitCode;

use anyhow::Result;

use super::{ingress, measure, report, stall};
use crate::arm::Arm;
use crate::comparison::Comparison;
use crate::passes::Length;
use crate::scenario::Scenario;
use crate::table;

/// Envoy's own policy that uses reports, then the rules that rank reported load, then those that use only the Envoy's
/// own requests.
const ARMS: [Arm; 8] = [
    Arm::Cswrr,
    Arm::Rule("hcl"),
    Arm::Rule("rif_only"),
    Arm::Rule("latency_only"),
    Arm::Rule("linear"),
    Arm::Rule("c3"),
    Arm::Rule("peak_ewma"),
    Arm::Rule("zuul_choice_of_two"),
];

/// Columns that the short table omits.
const LEFT_OUT: [&str; 4] = ["p50 ms", "p95 ms", "probes/query", "samples"];

/// Runs both scenarios; there are no goals.
pub(super) async fn run(length: &Length) -> Result<ExitCode> {
    let seconds = length.seconds(60);
    let shapes = [ingress::scenario(seconds), stall::scenario(seconds)];
    let compared = |shape| Scenario { arms: ARMS.to_vec(), goals: Vec::new(), ..shape };
    let comparisons = measure(length.choose(shapes.map(compared).into())?, length.passes(3), &[1]).await?;
    let code = report("rules", &comparisons, &[1], &length.out)?;
    println!("Both shapes side by side:\n\n{}", side_by_side(&comparisons));
    Ok(code)
}

fn side_by_side(comparisons: &[Comparison]) -> String {
    let mut header = Vec::new();
    let mut rows = Vec::new();
    for arm in ARMS {
        let mut row = vec![arm.label().to_owned()];
        header = vec!["rule".to_owned()];
        for comparison in comparisons {
            let figures = comparison.figures(arm, 1);
            let shown = figures.into_iter().filter(|(heading, _)| !LEFT_OUT.contains(&heading.as_str()));
            for (heading, cell) in shown {
                header.push(format!("{}: {heading}", comparison.scenario.name));
                row.push(cell);
            }
        }
        rows.push(row);
    }
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    table::render(&header, &rows)
}
