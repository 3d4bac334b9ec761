//! `cargo xtask fault`: switches on one fault of the docker-compose demo, by name.

use anyhow::Result;

use crate::commands::compose::engine::Project;
use crate::commands::compose::faults::switch_on;
use crate::commands::compose::page::Page;
use crate::progress;

/// Switches on a fault of the running docker-compose demo; without a name, lists the faults.
///
/// Each fault ends by itself. The page shows active faults, and has a button for each fault.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Name of the fault; without it, the faults are listed
    name: Option<String>,

    /// Number of the replica [default: the fault's own]
    #[arg(long, value_name = "N")]
    replica: Option<u64>,

    /// Duration in seconds, 1 to 600 [default: as listed]
    #[arg(long, value_name = "S")]
    seconds: Option<u64>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let project = Project::usual()?;
    let page = Page::of(&project)?;
    let Some(name) = &args.name else {
        for fault in page.faults()?.as_array().into_iter().flatten() {
            let name = fault["name"].as_str().unwrap_or_default();
            let what = fault["what"].as_str().unwrap_or_default();
            println!("{name:<16} {:>3} s  {what}", fault["seconds"]);
        }
        return Ok(());
    };
    let order = switch_on(&project, &page, name, args.replica, args.seconds)?;
    let target = if order.replica > 0 { format!(" on replica {}", order.replica) } else { String::new() };
    match order.seconds {
        0 => progress::say(format_args!("{name}{target}")),
        seconds => progress::say(format_args!("{name}{target}, for {seconds} s")),
    }
    Ok(())
}
