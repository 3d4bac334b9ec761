//! `cargo xtask fault`: one fault of the docker-compose demo, by name.

use anyhow::Result;

use crate::commands::compose::engine::Project;
use crate::commands::compose::faults::switch_on;
use crate::commands::compose::page::Page;
use crate::progress;

/// Switches on a fault of the running docker-compose demo; without a name, lists them.
///
/// Each ends by itself. The page shows it, and has a button for each as well.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Which; none: the list
    name: Option<String>,

    /// Number of the replica [default: one that the fault names]
    #[arg(long, value_name = "N")]
    replica: Option<u64>,

    /// It ends after this long, 1 to 600 [default: as the list says]
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
    let whom = if order.replica > 0 { format!(" on replica {}", order.replica) } else { String::new() };
    match order.seconds {
        0 => progress::say(format_args!("{name}{whom}")),
        seconds => progress::say(format_args!("{name}{whom}, for {seconds} s")),
    }
    Ok(())
}
