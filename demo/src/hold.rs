//! The container that owns a replica's network namespace, as the pause container of a pod does.
//!
//! A container that joined the namespace of another one stays in the old namespace when the other is restarted.
//! Therefore neither the service nor the agent, which are both killed in this demo, may own it.

use anyhow::Result;

/// Waits forever; a signal ends the program.
pub(crate) async fn run() -> Result<()> {
    std::future::pending().await
}
