//! The conformance suite of forebay: one set of tests, run on every backend.
#![allow(missing_docs, reason = "a test suite: its items are named by what they check")]

pub mod catalog;
pub mod curves;
pub mod fuzz;
pub mod golden;
pub mod kernels;
mod lowering;
pub mod names;
mod operations;
pub mod radv;
mod sass;
mod scan;
pub mod suite;
pub mod traces;
pub mod validation;
pub mod web_kernels;
pub mod writers;
