//! Refusals in vLLM's words.

use http::StatusCode;

use super::body::Reply;

/// An answer that says no.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    pub(crate) kind: &'static str,
    pub(crate) param: Option<String>,
    pub(crate) message: String,
}

impl Refusal {
    /// What a request asks cannot be.
    pub(crate) fn bad(message: impl Into<String>, param: Option<&str>) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: "BadRequestError",
            param: param.map(str::to_owned),
            message: message.into(),
        }
    }

    /// A value that is out of its range.
    pub(crate) fn parameter(message: &str, param: &str, value: &str) -> Self {
        Self::bad(
            format!("{message} (parameter={param}, value={value})"),
            Some(param),
        )
    }

    /// The body is not of its form.
    pub(crate) fn form(details: &str, param: Option<&str>) -> Self {
        Self {
            kind: "Bad Request",
            ..Self::bad(format!("1 validation error:\n  {details}"), param)
        }
    }

    /// A field that must be there is not.
    pub(crate) fn missing(field: &str, fields: usize) -> Self {
        let details = format!(
            "{{'type': 'missing', 'loc': 'body.{field}', 'msg': 'Field required', 'input': '<dict of {fields} items>'}}"
        );
        Self::form(&details, Some(&format!("body.{field}")))
    }

    /// Another model is served here.
    pub(crate) fn unknown_model(asked: &str, served: &str) -> Self {
        Self {
            status: StatusCode::NOT_FOUND,
            kind: "NotFoundError",
            param: Some("model".to_owned()),
            message: format!("The model `{asked}` does not exist. Valid aliases: {served}."),
        }
    }

    /// The engine is not able to, now.
    pub(crate) fn server(status: StatusCode, message: &str) -> Self {
        let kind = match status {
            StatusCode::SERVICE_UNAVAILABLE => "ServiceUnavailableError",
            _ if status.is_client_error() => "BadRequestError",
            _ => "InternalServerError",
        };
        Self {
            status,
            kind,
            param: None,
            message: message.to_owned(),
        }
    }

    /// The body, as vLLM writes it.
    pub(crate) fn json(&self) -> String {
        let param = match &self.param {
            Some(param) => text(param),
            None => "null".to_owned(),
        };
        format!(
            "{{\"error\":{{\"message\":{},\"type\":{},\"param\":{param},\"code\":{}}}}}",
            text(&self.message),
            text(self.kind),
            self.status.as_u16()
        )
    }

    pub(crate) fn reply(&self) -> Reply {
        super::body::json(self.status, self.json())
    }
}

/// A string as JSON.
pub(crate) fn text(string: &str) -> String {
    serde_json::Value::from(string).to_string()
}

/// A list of numbers as JSON, or `null`.
pub(crate) fn ids(list: Option<&[u32]>) -> String {
    list.map_or_else(
        || "null".to_owned(),
        |list| {
            let all: Vec<String> = list.iter().map(u32::to_string).collect();
            format!("[{}]", all.join(","))
        },
    )
}
