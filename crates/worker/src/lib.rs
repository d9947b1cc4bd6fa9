//! How a worker joins a fleet.
//!
//! Answers one question: what does an engine have to do so that frontends find it, send it requests and know its cache? It
//! opens a [`Membership`], tells its [`Reports`] what happens to its cache and load, and announces itself with a
//! [`TokenEngine`] that takes requests; a program that has its pieces one by one is an [`EndpointMember`]. Keys, messages and their order are those of Dynamo 1.6.1: its frontends serve such a
//! worker as they serve their own.
//!
//! What always holds: a worker that is announced can be asked, and what was published can be asked for again; a worker that
//! leaves takes all its keys back before it stops answering; telling never makes an engine wait.
//!
//! Elsewhere: what is written where (`kvasir-discovery`), sockets (`kvasir-transport`), which events go out and what is
//! answered about them (`kvasir-kv-events`), the engine itself.

mod cache;
mod card;
mod channels;
mod generate;
mod hosted;
mod load;
mod member;
mod membership;
mod names;
mod pass_publisher;
mod passes;
mod records;
mod reports;
mod server;

pub use card::{CardRole, EngineFacts, card_of_folder, folder_artefacts};
pub use channels::EventCarrier;
pub use generate::{ClearFuture, TokenEngine};
pub use hosted::{HostedFiles, hosted_card};
pub use member::{CachePublisher, EndpointMember, LoadPublisher};
pub use membership::{JoinError, MemberOptions, Membership};
pub use pass_publisher::{PassChannel, PassPublisher};
pub use reports::{CacheOutbox, Reports};
pub use server::{RequestServer, in_url};
