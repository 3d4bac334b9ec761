//! Compares the sources' figures with the results here, by experiment: one line per figure that a source gives.

use super::super::plot::{Chart, Line};
use super::super::report::Statement;
use super::*;

/// Empty if no source gives a figure.
pub(crate) fn statements(name: &str, cells: &Cells) -> Vec<Statement> {
    let mut lines = match name {
        "calibration" => calibration(cells),
        "fig6" => fig6(cells),
        "fig7" => fig7(cells),
        "fig8" => fig8(cells),
        "fig9" => fig9(cells),
        "fig10" => fig10(cells),
        "finagle" => finagle(cells),
        "ingress" => ingress(cells),
        "netflix" => netflix(cells),
        "smallfleet" => smallfleet(cells),
        "fleets" => on_fleets(cells),
        _ => Vec::new(),
    };
    // With --quick, not every point is run.
    lines.retain(|line| !line.here_is("–"));
    lines
}

/// Charts of values that are not a metric of one run: the sources' figures, if the experiment has no policies to
/// compare, and figures relative to those of other policies.
pub(crate) fn charts(name: &str, cells: &Cells) -> Vec<Chart> {
    match name {
        "calibration" => vec![calibrated(cells)],
        "fleets" => fleets::charts(cells),
        "random" | "heldout" | "unseen" | "moving" | "cold" | "weights" => random::charts(cells),
        _ => Vec::new(),
    }
}

fn calibrated(cells: &Cells) -> Chart {
    let line = |(label, metric, paper): (&str, usize, f64)| {
        let got = cells.at("0.75x", "Random", metric);
        Line { label: label.to_owned(), values: vec![(paper, paper, paper), (got, got, got)] }
    };
    Chart {
        title: "latency without queueing, ms".to_owned(),
        x_label: String::new(),
        points: vec!["paper".to_owned(), "here".to_owned()],
        lines: FLAT.map(line).into(),
        logarithmic: false,
        ceiling: None,
        format: ms,
    }
}

/// The paper's quantiles below allocation, ms.
const FLAT: [(&str, usize, f64); 4] =
    [("p50", P50, 80.0), ("p90", P90, 182.0), ("p99", P99, 265.0), ("p99.9", P999, 325.0)];

/// Whether `got` is within `share` of what the source states; a timeout counts as 5 s.
fn near(got: f64, source: f64, share: f64) -> bool {
    (capped(got) / source - 1.0).abs() <= share
}

fn in_ms(what: impl Into<String>, source: &str, got: f64, holds: bool) -> Statement {
    Statement::new(what, source, ms(got), holds)
}

fn in_percent(what: &str, source: &str, got: f64, holds: bool) -> Statement {
    Statement::new(what, source, if got.is_nan() { "–".to_owned() } else { percent(got) }, holds)
}

fn times(what: &str, source: &str, got: f64, holds: bool) -> Statement {
    Statement::new(what, source, if got.is_nan() { "–".to_owned() } else { format!("{got:.2}x") }, holds)
}

fn calibration(cells: &Cells) -> Vec<Statement> {
    let line = |(name, metric, paper): (&str, usize, f64)| {
        let got = cells.at("0.75x", "Random", metric);
        in_ms(format!("{name} below allocation, ms"), &ms(paper), got, near(got, paper, 0.02))
    };
    FLAT.map(line).into()
}

