//! Report headers: any bytes are refused or parsed, and what is parsed prints and parses back to the same value.
#![no_main]

use prequal_core::wire::report::LoadReport;

fn seeds() -> Vec<Vec<u8>> {
    [
        "3;50123;127.0.0.1:80",
        "0;;[::1]:8080",
        "1;2;10.0.0.1:80;probe=10.0.0.1:9000;fail=1000;up=0",
        "12;48211;10.1.2.3:8080;up=17;base=20113;knee=4;open=1;steady=1;rse=37",
        "1000000;3600000000;[2001:db8::7]:65535;base=3600000000;knee=65535",
        "1;5;[::ffff:10.0.0.1]:80;age=7;x",
        "7\n1500",
        " 4 ; 5 ; 10.0.0.1:80 ",
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec()
}

fn run(data: &[u8]) {
    if let Ok(report) = LoadReport::parse(data) {
        let printed = report.to_string();
        assert_eq!(LoadReport::parse(&printed), Ok(report), "{printed}");
    }
    // The pair of headers, one per line.
    let mut lines = data.splitn(2, |byte| *byte == b'\n');
    let (rif, latency) = (lines.next().unwrap_or_default(), lines.next());
    if let Ok(report) = LoadReport::parse_pair(rif, latency) {
        let latency = report.latency_us.map(|latency| latency.to_string());
        let again =
            LoadReport::parse_pair(report.rif.to_string().as_bytes(), latency.as_deref().map(str::as_bytes));
        assert_eq!(again, Ok(report));
    }
}

prequal_fuzz::target!(seeds, run);
