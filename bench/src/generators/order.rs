//! What a generator is asked to send, how its program is run, and what it recorded.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::stats::Sample;

/// A request that takes longer counts as failed, as with our own generator.
pub(super) const TIMEOUT: Duration = Duration::from_secs(10);
/// Time beyond the run's length in which a generator must end.
const GRACE: Duration = Duration::from_secs(20);

/// The load of one run: GETs at a constant rate over HTTP/1.1.
pub(super) struct Order {
    pub(super) target: SocketAddr,
    pub(super) per_second: u32,
    /// In whole seconds.
    pub(super) length: Duration,
    /// Folder for the generator's files.
    pub(super) folder: PathBuf,
}

impl Order {
    pub(super) fn url(&self) -> String {
        format!("http://{}/", self.target)
    }

    /// Number of requests of the whole run.
    pub(super) fn requests(&self) -> usize {
        self.per_second as usize * self.length.as_secs() as usize
    }

    /// Runs one program in the folder, without input, until it ends. Blocks.
    ///
    /// # Errors
    /// If it fails or does not end in time; the error shows the end of its output.
    pub(super) fn run(&self, command: &mut Command) -> Result<()> {
        let name = command.get_program().display().to_string();
        let path = self.folder.join("output.txt");
        let output = File::create(&path)?;
        let child = command
            .current_dir(&self.folder)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("starting {name}"))?;
        let mut running = RunningProgram(child);
        let deadline = Instant::now() + self.length + GRACE;
        let status = loop {
            if let Some(status) = running.0.try_wait()? {
                break status;
            }
            ensure!(
                Instant::now() < deadline,
                "{name} did not end within {} s",
                (self.length + GRACE).as_secs()
            );
            std::thread::sleep(Duration::from_millis(20));
        };
        if !status.success() {
            let output = fs::read_to_string(path).unwrap_or_default();
            let lines: Vec<&str> = output.lines().collect();
            bail!("{name}: {status}\n{}", lines[lines.len().saturating_sub(5)..].join("\n"));
        }
        Ok(())
    }

    /// Reads a file that the generator wrote.
    pub(super) fn read(&self, file: &str) -> Result<String> {
        fs::read_to_string(self.folder.join(file)).with_context(|| format!("the generator's file {file}"))
    }
}

/// A program that is killed on drop.
struct RunningProgram(Child);

impl Drop for RunningProgram {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A request as a generator recorded it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Record {
    /// When it was sent, from any fixed instant.
    pub(super) sent: Duration,
    /// `None` if it failed: anything but a complete 200.
    pub(super) latency: Option<Duration>,
}

/// Converts records to samples. A sample's due time is the time at which its request was sent, counted from the first
/// request.
pub(super) fn samples(records: &[Record]) -> Vec<Sample> {
    let first = records.iter().map(|record| record.sent).min().unwrap_or_default();
    let sample =
        |record: &Record| Sample { due: record.sent - first, latency: record.latency, ..Sample::default() };
    records.iter().map(sample).collect()
}

/// Parses the lines of a generator's file, each with `line`.
pub(super) fn parsed<'a>(
    lines: impl Iterator<Item = &'a str>,
    line: impl Fn(&str) -> Result<Record>,
) -> Result<Vec<Record>> {
    let parsed = |(number, text): (usize, &str)| {
        line(text).with_context(|| format!("record {}: `{text}`", number + 1))
    };
    lines.enumerate().map(parsed).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_request_is_due_at_zero() {
        let record = |sent, latency| Record {
            sent: Duration::from_millis(sent),
            latency: Option::map(latency, Duration::from_millis),
        };
        let samples = samples(&[record(1010, Some(52)), record(1000, None)]);
        let figures: Vec<_> = samples.iter().map(|sample| (sample.due, sample.latency)).collect();
        let ms = Duration::from_millis;
        assert_eq!(figures, [(ms(10), Some(ms(52))), (ms(0), None)]);
    }

    #[test]
    fn a_program_that_fails_is_an_error_with_its_last_words() {
        let folder = tempfile::tempdir().unwrap();
        let order = Order {
            target: ([127, 0, 0, 1], 1).into(),
            per_second: 1,
            length: Duration::from_secs(1),
            folder: folder.path().to_owned(),
        };
        assert!(order.run(&mut Command::new("true")).is_ok());
        let failed = order.run(Command::new("sh").args(["-c", "echo no such host; exit 3"]));
        let text = format!("{:#}", failed.unwrap_err());
        assert!(text.contains("exit status: 3") && text.contains("no such host"), "{text}");
    }
}