fn fig6(cells: &Cells) -> Vec<Statement> {
    const WRR: &str = "WRR";
    let mut lines = Vec::new();
    for (arm, label) in [(WRR, "0.93x"), (PAPER, "0.93x")] {
        for (name, metric, paper) in FLAT {
            let got = cells.at(label, arm, metric);
            lines.push(in_ms(
                format!("{arm}, {name} at {label}, ms"),
                &ms(paper),
                got,
                near(got, paper, 0.1),
            ));
        }
    }
    let stated: [(&str, &str, usize, &str, f64, f64); 13] = [
        (WRR, "1.03x", P99, "p99", 335.0, 0.1),
        (WRR, "1.03x", P999, "p99.9", 5000.0, 0.0),
        (WRR, "1.27x", P90, "p90", 203.0, 0.1),
        (WRR, "1.27x", P99, "p99", 5000.0, 0.0),
        (WRR, "1.57x", P50, "p50", 111.0, 0.1),
        (WRR, "1.57x", P90, "p90", 5000.0, 0.0),
        (WRR, "1.74x", P50, "p50", 150.0, 0.15),
        (PAPER, "1.03x", P999, "p99.9", 325.0, 0.1),
        (PAPER, "1.14x", P999, "p99.9", 325.0, 0.1),
        (PAPER, "1.27x", P999, "p99.9", 350.0, 0.1),
        (PAPER, "1.27x", P99, "p99", 265.0, 0.1),
        (PAPER, "1.41x", P90, "p90", 182.0, 0.1),
        (PAPER, "1.57x", P50, "p50", 80.0, 0.1),
    ];
    for (arm, label, metric, name, paper, share) in stated {
        let got = cells.at(label, arm, metric);
        let source = if paper >= 5000.0 { "TO".to_owned() } else { ms(paper) };
        lines.push(in_ms(format!("{arm}, {name} at {label}, ms"), &source, got, near(got, paper, share)));
    }
    let got = cells.at("1.74x", PAPER, P999);
    lines.push(in_ms(format!("{PAPER}, p99.9 at 1.74x, ms"), "about 700", got, got <= 700.0));
    // 5 to 20 errors a second, at 7.6 k queries a second.
    let got = cells.at("1.03x", WRR, FAILED);
    lines.push(in_percent("WRR, errors at 1.03x", "0.07 to 0.26 %", got, (0.0007..=0.0026).contains(&got)));
    let got = cells.at("1.74x", WRR, FAILED);
    lines.push(in_percent("WRR, errors at 1.74x", "more than 25 %", got, got > 0.25));
    let got = cells.worst(PAPER, FAILED);
    lines.push(in_percent("Prequal (paper), errors at any step", "0", got, got == 0.0));
    let got = cells.at("1.03x", PAPER, CPU) / cells.at("1.03x", WRR, CPU);
    lines.push(times(
        "spread of CPU utilisation at 1.03x, Prequal (paper) over WRR",
        "looser",
        got,
        got > 1.0,
    ));
    let got = cells.at("1.03x", WRR, RIF99) / cells.at("1.03x", PAPER, RIF99);
    lines.push(times(
        "RIF p99 at 1.03x, WRR over Prequal (paper) (§3, YouTube)",
        "5 to 10x",
        got,
        got >= 5.0,
    ));
    let got = capped(cells.at("1.03x", WRR, P99)) / cells.at("1.03x", PAPER, P99);
    lines.push(times("p99 at 1.03x, WRR over Prequal (paper) (§3, YouTube)", "2x", got, got >= 1.8));
    lines
}

fn fig7(cells: &Cells) -> Vec<Statement> {
    let p99 = |point: &str, arm: &str| capped(cells.at(point, arm, P99));
    let mut lines = Vec::new();
    for (point, source) in [("70 %", "3 to 8 %"), ("90 %", "3 to 8 %"), ("90 %, half slow", "not stated")] {
        let got = p99(point, "C3") / p99(point, PAPER) - 1.0;
        lines.push(in_percent(
            &format!("C3, p99 above Prequal (paper) at {point}"),
            source,
            got,
            got >= 0.03,
        ));
    }
    let got = p99("70 %", "LL") / p99("70 %", PAPER);
    lines.push(times("LL, p99 over Prequal (paper) at 70 %", "high", got, got > 1.25));
    let got = cells.at("90 %", "LL", P90) / cells.at("90 %", PAPER, P90);
    lines.push(times("LL, p90 over Prequal (paper) at 90 %", "suffers heavily", got, got > 1.25));
    let got = p99("90 %", "LL-Po2C") / p99("90 %", "LL");
    lines.push(times("LL-Po2C, p99 over LL at 90 %", "better", got, got < 1.0));
    let got = p99("90 %", "LL-Po2C") / p99("90 %", PAPER);
    lines.push(times("LL-Po2C, p99 over Prequal (paper) at 90 %", "far behind", got, got > 1.25));
    let got = p99("90 %", "YARP-Po2C") / p99("90 %", "LL-Po2C");
    lines.push(times("YARP-Po2C, p99 over LL-Po2C at 90 %", "better", got, got < 1.0));
    for point in ["90 %", "90 %, half slow"] {
        let got = p99(point, "Linear") / p99(point, PAPER);
        lines.push(times(
            &format!("Linear, p99 over Prequal (paper) at {point}"),
            "much worse",
            got,
            got > 1.25,
        ));
    }
    let got = p99("70 %", "WRR") / p99("70 %", PAPER);
    lines.push(times("WRR, p99 over Prequal (paper) at 70 %", "quite well", got, got < 1.25));
    let got = p99("90 %", "WRR") / p99("90 %", PAPER);
    lines.push(times("WRR, p99 over Prequal (paper) at 90 %", "suffers greatly", got, got > 2.0));
    lines
}

