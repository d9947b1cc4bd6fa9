//! Which paths and methods lead where.

use super::*;

fn find(method: &str, path: &str) -> Result<Route, NoRoute> {
    let found = Paths::default().find(&method.parse().unwrap(), path);
    found.map(|(route, _)| route)
}

#[test]
fn paths_and_methods_choose_the_route() {
    assert_eq!(find("POST", "/v1/chat/completions"), Ok(Route::Chat));
    assert_eq!(
        find("GET", "/v1/chat/completions"),
        Err(NoRoute::Method("POST"))
    );
    assert_eq!(find("HEAD", "/health"), Ok(Route::Health));
    assert_eq!(find("POST", "/metrics"), Err(NoRoute::Method("GET,HEAD")));
    assert_eq!(find("GET", "/v1/models"), Ok(Route::Models));
    assert_eq!(find("GET", "/v1/models/"), Err(NoRoute::NotFound));
    assert_eq!(find("GET", "/v1/modelsx"), Err(NoRoute::NotFound));
    assert_eq!(
        find("POST", "/v1/embeddings"),
        Ok(Route::Engine(Some("/v1/embeddings")))
    );
    assert_eq!(find("POST", "/rerank"), Ok(Route::Engine(None)));
    assert_eq!(find("POST", "/v1/messages"), Err(NoRoute::NotFound));
    assert_eq!(find("GET", "/nope"), Err(NoRoute::NotFound));
    assert_eq!(find("GET", "/workers/"), Err(NoRoute::NotFound));
    assert_eq!(find("DELETE", "/workers/7"), Ok(Route::Worker("7".into())));
    assert_eq!(
        find("DELETE", "/workers/http%3A%2F%2Fa%3A1"),
        Ok(Route::Worker("http://a:1".into()))
    );
    assert_eq!(find("GET", "/workers/7"), Err(NoRoute::Method("DELETE")));
    assert_eq!(
        find("DELETE", "/workers"),
        Err(NoRoute::Method("GET,HEAD,POST"))
    );
}

#[test]
fn what_engines_keep_is_found_below_what_made_it() {
    let stored = |path: &str| Ok(Route::Stored(path.into()));
    for method in ["GET", "HEAD", "DELETE"] {
        let path = "/v1/responses/resp_1";
        assert_eq!(find(method, path), stored(path));
    }
    for path in ["/v1/responses/resp_1/cancel", "/v1/batches/b/cancel"] {
        assert_eq!(find("POST", path), stored(path));
    }
    for path in ["/v1/files/f/content", "/v1/videos/v", "/v1/batches/b"] {
        assert_eq!(find("GET", path), stored(path));
        let refused = find("POST", path);
        assert_eq!(refused, Err(NoRoute::Method("GET,HEAD,DELETE")));
    }
    assert_eq!(find("POST", "/v1/videos/stream"), Ok(Route::Engine(None)));
    let moved = Paths {
        responses: "/answers".into(),
        ..Paths::default()
    };
    let found = moved.find(&Method::GET, "/answers/a").map(|found| found.0);
    assert_eq!(found, stored("/v1/responses/a"));
}

/// Every route of engines is either idempotent or not; only those that are known to be are.
#[test]
fn what_may_be_run_twice_is_known() {
    for path in IDEMPOTENT_PATHS.iter().chain([&EMBEDDINGS, &MESSAGES]) {
        assert!(is_idempotent(path), "{path}");
    }
    for path in STATEFUL_PATHS.iter().chain([&RESPONSES, &"/v1/new"]) {
        assert!(!is_idempotent(path), "{path}");
    }
}

#[test]
fn what_a_row_says_it_does_it_allows() {
    for row in ROWS {
        let mut methods: Vec<String> = Vec::new();
        for operation in row.operations {
            methods.push(operation.method.to_uppercase());
            if operation.method == "get" {
                methods.push("HEAD".into());
            }
        }
        assert_eq!(row.allow, methods.join(","));
    }
}

#[test]
fn a_model_id_may_contain_slashes_and_escapes() {
    assert_eq!(
        find("GET", "/v1/models/org/name"),
        Ok(Route::Model("org/name".into()))
    );
    assert_eq!(
        find("GET", "/v1/models/org%2Fname"),
        Ok(Route::Model("org/name".into()))
    );
    assert_eq!(
        find("GET", "/v1/models/a/b/ready"),
        Ok(Route::ModelReady("a/b".into()))
    );
    assert_eq!(
        find("GET", "/v1/models/ready"),
        Ok(Route::Model("ready".into()))
    );
    assert_eq!(
        find("GET", "/v1/models/%zz%ff"),
        Ok(Route::Model("%zz%ff".into()))
    );
}

#[test]
fn moved_paths_leave_their_old_place() {
    let paths = Paths {
        chat: "/chat".into(),
        ..Paths::default()
    };
    let find = |path| paths.find(&Method::POST, path).map(|(route, _)| route);
    assert_eq!(find("/chat"), Ok(Route::Chat));
    assert_eq!(find("/v1/chat/completions"), Err(NoRoute::NotFound));
}

/// Engines have the route at its usual place, wherever it is here.
#[test]
fn routes_of_engines_move_with_what_is_below_them() {
    let paths = Paths {
        embeddings: "/emb".into(),
        responses: "/answers".into(),
        messages: Some("/anthropic".into()),
        ..Paths::default()
    };
    let find = |path| paths.find(&Method::POST, path).map(|(route, _)| route);
    for (ours, theirs) in [
        ("/emb", "/v1/embeddings"),
        ("/answers", "/v1/responses"),
        ("/answers/input_tokens", "/v1/responses/input_tokens"),
        ("/anthropic", "/v1/messages"),
        ("/anthropic/count_tokens", "/v1/messages/count_tokens"),
    ] {
        assert_eq!(find(ours), Ok(Route::Engine(Some(theirs))));
        assert_eq!(find(theirs), Err(NoRoute::NotFound));
    }
    let listed = |paths: &Paths| -> Vec<String> {
        let all = ROWS.iter().flat_map(|row| row.place.paths(paths));
        all.map(Cow::into_owned).collect()
    };
    assert!(listed(&paths).contains(&"/anthropic/count_tokens".to_owned()));
    assert!(
        !listed(&Paths::default())
            .iter()
            .any(|path| path.contains("messages"))
    );
}
