//! The container that owns a replica's network namespace, as the pause container of a pod does.
//!
//! If a container joined the namespace of another and the other is restarted, it stays in the old namespace. Therefore
//! neither the service nor the agent, which are both killed in this demo, may own it.

use anyhow::Result;

/// Waits for ever; a signal ends the program.
pub(crate) async fn run() -> Result<()> {
    std::future::pending().await
}
