//! `prequal top`: shows what Prequal does right now, read from the admin ports of running Envoys and agents.

mod agents;
mod scrape;
mod screen;
mod view;

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail, ensure};

use scrape::{Admin, Scrape};
use view::View;

/// Show what Prequal does right now, from the admin interfaces of Envoys and agents
///
/// Shows choices by branch and probes, both per second over the last interval; the state of the pool; ejected replicas;
/// and each replica's share of the requests. Reads /stats and /clusters of the admin interface, and changes nothing.
/// With --agent, also shows the replicas' reports: requests in flight, base latency, and the number of concurrent
/// requests that saturates them.
#[derive(clap::Args)]
#[command(after_help = "\
Keys: q quits; up, down, tab choose the cluster; s sorts by address, share, requests in flight or errors, in turn.

Examples:
  prequal top http://127.0.0.1:9901
  prequal top 10.0.0.1:9901 10.0.0.2:9901
  prequal top --once --interval 5 127.0.0.1:9901
  prequal top --agent http://10.0.0.5:9102 --agent http://10.0.0.6:9102 127.0.0.1:9901

Exit code of --once: 0 everything was shown, 1 an admin interface could not be read, or its Envoy has no
filter that chooses replicas.")]
pub(crate) struct Args {
    /// Admin interfaces of Envoys: `http://HOST:PORT` or `HOST:PORT`
    #[arg(required_unless_present = "agents", value_name = "ADMIN_URL")]
    urls: Vec<String>,
    /// Admin interface of an agent (its --admin); may be repeated
    #[arg(long = "agent", value_name = "URL")]
    agents: Vec<String>,
    /// Measure for one interval, print the result as plain text, and exit
    #[arg(long)]
    once: bool,
    /// Seconds between two readings, 0.1 to 3600
    #[arg(long, default_value_t = 2.0, value_name = "SECONDS")]
    interval: f64,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    ensure!(
        (0.1..=3600.0).contains(&args.interval),
        "--interval must be 0.1 to 3600 seconds, got {}",
        args.interval
    );
    let interval = Duration::from_secs_f64(args.interval);
    let admins = |urls: &[String]| urls.iter().map(|url| Admin::new(url)).collect::<Result<Vec<_>>>();
    let (envoys, agents) = (admins(&args.urls)?, admins(&args.agents)?);
    if args.once {
        return once(&envoys, &agents, interval);
    }
    if !std::io::stdout().is_terminal() {
        bail!("standard output is not a terminal: use --once");
    }
    screen::run(envoys, agents, interval)?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the change between two readings of every Envoy, and one reading of every agent.
fn once(envoys: &[Admin], agents: &[Admin], interval: Duration) -> Result<ExitCode> {
    let first: Vec<Result<Scrape>> = envoys.iter().map(Admin::scrape).collect();
    if first.iter().any(Result::is_ok) {
        std::thread::sleep(interval);
    }
    let mut failed = false;
    let mut out = std::io::stdout().lock();
    for (admin, first) in envoys.iter().zip(first) {
        match first.and_then(|first| Ok((first, admin.scrape()?))) {
            Ok((first, second)) => {
                for view in View::between(&admin.url, &first, &second) {
                    writeln!(out, "{}", view.text())?;
                }
            }
            Err(error) => {
                failed = true;
                eprintln!("prequal: {error:#}");
            }
        }
    }
    let mut read = Vec::new();
    for admin in agents {
        match agents::scrape(admin) {
            Ok(replicas) => read.extend(replicas),
            Err(error) => {
                failed = true;
                eprintln!("prequal: {error:#}");
            }
        }
    }
    if !read.is_empty() {
        writeln!(out, "{}", agents::text(&read))?;
    }
    Ok(ExitCode::from(u8::from(failed)))
}
