//! Writes the complete source: prelude, types, functions and the kernel.

use std::cell::Cell;
use std::fmt::Write;

use forebay_core::backend::KernelSource;
use forebay_shaders::cooperative;
use naga::proc::Layouter;
use naga::valid::{GlobalUse, ModuleInfo};
use naga::{AddressSpace, BuiltIn, EntryPoint, FastHashMap, FastHashSet, Function, GlobalVariable, Handle};
use naga::{Module, StorageAccess, TypeInner};

use super::function::FunctionWriter;
use super::intrinsics::find_intrinsic;
use super::names::{NameScope, to_identifier};
use super::types::{ModuleContext, PreludeFiles};
use super::uniformity::{self, WARP_SIZE};
use super::{MAX_SHARED_BYTES, MAX_STATIC_SHARED_BYTES, TranslateError, TranslatedKernel, unsupported};

const PRELUDE: [&str; 10] = [
    forebay_shaders::cuda::PDL,
    include_str!("prelude/base.cuh"),
    include_str!("prelude/math.cuh"),
    include_str!("prelude/bits.cuh"),
    include_str!("prelude/pack.cuh"),
    include_str!("prelude/intrinsics.cuh"),
    include_str!("prelude/matrix.cuh"),
    include_str!("prelude/atomic.cuh"),
    include_str!("prelude/subgroup.cuh"),
    include_str!("prelude/cooperative.cuh"),
];

const MAX_BLOCK_THREADS: u64 = 1024;

impl<'a> ModuleContext<'a> {
    /// Creates the context of a module whose items have no names yet.
    fn new(
        declared: &Module,
        module: &'a Module,
        info: &'a ModuleInfo,
        wgsl: &'a str,
    ) -> Result<Self, TranslateError> {
        let mut layouts = Layouter::default();
        layouts.update(module.to_ctx()).map_err(|e| TranslateError::Invalid(e.to_string()))?;
        Ok(Self {
            module,
            info,
            layouts,
            structs: FastHashMap::default(),
            globals: FastHashMap::default(),
            functions: FastHashMap::default(),
            constants: FastHashMap::default(),
            written_bindings: FastHashSet::default(),
            parameter_index: FastHashMap::default(),
            uniformity: uniformity::analyze(module, &module.entry_points[0]),
            prelude_files: Cell::default(),
            packed_operand: cooperative::packed_operand(declared),
            difference_is_product: cooperative::is_difference_product(declared),
            resident_workgroups: cooperative::resident_workgroups(declared),
            wgsl,
        })
    }

    /// Returns the additional parameters of a function: declarations and names of the globals that the
    /// function uses.
    pub(super) fn implicit_parameters(
        &self,
        function: Handle<Function>,
    ) -> impl Iterator<Item = (String, String)> {
        let info = &self.info[function];
        let mut list = Vec::new();
        for (handle, global) in self.module.global_variables.iter().filter(|&(h, _)| !info[h].is_empty()) {
            let Some(name) = self.globals.get(&handle) else { continue };
            let ty = || self.type_name(global.ty).unwrap_or_default();
            match global.space {
                AddressSpace::Storage { .. } => {
                    list.push((self.binding_declaration(handle, "").unwrap_or_default(), name.clone()));
                }
                AddressSpace::Uniform => list.push((format!("const {}& {name}", ty()), name.clone())),
                AddressSpace::Private => list.push((format!("{}& {name}", ty()), name.clone())),
                _ => {} // Workgroup variables are declared at file scope.
            }
        }
        if info.global_uses.iter().any(|u| u.contains(GlobalUse::QUERY)) {
            list.push(("const Lengths& lengths".to_owned(), "lengths".to_owned()));
        }
        list.into_iter()
    }

    /// Names the functions and the global variables.
    fn name_items(&mut self, names: &mut NameScope) {
        for (handle, function) in self.module.functions.iter() {
            let name = names.unique_name("f_", function.name.as_deref().unwrap_or(""));
            self.functions.insert(handle, name);
        }
        for (handle, global) in self.module.global_variables.iter() {
            let name = names.unique_name("g_", global.name.as_deref().unwrap_or(""));
            self.globals.insert(handle, name);
        }
    }

    fn workgroup_variables(&self) -> impl Iterator<Item = (Handle<GlobalVariable>, &GlobalVariable)> {
        let all = self.module.global_variables.iter();
        all.filter(|(_, global)| global.space == AddressSpace::WorkGroup)
    }

