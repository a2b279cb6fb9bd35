//! Scenarios that must hold on every device, fake or real.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::sync::Arc;

use forebay_core::backend::{
    Backend, Command, Epilogue, KernelSource, MatmulCall, MatrixOperand, PageRemap, PeerCopy, SegmentId,
    Slice, SourceError,
};
use forebay_core::dtype::DType;
use forebay_core::memory::{Block, Config, Pool, Request};
use half::{bf16, f16};

pub(crate) const MIB: u64 = 1 << 20;

pub(crate) fn slice(segment: SegmentId, offset: u64, bytes: u64) -> Slice {
    Slice { segment, offset, bytes }
}

/// Maps new memory.
pub(crate) fn map(
    backend: &dyn Backend,
    segment: SegmentId,
    offset: u64,
    bytes: u64,
) -> Result<(), SourceError> {
    backend.remap(&[PageRemap { to: (segment, offset), bytes, from: None }])
}

/// Returns bytes without a period that a chunk size could hide.
pub(crate) fn pattern(bytes: usize, seed: u32) -> Vec<u8> {
    let mut random = random(seed);
    std::iter::repeat_with(|| (random() >> 8) as u8).take(bytes).collect()
}

/// Returns a generator of reproducible 16-bit values.
fn random(seed: u32) -> impl FnMut() -> u32 {
    let mut state = seed | 1;
    move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 16
    }
}

pub(crate) fn read_back(backend: &dyn Backend, from: Slice) -> Vec<u8> {
    let mut data = vec![0; from.bytes as usize];
    backend.download(from, &mut data).unwrap();
    data
}

/// Uploads read the source before they return, and arrive in order.
pub(crate) fn uploads_and_downloads(backend: &dyn Backend) {
    let segment = backend.alloc_segment(64 * MIB).unwrap();
    // Odd lengths, one chunk, many chunks; there are no waits in between, and the device is slow.
    let (mut at, mut expected) = (256, Vec::new());
    for (seed, bytes) in [4, 100, 4 << 20, (4 << 20) + 4, 21_000_004, 8].into_iter().enumerate() {
        let mut data = pattern(bytes, seed as u32);
        backend.upload(slice(segment, at, bytes as u64), &data).unwrap();
        expected.extend_from_slice(&data);
        data.fill(0xee);
        at += bytes as u64;
    }
    assert!(read_back(backend, slice(segment, 256, at - 256)) == expected);
    // Small uploads until the ring has wrapped around more than once.
    for seed in 0..30_000 {
        let data = pattern(1024, seed);
        backend.upload(slice(segment, u64::from(seed) * 1024, 1024), &data).unwrap();
    }
    for seed in [0, 1, 4095, 4096, 29_999] {
        let from = slice(segment, u64::from(seed) * 1024, 1024);
        assert!(read_back(backend, from) == pattern(1024, seed), "{seed}");
    }
    backend.upload(slice(segment, 0, 0), &[]).unwrap();
    backend.download(slice(segment, 0, 0), &mut []).unwrap();
    backend.free_segment(segment).unwrap();
}

/// Runs ten thousand random operations of the core's pool in little memory. No block changes through another
/// one, however blocks are freed, merged, returned and mapped again.
pub(crate) fn a_pool_keeps_contents(backend: &Arc<dyn Backend>) {
    let pool = Pool::new(backend.clone(), Config { max_memory: Some(48 * MIB), ..Config::default() });
    let whole = |block: &Block| slice(block.segment, block.offset, block.size);
    let check = |(block, word): &(Block, u32)| {
        let expected = word.to_le_bytes();
        let bytes = read_back(&**backend, whole(block));
        assert!(bytes.chunks_exact(4).all(|found| found == expected), "{block:?} does not hold {word:#x}");
    };
    let mut live: Vec<(Block, u32)> = Vec::new();
    let mut random = random(1);
    let mut full = 0;
    for word in 0..10_000_u32 {
        let pick = |at: u32, live: &[_]| at as usize % live.len().max(1);
        match random() % 100 {
            0..50 => match pool.alloc(Request::new(u64::from(random() % 2048) << (random() % 11))) {
                Ok(block) => {
                    backend.fill(whole(&block), word).unwrap();
                    live.push((block, word));
                }
                Err(error) => {
                    assert!(error.is_out_of_memory(), "{error}");
                    full += 1;
                    live.drain(..live.len() / 2).for_each(|(block, _)| pool.free(block));
                }
            },
            50..80 if !live.is_empty() => pool.free(live.swap_remove(pick(random(), &live)).0),
            80..90 if !live.is_empty() => {
                let block = live.swap_remove(pick(random(), &live)).0;
                pool.free_after(block, backend.record_fence().unwrap());
            }
            90..96 if live.len() > 1 => {
                let (from, to) = (pick(random(), &live), pick(random(), &live));
                let (source, target) = (live[from], live[to].0);
                if from != to && source.0.size >= target.size {
                    let part = Slice { bytes: target.size, ..whole(&source.0) };
                    backend.copy(whole(&target), part).unwrap();
                    live[to].1 = source.1;
                }
            }
            96..99 if !live.is_empty() => check(&live[pick(random(), &live)]),
            99 => drop(pool.trim(u64::from(random() % 48) * MIB).unwrap()),
            _ => {}
        }
    }
    assert!(full > 0, "the device was never full");
    live.iter().for_each(check);
    live.iter().for_each(|(block, _)| pool.free(*block));
    assert_eq!(pool.stats().allocated(), 0);
}