fn fig8(cells: &Cells) -> Vec<Statement> {
    let over_one = |rate: &str, metric| cells.at(rate, PAPER, metric) / cells.at("1.00", PAPER, metric);
    let mut lines = Vec::new();
    for rate in ["2.83", "2.00", "1.41", "1.00"] {
        let got = cells.at(rate, PAPER, P999) / cells.at("4.00", PAPER, P999);
        let what = format!("p99.9 at {rate} probes a query over that at 4");
        lines.push(times(&what, "insensitive", got, (got - 1.0).abs() <= 0.15));
    }
    for (rate, least) in [("0.71", 1.2), ("0.50", 1.6)] {
        let got = over_one(rate, P999);
        lines.push(times(&format!("p99.9 at {rate} over that at 1"), "significant", got, got >= least));
        let got = over_one(rate, RIF99);
        lines.push(times(&format!("RIF p99 at {rate} over that at 1"), "jumps visibly", got, got >= 1.2));
    }
    lines
}

fn fig9(cells: &Cells) -> Vec<Statement> {
    let at = |q: &str, metric| cells.at(q, PAPER, metric);
    let mut lines = Vec::new();
    let stated: [(&str, usize, &str, &str, &str, f64, f64); 10] = [
        ("0.000", P50, "p50", "34.5", "Q = 0", 34.5, 0.1),
        ("0.000", P90, "p90", "93", "Q = 0", 93.0, 0.1),
        ("0.000", P99, "p99", "162", "Q = 0", 162.0, 0.1),
        ("0.000", P999, "p99.9", "210", "Q = 0", 210.0, 0.1),
        ("0.990", P50, "p50", "31", "Q = 0.99", 31.0, 0.1),
        ("0.990", P90, "p90", "75", "Q = 0.99", 75.0, 0.1),
        ("0.990", P99, "p99", "142", "Q = 0.99", 142.0, 0.1),
        ("0.990", P999, "p99.9", "198", "Q = 0.99", 198.0, 0.1),
        ("0.999", P99, "p99", "148", "Q = 0.999", 148.0, 0.1),
        ("1.000", P99, "p99", "178", "Q = 1", 178.0, 0.1),
    ];
    for (q, metric, name, source, label, paper, share) in stated {
        let got = at(q, metric);
        lines.push(in_ms(format!("{name} at {label}, ms"), source, got, near(got, paper, share)));
    }
    let got = at("1.000", P999);
    lines.push(in_ms("p99.9 at Q = 1, ms", "337 to 502", got, (337.0..=502.0).contains(&got)));
    for (what, metric, source) in [("p50", P50, 0.10), ("p90", P90, 0.19), ("p99", P99, 0.12)] {
        let got = 1.0 - at("0.990", metric) / at("0.000", metric);
        let what = format!("fall of {what} from Q = 0 to 0.99");
        lines.push(in_percent(&what, &percent(source), got, got >= 0.8 * source));
    }
    let got = at("0.999", P99) / at("0.990", P99);
    lines.push(times("p99 at Q = 0.999 over that at 0.99", "1.04x", got, got > 1.0));
    let got = capped(at("1.000", P99)) / at("0.999", P99);
    lines.push(times("p99 at Q = 1 over that at 0.999", "1.2x", got, got >= 1.1));
    for (q, what) in
        [("0.590", "RIF p99 at Q = 0.59 over that at 0"), ("0.729", "RIF p99 at Q = 0.73 over that at 0")]
    {
        let got = at(q, RIF99) / at("0.000", RIF99);
        lines.push(times(what, "the same", got, (got - 1.0).abs() <= 0.15));
    }
    let got = at("0.590", THETA);
    let here = if got.is_nan() { "–".to_owned() } else { whole(got) };
    lines.push(Statement::new("θ at Q = 0.59", "5", here, near(got, 5.0, 0.3)));
    lines
}

fn fig10(cells: &Cells) -> Vec<Statement> {
    let p99 = |point: &str| capped(cells.at(point, "Linear", P99));
    let hcl = cells.at("HCL", PAPER, P99);
    let got = p99("0.5") / p99("1");
    let mut lines = vec![times("p99 at λ = 0.5 over that at λ = 1", "much worse", got, got > 1.1)];
    let got = p99("0.7") / p99("1");
    lines.push(times("p99 at λ = 0.7 over that at λ = 1", "much worse", got, got > 1.1));
    let got = p99("0") / p99("1");
    lines.push(times("p99 at λ = 0 over that at λ = 1", "much worse", got, got > 1.1));
    let got = p99("1") / hcl;
    lines.push(times("p99 at λ = 1 (RIF only) over the hot/cold rule", "worse", got, got > 1.0));
    lines
}

