//! Forebay: a tensor runtime for Rust. The same training loop runs on CUDA and, through wgpu, on every other GPU,
//! under one memory manager.
pub use forebay_core::*;
