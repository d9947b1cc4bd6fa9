//! Workers chosen and booked by a program that forwards requests itself, without planes: `kvasir select` inside Python.
//!
//! Answers one question: what does the selection service say to this request? The service is `kvasir-services`'s own; requests and answers
//! are the bodies of its routes, so that both mean the same.
//!
//! What always holds: questions wait without the GIL; after `shutdown` nothing listens to engines any more, and every question is refused.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvasir_config::{Settings, keys};
use kvasir_embed::{say_log_lines, settings_of};
use kvasir_host::HostContext;
use kvasir_services::{Answer, AnswerBody, Api, Ask, ReplicaSync, SelectOptions, Selector, Verb};
use kvasir_setup::service_setup;
use kvasir_tasks::Tasks;
use kvasir_telemetry::{Clock, MetricOptions, Metrics};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::client::draw;
use crate::errors::Failure;
use crate::process;

/// Longest idle time of a session, in seconds.
const SESSION_TTL_MAX: u64 = 31_536_000;

/// The service: what `kvasir.llm.SelectionService` is made from.
#[pyclass(frozen, module = "kvasir._native")]
pub(crate) struct Selection {
    service: Mutex<Option<Arc<Selector>>>,
    tasks: Tasks,
}

fn select_options(settings: &Settings) -> SelectOptions {
    SelectOptions {
        ttl: settings.get(keys::SELECTION_CACHE_TTL_SECS),
        entries_max: settings.get(keys::SELECTION_CACHE_MAX_ENTRIES) as usize,
        bytes_max: usize::try_from(settings.get(keys::SELECTION_CACHE_MAX_BYTES))
            .unwrap_or(usize::MAX),
    }
}

fn verb(name: &str) -> PyResult<Verb> {
    Ok(match name {
        "GET" => Verb::Get,
        "POST" => Verb::Post,
        "PATCH" => Verb::Patch,
        "DELETE" => Verb::Delete,
        _ => return Err(PyValueError::new_err(format!("no verb is called {name}"))),
    })
}

/// Status and body of an answer.
async fn told(answer: Answer) -> (u16, Vec<u8>) {
    let body = match answer.body {
        AnswerBody::Empty => Vec::new(),
        AnswerBody::Json(bytes) | AnswerBody::Bytes(bytes) => bytes.to_vec(),
        AnswerBody::Text(text) => text.into_bytes(),
        AnswerBody::JsonParts(mut parts) => {
            let mut whole = Vec::new();
            while let Some(Some(part)) = parts.recv().await {
                whole.extend_from_slice(&part);
            }
            whole
        }
    };
    (answer.status, body)
}

impl Selection {
    fn lock(&self) -> MutexGuard<'_, Option<Arc<Selector>>> {
        self.service.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn answer(service: Option<Arc<Selector>>, ask: Ask) -> (u16, Vec<u8>) {
        match service {
            Some(service) => told(service.answer(ask).await).await,
            None => told(Answer::refusal(503, "selection service is shutting down")).await,
        }
    }
}

fn ask(name: &str, path: String, body: Vec<u8>) -> PyResult<Ask> {
    Ok(Ask {
        verb: verb(name)?,
        path,
        query: None,
        body: body.into(),
    })
}

#[pymethods]
impl Selection {
    /// Options come from the environment, as for `kvasir select`; what is given here comes before them.
    #[new]
    #[pyo3(signature = (cache, session_ttl_secs=None, sync_port=None, sync_peers=Vec::new()))]
    fn new(
        py: Python<'_>,
        cache: (Option<String>, Option<String>, Option<String>),
        session_ttl_secs: Option<u64>,
        sync_port: Option<u16>,
        sync_peers: Vec<String>,
    ) -> PyResult<Self> {
        let bad = |error: &dyn std::fmt::Display| PyValueError::new_err(error.to_string());
        let (ttl, entries, bytes) = cache;
        let words = [
            ("selection-cache-ttl-secs", ttl.as_deref()),
            ("selection-cache-max-entries", entries.as_deref()),
            ("selection-cache-max-bytes", bytes.as_deref()),
        ];
        let settings = settings_of("select", &words).map_err(|error| bad(&error))?;
        say_log_lines(&settings);
        let mut setup = service_setup(&settings).map_err(|error| bad(&error))?;
        if let Some(secs) = session_ttl_secs {
            if !(1..=SESSION_TTL_MAX).contains(&secs) {
                let text = format!("session_affinity_ttl_secs is from 1 to {SESSION_TTL_MAX}");
                return Err(PyValueError::new_err(text));
            }
            setup.config.router_session_affinity_ttl_secs = Some(secs);
        }
        let tasks = Tasks::new();
        let context = HostContext {
            clock: Clock::new(),
            metrics: Metrics::new(&MetricOptions::default()).map_err(|error| bad(&error))?,
            tasks: tasks.clone(),
        };
        let service = process::wait(py, async {
            let sync = match sync_port {
                None => None,
                Some(port) => {
                    let host = settings.get(keys::HTTP_HOST);
                    let sync = ReplicaSync::bind(&host, port, draw(), &context).await;
                    let text = format!("cannot listen on {host}:{port}");
                    let why = |error| Failure::Named("CannotConnect", format!("{text}: {error}"));
                    Some(sync.map_err(why)?)
                }
            };
            let service = Selector::new(setup, select_options(&settings), context, None);
            let service = service.with_sync(sync);
            for peer in sync_peers {
                let why = |error| Failure::Named("InvalidArgument", error);
                service.listen_to(&peer).map_err(why)?;
            }
            Ok(service)
        })?;
        Ok(Self {
            service: Mutex::new(Some(Arc::new(service))),
            tasks,
        })
    }

    /// The answer to a request of the service's routes: status and JSON. To be awaited.
    fn ask<'py>(
        &self,
        py: Python<'py>,
        verb: &str,
        path: String,
        body: Vec<u8>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (service, ask) = (self.lock().clone(), ask(verb, path, body)?);
        let work = async move { Ok(Self::answer(service, ask).await) };
        process::awaitable_at_once(py, work, |py, (status, body)| {
            let answer = (status, PyBytes::new(py, &body));
            Ok(answer.into_pyobject(py)?.into_any().unbind())
        })
    }

    /// The same at once, for what waits for nobody.
    fn ask_now<'py>(
        &self,
        py: Python<'py>,
        verb: &str,
        path: String,
        body: Vec<u8>,
    ) -> PyResult<(u16, Bound<'py, PyBytes>)> {
        let (service, ask) = (self.lock().clone(), ask(verb, path, body)?);
        let answer = process::wait(py, async { Ok(Self::answer(service, ask).await) });
        answer.map(|(status, body)| (status, PyBytes::new(py, &body)))
    }

    /// Listens to nobody any more and refuses what is asked.
    fn shutdown(&self) {
        let service = self.lock().take();
        drop(service);
        self.tasks.stop();
    }
}

impl Drop for Selection {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}
