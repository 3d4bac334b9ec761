//! Container images as OCI image layouts, written without a container engine and verified after writing.
//!
//! There are two kinds. One is an ordinary image of programs, with one manifest for each architecture. The other is the
//! module in the "compat" form of the Wasm Image Specification, which Istio's WasmPlugin and Envoy Gateway fetch: the
//! last layer of the image is `application/vnd.oci.image.layer.v1.tar+gzip` and holds `plugin.wasm`.
//!
//! The bytes depend only on the content and on [`Stamp`]: files are in the order given, the owner is 0, times are the
//! commit's, and the gzip header has no name or time.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read as _, Write as _};
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::Stamp;

/// One file of a layer or archive.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Entry {
    /// Relative path, without a leading slash.
    pub(super) path: String,
    pub(super) bytes: Vec<u8>,
    pub(super) executable: bool,
}

/// One image of a layout, with a single layer.
#[derive(Clone, Debug)]
pub(super) struct Image {
    /// Name in OCI images: `amd64`, `arm64`.
    pub(super) architecture: &'static str,
    pub(super) files: Vec<Entry>,
    /// The `config` object of the image configuration: user, entry point.
    pub(super) runs: Value,
    /// Annotations of the manifest.
    pub(super) annotations: BTreeMap<&'static str, String>,
}

/// Writes `images` as a layout into the empty folder `dir`, tagged with the version. Several architectures share one
/// index, as in registries. Returns the digest that the tag names.
pub(super) fn write(dir: &Path, images: &[Image], stamp: &Stamp) -> Result<String> {
    fs::create_dir_all(dir.join("blobs/sha256"))?;
    let mut manifests = Vec::new();
    for image in images {
        manifests.push(manifest(dir, image, stamp)?);
    }
    let mut tagged = match manifests.as_slice() {
        [] => bail!("an image layout needs an image"),
        [only] => only.clone(),
        _ => {
            let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests});
            blob(dir, INDEX, &serde_json::to_vec(&index)?)?
        }
    };
    let digest = text(&tagged, "digest")?.to_owned();
    tagged["annotations"] = json!({"org.opencontainers.image.ref.name": stamp.version});
    let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [tagged]});
    fs::write(dir.join("index.json"), serde_json::to_vec(&index)?)?;
    fs::write(dir.join("oci-layout"), serde_json::to_vec(&json!({"imageLayoutVersion": "1.0.0"}))?)?;
    Ok(digest)
}

/// Writes layer, configuration and manifest; returns the manifest's descriptor.
fn manifest(dir: &Path, image: &Image, stamp: &Stamp) -> Result<Value> {
    let tar = tar(&image.files, stamp)?;
    let layer = blob(dir, LAYER, &gzip(&tar)?)?;
    let config = json!({
        "created": stamp.time,
        "architecture": image.architecture,
        "os": "linux",
        "config": image.runs,
        "rootfs": {"type": "layers", "diff_ids": [digest(&tar)]},
        "history": [{"created": stamp.time, "created_by": "cargo xtask dist"}],
    });
    let config = blob(dir, CONFIG, &serde_json::to_vec(&config)?)?;
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": config,
        "layers": [layer],
        "annotations": image.annotations,
    });
    let mut descriptor = blob(dir, MANIFEST, &serde_json::to_vec(&manifest)?)?;
    descriptor["platform"] = json!({"architecture": image.architecture, "os": "linux"});
    Ok(descriptor)
}

fn blob(dir: &Path, media_type: &str, bytes: &[u8]) -> Result<Value> {
    let digest = digest(bytes);
    fs::write(blob_path(dir, &digest)?, bytes)?;
    Ok(json!({"mediaType": media_type, "digest": digest, "size": bytes.len()}))
}

fn blob_path(dir: &Path, digest: &str) -> Result<std::path::PathBuf> {
    let hex = digest.strip_prefix("sha256:").with_context(|| format!("`{digest}` is not a sha256 digest"))?;
    ensure!(
        hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_hexdigit()),
        "`{digest}` is not a sha256 digest"
    );
    Ok(dir.join("blobs/sha256").join(hex))
}

/// An image as [`verify`] found it.
#[derive(Debug)]
pub(super) struct Verified {
    pub(super) architecture: String,
    /// Annotations of the manifest.
    pub(super) annotations: Value,
    /// The `config` object: entry point and so on.
    pub(super) runs: Value,
    /// The content of its layers by path; a later layer overrides earlier ones.
    pub(super) files: BTreeMap<String, Vec<u8>>,
}

