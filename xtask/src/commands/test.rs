//! `cargo xtask test`: runs everything that must hold before a change lands, in the order that fails fastest.
//!
//! Anything that could not be checked here is listed at the end; in CI it is a failure.

use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};

use crate::commands::ahead::{Ahead, Job};
use crate::commands::build::{self, WasmArgs};
use crate::commands::{
    chaos, compose, crates, debian, dist, envoy, fuzz, guest, helm, native, plb_guest, sim,
};
use crate::toolchain::{NATIVE_TARGET, Toolchain};
use crate::{circles, policy, progress, run};

mod programs;

/// Runs the checks that CI runs, except those that take long or change the machine: format, lints, documentation,
/// dependencies, circles of files, tests, simulator. With CI=true or --only it runs the others too.
///
/// Stops at the first failure. A test that fails is run a second time, alone, before it counts as failed. Checks that
/// were impossible here and tests that were ignored are listed at the end; with --no-skips, and always under CI=true,
/// they are failures.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Envoy versions for the version matrix [default: none; under CI=true: ends]
    #[arg(long, value_enum, value_name = "WHICH")]
    matrix: Option<Matrix>,

    /// Treat skipped checks and tests as failures
    #[arg(long)]
    no_skips: bool,

    /// Run only these steps, in the usual order, for example `--only lint,test`
    #[arg(long, value_enum, value_delimiter = ',', value_name = "STEPS")]
    only: Vec<Step>,

    /// Run only what takes a minute or two after a change: format, circles, clippy and the unit tests, without Envoy
    #[arg(long, conflicts_with_all = ["only", "matrix", "no_skips"])]
    fast: bool,

    #[command(flatten)]
    wasm: WasmArgs,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
enum Matrix {
    /// Only the default version
    None,
    /// The oldest and the newest
    Ends,
    /// Every pinned version
    All,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
enum Step {
    /// cargo fmt --check
    Format,
    /// cargo-deny: licences, sources, bans and advisories of the dependencies
    Deps,
    /// No circles among the files of a crate
    Circles,
    /// clippy over all targets, the benchmarks and fuzz targets included, on the host and for the module's target
    Lint,
    /// rustdoc without warnings
    Docs,
    /// The packages for crates.io could be published, keep their public APIs, and compile outside the workspace with
    /// the oldest Rust
    Crates,
    /// target/dist/ and the test-only modules
    Build,
    /// Every unit, documentation and end-to-end test
    Test,
    /// A few faults under load; under CI=true, or when named with --only
    Chaos,
    /// A release for this machine only: its files are checked, and its images pass through a registry
    Release,
    /// The native module of every architecture, and its unit tests under sanitizers; under CI=true, or when named with
    /// --only
    Native,
    /// The kernel's own PLB, tested in a guest kernel; under CI=true, or when named with --only
    PlbGuest,
    /// The smallest end-to-end tests, repeated on other Envoy versions
    Matrix,
    /// The docker-compose demo with every fault; under CI=true, or when named with --only
    Compose,
    /// Every fuzz target replays its corpus and searches for five seconds; under CI=true, or when named with --only
    Fuzz,
    /// A short version of every experiment of the simulator
    Sim,
}

/// State that later steps need from earlier ones, and what could not be checked.
struct Session<'a> {
    args: &'a Args,
    matrix: Matrix,
    ci: bool,
    toolchain: Option<Toolchain>,
    skipped: Vec<String>,
    /// What some CI machines cannot do: listed, but not a failure.
    impossible: Vec<String>,
    /// Tests that passed only at their second try: listed, but not a failure.
    flaky: Vec<String>,
    /// The process that builds and checks in parallel with the steps, in CI.
    ahead: Option<Ahead>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.fast {
        return fast();
    }
    let ci = std::env::var("CI").is_ok_and(|value| value == "true");
    let matrix = args.matrix.unwrap_or(if ci { Matrix::Ends } else { Matrix::None });
    let mut session = Session {
        args,
        matrix,
        ci,
        toolchain: None,
        skipped: vec![],
        impossible: vec![],
        flaky: vec![],
        ahead: None,
    };
    let steps: Vec<Step> =
        STEPS.into_iter().filter(|step| args.only.is_empty() || args.only.contains(step)).collect();