    /// Returns the declaration of a storage binding.
    fn binding_declaration(
        &self,
        global: Handle<GlobalVariable>,
        restrict: &str,
    ) -> Result<String, TranslateError> {
        let variable = &self.module.global_variables[global];
        let ty = match self.runtime_array(variable.ty) {
            Some((element, _)) => self.element_name(element)?,
            None => self.type_name(variable.ty)?,
        };
        let name = &self.globals[&global];
        Ok(match self.written_bindings.contains(&global) {
            true => format!("{ty}* {name}"),
            false => format!("const {ty}*{restrict} {name}"),
        })
    }
}

/// Writes the only entry point of `module`, from which unused items were removed; `declared` is the original
/// module.
pub(super) fn write_module(
    declared: &Module,
    module: &Module,
    info: &ModuleInfo,
    source: &KernelSource<'_>,
) -> Result<TranslatedKernel, TranslateError> {
    let entry = &module.entry_points[0];
    let size = entry.workgroup_size;
    if size.iter().map(|&n| u64::from(n)).product::<u64>() > MAX_BLOCK_THREADS || size[2] > 64 {
        return Err(TranslateError::WorkgroupSize { size });
    }
    let mut context = ModuleContext::new(declared, module, info, source.wgsl)?;
    let bindings = collect_bindings(&mut context, declared)?;

    let mut names = NameScope::default();
    let mut text = String::new();
    context.write_structs(&mut names, &mut text)?;
    context.write_constants(&mut names, &mut text)?;
    context.name_items(&mut names);
    let context = context;
    let dynamic_shared_bytes = write_workgroup(&context, &mut text)?;
    let queries = info.get_entry_point(0).global_uses.iter().any(|u| u.contains(GlobalUse::QUERY));
    if queries {
        writeln!(text, "struct Lengths {{ u64 bytes[{}]; }};", bindings.len()).ok();
    }

    let mut functions = String::new();
    for (handle, function) in module.functions.iter() {
        write_function(&context, handle, function, &mut functions)?;
    }
    let name = format!("k_{}", to_identifier(&entry.name));
    let zeroes = source.zero_workgroup_memory;
    let params_size = write_kernel(&context, entry, &name, &bindings, queries, zeroes, &mut functions)?;

    let pieces = context.prelude_files.get();
    if pieces.subgroup {
        let lanes = lane_mask_expression(entry.workgroup_size);
        writeln!(text, "WGSL_FN u32 all_lanes() {{ return {lanes}; }}").ok();
    }
    let mut source = write_header(&entry.name, pieces);
    write!(source, "namespace wgsl {{\n\n{text}\n{functions}\n}} // namespace wgsl\n").ok();
    if dynamic_shared_bytes > 0 {
        // Other kernels may follow this one in the same source.
        for (handle, _) in context.workgroup_variables() {
            writeln!(source, "#undef {}", context.globals[&handle]).ok();
        }
    }

    Ok(TranslatedKernel {
        source,
        entry: name,
        workgroup_size: entry.workgroup_size,
        dynamic_shared_bytes,
        binding_count: bindings.len(),
        needs_lengths: queries,
        params_size,
        needs_matrix_units: pieces.cooperative,
    })
}

/// Returns the comment that names the kernel, and the parts of the prelude that it uses.
fn write_header(entry: &str, pieces: PreludeFiles) -> String {
    let mut source = format!("// {entry}: translated from WGSL, whose line numbers are in the comments.\n");
    let optional_pieces =
        [pieces.intrinsics, pieces.matrix, pieces.atomic, pieces.subgroup, pieces.cooperative];
    let is_included = [true, true, pieces.math, pieces.bits, pieces.pack].into_iter().chain(optional_pieces);
    for (piece, _) in PRELUDE.iter().zip(is_included).filter(|&(_, is_included)| is_included) {
        source.push_str(piece);
        source.push('\n');
    }
    source
}

/// Returns the numbers of the storage bindings of the declared module; checks every resource of the entry point.
fn collect_bindings(context: &mut ModuleContext<'_>, declared: &Module) -> Result<Vec<u32>, TranslateError> {
    let module = context.module;
    let uses = context.info.get_entry_point(0);
    let storage = declared.global_variables.iter().filter_map(|(_, global)| match global.space {
        AddressSpace::Storage { .. } => global.binding.filter(|at| at.group == 0),
        _ => None,
    });
    let mut bindings: Vec<u32> = storage.map(|at| at.binding).collect();
    bindings.sort_unstable();
    bindings.dedup();
    for (handle, global) in module.global_variables.iter() {
        let name = global.name.clone().unwrap_or_default();
        let wrong = |found: String| Err(TranslateError::Resource { name: name.clone(), found });
        match (global.space, global.binding) {
            (AddressSpace::Storage { access }, Some(at)) if at.group == 0 => {
                let Ok(index) = bindings.binary_search(&at.binding) else { continue };
                context.parameter_index.insert(handle, index);
                if uses[handle].intersects(GlobalUse::WRITE | GlobalUse::ATOMIC)
                    && access.contains(StorageAccess::STORE)
                {
                    context.written_bindings.insert(handle);
                }
            }
            (AddressSpace::Uniform, Some(at)) if (at.group, at.binding) == (1, 0) => {}
            (AddressSpace::Storage { .. } | AddressSpace::Uniform, Some(at)) => {
                let kind =
                    if global.space == AddressSpace::Uniform { "a uniform" } else { "a storage buffer" };
                return wrong(format!("{kind} at @group({}) @binding({})", at.group, at.binding));
            }
            (AddressSpace::Handle, _) => {
                return match context.type_name(global.ty) {
                    Err(TranslateError::Unsupported(what)) => wrong(what),
                    _ => wrong("a resource without an address".to_owned()),
                };
            }
            (AddressSpace::Private | AddressSpace::WorkGroup, _) => {}
            (space, _) => return wrong(format!("in the address space {space:?}")),
        }
    }
    Ok(bindings)
}

