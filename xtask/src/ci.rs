//! Everything a change must pass, in the order that fails soonest.
//!
//! Answers: does the tree pass, and where did the time go? All steps run even when one fails,
//! except that nothing is tested which does not compile. One after the other, but for the check of features: it compiles beside the
//! end-to-end tests, which wait more than they compute, at the lowest priority. The closing lines of the test runner are
//! repeated at the end, so that the last screen tells the whole story.
//!
//! Of tools beside Rust's own only those are used that `./test` brings into the repository: what else
//! lies on the machine neither helps nor harms. No test runs for ever.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::tree::Tree;
use crate::{changed, dashboard, tidy};

/// How much to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// Everything.
    Full,
    /// What needs nothing but Rust and five minutes of two cores, from nothing.
    Quick,
}

/// Outcome of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Passed,
    Failed,
    Skipped(&'static str),
}

struct Report {
    steps: Vec<(&'static str, Outcome, Duration)>,
    closing: Vec<String>,
}

impl Report {
    fn step(
        &mut self,
        name: &'static str,
        run: impl FnOnce(&mut Vec<String>) -> Outcome,
    ) -> Outcome {
        println!("\n=== {name}");
        let (outcome, time) = timed(|| run(&mut self.closing));
        self.steps.push((name, outcome, time));
        outcome
    }

    fn print(&self) -> bool {
        println!("\n=== summary");
        for (name, outcome, time) in &self.steps {
            let (word, note) = match outcome {
                Outcome::Passed => ("ok", ""),
                Outcome::Failed => ("FAILED", ""),
                Outcome::Skipped(reason) => ("skipped", *reason),
            };
            println!("{name:<12} {word:<8} {:>7.1} s  {note}", time.as_secs_f64());
        }
        for line in &self.closing {
            println!("{line}");
        }
        let failed = self
            .steps
            .iter()
            .filter(|(_, outcome, _)| *outcome == Outcome::Failed)
            .count();
        match failed {
            0 => println!("ci: passed"),
            count => println!("ci: {count} steps FAILED"),
        }
        failed == 0
    }
}

/// How long something took on the wall, with what came of it.
#[expect(
    clippy::disallowed_methods,
    reason = "how long a step takes on the wall"
)]
fn timed<T>(run: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    let made = run();
    (made, start.elapsed())
}

/// Runs the steps; true when none failed.
pub(crate) fn run(tree: &Tree, extent: Extent) -> bool {
    let mut report = Report {
        steps: Vec::new(),
        closing: Vec::new(),
    };
    report.step("fmt", |_| cargo(tree, &["fmt", "--all", "--check"]));
    report.step("tidy", |_| {
        if tidy::run(tree) {
            Outcome::Passed
        } else {
            Outcome::Failed
        }
    });
    report.step("dashboard", |_| compiled_page(tree, extent));
    let changed = match extent {
        Extent::Full => None,
        Extent::Quick => Some(changed::packages(tree)),
    };
    let compiles = report.step("clippy", |_| clippy(tree, changed.as_deref())) != Outcome::Failed;
    if compiles {
        report.step("tests", |closing| tests(tree, changed.as_deref(), closing));
        report.step("doc tests", |closing| doc_tests(tree, extent, closing));
        report.step("deny", |_| deny(tree, extent));
        let built = report.step("programs", |_| programs(tree, extent)) != Outcome::Failed;
        report.step("faults", |_| faults(tree, extent, built));
        std::thread::scope(|threads| {
            let features = threads.spawn(|| timed(|| features(tree, extent)));
            report.step("end to end", |closing| {
                end_to_end(tree, extent, built, closing)
            });
            println!("\n=== features");
            let (outcome, time, said) = match features.join() {
                Ok(((outcome, said), time)) => (outcome, time, said),
                Err(_) => (Outcome::Failed, Duration::ZERO, String::new()),
            };
            print!("{said}");
            report.steps.push(("features", outcome, time));
        });
    }
    report.print()
}

/// The dashboard's TypeScript passes its compiler and is what was checked in.
fn compiled_page(tree: &Tree, extent: Extent) -> Outcome {
    match (extent, dashboard::has_compiler(tree)) {
        (Extent::Quick, _) => Outcome::Skipped("with --quick"),
        (Extent::Full, false) => {
            eprintln!("no TypeScript compiler; run ./test, which brings it");
            Outcome::Failed
        }
        (Extent::Full, true) => outcome(dashboard::check(tree)),
    }
}

fn cargo(tree: &Tree, args: &[&str]) -> Outcome {
    let status = Command::new(env!("CARGO"))
        .args(args)
        .current_dir(&tree.root)
        .status();
    outcome(status.is_ok_and(|status| status.success()))
}

