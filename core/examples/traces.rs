//! Replays the recorded allocator traces of a folder and prints what the pool makes of them, next to PyTorch.
//!
//! `cargo run --release -p forebay-core --example traces -- tests/traces [settings, as in PYTORCH_CUDA_ALLOC_CONF]`

use forebay_core::error::Result;
use forebay_core::memory::{Config, trace};

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().unwrap_or_else(|| "tests/traces".to_owned());
    let config = Config::parse(&arguments.next().unwrap_or_default())?;
    print!("{}", trace::replay_folder(folder.as_ref(), config, 20)?);
    Ok(())
}
