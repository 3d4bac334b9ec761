//! Pins the images in the manifests of `envoy-configs/` and in the chart to this release's digests, so that the
//! released images run, whatever a registry's tags name later.
//!
//! Envoy's image is pinned too if its digest is given. Two kinds of images stay named by tag: the user's own, and those
//! from which the overlays of `kubernetes/` take the filter.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use super::oci::{Entry, entries_of};

/// Digests of the images that a release's tags name: `sha256:` and 64 hexadecimal digits.
pub(super) struct Digests<'a> {
    /// Digest of the module's image. Istio compares it with the field `sha256` if the URL names an image. If the URL
    /// names a file, that field holds the checksum of the module itself.
    pub(super) module: &'a str,
    /// Digest of the native module's image, for every architecture.
    pub(super) native: &'a str,
    /// Digest of the agent's image, for every architecture.
    pub(super) agent: &'a str,
    /// Digest of Envoy's image, which a release does not build. `None`: it stays named by tag.
    pub(super) envoy: Option<&'a str>,
}

/// Parses a digest by SHA-256.
pub(super) fn digest(text: &str) -> Result<String, String> {
    let hex = text.strip_prefix("sha256:").unwrap_or_default();
    let sound = hex.len() == 64 && hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    sound.then(|| text.to_owned()).ok_or_else(|| "must be `sha256:` and 64 hexadecimal digits".to_owned())
}

/// Every file in the manifest folders below `configs`, with the images named by digest.
pub(super) fn pinned(configs: &Path, version: &str, digests: &Digests<'_>) -> Result<Vec<Entry>> {
    let mut files = Vec::new();
    let mut count = 0;
    // The archive of programs has a file `plb`, so the folder `plb` gets another name here, in case both archives are
    // unpacked in one place.
    let folders = ["envoy-gateway", "istio", "kubernetes"].map(|folder| (folder, folder));
    for (folder, name) in folders.into_iter().chain([("plb", "plb-daemon")]) {
        for mut file in entries_of(&configs.join(folder))? {
            file.path = format!("{name}/{}", file.path);
            let text = std::str::from_utf8(&file.bytes).with_context(|| file.path.clone())?;
            let (text, replaced) = with_digests(text, folder == "kubernetes", version, digests)?;
            let modules = ["kind: WasmPlugin", "kind: TrafficExtension", "kind: EnvoyExtensionPolicy"];
            let modules: usize = modules.iter().map(|kind| text.matches(kind).count()).sum();
            ensure!(replaced >= modules, "{}: a module that does not name version {version}", file.path);
            count += replaced;
            file.bytes = text.into_bytes();
            files.push(file);
        }
    }
    let by_tag = files.iter().any(|file| String::from_utf8_lossy(&file.bytes).contains(ENVOY_BY_TAG));
    ensure!(!by_tag || digests.envoy.is_none(), "an image of Envoy is still named by tag");
    ensure!(
        count >= 5,
        "only {count} images are named by digest: envoy-configs/ names the others in an unknown form"
    );
    Ok(files)
}

/// The files of the chart in `folder`, as its archive contains them, with the same images named by digest.
pub(super) fn chart(folder: &Path, version: &str, digests: &Digests<'_>) -> Result<Vec<Entry>> {
    let mut files = entries_of(folder)?;
    let text = |file: &Entry| String::from_utf8(file.bytes.clone()).with_context(|| file.path.clone());
    for file in &mut files {
        match &*file.path {
            "Chart.yaml" => ensure!(
                text(file)?.lines().any(|line| line == format!("version: {version}")),
                "Chart.yaml does not name version {version}"
            ),
            "values.yaml" => file.bytes = values(&text(file)?, version, digests)?.into_bytes(),
            _ => {}
        }
        file.path = format!("prequal/{}", file.path);
    }
    Ok(files)
}

/// The chart's values with the images named by digest. An image is recognised by the block that contains it. Other
/// images are the user's.
fn values(text: &str, version: &str, digests: &Digests<'_>) -> Result<String> {
    let image = format!("image: {{repository: \"\", tag: {version}, digest: \"\"}}");
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let pinned = |line: &str, digest| line.replace("digest: \"\"", &format!("digest: \"{digest}\""));
    let images =
        [("agent:", digests.agent), ("    imageVolume:", digests.module), ("    native:", digests.native)];
    for (block, digest) in images {
        let place = lines.windows(2).position(|pair| pair[0] == block && pair[1].trim() == image);
        let place = place.with_context(|| format!("values.yaml: `{block}` does not begin with `{image}`"))?;
        lines[place + 1] = pinned(&lines[place + 1], digest);
    }
    if let Some(digest) = digests.envoy {
        let begins = format!("  image: {{repository: {ENVOY}, tag: ");
        let line = lines.iter_mut().find(|line| line.starts_with(&begins));
        let line = line.with_context(|| format!("values.yaml: no line begins with `{begins}`"))?;
        *line = pinned(line, digest);
    }
    lines.push(String::new());
    Ok(lines.join("\n"))
}

