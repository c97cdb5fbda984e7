//! The runtime of slipstream: one direction, no back stairs.
//!
//! ```text
//! Request ──submit──▶ Scheduler ──Batch──▶ Drafter ──DraftTree per entry──▶ Rows::flatten
//!                        ▲   │                 ▲                                  │ Rows
//!                        │   └─ KvManager      │ settled rows                     ▼
//!                        │      reserves       │ (observe)                 Target::forward ──▶ kernels
//!                        │      blocks         │                                  │ draws, features
//!                        │                     │                                  ▼
//!                        └── advance ◀──── token ids ◀── KvManager::commit ◀── Verifier::verify
//!                               │                           │ SlotMoves
//!                               ▼                           ▼
//!                          TokenSink ──TokenLog──▶    Target::move_kv
//! ```
#![forbid(unsafe_code)]

pub mod assemble;
pub mod batch;
pub mod budget;
pub mod cycle;
pub mod draft;
pub mod engine;
pub mod error;
pub mod kv;
pub mod load;
mod loom;
pub mod metrics;
pub mod model;
pub mod prefix;
pub mod request;
pub mod rows;
pub mod sampler;
pub mod scheduler;
pub mod stream;
pub mod text;
pub mod tree;
pub mod verify;
