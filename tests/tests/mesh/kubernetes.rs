//! The files of `envoy-configs/kubernetes/`: built by Kustomize, checked, and their Envoy run by `headless.rs`.

use std::io::Read as _;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use prequal_testbed::{
    Client, Envoy, EnvoyConfig, Fleet, Reply, Request, bed, envoy_loads_native_modules, eventually,
    missing_program, needs, skip, workspace_root,
};
use serde_json::{Value, json};

use crate::headless;
use crate::schemas::check;
use prequal_testbed::manifests::{documents, find, parse};

pub const FOLDERS: [&str; 4] = ["base", "overlays/init-container", "overlays/image-volume", NATIVE];

/// The overlay with the native module.
const NATIVE: &str = "overlays/native";

/// Kustomize's output for a folder. If there is no Kustomize, reports that the test is skipped, and returns `None`.
pub fn kustomize(folder: &str) -> Result<Option<Vec<Value>>> {
    let path = workspace_root().join("envoy-configs/kubernetes").join(folder);
    for (program, command) in [("kustomize", "build"), ("kubectl", "kustomize")] {
        let Ok(output) = Command::new(program).arg(command).arg(&path).output() else { continue };
        ensure!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
        return Ok(Some(parse(&String::from_utf8_lossy(&output.stdout))?));
    }
    skip(
        "no `kustomize` and no `kubectl`: apt-get install kubernetes-client, or \
         go install sigs.k8s.io/kustomize/kustomize/v5@v5.0.3",
    );
    Ok(None)
}

#[test]
fn every_kustomization_builds_objects_that_match_the_schema() -> Result<()> {
    for folder in FOLDERS {
        let Some(objects) = kustomize(folder)? else { return Ok(()) };
        for object in &objects {
            check(object).with_context(|| folder.to_owned())?;
            assert!(
                object["metadata"]["namespace"] == "prequal" || object["kind"] == "Namespace",
                "{object:#}"
            );
        }
        let edge = find(&objects, "Deployment", "edge");
        let pod = &edge["spec"]["template"]["spec"];
        let volumes = pod["volumes"].as_array().context("volumes")?;
        let volume = |name: &str| volumes.iter().find(|it| it["name"] == name).expect("such a volume");
        // Each overlay has its own source of the module, and keeps nothing of the source that it replaces.
        let source = match folder {
            "base" => json!({"name": "prequal", "configMap": {"name": "prequal-filter"}}),
            "overlays/init-container" => json!({"name": "prequal", "emptyDir": {"sizeLimit": "16Mi"}}),
            _ => {
                let name = if folder == NATIVE { "prequal_native" } else { "prequal_filter" };
                json!({"name": "prequal", "image": {
                    "reference": format!("registry.example.com/prequal/{name}:0.1.0"), "pullPolicy": "IfNotPresent",
                }})
            }
        };
        assert_eq!(*volume("prequal"), source, "{folder}");
        let generated = volume("config")["configMap"]["name"].as_str().context("a name")?;
        let configuration = find(&objects, "ConfigMap", generated);
        let text = configuration["data"]["envoy.yaml"].as_str().context("the configuration")?;
        let shipped = if folder == NATIVE { NATIVE } else { "base" };
        assert_eq!(parse(text)?, documents(&format!("kubernetes/{shipped}/envoy.yaml"))?);
        // Envoy finds the native module in the volume.
        let container = &pod["containers"][0];
        let path = container["env"].as_array().into_iter().flatten();
        let path = path.filter(|it| it["name"] == "ENVOY_DYNAMIC_MODULES_SEARCH_PATH").map(|it| &it["value"]);
        let mounts = container["volumeMounts"].as_array().context("mounts")?;
        let mounted = mounts.iter().filter(|it| folder == NATIVE && it["name"] == "prequal");
        assert!(path.eq(mounted.map(|it| &it["mountPath"])), "{container:#}");
        for name in ["edge", "replicas"] {
            assert_restricted(&find(&objects, "Deployment", name)["spec"]["template"]["spec"]);
        }
    }
    Ok(())
}

/// The requirements of the Pod Security Standard `restricted`, which the namespace enforces, and resource requests.
pub fn assert_restricted(pod: &Value) {
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
    assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
    let containers = ["containers", "initContainers"].iter().filter_map(|key| pod[key].as_array()).flatten();
    for container in containers {
        let security = &container["securityContext"];
        assert_eq!(security["allowPrivilegeEscalation"], false, "{}", container["name"]);
        assert_eq!(security["readOnlyRootFilesystem"], true, "{}", container["name"]);
        assert_eq!(security["capabilities"], json!({"drop": ["ALL"]}), "{}", container["name"]);
        for resource in ["cpu", "memory"] {
            assert!(container["resources"]["requests"][resource].is_string(), "{}", container["name"]);
        }
        let image = container["image"].as_str().unwrap_or_default();
        assert!(image.contains(':'), "{image} has no version");
    }
}

