//! What would be refused whatever its prompt is.

use super::Router;
use crate::{Arrival, RouteError};

impl Router {
    /// Why a request would be refused by load alone, whatever its prompt is; none if it may go or wait, or if that hangs on
    /// its prompt. Nothing changes by asking, so that nobody has to read a prompt that will be refused.
    pub fn refusal_by_load(&mut self, arrival: &Arrival) -> Option<RouteError> {
        let bound = arrival.pin.worker.is_some() || arrival.session.is_some();
        if bound || self.config.router_policy_config.is_some() || self.time.is_some() {
            return None;
        }
        // Without a policy file there is one class.
        let class = 0;
        let filled = self.fill(arrival, None);
        match self.can_queue() && self.must_wait(arrival, class) {
            true => {
                let in_time = self.last_in_time(arrival);
                self.room(class).and(in_time).err()
            }
            false => filled.err().filter(RouteError::is_overload),
        }
    }
}
