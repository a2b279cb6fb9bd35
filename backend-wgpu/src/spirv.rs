//! Changes to naga's SPIR-V for kernels with cooperative matrices.
//!
//! [`prepare_cooperative`] makes three changes.
//! - WGSL takes the element type of a matrix from the memory that it is loaded from, and has no bf16. Kernels
//!   declare matrices A and B over f32 memory that holds 16-bit elements; the function gives them their type.
//! - WGSL has no product by elements of two matrices. A kernel with a constant `DIFFERENCE_IS_PRODUCT` writes a
//!   difference of two accumulators instead, and the function makes it their product.
//! - naga declares the Vulkan memory model. It does not declare that invocations share accesses of workgroup and
//!   storage memory (wgpu issue 8805). Drivers may therefore move accesses across barriers. The function adds the
//!   declaration.
//!
//! Instruction formats are those of the SPIR-V specification, section 3, and of SPV_KHR_cooperative_matrix and
//! SPV_KHR_bfloat16.

use forebay_shaders::cooperative::OperandType;
use rustc_hash::FxHashMap;

/// Opcodes and enumerants, by their names in the specification.
mod op {
    pub(super) const EXTENSION: u32 = 10;
    pub(super) const CAPABILITY: u32 = 17;
    pub(super) const TYPE_INT: u32 = 21;
    pub(super) const TYPE_FLOAT: u32 = 22;
    pub(super) const TYPE_POINTER: u32 = 32;
    pub(super) const CONSTANT: u32 = 43;
    pub(super) const FUNCTION: u32 = 54;
    pub(super) const VARIABLE: u32 = 59;
    pub(super) const LOAD: u32 = 61;
    pub(super) const STORE: u32 = 62;
    pub(super) const ACCESS_CHAIN: u32 = 65;
    pub(super) const F_SUB: u32 = 131;
    pub(super) const F_MUL: u32 = 133;
    pub(super) const CONTROL_BARRIER: u32 = 224;
    pub(super) const TYPE_COOPERATIVE_MATRIX: u32 = 4456;
    pub(super) const COOPERATIVE_LOAD: u32 = 4457;
    pub(super) const COOPERATIVE_STORE: u32 = 4458;
}
const CAPABILITY_FLOAT16: u32 = 9;
const CAPABILITY_BFLOAT16_TYPE: u32 = 5116;
const CAPABILITY_BFLOAT16_COOPERATIVE_MATRIX: u32 = 5118;
const EXTENSION_BFLOAT16: &[u8; 20] = b"SPV_KHR_bfloat16\0\0\0\0";
const FLOAT_ENCODING_BFLOAT16: u32 = 0;
const STORAGE_CLASS_WORKGROUP: u32 = 4;
const STORAGE_CLASS_STORAGE_BUFFER: u32 = 12;
const MATRIX_ACCUMULATOR: u32 = 2;
/// Memory operand `NonPrivatePointer`.
const NON_PRIVATE: u32 = 0x20;
/// Memory semantics `MakeAvailable` and `MakeVisible`.
const AVAILABLE_AND_VISIBLE: u32 = 0x6000;

/// Words before the first instruction; the fourth is the bound of all ids.
const HEADER_WORDS: usize = 5;
const BOUND_WORD: usize = 3;

/// Iterates over the instructions of a module, as (opcode, words).
fn instructions(module: &[u32]) -> impl Iterator<Item = (u32, &[u32])> {
    let mut rest = module.get(HEADER_WORDS..).unwrap_or_default();
    std::iter::from_fn(move || {
        let first = *rest.first()?;
        let (instruction, tail) = rest.split_at_checked((first >> 16).max(1) as usize)?;
        rest = tail;
        Some((first & 0xffff, instruction))
    })
}

/// Adds an instruction of an opcode and its operands.
fn push(module: &mut Vec<u32>, opcode: u32, operands: impl IntoIterator<Item = u32>) {
    let start = module.len();
    module.push(opcode);
    module.extend(operands);
    module[start] |= ((module.len() - start) as u32) << 16;
}

