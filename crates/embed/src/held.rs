//! Bookings that a program frees itself, by its own names for requests.
//!
//! What always holds: a booking ends with `finish`, or when nobody has spoken of it for as long as the router's own bookings live; a name
//! is held once.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_host::Booking;
use kvasir_options::router;
use kvasir_router::Outcome;
use kvasir_telemetry::Clock;
use kvasir_types::Time;

/// A booking, and when it was last spoken of.
struct Held {
    booking: Booking,
    heard: Time,
}

/// Bookings by name.
pub struct HeldBookings {
    clock: Clock,
    held: Mutex<HashMap<String, Held>>,
}

impl HeldBookings {
    /// None yet.
    #[must_use]
    pub fn new(clock: Clock) -> Self {
        Self {
            clock,
            held: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a name is held. Lets go of bookings of which nothing was heard for as long as the router keeps them.
    #[must_use]
    pub fn holds(&self, name: &str) -> bool {
        let longest = Duration::from_secs_f64(router::ROUTER_ACTIVE_REQUEST_EXPIRY_SECS.default);
        let now = self.clock.now();
        let mut held = self.lock();
        held.retain(|_, held| now - held.heard < longest);
        held.contains_key(name)
    }

    /// Holds a booking under a name; one that was held under it ends.
    pub fn insert(&self, name: String, booking: Booking) {
        let heard = self.clock.now();
        let before = self.lock().insert(name, Held { booking, heard });
        drop(before);
    }

    /// The first token of a booked request came. Whether the name is held.
    pub fn first_token(&self, name: &str) -> bool {
        let now = self.clock.now();
        let mut held = self.lock();
        let Some(held) = held.get_mut(name) else {
            return false;
        };
        held.heard = now;
        held.booking.first_token();
        true
    }

    /// A booked request ended. Whether the name was held.
    pub fn finish(&self, name: &str, outcome: Outcome) -> bool {
        let held = self.lock().remove(name);
        let known = held.is_some();
        if let Some(held) = held {
            held.booking.finish(outcome);
        }
        known
    }
}
