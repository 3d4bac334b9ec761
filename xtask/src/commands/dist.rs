//! `cargo xtask dist`: builds everything that a release consists of, into `target/release-dist/`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use base64::Engine as _;
use serde_json::json;
use sha2::{Digest as _, Sha256};

use crate::commands::build::{self, WasmArgs};
use crate::commands::native;
use crate::commands::platform::{PLATFORMS, Platform};
use crate::toolchain::{NATIVE_TARGET, Toolchain};
use crate::{progress, run, workspace};

pub(super) mod changelog;
mod manifests;
mod oci;
mod provenance;
pub(crate) mod rehearsal;
mod sbom;

use oci::{Entry, Image};

/// Builds the artefacts of a release, each named with the version, and writes SHA256SUMS over them.
///
/// The release contains: prequal_filter-VERSION.wasm; the same module as an OCI image that Istio's WasmPlugin and Envoy
/// Gateway fetch (a layout, as a folder and as a tar); for each architecture a tar.gz of the statically linked programs
/// and the native module; an OCI image of the agent and one of the native module, each for all architectures; the
/// manifests of envoy-configs/ and the Helm chart, which name these images by digest (Envoy's image too with
/// --envoy-digest); a CycloneDX bill of materials; the version's section of CHANGELOG.md; and an in-toto statement
/// about the origin of all these files. Needs no container engine. Building for an architecture other than this
/// machine's needs a cross linker (`apt-get install gcc-aarch64-linux-gnu`); if it is missing, a line says so.
///
/// The same commit and compilers give the same bytes. Timestamps are the commit's, or SOURCE_DATE_EPOCH.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Output folder; emptied first if it holds an earlier run
    #[arg(long, value_name = "DIR", default_value_os_t = workspace::release_dist())]
    out: PathBuf,

    /// Build the module again from nothing (with rustup's compiler, from a copy of the sources in another folder), pack
    /// everything again, and fail unless every byte is the same
    #[arg(long)]
    check: bool,

    /// Sign the statement about the release's origin with this private key (PEM, ECDSA on P-256). Refused if the
    /// sources differ from the commit
    #[arg(long, value_name = "KEY")]
    sign: Option<PathBuf>,

    /// Digest of Envoy's image, `sha256:` and 64 hexadecimal digits, for the manifests and the chart; without it they
    /// name that image by tag. No registry is asked
    #[arg(long, value_name = "DIGEST", value_parser = manifests::digest)]
    envoy_digest: Option<String>,

    /// Build nothing: verify the release in --out against this public key (PEM). Files may be missing. Needs no network
    #[arg(long, value_name = "KEY", conflicts_with_all = ["check", "sign", "envoy_digest"])]
    verify: Option<PathBuf>,

    #[command(flatten)]
    wasm: WasmArgs,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if let Some(key) = &args.verify {
        progress::headline(provenance::verify(&args.out, key)?);
        return Ok(());
    }
    progress::headline("building the release");
    let started = Instant::now();
    let toolchain = Toolchain::prepare(args.wasm.toolchain)?;
    let mut parts = Parts::build(&toolchain, &PLATFORMS, "ship")?;
    parts.envoy.clone_from(&args.envoy_digest);
    if parts.envoy.is_none() {
        progress::say("the manifests name envoyproxy/envoy by tag: --envoy-digest pins it");
    }
    let files = pack(&parts, &args.out)?;
    for file in &files {
        progress::say(format_args!(
            "{file} ({} KB)",
            fs::metadata(args.out.join(file))?.len().div_ceil(1024)
        ));
    }
    let seconds = progress::seconds(started.elapsed());
    progress::headline(format_args!("{}: {} {} in {seconds}", args.out.display(), NAME, parts.stamp.version));
    if args.check {
        check(&toolchain, &mut parts, &args.out)?;
    }
    if let Some(key) = &args.sign {
        ensure!(!parts.stamp.is_dirty(), "the sources differ from the commit: refusing to sign");
        progress::say(provenance::sign(&args.out, &parts.stamp.version, key)?);
    }
    Ok(())
}

/// The inputs that a release is packed from.
struct Parts {
    module: Vec<u8>,
    builds: Vec<Build>,
    bill: serde_json::Value,
    notes: String,
    /// Digest of Envoy's image, if the manifests are to name that image by digest.
    envoy: Option<String>,
    stamp: Stamp,
}

