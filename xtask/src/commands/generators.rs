//! The load generators that `cargo xtask bench generators` compares with this project's own. Each is built or installed
//! once.

use std::ffi::OsString;

use anyhow::Result;

use crate::commands::debian;
use crate::commands::go::{self, Program};
use crate::{progress, run, workspace};

/// Installs a generator unless it is there.
type Install = fn() -> Result<()>;

/// Installs the generators that `args`, the harness's arguments, ask for. For each that cannot be installed, one line
/// gives the reason; the harness then skips it.
pub(crate) fn prepare(args: &[OsString]) {
    let all: [(&str, Install); 4] = [
        ("vegeta", || VEGETA.prepare("")),
        ("fortio", || FORTIO.prepare("")),
        // `install` prints the name of the package.
        ("h2load", || debian::install(&[("h2load", "nghttp2-client")])),
        ("oha", oha),
    ];
    for (name, install) in all.into_iter().filter(|(name, _)| wants(args, name)) {
        if let Err(why) = install() {
            progress::say(format_args!("no {name}: {}", progress::last_line(&why)));
        }
    }
}

/// Whether the harness's option `--generators` includes `name`. Without the option, all are wanted.
fn wants(args: &[OsString], name: &str) -> bool {
    let args: Vec<&str> = args.iter().filter_map(|arg| arg.to_str()).collect();
    let joined = args.iter().find_map(|arg| arg.strip_prefix("--generators="));
    let apart = || args.windows(2).find(|pair| pair[0] == "--generators").map(|pair| pair[1]);
    joined.or_else(apart).is_none_or(|names| names.split(',').any(|wanted| wanted == name))
}

/// Builds oha from crates.io, as cargo installs programs.
fn oha() -> Result<()> {
    let installed = run::output(run::tool(go::bin().join("oha")).arg("--version"));
    if installed.is_ok_and(|said| said.trim() == format!("oha {OHA}")) {
        return Ok(());
    }
    progress::silently(&format!("building oha {OHA} from crates.io, a few minutes"), || {
        run::output(
            run::cargo()
                .args(["install", "oha", "--version", OHA, "--locked", "--root"])
                .arg(workspace::target())
                // Another project must not share the target folder of this workspace.
                .env("CARGO_TARGET_DIR", workspace::target().join("oha")),
        )
    })
    .map(drop)
}

const VEGETA: Program = Program {
    name: "vegeta",
    module: "github.com/tsenart/vegeta/v12",
    folder: "",
    version: "v12.13.0",
    go: "1.22",
};

/// From 1.69 on it needs the module grol.io/grol, which some Go module proxies lack.
const FORTIO: Program =
    Program { name: "fortio", module: "fortio.org/fortio", folder: "", version: "v1.68.2", go: "1.23" };

/// Built with its default features, without which it does not compile.
const OHA: &str = "1.16.0";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_wanted_generators_are_installed() {
        let wanted =
            |line: &str, name| wants(&line.split_whitespace().map(OsString::from).collect::<Vec<_>>(), name);
        for line in ["--quick --generators vegeta,oha", "--generators=vegeta,oha --seconds 5"] {
            assert!(wanted(line, "oha") && wanted(line, "vegeta") && !wanted(line, "h2load"), "{line}");
        }
        assert!(wanted("--quick --seconds 5", "h2load"));
    }
}
