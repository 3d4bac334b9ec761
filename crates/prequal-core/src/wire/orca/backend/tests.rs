use super::*;
use proptest::prelude::*;

fn parse(text: &str) -> Result<BackendReport, BackendError> {
    BackendReport::parse(text.as_bytes())
}

fn named(report: &BackendReport) -> Vec<(&str, f64)> {
    report.named().collect()
}

#[test]
fn reports_of_vllm_triton_and_others_are_read() {
    for text in [
        "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0",
        r#"JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}}"#,
        r#"JSON {"namedMetrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": "3"}, "other": []}"#,
    ] {
        let report = parse(text).unwrap();
        let mut metrics = named(&report);
        metrics.sort_by(|one, other| one.0.cmp(other.0));
        assert_eq!(metrics, [("kv_cache_usage_perc", 0.25), ("num_requests_waiting", 3.0)], "{text}");
        assert_eq!((report.utilization_micro(), report.is_partial()), (None, false));
    }
    for text in [
        "TEXT cpu_utilization=0.3,mem_utilization=0.8,application_utilization=1.5,rps_fractional=10.0,eps=1,\
         utilization.disk=0.1,request_cost.tokens=7",
        r#"JSON {"cpu_utilization":0.3,"mem_utilization":0.8,"applicationUtilization":1.5,"rps_fractional":10}"#,
    ] {
        let report = parse(text).unwrap();
        let found = Utilization::ALL.map(|of| report.of(of));
        assert_eq!(found, [Some(1_500_000), Some(300_000), Some(800_000)], "{text}");
        assert!(!report.is_partial() && named(&report).is_empty());
    }
}

#[test]
fn the_utilisation_is_the_applications_else_the_processors() {
    for (text, micro) in [
        ("application_utilization=0.5,cpu_utilization=0.9", Some(500_000)),
        ("application_utilization=0,cpu_utilization=0.9", Some(900_000)),
        ("cpu_utilization=0.9", Some(900_000)),
        ("application_utilization=0", Some(0)),
        ("mem_utilization=0.9", None),
        ("named_metrics.a=0.9", None),
    ] {
        assert_eq!(parse(&format!("TEXT {text}")).unwrap().utilization_micro(), micro, "{text}");
    }
    let mut report =
        parse("TEXT application_utilization=0.5,named_metrics.kv=0.75,named_metrics.bad=-1").unwrap();
    report.go_by(&Metric::Utilization);
    for other in ["bad", "absent"] {
        report.go_by(&Metric::Named(other.into()));
    }
    assert_eq!(report.utilization_micro(), Some(500_000));
    report.go_by(&Metric::Named("kv".into()));
    assert_eq!(report.utilization_micro(), Some(750_000));
    assert_eq!(named(&report), [("kv", 0.75), ("bad", -1.0)], "it also stays a named metric");
}

#[test]
fn senseless_metrics_are_left_out() {
    let long = format!("named_metrics.{}=1", "a".repeat(MAX_NAME + 1));
    for metric in [
        "cpu_utilization=NaN",
        "cpu_utilization=inf",
        "cpu_utilization=-0.1",
        "cpu_utilization=1e999",
        "cpu_utilization=",
        "cpu_utilization=0,5e",
        "named_metrics.a=NaN",
        "named_metrics.a=-inf",
        "named_metrics.a=1e16",
        "named_metrics.=1",
        "named_metrics.a b=1",
        "named_metrics.\"=1",
        "named_metrics.prequal_rif=0",
        &long,
    ] {
        match parse(&format!("TEXT {metric},application_utilization=0.5")) {
            Ok(report) => {
                assert!(report.is_partial() && named(&report).is_empty(), "{metric}: {report:?}");
                assert_eq!(report.utilization_micro(), Some(500_000), "{metric}");
                assert_eq!(report.of(Utilization::Cpu), None, "{metric}");
            }
            Err(error) => assert_eq!(error, BackendError::Malformed, "{metric}"),
        }
    }
    let report = parse("TEXT cpu_utilization=1e9,mem_utilization=1000").unwrap();
    assert_eq!((report.of(Utilization::Cpu), report.is_partial()), (Some(1_000_000_000), true));
    let many: Vec<String> = (0..MAX_NAMED + 1).map(|n| format!("named_metrics.m{n}={n}")).collect();
    let report = parse(&format!("TEXT {}", many.join(","))).unwrap();
    assert_eq!((report.named().count(), report.is_partial()), (MAX_NAMED, true));
    let report = parse("TEXT named_metrics.tiny=-1e-300,named_metrics.small=0.1234567891").unwrap();
    assert_eq!(named(&report), [("tiny", 0.0), ("small", 0.123456789)]);
    assert!(named(&report)[0].1.is_sign_positive());
}

