//! `cargo xtask compose`: brings up the docker-compose demo from nothing, even without access to a registry.

use std::io::IsTerminal as _;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use crate::commands::build::{self, WasmArgs};
use crate::commands::compose::engine::{ModuleForm, Project};
use crate::commands::compose::page::Page;
use crate::progress;

mod browser;
mod check;
pub(crate) mod engine;
pub(crate) mod faults;
mod images;
pub(crate) mod page;

/// Brings up the docker-compose demo: two Envoys, nine replicas with their agents, load, faults, a live page.
///
/// Builds what the images copy, makes the base images locally if no registry answers (needs Debian and root), then
/// brings up envoy-configs/compose/docker-compose.yml. Keeps running to carry out the faults that need the container
/// engine; Enter stops the demo and removes everything, Ctrl-C leaves it running.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run everything unattended: up, load, each fault in turn with its goals, down
    #[arg(long, conflicts_with_all = ["down", "detach"])]
    check: bool,

    /// Remove containers, network and volume, then exit
    #[arg(long)]
    down: bool,

    /// Exit when everything is up
    #[arg(long, conflicts_with = "down")]
    detach: bool,

    /// With --check: only these faults, for example `--fault slow,sinkhole`
    #[arg(long, value_delimiter = ',', requires = "check", value_name = "NAMES")]
    fault: Vec<String>,

    /// With --check: save a PNG picture of the page during the first fault
    #[arg(long, requires = "check", value_name = "FILE")]
    picture: Option<std::path::PathBuf>,

    /// The form in which Envoy runs Prequal
    #[arg(long, value_enum, default_value_t, value_name = "WHICH", conflicts_with = "down")]
    module: ModuleForm,

    #[command(flatten)]
    wasm: WasmArgs,
}

/// How often the page is polled for orders: faults that this program must carry out.
const ORDERS: Duration = Duration::from_millis(500);

/// Maximum time until the whole fleet is up.
const START: Duration = Duration::from_secs(120);

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.down {
        return Project::usual()?.down();
    }
    if args.check {
        let options =
            check::Options { faults: args.fault.clone(), picture: args.picture.clone(), module: args.module };
        let unjudged = check::run(args.wasm.toolchain, &options)?;
        ensure!(unjudged.is_empty(), "this machine was too busy to judge:\n{}", unjudged.join("\n"));
        return Ok(());
    }
    let project = Project::usual()?.with(args.module);
    let page = up(&project, args.wasm)?;
    progress::headline(format_args!(
        "http://{} is the page; `cargo xtask fault` lists the faults",
        page.address
    ));
    if args.detach {
        progress::say(
            "to switch on a fault that needs the container engine, use `cargo xtask fault NAME`, or run this again \
             without --detach",
        );
        progress::say("`cargo xtask compose --down` removes everything");
        return Ok(());
    }
    control(&project, &page)
}

/// The reason why the demo cannot run here, if any.
pub(crate) fn missing() -> Option<String> {
    Project::usual().err().map(|error| format!("{error:#}"))
}

/// Pulls or makes the base images, the slow part of building the demo's images.
pub(crate) fn base_images() -> Result<()> {
    images::bases()
}

/// The check as `cargo xtask test` runs it; returns the goals that it could not judge because this machine was too
/// busy.
pub(crate) fn check(toolchain: crate::toolchain::Choice) -> Result<Vec<String>> {
    check::run(toolchain, &check::Options::default())
}

/// Builds the programs and images, starts the containers, and waits until every replica answers.
fn up(project: &Project, wasm: WasmArgs) -> Result<Page> {
    build::dist(wasm.toolchain)?;
    images::prepare(project)?;
    project.up()?;
    let page = Page::of(project)?;
    page.wait_until_ready(START)?;
    Ok(page)
}

/// Carries out the faults that the page cannot, until Enter is pressed.
fn control(project: &Project, page: &Page) -> Result<()> {
    let (end, ended) = mpsc::channel::<()>();
    if std::io::stdin().is_terminal() {
        progress::say("Enter removes everything and exits; Ctrl-C leaves the demo running");
        std::thread::spawn(move || {
            let mut line = String::new();
            let _ = std::io::stdin().read_line(&mut line);
            let _ = end.send(());
        });
        while ended.recv_timeout(ORDERS) == Err(RecvTimeoutError::Timeout) {
            orders(project, page);
        }
        return project.down();
    }
    let mut answered = Instant::now();
    while answered.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(ORDERS);
        if orders(project, page) {
            answered = Instant::now();
        }
    }
    bail!("the page has not answered for a minute");
}

/// Fetches orders and carries them out; returns false if the page does not answer.
fn orders(project: &Project, page: &Page) -> bool {
    let Ok(orders) = page.orders() else { return false };
    for order in orders {
        progress::say(format_args!("{} on {}, {} s", order.name, order.replica, order.seconds));
        if let Err(error) = faults::act(project, &order) {
            progress::say(format_args!("not carried out: {error:#}"));
            let _ = page.failed(order.id, &error.to_string());
        }
    }
    true
}
