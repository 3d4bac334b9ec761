//! The shipped files of `envoy-configs/`, as data.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize as _;
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

use crate::workspace_root;

/// Every document of `path` under `envoy-configs/`.
pub fn documents(path: &str) -> Result<Vec<Value>> {
    let file = workspace_root().join("envoy-configs").join(path);
    let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    parse(&text).with_context(|| file.display().to_string())
}

/// Every document of a YAML text, except empty ones.
pub fn parse(text: &str) -> Result<Vec<Value>> {
    let documents = yaml_serde::Deserializer::from_str(text).map(Value::deserialize);
    let documents = documents.collect::<std::result::Result<Vec<_>, _>>().context("not YAML")?;
    Ok(documents.into_iter().filter(|document| !document.is_null()).collect())
}

/// The document of `kind` called `name`.
pub fn find(documents: &[Value], kind: &str, name: &str) -> Value {
    let found = documents.iter().find(|it| it["kind"] == kind && it["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("no {kind} {name}")).clone()
}

/// A way to apply the files of `envoy-configs/envoy-gateway/`, described in docs/guide/envoy-gateway.md.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum EnvoyGateway {
    /// With the filter.
    Shipped,
    /// With the filter, the patches, and the setting that relies on them.
    Patched,
    /// With the native module in place of the filter, and the patches.
    Native,
    /// Without the filter: Envoy balances by load reports, out of band or on responses.
    Utilization {
        /// Whether Envoy asks the agents for streams of reports.
        out_of_band: bool,
    },
}

impl EnvoyGateway {
    /// Every way, with its name in the committed translation.
    pub const ALL: [(&str, Self); 5] = [
        ("shipped", Self::Shipped),
        ("patched", Self::Patched),
        ("native", Self::Native),
        ("utilization", Self::Utilization { out_of_band: true }),
        ("utilization_in_band", Self::Utilization { out_of_band: false }),
    ];

    /// The Kubernetes objects to apply.
    pub fn objects(self) -> Result<Vec<Value>> {
        let mut objects = Vec::new();
        let last = if matches!(self, Self::Utilization { .. }) { "utilization" } else { "prequal" };
        for file in ["gateway", "replicas", last] {
            objects.extend(documents(&format!("envoy-gateway/{file}.yaml"))?);
        }
        match self {
            Self::Patched => {
                objects.extend(documents("envoy-gateway/patches.yaml")?);
                let policy = objects.iter_mut().find(|it| it["kind"] == "EnvoyExtensionPolicy");
                policy.context("the filter")?["spec"]["wasm"][0]["config"]["clusters"][0]["verified_probes"] =
                    true.into();
            }
            Self::Native => {
                objects.extend(documents("envoy-gateway/patches.yaml")?);
                // The EnvoyProxy of native.yaml replaces the Gateway's.
                objects.retain(|it| it["kind"] != "EnvoyExtensionPolicy" && it["kind"] != "EnvoyProxy");
                objects.extend(documents("envoy-gateway/native.yaml")?);
            }
            Self::Utilization { out_of_band: false } => {
                let policy = objects.iter_mut().find(|it| it["kind"] == "BackendTrafficPolicy");
                let settings =
                    &mut policy.context("the policy")?["spec"]["loadBalancer"]["backendUtilization"];
                settings
                    .as_object_mut()
                    .context("its settings")?
                    .remove("outOfBand")
                    .context("out of band")?;
            }
            Self::Shipped | Self::Utilization { out_of_band: true } => {}
        }
        Ok(objects)
    }
}

/// The release of Envoy Gateway whose translators are run.
pub const ENVOY_GATEWAY: &str = "github.com/envoyproxy/gateway@v1.9.1";

/// The program that runs these translators.
pub const TRANSLATE: &str = "tests/envoy-gateway/translate.go";

/// For each way to apply the files: Envoy Gateway's translation of its objects, and the objects themselves as `input`.
/// The result also says what translated them ([`translator`]). `program` is the compiled [`TRANSLATE`].
pub fn translated(program: &Path) -> Result<Value> {
    let mut all = translator()?;
    for (name, way) in EnvoyGateway::ALL {
        all.insert(name.to_owned(), translation(program, way.objects()?).context(name)?);
    }
    Ok(all.into())
}

/// What makes the translation: the release of Envoy Gateway, and the hash of [`TRANSLATE`].
pub fn translator() -> Result<Map<String, Value>> {
    let source = std::fs::read(workspace_root().join(TRANSLATE)).context(TRANSLATE)?;
    let hash = format!("{:x}", Sha256::digest(source));
    Ok([("module", ENVOY_GATEWAY.to_owned()), ("translate.go", hash)]
        .map(|(name, value)| (name.to_owned(), value.into()))
        .into_iter()
        .collect())
}

fn translation(program: &Path, objects: Vec<Value>) -> Result<Value> {
    let mut child = Command::new(program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| program.display().to_string())?;
    // JSON is valid YAML. The program reads all of its input before it writes.
    let text: Vec<String> = objects.iter().map(Value::to_string).collect();
    child.stdin.take().context("its input")?.write_all(text.join("\n---\n").as_bytes())?;
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "the translation failed, see above");
    let mut found: Value = serde_json::from_slice(&output.stdout)?;
    found["input"] = objects.into();
    Ok(found)
}
