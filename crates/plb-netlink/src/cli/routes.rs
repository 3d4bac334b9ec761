//! The `route ...` commands.

use plb_netlink::Result;
use plb_netlink::route::{self, Change, Route};
use serde_json::{Value, json};

use super::Answer;
use super::args::{OnOff, RouteArgs, RouteCommand, RouteSetArgs};
use super::output::{Output, or_dash, table};

pub(crate) fn run(output: Output, args: &RouteArgs) -> Result<Answer> {
    match &args.command {
        None | Some(RouteCommand::List) => list(output),
        Some(RouteCommand::Set(args)) => set(output, args),
    }
}

fn list(output: Output) -> Result<Answer> {
    let routes = route::list()?;
    let value: Vec<Value> = routes.iter().map(as_json).collect();
    output.print(&json!(value), || {
        let rows: Vec<[String; 6]> = routes
            .iter()
            .map(|route| {
                let gateways: Vec<String> = route.gateways.iter().map(ToString::to_string).collect();
                [
                    route.destination.to_string(),
                    route.devices.join(", "),
                    if gateways.is_empty() { "-".to_owned() } else { gateways.join(", ") },
                    or_dash(route.congestion.as_ref()),
                    if route.locked { "locked" } else { "-" }.to_owned(),
                    if route.ecn { "on" } else { "-" }.to_owned(),
                ]
            })
            .collect();
        table(["DESTINATION", "DEVICE", "VIA", "CC", "LOCK", "ECN"], &rows)
    });
    Ok(Answer::Good)
}

fn set(output: Output, args: &RouteSetArgs) -> Result<Answer> {
    let route = route::find(args.prefix)?;
    let on = |value: Option<OnOff>| value.map(|value| value == OnOff::On);
    let change = Change {
        congestion: args.congestion.clone().map(|name| if name == "none" { String::new() } else { name }),
        locked: on(args.lock),
        ecn: on(args.ecn),
    };
    let after = if output.dry_run { None } else { Some(route::set(&route, &change)?) };
    let wanted = [
        args.congestion.as_ref().map(|name| format!("congestion control {name}")),
        change.locked.map(|on| format!("lock {}", if on { "on" } else { "off" })),
        change.ecn.map(|on| format!("ECN {}", if on { "on" } else { "off" })),
    ];
    let wanted: Vec<String> = wanted.into_iter().flatten().collect();
    let what = format!(
        "set route {}: {}",
        route.destination,
        if wanted.is_empty() { "nothing to change".to_owned() } else { wanted.join(", ") }
    );
    output.changed(&what, json!({"before": as_json(&route), "after": after.as_ref().map(as_json)}));
    Ok(Answer::Good)
}

fn as_json(route: &Route) -> Value {
    json!({
        "destination": route.destination.to_string(),
        "priority": route.priority,
        "devices": route.devices,
        "gateways": route.gateways.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "congestion_control": route.congestion,
        "locked": route.locked,
        "ecn": route.ecn,
    })
}