/// Writes the workgroup variables and returns their bytes of dynamic shared memory. Each is a static variable; if all
/// exceed the static limit, they become offsets into dynamic shared memory.
fn write_workgroup(context: &ModuleContext<'_>, text: &mut String) -> Result<u32, TranslateError> {
    let size = |global: &GlobalVariable| u64::from(context.layouts[global.ty].size).next_multiple_of(16);
    let bytes: u64 = context.workgroup_variables().map(|(_, global)| size(global)).sum();
    let Some(whole) = u32::try_from(bytes).ok().filter(|&bytes| bytes <= MAX_SHARED_BYTES) else {
        return Err(TranslateError::WorkgroupMemory { bytes, limit: MAX_SHARED_BYTES });
    };
    let dynamic = whole > MAX_STATIC_SHARED_BYTES;
    if dynamic {
        writeln!(text, "extern __shared__ __align__(16) unsigned char dynamic_memory[];").ok();
    }
    let mut at = 0;
    for (handle, global) in context.workgroup_variables() {
        let (ty, name) = (context.type_name(global.ty)?, &context.globals[&handle]);
        match dynamic {
            true => writeln!(text, "#define {name} (*reinterpret_cast<{ty}*>(dynamic_memory + {at}))"),
            false => writeln!(text, "static __shared__ __align__(16) {ty} {name};"),
        }
        .ok();
        at += size(global);
    }
    Ok(if dynamic { whole } else { 0 })
}

fn write_function(
    context: &ModuleContext<'_>,
    handle: Handle<Function>,
    function: &Function,
    out: &mut String,
) -> Result<(), TranslateError> {
    let uniformity = &context.uniformity.functions[&handle];
    let writer = FunctionWriter::new(context, function, &context.info[handle], uniformity);
    let mut parameters = Vec::new();
    for (argument, name) in function.arguments.iter().zip(&writer.arguments) {
        parameters.push(match *context.type_inner(argument.ty) {
            TypeInner::Pointer { base, .. } => format!("{}& {name}", context.type_name(base)?),
            _ => format!("const {} {name}", context.type_name(argument.ty)?),
        });
    }
    parameters.extend(context.implicit_parameters(handle).map(|(declaration, _)| declaration));
    let result = function.result.as_ref().map_or(Ok("void".to_owned()), |r| context.type_name(r.ty))?;
    let name = &context.functions[&handle];
    writeln!(out, "WGSL_FN {result} {name}({}) {{", parameters.join(", ")).ok();
    match function.name.as_deref().and_then(find_intrinsic) {
        Some(native) => {
            context.require_prelude(|pieces| pieces.intrinsics = true);
            writeln!(out, "    return {native}({});", writer.arguments.join(", ")).ok();
        }
        None => out.push_str(&writer.write_body()?),
    }
    out.push_str("}\n\n");
    Ok(())
}