impl Parts {
    /// Builds everything for those of `platforms` that this machine can build for; the programs with this `profile`.
    fn build(toolchain: &Toolchain, platforms: &[Platform], profile: &str) -> Result<Self> {
        let stamp = Stamp::of_commit(toolchain)?;
        let module = fs::read(build::filter(toolchain, "")?)?;
        let mut builds = Vec::new();
        let mut targets = vec![NATIVE_TARGET];
        for platform in platforms {
            match platform.missing()? {
                Some(why) => progress::say(format_args!("{}: not built: {why}", platform.arch)),
                None => {
                    builds.push(Build::new(*platform, profile)?);
                    targets.push(platform.triple);
                }
            }
        }
        ensure!(!builds.is_empty(), "no program could be built on this machine");
        let bill = sbom::document(&targets, &system_libraries()?, &stamp)?;
        Ok(Self { module, builds, bill, notes: notes(&stamp)?, envoy: None, stamp })
    }
}

/// The identity of a release, the same in every run on one commit.
#[derive(Clone, Debug)]
struct Stamp {
    version: String,
    /// Hash of the commit, with `-dirty` appended if the sources differ from it.
    commit: String,
    /// Time of the commit, in seconds since 1970.
    epoch: u64,
    /// The same time in RFC 3339 format.
    time: String,
    /// The compiler that built the module.
    compiler: String,
}

impl Stamp {
    fn of_commit(toolchain: &Toolchain) -> Result<Self> {
        let git = |args: &[&str]| run::output(run::tool("git").args(args));
        let mut commit = git(&["rev-parse", "HEAD"])?.trim().to_owned();
        if !git(&["status", "--porcelain"])?.is_empty() {
            progress::say(
                "the sources differ from the commit: this is not a release, and its bill of materials says so",
            );
            commit.push_str(DIRTY);
        }
        let epoch = match std::env::var("SOURCE_DATE_EPOCH") {
            Ok(epoch) => epoch,
            Err(_) => git(&["log", "-1", "--format=%ct"])?,
        };
        let epoch: u64 = epoch.trim().parse().context("SOURCE_DATE_EPOCH must be seconds since 1970")?;
        let time =
            run::output(run::tool("date").args(["-u", "-d", &format!("@{epoch}"), "+%Y-%m-%dT%H:%M:%SZ"]))?;
        Ok(Self {
            version: VERSION.to_owned(),
            commit,
            epoch,
            time: time.trim().to_owned(),
            compiler: toolchain.version()?,
        })
    }

    /// Whether the sources differ from the commit.
    fn is_dirty(&self) -> bool {
        self.commit.ends_with(DIRTY)
    }

    #[cfg(test)]
    fn example() -> Self {
        Self {
            version: VERSION.to_owned(),
            commit: "0123456789abcdef0123456789abcdef01234567".to_owned(),
            epoch: 1_800_000_000,
            time: "2027-01-15T08:00:00Z".to_owned(),
            compiler: "rustc 1.95.0".to_owned(),
        }
    }
}

/// What a release ships for one architecture.
struct Build {
    platform: Platform,
    programs: Vec<Entry>,
    /// The native module.
    native: Entry,
}

impl Build {
    fn new(platform: Platform, profile: &str) -> Result<Self> {
        let toolchain = Toolchain::for_programs(platform.triple)?;
        let linker = platform.cross_linker();
        let files = toolchain.build_programs(profile, platform.triple, linker, &PROGRAMS)?;
        let entry = |((_, program), file): ((&str, &str), PathBuf)| {
            Ok(Entry { path: program.to_owned(), bytes: fs::read(file)?, executable: true })
        };
        let programs = PROGRAMS.into_iter().zip(files).map(entry).collect::<Result<_>>()?;
        let native = native::module(&toolchain, &platform, "")?;
        // Envoy loads this file; nothing executes it.
        let native = Entry { path: NATIVE.to_owned(), bytes: fs::read(native)?, executable: false };
        Ok(Self { platform, programs, native })
    }
}

