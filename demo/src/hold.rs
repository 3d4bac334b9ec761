//! The container that owns a replica's network namespace, as the pause container of a pod does.
//!
//! A container that joined the namespace of another keeps the old one when that other is restarted. So neither the
//! service nor the agent, which both are killed here, may own it.

use anyhow::Result;

/// Waits for ever; signals end the program.
pub(crate) async fn run() -> Result<()> {
    std::future::pending().await
}
