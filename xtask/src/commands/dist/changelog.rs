//! `CHANGELOG.md`, in the form of Keep a Changelog: `## [<version>] - <date>`.

use anyhow::{Context as _, Result, ensure};

/// The section of `version`: its heading's date, and its text.
pub(crate) fn section<'a>(changelog: &'a str, version: &str) -> Result<(&'a str, String)> {
    let heading = format!("## [{version}] - ");
    let mut lines = changelog.lines().skip_while(|line| !line.starts_with(&heading));
    let first = lines.next().with_context(|| format!("CHANGELOG.md has no section `{heading}<date>`"))?;
    let body: Vec<&str> = lines.take_while(|line| !line.starts_with("## ")).collect();
    let body = body.join("\n").trim().to_owned();
    ensure!(!body.is_empty(), "CHANGELOG.md: the section of {version} is empty");
    Ok((&first[heading.len()..], body))
}

/// Whether the heading has a date such as `2027-01-31`; without one the version is not released.
pub(crate) fn is_dated(date: &str) -> bool {
    let lengths: Vec<usize> = date.split('-').map(str::len).collect();
    lengths == [4, 2, 2] && date.bytes().all(|b| b.is_ascii_digit() || b == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2027-01-31\n\n### Added\n\n- b\n\n\
                        ## [0.1.0] - unreleased\n\n- a\n";

    #[test]
    fn a_section_ends_at_the_next() {
        assert_eq!(section(TEXT, "0.2.0").expect("a section"), ("2027-01-31", "### Added\n\n- b".to_owned()));
        assert_eq!(section(TEXT, "0.1.0").expect("a section"), ("unreleased", "- a".to_owned()));
        assert!(section(TEXT, "0.1").is_err());
        assert!(section("## [1.0.0] - x\n## [0.1.0] - y\n- a", "1.0.0").is_err());
    }

    #[test]
    fn dates() {
        assert!(is_dated("2027-01-31"));
        assert!(!is_dated("unreleased") && !is_dated("27-1-31"));
    }

    #[test]
    fn the_changelog_has_a_section_for_this_version() {
        let path = crate::workspace::root().join("CHANGELOG.md");
        let text = std::fs::read_to_string(path).expect("CHANGELOG.md");
        section(&text, env!("CARGO_PKG_VERSION")).expect("a section");
    }
}
