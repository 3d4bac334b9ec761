//! The architectures of Linux for which programs and the native module are shipped.

use anyhow::{Context as _, Result, ensure};

use crate::commands::debian;
use crate::run;

/// An architecture that programs are shipped for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Platform {
    /// Name as in `uname -m`.
    pub(crate) arch: &'static str,
    /// Name in OCI images.
    pub(crate) oci: &'static str,
    pub(crate) triple: &'static str,
    /// Compiler and linker for this architecture on other machines.
    linker: &'static str,
}

/// Every architecture of a release.
pub(crate) const PLATFORMS: [Platform; 2] = [
    Platform {
        arch: "x86_64",
        oci: "amd64",
        triple: "x86_64-unknown-linux-gnu",
        linker: "x86_64-linux-gnu-gcc",
    },
    Platform {
        arch: "aarch64",
        oci: "arm64",
        triple: "aarch64-unknown-linux-gnu",
        linker: "aarch64-linux-gnu-gcc",
    },
];

impl Platform {
    /// The architecture of this machine.
    pub(crate) fn here() -> Result<Self> {
        let arch = std::env::consts::ARCH;
        let here = PLATFORMS.into_iter().find(|platform| platform.arch == arch);
        here.with_context(|| format!("nothing is shipped for {arch}, the architecture of this machine"))
    }

    /// The linker to use instead of this machine's own.
    pub(crate) fn cross_linker(&self) -> Option<&'static str> {
        (std::env::consts::ARCH != self.arch).then_some(self.linker)
    }

    /// The Debian packages of that linker.
    fn packages(&self) -> [String; 2] {
        [format!("gcc-{}-linux-gnu", self.arch.replace('_', "-")), format!("libc6-dev-{}-cross", self.oci)]
    }

    /// Installs that linker if it is missing and this process runs as root; otherwise [`Self::missing`] says how.
    pub(crate) fn install(&self) {
        if let Some(linker) = self.cross_linker() {
            // Recommended by the linker's package, but not required by it.
            let loader = format!("/usr/{0}-linux-gnu/lib/ld-linux-{0}.so.1", self.arch);
            let [compiler, libc] = self.packages();
            // An error is reported by `missing`.
            let _ = debian::install(&[(linker, &compiler), (&loader, &libc)]);
        }
    }

    /// The reason why nothing can be built for this architecture here, if any.
    pub(crate) fn missing(&self) -> Result<Option<String>> {
        ensure!(cfg!(target_os = "linux"), "releases are built on Linux");
        let absent = |linker: &&str| !run::succeeds(run::tool(linker).arg("--version"));
        Ok(self.cross_linker().filter(absent).map(|linker| {
            let packages = self.packages().join(" ");
            format!("`{linker}` is missing: apt-get install --no-install-recommends {packages}")
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_cross_linker_is_reported_with_the_command_that_installs_it() {
        let elsewhere = Platform { arch: "s390x", oci: "s390x", triple: "", linker: "no-such-linker" };
        let why = elsewhere.missing().expect("Linux").expect("a reason");
        assert!(why.contains("`no-such-linker` is missing: apt-get install"), "{why}");
        assert!(why.contains("gcc-s390x-linux-gnu libc6-dev-s390x-cross"), "{why}");
    }
}
