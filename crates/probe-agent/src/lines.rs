//! Writes lines from a separate thread, so that a slow reader does not hold up requests. The caller decides which lines
//! to write, and what to do about a lost line.

use std::io::{self, Write};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use tokio::sync::oneshot;

/// Queue of lines. Dropping it ends the thread once all lines are written.
#[derive(Debug)]
pub(crate) struct Lines(SyncSender<Line>);

#[derive(Debug)]
enum Line {
    Of(String),
    /// Asks for all lines before it to be written out.
    Flush(oneshot::Sender<()>),
}

impl Lines {
    /// Starts the thread `name`, which writes to `out` and calls `lost` for each line that `out` does not take.
    pub(crate) fn start<W: Write>(
        name: &str,
        out: impl Fn() -> W + Send + 'static,
        lost: impl Fn() + Send + 'static,
    ) -> io::Result<Self> {
        let (lines, waiting) = sync_channel(CAPACITY);
        std::thread::Builder::new().name(name.to_owned()).spawn(move || write(&waiting, out, lost))?;
        Ok(Self(lines))
    }

    /// Queues a line. Returns whether there was room for it.
    pub(crate) fn put(&self, line: String) -> bool {
        self.0.try_send(Line::Of(line)).is_ok()
    }

    /// Waits until the lines so far are written, but no longer than [`PATIENCE`].
    pub(crate) async fn flush(&self) {
        let (done, flushed) = oneshot::channel();
        let flush = async {
            let mut line = Line::Flush(done);
            while let Err(TrySendError::Full(again)) = self.0.try_send(line) {
                line = again;
                tokio::time::sleep(PATIENCE / 100).await;
            }
            let _ = flushed.await;
        };
        let _ = tokio::time::timeout(PATIENCE, flush).await;
    }
}

fn write<W: Write>(lines: &Receiver<Line>, out: impl Fn() -> W, lost: impl Fn()) {
    while let Ok(first) = lines.recv() {
        let mut out = out();
        for line in [first].into_iter().chain(lines.try_iter().take(CAPACITY)) {
            match line {
                Line::Of(line) => {
                    if writeln!(out, "{line}").is_err() {
                        lost();
                    }
                }
                Line::Flush(done) => {
                    let _ = out.flush();
                    let _ = done.send(());
                }
            }
        }
        let _ = out.flush();
    }
}

/// Maximum number of queued lines.
const CAPACITY: usize = 4096;
/// Time for which a terminating agent waits for a slow reader.
const PATIENCE: Duration = Duration::from_secs(1);
