//! Host resources that the agent's process uses, under the names that Prometheus client libraries use. The values are
//! read from `/proc` for each page. Those that cannot be read are left out.

use std::fmt::Write as _;
use std::fs;

/// Writes the metrics of the build, then those of the process.
pub(crate) fn write(out: &mut String) -> std::fmt::Result {
    let name = "prequal_agent_build_info";
    writeln!(out, "# HELP {name} Always 1; the label is the version.\n# TYPE {name} gauge")?;
    writeln!(out, "{name}{{version=\"{}\"}} 1", env!("CARGO_PKG_VERSION"))?;
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let boot = fs::read_to_string("/proc/stat").unwrap_or_default();
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let open = fs::read_dir("/proc/self/fd").ok().map(|fds| fds.count().saturating_sub(1) as f64);
    for (name, kind, help, value) in [
        (
            "process_cpu_seconds_total",
            "counter",
            "User and system CPU time.",
            field(&stat, UTIME).zip(field(&stat, STIME)).map(|(user, system)| (user + system) / TICKS),
        ),
        (
            "process_start_time_seconds",
            "gauge",
            "Start time of the process, seconds since the epoch.",
            field(&stat, START).zip(named(&boot, "btime")).map(|(start, boot)| boot + start / TICKS),
        ),
        ("process_resident_memory_bytes", "gauge", "Resident memory.", named(&status, "VmRSS:").map(kib)),
        ("process_virtual_memory_bytes", "gauge", "Virtual memory.", named(&status, "VmSize:").map(kib)),
        // One descriptor is that of the directory itself.
        ("process_open_fds", "gauge", "Open file descriptors.", open),
        (
            "process_max_fds",
            "gauge",
            "Maximum number of open file descriptors; absent without a limit.",
            named(&limits, "Max open files"),
        ),
    ] {
        if let Some(value) = value {
            writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}")?;
        }
    }
    Ok(())
}

/// Returns field `number` of `/proc/self/stat`. The second field is a name in brackets and may contain anything.
fn field(stat: &str, number: usize) -> Option<f64> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(number - 3)?.parse().ok()
}

/// Returns the first number on the line that starts with `name`.
fn named(text: &str, name: &str) -> Option<f64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_ascii_whitespace().next()?.parse().ok()
}

fn kib(kib: f64) -> f64 {
    kib * 1024.0
}

const UTIME: usize = 14;
const STIME: usize = 15;
const START: usize = 22;
/// `USER_HZ`: Linux reports times to programs in hundredths of a second, regardless of the kernel's own tick rate.
const TICKS: f64 = 100.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_after_any_name_and_odd_files_do_not_panic() {
        let rest: Vec<String> = (3..=30).map(|n| n.to_string()).collect();
        let stat = format!("1 (a) b) c) {}", rest.join(" "));
        assert_eq!((field(&stat, UTIME), field(&stat, START)), (Some(14.0), Some(22.0)));
        for odd in ["", "1 (a", "1 (a) R", ")"] {
            assert_eq!(field(odd, UTIME), None, "{odd}");
        }
        let limits = "Limit  Soft\nMax open files            1024  4096  files\n";
        assert_eq!(named(limits, "Max open files"), Some(1024.0));
        assert_eq!(named("Max open files  unlimited\n", "Max open files"), None);
    }

    #[test]
    fn a_process_has_every_metric() {
        let mut page = String::new();
        write(&mut page).unwrap();
        let value = |name: &str| -> f64 {
            let line = page.lines().find(|line| line.starts_with(&format!("{name} ")));
            line.unwrap_or_else(|| panic!("{name} not in\n{page}"))
                .rsplit_once(' ')
                .unwrap()
                .1
                .parse()
                .unwrap()
        };
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
        assert!((now - value("process_start_time_seconds")).abs() < 600.0);
        assert!(value("process_resident_memory_bytes") > 1e6);
        assert!(value("process_virtual_memory_bytes") >= value("process_resident_memory_bytes"));
        assert!(value("process_open_fds") >= 3.0 && value("process_max_fds") >= value("process_open_fds"));
        assert!(value("process_cpu_seconds_total") < 600.0);
    }
}
