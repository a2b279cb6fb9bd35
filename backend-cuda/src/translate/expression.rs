//! Expressions: values as C++ values, pointers as C++ lvalues.

use naga::back::{COMPONENTS, binary_operation_str};
use naga::{
    AddressSpace, BinaryOperator as Op, CooperativeData, CooperativeRole, Expression, Handle, Literal,
};
use naga::{RelationalFunction, ScalarKind, Type};
use naga::{SwizzleComponent, TypeInner, UnaryOperator};

use super::function::FunctionWriter;
use super::{TranslateError, unsupported};

impl FunctionWriter<'_> {
    pub(super) fn expression_type(&self, handle: Handle<Expression>) -> &TypeInner {
        self.info[handle].ty.inner_with(&self.context.module.types)
    }

    /// Returns the C++ name of an expression's type.
    pub(super) fn type_name_of(&self, handle: Handle<Expression>) -> Result<String, TranslateError> {
        match self.info[handle].ty.handle() {
            Some(ty) => self.context.type_name(ty),
            None => self.context.type_inner_name(self.expression_type(handle)),
        }
    }

    /// Reports whether a pointer refers to an atomic; if so, the kernel needs that part of the prelude.
    pub(super) fn is_atomic(&self, pointer: Handle<Expression>) -> bool {
        let atomic = self.expression_type(pointer).is_atomic_pointer(&self.context.module.types);
        if atomic {
            self.context.require_prelude(|p| p.atomic = true);
        }
        atomic
    }

    fn is_pointer(&self, handle: Handle<Expression>) -> bool {
        self.expression_type(handle).pointer_space().is_some()
    }

    /// Returns the pointee of a pointer expression, if it is a type of the module (not a component of a
    /// vector).
    fn pointee(&self, handle: Handle<Expression>) -> Option<Handle<Type>> {
        match *self.expression_type(handle) {
            TypeInner::Pointer { base, .. } => Some(base),
            _ => None,
        }
    }

    /// Returns an expression's value: the name of its temporary, if it has one.
    pub(super) fn value(&self, handle: Handle<Expression>) -> Result<String, TranslateError> {
        if let Some(name) = self.temporaries.get(&handle) {
            return Ok(name.clone());
        }
        if self.is_pointer(handle) {
            return self.lvalue(handle);
        }
        self.expression(handle)
    }

    /// Returns the C++ text of an expression.
    pub(super) fn expression(&self, handle: Handle<Expression>) -> Result<String, TranslateError> {
        match self.function.expressions[handle] {
            Expression::Literal(literal) => self.context.literal(literal),
            Expression::Constant(constant) => self.context.constant(constant),
            Expression::ZeroValue(ty) => Ok(format!("{}{{}}", self.context.type_name(ty)?)),
            Expression::Compose { ty, ref components } => {
                let parts = components.iter().map(|&c| self.value(c)).collect::<Result<Vec<_>, _>>()?;
                let vectors =
                    components.iter().any(|&c| matches!(self.expression_type(c), TypeInner::Vector { .. }));
                self.context.compose(ty, &parts, vectors)
            }
            Expression::Access { base, index } => {
                let (base_text, index) = (self.value(base)?, self.value(index)?);
                Ok(match self.expression_type(base) {
                    TypeInner::Vector { .. } => format!("at({base_text}, {index})"),
                    _ => format!("{base_text}[{index}]"),
                })
            }
            Expression::AccessIndex { base, index } => {
                self.access_member(base, self.info[base].ty.handle(), index)
            }
            Expression::Splat { size, value } => {
                Ok(format!("splat<{}>({})", size as u32, self.value(value)?))
            }
            Expression::Swizzle { size, vector, pattern } => {
                let parts =
                    pattern[..size as usize].iter().map(|&c: &SwizzleComponent| (c as u32).to_string());
                Ok(format!("swizzle<{}>({})", parts.collect::<Vec<_>>().join(", "), self.value(vector)?))
            }
            Expression::FunctionArgument(index) => Ok(self.arguments[index as usize].clone()),
            Expression::Load { pointer } => {
                let lvalue = self.lvalue(pointer)?;
                Ok(if self.is_atomic(pointer) { format!("atomicLoad({lvalue})") } else { lvalue })
            }
            Expression::Unary { op, expr } => self.unary(op, expr),
            Expression::Binary { op, left, right } => self.binary(op, left, right),
            Expression::Select { condition, accept, reject } => {
                let (c, yes, no) = (self.value(condition)?, self.value(accept)?, self.value(reject)?);
                Ok(match self.expression_type(condition) {
                    TypeInner::Vector { .. } => format!("select({no}, {yes}, {c})"),
                    _ => format!("({c} ? {yes} : {no})"),
                })
            }
            Expression::Relational { fun, argument } => {
                self.context.require_prelude(|p| p.math = true);
                let name = match fun {
                    RelationalFunction::All => "all",
                    RelationalFunction::Any => "any",
                    RelationalFunction::IsNan => "isNan",
                    RelationalFunction::IsInf => "isInf",
                };
                Ok(format!("{name}({})", self.value(argument)?))
            }
            Expression::Math { fun, arg, arg1, arg2, arg3 } => {
                self.math_call(handle, fun, arg, [arg1, arg2, arg3])
            }
            Expression::As { expr, kind, convert } => self.cast(handle, expr, kind, convert),
            Expression::ArrayLength(array) => self.array_length(array),
            Expression::Override(_) => unsupported("an override without a value"),
            Expression::GlobalVariable(_) | Expression::LocalVariable(_) => self.lvalue(handle),
            Expression::CallResult(_)
            | Expression::AtomicResult { .. }
            | Expression::WorkGroupUniformLoadResult { .. }
            | Expression::SubgroupBallotResult
            | Expression::SubgroupOperationResult { .. } => {
                unsupported("a result that is used before it is made")
            }
            Expression::ImageSample { .. } | Expression::ImageLoad { .. } | Expression::ImageQuery { .. } => {
                unsupported("a texture")
            }
            Expression::Derivative { .. } => unsupported("a derivative"),
            Expression::RayQueryVertexPositions { .. }
            | Expression::RayQueryProceedResult
            | Expression::RayQueryGetIntersection { .. } => unsupported("a ray query"),
            Expression::CooperativeLoad { role, ref data, .. } => self.cooperative_load(handle, role, data),
            Expression::CooperativeMultiplyAdd { a, b, c } => {
                let (a, b, c) = (self.value(a)?, self.value(b)?, self.value(c)?);
                Ok(format!("coop_multiply_add({a}, {b}, {c})"))
            }
        }
    }

    /// Returns the lvalue to which a pointer refers. Its indices are temporaries or pure, so they have not
    /// changed since the pointer was made.
    pub(super) fn lvalue(&self, handle: Handle<Expression>) -> Result<String, TranslateError> {
        match self.function.expressions[handle] {
            Expression::GlobalVariable(global) => {
                let name = &self.context.globals[&global];
                let ty = self.context.module.global_variables[global].ty;
                let by_pointer = self.context.parameter_index.contains_key(&global)
                    && self.context.runtime_array(ty).is_none();
                Ok(if by_pointer { format!("(*{name})") } else { name.clone() })
            }
            Expression::LocalVariable(local) => Ok(self.locals[&local].clone()),
            Expression::FunctionArgument(index) => Ok(self.arguments[index as usize].clone()),
            Expression::Access { base, index } => {
                let element = format!("{}[{}]", self.lvalue(base)?, self.value(index)?);
                Ok(self.unwrap_cell(base, element))
            }
            Expression::AccessIndex { base, index } => self.access_member(base, self.pointee(base), index),
            ref other => unsupported(format!("a pointer made by {other:?}")),
        }
    }

    /// Unwraps elements of runtime-sized vec3 arrays, which are stored as `cell`.
    fn unwrap_cell(&self, base: Handle<Expression>, element: String) -> String {
        let dynamic = self.pointee(base).and_then(|ty| self.context.runtime_array(ty));
        match dynamic {
            Some((inner, _)) if self.context.is_vec3(inner) => format!("{element}.t"),
            _ => element,
        }
    }

    /// Returns a member of a composite by index; the text is the same for values and lvalues.
    fn access_member(
        &self,
        base: Handle<Expression>,
        base_type: Option<Handle<Type>>,
        index: u32,
    ) -> Result<String, TranslateError> {
        let text = self.value(base)?;
        let inner = match base_type {
            Some(ty) => self.context.type_inner(ty),
            None => self.expression_type(base),
        };
        Ok(match (inner, base_type) {
            (TypeInner::Struct { members, .. }, Some(ty)) => {
                let member = &members[index as usize];
                match self.context.runtime_array(member.ty) {
                    Some((element, _)) => {
                        format!("tail<{}>({text}, {})", self.context.element_name(element)?, member.offset)
                    }
                    None => format!("{text}.{}", self.context.structs[&ty].members[index as usize]),
                }
            }
            (TypeInner::Vector { .. }, _) | (TypeInner::ValuePointer { size: Some(_), .. }, _) => {
                format!("{text}.{}", COMPONENTS[index as usize])
            }
            _ => self.unwrap_cell(base, format!("{text}[{index}]")),
        })
    }

    fn cooperative_load(
        &self,
        handle: Handle<Expression>,
        role: CooperativeRole,
        data: &CooperativeData,
    ) -> Result<String, TranslateError> {
        let &TypeInner::CooperativeMatrix { scalar, .. } = self.expression_type(handle) else {
            return unsupported("a load of a cooperative matrix as another type");
        };
        // Other sizes than those of the prelude are an error.
        self.type_name_of(handle)?;
        let (lvalue, stride) = (self.lvalue(data.pointer)?, self.value(data.stride)?);
        let row_major = data.row_major;
        let function = match role {
            CooperativeRole::A => "coop_load_a",
            CooperativeRole::B => "coop_load_b",
            CooperativeRole::C => return Ok(format!("coop_load_c<{row_major}>(&{lvalue}, {stride})")),
        };
        let operand = self.context.operand_name(scalar)?;
        let shared = self.expression_type(data.pointer).pointer_space() == Some(AddressSpace::WorkGroup);
        Ok(format!("{function}<{operand}, {row_major}, {shared}>(&{lvalue}, {stride})"))
    }

    fn unary(&self, op: UnaryOperator, expr: Handle<Expression>) -> Result<String, TranslateError> {
        let text = self.value(expr)?;
        let scalar = match *self.expression_type(expr) {
            TypeInner::Scalar(scalar) => Some(scalar),
            _ => None,
        };
        Ok(match (op, scalar) {
            (UnaryOperator::Negate, Some(scalar)) if scalar.kind != ScalarKind::Float => {
                format!("neg({text})")
            }
            (UnaryOperator::Negate, _) => format!("(-{text})"),
            (UnaryOperator::LogicalNot, _) => format!("(!{text})"),
            (UnaryOperator::BitwiseNot, Some(scalar)) if scalar.width < 4 => format!("bit_not({text})"),
            (UnaryOperator::BitwiseNot, _) => format!("(~{text})"),
        })
    }

    fn binary(
        &self,
        op: Op,
        left: Handle<Expression>,
        right: Handle<Expression>,
    ) -> Result<String, TranslateError> {
        let (a, b) = (self.value(left)?, self.value(right)?);
        let infix = |symbol| Ok(format!("({a} {symbol} {b})"));
        let call = |name| Ok(format!("{name}({a}, {b})"));
        let (&TypeInner::Scalar(scalar), TypeInner::Scalar(_)) =
            (self.expression_type(left), self.expression_type(right))
        else {
            let matrices = matches!(self.expression_type(right), TypeInner::CooperativeMatrix { .. });
            if op == Op::Subtract && matrices && self.context.difference_is_product {
                return call("coop_product");
            }
            return infix(binary_operation_str(op)); // The prelude overloads the operator for vectors and matrices.
        };
        let float = scalar.kind == ScalarKind::Float;
        // Narrow types would be promoted to int, and signed types must wrap.
        let plain = float || (scalar.kind == ScalarKind::Uint && scalar.width >= 4);
        let bitwise = scalar.kind != ScalarKind::Bool && scalar.width >= 4;
        let constant = match self.function.expressions[right] {
            Expression::Literal(Literal::U32(n)) => Some(n),
            _ => None,
        };
        match op {
            Op::Add | Op::Subtract | Op::Multiply if plain => infix(binary_operation_str(op)),
            Op::Add => call("add"),
            Op::Subtract => call("sub"),
            Op::Multiply => call("mul"),
            Op::Divide | Op::Modulo if scalar.kind == ScalarKind::Uint && constant.is_some_and(|n| n > 0) => {
                infix(binary_operation_str(op))
            }
            Op::Divide if float => infix("/"),
            Op::Divide => call("div"),
            Op::Modulo => call("rem"),
            Op::And | Op::InclusiveOr | Op::ExclusiveOr if bitwise => infix(binary_operation_str(op)),
            Op::And => call("bit_and"),
            Op::InclusiveOr => call("bit_or"),
            Op::ExclusiveOr => call("bit_xor"),
            Op::ShiftLeft | Op::ShiftRight
                if plain && constant.is_some_and(|n| n < 8 * u32::from(scalar.width)) =>
            {
                infix(binary_operation_str(op))
            }
            Op::ShiftLeft => call("shl"),
            Op::ShiftRight => call("shr"),
            Op::Equal
            | Op::NotEqual
            | Op::Less
            | Op::LessEqual
            | Op::Greater
            | Op::GreaterEqual
            | Op::LogicalAnd
            | Op::LogicalOr => infix(binary_operation_str(op)),
        }
    }

    fn cast(
        &self,
        handle: Handle<Expression>,
        expr: Handle<Expression>,
        kind: ScalarKind,
        convert: Option<u8>,
    ) -> Result<String, TranslateError> {
        let text = self.value(expr)?;
        let Some(width) = convert else {
            return Ok(format!("bitcast<{}>({text})", self.type_name_of(handle)?));
        };
        let target = naga::Scalar { kind, width };
        if self.expression_type(expr).scalar() == Some(target) {
            return Ok(text);
        }
        Ok(format!("cast<{}>({text})", self.context.scalar_name(target)?))
    }

    fn array_length(&self, array: Handle<Expression>) -> Result<String, TranslateError> {
        let mut root = array;
        let mut offset = 0;
        if let Expression::AccessIndex { base, index } = self.function.expressions[array] {
            if let Some(TypeInner::Struct { members, .. }) =
                self.pointee(base).map(|ty| self.context.type_inner(ty))
            {
                offset = members[index as usize].offset;
            }
            root = base;
        }
        let Expression::GlobalVariable(global) = self.function.expressions[root] else {
            return unsupported("arrayLength of another pointer than a storage binding");
        };
        let stride =
            self.pointee(array).and_then(|ty| self.context.runtime_array(ty)).map_or(1, |(_, stride)| stride);
        let parameter = self.context.parameter_index[&global];
        Ok(match offset {
            0 => format!("u32(lengths.bytes[{parameter}] / {stride}u)"),
            _ => format!("u32((lengths.bytes[{parameter}] - {offset}u) / {stride}u)"),
        })
    }
}