fn outcome(passed: bool) -> Outcome {
    if passed {
        Outcome::Passed
    } else {
        Outcome::Failed
    }
}

/// Property tests draw the same cases in every run here; a plain `cargo test` draws new ones.
const PROPERTY_SEED: &str = "20261115";

/// Seconds after which a test binary is killed. The slowest takes 20 on two cores.
const BINARY_SECONDS_MAX: &str = "600";

/// Seconds after which an end-to-end test is given up. The slowest takes 40 on two cores.
const END_TO_END_SECONDS_MAX: &str = "300";

/// The crate whose tests take a third of the time of all; a quick run has them where the crate was changed.
const SLOW_TO_TEST: &str = "kvasir-frontend";

/// Libraries for other languages: a test binary of the one for Python would have to link an interpreter. Their tests are among the
/// end-to-end tests.
const TESTED_FROM_OUTSIDE: [&str; 2] = ["kvasir-python", "kvasir-c"];

/// Lints of all crates, or of those that were changed: from nothing, all cost two minutes of two cores.
fn clippy(tree: &Tree, changed: Option<&[String]>) -> Outcome {
    let packages: Vec<&str> = match changed {
        None => vec!["--workspace"],
        Some([]) => return Outcome::Skipped("with --quick: no crate differs from main"),
        Some(names) => names.iter().flat_map(|name| ["--package", name]).collect(),
    };
    let mut args = vec!["clippy", "--all-targets"];
    args.extend(packages);
    args.extend(["--", "-D", "warnings"]);
    cargo(tree, &args)
}

/// Unit and integration tests, of all crates or of all that are quick and those that were changed.
///
/// By cargo and not by nextest, which takes longer to build than all tests take and runs them no sooner; a developer
/// who has it finds its settings in `.config/nextest.toml`.
fn tests(tree: &Tree, changed: Option<&[String]>, closing: &mut Vec<String>) -> Outcome {
    let mut what = vec!["--lib", "--bins", "--tests", "--no-fail-fast"];
    if changed.is_some_and(|names| names.iter().all(|name| name != SLOW_TO_TEST)) {
        what.extend(["--exclude", SLOW_TO_TEST]);
    }
    cargo_test(tree, &what, closing, "tests")
}

fn doc_tests(tree: &Tree, extent: Extent, closing: &mut Vec<String>) -> Outcome {
    if extent == Extent::Quick {
        return Outcome::Skipped("with --quick");
    }
    cargo_test(tree, &["--doc", "--quiet"], closing, "doc tests")
}

/// Runs `cargo test`, passes its output on, and keeps the closing lines.
fn cargo_test(tree: &Tree, what: &[&str], closing: &mut Vec<String>, step: &str) -> Outcome {
    let mut command = Command::new(env!("CARGO"));
    command
        .args(["test", "--workspace"])
        .args(TESTED_FROM_OUTSIDE.map(|name| format!("--exclude={name}")))
        .args(what)
        .args(bound(BINARY_SECONDS_MAX))
        .env("PROPTEST_RNG_SEED", PROPERTY_SEED)
        .current_dir(&tree.root);
    tee(&mut command, closing, step)
}

/// Arguments of cargo by which a test binary that hangs is killed and the next one runs. The binary has by then named
/// each test that takes longer than a minute.
fn bound(seconds: &str) -> [String; 2] {
    let runner = format!("['timeout', '--kill-after=10', '{seconds}']");
    [
        "--config".into(),
        format!("target.'cfg(all())'.runner={runner}"),
    ]
}

fn tee(command: &mut Command, closing: &mut Vec<String>, step: &str) -> Outcome {
    // The runner writes to either stream; one pipe keeps the lines in their order.
    let piped = std::io::pipe().and_then(|(reader, writer)| {
        let child = command
            .stdin(Stdio::null())
            .stdout(writer.try_clone()?)
            .stderr(writer)
            .spawn()?;
        Ok((reader, child))
    });
    let (reader, mut child) = match piped {
        Ok(started) => started,
        Err(error) => {
            eprintln!("cannot start {command:?}: {error}");
            return Outcome::Failed;
        }
    };
    // The command holds the writing end; without it the reader would wait for ever.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut sum = TestSum::default();
    for line in BufReader::new(reader).lines().map_while(Result::ok) {
        println!("{line}");
        sum.read(&line);
    }
    closing.extend(sum.closing(step));
    outcome(child.wait().is_ok_and(|status| status.success()))
}

