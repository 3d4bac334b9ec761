//! Joins the metrics pages of several replicas into one page. A label distinguishes the replicas. The text format
//! requires all samples of a metric to be together.

/// Joins `pages`, each with the value of its label `replica`. A single page stays unchanged.
pub(crate) fn join(pages: Vec<(String, String)>) -> String {
    if let [(_, page)] = &pages[..] {
        return page.clone();
    }
    let mut families: Vec<(String, String)> = Vec::new();
    for (replica, page) in &pages {
        let mut at = None;
        for line in page.lines() {
            if let Some(rest) = line.strip_prefix("# ") {
                let name = rest.split(' ').nth(1).unwrap_or_default();
                at = families.iter().position(|(known, _)| known == name);
                if at.is_none() || rest.starts_with("TYPE ") && only_help(&families, name) {
                    let at = *at.get_or_insert(families.len());
                    if at == families.len() {
                        families.push((name.to_owned(), String::new()));
                    }
                    let text = &mut families[at].1;
                    text.push_str(line);
                    text.push('\n');
                }
            } else if let Some((_, text)) = at.and_then(|at| families.get_mut(at)) {
                text.push_str(&labelled(line, replica));
                text.push('\n');
            }
        }
    }
    families.into_iter().map(|(_, text)| text).collect()
}

/// Returns whether only the HELP line of the family has been written.
fn only_help(families: &[(String, String)], name: &str) -> bool {
    families.iter().any(|(known, text)| known == name && text.lines().count() == 1)
}

/// Adds a label to a sample such as `name 1` or `name{a="b"} 1`.
fn labelled(sample: &str, replica: &str) -> String {
    let Some((series, value)) = sample.rsplit_once(' ') else { return sample.to_owned() };
    // The path of a Unix socket may contain any character.
    let replica = replica.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    match series.split_once('{') {
        Some((name, labels)) => format!("{name}{{replica=\"{replica}\",{labels} {value}"),
        None => format!("{series}{{replica=\"{replica}\"}} {value}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_of_a_metric_are_grouped_under_one_head() {
        let page = |n: u32, more: &str| {
            format!(
                "# HELP a How.\n# TYPE a gauge\na {n}\n# HELP b How.\n# TYPE b counter\nb{{x=\"y z\"}} {n}\n{more}"
            )
        };
        let more = "# HELP c Some.\n# TYPE c gauge\nc 1\n";
        assert_eq!(join(vec![("one".into(), page(1, more))]), page(1, more));
        let joined = join(vec![("one".into(), page(1, "")), ("two".into(), page(2, more))]);
        assert_eq!(
            joined,
            "# HELP a How.\n# TYPE a gauge\na{replica=\"one\"} 1\na{replica=\"two\"} 2\n\
             # HELP b How.\n# TYPE b counter\nb{replica=\"one\",x=\"y z\"} 1\nb{replica=\"two\",x=\"y z\"} 2\n\
             # HELP c Some.\n# TYPE c gauge\nc{replica=\"two\"} 1\n"
        );
    }

    #[test]
    fn any_socket_path_is_escaped_as_a_label() {
        let joined = join(vec![
            ("unix:/a\"b\\c\nd".into(), "# TYPE a gauge\na 1\n".into()),
            ("e".into(), String::new()),
        ]);
        assert_eq!(joined, "# TYPE a gauge\na{replica=\"unix:/a\\\"b\\\\c\\nd\"} 1\n");
    }
}
