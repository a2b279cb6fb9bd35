//! Builtin functions: the prelude defines them with WGSL's names.

use naga::common::wgsl::TryToWgsl;
use naga::{Expression, Handle, MathFunction as Math};

use super::function::FunctionWriter;
use super::{TranslateError, unsupported};

impl FunctionWriter<'_> {
    pub(super) fn math_call(
        &self,
        result: Handle<Expression>,
        fun: Math,
        first: Handle<Expression>,
        others: [Option<Handle<Expression>>; 3],
    ) -> Result<String, TranslateError> {
        let mut arguments = self.value(first)?;
        for other in others.into_iter().flatten() {
            arguments = format!("{arguments}, {}", self.value(other)?);
        }
        let Some(name) = fun.try_to_wgsl() else {
            return unsupported(format!("the function {fun:?}"));
        };
        self.context.require_prelude(|files| match fun {
            Math::CountTrailingZeros
            | Math::CountLeadingZeros
            | Math::CountOneBits
            | Math::ReverseBits
            | Math::ExtractBits
            | Math::InsertBits
            | Math::FirstTrailingBit
            | Math::FirstLeadingBit => files.bits = true,
            Math::Transpose | Math::Determinant => (files.matrix, files.math) = (true, true),
            _ if ["dot4", "pack", "unpack"].iter().any(|start| name.starts_with(start)) => files.pack = true,
            _ => files.math = true,
        });
        Ok(match fun {
            Math::Modf | Math::Frexp => format!("{name}<{}>({arguments})", self.type_name_of(result)?),
            _ => format!("{name}({arguments})"),
        })
    }
}