    let started = Instant::now();
    for (index, step) in steps.iter().enumerate() {
        if *step == Step::Build && ci && args.only.is_empty() {
            session.ahead = Ahead::start();
        }
        progress::headline(format_args!("[{}/{}] {}", index + 1, steps.len(), step.title()));
        let step_started = Instant::now();
        let done = session.run(*step);
        let elapsed = progress::seconds(step_started.elapsed());
        done.with_context(|| format!("step `{}` failed after {elapsed}", step.title()))?;
        progress::say(format_args!("{}: ok, {elapsed}", step.title()));
    }

    session.ahead = None;
    progress::headline(format_args!(
        "{} of {} steps ok in {}",
        steps.len(),
        STEPS.len(),
        progress::seconds(started.elapsed())
    ));
    for test in &session.flaky {
        progress::say(format_args!("failed in parallel with other tests, passed alone: {test}"));
    }
    for absent in &session.impossible {
        progress::say(format_args!("impossible here: {absent}"));
    }
    if session.skipped.is_empty() {
        if session.impossible.is_empty() {
            progress::say("nothing was skipped");
        }
        return Ok(());
    }
    progress::say("skipped:");
    for skip in &session.skipped {
        progress::say(format_args!("- {skip}"));
    }
    if ci || args.no_skips {
        bail!("{} skipped; under CI=true or --no-skips that is a failure", session.skipped.len());
    }
    Ok(())
}

/// The short loop of a contributor. Leaves out the tests that start Envoy or an agent.
fn fast() -> Result<()> {
    let started = Instant::now();
    progress::headline("format, circles of files, clippy");
    run::check(run::cargo().args(["fmt", "--all", "--", "--check"]))?;
    circles::check()?;
    run::check(&mut clippy())?;
    progress::headline("unit tests");
    run::check(run::cargo().args(["test", "--workspace", "--lib", "--bins", "--quiet"]))?;
    progress::headline(format_args!(
        "ok in {}; `cargo xtask test` also runs what needs an Envoy, and all other checks",
        progress::seconds(started.elapsed())
    ));
    Ok(())
}

fn clippy() -> Command {
    let mut command = run::cargo();
    command.args(["clippy", "--workspace", "--all-targets", "--", "--deny", "warnings"]);
    command
}

impl Step {
    fn title(self) -> &'static str {
        match self {
            Self::Format => "format",
            Self::Deps => "dependencies",
            Self::Circles => "circles of files",
            Self::Lint => "lint",
            Self::Docs => "documentation",
            Self::Crates => "packages",
            Self::Build => "build",
            Self::Test => "tests",
            Self::Chaos => "chaos, short",
            Self::Release => "release",
            Self::Native => "native module",
            Self::PlbGuest => "PLB in a guest kernel",
            Self::Matrix => "version matrix",
            Self::Compose => "docker-compose demo",
            Self::Fuzz => "fuzzing",
            Self::Sim => "simulator",
        }
    }
}