/// What test runners say last.
#[derive(Debug, Default)]
struct TestSum {
    /// pytest's own closing line.
    summary: Option<String>,
    /// Passed and failed over all binaries of `cargo test`.
    passed: u64,
    failed: u64,
    binaries: u64,
    /// What pytest did not run, and why.
    skipped: Vec<String>,
}

/// Reasons for tests that were not run that are repeated at the end.
const SKIPPED_MAX: usize = 64;

impl TestSum {
    fn read(&mut self, line: &str) {
        let plain = line.trim();
        if is_pytest_summary(plain) {
            self.summary = Some(plain.to_owned());
        }
        if plain.starts_with("SKIPPED [") && self.skipped.len() < SKIPPED_MAX {
            self.skipped.push(plain.to_owned());
        }
        if let Some(rest) = plain.strip_prefix("test result: ") {
            self.binaries += 1;
            self.passed += count_before(rest, " passed");
            self.failed += count_before(rest, " failed");
        }
    }

    fn closing(&self, step: &str) -> Vec<String> {
        if let Some(summary) = &self.summary {
            let skipped = self.skipped.iter();
            let mut lines: Vec<String> = skipped.map(|line| format!("{step}: {line}")).collect();
            lines.push(format!("{step}: {summary}"));
            return lines;
        }
        let Self {
            passed,
            failed,
            binaries,
            ..
        } = self;
        let line = (*binaries > 0).then(|| {
            format!("{step}: test result: {passed} passed; {failed} failed; {binaries} binaries")
        });
        line.into_iter().collect()
    }
}

fn is_pytest_summary(line: &str) -> bool {
    let plain = line.trim_matches(['=', ' ']);
    let counts = plain.starts_with(|c: char| c.is_ascii_digit()) && plain.contains(" in ");
    counts && (plain.contains(" passed") || plain.contains(" failed"))
}

/// The number that stands before a word.
fn count_before(text: &str, word: &str) -> u64 {
    let before = text.split_once(word).map_or("", |(before, _)| before);
    before
        .rsplit(|c: char| !c.is_ascii_digit())
        .next()
        .unwrap_or_default()
        .parse()
        .unwrap_or(0)
}

/// Each crate with features compiles with each alone, and with none. What is said comes with the outcome: another step writes
/// meanwhile.
fn features(tree: &Tree, extent: Extent) -> (Outcome, String) {
    if extent == Extent::Quick {
        return (Outcome::Skipped("with --quick"), String::new());
    }
    let (mut passed, mut said) = (true, String::new());
    for (package, features) in crates_with_features(tree) {
        let with_none = std::iter::once(None);
        for feature in with_none.chain(features.iter().map(Some)) {
            said += &format!("{package}: {}\n", feature.map_or("none", String::as_str));
            let mut check = Command::new("nice");
            check
                .args(["-n", "19", env!("CARGO"), "check", "--quiet"])
                .args(["--package", &package, "--no-default-features"])
                .args(feature.iter().flat_map(|name| ["--features", name]))
                .current_dir(&tree.root);
            match check.output() {
                Ok(done) => {
                    passed &= done.status.success();
                    said += &String::from_utf8_lossy(&done.stderr);
                }
                Err(error) => {
                    passed = false;
                    said += &format!("cannot start {check:?}: {error}\n");
                }
            }
        }
    }
    (outcome(passed), said)
}

/// What cargo knows about the workspace itself.
fn metadata(tree: &Tree) -> serde_json::Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps"])
        .current_dir(&tree.root)
        .output();
    let parsed = output
        .ok()
        .and_then(|output| serde_json::from_slice(&output.stdout).ok());
    parsed.unwrap_or_default()
}

/// Where cargo puts what it builds.
fn target_directory(tree: &Tree) -> PathBuf {
    let named = metadata(tree)["target_directory"]
        .as_str()
        .map(PathBuf::from);
    named.unwrap_or_else(|| tree.root.join("target"))
}

/// Members and their features.
fn crates_with_features(tree: &Tree) -> Vec<(String, Vec<String>)> {
    let metadata = metadata(tree);
    let packages = metadata["packages"].as_array().cloned().unwrap_or_default();
    packages
        .iter()
        .filter_map(|package| {
            let name = package["name"].as_str()?.to_owned();
            let names = package["features"].as_object()?.keys();
            let features: Vec<_> = names.filter(|name| *name != "default").cloned().collect();
            (!features.is_empty() && name != FAULTS).then_some((name, features))
        })
        .collect()
}

/// A tool that `./test` has brought.
fn tool(tree: &Tree, name: &str) -> Option<PathBuf> {
    let path = tree.root.join(".test-tools/bin").join(name);
    path.is_file().then_some(path)
}

