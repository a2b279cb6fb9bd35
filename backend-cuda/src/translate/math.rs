//! Builtin functions: the prelude defines them with WGSL's names.

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
        let name = function_name(fun)?;
        self.context.require_prelude(|pieces| match fun {
            Math::CountTrailingZeros
            | Math::CountLeadingZeros
            | Math::CountOneBits
            | Math::ReverseBits
            | Math::ExtractBits
            | Math::InsertBits
            | Math::FirstTrailingBit
            | Math::FirstLeadingBit => pieces.bits = true,
            Math::Transpose | Math::Determinant => (pieces.matrix, pieces.math) = (true, true),
            Math::Dot4I8Packed
            | Math::Dot4U8Packed
            | Math::Pack4x8snorm
            | Math::Pack4x8unorm
            | Math::Pack2x16snorm
            | Math::Pack2x16unorm
            | Math::Pack2x16float
            | Math::Pack4xI8
            | Math::Pack4xU8
            | Math::Pack4xI8Clamp
            | Math::Pack4xU8Clamp
            | Math::Unpack4x8snorm
            | Math::Unpack4x8unorm
            | Math::Unpack2x16snorm
            | Math::Unpack2x16unorm
            | Math::Unpack2x16float
            | Math::Unpack4xI8
            | Math::Unpack4xU8 => pieces.pack = true,
            _ => pieces.math = true,
        });
        Ok(match fun {
            Math::Modf | Math::Frexp => format!("{name}<{}>({arguments})", self.type_name_of(result)?),
            _ => format!("{name}({arguments})"),
        })
    }
}

fn function_name(fun: Math) -> Result<&'static str, TranslateError> {
    Ok(match fun {
        Math::Abs => "abs",
        Math::Min => "min",
        Math::Max => "max",
        Math::Clamp => "clamp",
        Math::Saturate => "saturate",
        Math::Cos => "cos",
        Math::Cosh => "cosh",
        Math::Sin => "sin",
        Math::Sinh => "sinh",
        Math::Tan => "tan",
        Math::Tanh => "tanh",
        Math::Acos => "acos",
        Math::Asin => "asin",
        Math::Atan => "atan",
        Math::Atan2 => "atan2",
        Math::Asinh => "asinh",
        Math::Acosh => "acosh",
        Math::Atanh => "atanh",
        Math::Radians => "radians",
        Math::Degrees => "degrees",
        Math::Ceil => "ceil",
        Math::Floor => "floor",
        Math::Round => "round",
        Math::Fract => "fract",
        Math::Trunc => "trunc",
        Math::Modf => "modf",
        Math::Frexp => "frexp",
        Math::Ldexp => "ldexp",
        Math::Exp => "exp",
        Math::Exp2 => "exp2",
        Math::Log => "log",
        Math::Log2 => "log2",
        Math::Pow => "pow",
        Math::Dot => "dot",
        Math::Dot4I8Packed => "dot4I8Packed",
        Math::Dot4U8Packed => "dot4U8Packed",
        Math::Cross => "cross",
        Math::Distance => "distance",
        Math::Length => "length",
        Math::Normalize => "normalize",
        Math::FaceForward => "faceForward",
        Math::Reflect => "reflect",
        Math::Refract => "refract",
        Math::Sign => "sign",
        Math::Fma => "fma",
        Math::Mix => "mix",
        Math::Step => "step",
        Math::SmoothStep => "smoothstep",
        Math::Sqrt => "sqrt",
        Math::InverseSqrt => "inverseSqrt",
        Math::Transpose => "transpose",
        Math::Determinant => "determinant",
        Math::QuantizeToF16 => "quantizeToF16",
        Math::CountTrailingZeros => "countTrailingZeros",
        Math::CountLeadingZeros => "countLeadingZeros",
        Math::CountOneBits => "countOneBits",
        Math::ReverseBits => "reverseBits",
        Math::ExtractBits => "extractBits",
        Math::InsertBits => "insertBits",
        Math::FirstTrailingBit => "firstTrailingBit",
        Math::FirstLeadingBit => "firstLeadingBit",
        Math::Pack4x8snorm => "pack4x8snorm",
        Math::Pack4x8unorm => "pack4x8unorm",
        Math::Pack2x16snorm => "pack2x16snorm",
        Math::Pack2x16unorm => "pack2x16unorm",
        Math::Pack2x16float => "pack2x16float",
        Math::Pack4xI8 => "pack4xI8",
        Math::Pack4xU8 => "pack4xU8",
        Math::Pack4xI8Clamp => "pack4xI8Clamp",
        Math::Pack4xU8Clamp => "pack4xU8Clamp",
        Math::Unpack4x8snorm => "unpack4x8snorm",
        Math::Unpack4x8unorm => "unpack4x8unorm",
        Math::Unpack2x16snorm => "unpack2x16snorm",
        Math::Unpack2x16unorm => "unpack2x16unorm",
        Math::Unpack2x16float => "unpack2x16float",
        Math::Unpack4xI8 => "unpack4xI8",
        Math::Unpack4xU8 => "unpack4xU8",
        // No WGSL builtin produces these.
        Math::Outer | Math::Inverse => return unsupported(format!("the function {fun:?}")),
    })
}
