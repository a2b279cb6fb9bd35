//! The conformance suite of forebay: one set of tests, run on every backend.
//!
//! - `suite` has the tests of a device by topic; a new test is a function in its topic, listed there.
//! - `operations` lists every operation once; `catalog`, `golden`, `fuzz` and the pages of the reference use the list.
//! - `golden`, `curves` and `traces` compare with PyTorch's recorded results, training runs and allocator workloads.
//! - `kernels`, `writers`, `web_kernels` and `radv` compile every kernel without a GPU. `lowering` prepares kernels for
//!   them, and `sass` checks machine code.
//! - `names` generates the table of PyTorch's names, for which `scan` reads the library's sources.
#![allow(missing_docs, reason = "a test suite: its items are named by what they check")]

pub mod catalog;
pub mod compile_times;
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
