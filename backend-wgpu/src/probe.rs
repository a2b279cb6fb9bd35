//! Probes: small kernels that test each optional type, because a driver may report types that do not work.
//!
//! A new optional type is one more entry of `probes`.

use forebay_core::backend::{Backend, Features, KernelSource, Launch, SegmentSource, Slice};
use forebay_core::error::Result;
use forebay_shaders::cooperative::OperandType;

use crate::backend::WgpuBackend;

/// Probe of one type: its requirements, and a computation with a known result.
pub(crate) struct TypeProbe {
    /// wgpu's feature.
    pub(crate) feature: wgpu::Features,
    pub(crate) mark_supported: fn(&mut Features),
    enable: &'static str,
    element: &'static str,
    /// Expression for element 1 of `x`.
    statement: &'static str,
    input: [u64; 2],
    expected: [u64; 2],
    element_bytes: usize,
}

const F64: fn(f64) -> u64 = f64::to_bits;

pub(crate) fn probes() -> [TypeProbe; 4] {
    [
        TypeProbe {
            feature: wgpu::Features::SHADER_F16,
            mark_supported: |features| features.f16 = true,
            enable: "enable f16;",
            element: "f16",
            // 2 * 1.5 + 1 = 4
            statement: "x[0] * 1.5h + x[1]",
            input: [0x4000, 0x3c00],
            expected: [0x4000, 0x4400],
            element_bytes: 2,
        },
        TypeProbe {
            feature: wgpu::Features::SHADER_I16,
            mark_supported: |features| features.i16 = true,
            enable: "enable wgpu_int16;",
            element: "u16",
            statement: "x[0] + x[1]",
            input: [0xfff0, 0x0020],
            expected: [0xfff0, 0x0010],
            element_bytes: 2,
        },
        TypeProbe {
            feature: wgpu::Features::SHADER_INT64,
            mark_supported: |features| features.i64 = true,
            enable: "",
            element: "i64",
            statement: "x[0] * 3li + x[1]",
            input: [1 << 40, u64::MAX],
            expected: [1 << 40, (3 << 40) - 1],
            element_bytes: 8,
        },
        TypeProbe {
            feature: wgpu::Features::SHADER_F64,
            mark_supported: |features| features.f64 = true,
            enable: "",
            element: "f64",
            statement: "x[0] / x[1]",
            input: [F64(1.0), F64(3.0)],
            expected: [F64(1.0), F64(1.0 / 3.0)],
            element_bytes: 8,
        },
    ]
}

impl TypeProbe {
    fn encode(&self, values: [u64; 2]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes().into_iter().take(self.element_bytes)).collect()
    }
}

/// Runs the probes in one kernel, and marks those that worked in `features`.
///
/// # Errors
/// At least one probe breaks the device or does not compile: run the probes one by one.
pub(crate) fn run_probes(backend: &WgpuBackend, probes: &[TypeProbe], features: &mut Features) -> Result<()> {
    if probes.is_empty() {
        return Ok(());
    }
    let mut wgsl = String::new();
    probes.iter().for_each(|probe| wgsl.push_str(probe.enable));
    for (binding, probe) in probes.iter().enumerate() {
        let element = probe.element;
        wgsl.push_str(&format!(
            "@group(0) @binding({binding}) var<storage, read_write> x{binding}: array<{element}>;\n"
        ));
    }
    wgsl.push_str("@compute @workgroup_size(1) fn main() {\n");
    for (binding, probe) in probes.iter().enumerate() {
        let value = probe.statement.replace('x', &format!("x{binding}"));
        wgsl.push_str(&format!("x{binding}[1] = {value};\n"));
    }
    wgsl.push('}');

    let mut buffers: Vec<Vec<u8>> = probes.iter().map(|probe| probe.encode(probe.input)).collect();
    run_kernel(backend, "a probe of the device's types", &wgsl, true, &mut buffers)?;
    for (probe, result) in probes.iter().zip(buffers) {
        if result == probe.encode(probe.expected) {
            (probe.mark_supported)(features);
        } else {
            log::warn!(
                "{}: the driver offers {} but computes it wrongly; it is not used",
                backend.info(),
                probe.element
            );
        }
    }
    Ok(())
}

/// Runs one workgroup of a kernel on these buffers, and reads them back.
fn run_kernel(
    backend: &WgpuBackend,
    label: &str,
    wgsl: &str,
    zero_workgroup_memory: bool,
    buffers: &mut [Vec<u8>],
) -> Result<()> {
    let source = KernelSource { label, wgsl, entry_point: "main", overrides: &[], zero_workgroup_memory };
    let kernel = backend.compile(&source)?;
    backend.wait_compiled(kernel)?;
    let stride = |buffer: &Vec<u8>| (buffer.len() as u64).next_multiple_of(backend.limits().alignment);
    let segment = backend.alloc_segment(buffers.iter().map(stride).sum())?;
    let mut offset = 0;
    let slices = buffers.iter().map(|buffer| {
        let slice = Slice { segment, offset, bytes: buffer.len() as u64 };
        offset += stride(buffer);
        slice
    });
    let slices = slices.collect::<Vec<_>>();
    for (&slice, buffer) in slices.iter().zip(&*buffers) {
        backend.upload(slice, buffer)?;
    }
    backend.launch(&Launch { kernel, bindings: &slices, params: &[], groups: [1, 1, 1] })?;
    for (&slice, buffer) in slices.iter().zip(buffers) {
        backend.download(slice, buffer)?;
    }
    Ok(backend.free_segment(segment)?)
}