fn finagle(cells: &Cells) -> Vec<Statement> {
    let stated = [("RR", "approximately 95 %", 0.95), ("LL", "99 %", 0.99), ("Peak EWMA", "99.9 %", 0.999)];
    let line = |(arm, source, share): (&str, &str, f64)| {
        let got = cells.at("60 s", arm, OWN);
        let what = format!("{arm}, answered within a second");
        Statement::new(what, source, three_percent(got), (got - share).abs() <= 0.006)
    };
    stated.map(line).into()
}

fn ingress(cells: &Cells) -> Vec<Statement> {
    let mut lines = Vec::new();
    let stated: [(&str, [(&str, f64); 3]); 3] = [
        ("RR", [("803.7", 803.7), ("807.1", 807.1), ("834.9", 834.9)]),
        ("LL", [("62.9", 62.9), ("802.5", 802.5), ("808.8", 808.8)]),
        (OURS, [("59.5", 59.5), ("80.6", 80.6), ("127.5", 127.5)]),
    ];
    for point in ["1 client", "1 client, even gaps"] {
        for (arm, figures) in &stated {
            for ((source, value), (name, metric)) in
                figures.iter().zip([("p95", OWN + 1), ("p99", P99), ("p99.9", P999)])
            {
                let got = cells.at(point, arm, metric);
                // The post's requests pass through a proxy, so the latencies here may be lower.
                let holds = (got > 400.0) == (*value > 400.0);
                lines.push(in_ms(format!("{arm}, {name} with {point}, ms"), source, got, holds));
            }
        }
        let got = cells.at(point, OURS, OWN);
        let what = format!("{OURS}, share to the slow pair with {point}");
        lines.push(in_percent(&what, "below 0.04 %", got, got < 0.0004));
    }
    lines
}

fn netflix(cells: &Cells) -> Vec<Statement> {
    let line = |point: &str| {
        let got = cells.at(point, "Zuul", OWN);
        in_percent(
            &format!("Zuul's choice of two, to the slow half ({point})"),
            "about 15 %",
            got,
            got <= 0.2,
        )
    };
    vec![line("4x CPU"), line("2x CPU + 100 ms")]
}

/// A fleet, a rule, and p50, p99 and p99.9 under round robin, least loaded, that rule and C3.
type Independent = (&'static str, &'static str, [[f64; 3]; 4]);
const COLLAPSE: [f64; 3] = [f64::INFINITY; 3];
/// Results of the independent simulation (docs/results/evaluation.md says what that is) for the same fleets, ms. There,
/// rules on Prequal's pool had 0.7 probes per query and the reports on responses. Here, the paper's rules have only
/// their three probes per query.
const INDEPENDENT: [Independent; 16] = [
    (
        "16 × 4, exp 40, 80 %",
        PAPER,
        [[40., 209., 300.], [29., 183., 274.], [33., 189., 280.], [29., 184., 274.]],
    ),
    (
        "16 × 4, exp 40, 90 %",
        PAPER,
        [[60., 306., 423.], [31., 186., 277.], [40., 198., 288.], [32., 188., 277.]],
    ),
    (
        "16 × 4, exp 40, 80 %, 4 clients",
        PAPER,
        [[41., 208., 299.], [30., 185., 275.], [52., 222., 314.], [31., 186., 276.]],
    ),
    ("8 × 4, mix, 70 %", PAPER, [[13., 300., 417.], [11., 281., 299.], [12., 282., 300.], [11., 281., 299.]]),
    (
        "8 at 40, 8 at 80, exp, 80 %",
        PAPER,
        [COLLAPSE, [36., 287., 462.], [39., 282., 457.], [36., 279., 452.]],
    ),
    (
        "16 × 4, exp 40, one 16x slower",
        PAPER,
        [COLLAPSE, [28., 203., 1059.], [29., 198., 981.], [28., 189., 512.]],
    ),
    (
        "14 at 50, 2 at 800, 500/s",
        PAPER,
        [[50., 800., 801.], [50., 800., 800.], [50., 800., 800.], [50., 51., 800.]],
    ),
    (
        "14 at 50, 2 at 800, 20/s",
        PAPER,
        [[50., 800., 801.], [50., 800., 801.], [50., 800., 801.], [50., 51., 51.]],
    ),
    (
        "no queues, lognormal, one 3x",
        PAPER,
        [[53., 628., 1494.], [51., 557., 1271.], [50., 531., 1165.], [50., 544., 1226.]],
    ),
    (
        "sidecars, 32 × 1, exp 100",
        PAPER,
        [[134., 827., 1129.], [134., 827., 1129.], [271., 1578., 2158.], [114., 681., 1002.]],
    ),
    (
        "16 × 4, all 10x slower for 10 s",
        PAPER,
        [[31., 965., 1814.], [31., 865., 1690.], [31., 894., 1737.], [31., 869., 1690.]],
    ),
    ("14 × 4, 2 × 1, exp 40", RIF_ONLY, [COLLAPSE, [30., 207., 312.], [30., 206., 315.], [29., 193., 290.]]),
    (
        "40 × 4, exp 60, four 3x slower",
        RIF_ONLY,
        [COLLAPSE, [44., 347., 699.], [43., 331., 669.], [43., 317., 616.]],
    ),
    (
        "3 × 2, exp 40, 70 %",
        RIF_ONLY,
        [[45., 238., 338.], [37., 203., 294.], [38., 210., 296.], [37., 203., 289.]],
    ),
    (
        "24, 1–8 slots, 40/60/80 ms",
        RIF_ONLY,
        [COLLAPSE, [47., 383., 645.], [46., 380., 630.], [43., 316., 506.]],
    ),
    (
        "16 × 4, exactly 40, 90 %",
        RIF_ONLY,
        [[40., 52., 59.], [40., 53., 60.], [40., 70., 78.], [40., 68., 75.]],
    ),
];

