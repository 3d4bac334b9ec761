//! A guest machine in QEMU, without KVM: a distribution kernel, and a file system in memory that holds the programs of
//! a test.
//!
//! A kernel package from Debian's backports is unpacked but never installed. apt works on its own folders under
//! `target/guest/`, so the machine's package lists stay as they are.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use crate::commands::debian;
use crate::{progress, run, workspace};

/// The reason why this machine cannot run a guest, if any. Checked before anything is fetched.
pub(crate) fn missing() -> Option<String> {
    if std::env::consts::ARCH != "x86_64" {
        return Some(format!("the guest kernel is for x86_64, this is {}", std::env::consts::ARCH));
    }
    if !run::succeeds(run::tool("apt-get").arg("--version")) {
        return Some(
            "the guest kernel comes from Debian's packages, and there is no apt-get here".to_owned(),
        );
    }
    debian::install(&TOOLS).err().map(|error| progress::last_line(&error))
}

/// A guest that has not been started yet.
pub(crate) struct Guest {
    name: &'static str,
    kernel: Kernel,
    /// The folder that becomes the guest's file system.
    root: PathBuf,
    /// Memory in MiB.
    memory: u32,
}

impl Guest {
    /// A guest with busybox and a shell. Fetches the kernel and installs QEMU if they are missing.
    pub(crate) fn new(name: &'static str, memory: u32) -> Result<Self> {
        if let Some(why) = missing() {
            bail!("{why}");
        }
        let kernel = Kernel::fetch()?;
        let root = folder().join(name);
        if root.exists() {
            fs::remove_dir_all(&root)?;
        }
        for part in ["bin", "sbin", "proc", "sys", "dev", "tmp", "run", "modules", "etc"] {
            fs::create_dir_all(root.join(part))?;
        }
        let guest = Self { name, kernel, root, memory };
        copy(&which("busybox")?, &guest.root.join("bin/busybox"))?;
        // Debian's busybox shell prefers its built-in `ip` over the one in PATH; dash does not.
        guest.tool("dash", "bin/sh")?;
        guest.tool("ip", "sbin/ip")?;
        Ok(guest)
    }

    /// Adds a program of this machine, with its libraries. `to` is its path in the guest, without a leading slash.
    pub(crate) fn tool(&self, program: &str, to: &str) -> Result<()> {
        let path = which(program)?;
        copy(&path, &self.root.join(to))?;
        libraries(&path, &self.root)
    }

    /// Adds a program that was built here, stripped, and its libraries.
    pub(crate) fn built(&self, program: &Path, to: &str) -> Result<()> {
        copy(program, &self.root.join(to))?;
        run::output(run::tool("strip").arg(self.root.join(to)))?;
        libraries(program, &self.root)
    }

    /// Adds kernel modules. Each may depend only on those before it.
    pub(crate) fn modules(&self, modules: &[&str]) -> Result<()> {
        for (index, module) in modules.iter().enumerate() {
            let found = run::output(
                run::tool("find").arg(&self.kernel.modules).args(["-name", &format!("{module}.ko*")]),
            )?;
            let found = found.lines().next().with_context(|| format!("the kernel has no module {module}"))?;
            let to = self.root.join("modules").join(format!("{index:02}-{module}.ko"));
            match Path::new(found).extension().and_then(|extension| extension.to_str()) {
                Some("xz") => fs::write(&to, decompressed("xz", found)?)?,
                Some("zst") => fs::write(&to, decompressed("zstd", found)?)?,
                _ => copy(Path::new(found), &to)?,
            }
        }
        Ok(())
    }

    /// Runs `command` in the guest and shows its output. Fails if the command fails or takes longer than `limit`.
    pub(crate) fn run(&self, command: &str, limit: Duration) -> Result<()> {
        let init = self.root.join("init");
        fs::write(&init, INIT.replace("COMMAND", command))?;
        run::output(run::tool("chmod").arg("755").arg(&init))?;
        let packed = folder().join(format!("{}.gz", self.name));
        let pack = format!("find . | cpio --quiet -o -H newc | gzip -1 > '{}'", packed.display());
        run::output(run::tool("sh").args(["-c", &pack]).current_dir(&self.root))?;
        // Under emulation, the kernel sometimes crashes while it boots.
        for _ in 0..3 {
            if self.boot(&packed, limit)? {
                return Ok(());
            }
            progress::say("the guest's kernel crashed while it booted");
        }
        bail!("the guest's kernel crashed in each of three boots")
    }

