//! Tests copies between two cards on the fake driver: values, order, and the path that the driver takes.
#![cfg(target_os = "linux")]

mod fake_cuda;
mod scenarios;

use fake_cuda::Libraries::Driver;
use fake_cuda::{PAGE, call_log, count_calls, on_fake, open, open_index};
use forebay_core::backend::{Backend, PeerCopy, SegmentId, Slice, SourceError};
use forebay_core::device::Device;
use forebay_core::dtype::DType;
use forebay_core::error::Error;
use forebay_core::memory::Config;
use forebay_core::tensor::Tensor;
use scenarios::copies_take_the_link;

fn used(backend: &dyn Backend) -> u64 {
    let memory = backend.device_memory();
    memory.total.unwrap() - memory.free.unwrap()
}

fn two_devices() -> [Device; 2] {
    [0, 1].map(|index| Device::with_config(open_index(index), Config::default()))
}

/// Returns the lines about copies and waits between devices since the log had `before` lines.
fn lines_between_devices(before: usize) -> Vec<String> {
    let log = call_log().split_off(before);
    log.into_iter().filter(|line| line.contains("copy from") || line.contains("waits for")).collect()
}

/// Copies to the second device and back, and checks values, order and path.
fn copies_take(path: &str) {
    let [first, second] = two_devices();
    let values: Vec<f32> = (0..1000).map(|k| k as f32).collect();
    let x = Tensor::from_slice(&values, [1000], &first).unwrap();
    let (lines, waits) =
        (call_log().len(), count_calls("cuStreamSynchronize") + count_calls("cuEventSynchronize"));
    let y = x.to_device(&second).unwrap();
    assert_eq!(
        lines_between_devices(lines),
        [
            "device 0 waits for device 1".to_owned(),
            format!("{path} copy from 0 to 1"),
            "device 1 waits for device 0".to_owned(),
        ]
    );
    let lines = call_log().len();
    let z = y.to_device(&first).unwrap();
    assert_eq!(
        lines_between_devices(lines),
        [
            "device 1 waits for device 0".to_owned(),
            format!("{path} copy from 1 to 0"),
            "device 0 waits for device 1".to_owned(),
        ]
    );
    assert_eq!(
        waits,
        count_calls("cuStreamSynchronize") + count_calls("cuEventSynchronize"),
        "the host waits"
    );
    drop((x, y));
    assert_eq!(z.to_vec::<f32>().unwrap(), values);
    // Memory that is mapped later has the same path, and links are opened once.
    let (lines, opened) = (call_log().len(), count_calls("cuDeviceCanAccessPeer"));
    let large = Tensor::from_slice(&vec![7u8; 3 * PAGE as usize], [3 * PAGE as usize], &first).unwrap();
    let copy = large.to_device(&second).unwrap();
    assert!(lines_between_devices(lines).contains(&format!("{path} copy from 0 to 1")));
    assert_eq!(count_calls("cuDeviceCanAccessPeer"), opened);
    assert!(copy.to_vec::<u8>().unwrap().iter().all(|&byte| byte == 7));
    drop((z, large, copy));
    for device in [&first, &second] {
        assert_eq!(device.memory().allocated(), 0);
        device.synchronize().unwrap();
        device.pool().empty_cache().unwrap();
        assert_eq!(used(&**device.backend()), 0, "{device}");
    }
}

