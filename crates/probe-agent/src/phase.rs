//! The phases of an agent's life, which every connection follows. What each connection does in a phase is its own
//! decision: `server.rs`.

use tokio::sync::watch;

/// Where an agent is in its life. Phases follow one another in this order.
#[derive(Clone, Copy, Debug, Eq, PartialEq, PartialOrd)]
pub(crate) enum Phase {
    Serving,
    /// Nothing new is accepted. Connections of HTTP/2 say GOAWAY, those of HTTP/1.1 close with their next response.
    Draining,
    /// Connections without a request are closed too.
    Closing,
    /// Everything that is left is cut.
    Cut,
}

/// Follows the phase. The agent ends its drain early once all followers are gone.
#[derive(Clone)]
pub(crate) struct Life(watch::Receiver<Phase>);

impl Life {
    /// A life that begins, and what moves it on.
    pub(crate) fn begin() -> (watch::Sender<Phase>, Self) {
        let (sender, receiver) = watch::channel(Phase::Serving);
        (sender, Self(receiver))
    }

    /// Waits for `phase` or a later one. An agent that is dropped ends every phase.
    pub(crate) async fn reaches(&mut self, phase: Phase) {
        let _ = self.0.wait_for(|now| *now >= phase).await;
    }

    /// The same, for what follows no further.
    pub(crate) async fn until(mut self, phase: Phase) {
        self.reaches(phase).await;
    }
}