/// The text with the release's images named by digest, and the number of replacements. If `kustomized`, the image names
/// of containers stay: they are placeholders that the kustomization replaces.
fn with_digests(
    text: &str,
    kustomized: bool,
    version: &str,
    digests: &Digests<'_>,
) -> Result<(String, usize)> {
    let hex = digests.module.strip_prefix("sha256:").context("a digest by SHA-256")?;
    let [module, native, agent] =
        ["prequal_filter", "prequal_native", "probe-agent"].map(|name| format!("{REGISTRY}/{name}"));
    let mut lines = Vec::new();
    let mut count = 0;
    for line in text.lines() {
        let indent = &line[..line.len() - line.trim_start().len()];
        let pinned = match line.trim_start() {
            named if named == format!("url: oci://{module}:{version}") => {
                format!("{indent}url: oci://{module}@{}\n{indent}sha256: {hex}", digests.module)
            }
            // Envoy Gateway's URL has no scheme; Envoy Gateway compares the digest too.
            named if named == format!("url: {module}:{version}") => {
                format!("{indent}url: {module}@{}\n{indent}sha256: {hex}", digests.module)
            }
            named if named == format!("reference: {native}:{version}") => {
                format!("{indent}reference: {native}@{}", digests.native)
            }
            named if named == format!("- {{name: probe-agent, newName: {agent}, newTag: {version}}}") => {
                format!("{indent}- {{name: probe-agent, newName: {agent}, digest: \"{}\"}}", digests.agent)
            }
            named if named.starts_with(ENVOY_BY_TAG) && digests.envoy.is_some() => {
                format!("{indent}- {{name: {ENVOY}, digest: \"{}\"}}", digests.envoy.unwrap_or_default())
            }
            "image: probe-agent" if !kustomized => {
                format!("{indent}image: {agent}@{}", digests.agent)
            }
            _ => {
                lines.push(line.to_owned());
                continue;
            }
        };
        lines.push(pinned);
        count += 1;
    }
    lines.push(String::new());
    Ok((lines.join("\n"), count))
}

/// Envoy's image, and the beginning of the line in which a kustomization names it by tag.
const ENVOY: &str = "envoyproxy/envoy";
const ENVOY_BY_TAG: &str = "- {name: envoyproxy/envoy, newTag: ";

