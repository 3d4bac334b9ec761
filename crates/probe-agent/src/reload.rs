//! Reads files again when they change. The value made from the old files stays in use until a usable one can be made
//! from the new files.
//!
//! A change is a different file behind the path (symbolic links are followed: Kubernetes swaps `..data`), a different
//! size or a different time. A certificate and its key are two files, so new files are used once nothing has changed
//! for one interval. The caller decides what the files contain and where an attempt is reported.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

/// Makes a `T` from the files.
type Make<T, E> = Box<dyn Fn() -> Result<T, E> + Send + Sync>;

/// Value that was last made from some files.
pub(crate) struct Reloaded<T, E> {
    files: Vec<PathBuf>,
    make: Make<T, E>,
    current: RwLock<T>,
    /// State of the files just before `current` was first made.
    origin: Vec<Stamp>,
}

impl<T, E> Reloaded<T, E>
where
    T: Clone + Send + Sync + 'static,
    E: From<io::Error> + Send + 'static,
{
    /// Makes the value for the first time.
    pub(crate) fn new(files: Vec<PathBuf>, make: Make<T, E>) -> Result<Self, E> {
        let origin = stamps(&files);
        let current = RwLock::new(make()?);
        Ok(Self { files, make, current, origin })
    }

    pub(crate) fn current(&self) -> T {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Checks the files every `interval`, and calls `attempted` with the result of each attempt to use new ones. Files
    /// that could not be used are tried again after [`RETRY`] checks, because the cause may not be in the files. Never
    /// ends.
    pub(crate) async fn watch(self: Arc<Self>, interval: Duration, attempted: impl Fn(Result<T, E>)) {
        if self.files.is_empty() {
            return std::future::pending().await;
        }
        let mut used = self.origin.clone();
        let mut seen = used.clone();
        // Number of checks since the last attempt, if that failed.
        let mut failed = None::<u32>;
        loop {
            tokio::time::sleep(interval).await;
            let this = self.clone();
            let Ok(now) = tokio::task::spawn_blocking(move || stamps(&this.files)).await else { continue };
            failed = failed.map(|looks| looks + 1);
            if now != seen || now == used && failed.is_none_or(|looks| looks < RETRY) {
                seen = now;
                continue;
            }
            used = now;
            let this = self.clone();
            let made = tokio::task::spawn_blocking(move || (this.make)()).await;
            let made = made.unwrap_or_else(|panicked| Err(io::Error::other(panicked).into()));
            failed = made.is_err().then_some(0);
            if let Ok(made) = &made {
                *self.current.write().unwrap_or_else(PoisonError::into_inner) = made.clone();
            }
            attempted(made);
        }
    }
}

/// Number of checks between two attempts. Valid files can also fail, for example if no file descriptor is left or if a
/// file is not readable yet.
const RETRY: u32 = 60;

fn stamps(files: &[PathBuf]) -> Vec<Stamp> {
    files.iter().map(|file| Stamp::of(file)).collect()
}

/// File behind a path, and its state; `None` if the path leads nowhere.
#[derive(Clone, Eq, PartialEq)]
struct Stamp(Option<[i64; 5]>);

impl Stamp {
    fn of(path: &Path) -> Self {
        Self(fs::metadata(path).ok().map(|meta| {
            // The change time of the inode also reveals a file that was renamed over the old one and kept its other
            // times.
            [
                meta.dev().cast_signed(),
                meta.ino().cast_signed(),
                meta.size().cast_signed(),
                meta.ctime(),
                meta.ctime_nsec(),
            ]
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// Watches files that hold numbers. Returns their sum, and the results that `watch` reported.
    async fn watched(files: Vec<PathBuf>) -> (Arc<Reloaded<u32, io::Error>>, Arc<Mutex<Vec<Option<u32>>>>) {
        let paths = files.clone();
        let make = move || {
            let numbers = paths
                .iter()
                .map(|path| fs::read_to_string(path)?.trim().parse::<u32>().map_err(io::Error::other));
            numbers.sum()
        };
        let reloaded = Arc::new(Reloaded::new(files, Box::new(make)).unwrap());
        let results = Arc::<Mutex<Vec<Option<u32>>>>::default();
        let log = results.clone();
        tokio::spawn(reloaded.clone().watch(Duration::from_millis(20), move |made: io::Result<u32>| {
            log.lock().unwrap().push(made.ok());
        }));
        (reloaded, results)
    }

    /// Waits until the last attempt has this result. Earlier attempts may have read the files between two writes.
    async fn eventually(results: &Mutex<Vec<Option<u32>>>, last: Option<u32>) {
        for _ in 0..1000 {
            if results.lock().unwrap().last() == Some(&last) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{:?} does not end in {last:?}", results.lock().unwrap());
    }

    #[tokio::test]
    async fn new_content_is_used_unless_it_is_bad() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        fs::write(&a, "1").unwrap();
        fs::write(&b, "10").unwrap();
        let (reloaded, results) = watched(vec![a.clone(), b.clone()]).await;
        assert_eq!(reloaded.current(), 11);
        fs::write(&a, "200").unwrap();
        fs::write(&b, "2000").unwrap();
        eventually(&results, Some(2200)).await;
        fs::write(&a, "not a number").unwrap();
        eventually(&results, None).await;
        assert_eq!(reloaded.current(), 2200);
        fs::remove_file(&b).unwrap();
        fs::write(&a, "33").unwrap();
        fs::write(&b, "3300").unwrap();
        eventually(&results, Some(3333)).await;
        assert_eq!(reloaded.current(), 3333);
    }

    #[tokio::test]
    async fn a_swapped_symbolic_link_is_a_change() {
        // How the kubelet updates a Secret: a.pem -> ..data/a.pem, ..data -> ..v1, and a rename replaces ..data.
        let dir = tempfile::tempdir().unwrap();
        for (version, content) in [("..v1", "1"), ("..v2", "2")] {
            fs::create_dir(dir.path().join(version)).unwrap();
            fs::write(dir.path().join(version).join("a"), content).unwrap();
        }
        let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, dir.path().join(name)).unwrap();
        link("..v1", "..data");
        link("..data/a", "a");
        let (reloaded, results) = watched(vec![dir.path().join("a")]).await;
        assert_eq!(reloaded.current(), 1);
        link("..v2", "..data_tmp");
        fs::rename(dir.path().join("..data_tmp"), dir.path().join("..data")).unwrap();
        eventually(&results, Some(2)).await;
        assert_eq!(reloaded.current(), 2);
    }

    #[tokio::test]
    async fn unusable_content_is_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a");
        fs::write(&file, "1").unwrap();
        let descriptors = Arc::new(Mutex::new(true));
        let (path, left) = (file.clone(), descriptors.clone());
        let make = move || {
            let read = *left.lock().unwrap();
            if read { fs::read_to_string(&path) } else { Err(io::Error::from_raw_os_error(libc::EMFILE)) }
        };
        let reloaded = Arc::new(Reloaded::new(vec![file.clone()], Box::new(make)).unwrap());
        let results = Arc::<Mutex<Vec<Option<u32>>>>::default();
        let log = results.clone();
        tokio::spawn(reloaded.clone().watch(Duration::from_millis(2), move |made: io::Result<String>| {
            log.lock().unwrap().push(made.ok().and_then(|text| text.parse().ok()));
        }));
        *descriptors.lock().unwrap() = false;
        fs::write(&file, "22").unwrap();
        eventually(&results, None).await;
        *descriptors.lock().unwrap() = true;
        eventually(&results, Some(22)).await;
    }
}