on_fake! {
    copies_go_over_the_link(Driver, "FAKE_CUDA_DEVICES" = "2") {
        assert_eq!(forebay_cuda::can_device_access_peer(0, 1), Ok(true));
        assert!(forebay_cuda::can_device_access_peer(0, 2).is_err());
        copies_take("direct");
    }

    copies_of_plain_segments_go_over_the_link(Driver, "FAKE_CUDA_DEVICES" = "2", "FOREBAY_CUDA_VMM" = "0") {
        copies_take("direct");
        assert_eq!(count_calls("cuCtxEnablePeerAccess"), 2, "once for each direction");
    }

    mapped_and_plain_memory_take_the_link(Driver, "FAKE_CUDA_DEVICES" = "2") {
        let backends = [open_index(0), open_index(1)];
        copies_take_the_link([&*backends[0], &*backends[1]]);
        backends.iter().for_each(|backend| assert_eq!(used(&**backend), 0));
    }

    without_a_link_the_driver_leads_copies_through_the_host(
        Driver, "FAKE_CUDA_DEVICES" = "2", "FAKE_CUDA_LINK" = "0"
    ) {
        copies_take("staged");
        assert_eq!(count_calls("cuCtxEnablePeerAccess"), 0);
    }

    the_link_can_be_switched_off(Driver, "FAKE_CUDA_DEVICES" = "2", "FOREBAY_CUDA_PEER" = "0") {
        copies_take("staged");
        assert_eq!(count_calls("cuDeviceCanAccessPeer"), 0);
    }

    a_link_that_cannot_be_opened_is_not_used(
        Driver, "FAKE_CUDA_DEVICES" = "2", "FAKE_CUDA_FAIL" = "cuCtxEnablePeerAccess:2:1"
    ) {
        let [first, second] = two_devices();
        let x = Tensor::from_slice(&[1.0_f32, 2.0], [2], &first).unwrap();
        assert_eq!(x.to_device(&second).unwrap().to_vec::<f32>().unwrap(), [1.0, 2.0]);
        assert_eq!(count_calls("staged copy from 0 to 1"), 1);
    }

    memory_without_rights_for_the_other_card_is_used_nevertheless(
        Driver, "FAKE_CUDA_DEVICES" = "2", "FAKE_CUDA_FAIL" = "cuMemSetAccess:2:6"
    ) {
        let [first, second] = two_devices();
        let small = Tensor::from_slice(&[1.0_f32, 2.0], [2], &first).unwrap();
        assert_eq!(small.to_device(&second).unwrap().to_vec::<f32>().unwrap(), [1.0, 2.0]);
        let n = 16 * PAGE as usize;
        let large = Tensor::from_slice(&vec![7u8; n], [n], &first).unwrap();
        let copy = large.to_device(&second).unwrap();
        assert!(copy.to_vec::<u8>().unwrap().iter().all(|&byte| byte == 7));
        let path = |path: &str| count_calls(&format!("{path} copy from 0 to 1"));
        assert_eq!((path("direct"), path("staged")), (1, 1));
    }

    a_device_that_is_opened_again_gets_its_link_back(Driver, "FAKE_CUDA_DEVICES" = "2") {
        let [first, second] = two_devices();
        let x = Tensor::from_slice(&[1.0_f32, 2.0], [2], &first).unwrap();
        let y = x.to_device(&second).unwrap();
        drop((x, first));
        let first = Device::with_config(open_index(0), Config::default());
        let z = y.to_device(&first).unwrap();
        assert_eq!(z.device(), &first);
        assert_eq!(z.to_device(&second).unwrap().to_vec::<f32>().unwrap(), [1.0, 2.0]);
        assert_eq!(count_calls("direct copy from 0 to 1"), 2);
        assert_eq!(count_calls("cuDeviceCanAccessPeer"), 3, "once for each pair of contexts");
    }

    a_device_that_is_lost_during_a_copy_is_an_error(
        Driver, "FAKE_CUDA_DEVICES" = "2", "FAKE_CUDA_FAIL" = "cuMemcpyPeerAsync:700:1"
    ) {
        let [first, second] = two_devices();
        let x = Tensor::from_slice(&[1.0_f32, 2.0], [2], &first).unwrap();
        let error = x.to_device(&second).unwrap_err();
        assert!(matches!(error, Error::Driver(SourceError::DeviceLost(_))), "{error}");
    }

    two_devices_of_one_card_copy_without_a_link(Driver) {
        let devices = [open(), open()].map(|backend| Device::with_config(backend, Config::default()));
        let x = Tensor::from_slice(&[1.0_f32, 2.0], [2], &devices[0]).unwrap();
        let copies = count_calls("cuMemcpyAsync");
        assert_eq!(x.to_device(&devices[1]).unwrap().to_vec::<f32>().unwrap(), [1.0, 2.0]);
        assert_eq!((count_calls("cuMemcpyAsync"), count_calls("cuMemcpyPeerAsync")), (copies + 1, 0));
    }

    another_backend_is_declined(Driver) {
        let null = Device::null(Default::default());
        let nothing = Slice { segment: SegmentId(1), offset: 0, bytes: 4 };
        let path = open().copy_from_peer(nothing, &**null.backend(), nothing).unwrap();
        assert_eq!(path, PeerCopy::Declined);
        let device = Device::with_config(open(), Config::default());
        let x = Tensor::ones([3], DType::F32, &null).unwrap();
        assert_eq!(x.to_device(&device).unwrap().to_vec::<f32>().unwrap(), [0.0; 3], "a null device has no values");
    }
}
