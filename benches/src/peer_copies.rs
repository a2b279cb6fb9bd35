//! Copies between two CUDA cards, over their link or through host memory.

use anyhow::Result;
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::tensor::Tensor;
use forebay::{OpenDevice, cuda};
use serde_json::json;

use crate::timing::Bench;

/// Measures copies to the next card, in one direction and in both, and the way through host memory.
/// `FOREBAY_CUDA_PEER=0` measures the copies without the link.
pub(crate) fn peer_copies(b: &Bench<'_>) -> Result<()> {
    let info = b.device.info();
    let next = info.index + 1;
    if info.backend != "cuda" || Device::device_count("cuda") <= next {
        eprintln!("peer copies: there is no second CUDA card");
        return Ok(());
    }
    let second = Device::open(&format!("cuda:{next}"))?;
    let has_link = cuda::can_device_access_peer(info.index, next)?;
    let sizes: &[usize] = if b.tiny { &[1 << 10] } else { &[1 << 10, 1 << 18, 64 << 20] };
    for &n in sizes {
        let x = b.random_tensor(&[n], DType::F32)?;
        let y = x.to_device(&second)?;
        let (bytes, shape) = ((4 * n) as f64, n.to_string());
        // A copy runs in the stream of its source, and the destination's stream waits for it. So the wait for
        // `b.device` at the end of a sample covers both directions.
        let one = b.time(50, || Ok(x.to_device(&second)?))?;
        b.emit_rate("peer_copy", &shape, "f32", &one, ("gbps", bytes / one.median_ms / 1e6));
        let back = b.time(50, || Ok(y.to_device(b.device)?))?;
        b.emit_rate("peer_copy_back", &shape, "f32", &back, ("gbps", bytes / back.median_ms / 1e6));
        let both = b.time(50, || {
            let there = x.to_device(&second)?;
            drop(y.to_device(b.device)?);
            Ok(there)
        })?;
        b.emit_rate(
            "peer_copy_both_ways",
            &shape,
            "f32",
            &both,
            ("gbps", 2.0 * bytes / both.median_ms / 1e6),
        );
        let host = b.time(50, || {
            let there = Tensor::from_bytes(&x.to_bytes()?, [n], DType::F32, &second)?;
            second.synchronize()?;
            Ok(there)
        })?;
        b.emit_rate("copy_through_host", &shape, "f32", &host, ("gbps", bytes / host.median_ms / 1e6));
    }
    b.emit_line("peer_link", "", "", json!({ "from": info.index, "to": next, "link": has_link }));
    Ok(())
}