/// Sleeps and drains follow one another: see docs/guide/kubernetes.md, "Leaving".
#[test]
fn the_application_outlives_its_agent_and_the_pod_both() -> Result<()> {
    for file in ["kubernetes/base/replicas.yaml", "istio/server-agent.yaml", "envoy-gateway/replicas.yaml"] {
        let pod = find(&documents(file)?, "Deployment", "replicas")["spec"]["template"]["spec"].clone();
        let seconds = |flag: &str| -> Option<u64> {
            let args = pod["containers"][1]["args"].as_array()?;
            let value = args.iter().find_map(|arg| arg.as_str()?.strip_prefix(flag)?.strip_prefix('='))?;
            Some(value.parse::<u64>().ok()? / 1000)
        };
        let drain =
            seconds("--drain-delay-ms").context(file)? + seconds("--drain-timeout-ms").context(file)?;
        let sleep =
            pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"].as_u64().context(file)?;
        let grace = pod["terminationGracePeriodSeconds"].as_u64().context(file)?;
        assert!(drain <= sleep && sleep < grace, "{file}: {drain} {sleep} {grace}");
    }
    Ok(())
}

/// A Service as kube-proxy implements it: a connection goes to the current target when it begins, and stays there.
struct Service {
    addr: SocketAddr,
    target: Arc<Mutex<SocketAddr>>,
}

impl Service {
    fn start(target: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let (addr, target) = (listener.local_addr()?, Arc::new(Mutex::new(target)));
        let current = Arc::clone(&target);
        std::thread::spawn(move || {
            for from in listener.incoming().flatten() {
                let Ok(to) = TcpStream::connect(*current.lock().expect("no panic")) else { continue };
                for stream in [&from, &to] {
                    stream.set_nodelay(true).expect("a TCP stream");
                }
                let (Ok(back), Ok(from_client)) = (from.try_clone(), from.try_clone()) else { continue };
                let Ok(to_server) = to.try_clone() else { continue };
                std::thread::spawn(move || forward(from_client, &to_server));
                std::thread::spawn(move || forward(to, &back));
            }
        });
        Ok(Self { addr, target })
    }
}

fn forward(mut from: TcpStream, mut to: &TcpStream) {
    let _ = std::io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Both);
}

/// A rollout: `preStop` of the manifest, then SIGTERM, while clients continue.
#[test]
fn an_envoy_that_shuts_down_loses_no_request() -> Result<()> {
    bed!();
    let pod =
        find(&documents("kubernetes/base/edge.yaml")?, "Deployment", "edge")["spec"]["template"]["spec"]
            .clone();
    let container = &pod["containers"][0];
    let arg = |flag: &str| {
        let args = container["args"].as_array().into_iter().flatten().filter_map(Value::as_str);
        args.filter_map(|arg| arg.strip_prefix(flag)).next().expect("such a flag").to_owned()
    };
    let command: Vec<&str> = container["lifecycle"]["preStop"]["exec"]["command"]
        .as_array()
        .context("a command")?
        .iter()
        .filter_map(Value::as_str)
        .collect();
    let [shell, "-c", script] = command[..] else { panic!("{command:?}") };
    needs!(missing_program(&[shell, "cat", "sleep"]));
    // The test bed starts Envoy with a shorter drain, and the script sleeps for less time here.
    assert_eq!(arg("--drain-strategy="), "immediate");
    let seconds = arg("--drain-time-s=");
    assert!(script.contains(&format!("sleep {seconds}\n")), "{script}");
    assert!(seconds.parse::<u64>()? + 15 < pod["terminationGracePeriodSeconds"].as_u64().context("a time")?);

    let fleet = Fleet::uniform(3, &Reply::ok().delay(Duration::from_millis(5)))?;
    let start = || Envoy::start(EnvoyConfig::for_replicas(&fleet.addrs())?.concurrency(2));
    let (mut leaving, staying) = (start()?, start()?);
    let service = Service::start(leaving.addr())?;
    let over = Arc::new(AtomicBool::new(false));
    let callers: Vec<_> = [false, true]
        .into_iter()
        .map(|http2| {
            let client = Client::reconnecting(service.addr, http2);
            let over = Arc::clone(&over);
            std::thread::spawn(move || {
                let mut answers = Vec::new();
                while !over.load(Ordering::Relaxed) {
                    answers.extend(client.burst(40, 4, |_| Request::get("/")));
                }
                answers
            })
        })
        .collect();
    let requests = |envoy: &Envoy| envoy.stat("http.ingress.downstream_rq_completed");
    eventually("requests arrive", Duration::from_secs(10), || (requests(&leaving).ok()? > 100).then_some(()));
    let script = script
        .replace("127.0.0.1/9901", &format!("127.0.0.1/{}", leaving.admin().port()))
        .replace(&format!("sleep {seconds}"), "sleep 2");
    let mut stop = Command::new(shell).args(["-c", &script]).stdout(Stdio::piped()).spawn()?;
    std::thread::sleep(Duration::from_millis(500));
    // Discovery forgets the pod only now.
    *service.target.lock().expect("no panic") = staying.addr();
    assert!(stop.wait()?.success());
    let mut printed = String::new();
    stop.stdout.take().context("its output")?.read_to_string(&mut printed)?;
    assert!(printed.starts_with("HTTP/1.1 200") && printed.contains("\nOK"), "{printed}");
    eventually("all connections are closed", Duration::from_secs(10), || {
        (leaving.stat("http.ingress.downstream_cx_active").ok()? == 0).then_some(())
    });
    leaving.terminate(Duration::from_secs(10))?;
    let before = requests(&staying)?;
    eventually("requests continue", Duration::from_secs(10), || {
        (requests(&staying).ok()? > before + 100).then_some(())
    });
    over.store(true, Ordering::Relaxed);
    for caller in callers {
        for answer in caller.join().expect("no panic") {
            assert_eq!(answer?.status, 200);
        }
    }
    Ok(())
}