/// Ids of a module that the changes need.
#[derive(Default)]
struct ModuleIds {
    constants: FxHashMap<u32, u32>,
    pointer_types: FxHashMap<u32, u32>,
    /// Ids of pointers to memory that invocations share.
    shared: rustc_hash::FxHashSet<u32>,
    /// Types of matrices A and B, and of accumulators.
    operands: Vec<u32>,
    accumulators: Vec<u32>,
    u32_type: u32,
    /// New constants for memory semantics, by the old value.
    semantics: FxHashMap<u32, u32>,
}

impl ModuleIds {
    fn new(module: &[u32]) -> Self {
        let mut ids = Self::default();
        for (opcode, words) in instructions(module) {
            match (opcode, words) {
                (op::TYPE_INT, &[_, id, 32, 0]) => ids.u32_type = id,
                (op::CONSTANT, &[_, _, id, value]) => drop(ids.constants.insert(id, value)),
                (op::TYPE_POINTER, &[_, id, class, _]) => drop(ids.pointer_types.insert(id, class)),
                (op::VARIABLE | op::ACCESS_CHAIN, &[_, pointer, id, ..])
                    if matches!(
                        ids.pointer_types.get(&pointer),
                        Some(&(STORAGE_CLASS_WORKGROUP | STORAGE_CLASS_STORAGE_BUFFER))
                    ) =>
                {
                    ids.shared.insert(id);
                }
                (op::TYPE_COOPERATIVE_MATRIX, &[_, id, .., usage]) => match ids.constants.get(&usage) {
                    Some(&MATRIX_ACCUMULATOR) => ids.accumulators.push(id),
                    _ => ids.operands.push(id),
                },
                (op::CONTROL_BARRIER, &[.., semantics]) => {
                    if let Some(&value) = ids.constants.get(&semantics) {
                        ids.semantics.insert(value, 0);
                    }
                }
                _ => {}
            }
        }
        ids
    }
}

/// Gives matrices A and B of a module their type. Turns differences of accumulators into products if
/// `difference_is_product`. Also makes accesses of shared memory available and visible at barriers.
pub(crate) fn prepare_cooperative(
    module: &[u32],
    operand: OperandType,
    difference_is_product: bool,
) -> Vec<u32> {
    let mut ids = ModuleIds::new(module);
    let mut out = module[..HEADER_WORDS.min(module.len())].to_vec();
    let mut bound = module.get(BOUND_WORD).copied().unwrap_or_default();
    let mut new_id = || {
        bound += 1;
        bound - 1
    };
    let operand_type = new_id();
    ids.semantics.values_mut().for_each(|id| *id = new_id());
    let (mut declared_capabilities, mut declared_type, mut in_functions) = (false, false, false);
    for (opcode, words) in instructions(module) {
        if !declared_capabilities && opcode != op::CAPABILITY {
            declared_capabilities = true;
            push_capabilities(&mut out, operand);
        }
        if !in_functions && opcode == op::FUNCTION {
            in_functions = true;
            for (&value, &id) in &ids.semantics {
                push(&mut out, op::CONSTANT, [ids.u32_type, id, value | AVAILABLE_AND_VISIBLE]);
            }
        }
        let is_shared = |pointer: u32| ids.shared.contains(&pointer);
        let operands = words[1..].iter().copied();
        match (opcode, words) {
            (op::TYPE_COOPERATIVE_MATRIX, &[_, id, _, scope, rows, cols, usage])
                if ids.operands.contains(&id) =>
            {
                if !declared_type {
                    declared_type = true;
                    let encoding = (operand == OperandType::Bf16).then_some(FLOAT_ENCODING_BFLOAT16);
                    push(&mut out, op::TYPE_FLOAT, [operand_type, 16].into_iter().chain(encoding));
                }
                push(&mut out, opcode, [id, operand_type, scope, rows, cols, usage]);
            }
            // Without memory operands so far, at the end of the instruction.
            (op::LOAD, &[_, _, _, pointer])
            | (op::STORE, &[_, pointer, _])
            | (op::COOPERATIVE_LOAD, &[_, _, _, pointer, _, _])
            | (op::COOPERATIVE_STORE, &[_, pointer, _, _, _])
                if is_shared(pointer) =>
            {
                push(&mut out, opcode, operands.chain([NON_PRIVATE]));
            }
            (op::F_SUB, &[_, kind, ..]) if difference_is_product && ids.accumulators.contains(&kind) => {
                push(&mut out, op::F_MUL, operands);
            }
            (op::CONTROL_BARRIER, &[_, execution, memory, semantics]) => {
                let new = ids.constants.get(&semantics).and_then(|value| ids.semantics.get(value));
                push(&mut out, opcode, [execution, memory, new.copied().unwrap_or(semantics)]);
            }
            _ => out.extend_from_slice(words),
        }
    }
    if let Some(word) = out.get_mut(BOUND_WORD) {
        *word = bound;
    }
    out
}

