//! The antagonist: on request, burns CPU on the core that it shares with a replica.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use http::{Method, StatusCode};

use crate::service;
use crate::web;

/// Port on which burning is switched on.
pub(crate) const PORT: u16 = 8083;

/// Burns CPU for a while after `POST /burn?seconds=20`; otherwise idle.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    /// Address of the control port
    #[arg(long, default_value_t = SocketAddr::from(([0, 0, 0, 0], PORT)))]
    listen: SocketAddr,
}

pub(crate) async fn run(args: Args) -> Result<()> {
    let until = Arc::new(Mutex::new(Instant::now()));
    let burning = until.clone();
    // Orders are read on a different thread from the one that burns.
    std::thread::spawn(move || burn(&burning));
    web::serve(args.listen, move |call| {
        let reply = match (&call.method, call.path.as_str()) {
            (&Method::GET, "/healthz") => web::text(StatusCode::OK, "ok\n"),
            (&Method::POST, "/burn") => match service::seconds(&call) {
                Ok(seconds) => {
                    *until.lock().unwrap_or_else(PoisonError::into_inner) =
                        Instant::now() + Duration::from_secs(seconds);
                    web::text(StatusCode::OK, "ok\n")
                }
                Err(why) => web::text(StatusCode::BAD_REQUEST, why),
            },
            _ => web::text(StatusCode::NOT_FOUND, "POST /burn?seconds=...\n"),
        };
        async move { reply }
    })
    .await
}

fn burn(until: &Mutex<Instant>) {
    loop {
        if Instant::now() < *until.lock().unwrap_or_else(PoisonError::into_inner) {
            service::compute(1_000_000);
        } else {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
