//! The phases of an agent's life, which every connection follows. Each connection decides what to do in a phase: see
//! `server.rs` and `drive.rs`.

use tokio::sync::watch;

/// Phase in an agent's life. Phases follow one another in this order.
#[derive(Clone, Copy, Debug, Eq, PartialEq, PartialOrd)]
pub(crate) enum Phase {
    Serving,
    /// The agent accepts nothing new. HTTP/2 connections send GOAWAY, and HTTP/1.1 connections close with their
    /// next response.
    Draining,
    /// Connections without a request are closed too.
    Closing,
    /// Everything that is left is cut.
    Cut,
}

/// Follows the agent's phase. The agent ends its drain early once all followers are gone.
#[derive(Clone)]
pub(crate) struct Life(watch::Receiver<Phase>);

impl Life {
    /// Starts a life, and returns it with the sender that advances its phase.
    pub(crate) fn begin() -> (watch::Sender<Phase>, Self) {
        let (sender, receiver) = watch::channel(Phase::Serving);
        (sender, Self(receiver))
    }

    /// Waits for `phase` or a later one. If the agent is dropped, every phase counts as reached.
    pub(crate) async fn reaches(&mut self, phase: Phase) {
        let _ = self.0.wait_for(|now| *now >= phase).await;
    }

    /// Waits like [`Life::reaches`], for a follower that needs no further phase.
    pub(crate) async fn until(mut self, phase: Phase) {
        self.reaches(phase).await;
    }
}