    /// Runs the guest until it ends and shows its output. Returns false if the kernel crashed before the command ran.
    fn boot(&self, initramfs: &Path, limit: Duration) -> Result<bool> {
        progress::headline("booting the guest (QEMU without KVM)");
        let started = Instant::now();
        let mut child = Command::new("qemu-system-x86_64")
            // Without -cx16, guests crash in QEMU 7.2 because of its emulation of cmpxchg16b.
            .args(["-accel", "tcg,thread=multi", "-cpu", "max,-cx16", "-smp", "2"])
            .args(["-m", &self.memory.to_string()])
            .args(["-nographic", "-no-reboot", "-nodefaults", "-serial", "stdio"])
            .arg("-kernel")
            .arg(&self.kernel.image)
            .arg("-initrd")
            .arg(initramfs)
            .args(["-append", "console=ttyS0 panic=-1 quiet mitigations=off"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start qemu-system-x86_64")?;
        let console = child.stdout.take().context("the guest's console")?;
        let (send, lines) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut reader = BufReader::new(console);
            let mut bytes = Vec::new();
            while reader.read_until(b'\n', &mut bytes).is_ok_and(|n| n > 0) {
                if send.send(String::from_utf8_lossy(&bytes).trim_end().to_owned()).is_err() {
                    break;
                }
                bytes.clear();
            }
        });
        let mut console = Vec::new();
        let mut ended = None;
        while let Ok(line) = lines.recv_timeout(limit.saturating_sub(started.elapsed())) {
            if let Some((_, said)) = line.split_once("guest: ") {
                progress::say(said);
            }
            if let Some((_, code)) = line.split_once("guest-exit: ") {
                ended = code.trim().parse::<i32>().ok();
            }
            console.push(line);
        }
        // Either QEMU has exited by itself, or its time is up.
        let _ = child.kill();
        child.wait()?;
        let has = |text: &str| console.iter().any(|line| line.contains(text));
        if ended.is_none() && has("Kernel panic") && !has("guest: ") {
            return Ok(false);
        }
        let tail = console[console.len().saturating_sub(15)..].join("\n");
        let took = progress::seconds(started.elapsed());
        ensure!(
            ended.is_some(),
            "the guest printed no result within {took}; the end of its console:\n{tail}"
        );
        ensure!(
            ended == Some(0),
            "the test failed in the guest (after {took}); the end of its console:\n{tail}"
        );
        progress::say(format_args!("guest done in {took}"));
        Ok(true)
    }
}

/// An unpacked kernel package.
struct Kernel {
    image: PathBuf,
    modules: PathBuf,
}

impl Kernel {
    fn fetch() -> Result<Self> {
        let root = folder().join("kernel");
        if !root.is_dir() {
            let scratch = folder().join(format!(".kernel-{}", std::process::id()));
            fs::create_dir_all(&scratch)?;
            let unpacked = unpack(&scratch).and_then(|()| Ok(fs::rename(&scratch, &root)?));
            if unpacked.is_err() {
                fs::remove_dir_all(&scratch)?;
            }
            unpacked?;
        }
        let image = only_entry(&root.join("boot"), "vmlinuz-")?;
        // Debian before trixie has modules in /lib, later in /usr/lib.
        let modules = [root.join("lib/modules"), root.join("usr/lib/modules")]
            .iter()
            .find(|path| path.is_dir())
            .context("the kernel package has no modules")
            .and_then(|modules| only_entry(modules, ""))?;
        Ok(Self { image, modules })
    }
}

