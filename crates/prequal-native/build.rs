//! Links the unwinder into the module: Envoy's distroless image has no `libgcc_s.so`.

fn main() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("link");
    println!("cargo:rerun-if-changed={}", folder.display());
    // The linker finds the script of this name before the system's library.
    println!("cargo:rustc-cdylib-link-arg=-L{}", folder.display());
}
