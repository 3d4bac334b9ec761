//! The agent's cost of a request over the number of other requests in flight.

use anyhow::{Context, Result};
use prequal_testbed::Agent;

use super::Grown;
use crate::cost::held::{Backend, hold};
use crate::cost::{Rounds, Variant, place, saturate, warm_up};
use crate::deployment::start_agents;

pub(super) const SIZES: [usize; 4] = [1, 100, 1000, 10_000];
/// Each request gets its own connection to the backend, so that no limit on streams applies there.
const ARGS: [&str; 2] = ["--upstream-http2", "never"];

pub(super) async fn run(rounds: Rounds, sizes: Vec<usize>) -> Result<Grown> {
    println!("Agent CPU per request beside {sizes:?} requests that stay in flight, one thread");
    let backend = Backend::start().await?;
    let args = ARGS.map(str::to_owned);
    let agents: Vec<Agent> = start_agents(&vec![backend.address; sizes.len()], &args)?;
    let mut held = Vec::new();
    for (agent, size) in agents.iter().zip(&sizes) {
        held.push(hold(agent, *size).await.with_context(|| format!("{size} requests in flight"))?);
    }
    let pids: Vec<u32> = agents.iter().map(Agent::pid).collect();
    place(&pids, &[])?;
    let mut variants: Vec<Variant> =
        agents.iter().map(|agent| Variant::new("agent", agent.addr(), vec![agent.pid()])).collect();
    warm_up(rounds, &variants).await?;
    saturate(rounds, &mut variants).await?;
    Ok(Grown {
        quantity: "requests in flight",
        sizes,
        kinds: vec!["agent"],
        shown: 0,
        beyond: None,
        variants,
    })
}