#[test]
fn malformed_reports_are_dropped_entirely() {
    for (text, error) in [
        ("", BackendError::Malformed),
        ("TEXT", BackendError::Malformed),
        ("TEXT cpu_utilization", BackendError::Malformed),
        ("TEXT cpu_utilization=0.1,", BackendError::Malformed),
        ("text cpu_utilization=0.1", BackendError::Malformed),
        ("cpu_utilization=0.1", BackendError::Malformed),
        ("JSON", BackendError::Malformed),
        ("JSON [1]", BackendError::Malformed),
        ("JSON {", BackendError::Malformed),
        (r#"JSON {"named_metrics":7}"#, BackendError::Malformed),
        ("XML <a/>", BackendError::Malformed),
        ("TEXT cpu_utilization=0.1,cpu_utilization=0.1", BackendError::Contradictory),
        ("TEXT named_metrics.a=1, named_metrics.a=2", BackendError::Contradictory),
        (r#"JSON {"cpu_utilization":1,"cpuUtilization":1}"#, BackendError::Contradictory),
        (r#"JSON {"named_metrics":{},"namedMetrics":{}}"#, BackendError::Contradictory),
    ] {
        assert_eq!(parse(text), Err(error), "{text}");
    }
    assert_eq!(BackendReport::parse(b"TEXT a=\xff"), Err(BackendError::Malformed));
    let long = format!("TEXT a=0.{}", "0".repeat(MAX_REPORT));
    assert_eq!(parse(&long), Err(BackendError::TooLong));
    let deep = format!("JSON {}", "[".repeat(MAX_REPORT - 5));
    assert_eq!(parse(&deep), Err(BackendError::Malformed));
}

#[test]
fn the_metric_can_be_configured() {
    for text in ["utilization", "named_metrics.kv"] {
        assert_eq!(Metric::parse(text).unwrap().to_string(), text);
    }
    let long = format!("named_metrics.{}", "a".repeat(MAX_NAME + 1));
    for wrong in ["", "kv", "named_metrics.", "cpu_utilization", &long] {
        assert_eq!(Metric::parse(wrong), None, "{wrong}");
    }
}

/// `OrcaLoadReport` with cpu_utilization 0.25 as protobuf's own encoder writes it.
const QUARTER: &str = "CQAAAAAAANA/";

#[test]
fn binary_reports_are_read() {
    let quarter = BackendReport { utilization: [None, Some(250_000), None], ..BackendReport::default() };
    for text in [format!("BIN {QUARTER}"), format!(" BIN  {QUARTER} ")] {
        assert_eq!(parse(&text), Ok(quarter.clone()), "{text}");
    }
    // rps, rps_fractional and a request cost come before application_utilization and are skipped. A named metric
    // follows.
    let mut bytes =
        vec![0x18, 0x96, 0x01, 0x31, 0, 0, 0, 0, 0, 0, 0x24, 0x40, 0x22, 2, 0x0a, 0, 0x0d, 1, 2, 3, 4];
    // A 32-bit float in field 1 is not a double.
    assert_eq!(binary::Message::decode(&bytes), None);
    bytes.truncate(bytes.len() - 5);
    bytes.extend_from_slice(&[0x49, 0, 0, 0, 0, 0, 0, 0xf8, 0x3f]);
    bytes.extend_from_slice(&[0x42, 13, 0x0a, 2, b'k', b'v', 0x11, 0, 0, 0, 0, 0, 0, 0xe0, 0x3f]);
    let message = binary::Message::decode(&bytes).unwrap();
    assert_eq!((message.cpu, message.memory, message.application), (0.0, 0.0, 1.5));
    assert_eq!(message.named.into_iter().collect::<Vec<_>>(), [("kv", 0.5)]);
    // A message that ends within a field is not accepted.
    let whole = [0, 3, 12, 16, 25];
    for end in 0..bytes.len() {
        assert_eq!(binary::Message::decode(&bytes[..end]).is_some(), whole.contains(&end), "{end} bytes");
    }
    for wrong in [&[0x01, 0, 0, 0, 0, 0, 0, 0, 0][..], &[0x0b], &[0x42, 1, 0x08], &[0x40, 1], &[0xff; 11]] {
        assert_eq!(binary::Message::decode(wrong), None, "{wrong:?}");
    }
}

#[test]
fn base64_is_read_with_padding_and_without() {
    for (text, bytes) in [
        ("", Some("")),
        ("Zg==", Some("f")),
        ("Zg", Some("f")),
        ("Zm8=", Some("fo")),
        ("Zm8", Some("fo")),
        ("Zm9vYmFy", Some("foobar")),
        ("Z", None),
        ("Zg=", None),
        ("=", None),
        ("Zm9v=", None),
        ("Zh", None),
        ("Zm-_", None),
        ("Zm 9v", None),
        ("Zg==Zg==", None),
    ] {
        assert_eq!(binary::base64(text.as_bytes()).as_deref(), bytes.map(str::as_bytes), "{text}");
    }
}

#[test]
fn only_one_report_in_one_header_is_accepted() {
    let read = |text: &[&'static str], bin: &[&'static str]| {
        let bytes = |lines: &[&'static str]| lines.iter().map(|line| line.as_bytes()).collect::<Vec<_>>();
        let report = BackendReport::read(bytes(text).into_iter(), bytes(bin).into_iter())?;
        Some(report.map(|report| report.utilization_micro()))
    };
    let text = "TEXT cpu_utilization=0.25";
    assert_eq!(read(&[], &[]), None);
    assert_eq!(read(&[text], &[]), Some(Ok(Some(250_000))));
    assert_eq!(read(&[], &[QUARTER]), Some(Ok(Some(250_000))));
    assert_eq!(read(&[], &[text]), Some(Err(BackendError::Malformed)));
    for (text, bin) in [(&[text, text][..], &[][..]), (&[], &[QUARTER, QUARTER]), (&[text], &[QUARTER])] {
        assert_eq!(read(text, bin), Some(Err(BackendError::Contradictory)));
    }
}

proptest! {
    #[test]
    fn no_input_panics_and_kept_values_are_within_bounds(
        header in prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..300),
            "(TEXT|JSON|BIN) [ -~]{0,200}".prop_map(String::into_bytes),
            "TEXT (((cpu|mem|application)_utilization|named_metrics\\.[a-z=:]{0,3}) ?= ?-?[0-9.eNainf+-]{0,9},){0,9}eps=1"
                .prop_map(String::into_bytes),
            "JSON \\{\"(cpu_utilization|namedMetrics)\": ?(-?[0-9]{1,400}(e[0-9]{1,3})?|\"[a-z0-9.]{0,5}\"|\\{\"[a-z\"\\\\u00]{0,4}\":1\\})\\}"
                .prop_map(String::into_bytes),
        ],
        utilization: f64,
        value: f64,
        name in "\\PC{0,70}",
    ) {
        let _ = BackendReport::parse_binary(&header);
        let _ = binary::Message::decode(&header);
        let mut report = BackendReport::parse(&header).unwrap_or_default();
        Utilization::ALL.into_iter().for_each(|of| report.put(of, utilization));
        report.put_named(&name, value);
        report.go_by(&Metric::Named(name.into()));
        for micro in Utilization::ALL.into_iter().filter_map(|of| report.of(of)) {
            prop_assert!(micro as f64 <= MAX_UTILIZATION * 1e6);
        }
        prop_assert!(report.named().count() <= MAX_NAMED);
        for (name, value) in report.named() {
            prop_assert!(value.abs() <= MAX_VALUE && name.len() <= MAX_NAME);
            prop_assert!(name.bytes().all(|byte| byte.is_ascii_graphic() && !b"\",=\\".contains(&byte)));
            // At most a sign, 15 digits, a point and 17 digits.
            prop_assert!(value.to_string().len() <= 34, "{}", value);
        }
    }
}
