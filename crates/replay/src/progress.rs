//! A progress bar on the terminal.

use std::io::Write;

/// Characters of the bar.
const WIDTH: u64 = 32;

/// How far all runs are, drawn on one line of standard error.
#[derive(Debug)]
pub(crate) struct ProgressBar {
    draws: bool,
    runs: usize,
    over: usize,
    requests: u64,
    last: String,
}

impl ProgressBar {
    pub(crate) fn new(draws: bool, runs: usize, requests: u64) -> Self {
        Self {
            draws,
            runs,
            over: 0,
            requests: requests.max(1),
            last: String::new(),
        }
    }

    /// A run of `policy` is over.
    pub(crate) fn run_done(&mut self, policy: &str) {
        self.over += 1;
        policy.clone_into(&mut self.last);
    }

    /// Draws that `done` requests are simulated.
    pub(crate) fn draw(&self, done: u64) {
        if self.draws {
            let _ = write!(std::io::stderr(), "\r\x1b[K{}", self.line(done));
            let _ = std::io::stderr().flush();
        }
    }

    fn line(&self, done: u64) -> String {
        let done = done.min(self.requests);
        let full = done * WIDTH / self.requests;
        let bar: String = (0..WIDTH)
            .map(|at| if at < full { '█' } else { '░' })
            .collect();
        let percent = done * 100 / self.requests;
        format!(
            "{bar} {percent:>3} %  {} of {} runs  {}",
            self.over, self.runs, self.last
        )
    }

    /// Takes the line away.
    pub(crate) fn clear(&self) {
        if self.draws {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_fills_up_and_never_overflows() {
        let mut bar = ProgressBar::new(false, 4, 200);
        assert!(bar.line(0).starts_with("░░"));
        bar.run_done("kv");
        let half = bar.line(100);
        assert!(half.contains(" 50 %  1 of 4 runs  kv"), "{half}");
        assert_eq!(half.matches('█').count(), 16);
        assert_eq!(bar.line(900).matches('█').count(), 32);
        assert!(ProgressBar::new(false, 0, 0).line(0).contains("  0 %"));
    }
}
