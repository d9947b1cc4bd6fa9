//! Models that a Python worker serves: their cards, announced and taken back.

use std::path::Path;
use std::sync::Arc;

use kvasir_discovery::{EndpointName, ModelInput, ModelType, NewCard, WorkerType};
use kvasir_parsers::{ReasoningFormat, ToolFormat};
use kvasir_worker::folder_artefacts;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde_json::{Map, Value};

use crate::errors::Failure;
use crate::planes::Runtime;
use crate::process;

/// What `kvasir.llm.register_model` says of a model, as JSON.
struct Told(Map<String, Value>);

impl Told {
    fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).and_then(Value::as_str)
    }

    fn number(&self, name: &str) -> u32 {
        let number = self.0.get(name).and_then(Value::as_u64);
        number
            .and_then(|number| u32::try_from(number).ok())
            .unwrap_or(0)
    }

    fn worker_type(name: &str) -> WorkerType {
        match name {
            "prefill" => WorkerType::Prefill,
            "decode" => WorkerType::Decode,
            "encode" => WorkerType::Encode,
            _ => WorkerType::Aggregated,
        }
    }

    /// The card, with the files of the model's folder.
    fn card(self) -> Result<Value, String> {
        let path = self.text("model_path").unwrap_or_default();
        let bare = self.0.get("skip_model_assets").and_then(Value::as_bool) == Some(true);
        let (artefacts, path) = match bare {
            true => (Vec::new(), path.to_owned()),
            false => {
                let folder = Path::new(path).canonicalize();
                let folder = folder.map_err(|error| format!(
                    "model_path {path:?}: {error}; name a folder with tokenizer.json (nothing is downloaded)"
                ))?;
                let files = folder_artefacts(&folder)
                    .map_err(|error| format!("model_path {path:?}: {error}"))?;
                (files, folder.to_string_lossy().into_owned())
            }
        };
        let list = |name: &str| {
            let list = self.0.get(name).and_then(Value::as_array);
            list.into_iter().flatten()
        };
        let names = |of: &Value| -> Vec<WorkerType> {
            let set = of.as_array().into_iter().flatten();
            set.filter_map(Value::as_str)
                .map(Self::worker_type)
                .collect()
        };
        let card = NewCard {
            name: self.text("name").unwrap_or_default().into(),
            aliases: list("aliases")
                .filter_map(Value::as_str)
                .map(Into::into)
                .collect(),
            model_type: ModelType::from_text(self.text("model_type").unwrap_or_default()),
            model_input: match self.text("model_input") {
                Some("Text") => ModelInput::Text,
                Some("Tensor") => ModelInput::Tensor,
                _ => ModelInput::Tokens,
            },
            worker_type: Self::worker_type(self.text("worker_type").unwrap_or_default()),
            needs: list("needs").map(names).collect(),
            kv_cache_block_size: self.number("kv_cache_block_size"),
            context_length: self.number("context_length"),
            migration_limit: self.number("migration_limit"),
            source_path: path,
            artefacts,
            runtime_config: self.0.get("runtime_config").cloned().unwrap_or_default(),
        };
        let mut card = card
            .into_card()
            .map_err(|error| error.to_string())?
            .to_json();
        if let (Some(card), Some(more)) = (
            card.as_object_mut(),
            self.0.get("more").and_then(Value::as_object),
        ) {
            card.extend(more.clone());
        }
        Ok(card)
    }
}

fn endpoint_of((namespace, component, endpoint): (String, String, String)) -> EndpointName {
    EndpointName {
        namespace,
        component,
        endpoint,
    }
}

/// Names of the forms in which models write calls of tools, for `ModelRuntimeConfig.tool_call_parser`.
#[pyfunction]
pub(crate) fn get_tool_parser_names() -> Vec<&'static str> {
    ToolFormat::names().collect()
}

/// Names of the forms in which models write what they think, for `ModelRuntimeConfig.reasoning_parser`.
#[pyfunction]
pub(crate) fn get_reasoning_parser_names() -> Vec<&'static str> {
    ReasoningFormat::names().collect()
}

/// Announces a model. What is said of it is JSON that `kvasir.llm` writes.
#[pyfunction]
pub(crate) fn announce_model<'py>(
    py: Python<'py>,
    runtime: &Runtime,
    name: (String, String, String),
    told: &str,
    suffix: Option<String>,
) -> PyResult<Bound<'py, PyAny>> {
    let told: Value =
        serde_json::from_str(told).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let Value::Object(told) = told else {
        return Err(PyValueError::new_err("a model is described by an object"));
    };
    let (planes, endpoint) = (Arc::clone(&runtime.planes), endpoint_of(name));
    let work = async move {
        // A tokenizer has some ten megabytes to be read and summed up.
        let card = tokio::task::spawn_blocking(move || Told(told).card()).await;
        let card = card.map_err(|error| Failure::Plain(error.to_string()))?;
        let card = card.map_err(|text| Failure::Named("InvalidArgument", text))?;
        let member = planes.member(&endpoint).await?;
        Ok(member.announce_model(card, suffix).await?)
    };
    process::awaitable(py, work, |py, ()| Ok(py.None()))
}

/// Takes a model back.
#[pyfunction]
pub(crate) fn withdraw_model<'py>(
    py: Python<'py>,
    runtime: &Runtime,
    name: (String, String, String),
    suffix: Option<String>,
) -> PyResult<Bound<'py, PyAny>> {
    let (planes, endpoint) = (Arc::clone(&runtime.planes), endpoint_of(name));
    let work = async move {
        let member = planes.member(&endpoint).await?;
        Ok(member.withdraw_model(suffix).await?)
    };
    process::awaitable(py, work, |py, ()| Ok(py.None()))
}
