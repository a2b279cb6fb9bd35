//! Types, structs with WGSL's layout, literals and constants.

use std::cell::Cell;
use std::fmt::Write;

use forebay_shaders::cooperative::OperandType;
use naga::common::wgsl::TryToWgsl;
use naga::proc::{IndexableLength, Layouter};
use naga::valid::ModuleInfo;
use naga::{
    ArraySize, Constant, CooperativeRole, CooperativeSize, Expression, FastHashMap, Function, GlobalVariable,
    Handle, Literal,
};
use naga::{Module, Scalar, Type, TypeInner, VectorSize};

use super::names::NameScope;
use super::uniformity::ModuleUniformity;
use super::{TranslateError, unsupported};

/// Parts of the prelude that a kernel uses in addition to the base.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PreludeFiles {
    pub(super) math: bool,
    pub(super) bits: bool,
    pub(super) pack: bool,
    pub(super) intrinsics: bool,
    pub(super) matrix: bool,
    pub(super) atomic: bool,
    pub(super) subgroup: bool,
    pub(super) cooperative: bool,
}

/// C++ names of a struct and its members.
#[derive(Debug, Default)]
pub(super) struct StructNames {
    pub(super) name: String,
    pub(super) members: Vec<String>,
    /// Indices of members in the order of the C++ struct; `None` is padding.
    pub(super) field_order: Vec<Option<usize>>,
}

/// A module with the C++ names of its items.
pub(super) struct ModuleContext<'a> {
    pub(super) module: &'a Module,
    pub(super) info: &'a ModuleInfo,
    pub(super) layouts: Layouter,
    pub(super) structs: FastHashMap<Handle<Type>, StructNames>,
    pub(super) globals: FastHashMap<Handle<GlobalVariable>, String>,
    pub(super) functions: FastHashMap<Handle<Function>, String>,
    pub(super) constants: FastHashMap<Handle<Constant>, String>,
    /// Storage bindings that the kernel may write.
    pub(super) written_bindings: naga::FastHashSet<Handle<GlobalVariable>>,
    /// Index of every storage binding among the kernel's parameters.
    pub(super) parameter_index: FastHashMap<Handle<GlobalVariable>, usize>,
    pub(super) uniformity: ModuleUniformity,
    pub(super) prelude_files: Cell<PreludeFiles>,
    /// Type of the 16-bit elements that f32 memory of matrices A and B holds; `None` if it holds f32.
    pub(super) packed_operand: Option<OperandType>,
    /// If true, a difference of two cooperative matrices is their product by elements.
    pub(super) difference_is_product: bool,
    /// Workgroups of a multiprocessor that registers should allow.
    pub(super) resident_workgroups: Option<u32>,
    pub(super) wgsl: &'a str,
}

impl<'a> ModuleContext<'a> {
    pub(super) fn require_prelude(&self, set: impl FnOnce(&mut PreludeFiles)) {
        let mut files = self.prelude_files.get();
        set(&mut files);
        self.prelude_files.set(files);
    }