/// Copies and fills keep their order between uploads and downloads.
pub(crate) fn copies_and_fills(backend: &dyn Backend) {
    let segment = backend.alloc_segment(MIB).unwrap();
    let data = pattern(4096, 7);
    backend.upload(slice(segment, 512, 4096), &data).unwrap();
    backend.copy(slice(segment, 8196, 4096), slice(segment, 512, 4096)).unwrap();
    backend.fill(slice(segment, 8200, 8), 0x0403_0201).unwrap();
    backend.fill(slice(segment, 0, 0), 1).unwrap();
    backend.copy(slice(segment, 0, 0), slice(segment, 4, 0)).unwrap();
    let mut expected = data.clone();
    expected[4..12].copy_from_slice(&[1, 2, 3, 4, 1, 2, 3, 4]);
    assert_eq!(read_back(backend, slice(segment, 8196, 4096)), expected);
    backend.flush().unwrap();
    backend.free_segment(segment).unwrap();
}

/// Copies between cuda:0 and cuda:1 go over the link wherever the driver reports one, in both directions. The memory is
/// plain, or mapped, or mapped after the link was opened.
pub(crate) fn copies_take_the_link(backends: [&dyn Backend; 2]) {
    let half = 12 * MIB;
    let segments = backends.map(|backend| {
        let plain = backend.alloc_segment(half).unwrap();
        let mapped = backend.limits().virtual_memory.map(|_| {
            let segment = backend.reserve_addresses(2 * half).unwrap();
            map(backend, segment, 0, half).unwrap();
            segment
        });
        (plain, mapped)
    });
    let copy = |seed, [from, to]: [usize; 2], src, dst, offset| {
        let data = pattern(8 * MIB as usize, seed);
        let (src, dst) = (slice(src, 4, 8 * MIB), slice(dst, offset + 8, 8 * MIB));
        backends[from].upload(src, &data).unwrap();
        let path = backends[to].copy_from_peer(dst, backends[from], src).unwrap();
        // The source must not overwrite the memory before the copy has read it.
        backends[from].fill(src, 0).unwrap();
        assert!(read_back(backends[to], dst) == data, "from cuda:{from} to cuda:{to}");
        let has_link = forebay_cuda::can_device_access_peer(from, to).unwrap();
        println!("cuda:{from} to cuda:{to}: {path:?}; the driver reports a link: {has_link}");
        assert_eq!(path == PeerCopy::Direct, has_link);
    };
    for [from, to] in [[0, 1], [1, 0]] {
        copy(1, [from, to], segments[from].0, segments[to].0, 0);
        if let (Some(src), Some(dst)) = (segments[from].1, segments[to].1) {
            copy(2, [from, to], src, dst, 0);
            map(backends[to], dst, half, half).unwrap();
            copy(3, [from, to], src, dst, half);
        }
    }
    for (backend, (plain, mapped)) in backends.into_iter().zip(segments) {
        backend.wait_fence(backend.record_fence().unwrap()).unwrap();
        backend.free_segment(plain).unwrap();
        if let Some(segment) = mapped {
            backend.unmap(segment, 0, &[half]).unwrap();
            backend.unmap(segment, half, &[half]).unwrap();
            backend.free_addresses(segment).unwrap();
        }
    }
}

pub(crate) const DOUBLE: &str = "
    @group(0) @binding(0) var<storage, read_write> data: array<f32>;
    @compute @workgroup_size(64)
    fn double(@builtin(global_invocation_id) id: vec3<u32>) { data[id.x] *= 2.0; }";

pub(crate) const SCALE: &str = "
    struct Params { scale: f32, shift: f32, n: u32 }
    override width: u32 = 32;
    @group(0) @binding(0) var<storage, read> x: array<f32>;
    @group(0) @binding(1) var<storage, read_write> y: array<f32>;
    @group(1) @binding(0) var<uniform> params: Params;
    @compute @workgroup_size(width, 2)
    fn scale(@builtin(global_invocation_id) id: vec3<u32>) {
        if id.x < min(params.n, arrayLength(&x)) { y[id.x] = params.scale * x[id.x] + params.shift; }
    }";

pub(crate) fn kernel<'a>(wgsl: &'a str, entry: &'a str) -> KernelSource<'a> {
    KernelSource {
        label: "a test's kernel",
        wgsl,
        entry_point: entry,
        overrides: &[],
        zero_workgroup_memory: true,
    }
}

