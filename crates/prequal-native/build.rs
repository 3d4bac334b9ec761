//! Links the unwinder into the module: Envoy's distroless image has no `libgcc_s.so`.

fn main() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("link");
    println!("cargo:rerun-if-changed={}", folder.display());
    // The linker finds the script `link/libgcc_s.so` before the system's library of the same name.
    println!("cargo:rustc-cdylib-link-arg=-L{}", folder.display());
}