/// The version's section of the changelog, with the commit.
fn notes(stamp: &Stamp) -> Result<String> {
    let text = fs::read_to_string(workspace::root().join("CHANGELOG.md"))?;
    let (date, section) = changelog::section(&text, &stamp.version)?;
    if !changelog::is_dated(date) {
        progress::say(format_args!("CHANGELOG.md: {} has no date yet", stamp.version));
    }
    Ok(format!("# {NAME} {}\n\n{section}\n\nCommit {}.\n", stamp.version, stamp.commit))
}

/// Versions of this machine's libraries that are linked into the programs and the native module.
fn system_libraries() -> Result<sbom::System> {
    let said = run::output(run::tool("ldd").arg("--version"))?;
    let libc = said.lines().next().and_then(|line| Some(line.rsplit(' ').next()?.to_owned()));
    let libgcc = run::output(run::tool("cc").arg("-dumpfullversion"))?.trim().to_owned();
    Ok(sbom::System { libc: libc.context("ldd names no version")?, libgcc })
}

/// Writes everything into `out` and verifies the images; returns the files' names in order.
fn pack(parts: &Parts, out: &Path) -> Result<Vec<String>> {
    empty(out)?;
    let (stamp, version) = (&parts.stamp, &parts.stamp.version);
    let mut files: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    files.insert(format!("prequal_filter-{version}.wasm"), parts.module.clone());
    files.insert(format!("{NAME}-{version}.cdx.json"), serde_json::to_vec_pretty(&parts.bill)?);
    files.insert(format!("CHANGELOG-{version}.md"), parts.notes.clone().into_bytes());

    for build in &parts.builds {
        let mut content = build.programs.clone();
        content.extend([build.native.clone(), licence()?]);
        files.insert(
            format!("{NAME}-{version}-{}-linux.tar.gz", build.platform.arch),
            oci::gzip(&oci::tar(&content, stamp)?)?,
        );
    }

    let module = format!("prequal_filter-{version}.oci");
    let module_digest = oci::write(&out.join(&module), &[module_image(parts)], stamp)?;
    verify_module(&out.join(&module), &parts.module)?;
    let agent = format!("probe-agent-{version}.oci");
    let images: Vec<Image> = parts.builds.iter().map(|build| agent_image(build, stamp)).collect();
    let agent_digest = oci::write(&out.join(&agent), &images, stamp)?;
    verify_agent(&out.join(&agent), &parts.builds)?;
    let native = format!("prequal_native-{version}.oci");
    let images: Vec<Image> = parts.builds.iter().map(|build| native_image(build, stamp)).collect();
    let native_digest = oci::write(&out.join(&native), &images, stamp)?;
    verify_native(&out.join(&native), &parts.builds)?;
    let digests = manifests::Digests {
        module: &module_digest,
        native: &native_digest,
        agent: &agent_digest,
        envoy: parts.envoy.as_deref(),
    };
    let manifests = manifests::pinned(&workspace::root().join("envoy-configs"), version, &digests)?;
    files.insert(format!("{NAME}-manifests-{version}.tar.gz"), oci::gzip(&oci::tar(&manifests, stamp)?)?);
    let chart = manifests::chart(&workspace::root().join("charts/prequal"), version, &digests)?;
    files.insert(format!("{NAME}-{version}.tgz"), oci::gzip(&oci::tar(&chart, stamp)?)?);
    for layout in [module, agent, native] {
        files.insert(format!("{layout}.tar"), oci::tar(&oci::entries_of(&out.join(&layout))?, stamp)?);
    }

    let images = [
        ("prequal_filter", &*module_digest),
        ("prequal_native", &*native_digest),
        ("probe-agent", &*agent_digest),
    ];
    let statement = provenance::statement(&files, &images, parts.envoy.as_deref(), stamp)?;
    files.insert(provenance::statement_name(version), statement);

    let mut sums = String::new();
    for (name, bytes) in &files {
        fs::write(out.join(name), bytes)?;
        sums.push_str(&format!("{:x}  {name}\n", Sha256::digest(bytes)));
    }
    fs::write(out.join(SUMS), sums)?;
    Ok(files.into_keys().chain([SUMS.to_owned()]).collect())
}

