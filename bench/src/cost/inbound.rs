//! The inbound role: the cost of a request at the server's Envoy with and without the role, and the cost of a probe.

use anyhow::Result;
use prequal_testbed::{Envoy, EnvoyConfig, FILTER_NAME};
use serde_json::json;

use super::{CONNECTIONS, Cost, Variant, place, saturate, trivial, warm_up};
use crate::backends::Backends;
use crate::deployment::start_envoys;
use crate::table::{self, one, two};

const PROBE_PATH: &str = "/prequal/probe";

/// Measures and prints; there is no goal.
pub(super) async fn run(cost: &Cost) -> Result<()> {
    println!(
        "Server's Envoy, CPU per request: one replica that answers at once, {CONNECTIONS} connections, one worker"
    );
    let backends = Backends::start(&trivial(1))?;
    let shipped = || EnvoyConfig::inbound(backends.addresses[0]);
    let without = || Ok::<_, anyhow::Error>(shipped()?.edit(|config| config.remove_filter(FILTER_NAME)));
    let with =
        |settings: serde_json::Value| Ok::<_, anyhow::Error>(shipped()?.filter_text(&settings.to_string()));
    let configs = vec![
        without()?,
        with(json!({"role": "inbound", "report": "probe_only", "endpoint": "10.0.0.1:80"}))?,
        with(json!({"role": "inbound", "endpoint": "10.0.0.1:80"}))?,
        with(json!({"role": "inbound"}))?,
        without()?.edit(|config| {
            config
                .routes_mut()
                .insert(0, json!({"match": {"path": PROBE_PATH}, "direct_response": {"status": 200}}));
        }),
    ];
    let envoys = tokio::task::spawn_blocking(move || start_envoys(configs)).await??;
    let pids: Vec<u32> = envoys.iter().map(Envoy::pid).collect();
    place(&pids, &[backends.pid()])?;
    let of = |name, envoy: usize| Variant::new(name, envoys[envoy].addr(), vec![envoys[envoy].pid()]);
    let probe = || vec![PROBE_PATH.to_owned()];
    let mut variants = vec![
        of("no filter", 0),
        of("+ inbound, reports on probes only, endpoint given", 1),
        of("+ inbound, endpoint given", 2),
        of("+ inbound (default)", 3),
        of("a probe: direct_response", 4).paths(probe()),
        of("a probe: inbound (default)", 3).paths(probe()),
    ];
    warm_up(cost.rounds, &variants).await?;
    saturate(cost.rounds, &mut variants).await?;
    let none = variants[0].cpu();
    let rows: Vec<Vec<String>> = variants
        .iter()
        .map(|variant| {
            let cpu = variant.cpu();
            let is_probe = variant.paths == probe();
            let if_request = |text: String| if is_probe { "–".to_owned() } else { text };
            vec![
                variant.name.to_owned(),
                one(cpu),
                variant.cpu_range(),
                if_request(format!("{:+.1}", cpu - none)),
                if_request(two(cpu / none)),
                format!("{:.0}", variant.per_second()),
            ]
        })
        .collect();
    println!("\n{}", table::render(&["variant", "CPU µs", "min–max", "added", "× none", "req/s"], &rows));
    Ok(())
}