    pub(super) fn type_inner(&self, ty: Handle<Type>) -> &'a TypeInner {
        &self.module.types[ty].inner
    }

    pub(super) fn type_name(&self, ty: Handle<Type>) -> Result<String, TranslateError> {
        match (self.structs.get(&ty), self.type_inner(ty)) {
            (Some(names), _) => Ok(names.name.clone()),
            (None, inner) => self.type_inner_name(inner),
        }
    }

    pub(super) fn type_inner_name(&self, inner: &TypeInner) -> Result<String, TranslateError> {
        Ok(match *inner {
            TypeInner::Scalar(scalar) | TypeInner::Atomic(scalar) => self.scalar_name(scalar)?.to_owned(),
            TypeInner::Vector { size, scalar } => {
                format!("vec<{}, {}>", self.scalar_name(scalar)?, size as u32)
            }
            TypeInner::Matrix { columns, rows, scalar } => {
                self.require_prelude(|p| (p.matrix, p.math) = (true, true));
                format!("mat<{}, {}, {}>", self.scalar_name(scalar)?, columns as u32, rows as u32)
            }
            TypeInner::Array { base, size, stride } => {
                // The size may be an override expression, whose value is known by now.
                let size = size.resolve(self.module.to_ctx());
                let size = size.map_err(|e| TranslateError::Override(e.to_string()))?;
                let IndexableLength::Known(count) = size else {
                    return unsupported("a runtime-sized array as a value");
                };
                if stride != self.layouts[base].to_stride() {
                    return unsupported(format!("an array with a stride of {stride} bytes"));
                }
                format!("arr<{}, {count}>", self.type_name(base)?)
            }
            TypeInner::CooperativeMatrix { columns, rows, scalar, role } => {
                return self.cooperative_matrix_name(columns, rows, scalar, role);
            }
            TypeInner::Image { .. } => return unsupported("a texture"),
            TypeInner::Sampler { .. } => return unsupported("a sampler"),
            TypeInner::AccelerationStructure { .. } => return unsupported("an acceleration structure"),
            TypeInner::RayQuery { .. } => return unsupported("a ray query"),
            TypeInner::BindingArray { .. } => return unsupported("an array of bindings"),
            TypeInner::Pointer { .. } | TypeInner::ValuePointer { .. } => {
                return unsupported("a stored pointer");
            }
            TypeInner::Struct { .. } => return unsupported("a struct that is not declared"),
        })
    }

    /// Returns the name of a cooperative matrix. Matrix units multiply 16-bit floats, with sums in f32.
    fn cooperative_matrix_name(
        &self,
        columns: CooperativeSize,
        rows: CooperativeSize,
        scalar: Scalar,
        role: CooperativeRole,
    ) -> Result<String, TranslateError> {
        if [columns, rows] != [CooperativeSize::Sixteen; 2] {
            return unsupported("a cooperative matrix that is not 16 x 16");
        }
        self.require_prelude(|p| p.cooperative = true);
        Ok(match (role, scalar) {
            (CooperativeRole::A, _) => format!("coop_a<{}>", self.operand_name(scalar)?),
            (CooperativeRole::B, _) => format!("coop_b<{}>", self.operand_name(scalar)?),
            (CooperativeRole::C, Scalar::F32) => "coop_c".to_owned(),
            (CooperativeRole::C, _) => return unsupported("a cooperative matrix of sums that are not f32"),
        })
    }

    /// Returns the name of the element type of cooperative matrices A and B whose memory holds `scalar`.
    pub(super) fn operand_name(&self, scalar: Scalar) -> Result<&'static str, TranslateError> {
        match (scalar, self.packed_operand) {
            (Scalar::F16, _) | (Scalar::F32, Some(OperandType::F16)) => Ok("operand_f16"),
            (Scalar::F32, Some(OperandType::Bf16)) => Ok("operand_bf16"),
            _ => unsupported("a cooperative matrix of operands that are not f16"),
        }
    }

    pub(super) fn scalar_name(&self, scalar: Scalar) -> Result<&'static str, TranslateError> {
        // The prelude defines the types with WGSL's names.
        match scalar.try_to_wgsl() {
            Some(name) => Ok(name),
            None => unsupported(format!("a scalar of kind {:?} and {} bytes", scalar.kind, scalar.width)),
        }
    }

    /// Returns element and stride of a runtime-sized array; `None` if `ty` is another type.
    pub(super) fn runtime_array(&self, ty: Handle<Type>) -> Option<(Handle<Type>, u32)> {
        match *self.type_inner(ty) {
            TypeInner::Array { base, size: ArraySize::Dynamic, stride } => Some((base, stride)),
            _ => None,
        }
    }

    pub(super) fn is_vec3(&self, ty: Handle<Type>) -> bool {
        matches!(self.type_inner(ty), TypeInner::Vector { size: VectorSize::Tri, .. })
    }

    /// Returns the pointee type of a pointer to elements of a runtime-sized array.
    pub(super) fn element_name(&self, base: Handle<Type>) -> Result<String, TranslateError> {
        let name = self.type_name(base)?;
        Ok(if self.is_vec3(base) { format!("cell<{name}>") } else { name })
    }

    /// Names and writes every struct. Explicit padding fixes the offsets, which the C++ compiler checks.
    pub(super) fn write_structs(
        &mut self,
        names: &mut NameScope,
        out: &mut String,
    ) -> Result<(), TranslateError> {
        for (handle, ty) in self.module.types.iter() {
            let TypeInner::Struct { ref members, span } = ty.inner else { continue };
            let mut member_names = NameScope::default();
            let mut layout = StructNames {
                name: names.unique_name("s_", ty.name.as_deref().unwrap_or("")),
                members: members
                    .iter()
                    .map(|m| member_names.unique_name("m_", m.name.as_deref().unwrap_or("")))
                    .collect(),
                field_order: Vec::new(),
            };
            let name = layout.name.clone();
            let mut text = String::new();
            let mut checks = String::new();
            let mut end = 0;
            for (index, member) in members.iter().enumerate() {
                if self.runtime_array(member.ty).is_some() {
                    break; // The kernel reaches this array through `tail`.
                }
                push_padding(&mut text, &mut layout.field_order, end, member.offset);
                layout.field_order.push(Some(index));
                let field = &layout.members[index];
                writeln!(text, "    {} {field};", self.type_name(member.ty)?).ok();
                let check = format!("__INTADDR__(&(({name}*)0)->{field}) == {}", member.offset);
                writeln!(checks, "static_assert({check}, \"layout\");").ok();
                end = member.offset + self.layouts[member.ty].size;
            }
            // Result structs of builtin functions are in no buffer, and naga's layout of some differs from
            // WGSL's.
            if self.module.special_types.predeclared_types.values().any(|&special| special == handle) {
                let fields = members.iter().zip(&layout.members);
                let fields = fields.map(|(m, name)| Ok(format!("{} {name}; ", self.type_name(m.ty)?)));
                let fields = fields.collect::<Result<String, TranslateError>>()?;
                writeln!(out, "struct {name} {{ {fields}}};").ok();
                layout.field_order = (0..members.len()).map(Some).collect();
                self.structs.insert(handle, layout);
                continue;
            }
            let sized = members.last().is_none_or(|m| self.runtime_array(m.ty).is_none());
            if sized {
                push_padding(&mut text, &mut layout.field_order, end, span);
                writeln!(checks, "static_assert(sizeof({name}) == {span}, \"layout\");").ok();
            }
            let align = self.layouts[handle].alignment.round_up(1);
            write!(out, "struct alignas({align}) {name} {{\n{text}}};\n{checks}").ok();
            self.structs.insert(handle, layout);
        }
        Ok(())
    }

    /// Names and writes the constants that are indexed and so need an address; others are written inline.
    pub(super) fn write_constants(
        &mut self,
        names: &mut NameScope,
        out: &mut String,
    ) -> Result<(), TranslateError> {
        for (handle, constant) in self.module.constants.iter() {
            let inner = self.type_inner(constant.ty);
            if !matches!(inner, TypeInner::Array { .. }) || inner.is_abstract(&self.module.types) {
                continue;
            }
            let name = names.unique_name("c_", constant.name.as_deref().unwrap_or(""));
            let value = self.constant_expression(constant.init)?;
            writeln!(out, "static __device__ const {} {name} = {value};", self.type_name(constant.ty)?).ok();
            self.constants.insert(handle, name);
        }
        Ok(())
    }

    /// Returns the name of a constant, or its value if it has none.
    pub(super) fn constant(&self, handle: Handle<Constant>) -> Result<String, TranslateError> {
        match self.constants.get(&handle) {
            Some(name) => Ok(name.clone()),
            None => self.constant_expression(self.module.constants[handle].init),
        }
    }

    pub(super) fn constant_expression(&self, handle: Handle<Expression>) -> Result<String, TranslateError> {
        match self.module.global_expressions[handle] {
            Expression::Literal(literal) => self.literal(literal),
            Expression::Constant(constant) => self.constant(constant),
            Expression::ZeroValue(ty) => Ok(format!("{}{{}}", self.type_name(ty)?)),
            Expression::Compose { ty, ref components } => {
                let mut parts = Vec::new();
                for &component in components {
                    match self.type_inner(ty) {
                        TypeInner::Vector { .. } => self.constant_components(component, &mut parts)?,
                        _ => parts.push(self.constant_expression(component)?),
                    }
                }
                self.compose(ty, &parts, false)
            }
            Expression::Splat { size, value } => {
                let inner = self.info[value].inner_with(&self.module.types);
                let vector = inner.scalar().map(|scalar| TypeInner::Vector { size, scalar });
                let name = self.type_inner_name(vector.as_ref().unwrap_or(inner))?;
                let parts = vec![self.constant_expression(value)?; size as usize];
                Ok(format!("{name}{{{}}}", parts.join(", ")))
            }
            ref other => unsupported(format!("the constant expression {other:?}")),
        }
    }

    /// Returns the scalars of a constant vector, also of one composed of vectors: initialisers call no
    /// functions.
    fn constant_components(
        &self,
        handle: Handle<Expression>,
        parts: &mut Vec<String>,
    ) -> Result<(), TranslateError> {
        match (&self.module.global_expressions[handle], self.info[handle].inner_with(&self.module.types)) {
            (Expression::Compose { components, .. }, TypeInner::Vector { .. }) => {
                components.iter().try_for_each(|&c| self.constant_components(c, parts))
            }
            (&Expression::Splat { size, value }, _) => {
                (0..size as u32).try_for_each(|_| self.constant_components(value, parts))
            }
            (&Expression::Constant(constant), TypeInner::Vector { .. }) => {
                self.constant_components(self.module.constants[constant].init, parts)
            }
            (Expression::ZeroValue(_), &TypeInner::Vector { size, scalar }) => {
                let zero = format!("{}{{}}", self.scalar_name(scalar)?);
                parts.extend(std::iter::repeat_n(zero, size as usize));
                Ok(())
            }
            _ => {
                parts.push(self.constant_expression(handle)?);
                Ok(())
            }
        }
    }

    /// Returns a composite of its parts; `vectors` is true if some part is a vector.
    pub(super) fn compose(
        &self,
        ty: Handle<Type>,
        parts: &[String],
        vectors: bool,
    ) -> Result<String, TranslateError> {
        let name = self.type_name(ty)?;
        Ok(match (self.structs.get(&ty), self.type_inner(ty)) {
            (Some(layout), _) => {
                let fields = layout.field_order.iter().map(|f| f.map_or("{}", |i| parts[i].as_str()));
                format!("{name}{{{}}}", fields.collect::<Vec<_>>().join(", "))
            }
            (None, TypeInner::Vector { .. }) if vectors => match parts {
                [whole] => whole.clone(),
                _ => format!("join({})", parts.join(", ")),
            },
            _ => format!("{name}{{{}}}", parts.join(", ")),
        })
    }

    pub(super) fn literal(&self, literal: Literal) -> Result<String, TranslateError> {
        let text = match literal {
            Literal::F64(v) => format!("{v:?}"),
            Literal::F32(v) => format_f32(v),
            Literal::F16(v) => format!("f16{{0x{:04x}}}", v.to_bits()),
            Literal::U16(v) => format!("u16({v})"),
            Literal::I16(v) => format!("i16({v})"),
            Literal::U32(v) => format!("{v}u"),
            Literal::I32(i32::MIN) => "i32(0x80000000u)".to_owned(),
            Literal::I32(v) => v.to_string(),
            Literal::U64(v) => format!("{v}ull"),
            Literal::I64(i64::MIN) => "i64(0x8000000000000000ull)".to_owned(),
            Literal::I64(v) => format!("{v}ll"),
            Literal::Bool(v) => v.to_string(),
            Literal::AbstractInt(_) | Literal::AbstractFloat(_) => return unsupported("an abstract number"),
        };
        // In parentheses, because `-` before the literal would make a decrement.
        Ok(if text.starts_with('-') { format!("({text})") } else { text })
    }
}

fn push_padding(text: &mut String, fields: &mut Vec<Option<usize>>, end: u32, offset: u32) {
    if offset > end {
        writeln!(text, "    unsigned char pad{end}[{}];", offset - end).ok();
        fields.push(None);
    }
}

/// Returns the shortest decimal of a value, which is exact even if the compiler parses it as a double first.
fn format_f32(v: f32) -> String {
    let text = format!("{v:?}");
    match text.parse::<f64>() {
        Ok(double) if (double as f32).to_bits() == v.to_bits() => format!("{text}f"),
        _ => format!("__uint_as_float(0x{:08x}u)", v.to_bits()),
    }
}
