//! The origin of a release as an in-toto statement with SLSA provenance, and a signature over it.
//!
//! The statement names every file of the release and its images by digest, with the commit, `Cargo.lock` and the
//! compiler that they were made from. It is the same in every run. The signature is a DSSE envelope with ECDSA on
//! P-256, the format that cosign writes and reads. `openssl` computes the signature, so that no key passes through this
//! project's code. One envelope covers the module, the programs and the images.
//!
//! Not covered here: who may sign, transparency logs, and signatures beside the images in a registry
//! (docs/guide/releasing.md).

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, Result, bail, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::{DIRTY, NAME, SUMS, Stamp, oci};
use crate::{run, workspace};

/// The statement about `files` and `images`, each given as name and digest. `envoy` is the digest of Envoy's image that
/// the manifests name.
pub(super) fn statement(
    files: &BTreeMap<String, Vec<u8>>,
    images: &[(&str, &str)],
    envoy: Option<&str>,
    stamp: &Stamp,
) -> Result<Vec<u8>> {
    let mut subjects = Vec::new();
    for (name, bytes) in files {
        subjects.push(json!({"name": name, "digest": {"sha256": sha256(bytes)}}));
    }
    for (name, digest) in images {
        let hex = digest.strip_prefix("sha256:").context("a digest by SHA-256")?;
        subjects.push(json!({"name": image_name(name, &stamp.version), "digest": {"sha256": hex}}));
    }
    let lock = fs::read(workspace::root().join("Cargo.lock"))?;
    let statement = json!({
        "_type": STATEMENT,
        "subject": subjects,
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:prequal:cargo-xtask-dist:1",
                "externalParameters": {"version": stamp.version, "envoyDigest": envoy},
                "internalParameters": {"compilerOfTheModule": stamp.compiler},
                "resolvedDependencies": [
                    {
                        "name": "source",
                        "digest": {"gitCommit": stamp.commit.trim_end_matches(DIRTY)},
                        "annotations": {"changed": stamp.is_dirty()},
                    },
                    {"name": "Cargo.lock", "digest": {"sha256": sha256(&lock)}},
                ],
            },
            "runDetails": {"builder": {"id": "urn:prequal:the-machine-of-the-signer"}},
        },
    });
    Ok(serde_json::to_vec_pretty(&statement)?)
}

/// Signs the release in `dir` with the private key in `key` (PEM); returns the name of the file that it wrote.
pub(super) fn sign(dir: &Path, version: &str, key: &Path) -> Result<String> {
    let payload = fs::read(dir.join(statement_name(version)))?;
    ensure!(is_p256(key, &[])?, "{}: no private key on the curve P-256 (prime256v1)", key.display());
    let signed = Scratch::new()?;
    fs::write(signed.file("message"), authenticated(PAYLOAD, &payload))?;
    let mut openssl = run::tool("openssl");
    openssl.args(["dgst", "-sha256", "-sign"]).arg(key).arg("-out").arg(signed.file("signature"));
    run::output(openssl.arg(signed.file("message"))).context("signing")?;
    let signature = STANDARD.encode(fs::read(signed.file("signature"))?);
    let envelope = json!({
        "payloadType": PAYLOAD,
        "payload": STANDARD.encode(&payload),
        "signatures": [{"sig": signature}],
    });
    let name = envelope_name(version);
    fs::write(dir.join(&name), format!("{envelope}\n"))?;
    Ok(name)
}

/// Verifies the release in `dir` with the public key in `key` (PEM), without a network; returns a line that says what
/// was verified. Missing files are allowed; files that the statement does not name are an error.
pub(super) fn verify(dir: &Path, key: &Path) -> Result<String> {
    let (statement, payload) = signed_statement(dir, key)?;
    ensure!(statement["_type"] == STATEMENT, "what is signed is not an in-toto statement of version 1");
    ensure!(statement["predicateType"] == PREDICATE, "what is signed is not SLSA provenance of version 1");
    let mut subjects = BTreeMap::new();
    for subject in statement["subject"].as_array().into_iter().flatten() {
        let name = subject["name"].as_str().context("a subject without a name")?;
        let digest = subject["digest"]["sha256"].as_str().with_context(|| format!("{name} has no digest"))?;
        subjects.insert(name, digest);
    }
    let version = statement["predicate"]["buildDefinition"]["externalParameters"]["version"]
        .as_str()
        .context("the statement names no version")?;
    let (mut files, mut images) = (0, 0);
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type()?.is_dir() {
            let image = name.strip_suffix(&format!("-{version}.oci"));
            let image = image.with_context(|| format!("{name}: a folder that is not signed"))?;
            let expected = subjects.get(&*image_name(image, version));
            let expected = expected.with_context(|| format!("the image {image} is not signed"))?;
            oci::verify(&entry.path()).with_context(|| name.clone())?;
            let digest = oci::tagged(&entry.path())?;
            ensure!(digest == format!("sha256:{expected}"), "{name} is not the image that was signed");
            images += 1;
            continue;
        }
        let bytes = fs::read(entry.path())?;
        if name == statement_name(version) {
            ensure!(bytes == payload, "{name} is not what was signed");
        } else if name == SUMS {
            sums_agree(&String::from_utf8_lossy(&bytes), &subjects, version, &payload)?;
        } else if name != envelope_name(version) {
            let expected = *subjects.get(&*name).with_context(|| format!("{name} is not signed"))?;
            ensure!(sha256(&bytes) == expected, "{name} is not the file that was signed");
            files += 1;
        }
    }
    let commit = statement["predicate"]["buildDefinition"]["resolvedDependencies"][0]["digest"]["gitCommit"]
        .as_str()
        .context("the statement names no commit")?;
    Ok(format!("{NAME} {version} of commit {commit}: {files} files and {images} images are what was signed"))
}