/// Total loop iterations of an invocation, after which some drivers end loops early (Mesa's
/// `LP_MAX_TGSI_LOOP_ITERATIONS`).
pub(crate) const MESA_MAX_ITERATIONS: u32 = 65_535;

/// Reports whether all iterations of a loop longer than [`MESA_MAX_ITERATIONS`] run. The loop is a recurrence
/// that no compiler can replace by a formula.
pub(crate) fn runs_long_loops(backend: &WgpuBackend) -> Result<bool> {
    const ITERATIONS: u32 = MESA_MAX_ITERATIONS + 1000;
    let next = |value: u32| (value ^ (value >> 7)).wrapping_mul(5).wrapping_add(1);
    let wgsl = "
        @group(0) @binding(0) var<storage, read_write> x: array<u32>;
        @compute @workgroup_size(1)
        fn main() {
            let iterations = x[0];
            var value = x[1];
            for (var i = 0u; i < iterations; i++) { value = (value ^ (value >> 7u)) * 5u + 1u; }
            x[1] = value;
        }";
    let mut buffers = [[ITERATIONS, 0].map(u32::to_le_bytes).concat()];
    run_kernel(backend, "a probe of long loops", wgsl, true, &mut buffers)?;
    let expected = (0..ITERATIONS).fold(0, |value, _| next(value));
    Ok(buffers[0][4..] == expected.to_le_bytes())
}

/// Form of cooperative matrices: `side` rows and columns, and the invocations of a subgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MatrixShape {
    pub(crate) side: u32,
    pub(crate) lanes: u32,
}

/// Reports whether matrix units multiply matrices of a shape and type into sums in f32, and multiply sums by elements
/// (see `spirv`). Some drivers list types that they compute wrongly.
pub(crate) fn multiplies_matrices(
    backend: &WgpuBackend,
    MatrixShape { side, lanes }: MatrixShape,
    operand: OperandType,
) -> Result<bool> {
    // Vectors of a matrix: eight operands or four sums each.
    let (vectors, sum_vectors) = (side * side / 8, side * side / 4);
    let matrix = format!("coop_mat{side}x{side}");
    let (bits, encode): (_, fn(f32) -> u16) = match operand {
        OperandType::F16 => ("0xf16u", |v| half::f16::from_f32(v).to_bits()),
        OperandType::Bf16 => ("0xbf16u", |v| half::bf16::from_f32(v).to_bits()),
    };
    let wgsl = format!(
        "enable wgpu_cooperative_matrix;
        const OPERAND_BITS = {bits};
        const DIFFERENCE_IS_PRODUCT = true;
        @group(0) @binding(0) var<storage, read_write> x: array<vec4<f32>>;
        var<workgroup> tiles: array<vec4<f32>, {}>;
        var<workgroup> factors: array<f32, {side}>;
        @compute @workgroup_size({lanes})
        fn main(@builtin(local_invocation_index) lane: u32) {{
            for (var i = lane; i < {}u; i += {lanes}u) {{ tiles[i] = x[i]; }}
            let neighbour = subgroupShuffleXor(lane, 1u);
            if lane < {side}u {{ factors[neighbour] = f32(2u * neighbour + 1u); }}
            workgroupBarrier();
            let a = coopLoadT<{matrix}<f32, A>>(&tiles[0], {}u);
            let b = coopLoad<{matrix}<f32, B>>(&tiles[{vectors}], {}u);
            var c = {matrix}<f32, C>();
            c = coopMultiplyAdd(a, b, c);
            c = coopMultiplyAdd(a, b, c);
            // A product by elements: see `spirv`.
            c = c - coopLoad<{matrix}<f32, C>>(&factors[0], 0u);
            coopStoreT(c, &x[{sum_vectors}], {}u);
        }}",
        2 * vectors,
        2 * vectors,
        side / 8,
        side / 8,
        side / 4,
    );
    // Small integers, so that every order of the sums is exact.
    let (side, elements) = (side as usize, (side * side) as usize);
    let value = |matrix: usize, i: usize| ((i * 7 + i / side * (3 + matrix)) % 11) as f32 - 5.0;
    let mut memory: Vec<u8> =
        (0..2 * elements).flat_map(|i| encode(value(i / elements, i % elements)).to_le_bytes()).collect();
    // Operands and sums have the same size.
    memory.resize(8 * elements, 0);
    let mut buffers = [memory];
    run_kernel(backend, "a probe of matrix units", &wgsl, false, &mut buffers)?;
    // The second matrix is loaded in columns.
    let product = |row: usize, col: usize| {
        let factor = 2.0 * (2 * row + 1) as f32;
        factor * (0..side).map(|k| value(0, row * side + k) * value(1, col * side + k)).sum::<f32>()
    };
    let mut sums = buffers[0][4 * elements..].chunks_exact(4).enumerate();
    Ok(sums.all(|(i, bytes)| bytes == product(i / side, i % side).to_le_bytes()))
}
