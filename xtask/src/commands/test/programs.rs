//! Runs the test programs, two in parallel because most of their tests wait for sockets and clocks. Prints the output
//! of each in one piece when it ends. Tests that failed run once more, alone.
//!
//! `test.rs` decides what is built, and what a failure means for the run.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};

use crate::run::TestProgram;
use crate::{progress, run, workspace};

/// Maximum number of failed tests to retry. Real processes on a busy machine can miss a limit by chance; more failures
/// than this are not chance.
const MOST_RETRIED: usize = 4;

/// Programs whose tests only wait for sockets and clocks. They run more tests in parallel than there are cores.
const WAITING: [&str; 2] = ["agent", "host"];

/// The program whose tests start Envoys. Each of its tests keeps less than a third of a core busy (300 s of CPU time in
/// all).
const ENVOYS: &str = "e2e";

/// The slowest programs, which start first; the others follow in cargo's order. `docs` is not listed, so that it starts
/// later: by then, `cargo xtask ahead` has built the programs that `docs` runs.
const LONGEST: [&str; 5] = ["e2e", "host", "agent", "mesh", "observability"];

/// Programs that use every core. Each runs alone, because tests in parallel with it would miss their time limits.
const ALONE: [&str; 1] = ["floods"];

/// The results of the tests.
#[derive(Debug, Default)]
pub(super) struct Done {
    pub(super) passed: u64,
    /// Tests that failed in parallel with others and passed alone.
    pub(super) flaky: Vec<String>,
    /// Tests that were ignored, or skipped because this machine lacks something.
    pub(super) skipped: Vec<String>,
}

/// Runs all of `programs`, `at_a_time` in parallel, and the examples in doc comments if `documentation` is set. An
/// error names each test that failed.
pub(super) fn run(
    mut programs: Vec<TestProgram>,
    at_a_time: usize,
    documentation: bool,
    envoy: &Path,
) -> Result<Done> {
    for file in [
        workspace::dist().join("prequal_filter.wasm"),
        workspace::dist_test().join("prequal_filter_crash.wasm"),
    ] {
        ensure!(file.is_file(), "{} is missing: run the step `build` first", file.display());
    }
    let rank = |program: &TestProgram| LONGEST.iter().position(|name| *name == program.name);
    programs.sort_by_key(|program| rank(program).unwrap_or(LONGEST.len()));
    let folder = workspace::target().join("tests");
    fs::create_dir_all(&folder)?;
    let session = ProgramRunner { envoy, folder, skips: SkipLog::create()? };

    let mut tally = Tally::default();
    let flaky = session.all(&programs, at_a_time, &mut tally)?;
    if documentation {
        let mut command = run::cargo();
        command.args(["test", "--workspace", "--doc", "--no-fail-fast"]);
        let ran = session.one("documentation", &mut command)?;
        print!("{}", ran.said);
        ensure!(ran.success, "examples in the documentation failed: {}", ran.tally.failed.join(", "));
        tally.add(ran.tally);
    }
    ensure!(tally.passed > 0, "no test ran");
    let mut skipped = tally.ignored;
    skipped.extend(session.skips.take()?);
    Ok(Done { passed: tally.passed, flaky, skipped })
}

/// State shared by all programs of a run.
struct ProgramRunner<'a> {
    envoy: &'a Path,
    folder: PathBuf,
    skips: SkipLog,
}

/// How a program ended.
struct Ran {
    success: bool,
    said: String,
    tally: Tally,
}