/// The content of the only envelope in `dir`, if its signature is valid.
fn signed_statement(dir: &Path, key: &Path) -> Result<(Value, Vec<u8>)> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        names.extend(name.ends_with(ENVELOPE).then_some(name));
    }
    let [name] = names.as_slice() else { bail!("{} files end in {ENVELOPE}, not one", names.len()) };
    let text = fs::read_to_string(dir.join(name))?;
    let envelope: Value =
        serde_json::from_str(&text).with_context(|| format!("{name} is not an envelope"))?;
    ensure!(envelope["payloadType"] == PAYLOAD, "{name} holds no in-toto statement");
    let decoded = |value: &Value| -> Result<Vec<u8>> {
        STANDARD
            .decode(value.as_str().unwrap_or_default())
            .with_context(|| format!("{name} is not an envelope"))
    };
    let payload = decoded(&envelope["payload"])?;
    ensure!(is_p256(key, &["-pubin"])?, "{}: no public key on the curve P-256 (prime256v1)", key.display());
    let scratch = Scratch::new()?;
    fs::write(scratch.file("message"), authenticated(PAYLOAD, &payload))?;
    for signature in envelope["signatures"].as_array().into_iter().flatten() {
        fs::write(scratch.file("signature"), decoded(&signature["sig"])?)?;
        let mut openssl = run::tool("openssl");
        openssl.args(["dgst", "-sha256", "-verify"]).arg(key).arg("-signature");
        if run::succeeds(openssl.arg(scratch.file("signature")).arg(scratch.file("message"))) {
            let statement = serde_json::from_slice(&payload).context("what is signed is not JSON")?;
            return Ok((statement, payload));
        }
    }
    bail!("{name}: no signature was made with the key in {}", key.display())
}

/// Checks that SHA256SUMS agrees with the signed statement.
fn sums_agree(sums: &str, subjects: &BTreeMap<&str, &str>, version: &str, payload: &[u8]) -> Result<()> {
    for line in sums.lines() {
        let (sum, name) = line.split_once("  ").with_context(|| format!("{SUMS}: `{line}`"))?;
        let same = match subjects.get(name) {
            Some(expected) => sum == *expected,
            None => name == statement_name(version) && sum == sha256(payload),
        };
        ensure!(same, "{SUMS}: the sum of {name} is not what was signed");
    }
    Ok(())
}

/// The bytes that DSSE signs.
fn authenticated(kind: &str, payload: &[u8]) -> Vec<u8> {
    let mut message = format!("DSSEv1 {} {kind} {} ", kind.len(), payload.len()).into_bytes();
    message.extend_from_slice(payload);
    message
}

/// Whether the key is on the curve that cosign uses. Fails if openssl is missing or cannot read the key.
fn is_p256(key: &Path, arguments: &[&str]) -> Result<bool> {
    ensure!(
        run::succeeds(run::tool("openssl").arg("version")),
        "openssl is missing: apt-get install --no-install-recommends openssl"
    );
    let mut openssl = run::tool("openssl");
    openssl.args(["pkey", "-noout", "-text_pub", "-in"]).arg(key).args(arguments);
    let said = run::output(&mut openssl)
        .with_context(|| format!("openssl cannot read {} as such a key", key.display()))?;
    Ok(said.contains("prime256v1"))
}

pub(super) fn statement_name(version: &str) -> String {
    format!("{NAME}-{version}.provenance.json")
}

fn envelope_name(version: &str) -> String {
    format!("{NAME}-{version}{ENVELOPE}")
}

fn image_name(name: &str, version: &str) -> String {
    format!("image {name}:{version}")
}

fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