/// Empties or creates the folder `out`; fails if it holds anything but an earlier run's output.
fn empty(out: &Path) -> Result<()> {
    if out.exists() && fs::read_dir(out)?.next().is_some() {
        ensure!(out.join(SUMS).is_file(), "{} is not empty and was not made by this command", out.display());
        fs::remove_dir_all(out)?;
    }
    Ok(fs::create_dir_all(out)?)
}

fn module_image(parts: &Parts) -> Image {
    let mut annotations = annotations("prequal_filter", "Prequal, filter for Envoy", &parts.stamp);
    annotations.insert("module.wasm.image/variant", "compat".to_owned());
    Image {
        // A module has no architecture, but container tools select an image by architecture. Other builders of module
        // images also write this one.
        architecture: "amd64",
        files: vec![Entry { path: PLUGIN.to_owned(), bytes: parts.module.clone(), executable: false }],
        runs: json!({}),
        annotations,
    }
}

fn verify_module(layout: &Path, module: &[u8]) -> Result<()> {
    let images = oci::verify(layout)?;
    let [image] = images.as_slice() else { bail!("{} images of the module", images.len()) };
    ensure!(
        image.annotations["module.wasm.image/variant"] == "compat",
        "the image does not call itself compat"
    );
    let names: Vec<&String> = image.files.keys().collect();
    ensure!(names == [PLUGIN], "the image holds {names:?}, not {PLUGIN} alone");
    ensure!(image.files[PLUGIN] == module, "{PLUGIN} in the image is not the module");
    Ok(())
}

/// The programs, linked statically, and the certificate authorities that `--upstream-tls` trusts by default.
fn agent_image(build: &Build, stamp: &Stamp) -> Image {
    Image {
        architecture: build.platform.oci,
        files: build.programs.iter().cloned().chain([authorities()]).collect(),
        // An unprivileged user, by number: there is no /etc/passwd.
        runs: json!({"User": "65532:65532", "Entrypoint": ["/probe-agent"]}),
        annotations: annotations("probe-agent", "Prequal, agent beside a backend", stamp),
    }
}

fn verify_agent(layout: &Path, builds: &[Build]) -> Result<()> {
    for (image, build) in verified(layout, builds)? {
        for program in &build.programs {
            ensure!(
                image.files.get(&program.path) == Some(&program.bytes),
                "{} in the image differs",
                program.path
            );
        }
        ensure!(
            image.files.get(AUTHORITIES) == Some(&authorities().bytes),
            "the image does not hold the authorities"
        );
        let entry =
            image.runs["Entrypoint"][0].as_str().and_then(|path| path.strip_prefix('/')).unwrap_or_default();
        ensure!(image.files.contains_key(entry), "the image starts `{entry}`, which it does not hold");
    }
    Ok(())
}

/// The native module alone: mounted as a volume, the image is a folder for `ENVOY_DYNAMIC_MODULES_SEARCH_PATH`.
fn native_image(build: &Build, stamp: &Stamp) -> Image {
    Image {
        architecture: build.platform.oci,
        files: vec![build.native.clone()],
        runs: json!({}),
        annotations: annotations("prequal_native", "Prequal, dynamic module for Envoy", stamp),
    }
}

fn verify_native(layout: &Path, builds: &[Build]) -> Result<()> {
    for (image, build) in verified(layout, builds)? {
        let names: Vec<&String> = image.files.keys().collect();
        ensure!(names == [NATIVE], "the image holds {names:?}, not {NATIVE} alone");
        ensure!(image.files[NATIVE] == build.native.bytes, "{NATIVE} in the image differs");
    }
    Ok(())
}

/// The images of a layout, each with the build of its architecture.
fn verified<'a>(layout: &Path, builds: &'a [Build]) -> Result<Vec<(oci::Verified, &'a Build)>> {
    let images = oci::verify(layout)?;
    ensure!(images.len() == builds.len(), "{}: {} images", layout.display(), images.len());
    let build_of = |image: oci::Verified| {
        let build = builds.iter().find(|build| build.platform.oci == image.architecture);
        Ok((image, build.context("an architecture is missing")?))
    };
    images.into_iter().map(build_of).collect()
}

