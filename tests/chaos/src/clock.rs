//! Steps the wall clock of Envoy only. The kernel cannot change the wall clock of a single process (a time namespace
//! only has the other clocks), so a library is loaded before libc and adds an offset, which it reads from a mapped
//! file.

use std::fs;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use prequal_testbed::envoy_binary;

/// The library that replaces `clock_gettime`, `gettimeofday` and `time`.
const SOURCE: &str = include_str!("clock.c");

/// Prepares, in `dir`, an Envoy whose clock can be stepped; returns its program and the file for [`step`]. Needs a C
/// compiler.
pub(crate) fn prepare(dir: &Path) -> Result<(PathBuf, PathBuf)> {
    let file = |name: &str| dir.join(name);
    let (source, library, offset, program) =
        (file("clock.c"), file("clock.so"), file("offset"), file("envoy"));
    fs::write(&source, SOURCE)?;
    let [from, to] = [&source, &library].map(|path| path.to_string_lossy().into_owned());
    crate::network::run("cc", &["-O2", "-shared", "-fPIC", "-o", &to, &from])?;
    fs::write(&offset, 0_i64.to_ne_bytes())?;
    let envoy = envoy_binary().canonicalize().context("no Envoy")?;
    let text = format!(
        "#!/bin/sh\nexport LD_PRELOAD='{}' CHAOS_CLOCK='{}'\nexec '{}' \"$@\"\n",
        library.display(),
        offset.display(),
        envoy.display()
    );
    fs::write(&program, text)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    Ok((program, offset))
}

/// Steps Envoy's wall clock by `seconds`.
pub(crate) fn step(offset: &Path, seconds: i64) -> Result<()> {
    let file = fs::File::options().read(true).write(true).open(offset)?;
    let mut now = [0; size_of::<i64>()];
    file.read_exact_at(&mut now, 0)?;
    Ok(file.write_all_at(&(i64::from_ne_bytes(now) + seconds).to_ne_bytes(), 0)?)
}
