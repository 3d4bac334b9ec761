//! Paths: the workspace, and the folders under `target/` that the commands fill.

use std::path::{Path, PathBuf};

/// Root of the workspace: the parent of this crate's folder.
pub(crate) fn root() -> &'static Path {
    // The path at compile time is enough: cargo rebuilds this crate when the checkout moves.
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// Folder for caches and outputs of these commands. `CARGO_TARGET_DIR` does not move it, so that the documented paths
/// stay valid.
pub(crate) fn target() -> PathBuf {
    root().join("target")
}

/// Output of `cargo xtask build`: the programs and modules that a user deploys.
pub(crate) fn dist() -> PathBuf {
    target().join("dist")
}

/// Modules built only for tests. Kept apart so that nothing in [`dist`] can crash on request.
pub(crate) fn dist_test() -> PathBuf {
    target().join("dist-test")
}

/// Output of `cargo xtask dist`.
pub(crate) fn release_dist() -> PathBuf {
    target().join("release-dist")
}