/// Mozilla's certificate authorities as a PEM bundle.
fn authorities() -> Entry {
    let mut text = String::new();
    for certificate in webpki_root_certs::TLS_SERVER_ROOT_CERTS {
        text.push_str("-----BEGIN CERTIFICATE-----\n");
        let base64 = base64::engine::general_purpose::STANDARD.encode(certificate);
        for line in base64.as_bytes().chunks(64) {
            text.extend(line.iter().map(|byte| char::from(*byte)));
            text.push('\n');
        }
        text.push_str("-----END CERTIFICATE-----\n");
    }
    Entry { path: AUTHORITIES.to_owned(), bytes: text.into_bytes(), executable: false }
}

fn annotations(title: &str, description: &str, stamp: &Stamp) -> BTreeMap<&'static str, String> {
    [
        ("org.opencontainers.image.created", &*stamp.time),
        ("org.opencontainers.image.description", description),
        ("org.opencontainers.image.licenses", "Apache-2.0"),
        ("org.opencontainers.image.revision", &stamp.commit),
        ("org.opencontainers.image.title", title),
        ("org.opencontainers.image.version", &stamp.version),
    ]
    .map(|(key, value)| (key, value.to_owned()))
    .into()
}

fn licence() -> Result<Entry> {
    let bytes = fs::read(workspace::root().join("LICENSE"))?;
    Ok(Entry { path: "LICENSE".to_owned(), bytes, executable: false })
}

/// Builds the module again from nothing, packs everything again, and compares.
fn check(toolchain: &Toolchain, parts: &mut Parts, first: &Path) -> Result<()> {
    progress::headline("building everything again, from nothing");
    let scratch = workspace::target().join(format!("dist-check-{}", std::process::id()));
    let compared = again(toolchain, parts, &scratch).and_then(|second| {
        Ok((fs::read_to_string(first.join(SUMS))?, fs::read_to_string(second.join(SUMS))?))
    });
    let removed = fs::remove_dir_all(&scratch);
    let (first, second) = compared?;
    removed?;
    let differ: Vec<&str> =
        first.lines().filter(|line| !second.lines().any(|other| other == *line)).collect();
    ensure!(
        differ.is_empty() && first.lines().count() == second.lines().count(),
        "not reproducible:\n{}",
        differ.join("\n")
    );
    progress::say(format_args!("{} files, identical in every byte", first.lines().count()));
    Ok(())
}

fn again(toolchain: &Toolchain, parts: &mut Parts, scratch: &Path) -> Result<PathBuf> {
    let (sources, out) = (scratch.join("a folder of another name"), scratch.join("out"));
    let root = match toolchain {
        Toolchain::Native => {
            copy_sources(&sources)?;
            sources.as_path()
        }
        // This compiler's standard library is inside the workspace and is built with the module. Symbol names depend on
        // the path of the library.
        Toolchain::Debian(_) => workspace::root(),
    };
    parts.module = fs::read(toolchain.build_filter_of(root, &scratch.join("build"), "")?)?;
    pack(parts, &out)?;
    Ok(out)
}

/// Copies every file that git tracks, and new files that it does not ignore.
fn copy_sources(to: &Path) -> Result<()> {
    let mut git = run::tool("git");
    let listed = run::output(git.args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"]))?;
    for file in listed.split('\0').filter(|file| !file.is_empty()) {
        let (from, to) = (workspace::root().join(file), to.join(file));
        // A deleted file is listed until the deletion is committed.
        if from.is_file() {
            fs::create_dir_all(to.parent().context("a file in a folder")?)?;
            fs::copy(from, to)?;
        }
    }
    Ok(())
}

/// Packages of the workspace whose code is shipped.
fn packages() -> impl Iterator<Item = &'static str> {
    ["prequal-filter", "prequal-native"].into_iter().chain(PROGRAMS.into_iter().map(|(package, _)| package))
}

/// The package that provides the authorities in the agent's image.
const AUTHORITIES_PACKAGE: &str = "webpki-root-certs";

const NAME: &str = "prequal";

/// All packages of the workspace have one version.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Package and program.
const PROGRAMS: [(&str, &str); 3] =
    [("probe-agent", "probe-agent"), ("plb-netlink", "plb"), ("prequal-cli", "prequal")];

/// File name of the native module, by which Envoy finds it.
const NATIVE: &str = "libprequal_native.so";