/// Writes the kernel and returns the bytes of its uniform block.
fn write_kernel(
    context: &ModuleContext<'_>,
    entry: &EntryPoint,
    name: &str,
    bindings: &[u32],
    queries: bool,
    zeroes_workgroup: bool,
    out: &mut String,
) -> Result<u32, TranslateError> {
    let [x, y, z] = entry.workgroup_size;
    let threads = x * y * z;
    let mut parameters: Vec<String> =
        bindings.iter().map(|binding| format!("const void* unused_{binding}")).collect();
    for (&handle, &index) in &context.parameter_index {
        parameters[index] = context.binding_declaration(handle, " __restrict__")?;
    }
    if queries {
        parameters.push("const __grid_constant__ Lengths lengths".to_owned());
    }
    let mut params_size = 0;
    let mut writer = FunctionWriter::new(
        context,
        &entry.function,
        context.info.get_entry_point(0),
        &context.uniformity.entry,
    );
    let index = local_index(entry.workgroup_size);
    writer.write_line("PDL_WAIT();");
    let mut cleared = false;
    for (handle, global) in context.module.global_variables.iter() {
        let (ty, global_name) = (|| context.type_name(global.ty), &context.globals[&handle]);
        match global.space {
            AddressSpace::Uniform => {
                parameters.push(format!("const __grid_constant__ {} {global_name}", ty()?));
                params_size = context.layouts[global.ty].size;
            }
            AddressSpace::Private => {
                let value = global.init.map_or(Ok("{}".to_owned()), |init| {
                    context.constant_expression(init).map(|value| format!(" = {value}"))
                })?;
                writer.write_line(format!("{} {global_name}{value};", ty()?));
            }
            AddressSpace::WorkGroup if zeroes_workgroup => {
                writer.write_line(format!("zero({global_name}, {index}, {threads}u);"));
                cleared = true;
            }
            _ => {}
        }
    }
    if cleared {
        writer.write_line("__syncthreads();");
    }
    for (argument, argument_name) in entry.function.arguments.iter().zip(writer.arguments.clone()) {
        let ty = context.type_name(argument.ty)?;
        let value = match (&argument.binding, context.type_inner(argument.ty)) {
            (None, TypeInner::Struct { members, .. }) => {
                let parts = members.iter().map(|member| input_value(&member.binding, entry.workgroup_size));
                context.compose(argument.ty, &parts.collect::<Result<Vec<_>, _>>()?, false)?
            }
            (binding, _) => input_value(binding, entry.workgroup_size)?,
        };
        writer.write_line(format!("const {ty} {argument_name} = {value};"));
    }
    let body = writer.write_body()?;
    let parameters = parameters.join(",\n    ");
    let resident = context.resident_workgroups.map_or(String::new(), |count| format!(", {count}"));
    write!(
        out,
        "extern \"C\" __global__ void __launch_bounds__({threads}{resident}) {name}(\n    {parameters}) {{\n{body}}}\n"
    )
    .ok();
    Ok(params_size)
}

fn local_index([x, y, z]: [u32; 3]) -> String {
    match (y, z) {
        (1, 1) => "threadIdx.x".to_owned(),
        (_, 1) => format!("(threadIdx.x + threadIdx.y * {x}u)"),
        _ => format!("(threadIdx.x + threadIdx.y * {x}u + threadIdx.z * {}u)", x * y),
    }
}

/// Returns the mask of the lanes of this warp that exist: the last warp of an odd workgroup is not full.
fn lane_mask_expression(size: [u32; 3]) -> String {
    let threads = size.iter().product::<u32>();
    let rest = threads % WARP_SIZE;
    let last = (1u64 << rest) - 1;
    match (rest, threads < WARP_SIZE) {
        (0, _) => "FULL".to_owned(),
        (_, true) => format!("0x{last:x}u"),
        (_, false) => format!("{} < {}u ? FULL : 0x{last:x}u", local_index(size), threads - rest),
    }
}

/// Returns the value of an input of a kernel with a workgroup size.
fn input_value(binding: &Option<naga::Binding>, size: [u32; 3]) -> Result<String, TranslateError> {
    let Some(naga::Binding::BuiltIn(builtin)) = *binding else {
        return unsupported("an input of a kernel that is not a builtin");
    };
    let [x, y, z] = size;
    let index = local_index(size);
    Ok(match builtin {
        BuiltIn::GlobalInvocationId => format!(
            "{{blockIdx.x * {x}u + threadIdx.x, blockIdx.y * {y}u + threadIdx.y, blockIdx.z * {z}u + threadIdx.z}}"
        ),
        BuiltIn::LocalInvocationId => "{threadIdx.x, threadIdx.y, threadIdx.z}".to_owned(),
        BuiltIn::LocalInvocationIndex => index,
        BuiltIn::WorkGroupId => "{blockIdx.x, blockIdx.y, blockIdx.z}".to_owned(),
        BuiltIn::WorkGroupSize => format!("{{{x}u, {y}u, {z}u}}"),
        BuiltIn::NumWorkGroups => "{gridDim.x, gridDim.y, gridDim.z}".to_owned(),
        BuiltIn::SubgroupSize => format!("{WARP_SIZE}u"),
        BuiltIn::SubgroupInvocationId => format!("{index} % {WARP_SIZE}u"),
        BuiltIn::SubgroupId => format!("{index} / {WARP_SIZE}u"),
        BuiltIn::NumSubgroups => format!("{}u", (x * y * z).div_ceil(WARP_SIZE)),
        other => return unsupported(format!("the builtin {other:?} in a kernel")),
    })
}
