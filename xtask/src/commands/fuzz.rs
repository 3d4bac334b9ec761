//! `cargo xtask fuzz`: runs libFuzzer on everything that reads bytes from outside, with the stable compiler
//! (`fuzz/README.md`).
//!
//! This file builds the targets, runs them and judges their output. What each target checks is in `fuzz/`.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};

use crate::{progress, run, workspace};

/// Fuzzes everything that reads bytes from outside, guided by coverage: report headers, shared data, configurations,
/// netlink replies, HTTP on both sides of the agent.
///
/// Each target replays its corpus (`fuzz/corpus`) and then searches for the given time. As many targets run in parallel
/// as there are cores. New inputs stay in target/fuzz/corpus and are used again. A crash fails the command and leaves
/// the input in target/fuzz/artifacts.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Targets to run [default: all]
    #[arg(value_parser = clap::builder::PossibleValuesParser::new(TARGETS), value_name = "TARGET")]
    targets: Vec<String>,

    /// Search time per target, seconds; 0 only replays the corpus
    #[arg(long, default_value_t = 60, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=86_400))]
    seconds: u32,

    /// Number of targets to run in parallel [default: the number of cores]
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,

    /// Afterwards, reduce the new inputs to those that add coverage and store them in the corpora in the tree, up to 60
    /// files each
    #[arg(long)]
    keep: bool,

    /// Write the targets' first inputs, made from real values, into the corpora; fuzz nothing
    #[arg(long, conflicts_with_all = ["seconds", "jobs", "keep"])]
    seeds: bool,
}

/// The programs of `fuzz/Cargo.toml`, slowest first.
const TARGETS: [&str; 12] = [
    "agent-client",
    "agent-backend",
    "check",
    "config",
    "balancer",
    "pool",
    "members",
    "ejections",
    "inbound-slots",
    "inbound-log",
    "netlink",
    "report",
];
/// Maximum number of files in a corpus in the tree.
const MOST_FILES: usize = 60;
/// Time limit for a single input, chosen for a busy machine.
const INPUT_LIMIT_S: u32 = 25;
const MEMORY_LIMIT_MIB: u32 = 1024;
/// Search time per target in CI: with the build, the step should take two minutes at most.
const CI_SECONDS: u32 = 5;

/// The instrumentation that cargo-fuzz applies, through options that the stable compiler also has.
const RUSTFLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares";

pub(crate) fn run(args: &Args) -> Result<()> {
    if let Some(missing) = missing() {
        bail!("{missing}");
    }
    let programs = build()?;
    let chosen = |name: &&str| args.targets.is_empty() || args.targets.iter().any(|target| target == name);
    let targets: Vec<Target> =
        TARGETS.into_iter().filter(chosen).map(|name| Target { name, programs: programs.clone() }).collect();
    if args.seeds {
        return targets.iter().try_for_each(Target::write_seeds);
    }
    let jobs = args.jobs.unwrap_or_else(cores);
    fuzz(&targets, args.seconds, jobs)?;
    if args.keep {
        targets.iter().try_for_each(Target::keep)?;
    }
    Ok(())
}

/// Runs every target for a short time: a step of `cargo xtask test`.
pub(crate) fn quick() -> Result<()> {
    let programs = build()?;
    let targets = TARGETS.map(|name| Target { name, programs: programs.clone() });
    fuzz(&targets, CI_SECONDS, cores())
}

/// What this machine lacks for fuzzing, if anything.
pub(crate) fn missing() -> Option<String> {
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    (!run::succeeds(run::tool(&compiler).arg("--version")))
        .then(|| format!("no C++ compiler `{}` for libFuzzer: apt-get install g++", compiler.display()))
}

fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

fn folder() -> PathBuf {
    workspace::target().join("fuzz")
}

/// Checks formatting and clippy: the package is outside the workspace, so the workspace's steps miss it.
pub(crate) fn lint() -> Result<()> {
    run::check(cargo("fmt")?.args(["--", "--check"]))?;
    run::check(
        cargo("clippy")?
            .args(["--all-targets", "--target-dir"])
            .arg(workspace::target())
            .args(["--", "--deny", "warnings"]),
    )
}

/// A cargo command on the package of the fuzz targets.
fn cargo(command: &str) -> Result<Command> {
    let package = workspace::root().join("fuzz");
    // Fuzz the versions that are shipped. Dependencies that only the targets need are pinned in their manifest.
    fs::copy(workspace::root().join("Cargo.lock"), package.join("Cargo.lock"))
        .context("copying Cargo.lock")?;
    let mut cargo = run::cargo();
    cargo.arg(command).arg("--manifest-path").arg(package.join("Cargo.toml"));
    Ok(cargo)
}

/// Builds all targets; returns the folder of their programs.
pub(crate) fn build() -> Result<PathBuf> {
    progress::headline("building the fuzz targets");
    let host = run::output(run::tool("rustc").arg("-vV"))?;
    let host = host.lines().find_map(|line| line.strip_prefix("host: ")).context("rustc names no host")?;
    // With --target the flags apply to the fuzz targets only; build scripts and macros are not instrumented.
    let mut cargo = cargo("build")?;
    cargo
        .args(["--release", "--bins", "--target", host, "--target-dir"])
        .arg(folder())
        .env("RUSTFLAGS", RUSTFLAGS)
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    run::check(&mut cargo)?;
    Ok(folder().join(host).join("release"))
}