/// Reads a layout as a registry client would, and fails on the first violation of the specification. Checks every
/// digest and size, the media types, the configuration's `diff_ids`, and that every blob is referenced.
pub(super) fn verify(dir: &Path) -> Result<Vec<Verified>> {
    let layout = json_file(&dir.join("oci-layout"))?;
    ensure!(layout["imageLayoutVersion"] == "1.0.0", "oci-layout: not version 1.0.0");
    let index = json_file(&dir.join("index.json"))?;
    ensure!(index["schemaVersion"] == 2, "index.json: schemaVersion is not 2");
    let mut seen = BTreeSet::new();
    let mut images = Vec::new();
    let mut pending = list(&index, "manifests")?.clone();
    while let Some(descriptor) = pending.pop() {
        let bytes = referred(dir, &descriptor, &mut seen)?;
        let document: Value = serde_json::from_slice(&bytes).context("a manifest is not JSON")?;
        let media_type = text(&descriptor, "mediaType")?;
        ensure!(document["mediaType"] == media_type, "a {media_type} calls itself {}", document["mediaType"]);
        ensure!(document["schemaVersion"] == 2, "a manifest's schemaVersion is not 2");
        match media_type {
            INDEX => pending.extend(list(&document, "manifests")?.iter().cloned()),
            MANIFEST => images.push(image(dir, &document, &descriptor, &mut seen)?),
            other => bail!("unknown media type {other}"),
        }
    }
    for entry in fs::read_dir(dir.join("blobs/sha256"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        ensure!(seen.contains(&format!("sha256:{name}")), "nothing refers to blob {name}");
    }
    images.sort_by(|a, b| a.architecture.cmp(&b.architecture));
    Ok(images)
}

/// The digest that the layout's tag names.
pub(super) fn tagged(dir: &Path) -> Result<String> {
    let index = json_file(&dir.join("index.json"))?;
    let [tagged] = list(&index, "manifests")?.as_slice() else {
        bail!("index.json does not name exactly one image")
    };
    Ok(text(tagged, "digest")?.to_owned())
}

fn image(dir: &Path, manifest: &Value, descriptor: &Value, seen: &mut BTreeSet<String>) -> Result<Verified> {
    ensure!(
        text(&manifest["config"], "mediaType")? == CONFIG,
        "the configuration's media type is not {CONFIG}"
    );
    let config: Value = serde_json::from_slice(&referred(dir, &manifest["config"], seen)?)?;
    // A descriptor may omit its platform, as skopeo does for a single image.
    let platform = &descriptor["platform"];
    for key in ["architecture", "os"] {
        ensure!(
            platform.is_null() || config[key] == platform[key],
            "{key} of configuration and platform differ"
        );
    }
    let layers = list(manifest, "layers")?;
    let diff_ids = list(&config["rootfs"], "diff_ids")?;
    ensure!(!layers.is_empty() && layers.len() == diff_ids.len(), "layers and diff_ids differ in number");
    let mut files = BTreeMap::new();
    for (layer, diff_id) in layers.iter().zip(diff_ids) {
        ensure!(text(layer, "mediaType")? == LAYER, "a layer's media type is not {LAYER}");
        let mut tar = Vec::new();
        GzDecoder::new(referred(dir, layer, seen)?.as_slice()).read_to_end(&mut tar)?;
        ensure!(digest(&tar) == diff_id.as_str().unwrap_or_default(), "a diff_id is not its layer's");
        for entry in tar::Archive::new(tar.as_slice()).entries()? {
            let mut entry = entry?;
            let path = entry.path()?.to_string_lossy().into_owned();
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes)?;
            files.insert(path, bytes);
        }
    }
    Ok(Verified {
        architecture: text(&config, "architecture")?.to_owned(),
        annotations: manifest["annotations"].clone(),
        runs: config["config"].clone(),
        files,
    })
}

/// The blob that a descriptor refers to. Fails unless digest and size match.
fn referred(dir: &Path, descriptor: &Value, seen: &mut BTreeSet<String>) -> Result<Vec<u8>> {
    let name = text(descriptor, "digest")?;
    let bytes = fs::read(blob_path(dir, name)?).with_context(|| format!("no blob {name}"))?;
    ensure!(
        descriptor["size"] == bytes.len(),
        "blob {name} has {} bytes, not {}",
        bytes.len(),
        descriptor["size"]
    );
    ensure!(digest(&bytes) == name, "the content of blob {name} differs");
    seen.insert(name.to_owned());
    Ok(bytes)
}

/// A tar archive of `files`.
pub(super) fn tar(files: &[Entry], stamp: &Stamp) -> Result<Vec<u8>> {
    let mut archive = tar::Builder::new(Vec::new());
    for file in files {
        let mut header = tar::Header::new_ustar();
        header.set_size(file.bytes.len() as u64);
        header.set_mode(if file.executable { 0o755 } else { 0o644 });
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(stamp.epoch);
        archive.append_data(&mut header, &file.path, file.bytes.as_slice())?;
    }
    Ok(archive.into_inner()?)
}

pub(super) fn gzip(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes)?;
    Ok(encoder.finish()?)
}

/// Every file below `dir`, in order of its path.
pub(super) fn entries_of(dir: &Path) -> Result<Vec<Entry>> {
    let mut files = Vec::new();
    let mut pending = vec![dir.to_owned()];
    while let Some(folder) = pending.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                pending.push(path);
            } else {
                let relative = path.strip_prefix(dir)?.to_string_lossy().into_owned();
                files.push(Entry { path: relative, bytes: fs::read(&path)?, executable: false });
            }
        }
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{:x}", Sha256::digest(bytes))
}

