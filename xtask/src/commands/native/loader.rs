//! Loads the native module in a small program in place of Envoy, for every architecture: under qemu, if it is not this
//! machine's.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use super::elf::Library;
use crate::commands::debian;
use crate::commands::platform::Platform;
use crate::{run, workspace};

/// Builds and runs programs for one architecture.
pub(super) struct Loader<'a> {
    platform: &'a Platform,
    folder: PathBuf,
}

/// The program's source. [`Loader::build`] adds stubs for the functions of Envoy that it does not define.
const PROGRAM: &str = include_str!("load.c");

impl<'a> Loader<'a> {
    /// Fails if programs for `platform` cannot run here.
    pub(super) fn of(platform: &'a Platform) -> Result<Self> {
        if platform.cross_linker().is_some() {
            debian::install(&[(&emulator(platform), "qemu-user")])?;
        }
        let folder = workspace::target().join("native-load").join(platform.arch);
        fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
        Ok(Self { platform, folder })
    }

    /// Checks that the module in `file` loads and that a policy answers.
    pub(super) fn serves(&self, file: &Path, library: &Library) -> Result<()> {
        let said = self.load(file, library)?;
        let answered = said.starts_with(&format!("version {ABI}\n")) && said.ends_with("host none\n");
        ensure!(answered && !said.contains("panic"), "{}:\n{said}", file.display());
        Ok(())
    }

    /// Checks that a panic in a hook of the module in `file` is caught in that hook. This needs a working unwinder
    /// inside the module.
    pub(super) fn survives_a_panic(&self, file: &Path, library: &Library) -> Result<()> {
        let said = self.load(file, library)?;
        let caught = said.contains("a panic was caught; please report it: crash test\n");
        ensure!(caught && said.ends_with("host none\n"), "{}:\n{said}", file.display());
        Ok(())
    }

    /// Runs the program with this module; returns what it printed.
    fn load(&self, module: &Path, library: &Library) -> Result<String> {
        self.run(&self.build("load", PROGRAM, library)?, module, &[])
    }

    /// Builds the program `name` from its `source` and an empty function for each function of Envoy that it lacks.
    pub(super) fn build(&self, name: &str, source: &str, library: &Library) -> Result<PathBuf> {
        let (file, program) = (self.folder.join(name).with_extension("c"), self.folder.join(name));
        let mut text = source.to_owned();
        for name in library.imports.iter().filter(|name| !source.contains(&format!("{name}("))) {
            text.push_str(&format!("\nlong {name}(void) {{ return 0; }}\n"));
        }
        fs::write(&file, text)?;
        // `-rdynamic` exports the program's functions, so that the module finds those of Envoy.
        let mut compile = run::tool(self.platform.cross_linker().unwrap_or("cc"));
        compile.args(["-O1", "-rdynamic", "-pthread", "-o"]).arg(&program).arg(&file).arg("-ldl");
        run::output(&mut compile)?;
        Ok(program)
    }

    /// Runs a program with the module in `file` and these arguments; returns what it printed.
    pub(super) fn run(&self, program: &Path, file: &Path, arguments: &[&str]) -> Result<String> {
        let mut command = match self.platform.cross_linker() {
            None => run::tool(program),
            Some(_) => {
                let mut qemu = run::tool(emulator(self.platform));
                qemu.arg("-L").arg(format!("/usr/{}-linux-gnu", self.platform.arch)).arg(program);
                qemu
            }
        };
        run::output(command.arg(file).args(arguments))
    }
}

fn emulator(platform: &Platform) -> String {
    format!("qemu-{}", platform.arch)
}

/// The version of Envoy's interface that the module states.
const ABI: &str = "v0.2.0";