/// Temporary files for openssl; removed on drop.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("signing-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let scratch = Self(workspace::target().join(name));
        fs::create_dir_all(&scratch.0)?;
        Ok(scratch)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // The folder contains no secrets.
        let _ = fs::remove_dir_all(&self.0);
    }
}

const STATEMENT: &str = "https://in-toto.io/Statement/v1";
const PREDICATE: &str = "https://slsa.dev/provenance/v1";
const PAYLOAD: &str = "application/vnd.in-toto+json";
const ENVELOPE: &str = ".intoto.jsonl";

#[cfg(test)]
mod tests {
    use super::super::tests::parts;
    use super::super::{VERSION, pack};
    use super::*;
    use tempfile::TempDir;

    /// A signed release, and the keys.
    struct Release {
        dir: TempDir,
    }

    impl Release {
        fn signed() -> Self {
            let release = Self { dir: TempDir::new().expect("a folder") };
            pack(&parts(), &release.out()).expect("packed");
            let private = release.key("a", "P-256");
            sign(&release.out(), VERSION, &private).expect("signed");
            release
        }

        fn out(&self) -> PathBuf {
            self.dir.path().join("out")
        }

        fn file(&self, name: &str) -> PathBuf {
            self.out().join(name)
        }

        /// Makes a key pair on `curve` and returns the file of the private key. The public key's file is beside it.
        fn key(&self, name: &str, curve: &str) -> PathBuf {
            let (private, public) = (self.dir.path().join(name), self.public(name));
            let curve = format!("ec_paramgen_curve:{curve}");
            let mut openssl = run::tool("openssl");
            openssl.args(["genpkey", "-algorithm", "EC", "-pkeyopt", &curve, "-out"]).arg(&private);
            run::output(&mut openssl).expect("openssl is installed");
            let mut openssl = run::tool("openssl");
            openssl.args(["pkey", "-pubout", "-in"]).arg(&private).arg("-out").arg(&public);
            run::output(&mut openssl).expect("a public key");
            private
        }

        fn public(&self, name: &str) -> PathBuf {
            self.dir.path().join(format!("{name}.pub"))
        }

        fn verify(&self) -> Result<String> {
            verify(&self.out(), &self.public("a"))
        }

        #[track_caller]
        fn refused(&self, because: &str) {
            let error = format!("{:#}", self.verify().expect_err("a refusal"));
            assert!(error.contains(because), "{error}");
        }
    }

    #[test]
    fn a_release_with_missing_files_is_verified() {
        let release = Release::signed();
        let said = release.verify().expect("verified");
        assert!(said.contains(&format!("of commit {}", Stamp::example().commit)), "{said}");
        assert!(said.contains("3 images"), "{said}");
        for file in [format!("prequal_filter-{VERSION}.wasm"), statement_name(VERSION), SUMS.to_owned()] {
            fs::remove_file(release.file(&file)).expect("removed");
        }
        fs::remove_dir_all(release.file(&format!("probe-agent-{VERSION}.oci"))).expect("removed");
        assert!(release.verify().expect("verified").contains("2 images"));
    }

    #[test]
    fn changed_files_added_files_and_other_keys_are_refused() {
        let release = Release::signed();
        let changed = |name: &str, because: &str| {
            let before = fs::read(release.file(name)).expect(name);
            fs::write(release.file(name), [&before[..], b" "].concat()).expect("written");
            release.refused(because);
            fs::write(release.file(name), before).expect("written");
        };
        changed(&format!("prequal_filter-{VERSION}.wasm"), "is not the file that was signed");
        changed(&statement_name(VERSION), "is not what was signed");
        let blobs = format!("probe-agent-{VERSION}.oci/blobs/sha256");
        let blob =
            fs::read_dir(release.file(&blobs)).expect("blobs").next().expect("a blob").expect("a blob");
        changed(&format!("{blobs}/{}", blob.file_name().display()), "blob sha256:");

        fs::write(release.file("more"), "").expect("written");
        release.refused("more is not signed");
        fs::remove_file(release.file("more")).expect("removed");

        let sums = fs::read_to_string(release.file(SUMS)).expect("sums");
        fs::write(release.file(SUMS), sums.replacen(['0', '1', '2', '3'], "f", 1)).expect("written");
        release.refused("SHA256SUMS: the sum of");
        fs::write(release.file(SUMS), sums).expect("written");

        release.key("b", "P-256");
        let error = verify(&release.out(), &release.public("b")).expect_err("another key").to_string();
        assert!(error.contains("no signature was made with the key"), "{error}");
        release.verify().expect("verified");
    }

