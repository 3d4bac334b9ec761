//! Reads from the native module's file what it exports and needs.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use object::elf::{DT_NEEDED, STB_LOCAL};
use object::read::elf::{ElfFile64, Sym as _};
use object::{Architecture, Endianness, Object as _};

/// Interface of a shared library.
pub(super) struct Library {
    architecture: Architecture,
    /// Functions that others may call: the hooks.
    pub(super) exports: BTreeSet<String>,
    /// Functions that the program must provide.
    pub(super) imports: BTreeSet<String>,
    /// Libraries that the dynamic linker must find.
    needs: BTreeSet<String>,
    /// Versions of symbols, such as `GLIBC_2.34`, that those libraries must have.
    versions: BTreeSet<String>,
}

/// The newest glibc that the module may need: that of Ubuntu 22.04, on which Envoy's usual image is built. The
/// distroless image has Debian 12's, 2.36.
const NEWEST_GLIBC: (u32, u32) = (2, 35);

/// Prefixes of the names of hooks, and of Envoy's functions.
const HOOK: &str = "envoy_dynamic_module_on_";
const CALLBACK: &str = "envoy_dynamic_module_callback_";

impl Library {
    pub(super) fn read(file: &Path) -> Result<Self> {
        let bytes = fs::read(file).with_context(|| format!("reading {}", file.display()))?;
        Self::parse(&bytes).with_context(|| format!("{} is not a shared library", file.display()))
    }

    fn parse(bytes: &[u8]) -> Result<Self> {
        let file = ElfFile64::<Endianness>::parse(bytes)?;
        let (endian, symbols) = (file.endian(), file.elf_dynamic_symbol_table());
        let sections = file.elf_section_table();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let mut library = Self {
            architecture: file.architecture(),
            exports: BTreeSet::new(),
            imports: BTreeSet::new(),
            needs: BTreeSet::new(),
            versions: BTreeSet::new(),
        };
        for symbol in symbols.iter() {
            let name = text(symbol.name(endian, symbols.strings())?);
            if !symbol.is_undefined(endian) && symbol.st_bind() != STB_LOCAL {
                library.exports.insert(name);
            } else if name.starts_with(CALLBACK) {
                library.imports.insert(name);
            }
        }
        let dynamic = file.elf_dynamic_table()?;
        for entry in dynamic.iter().filter(|entry| entry.tag == DT_NEEDED) {
            library.needs.insert(text(dynamic.string(entry)?));
        }
        if let Some((mut files, link)) = sections.gnu_verneed(endian, bytes)? {
            let strings = sections.strings(endian, bytes, link)?;
            while let Some((_, mut versions)) = files.next()? {
                while let Some(version) = versions.next()? {
                    library.versions.insert(text(version.name(endian, strings)?));
                }
            }
        }
        Ok(library)
    }

    /// Fails unless Envoy's images for `arch` can load the library.
    pub(super) fn check(&self, arch: &str) -> Result<()> {
        let architecture = match arch {
            "x86_64" => Architecture::X86_64,
            _ => Architecture::Aarch64,
        };
        ensure!(self.architecture == architecture, "built for {:?}, not {arch}", self.architecture);
        for library in &self.needs {
            let glibc = ["libc.so.", "libm.so.", "ld-linux-"].iter().any(|name| library.starts_with(name));
            ensure!(glibc, "needs {library}, which is not part of glibc");
        }
        let newest = self.newest_glibc()?;
        ensure!(newest <= NEWEST_GLIBC, "needs glibc {}.{}", newest.0, newest.1);
        let init = format!("{HOOK}program_init");
        ensure!(self.exports.contains(&init), "does not export {init}");
        for name in &self.exports {
            ensure!(name.starts_with(HOOK), "exports {name}, which is not one of Envoy's hooks");
        }
        Ok(())
    }

    fn newest_glibc(&self) -> Result<(u32, u32)> {
        let mut newest = (0, 0);
        for version in &self.versions {
            let number = version.strip_prefix("GLIBC_").and_then(|number| number.split_once('.'));
            let number = number.and_then(|(major, minor)| {
                Some((major.parse().ok()?, minor.split('.').next()?.parse().ok()?))
            });
            newest = newest.max(number.with_context(|| format!("needs {version}, which is not glibc's"))?);
        }
        Ok(newest)
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.newest_glibc().unwrap_or_default();
        let needs: Vec<&str> = self.needs.iter().map(String::as_str).collect();
        write!(f, "{} hooks, needs {}, glibc {major}.{minor}", self.exports.len(), needs.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module() -> Library {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Library {
            architecture: Architecture::Aarch64,
            exports: names(&["envoy_dynamic_module_on_program_init"]),
            imports: names(&[]),
            needs: names(&["libc.so.6", "libm.so.6", "ld-linux-aarch64.so.1"]),
            versions: names(&["GLIBC_2.17", "GLIBC_2.2.5", "GLIBC_2.35"]),
        }
    }

    #[test]
    fn what_envoys_images_cannot_load_is_refused() {
        module().check("aarch64").expect("fits");
        assert!(module().check("x86_64").is_err());
        let with = |change: fn(&mut Library)| {
            let mut library = module();
            change(&mut library);
            library.check("aarch64").expect_err("refused").to_string()
        };
        let error = with(|library| _ = library.needs.insert("libgcc_s.so.1".to_owned()));
        assert!(error.contains("libgcc_s"), "{error}");
        let error = with(|library| _ = library.versions.insert("GLIBC_2.36".to_owned()));
        assert!(error.contains("glibc 2.36"), "{error}");
        let error = with(|library| _ = library.versions.insert("GCC_3.0".to_owned()));
        assert!(error.contains("GCC_3.0"), "{error}");
        let error = with(|library| _ = library.exports.insert("rust_eh_personality".to_owned()));
        assert!(error.contains("rust_eh_personality"), "{error}");
        let error = with(|library| library.exports.clear());
        assert!(error.contains("program_init"), "{error}");
    }

    /// Runs the reader on a shared library that every test machine has.
    #[test]
    fn a_shared_library_is_read() {
        let maps = fs::read_to_string("/proc/self/maps").expect("this process's libraries");
        let libc = maps.split_whitespace().find(|path| path.ends_with("/libc.so.6")).expect("a C library");
        let library = Library::read(Path::new(libc)).expect("read");
        assert!(library.exports.contains("malloc"));
        assert!(library.needs.iter().any(|name| name.starts_with("ld-linux-")), "{:?}", library.needs);
        assert!(library.versions.contains("GLIBC_PRIVATE"), "{:?}", library.versions);
        let program = Library::read(Path::new("/proc/self/exe")).expect("read");
        assert!(
            program.versions.iter().any(|version| version.starts_with("GLIBC_2.")),
            "{:?}",
            program.versions
        );
    }
}