/// Licences, versions and sources of dependencies. Advisories are left out: their database is on a host that not
/// every machine reaches; `cargo deny check advisories` asks for them.
fn deny(tree: &Tree, extent: Extent) -> Outcome {
    let Some(deny) = tool(tree, "cargo-deny") else {
        return match extent {
            Extent::Quick => Outcome::Skipped("with --quick"),
            Extent::Full => Outcome::Skipped("NO cargo-deny: licences and sources are NOT checked"),
        };
    };
    let status = Command::new(deny)
        .args(["check", "bans", "licenses", "sources"])
        .current_dir(&tree.root)
        .status();
    outcome(status.is_ok_and(|status| status.success()))
}

/// What is tested from outside: the binary, the libraries for other languages, and the run with faults. Built of the crates that
/// the tests before were built of, with the features that these turn on: other features would be another build of nearly all of
/// them. That the binary compiles without is checked with the features.
fn programs(tree: &Tree, extent: Extent) -> Outcome {
    if extent == Extent::Quick {
        return Outcome::Skipped("with --quick");
    }
    let mut build = vec!["build", "--package", "kvasir-cli", "--package", FAULTS];
    let libraries = TESTED_FROM_OUTSIDE.iter();
    build.extend(libraries.flat_map(|name| ["--package", name]));
    build.extend(["--features", "kvasir-faults/as-tested"]);
    cargo(tree, &build)
}

/// The program of the run with faults.
const FAULTS: &str = "kvasir-faults";

/// Requests of the bounded run with faults; 100,000 are recorded in `bench/faults`.
const FAULT_REQUESTS: &str = "4000";

/// The real binary before engines and clients that fail, for half a minute. What goes wrong is the same in every run,
/// when it does is not.
fn faults(tree: &Tree, extent: Extent, built: bool) -> Outcome {
    if extent == Extent::Quick {
        return Outcome::Skipped("with --quick");
    }
    if !built {
        return Outcome::Failed;
    }
    let binaries = target_directory(tree).join("debug");
    let status = Command::new(binaries.join(FAULTS))
        .arg("--binary")
        .arg(binaries.join("kvasir"))
        .args(["--requests", FAULT_REQUESTS, "--seed", PROPERTY_SEED])
        .current_dir(&tree.root)
        .status();
    outcome(status.is_ok_and(|status| status.success()))
}

/// Tests in Python against the real binary, by the environment that `./test` makes.
fn end_to_end(tree: &Tree, extent: Extent, built: bool, closing: &mut Vec<String>) -> Outcome {
    if extent == Extent::Quick {
        return Outcome::Skipped("with --quick");
    }
    let any = tree
        .names()
        .any(|name| name.starts_with("tests/e2e/test_") && name.ends_with(".py"));
    if !any {
        return Outcome::Skipped("tests/e2e has no tests yet");
    }
    let python = tree.root.join(".venv/bin/python");
    if !python.exists() {
        eprintln!("no .venv; run ./test, which makes it");
        return Outcome::Failed;
    }
    if !built {
        return Outcome::Failed;
    }
    let mut command = Command::new(python);
    command
        .args(["-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider"])
        // They wait more than they compute: two files at a time take little more than half the time.
        .args(["-n", "2", "--dist", "loadfile"])
        // Where the time went.
        .args(["--durations", "25", "--durations-min", "5"])
        .args(["--timeout", END_TO_END_SECONDS_MAX, "tests/e2e"])
        .env("KVASIR_BIN", target_directory(tree).join("debug/kvasir"))
        .current_dir(&tree.root);
    tee(&mut command, closing, "end to end")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn closing(lines: &[&str]) -> Vec<String> {
        let mut sum = TestSum::default();
        lines.iter().for_each(|line| sum.read(line));
        sum.closing("tests")
    }

    #[test]
    fn closing_lines_of_each_runner_are_kept() {
        assert!(closing(&["running 0 tests"]).is_empty());
        let cargo = [
            "test result: ok. 9 passed; 0 failed; 0 ignored; finished in 0.00s",
            "test result: FAILED. 40 passed; 2 failed; 0 ignored; finished in 0.00s",
        ];
        let kept = "tests: test result: 49 passed; 2 failed; 2 binaries";
        assert_eq!(closing(&cargo), [kept]);
        let pytest = "1 failed, 12 passed in 3.04s";
        let kept = "tests: 1 failed, 12 passed in 3.04s";
        assert_eq!(closing(&["12 passed it on", pytest]), [kept]);
        // What was not run is said where it is read.
        let skip = "SKIPPED [2] tests/e2e/test_a.py:9: NO etcd here";
        assert_eq!(closing(&[skip, pytest])[0], format!("tests: {skip}"));
    }
}
