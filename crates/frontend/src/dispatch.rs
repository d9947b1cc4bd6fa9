//! Which handler answers a request, and who may ask: the table of routes, keys and doors put to use.
//!
//! What always holds: a request that is refused here has reached no handler; no client's key reaches an engine.

mod refusal;

use std::error::Error;
use std::sync::Arc;

use http::header::AUTHORIZATION;
use http::{HeaderMap, Method, Request, StatusCode};
use hyper::body::Incoming;
use kvasir_openai::{ApiError, Endpoint};

use crate::admin::{self, dashboard, dump, openapi, pages};
use crate::app::App;
use crate::http::context::HttpContext;
use crate::http::keys::API_KEY;
use crate::http::reply::{self, Reply};
use crate::http::routes::{Audience, NoRoute, Route};
use crate::http::server::{Door, Service};
use crate::http::{body, framing};
use crate::openai::{generate, models};
use crate::proxy;
use refusal::Refusal;

/// What a client without a key is told.
const NO_KEY: &str = "A key is needed: authorization: Bearer KEY";
/// What a client with another key is told.
const WRONG_KEY: &str = "The key is not valid: it is none of those that are known here";
/// What an operator with another token is told.
const WRONG_TOKEN: &str =
    "The token is not valid: authorization: Bearer TOKEN brings another than the admin token";
/// What an operator without the token is told.
const NO_TOKEN: &str = "The admin token is needed: authorization: Bearer TOKEN";

impl Service for App {
    fn http(&self) -> &HttpContext {
        self.http()
    }

    async fn handle(self: &Arc<Self>, mut request: Request<Incoming>, door: Door) -> Reply {
        if let Err(refusal) = framing::check(&request) {
            let (head, _) = request.into_parts();
            let mut reply = Refusal::from(refusal).answer(self, &head);
            framing::close_after(&mut reply); // Where its body ends is in doubt: nothing more is read.
            return reply;
        }
        match self.find(&request, door) {
            Ok((route, audience)) => {
                if audience == Audience::Clients && !self.options().keys.is_empty() {
                    // The key is ours: engines do not see it.
                    request.headers_mut().remove(AUTHORIZATION);
                    request.headers_mut().remove(API_KEY);
                }
                self.answer(route, request, door).await
            }
            Err(refusal) => {
                let (head, body) = request.into_parts();
                body::leave(&head, body).await;
                refusal.answer(self, &head)
            }
        }
    }

    fn started(self: &Arc<Self>) {
        dashboard::start(self);
    }

    fn connection_failed(&self, error: &(dyn Error + 'static)) {
        refusal::at_connection_end(self.http(), error);
    }
}

impl App {
    /// What is asked for, and for whom that is; why not if it is not to be had.
    fn find<B>(&self, request: &Request<B>, door: Door) -> Result<(Route, Audience), Box<Refusal>> {
        refusal::check_head(self.http(), request)?;
        self.via().check(request.headers()).map_err(Refusal::from)?;
        let (method, path) = (request.method(), request.uri().path());
        let not_found =
            || Err(Refusal::from(ApiError::route_not_found(method.as_str(), path)).into());
        let (route, audience) = match self.options().paths.find(method, path) {
            Ok((_, audience)) if !self.is_served(audience, door) => return not_found(),
            Ok(found) => found,
            Err(NoRoute::Method(allowed)) => {
                return Err(Refusal::method(method.as_str(), allowed).into());
            }
            Err(NoRoute::NotFound) => return not_found(),
        };
        if let Err(error) = self.admit(audience, door, request.headers()) {
            return Err(Refusal::from(error).of(&route, path).into());
        }
        if audience == Audience::Clients
            && self.in_flight().count() >= self.options().limits.requests_max
        {
            return Err(self.too_many().of(&route, path).into());
        }
        Ok((route, audience))
    }

    async fn answer(
        self: &Arc<Self>,
        route: Route,
        request: Request<Incoming>,
        door: Door,
    ) -> Reply {
        match route {
            Route::Chat => generate::handle(self, Endpoint::Chat, request).await,
            Route::Completions => generate::handle(self, Endpoint::Completions, request).await,
            Route::Engine(path) => proxy::pass(self, request, path).await,
            Route::Stored(path) => proxy::seek(self, request, &path).await,
            Route::Models => models::list(self),
            Route::Model(id) => models::one(self, &id),
            Route::ModelReady(id) => models::ready(self, &id),
            Route::Health => pages::health(self),
            Route::Live => reply::json(StatusCode::OK, kvasir_openai::live()),
            Route::Metrics => pages::metrics(self),
            Route::Root => {
                let has_page = self.is_served(Audience::Page, door);
                pages::root(self, has_page, request.headers())
            }
            Route::OpenApi => self.describe(door),
            Route::BusyThreshold => admin::busy_threshold(self, request).await,
            Route::Workers if request.method() == Method::POST => {
                admin::add_worker(self, request).await
            }
            Route::Workers => admin::workers(self),
            Route::Worker(name) => admin::remove_worker(self, &name, request.uri().query()),
            Route::Dump => dump::answer(self),
            Route::Decisions => admin::decisions(self, request.uri().query()),
            Route::WhatIf => admin::what_if(self, request).await,
            Route::Sessions => admin::sessions(self),
            Route::Settings => admin::settings(self),
            Route::Dashboard(file) => dashboard::page(&file),
            Route::DashboardStream => dashboard::stream(self, request.headers()),
            Route::Shadow => admin::shadow(self),
            Route::Upgrade => admin::upgrade(self).await,
            Route::Decision(id) => admin::decision(self, &id),
        }
    }

    /// Whether routes for this audience are behind this door.
    fn is_served(&self, audience: Audience, door: Door) -> bool {
        match audience {
            Audience::Anyone => true,
            Audience::Clients => door == Door::Data,
            Audience::Operators | Audience::Page => {
                let here = door == Door::Admin || !self.options().admin_apart;
                here && self.options().admin_enabled
            }
        }
    }

    /// Whether a request with these headers may pass. The admin token, where there is one, is the only key to
    /// operators' routes.
    fn admit(&self, audience: Audience, door: Door, headers: &HeaderMap) -> Result<(), ApiError> {
        let (keys, needed, wrong) = match audience {
            Audience::Anyone | Audience::Page => return Ok(()),
            Audience::Operators if !self.options().admin_token.is_empty() => {
                (&self.options().admin_token, NO_TOKEN, WRONG_TOKEN)
            }
            Audience::Operators if door == Door::Admin => return Ok(()),
            _ => (&self.options().keys, NO_KEY, WRONG_KEY),
        };
        if keys.admit(headers) {
            return Ok(());
        }
        let is_shown = headers.contains_key(AUTHORIZATION) || headers.contains_key(API_KEY);
        Err(ApiError::new(401, if is_shown { wrong } else { needed }))
    }

    /// Refuses as in an overload, without reading any further.
    fn too_many(&self) -> Refusal {
        self.http().limit_reached("requests");
        Refusal {
            is_overload: true,
            ..ApiError::overloaded(self.options().overload_status).into()
        }
    }

    fn describe(&self, door: Door) -> Reply {
        let client_key = !self.options().keys.is_empty();
        let scope = openapi::Scope {
            clients: self.is_served(Audience::Clients, door),
            operators: self.is_served(Audience::Operators, door),
            client_key,
            operator_key: !self.options().admin_token.is_empty()
                || door == Door::Data && client_key,
        };
        let document = openapi::document(&self.options().paths, scope);
        reply::json(StatusCode::OK, document.to_string())
    }
}