    #[test]
    fn a_valid_image_other_than_the_signed_one_is_refused() {
        let release = Release::signed();
        let image = release.file(&format!("prequal_filter-{VERSION}.oci"));
        fs::remove_dir_all(&image).expect("removed");
        let mut made = parts();
        made.module.push(0);
        oci::write(&image, &[super::super::module_image(&made)], &made.stamp).expect("written");
        release.refused("is not the image that was signed");
    }

    #[test]
    fn a_statement_that_was_changed_has_no_signature() {
        let release = Release::signed();
        let file = release.file(&envelope_name(VERSION));
        let mut envelope: Value =
            serde_json::from_slice(&fs::read(&file).expect("an envelope")).expect("JSON");
        let payload = STANDARD.decode(envelope["payload"].as_str().expect("text")).expect("base64");
        let payload =
            String::from_utf8(payload).expect("text").replace("0123456789abcdef", "fedcba9876543210");
        envelope["payload"] = json!(STANDARD.encode(payload));
        fs::write(&file, envelope.to_string()).expect("written");
        release.refused("no signature was made with the key");
        envelope["signatures"] = json!([]);
        fs::write(&file, envelope.to_string()).expect("written");
        release.refused("no signature was made with the key");
        fs::write(&file, "{}").expect("written");
        release.refused("holds no in-toto statement");
        fs::remove_file(&file).expect("removed");
        release.refused("0 files end in .intoto.jsonl, not one");
    }

    #[test]
    fn keys_on_another_curve_are_refused() {
        let release = Release::signed();
        let key = release.key("c", "P-384");
        let error = sign(&release.out(), VERSION, &key).expect_err("another curve").to_string();
        assert!(error.contains("no private key on the curve P-256"), "{error}");
        let error = verify(&release.out(), &release.public("c")).expect_err("another curve").to_string();
        assert!(error.contains("no public key on the curve P-256"), "{error}");
    }

    /// Verifies with an implementation other than the one that signed, as other tools would.
    #[test]
    fn ring_accepts_the_signature_as_dsse() {
        let release = Release::signed();
        let text = fs::read_to_string(release.file(&envelope_name(VERSION))).expect("an envelope");
        assert_eq!(text.lines().count(), 1, "JSON lines");
        let envelope: Value = serde_json::from_str(&text).expect("JSON");
        let decoded = |value: &Value| STANDARD.decode(value.as_str().expect("text")).expect("base64");
        let (payload, signature) =
            (decoded(&envelope["payload"]), decoded(&envelope["signatures"][0]["sig"]));
        // DSSE's pre-authentication encoding, spelled out.
        let mut message = format!("DSSEv1 28 application/vnd.in-toto+json {} ", payload.len()).into_bytes();
        message.extend(&payload);
        let pem = fs::read_to_string(release.public("a")).expect("a key");
        let der = STANDARD.decode(pem.lines().filter(|line| !line.starts_with('-')).collect::<String>());
        // The DER form of this key ends with the curve point.
        let der = der.expect("base64");
        let point = &der[der.len() - 65..];
        let key = ring::signature::UnparsedPublicKey::new(&ring::signature::ECDSA_P256_SHA256_ASN1, point);
        key.verify(&message, &signature).expect("a signature");
        assert!(key.verify(&message[1..], &signature).is_err());
    }

    #[test]
    fn the_statement_is_slsa_provenance() {
        let release = Release::signed();
        let statement: Value =
            serde_json::from_slice(&fs::read(release.file(&statement_name(VERSION))).expect("a statement"))
                .expect("JSON");
        assert_eq!(statement["_type"], "https://in-toto.io/Statement/v1");
        assert_eq!(statement["predicateType"], "https://slsa.dev/provenance/v1");
        let build = &statement["predicate"]["buildDefinition"];
        for field in ["buildType", "externalParameters", "internalParameters", "resolvedDependencies"] {
            assert!(!build[field].is_null(), "{field}");
        }
        let names: Vec<&str> = statement["subject"]
            .as_array()
            .expect("subjects")
            .iter()
            .map(|subject| subject["name"].as_str().expect("a name"))
            .collect();
        for name in [
            format!("prequal_filter-{VERSION}.wasm"),
            format!("prequal-manifests-{VERSION}.tar.gz"),
            format!("image prequal_filter:{VERSION}"),
            format!("image probe-agent:{VERSION}"),
        ] {
            assert!(names.contains(&&*name), "{names:?}");
        }
        let dirty = Stamp { commit: format!("0123{DIRTY}"), ..Stamp::example() };
        let statement = super::statement(&BTreeMap::new(), &[], None, &dirty).expect("a statement");
        let statement: Value = serde_json::from_slice(&statement).expect("JSON");
        let source = &statement["predicate"]["buildDefinition"]["resolvedDependencies"][0];
        assert_eq!(source["digest"]["gitCommit"], "0123");
        assert_eq!(source["annotations"]["changed"], true);
    }
}
