//! Where things are: the workspace, and the folders under `target/` that the commands fill.

use std::path::{Path, PathBuf};

/// Root of the workspace: the parent of this crate's folder.
pub(crate) fn root() -> &'static Path {
    // Compile time is enough: cargo rebuilds this crate when the checkout moves.
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// Caches and outputs of these commands. Not moved by `CARGO_TARGET_DIR`: the documented paths stay true.
pub(crate) fn target() -> PathBuf {
    root().join("target")
}

/// What `cargo xtask build` makes: `probe-agent` and `prequal_filter.wasm`.
pub(crate) fn dist() -> PathBuf {
    target().join("dist")
}

/// Modules made for tests only. Kept apart so that nothing in [`dist`] can crash on request.
pub(crate) fn dist_test() -> PathBuf {
    target().join("dist-test")
}

/// What `cargo xtask dist` makes.
pub(crate) fn release_dist() -> PathBuf {
    target().join("release-dist")
}