/// A matrix product, on the device and on the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MatmulCase {
    pub(crate) dtype: DType,
    /// Sizes m, n and k.
    pub(crate) sizes: [usize; 3],
    pub(crate) batch: usize,
    /// If true, the operand (a, b) is column-major.
    pub(crate) transposed: [bool; 2],
    /// Elements between stored rows, beyond their length.
    pub(crate) padding: usize,
    /// If true, one b serves the whole batch.
    pub(crate) shares_b: bool,
    pub(crate) beta: f32,
}

impl MatmulCase {
    pub(crate) fn new(dtype: DType, sizes: [usize; 3]) -> Self {
        Self { dtype, sizes, batch: 1, transposed: [false; 2], padding: 0, shares_b: false, beta: 0.0 }
    }

    /// Returns every layout of the operands, with and without a batch.
    pub(crate) fn variants(self) -> Vec<Self> {
        let mut forms = Vec::new();
        for transposed in [[false, false], [false, true], [true, false], [true, true]] {
            for (batch, shared, gap) in [(1, false, 0), (1, false, 3), (3, false, 0), (3, true, 8)] {
                for beta in [0.0, 1.0] {
                    forms.push(Self { transposed, batch, shares_b: shared, padding: gap, beta, ..self });
                }
            }
        }
        forms
    }

    /// Asserts that device and host agree bit by bit; returns `false` if the library refuses. The values are
    /// sixteenths, so every sum is exact and only the result is rounded. Memory outside of the result must
    /// not change.
    pub(crate) fn check(&self, backend: &dyn Backend) -> bool {
        let [m, n, k] = self.sizes;
        let mut elements = 0;
        let mut operand = |rows: usize, cols: usize, transposed: bool, shared: bool| {
            let (lines, length) = if transposed { (cols, rows) } else { (rows, cols) };
            let lead = length + self.padding;
            let (row_stride, col_stride) = if transposed { (1, lead) } else { (lead, 1) };
            let (row_stride, col_stride) = (row_stride as u64, col_stride as u64);
            let batch_stride = if shared { 0 } else { (lines * lead) as u64 };
            let offset = (elements * self.dtype.size()) as u64;
            elements += self.batch * lines * lead + 1;
            MatrixOperand { segment: SegmentId(0), offset, row_stride, col_stride, batch_stride }
        };
        let mut a = operand(m, k, self.transposed[0], false);
        let mut b = operand(k, n, self.transposed[1], self.shares_b);
        let mut c = operand(m, n, false, false);
        let values: Vec<f64> = pattern(elements, 11).iter().map(|&v| f64::from(v) / 16.0 - 8.0).collect();
        let mut bytes: Vec<u8> = values.iter().flat_map(|&value| self.encode(value)).collect();
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        let segment = backend.alloc_segment(bytes.len() as u64).unwrap();
        let all = slice(segment, 0, bytes.len() as u64);
        backend.upload(all, &bytes).unwrap();
        for operand in [&mut a, &mut b, &mut c] {
            operand.segment = segment;
        }
        let [m64, n64, k64, batch] = [m, n, k, self.batch].map(|size| size as u64);
        let (dtype, beta, epilogue) = (self.dtype, self.beta, Epilogue::None);
        let call = MatmulCall {
            dtype,
            dtype_b: dtype,
            dtype_out: dtype,
            m: m64,
            n: n64,
            k: k64,
            batch,
            a,
            b,
            c,
            beta,
            epilogue,
        };
        if !backend.enqueue(&Command::Matmul(&call)).unwrap() {
            backend.free_segment(segment).unwrap();
            return false;
        }
        let at = |operand: &MatrixOperand, item: usize, row: usize, col: usize| {
            let strides = [operand.batch_stride, operand.row_stride, operand.col_stride].map(|s| s as usize);
            operand.offset as usize / dtype.size() + item * strides[0] + row * strides[1] + col * strides[2]
        };
        for item in 0..self.batch {
            for (row, col) in (0..m).flat_map(|row| (0..n).map(move |col| (row, col))) {
                let product = |i| values[at(&a, item, row, i)] * values[at(&b, item, i, col)];
                let at = at(&c, item, row, col);
                let result = (0..k).map(product).sum::<f64>() + f64::from(beta) * values[at];
                bytes[at * dtype.size()..][..dtype.size()].copy_from_slice(&self.encode(result));
            }
        }
        assert!(read_back(backend, all) == bytes, "wrong: {self:?}");
        backend.free_segment(segment).unwrap();
        true
    }

    fn encode(&self, value: f64) -> Vec<u8> {
        match self.dtype {
            DType::F64 => value.to_le_bytes().to_vec(),
            DType::F32 => (value as f32).to_le_bytes().to_vec(),
            DType::F16 => f16::from_f64(value).to_le_bytes().to_vec(),
            DType::BF16 => bf16::from_f64(value).to_le_bytes().to_vec(),
            other => panic!("no products of {other}"),
        }
    }
}