fn json_file(path: &Path) -> Result<Value> {
    let bytes = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    serde_json::from_slice(&bytes).with_context(|| format!("{} is not JSON", path.display()))
}

fn text<'a>(value: &'a Value, key: &str) -> Result<&'a str> {
    value[key].as_str().with_context(|| format!("no `{key}` in {value}"))
}

fn list<'a>(value: &'a Value, key: &str) -> Result<&'a Vec<Value>> {
    value[key].as_array().with_context(|| format!("no list `{key}` in {value}"))
}

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    fn image(architecture: &'static str, content: &[u8]) -> Image {
        Image {
            architecture,
            files: vec![Entry { path: "plugin.wasm".into(), bytes: content.to_vec(), executable: false }],
            runs: json!({}),
            annotations: [("module.wasm.image/variant", "compat".to_owned())].into(),
        }
    }

    fn written(images: &[Image]) -> (TempDir, String) {
        let dir = TempDir::new().expect("a folder");
        let digest = write(dir.path(), images, &Stamp::example()).expect("written");
        (dir, digest)
    }

    #[test]
    fn a_layout_reads_back() {
        let (dir, _) = written(&[image("arm64", b"two"), image("amd64", b"one")]);
        let images = verify(dir.path()).expect("a layout");
        let found: Vec<_> =
            images.iter().map(|i| (i.architecture.as_str(), &i.files["plugin.wasm"][..])).collect();
        assert_eq!(found, [("amd64", &b"one"[..]), ("arm64", &b"two"[..])]);
    }

    /// Checks the layout with the types that Rust's container tools use.
    #[test]
    fn another_implementation_reads_it() {
        use oci_spec::image::{ImageConfiguration, ImageIndex, ImageManifest, MediaType, OciLayout};
        let (dir, digest) = written(&[image("amd64", b"one")]);
        OciLayout::from_file(dir.path().join("oci-layout")).expect("oci-layout");
        let index = ImageIndex::from_file(dir.path().join("index.json")).expect("index.json");
        let [tagged] = index.manifests().as_slice() else { panic!("{index:?}") };
        assert_eq!(tagged.digest().to_string(), digest);
        assert_eq!(tagged.media_type(), &MediaType::ImageManifest);
        let path = |digest: &oci_spec::image::Digest| dir.path().join("blobs/sha256").join(digest.digest());
        let manifest = ImageManifest::from_file(path(tagged.digest())).expect("a manifest");
        let [layer] = manifest.layers().as_slice() else { panic!("{manifest:?}") };
        assert_eq!(layer.media_type(), &MediaType::ImageLayerGzip);
        let config =
            ImageConfiguration::from_file(path(manifest.config().digest())).expect("a configuration");
        assert_eq!(config.created().as_deref(), Some(Stamp::example().time.as_str()));
    }

    #[test]
    fn the_same_content_gives_the_same_bytes() {
        let (one, two) = (written(&[image("amd64", b"x")]), written(&[image("amd64", b"x")]));
        assert_eq!(one.1, two.1);
        assert_eq!(entries_of(one.0.path()).expect("files"), entries_of(two.0.path()).expect("files"));
        assert_ne!(one.1, written(&[image("amd64", b"y")]).1);
    }

    #[test]
    fn every_kind_of_damage_is_found() {
        let flip = |path: &Path| {
            let mut bytes = fs::read(path).expect("a blob");
            *bytes.last_mut().expect("not empty") ^= 1;
            fs::write(path, bytes).expect("written");
        };
        let blobs = |dir: &TempDir| -> Vec<_> {
            let entries = entries_of(&dir.path().join("blobs/sha256")).expect("files");
            entries.into_iter().map(|entry| dir.path().join("blobs/sha256").join(entry.path)).collect()
        };
        let count = blobs(&written(&[image("amd64", b"x")]).0).len();
        assert_eq!(count, 3, "layer, configuration, manifest");
        for damaged in 0..count {
            let (dir, _) = written(&[image("amd64", b"x")]);
            flip(&blobs(&dir)[damaged]);
            let error = verify(dir.path()).expect_err("a changed blob").to_string();
            assert!(error.contains("differs"), "{error}");
            fs::write(&blobs(&dir)[damaged], b"short").expect("written");
            let error = verify(dir.path()).expect_err("a short blob").to_string();
            assert!(error.contains("bytes, not"), "{error}");
            fs::remove_file(&blobs(&dir)[damaged]).expect("removed");
            let error = verify(dir.path()).expect_err("a lost blob").to_string();
            assert!(error.contains("no blob"), "{error}");
        }
        let (dir, _) = written(&[image("amd64", b"x")]);
        fs::write(blob_path(dir.path(), &digest(b"stray")).expect("a path"), b"stray").expect("written");
        let error = verify(dir.path()).expect_err("a stray blob").to_string();
        assert!(error.contains("nothing refers"), "{error}");
    }
}