/// Arguments of `unshare` that run a program in a network namespace with a loopback interface, even without root.
const OWN_NETWORK: [&str; 6] =
    ["--map-root-user", "--net", "--", "sh", "-c", r#"ip link set lo up && exec "$0" "$@""#];

/// Whether this process may create a network namespace. Says so once if not.
fn has_own_network() -> bool {
    static ALLOWED: OnceLock<bool> = OnceLock::new();
    *ALLOWED.get_or_init(|| {
        let allowed = run::succeeds(run::tool("unshare").args(OWN_NETWORK).arg("true"));
        if !allowed {
            progress::say("no network namespace: long runs may fill the kernel's table of connections");
        }
        allowed
    })
}

struct Target {
    name: &'static str,
    programs: PathBuf,
}

/// The result of a run.
#[derive(Debug, Default, Eq, PartialEq)]
struct Summary {
    executions: u64,
    /// Edges that the corpus in the tree reaches, edges reached in the end, and all edges.
    edges: [u64; 3],
}

impl Target {
    fn corpus(&self) -> PathBuf {
        workspace::root().join("fuzz").join("corpus").join(self.name)
    }

    fn found(&self) -> PathBuf {
        folder().join("corpus").join(self.name)
    }

    /// The program, in a network namespace of its own if that is allowed. On machines where the kernel tracks
    /// connections (with Docker, for example), the program's thousands of connections a second would fill the kernel's
    /// table within two minutes. The kernel would then drop new connections.
    fn program(&self) -> Command {
        let program = self.programs.join(self.name);
        let mut command = if has_own_network() {
            let mut command = run::tool("unshare");
            command.args(OWN_NETWORK).arg(program);
            command
        } else {
            Command::new(program)
        };
        command.current_dir(workspace::root());
        command
    }

    fn write_seeds(&self) -> Result<()> {
        run::check(self.program().env("PREQUAL_FUZZ_SEEDS", self.corpus()))
    }

    /// Replays the corpora and the inputs that failed earlier, then searches. An error names the file with the failing
    /// input.
    fn search(&self, seconds: u32) -> Result<Summary> {
        let artifacts = folder().join("artifacts").join(self.name);
        for folder in [&artifacts, &self.found()] {
            fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
        }
        let log = folder().join(format!("{}.log", self.name));
        let file = File::create(&log).with_context(|| format!("writing {}", log.display()))?;
        let length = if seconds == 0 { "-runs=0".to_owned() } else { format!("-max_total_time={seconds}") };
        let status = self
            .program()
            .args([length, format!("-timeout={INPUT_LIMIT_S}"), format!("-rss_limit_mb={MEMORY_LIMIT_MIB}")])
            .args(["-print_final_stats=1", "-use_value_profile=0"])
            .arg(format!("-artifact_prefix={}/", artifacts.display()))
            .args([self.found(), self.corpus(), artifacts])
            .stdout(file.try_clone()?)
            .stderr(file)
            .status()
            .with_context(|| format!("starting {}", self.name))?;
        let said = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
        if !status.success() {
            bail!("{} failed: {}\n{}", self.name, reasons(&said).join("; "), log.display());
        }
        Ok(Summary::read(&said))
    }

    /// Replaces the corpus in the tree with the inputs that add coverage.
    fn keep(&self) -> Result<()> {
        let merged = folder().join("merged").join(self.name);
        if merged.exists() {
            fs::remove_dir_all(&merged)?;
        }
        fs::create_dir_all(&merged)?;
        run::output(self.program().arg("-set_cover_merge=1").args([&merged, &self.corpus(), &self.found()]))?;
        let (found, made): (Vec<PathBuf>, _) =
            sizes(&self.corpus())?.into_iter().partition(|file| was_found(file));
        let files = few(sizes(&merged)?, MOST_FILES.saturating_sub(made.len()));
        found.iter().try_for_each(fs::remove_file)?;
        for file in &files {
            fs::copy(file, self.corpus().join(file.file_name().unwrap_or(OsStr::new("input"))))?;
        }
        progress::say(format_args!(
            "{}: {} files, {} of them found by fuzzing",
            self.name,
            made.len() + files.len(),
            files.len()
        ));
        Ok(())
    }
}

/// The lines of a failed program's output that say why it failed. A panic's message is on the line after its location.
fn reasons(said: &str) -> Vec<&str> {
    let mut panicked = false;
    let tells = |line: &&str| {
        let message = std::mem::replace(&mut panicked, line.contains("panicked at"));
        message || panicked || line.starts_with("SUMMARY") || line.contains("Test unit written")
    };
    said.lines().filter(tells).collect()
}

/// Whether libFuzzer named the file, which it does by hash. Files named by a person or a target are kept.
fn was_found(file: &Path) -> bool {
    let name = file.file_name().and_then(OsStr::to_str).unwrap_or_default();
    name.len() == 40 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The files of a folder by size, smallest first.
fn sizes(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = fs::read_dir(folder)?
        .map(|file| {
            let path = file?.path();
            Ok((fs::metadata(&path)?.len(), path))
        })
        .collect::<Result<Vec<(u64, PathBuf)>>>()?;
    files.sort();
    Ok(files.into_iter().map(|(_, path)| path).collect())
}

/// Picks up to `most` of `files`, spread evenly over the list, so that small and large inputs remain.
fn few<T>(files: Vec<T>, most: usize) -> Vec<T> {
    let count = files.len();
    let chosen = |index: usize| count <= most || index * most / count != (index + 1) * most / count;
    files.into_iter().enumerate().filter(|(index, _)| chosen(*index)).map(|(_, file)| file).collect()
}

impl Summary {
    /// Parses libFuzzer's output.
    fn read(said: &str) -> Self {
        let number_after = |line: &str, key: &str| -> Option<u64> {
            let (_, rest) = line.split_once(key)?;
            rest.trim_start().split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
        };
        let first = |event: &str, key: &str| {
            said.lines().filter(|line| line.contains(event)).find_map(|line| number_after(line, key))
        };
        Self {
            executions: first("stat::number_of_executed_units", "units:").unwrap_or(0),
            edges: [
                first("INITED", "cov:").unwrap_or(0),
                first("DONE", "cov:").unwrap_or(0),
                first("inline 8-bit counters", "(").unwrap_or(0),
            ],
        }
    }
}

/// Runs all of `targets`, `jobs` in parallel, and prints a summary of each. Fails at the end, naming every target that
/// failed.
fn fuzz(targets: &[Target], seconds: u32, jobs: usize) -> Result<()> {
    progress::headline(format_args!(
        "fuzzing {} targets, {seconds} s each, {jobs} in parallel",
        targets.len()
    ));
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..jobs.clamp(1, targets.len().max(1)) {
            scope.spawn(|| {
                while let Some(target) = targets.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let started = Instant::now();
                    match target.search(seconds) {
                        Ok(Summary { executions, edges: [before, after, all] }) => progress::say(format_args!(
                            "{}: {executions} executions in {}, {before} edges from the corpus, {after} now, of {all}",
                            target.name,
                            progress::seconds(started.elapsed())
                        )),
                        Err(error) => {
                            failures.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(format!("{error:#}"));
                        }
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    ensure!(
        failures.is_empty(),
        "{} of {} targets failed\n{}",
        failures.len(),
        targets.len(),
        failures.join("\n")
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libfuzzer_output_is_parsed() {
        let said = "INFO: Loaded 1 modules   (2212 inline 8-bit counters): 2212 [0x1, 0x2), \n\
            INFO: Loaded 1 PC tables (2212 PCs): 2212 [0x1,0x2), \n\
            #9\tINITED cov: 158 ft: 233 corp: 8/253b exec/s: 0 rss: 27Mb\n\
            #2097152\tpulse  cov: 171 ft: 300 corp: 9/300b lim: 128 exec/s: 9 rss: 27Mb\n\
            #3000000\tDONE   cov: 172 ft: 301 corp: 9/300b lim: 128 exec/s: 9 rss: 27Mb\n\
            Done 3000000 runs in 11 second(s)\n\
            stat::number_of_executed_units: 3000000\n";
        assert_eq!(Summary::read(said), Summary { executions: 3_000_000, edges: [158, 172, 2212] });
        assert_eq!(Summary::read("nothing"), Summary::default());
    }

    #[test]
    fn a_failure_names_its_reasons() {
        let said = "#9\tINITED cov: 158\n\
            thread '<unnamed>' (9) panicked at src/agent.rs:161:9:\n\
            no complete answer within 8s\n\
            stack backtrace:\n\
            SUMMARY: libFuzzer: deadly signal\n";
        let reasons = reasons(said);
        assert_eq!(reasons.len(), 3, "{reasons:?}");
        assert_eq!(reasons[1], "no complete answer within 8s");
    }

    #[test]
    fn the_files_that_are_kept_are_spread_over_the_whole_list() {
        assert_eq!(few(vec![1, 2, 3], 5), [1, 2, 3]);
        let spread = few((0..1000).collect(), 60);
        assert_eq!(spread.len(), 60);
        assert!(spread[0] < 20 && spread[59] > 980, "{spread:?}");
    }

    #[test]
    fn every_target_has_a_program_and_a_small_corpus() {
        let fuzz = workspace::root().join("fuzz");
        let manifest = fs::read_to_string(fuzz.join("Cargo.toml")).expect("the manifest");
        let programs = manifest.lines().filter(|line| *line == "[[bin]]").count();
        assert_eq!(programs, TARGETS.len());
        for target in TARGETS {
            assert!(manifest.contains(&format!("name = \"{target}\"")), "{target}");
            let files = fs::read_dir(fuzz.join("corpus").join(target)).expect("a corpus").count();
            assert!((1..=MOST_FILES).contains(&files), "{target}: {files} files");
        }
    }
}
