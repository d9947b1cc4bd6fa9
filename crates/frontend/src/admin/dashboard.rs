//! `/dashboard`: the operators' page, and the stream of events that keeps it up to date.
//!
//! The page is static, and compiled into the binary: what it shows comes from the stream and from the other operators'
//! routes, with the operator's token. One task, [`run`], reads the process once a second: into the history of traffic
//! always, into an event only while somebody watches. The event is encoded once for all viewers.
//!
//! What always holds: the page loads nothing from elsewhere and runs nothing but its own files; the stream needs what
//! operators' routes need.

mod encoder;
mod fleet;
mod latest;

use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use kvasir_openai::ApiError;
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;

use crate::App;
use crate::http::reply::{self, Reply};
use crate::observe::feed::{Join, NoStream};
use encoder::Encoder;

/// Time between two events.
pub(crate) const TICK: Duration = Duration::from_secs(1);
/// What the page may do: run and show its own files, and ask its own server.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";
/// Names the last event that a viewer saw.
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
/// What is said when too many watch.
const FULL: &str = "Too many dashboards are open; close one and try again";
/// What is said by a server that is ending.
const ENDED: &str = "The server is ending";

/// A file of the page.
struct PageFile {
    name: &'static str,
    content_type: &'static str,
    text: &'static str,
}

macro_rules! files {
    ($($name:literal: $content_type:literal from $path:literal),* $(,)?) => {
        &[$(PageFile {
            name: $name,
            content_type: $content_type,
            text: include_str!(concat!("../../../../dashboard/", $path)),
        }),*]
    };
}

/// The files of the page; the first is the page itself.
const FILES: &[PageFile] = files![
    "": "text/html; charset=utf-8" from "index.html",
    "base.css": "text/css; charset=utf-8" from "base.css",
    "dashboard.css": "text/css; charset=utf-8" from "dashboard.css",
    "icon.svg": "image/svg+xml" from "icon.svg",
    "actions.js": "text/javascript; charset=utf-8" from "dist/actions.js",
    "api.js": "text/javascript; charset=utf-8" from "dist/api.js",
    "charts.js": "text/javascript; charset=utf-8" from "dist/charts.js",
    "decisions.js": "text/javascript; charset=utf-8" from "dist/decisions.js",
    "dom.js": "text/javascript; charset=utf-8" from "dist/dom.js",
    "explain.js": "text/javascript; charset=utf-8" from "dist/explain.js",
    "fleet.js": "text/javascript; charset=utf-8" from "dist/fleet.js",
    "format.js": "text/javascript; charset=utf-8" from "dist/format.js",
    "main.js": "text/javascript; charset=utf-8" from "dist/main.js",
    "models.js": "text/javascript; charset=utf-8" from "dist/models.js",
    "overview.js": "text/javascript; charset=utf-8" from "dist/overview.js",
    "settings.js": "text/javascript; charset=utf-8" from "dist/settings.js",
    "state.js": "text/javascript; charset=utf-8" from "dist/state.js",
    "stream.js": "text/javascript; charset=utf-8" from "dist/stream.js",
    "what_if.js": "text/javascript; charset=utf-8" from "dist/what_if.js",
];

/// The page, or one of its files.
pub(crate) fn page(name: &str) -> Reply {
    let Some(file) = FILES.iter().find(|file| file.name == name) else {
        return reply::error(&ApiError::route_not_found(
            "GET",
            &format!("/dashboard/{name}"),
        ));
    };
    let text = Bytes::from_static(file.text.as_bytes());
    let content_type = HeaderValue::from_static(file.content_type);
    let mut reply = reply::whole(StatusCode::OK, content_type, text);
    let headers = reply.headers_mut();
    for (name, value) in [
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        // A newer binary has other files under the same names.
        (CACHE_CONTROL, "no-cache"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    reply
}

/// The stream of events, from where the viewer left it.
pub(crate) fn stream(app: &App, headers: &HeaderMap) -> Reply {
    let after = headers.get(LAST_EVENT_ID).and_then(|id| id.to_str().ok());
    match app.observer().feed().open(after) {
        Ok(viewer) => reply::events(Box::new(viewer)),
        Err(NoStream::Full) => {
            app.http().limit_reached("dashboard_viewers");
            reply::error(&ApiError::new(503, FULL))
        }
        Err(NoStream::Ended) => reply::error(&ApiError::new(503, ENDED)),
    }
}

/// Begins to keep the history of traffic and to take viewers in; once.
pub(crate) fn start(app: &Arc<App>) {
    if !app.options().admin_enabled {
        return;
    }
    if let Some(joins) = app.observer().feed().start() {
        let tasks = app.tasks().background();
        tasks.spawn(run(Arc::downgrade(app), joins));
    }
}

/// Makes the events until the server ends.
async fn run(app: Weak<App>, mut joins: mpsc::Receiver<Join>) {
    let Some(draining) = app.upgrade().map(|app| app.tasks().clone()) else {
        return;
    };
    let mut encoder = Encoder::default();
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let join = tokio::select! {
            _ = ticks.tick() => None,
            Some(join) = joins.recv() => Some(join),
            () = draining.draining() => return,
        };
        let Some(app) = app.upgrade() else {
            return;
        };
        match join {
            // Another process serves: viewers find it when their streams end.
            _ if app.is_handed_over() => encoder = Encoder::default(),
            Some(join) => encoder.join(&app, &join),
            None => encoder.tick(&app),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_that_the_page_names_is_there_and_none_is_elsewhere() {
        for file in FILES {
            // Names of XML are no addresses that anything is loaded from.
            let text = file.text.replace("http://www.w3.org/", "");
            let loads = [
                "=\"http",
                "=\"//",
                "url(",
                "from \"http",
                "import(",
                "fetch(\"http",
                "@import",
            ];
            for word in loads {
                assert!(!text.contains(word), "{}: {word}", file.name);
            }
            for import in text.split("from \"./").skip(1) {
                let name = import.split('"').next().unwrap();
                assert!(FILES.iter().any(|file| file.name == name), "{name}");
            }
            for write in [
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
            ] {
                assert!(!text.contains(write), "{}: {write}", file.name);
            }
        }
        let page = FILES[0].text;
        for named in page.split("/dashboard/").skip(1) {
            let name = named.split('"').next().unwrap();
            assert!(FILES.iter().any(|file| file.name == name), "{name}");
        }
        assert!(
            !page.contains("style=") && !page.contains("<style"),
            "the policy refuses it"
        );
    }
}