fn edge_memory() -> Result<String> {
    let edge = find(&documents("kubernetes/base/edge.yaml")?, "Deployment", "edge");
    let limits = &edge["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"];
    Ok(limits["memory"].as_str().context("a limit of memory")?.to_owned())
}

#[test]
fn the_envoy_is_the_static_one_except_for_discovery() -> Result<()> {
    let mut expected = documents("static/envoy.yaml")?.remove(0);
    let manager =
        &mut expected["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
    manager["http_filters"][1]["typed_config"]["config"]["vm_config"]["code"]["local"]["filename"] =
        json!("/var/lib/prequal/prequal_filter.wasm");
    assert_differs_in_discovery(expected, "base")?;
    assert_differs_in_discovery(documents("static/envoy-native.yaml")?.remove(0), NATIVE)
}

/// Checks that the configuration in `folder` is the static one `expected`, apart from discovery, addresses and limits.
fn assert_differs_in_discovery(mut expected: Value, folder: &str) -> Result<()> {
    let mut found = documents(&format!("kubernetes/{folder}/envoy.yaml"))?.remove(0);
    let ours = &mut found["static_resources"];
    // The static configuration lacks these two, which expose two paths of the admin interface.
    assert_eq!(ours["listeners"].as_array_mut().and_then(Vec::pop).context("a listener")?["name"], "status");
    assert_eq!(ours["clusters"].as_array_mut().and_then(Vec::pop).context("a cluster")?["name"], "admin");
    // The limit of the heap matches the pod's memory.
    assert_eq!(edge_memory()?, "512Mi");
    let monitors = &mut expected["overload_manager"]["resource_monitors"];
    monitors[0]["typed_config"]["max_heap_size_bytes"] = json!(320 << 20);
    monitors[1]["typed_config"]["max_active_downstream_connections"] = json!(5000);
    let listener = &mut expected["static_resources"]["listeners"][0];
    listener["address"]["socket_address"]["address"] = json!("0.0.0.0");
    let name = "replicas.prequal.svc.cluster.local.";
    for cluster in expected["static_resources"]["clusters"].as_array_mut().context("clusters")? {
        cluster["type"] = json!("STRICT_DNS");
        cluster["dns_refresh_rate"] = json!("2s");
        cluster["respect_dns_ttl"] = json!(false);
        cluster["dns_lookup_family"] = json!("V4_PREFERRED");
        let address = json!({"socket_address": {"address": name, "port_value": 8080}});
        cluster["load_assignment"]["endpoints"] =
            json!([{"lb_endpoints": [{"endpoint": {"address": address}}]}]);
    }
    assert_eq!(found, expected);
    Ok(())
}

#[test]
fn the_filter_follows_the_pods_of_a_headless_service() -> Result<()> {
    bed!();
    let root = documents("kubernetes/base/envoy.yaml")?.remove(0);
    headless::assert_followed(root, "replicas.prequal.svc.cluster.local", &[])
}

#[test]
fn the_native_module_follows_the_pods_of_a_headless_service() -> Result<()> {
    bed!();
    if !envoy_loads_native_modules()? {
        // `matrix.rs` tests that such an Envoy refuses the configuration.
        return Ok(());
    }
    let root = documents(&format!("kubernetes/{NATIVE}/envoy.yaml"))?.remove(0);
    headless::assert_followed(root, "replicas.prequal.svc.cluster.local", &[])
}
