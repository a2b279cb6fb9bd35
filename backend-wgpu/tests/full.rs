//! A full device returns an error and still works. In its own test program, because no other test may need
//! memory meanwhile.

use forebay_core::backend::{Backend, SegmentSource, Slice, SourceError};
use forebay_wgpu::WgpuBackend;

/// Limit for software drivers, which allocate addresses without memory.
const SEGMENTS: usize = 64;

#[test]
fn a_full_device_is_an_error_and_recovers() {
    for found in WgpuBackend::enumerate().into_iter().filter(|found| found.unavailable_reason.is_none()) {
        let device = WgpuBackend::new(found.index).unwrap();
        let bytes = device.limits().max_segment;
        let mut segments = Vec::new();
        for _ in 0..SEGMENTS {
            match device.alloc_segment(bytes) {
                Ok(segment) => segments.push(segment),
                Err(SourceError::OutOfMemory { bytes: asked, .. }) => {
                    assert_eq!(asked, bytes);
                    break;
                }
                Err(error) => panic!("{error}"),
            }
        }
        println!("{}: {} segments of {bytes} bytes", device.info(), segments.len());
        // The allocated segments can be used and freed, and then there is room again.
        for segment in segments {
            let word = Slice { segment, offset: 256, bytes: 4 };
            device.upload(word, &[1, 2, 3, 4]).unwrap();
            device.wait_fence(device.record_fence().unwrap()).unwrap();
            device.free_segment(segment).unwrap();
        }
        let segment = device.alloc_segment(1 << 20).unwrap();
        let word = Slice { segment, offset: 0, bytes: 4 };
        device.fill(word, 7).unwrap();
        let mut found = [0; 4];
        device.download(word, &mut found).unwrap();
        assert_eq!(u32::from_ne_bytes(found), 7);
    }
}