/// The filter's file name in an image, as the Wasm Image Specification requires.
const PLUGIN: &str = "plugin.wasm";

/// Path of OpenSSL's bundle on Debian, which `rustls-native-certs` also finds.
const AUTHORITIES: &str = "etc/ssl/certs/ca-certificates.crt";

const SUMS: &str = "SHA256SUMS";

/// Suffix of the commit if the sources differ from it.
const DIRTY: &str = "-dirty";

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    pub(super) fn parts() -> Parts {
        let program = |name: &str, content: &str| Entry {
            path: name.to_owned(),
            bytes: content.as_bytes().to_vec(),
            executable: true,
        };
        Parts {
            module: b"\0asm\x01\0\0\0".to_vec(),
            builds: PLATFORMS
                .map(|platform| Build {
                    platform,
                    programs: vec![program("probe-agent", platform.arch), program("plb", "x")],
                    native: program(NATIVE, platform.arch),
                })
                .into(),
            bill: json!({"bomFormat": "CycloneDX"}),
            notes: "notes".to_owned(),
            envoy: None,
            stamp: Stamp::example(),
        }
    }

    #[test]
    fn two_runs_give_identical_bytes() {
        let (one, two) = (TempDir::new().expect("a folder"), TempDir::new().expect("a folder"));
        let files = pack(&parts(), one.path()).expect("packed");
        assert_eq!(files, pack(&parts(), two.path()).expect("packed"));
        assert_eq!(oci::entries_of(one.path()).expect("files"), oci::entries_of(two.path()).expect("files"));
    }

    #[test]
    fn the_sums_match_the_files() {
        let dir = TempDir::new().expect("a folder");
        let files = pack(&parts(), dir.path()).expect("packed");
        let sums = fs::read_to_string(dir.path().join(SUMS)).expect("sums");
        assert_eq!(sums.lines().count(), files.len() - 1, "all but itself");
        assert!(run::succeeds(
            run::tool("sha256sum").args(["--check", "--strict", SUMS]).current_dir(dir.path())
        ));
        fs::write(dir.path().join(&files[0]), b"other").expect("written");
        assert!(!run::succeeds(
            run::tool("sha256sum").args(["--check", "--strict", SUMS]).current_dir(dir.path())
        ));
    }

    #[test]
    fn an_image_with_another_module_is_refused() {
        let dir = TempDir::new().expect("a folder");
        let made = parts();
        oci::write(dir.path(), &[module_image(&made)], &made.stamp).expect("written");
        verify_module(dir.path(), &made.module).expect("the module");
        assert!(verify_module(dir.path(), b"\0asm\x02\0\0\0").is_err());
    }

    #[test]
    fn the_agents_image_holds_the_authorities() {
        let dir = TempDir::new().expect("a folder");
        let made = parts();
        let mut images: Vec<Image> =
            made.builds.iter().map(|build| agent_image(build, &made.stamp)).collect();
        oci::write(dir.path(), &images, &made.stamp).expect("written");
        verify_agent(dir.path(), &made.builds).expect("an image");
        let bundle = dir.path().join("bundle.pem");
        fs::write(&bundle, authorities().bytes).expect("written");
        let openssl = run::tool("openssl").args(["crl2pkcs7", "-nocrl", "-certfile"]).arg(&bundle).output();
        // Check with a second reader, if there is one.
        if let Ok(openssl) = openssl {
            assert!(openssl.status.success(), "{openssl:?}");
        }
        images.iter_mut().for_each(|image| image.files.retain(|file| file.path != AUTHORITIES));
        fs::remove_dir_all(dir.path()).expect("removed");
        oci::write(dir.path(), &images, &made.stamp).expect("written");
        let error = verify_agent(dir.path(), &made.builds).expect_err("no authorities").to_string();
        assert!(error.contains("does not hold the authorities"), "{error}");
    }

    #[test]
    fn only_a_folder_of_an_earlier_run_is_emptied() {
        let dir = TempDir::new().expect("a folder");
        fs::write(dir.path().join("mine"), b"x").expect("written");
        let error = pack(&parts(), dir.path()).expect_err("a folder with other things").to_string();
        assert!(error.contains("was not made by this command"), "{error}");
        assert!(dir.path().join("mine").is_file());
    }
}
