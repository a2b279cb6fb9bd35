//! The core of forebay.
pub mod backend;
pub mod dtype;
pub mod error;
pub mod memory;