impl ProgramRunner<'_> {
    /// Runs all programs, and failed tests once more; returns the tests that passed only then.
    fn all(&self, programs: &[TestProgram], at_a_time: usize, tally: &mut Tally) -> Result<Vec<String>> {
        let (alone, others): (Vec<&TestProgram>, Vec<&TestProgram>) =
            programs.iter().partition(|program| ALONE.contains(&program.name.as_str()));
        let mut ran = self.side_by_side(&others, at_a_time);
        ran.extend(self.side_by_side(&alone, 1));
        let mut failed = Vec::new();
        for (program, ran) in others.into_iter().chain(alone).zip(ran) {
            let ran = ran?;
            if !ran.success {
                ensure!(!ran.tally.failed.is_empty(), "{} failed, but none of its tests did", program.name);
                failed.push((program, ran.tally.failed.clone()));
            }
            tally.add(ran.tally);
        }
        self.again(&failed, tally)
    }

    /// Runs `at_a_time` programs in parallel; returns how each ended, in the order given.
    fn side_by_side(&self, programs: &[&TestProgram], at_a_time: usize) -> Vec<Result<Ran>> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let next = AtomicUsize::new(0);
        let done: Vec<Mutex<Option<Result<Ran>>>> = programs.iter().map(|_| Mutex::new(None)).collect();
        // Keeps the lines of one program together.
        let printing = Mutex::new(());
        thread::scope(|scope| {
            for _ in 0..at_a_time {
                scope.spawn(|| {
                    loop {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        let Some(program) = programs.get(index) else { return };
                        let mut command = Command::new(&program.file);
                        command
                            .current_dir(&program.folder)
                            .env("CARGO_MANIFEST_DIR", &program.folder)
                            .env("RUST_TEST_THREADS", threads(program, cores).to_string());
                        let started = Instant::now();
                        let ran = self.one(&log_name(program), &mut command);
                        if let (Ok(ran), Ok(_printing)) = (&ran, printing.lock()) {
                            print!("{}", ran.said);
                            let took = progress::seconds(started.elapsed());
                            let how = if ran.success { "ok" } else { "FAILED" };
                            progress::say(format_args!(
                                "{}: {how}, {} passed in {took}",
                                program.name, ran.tally.passed
                            ));
                        }
                        if let Ok(mut done) = done[index].lock() {
                            *done = Some(ran);
                        }
                    }
                });
            }
        });
        done.into_iter()
            .map(|ran| ran.into_inner().ok().flatten().unwrap_or_else(|| bail!("a program was not run")))
            .collect()
    }

    /// Runs one program and waits for it, with the environment that tests read. Its output goes to target/tests as it
    /// is written.
    fn one(&self, name: &str, command: &mut Command) -> Result<Ran> {
        let log = self.folder.join(format!("{name}.log"));
        let file = File::create(&log).with_context(|| format!("writing {}", log.display()))?;
        let status = command
            .env("ENVOY", self.envoy)
            .env("PREQUAL_DIST", workspace::dist())
            .env("PREQUAL_DIST_TEST", workspace::dist_test())
            .env("PREQUAL_SKIP_LOG", &self.skips.path)
            .stdout(file.try_clone()?)
            .stderr(file)
            .status()
            .with_context(|| format!("cannot start {name}"))?;
        // Read as bytes: a test may print anything.
        let said = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
        let mut tally = Tally::default();
        said.lines().for_each(|line| tally.read(line));
        Ok(Ran { success: status.success(), said, tally })
    }

    /// Runs each failed test once more, alone; returns those that passed then.
    fn again(&self, failed: &[(&TestProgram, Vec<String>)], tally: &mut Tally) -> Result<Vec<String>> {
        let names: Vec<&str> =
            failed.iter().flat_map(|(_, tests)| tests.iter().map(String::as_str)).collect();
        if names.is_empty() {
            return Ok(vec![]);
        }
        ensure!(names.len() <= MOST_RETRIED, "{} tests failed: {}", names.len(), names.join(", "));
        progress::say(format_args!(
            "failed in parallel with other tests; running each again, alone: {}",
            names.join(", ")
        ));
        for (program, tests) in failed {
            let mut command = Command::new(&program.file);
            command.current_dir(&program.folder).args(["--exact", "--test-threads=1"]).args(tests);
            let ran = self.one(&format!("{}-again", log_name(program)), &mut command)?;
            print!("{}", ran.said);
            ensure!(
                ran.success,
                "failed in parallel with other tests and alone: {}",
                ran.tally.failed.join(", ")
            );
            ensure!(ran.tally.passed >= tests.len() as u64, "not every test that failed ran again");
            tally.add(ran.tally);
        }
        Ok(names.into_iter().map(str::to_owned).collect())
    }
}

fn threads(program: &TestProgram, cores: usize) -> usize {
    match program.name.as_str() {
        name if WAITING.contains(&name) => 2 * cores,
        ENVOYS => cores + cores.div_ceil(2),
        _ => cores,
    }
}

