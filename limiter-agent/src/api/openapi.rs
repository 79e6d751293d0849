//! `/v1/openapi.json`: what there is, and on which socket; and what is said to who asks for anything else.

use std::sync::LazyLock;

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use serde_json::Value;

use super::problem;

const TEXT: &str = include_str!("openapi.json");

static DOCUMENT: LazyLock<Value> = LazyLock::new(|| {
    // A test reads it; were it wrong all the same, nothing would be said of other sockets.
    serde_json::from_str(TEXT).unwrap_or_default()
});

/// Where something is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Metrics,
    Control,
    Application,
}

impl Place {
    /// As the document has it.
    const fn as_str(self) -> &'static str {
        match self {
            Self::Metrics => "metrics",
            Self::Control => "control",
            Self::Application => "application",
        }
    }
}

/// The document.
#[must_use]
pub fn document() -> &'static Value {
    &DOCUMENT
}

pub(super) async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], TEXT).into_response()
}

/// Who asks at the wrong place, or for what there is not, is told what is where.
pub(super) fn with_fallbacks(router: Router, place: Place) -> Router {
    let refuse = move |request: Request| async move { refusal(&request, place) };
    router.fallback(refuse).method_not_allowed_fallback(refuse)
}

fn refusal(request: &Request, place: Place) -> Response {
    let (method, path) = (request.method().as_str(), request.uri().path());
    let shown: String = path.chars().take(100).collect();
    let Some(operations) = operations(path) else {
        let cure = format!("there is no {shown}; GET /v1/openapi.json lists what there is");
        return problem(StatusCode::NOT_FOUND, "there is nothing here", vec![cure]);
    };
    let places = |operation: &Value| -> Vec<String> {
        let places = operation["x-sockets"].as_array().into_iter().flatten();
        places.filter_map(Value::as_str).map(str::to_owned).collect()
    };
    if let Some(operation) = operations.get(&method.to_ascii_lowercase()) {
        let cause = format!(
            "{method} {shown} is not for this socket ({}); it is served on: {}",
            place.as_str(),
            places(operation).join(", ")
        );
        return problem(StatusCode::FORBIDDEN, "not on this socket", vec![cause]);
    }
    let here = operations.iter().filter(|(_, it)| places(it).iter().any(|it| it == place.as_str()));
    let allowed: Vec<_> = here.map(|(method, _)| method.to_ascii_uppercase()).collect();
    if allowed.is_empty() {
        let cause = format!("{shown} is not for this socket ({})", place.as_str());
        return problem(StatusCode::FORBIDDEN, "not on this socket", vec![cause]);
    }
    let allowed = allowed.join(", ");
    let cause = format!("{shown} takes {allowed} here");
    let mut answer =
        problem(StatusCode::METHOD_NOT_ALLOWED, "the method is another one", vec![cause]);
    if let Ok(allowed) = HeaderValue::from_str(&allowed) {
        answer.headers_mut().insert(header::ALLOW, allowed);
    }
    answer
}

/// What may be done at a path, by method.
fn operations(path: &str) -> Option<&'static serde_json::Map<String, Value>> {
    let paths = document()["paths"].as_object()?;
    let is_it = |template: &str| {
        let (mut a, mut b) = (template.split('/'), path.split('/'));
        let same = a.by_ref().zip(b.by_ref()).all(|(a, b)| a == b || a.starts_with('{'));
        same && template.split('/').count() == path.split('/').count()
    };
    paths.iter().find(|(template, _)| is_it(template)).and_then(|(_, it)| it.as_object())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_found_by_their_templates() {
        assert!(operations("/v1/sources/192.0.2.1").is_some_and(|it| it.contains_key("get")));
        assert!(operations("/v1/sources").is_some_and(|it| it.contains_key("post")));
        assert!(operations("/v1/sources/a/b").is_none() && operations("/v1").is_none());
    }

    /// Each route of this directory, wherever it is added, is described.
    #[test]
    fn every_route_is_in_the_document() {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
        let mut routes = Vec::new();
        let mut directories = vec![std::path::PathBuf::from(directory)];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).expect("is there").flatten() {
                let path = entry.path();
                if path.is_dir() {
                    directories.push(path);
                } else {
                    let text = std::fs::read_to_string(&path).unwrap_or_default();
                    let marked = text.split(concat!(".rou", "te(\"")).skip(1);
                    routes.extend(marked.filter_map(|it| it.split('"').next().map(str::to_owned)));
                }
            }
        }
        assert!(routes.len() > 15, "{routes:?}");
        let paths = document()["paths"].as_object().expect("has paths");
        for route in routes {
            assert!(paths.contains_key(&route), "{route} is missing in openapi.json");
        }
    }
}