/// Compares the figures, which must agree within a tenth. If the source reports a collapse, only its occurrence is
/// compared, because its depth depends on the length of the run.
fn on_fleets(cells: &Cells) -> Vec<Statement> {
    let line = |point: &str, arm: &str, source: [f64; 3]| {
        let got = [P50, P99, P999].map(|metric| cells.at(point, arm, metric));
        let collapse = source == COLLAPSE;
        let stated = if collapse { "collapse".to_owned() } else { source.map(ms).join(" / ") };
        let here = if got[0].is_nan() { "–".to_owned() } else { got.map(ms).join(" / ") };
        // In a collapse the median is determined by the other replicas.
        let holds = if collapse {
            got[1] >= 1000.0
        } else {
            got.iter().zip(source).all(|(got, ms)| near(*got, ms, 0.1))
        };
        Statement::new(format!("{point}: {arm}, p50 / p99 / p99.9 ms"), stated, here, holds)
    };
    let lines = INDEPENDENT.iter().flat_map(|(point, third, figures)| {
        ["RR", "LL", third, "C3"].into_iter().zip(figures).map(move |(arm, source)| line(point, arm, *source))
    });
    lines.collect()
}

fn smallfleet(cells: &Cells) -> Vec<Statement> {
    let over = |arm: &str| cells.at("0.5 ms", arm, OWN) / cells.at("0.5 ms", "RR", OWN) - 1.0;
    let line = |arm: &str| {
        let got = over(arm);
        in_percent(&format!("{arm}, throughput over RR's at 0.5 ms a probe"), "−22 %", got, got < -0.1)
    };
    let loss = cells.at("0.5 ms", PAPER, OWN) / cells.at("0 ms", PAPER, OWN) - 1.0;
    vec![
        line(PAPER),
        in_percent("Prequal (paper), throughput lost to probes of 0.5 ms", "−22 %", loss, loss < -0.1),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(point: &str, arm: &str, value: f64) -> Cell {
        Cell { point: point.to_owned(), arm: arm.to_owned(), values: vec![(1, vec![value; OWN + 2])] }
    }

    #[test]
    fn only_points_that_were_run_are_compared_and_a_timeout_counts_as_the_deadline() {
        let cells = Cells(vec![
            cell("0", "Linear", f64::INFINITY),
            cell("1", "Linear", 500.0),
            cell("HCL", PAPER, 250.0),
        ]);
        let page: Vec<String> = statements("fig10", &cells).iter().map(|line| format!("{line:?}")).collect();
        assert_eq!(page.len(), 2, "λ = 0.5 and 0.7 were not run: {page:?}");
        assert!(page[0].contains("10.00x") && page[0].contains("holds: true"), "{page:?}");
        assert!(page[1].contains("2.00x"), "{page:?}");
    }
}