fn push_capabilities(out: &mut Vec<u32>, operand: OperandType) {
    match operand {
        OperandType::F16 => push(out, op::CAPABILITY, [CAPABILITY_FLOAT16]),
        OperandType::Bf16 => {
            push(out, op::CAPABILITY, [CAPABILITY_BFLOAT16_TYPE]);
            push(out, op::CAPABILITY, [CAPABILITY_BFLOAT16_COOPERATIVE_MATRIX]);
            let (words, _) = EXTENSION_BFLOAT16.as_chunks::<4>();
            push(out, op::EXTENSION, words.iter().map(|word| u32::from_le_bytes(*word)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use naga::back::spv;

    const KERNEL: &str = "
        enable wgpu_cooperative_matrix;
        @group(0) @binding(0) var<storage, read_write> x: array<vec4<f32>>;
        var<workgroup> tile: array<vec4<f32>, 32>;
        @compute @workgroup_size(32)
        fn main(@builtin(local_invocation_index) lane: u32) {
            tile[lane] = x[lane];
            workgroupBarrier();
            let a = coopLoadT<coop_mat16x16<f32, A>>(&tile[0], 2u);
            let b = coopLoadT<coop_mat16x16<f32, B>>(&tile[0], 2u);
            var c = coop_mat16x16<f32, C>();
            c = coopMultiplyAdd(a, b, c);
            c = c - coopLoad<coop_mat16x16<f32, C>>(&x[4], 0u);
            coopStoreT(c, &x[0], 4u);
        }";

    fn compile(wgsl: &str) -> Vec<u32> {
        let module = naga::front::wgsl::parse_str(wgsl).unwrap();
        let info = naga::valid::Validator::new(
            naga::valid::ValidationFlags::all(),
            naga::valid::Capabilities::all(),
        )
        .validate(&module)
        .unwrap();
        let options = spv::Options {
            zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
            ..spv::Options::default()
        };
        spv::write_vec(&module, &info, &options, None).unwrap()
    }

    #[test]
    fn matrices_a_and_b_get_their_type_and_shared_accesses_are_not_private() {
        let before = compile(KERNEL);
        for operand in [OperandType::F16, OperandType::Bf16] {
            let after = prepare_cooperative(&before, operand, true);
            let ids = ModuleIds::new(&after);
            let float = |words: &[u32]| match operand {
                OperandType::F16 => words[2..] == [16],
                OperandType::Bf16 => words[2..] == [16, FLOAT_ENCODING_BFLOAT16],
            };
            let id = instructions(&after).find(|(code, words)| *code == op::TYPE_FLOAT && float(words));
            let (mut matrices, mut accesses, mut barriers, mut products) = (0, 0, 0, 0);
            for (code, words) in instructions(&after) {
                match code {
                    op::TYPE_COOPERATIVE_MATRIX if ids.operands.contains(&words[1]) => {
                        assert_eq!(words[2], id.unwrap().1[1]);
                        matrices += 1;
                    }
                    op::F_SUB => panic!("a difference is left"),
                    op::F_MUL => products += 1,
                    op::COOPERATIVE_LOAD | op::COOPERATIVE_STORE => {
                        assert_eq!(words.last(), Some(&NON_PRIVATE));
                        accesses += 1;
                    }
                    op::CONTROL_BARRIER => {
                        let semantics = ids.constants[&words[3]];
                        assert_eq!(semantics & AVAILABLE_AND_VISIBLE, AVAILABLE_AND_VISIBLE);
                        barriers += 1;
                    }
                    _ => {}
                }
            }
            assert_eq!((matrices, accesses, barriers, products), (2, 4, 1, 1));
            // No id is at or above the bound, and every word belongs to an instruction.
            let words: usize = instructions(&after).map(|(_, words)| words.len()).sum();
            assert_eq!(words + HEADER_WORDS, after.len());
            assert!(after[BOUND_WORD] > before[BOUND_WORD]);
        }
    }

    #[test]
    fn a_truncated_module_is_returned_up_to_its_end() {
        let module = compile(KERNEL);
        for length in 0..module.len().min(200) {
            prepare_cooperative(&module[..length], OperandType::F16, true);
        }
    }

    /// Products and attention on matrices of both sizes: every matrix A and B has 16-bit elements, and no product by
    /// elements is left as a difference.
    #[test]
    fn kernels_of_both_sizes_are_prepared() {
        use forebay_shaders::KernelSpec;
        for side in [8usize, 16] {
            let lanes = if side == 8 { 8usize } else { 32 };
            let product = KernelSpec::new("matmul").def("dtype", "bf16").def("out", "bf16").def("bias", true);
            let product = product.def("gelu", true).def("pre_activation", true).def("accumulate", false);
            let product = product.def("variant", "cooperative").def("side", side).def("lanes", lanes);
            let product = product.def("rows", 64usize).def("cols", 64usize).def("depth", 32usize);
            let product = product.def("sub_rows", 32usize).def("sub_cols", 32usize).def("k_edges", false);
            let product = product.def("a_order", "k").def("b_order", "line").def("mode", "packed");
            let product = product.def("a_vectors", true).def("b_vectors", true).def("split", false);
            let attention = KernelSpec::new("attention_cooperative").def("pass", "forward").def("side", side);
            let attention = attention.def("dtype", "bf16").def("head", 64usize).def("value", 64usize);
            let attention = attention.def("mask", "").def("dropout", false).def("mode", "packed");
            let attention = attention.def("skip_hidden", true);
            for spec in [product, attention] {
                let before = compile(&forebay_shaders::render(&spec).unwrap());
                let after = prepare_cooperative(&before, OperandType::Bf16, spec.template != "matmul");
                let ids = ModuleIds::new(&after);
                let float = instructions(&after)
                    .find(|(code, words)| *code == op::TYPE_FLOAT && words[2..] == [16, 0])
                    .map(|(_, words)| words[1]);
                let mut operands = 0;
                for (code, words) in instructions(&after) {
                    if code == op::TYPE_COOPERATIVE_MATRIX && ids.operands.contains(&words[1]) {
                        operands += 1;
                        assert_eq!(Some(words[2]), float, "{} of {side}", spec.template);
                        assert_eq!([words[4], words[5]].map(|id| ids.constants[&id]), [side as u32; 2]);
                    }
                    let accumulator = words.get(1).is_some_and(|kind| ids.accumulators.contains(kind));
                    assert!(!(code == op::F_SUB && accumulator), "{} of {side}", spec.template);
                }
                assert_eq!(operands, 2, "{} of {side}", spec.template);
            }
        }
    }
}
