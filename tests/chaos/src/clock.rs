//! Steps the wall clock of Envoy alone. Nothing moves the wall clock of one process (a time namespace has only the other
//! clocks), so a library is loaded before libc, and what it adds to the time stands in a file that is mapped.

use std::fs;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use prequal_testbed::envoy_binary;

/// What `clock_gettime` and `gettimeofday` become.
const SOURCE: &str = include_str!("clock.c");

/// An Envoy whose clock can be stepped, made in `dir`: its program, and the file for [`step`]. Needs a C compiler.
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

/// Envoy's wall clock jumps by so many seconds.
pub(crate) fn step(offset: &Path, seconds: i64) -> Result<()> {
    let file = fs::File::options().read(true).write(true).open(offset)?;
    let mut now = [0; size_of::<i64>()];
    file.read_exact_at(&mut now, 0)?;
    Ok(file.write_all_at(&(i64::from_ne_bytes(now) + seconds).to_ne_bytes(), 0)?)
}
