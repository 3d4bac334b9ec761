//! Opens the live page in a real browser: headless Chromium, driven through its debugging pipe.
//!
//! The pipe needs no port and no WebSocket: each message is JSON followed by a zero byte.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use crate::{run, workspace};

/// A browser with the page open. Dropping the value ends the browser.
pub(super) struct Browser {
    child: Child,
    commands: ChildStdin,
    answers: Receiver<Value>,
    session: String,
    last: u64,
    profile: PathBuf,
}

/// What the page shows about one replica.
#[derive(Clone, Debug)]
pub(super) struct ShownReplica {
    /// Prequal's share of traffic to it, 0 to 1.
    pub(super) share: f64,
    /// The text of the replica's last column.
    pub(super) state: String,
    /// The faults that the page lists as active.
    pub(super) active: String,
    /// The p99 chart, as an image.
    pub(super) chart: String,
}

/// The name of an installed browser, if any.
pub(super) fn installed() -> Option<&'static str> {
    ["chromium", "chromium-browser", "google-chrome"]
        .into_iter()
        .find(|name| run::succeeds(run::tool(name).arg("--version")))
}

impl Browser {
    /// Opens `url` and waits until the page shows replicas.
    pub(super) fn open(program: &str, url: &str) -> Result<Self> {
        let profile = workspace::target().join("compose").join(format!("browser-{}", std::process::id()));
        fs::create_dir_all(&profile)?;
        // Chromium reads commands from descriptor 3 and answers on 4.
        let mut child = run::tool("sh")
            .args(["-c", "exec \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1", "sh", program])
            .args([
                "--headless",
                "--remote-debugging-pipe",
                "--no-sandbox",
                "--disable-gpu",
                "--no-first-run",
            ])
            .args(["--disable-quic", "--disable-background-networking", "--disable-component-update"])
            .args(["--disable-sync", "--disable-dev-shm-usage"])
            .arg(format!("--user-data-dir={}", profile.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start `{program}`"))?;
        let commands = child.stdin.take().context("the browser's input")?;
        let stdout = child.stdout.take().context("the browser's output")?;
        let (sink, answers) = mpsc::channel();
        std::thread::spawn(move || {
            let mut reader = BufReader::new(stdout);
            let mut message = Vec::new();
            while reader.read_until(0, &mut message).is_ok_and(|read| read > 0) {
                let text = message.strip_suffix(&[0]).unwrap_or(&message);
                if let Ok(value) = serde_json::from_slice(text)
                    && sink.send(value).is_err()
                {
                    return;
                }
                message.clear();
            }
        });
        let mut browser = Self { child, commands, answers, session: String::new(), last: 0, profile };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}))?;
        let attached = browser
            .call("Target.attachToTarget", json!({"targetId": target["targetId"], "flatten": true}))?;
        browser.session = attached["sessionId"].as_str().context("no session")?.to_owned();
        let size = json!({"width": 1400, "height": 900, "deviceScaleFactor": 1, "mobile": false});
        browser.call("Emulation.setDeviceMetricsOverride", size)?;
        browser.call("Page.navigate", json!({"url": url}))?;
        let started = Instant::now();
        while browser.evaluate("document.querySelectorAll('tr[data-replica]').length")?.as_u64() < Some(1) {
            ensure!(started.elapsed() < LIMIT, "the page showed no replica within {} s", LIMIT.as_secs());
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(browser)
    }

    /// What the page shows about a replica now.
    pub(super) fn shown(&mut self, replica: u64) -> Result<ShownReplica> {
        let value = self.evaluate(&format!(
            "(() => {{ const row = document.querySelector('tr[data-replica=\"{replica}\"]');
             return {{share: Number(row.dataset.share), state: row.lastElementChild.textContent,
                      active: document.getElementById('active').textContent,
                      chart: document.getElementById('chart-p99').toDataURL()}}; }})()"
        ))?;
        let text = |key: &str| value[key].as_str().unwrap_or_default().to_owned();
        Ok(ShownReplica {
            share: value["share"].as_f64().context("the page shows no share")?,
            state: text("state"),
            active: text("active"),
            chart: text("chart"),
        })
    }

    /// Selects a replica and a duration, then clicks the fault's button as a person would.
    pub(super) fn switch_on(&mut self, fault: &str, replica: u64, seconds: u64) -> Result<()> {
        let place = self.evaluate(&format!(
            "(() => {{ document.getElementById('replica').value = '{replica}';
             document.getElementById('seconds').value = '{seconds}';
             const button = document.querySelector('button[data-fault=\"{fault}\"]');
             const box = button.getBoundingClientRect();
             return {{x: box.x + box.width / 2, y: box.y + box.height / 2, disabled: button.disabled}}; }})()"
        ))?;
        ensure!(place["disabled"] == false, "the button of `{fault}` is disabled");
        for kind in ["mousePressed", "mouseReleased"] {
            let event =
                json!({"type": kind, "x": place["x"], "y": place["y"], "button": "left", "clickCount": 1});
            self.call("Input.dispatchMouseEvent", event)?;
        }
        Ok(())
    }

    /// The page's message about a fault that it refused to switch on.
    pub(super) fn refusal(&mut self) -> Result<String> {
        let message = self.evaluate("document.getElementById('message').textContent")?;
        Ok(message.as_str().unwrap_or_default().to_owned())
    }

    /// Saves a PNG picture of the page.
    pub(super) fn picture(&mut self, file: &Path) -> Result<()> {
        let shot = self.call("Page.captureScreenshot", json!({"format": "png"}))?;
        let data = BASE64_STANDARD.decode(shot["data"].as_str().context("no picture")?)?;
        fs::write(file, data).with_context(|| format!("writing {}", file.display()))
    }

    fn evaluate(&mut self, expression: &str) -> Result<Value> {
        let answer =
            self.call("Runtime.evaluate", json!({"expression": expression, "returnByValue": true}))?;
        if let Some(thrown) = answer.get("exceptionDetails") {
            bail!("the page's script threw {}", thrown["exception"]["description"]);
        }
        Ok(answer["result"]["value"].clone())
    }

    fn call(&mut self, method: &str, params: Value) -> Result<Value> {
        self.last += 1;
        let mut command = json!({"id": self.last, "method": method, "params": params});
        if !self.session.is_empty() {
            command["sessionId"] = self.session.clone().into();
        }
        let mut bytes = command.to_string().into_bytes();
        bytes.push(0);
        self.commands.write_all(&bytes).context("the browser ended")?;
        let end = Instant::now() + LIMIT;
        loop {
            let mut answer = self
                .answers
                .recv_timeout(end.saturating_duration_since(Instant::now()))
                .with_context(|| format!("the browser did not answer {method}"))?;
            if answer["id"] == self.last {
                ensure!(answer.get("error").is_none(), "{method}: {}", answer["error"]["message"]);
                return Ok(answer["result"].take());
            }
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // An error means that it has already exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.profile);
    }
}

/// Time limit for an answer, and for the page to be drawn.
const LIMIT: Duration = Duration::from_secs(30);