impl Session<'_> {
    fn run(&mut self, step: Step) -> Result<()> {
        match step {
            Step::Format => run::check(run::cargo().args(["fmt", "--all", "--", "--check"])),
            Step::Deps => dependencies(),
            Step::Circles => {
                progress::say(format_args!("{} files checked", circles::check()?));
                Ok(())
            }
            Step::Lint => self.lint(),
            Step::Docs => run::check(
                run::cargo()
                    .args(["doc", "--workspace", "--no-deps", "--document-private-items"])
                    .env("RUSTDOCFLAGS", "-D warnings"),
            ),
            Step::Crates => {
                let unchecked = crates::check()?;
                self.skipped.extend(unchecked.skipped);
                self.impossible.extend(unchecked.impossible);
                Ok(())
            }
            Step::Build => self.build(),
            Step::Test => self.tests(),
            Step::Chaos => self.chaos(),
            Step::Release => self.release(),
            Step::Native => self.native(),
            Step::PlbGuest => self.plb_guest(),
            Step::Matrix => self.version_matrix(),
            Step::Compose => self.compose(),
            Step::Fuzz => self.fuzz(),
            Step::Sim => self.simulator(),
        }
    }

    fn lint(&mut self) -> Result<()> {
        run::check(&mut clippy())?;
        // The workspace is built with every feature; the tower layer must also compile alone.
        run::check(
            run::cargo()
                .args(["clippy", "--package", "probe-agent", "--lib", "--no-default-features"])
                .args(["--", "--deny", "warnings"]),
        )?;
        // The fuzz package is not in the workspace. Lint it here, so that a change to the agent's interface fails
        // early.
        fuzz::lint()?;
        match self.toolchain()? {
            native @ Toolchain::Native => run::check(
                run::cargo()
                    .args(["clippy", "--package", "prequal-filter", "--lib", "--all-features"])
                    .args(["--target", NATIVE_TARGET, "--target-dir"])
                    .arg(native.target_dir())
                    .args(["--", "--deny", "warnings"]),
            ),
            Toolchain::Debian(_) => {
                progress::say("clippy for the module's target was skipped: Debian's compiler has no clippy");
                Ok(())
            }
        }
    }

    fn build(&mut self) -> Result<()> {
        self.toolchain = Some(build::dist_and_test(self.args.wasm.toolchain)?);
        Ok(())
    }

    fn tests(&mut self) -> Result<()> {
        let envoy = envoy::default_envoy()?;
        debian::prometheus();
        helm::prepare();
        self.note(programs::run(run::test_programs()?, 2, true, &envoy)?);
        Ok(())
    }

    fn chaos(&mut self) -> Result<()> {
        if !self.ci && !self.args.only.contains(&Step::Chaos) {
            self.skipped.push("chaos: not requested (--only chaos)".to_owned());
            return Ok(());
        }
        match chaos::missing() {
            Some(why) => self.skipped.push(format!("chaos: {why}")),
            None => chaos::short()?,
        }
        Ok(())
    }

    fn release(&mut self) -> Result<()> {
        if let Some(why) = dist::rehearsal::missing() {
            self.skipped.push(format!("release: {why}"));
            return Ok(());
        }
        dist::rehearsal::run(self.args.wasm.toolchain)
    }

    fn native(&mut self) -> Result<()> {
        if !self.ci && !self.args.only.contains(&Step::Native) {
            self.skipped.push("native module: not requested (--only native, cargo xtask native)".to_owned());
            return Ok(());
        }
        if !self.done_ahead(Job::Native) {
            self.skipped.extend(native::check()?);
        }
        Ok(())
    }

    fn simulator(&mut self) -> Result<()> {
        if self.done_ahead(Job::Sim) { Ok(()) } else { sim::quick() }
    }

    /// Whether `job` was done in parallel with earlier steps.
    fn done_ahead(&mut self, job: Job) -> bool {
        let done = self.ahead.as_mut().is_some_and(|ahead| ahead.done(job));
        if done {
            progress::say(format_args!(
                "{} done in parallel with earlier steps: target/ahead.log",
                job.title()
            ));
        }
        done
    }

    fn plb_guest(&mut self) -> Result<()> {
        if !self.ci && !self.args.only.contains(&Step::PlbGuest) {
            self.skipped.push("PLB in a guest kernel: not requested (--only plb-guest)".to_owned());
            return Ok(());
        }
        if let Some(why) = guest::missing() {
            self.skipped.push(format!("PLB in a guest kernel: {why}"));
            return Ok(());
        }
        if self.done_ahead(Job::PlbGuest) { Ok(()) } else { plb_guest::prove(plb_guest::LIMIT) }
    }

    fn compose(&mut self) -> Result<()> {
        if !self.ci && !self.args.only.contains(&Step::Compose) {
            self.skipped.push("docker-compose demo: not requested (--only compose)".to_owned());
            return Ok(());
        }
        match compose::missing() {
            Some(why) if self.ci => self.impossible.push(format!("docker-compose demo: {why}")),
            Some(why) => self.skipped.push(format!("docker-compose demo: {why}")),
            None => {
                // Waits for the images, so that they are not made twice; if they are missing, the check makes them.
                self.done_ahead(Job::Images);
                self.impossible.extend(compose::check(self.args.wasm.toolchain)?);
            }
        }
        Ok(())
    }

    fn fuzz(&mut self) -> Result<()> {
        if !self.ci && !self.args.only.contains(&Step::Fuzz) {
            self.skipped.push("fuzzing: not requested (--only fuzz, cargo xtask fuzz)".to_owned());
            return Ok(());
        }
        if let Some(why) = fuzz::missing() {
            self.skipped.push(format!("fuzzing: {why}"));
            return Ok(());
        }
        if self.done_ahead(Job::Fuzz) { Ok(()) } else { fuzz::quick() }
    }

    fn version_matrix(&mut self) -> Result<()> {
        let versions: &[&str] = match self.matrix {
            Matrix::None => {
                self.skipped.push("version matrix: not requested (--matrix ends, --matrix all)".to_owned());
                return Ok(());
            }
            Matrix::Ends => &[envoy::VERSIONS[0], envoy::VERSIONS[envoy::VERSIONS.len() - 1]],
            Matrix::All => &envoy::VERSIONS,
        };
        let mut programs = run::test_programs()?;
        programs.retain(|program| ["matrix", "mesh"].contains(&program.name.as_str()));
        ensure!(programs.len() == 2, "the test programs `matrix` and `mesh` are missing");
        for version in versions {
            self.on_version(version, &programs)?;
        }
        if self.matrix == Matrix::All {
            programs.retain(|program| program.name == "matrix");
            self.on_version(envoy::WITHOUT_V8, &programs)?;
        }
        Ok(())
    }

    fn on_version(&mut self, version: &str, programs: &[run::TestProgram]) -> Result<()> {
        let envoy = envoy::pinned(version)?;
        progress::say(format_args!("Envoy {version}"));
        let done = programs::run(programs.to_vec(), 2, false, &envoy);
        self.note(done.with_context(|| format!("on Envoy {version}"))?);
        Ok(())
    }

    /// Records what the tests did, and what did not run.
    fn note(&mut self, done: programs::Done) {
        progress::say(format_args!("{} tests passed", done.passed));
        self.flaky.extend(done.flaky);
        self.skipped.extend(done.skipped);
    }

    fn toolchain(&mut self) -> Result<&Toolchain> {
        if self.toolchain.is_none() {
            self.toolchain = Some(Toolchain::prepare(self.args.wasm.toolchain)?);
        }
        self.toolchain.as_ref().context("a compiler for the module")
    }
}

fn dependencies() -> Result<()> {
    if let Some(why) = policy::check()? {
        progress::say(format_args!(
            "advisories were not checked, because their database cannot be fetched: {why}"
        ));
    }
    Ok(())
}

/// Cheap checks come first, and most steps that `ahead` does or prepares come last. The demo runs just before
/// these: it mostly waits, and meanwhile `ahead` uses the CPU time that is left. `ahead` has the lowest priority, so it
/// does not disturb the demo's tail latencies.
const STEPS: [Step; 16] = [
    Step::Format,
    Step::Circles,
    Step::Lint,
    Step::Docs,
    Step::Crates,
    Step::Build,
    Step::Test,
    Step::Chaos,
    Step::Release,
    Step::Matrix,
    Step::Compose,
    Step::Native,
    Step::Sim,
    Step::PlbGuest,
    Step::Fuzz,
    Step::Deps,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_runs_once() {
        use clap::ValueEnum as _;
        for step in Step::value_variants() {
            assert_eq!(STEPS.iter().filter(|s| *s == step).count(), 1, "{step:?}");
        }
    }
}