/// The name contains cargo's hash: two packages may have tests of the same name.
fn log_name(program: &TestProgram) -> String {
    program.file.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// `PREQUAL_SKIP_LOG`: a file to which a test appends a line for each thing that it could not check on this machine.
struct SkipLog {
    path: PathBuf,
}

impl SkipLog {
    fn create() -> Result<Self> {
        let path = workspace::target().join(format!("skipped-{}.txt", std::process::id()));
        fs::write(&path, "")?;
        Ok(Self { path })
    }

    fn take(self) -> Result<Vec<String>> {
        let text = fs::read_to_string(&self.path)?;
        fs::remove_file(&self.path)?;
        Ok(text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect())
    }
}

/// The results in libtest's output.
#[derive(Debug, Default)]
struct Tally {
    passed: u64,
    failed: Vec<String>,
    ignored: Vec<String>,
}

impl Tally {
    fn read(&mut self, line: &str) {
        if let Some(counts) = line.strip_prefix("test result: ") {
            let passed = counts.split_whitespace().collect::<Vec<_>>();
            let count = passed.windows(2).find(|pair| pair[1].starts_with("passed"));
            self.passed += count.and_then(|pair| pair[0].parse::<u64>().ok()).unwrap_or(0);
        } else if let Some(test) = line.strip_prefix("test ") {
            if let Some((name, why)) = test.split_once(" ... ignored") {
                self.ignored.push(format!("test {name}: ignored{why}"));
            } else if let Some(name) = test.strip_suffix(" ... FAILED") {
                self.failed.push(name.to_owned());
            }
        }
    }

    fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed.extend(other.failed);
        self.ignored.extend(other.ignored);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// A fake libtest program: a script with the output of a whole run (`whole`), and of a run of one test (`alone`).
    fn program(folder: &Path, name: &str, whole: &str, alone: &str) -> TestProgram {
        let file = folder.join(name);
        let script = format!("#!/bin/sh\nif [ \"$1\" = --exact ]; then {alone}; else {whole}; fi\n");
        fs::write(&file, script).expect("a script");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).expect("it can be started");
        TestProgram { name: name.to_owned(), file, folder: folder.to_owned() }
    }

    #[test]
    fn a_failed_test_runs_again_alone_and_fails_the_run_if_it_fails_twice() {
        let dir = tempfile::tempdir().expect("a folder");
        let session = ProgramRunner {
            envoy: Path::new("envoy"),
            folder: dir.path().to_owned(),
            skips: SkipLog { path: dir.path().join("skips") },
        };
        let passes = program(
            dir.path(),
            "passes",
            r#"echo "test a ... ok"; echo "test result: ok. 3 passed"; echo "no $ENVOY" >> "$PREQUAL_SKIP_LOG""#,
            "exit 9",
        );
        let fails = r#"echo "test b ... FAILED"; echo "test result: FAILED. 1 passed; 1 failed"; exit 101"#;
        let flaky = program(
            dir.path(),
            "flaky",
            fails,
            r#"[ "$*" = "--exact --test-threads=1 b" ] || exit 8; echo "test result: ok. 1 passed""#,
        );
        let mut tally = Tally::default();
        let again = session.all(&[passes.clone(), flaky], 2, &mut tally).expect("all pass in the end");
        assert_eq!((tally.passed, again), (5, vec!["b".to_owned()]));
        assert_eq!(fs::read_to_string(dir.path().join("skips")).expect("a log"), "no envoy\n");

        for (name, whole, message) in [
            ("broken", fails, "failed in parallel with other tests and alone: b"),
            ("crashes", "kill -9 $$", "crashes failed, but none of its tests did"),
        ] {
            let broken = program(dir.path(), name, whole, whole);
            let why = session.all(&[passes.clone(), broken], 2, &mut Tally::default()).expect_err("it fails");
            assert_eq!(why.to_string(), message);
        }
    }

    #[test]
    fn libtest_lines_are_counted() {
        let mut tally = Tally::default();
        for line in [
            "running 3 tests",
            "test pool::a ... ok",
            "test pool::b ... ignored, needs a second machine",
            "test src/lib.rs - x (line 3) ... ignored",
            "test pool::c ... FAILED",
            "test pool::d - should panic ... ok",
            "test result: ok. 41 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.01s",
            "test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s",
        ] {
            tally.read(line);
        }
        assert_eq!(tally.passed, 42);
        assert_eq!(tally.failed, ["pool::c"]);
        assert_eq!(
            tally.ignored,
            ["test pool::b: ignored, needs a second machine", "test src/lib.rs - x (line 3): ignored"]
        );
    }
}