/// Downloads the cloud kernel from this Debian's backports and unpacks it into `root`.
fn unpack(root: &Path) -> Result<()> {
    let apt = folder().join("apt");
    for part in ["lists/partial", "cache/archives/partial"] {
        fs::create_dir_all(apt.join(part))?;
    }
    // Use the mirror and keys of the machine's own sources.
    let listed = run::output(run::tool("apt-get").args([
        "indextargets",
        "--format",
        "$(REPO_URI) $(CODENAME)",
        "Created-By: Packages",
        "Origin: Debian",
        "Component: main",
    ]))?;
    let (mirror, codename) = listed
        .lines()
        .filter_map(|line| line.split_once(' '))
        .find(|(_, codename)| !codename.contains('-'))
        .context("apt knows no Debian mirror here; the guest kernel is one of Debian's packages")?;
    let keys = "/usr/share/keyrings/debian-archive-keyring.gpg";
    fs::write(
        apt.join("sources.list"),
        format!("deb [signed-by={keys}] {mirror} {codename}-backports main\n"),
    )?;
    let options = [
        format!("Dir::Etc::SourceList={}", apt.join("sources.list").display()),
        "Dir::Etc::SourceParts=-".to_owned(),
        format!("Dir::State::Lists={}", apt.join("lists").display()),
        format!("Dir::Cache={}", apt.join("cache").display()),
        "APT::Sandbox::User=".to_owned(),
    ];
    let tool = |program: &str| {
        let mut command = run::tool(program);
        command.args(options.iter().flat_map(|option| ["-o", option]));
        command
    };
    progress::silently("asking Debian's backports for a kernel", || {
        run::output(tool("apt-get").arg("update"))
    })?;
    let depends = run::output(tool("apt-cache").args(["depends", "linux-image-cloud-amd64"]))?;
    let package = depends
        .lines()
        .find_map(|line| line.trim().strip_prefix("Depends: "))
        .context("the backports have no linux-image-cloud-amd64")?
        .to_owned();
    progress::silently(&format!("fetching {package} (about 34 MB)"), || {
        run::output(tool("apt-get").args(["download", &package]).current_dir(root))
    })?;
    let deb = only_entry(root, &package)?;
    progress::silently("unpacking it", || run::output(run::tool("dpkg").arg("-x").arg(&deb).arg(root)))?;
    Ok(fs::remove_file(deb)?)
}

/// Copies the libraries that a program is linked against to the same paths in the guest.
fn libraries(program: &Path, root: &Path) -> Result<()> {
    let listed = run::output(run::tool("ldd").arg(program))?;
    for word in listed.split_whitespace().filter(|word| word.starts_with('/')) {
        let to = root.join(word.trim_start_matches('/'));
        if !to.exists() {
            copy(Path::new(word), &to)?;
        }
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to.parent().context("a file in a folder")?)?;
    fs::copy(from, to).with_context(|| format!("copying {}", from.display()))?;
    Ok(())
}

fn decompressed(program: &str, path: &str) -> Result<Vec<u8>> {
    let output = run::tool(program)
        .args(["-dc", path])
        .output()
        .with_context(|| format!("cannot start `{program}`"))?;
    ensure!(output.status.success(), "`{program} -dc {path}` failed");
    Ok(output.stdout)
}

fn which(program: &str) -> Result<PathBuf> {
    let found =
        run::output(run::tool("sh").args(["-c", &format!("command -v {program}")])).with_context(|| {
            format!("`{program}` is not here (Debian: iproute2, busybox-static, dash, util-linux)")
        })?;
    Ok(PathBuf::from(found.trim()))
}

/// The only entry of a folder whose name starts with `prefix`.
fn only_entry(folder: &Path, prefix: &str) -> Result<PathBuf> {
    fs::read_dir(folder)
        .with_context(|| format!("reading {}", folder.display()))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix)))
        .with_context(|| format!("nothing called {prefix}* in {}", folder.display()))
}

fn folder() -> PathBuf {
    workspace::target().join("guest")
}

/// Programs and the Debian packages that provide them.
const TOOLS: [(&str, &str); 7] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("busybox", "busybox-static"),
    ("cpio", "cpio"),
    ("ip", "iproute2"),
    ("tc", "iproute2"),
    ("xz", "xz-utils"),
    ("strip", "binutils"),
];

/// The guest's init script.
const INIT: &str = "\
#!/bin/sh
export PATH=/bin:/sbin
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sysfs /sys
$b mount -t devtmpfs devtmpfs /dev
$b mount -t tmpfs tmpfs /tmp
$b mount -t tmpfs tmpfs /run
$b mkdir -p /run/netns /var
$b ln -s /run /var/run
for module in /modules/*.ko; do
  [ ! -e \"$module\" ] || $b insmod \"$module\" || echo \"guest: no $module\"
done
ip link set lo up
{ COMMAND; echo $? > /tmp/code; } 2>&1 | while IFS= read -r line; do printf 'guest: %s\n' \"$line\"; done
echo \"guest-exit: $($b cat /tmp/code)\"
$b poweroff -f
";