/// The registry in the shipped manifests; users replace it with their own.
const REGISTRY: &str = "registry.example.com/prequal";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace;

    #[test]
    fn the_shipped_manifests_name_what_was_built() {
        let [module, agent, native] = ["a", "b", "c"].map(|digit| format!("sha256:{}", digit.repeat(64)));
        let digests = Digests { module: &module, native: &native, agent: &agent, envoy: None };
        let configs = workspace::root().join("envoy-configs");
        let files = pinned(&configs, super::super::VERSION, &digests).expect("pinned");
        let text = |path: &str| {
            let file = files.iter().find(|file| file.path == path).expect(path);
            String::from_utf8(file.bytes.clone()).expect("text")
        };
        for (path, scheme, indent) in [
            ("istio/client-sidecar.yaml", "oci://", "  "),
            ("istio/client-gateway.yaml", "oci://", "  "),
            ("istio/server-inbound.yaml", "oci://", "  "),
            ("istio/client-sidecar-extension.yaml", "oci://", "    "),
            ("envoy-gateway/prequal.yaml", "", "        "),
        ] {
            let sum = "a".repeat(64);
            let url =
                format!("\n{indent}url: {scheme}{REGISTRY}/prequal_filter@{module}\n{indent}sha256: {sum}\n");
            assert!(text(path).contains(&url), "{path}");
        }
        let by_digest = format!("{REGISTRY}/probe-agent@{agent}");
        for path in ["istio/server-agent.yaml", "envoy-gateway/replicas.yaml", "plb-daemon/daemonset.yaml"] {
            assert!(text(path).contains(&format!("        image: {by_digest}\n")), "{path}");
        }
        let images = text("kubernetes/base/kustomization.yaml");
        assert!(
            images.contains(&format!("newName: {REGISTRY}/probe-agent, digest: \"{agent}\"}}")),
            "{images}"
        );
        let volume = text("kubernetes/overlays/native/module.yaml");
        assert!(volume.contains(&format!("reference: {REGISTRY}/prequal_native@{native}\n")), "{volume}");
        assert!(text("kubernetes/base/replicas.yaml").contains("        image: probe-agent\n"));
        for file in &files {
            let path = file.path.replacen("plb-daemon/", "plb/", 1);
            let shipped = std::fs::read(configs.join(path)).expect("the shipped file");
            let text = String::from_utf8_lossy(&file.bytes).into_owned();
            let built = |line: &&str| {
                line.contains("prequal_filter:")
                    || line.contains("prequal_native:")
                    || line.contains("probe-agent, newTag")
            };
            let left: Vec<&str> = text.lines().filter(built).collect();
            assert!(
                left.iter().all(|line| line.contains("reference: ") && line.contains("prequal_filter")),
                "{}: {left:?}",
                file.path
            );
            // Nothing else changes.
            let differ =
                text.lines().filter(|line| !String::from_utf8_lossy(&shipped).contains(line)).count();
            assert!(differ <= 2, "{}", file.path);
        }
    }

    #[test]
    fn the_chart_names_what_was_built() {
        let [module, agent, native] = ["a", "b", "c"].map(|digit| format!("sha256:{}", digit.repeat(64)));
        let digests = Digests { module: &module, native: &native, agent: &agent, envoy: None };
        let folder = workspace::root().join("charts/prequal");
        let files = chart(&folder, super::super::VERSION, &digests).expect("pinned");
        let text = |path: &str| {
            let file = files.iter().find(|file| file.path == path).expect(path);
            String::from_utf8(file.bytes.clone()).expect("text")
        };
        let values = text("prequal/values.yaml");
        let pinned: Vec<&str> = values.lines().filter(|line| line.contains("sha256:")).collect();
        let line = |indent: &str, digest: &str| {
            format!(
                "{indent}image: {{repository: \"\", tag: {}, digest: \"{digest}\"}}",
                super::super::VERSION
            )
        };
        assert_eq!(pinned, [line("  ", &agent), line("      ", &module), line("      ", &native)]);
        // The archive holds the files to which the chart's symbolic links point, not the links.
        let envoy = workspace::root().join("envoy-configs/kubernetes/base/envoy.yaml");
        assert!(
            text("prequal/files/envoy.yaml") == std::fs::read_to_string(envoy).expect("the shipped file")
        );
        let error = chart(&folder, "9.9.9", &digests).expect_err("an error");
        assert!(error.to_string().contains("Chart.yaml does not name version 9.9.9"), "{error}");
    }

    #[test]
    fn envoys_image_is_pinned_if_its_digest_is_given() {
        let (digest, envoy) = (format!("sha256:{}", "a".repeat(64)), format!("sha256:{}", "e".repeat(64)));
        let digests = Digests { module: &digest, native: &digest, agent: &digest, envoy: Some(&envoy) };
        let (root, version) = (workspace::root(), super::super::VERSION);
        let lines = |files: Vec<Entry>| -> Vec<String> {
            let text = |file: Entry| String::from_utf8(file.bytes).expect("text");
            let lines =
                files.into_iter().flat_map(|file| text(file).lines().map(str::to_owned).collect::<Vec<_>>());
            lines.filter(|line| line.contains(&envoy)).collect()
        };
        assert_eq!(
            lines(pinned(&root.join("envoy-configs"), version, &digests).expect("pinned")),
            [format!("- {{name: envoyproxy/envoy, digest: \"{envoy}\"}}")]
        );
        let values = lines(chart(&root.join("charts/prequal"), version, &digests).expect("pinned"));
        let [line] = &values[..] else { panic!("{values:?}") };
        assert!(line.starts_with("  image: {repository: envoyproxy/envoy, tag: v"), "{line}");
        assert!(super::digest(&envoy).is_ok());
        for text in ["", "sha256:", "v1.40.0", &envoy[1..], &envoy.to_uppercase(), &format!("{envoy}e")] {
            assert!(super::digest(text).is_err(), "{text}");
        }
    }

    #[test]
    fn another_version_is_refused() {
        let digest = format!("sha256:{}", "a".repeat(64));
        let digests = Digests { module: &digest, native: &digest, agent: &digest, envoy: None };
        let error =
            pinned(&workspace::root().join("envoy-configs"), "9.9.9", &digests).expect_err("an error");
        assert!(error.to_string().contains("does not name version 9.9.9"), "{error}");
    }
}
