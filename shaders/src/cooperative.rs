//! Constants by which a module says what WGSL cannot, mostly about cooperative matrices. Backends follow them.

use std::fmt;

use naga::{Expression, Literal, Module};

/// Element type of cooperative matrices A and B.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperandType {
    /// 16-bit floats of IEEE 754.
    F16,
    /// bfloat16, which WGSL lacks.
    Bf16,
}

impl fmt::Display for OperandType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        })
    }
}

/// Returns the type whose elements f32 memory of matrices A and B holds, two in a word: the constant `OPERAND_BITS`,
/// 0xf16 or 0xbf16. `None` if the module declares none.
#[must_use]
pub fn packed_operand(module: &Module) -> Option<OperandType> {
    match literal(module, "OPERAND_BITS")? {
        Literal::U32(0xf16) => Some(OperandType::F16),
        Literal::U32(0xbf16) => Some(OperandType::Bf16),
        _ => None,
    }
}

/// Reports whether a difference of two accumulators is their product by elements, which WGSL lacks: the constant
/// `DIFFERENCE_IS_PRODUCT` is true.
#[must_use]
pub fn is_difference_product(module: &Module) -> bool {
    literal(module, "DIFFERENCE_IS_PRODUCT") == Some(Literal::Bool(true))
}

/// Returns the workgroups that a multiprocessor should run at once, which bounds the registers of a thread: the
/// constant `RESIDENT_WORKGROUPS`. `None` if the module declares none.
#[must_use]
pub fn resident_workgroups(module: &Module) -> Option<u32> {
    match literal(module, "RESIDENT_WORKGROUPS")? {
        Literal::U32(count) => Some(count),
        _ => None,
    }
}

/// Returns the value of a constant that is a literal.
fn literal(module: &Module, name: &str) -> Option<Literal> {
    let (_, constant) = module.constants.iter().find(|(_, found)| found.name.as_deref() == Some(name))?;
    match module.global_expressions[constant.init] {
        Expression::Literal(literal) => Some(literal),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_of_a_module_are_read() {
        let read = |wgsl: &str| {
            let module = naga::front::wgsl::parse_str(wgsl).unwrap();
            (packed_operand(&module), is_difference_product(&module))
        };
        assert_eq!(read(""), (None, false));
        assert_eq!(read("const OPERAND_BITS = 0xf16u;"), (Some(OperandType::F16), false));
        let both = "const OPERAND_BITS = 0xbf16u; const DIFFERENCE_IS_PRODUCT = true;";
        assert_eq!(read(both), (Some(OperandType::Bf16), true));
        assert_eq!(read("const OPERAND_BITS = 16u; const DIFFERENCE_IS_PRODUCT = false;"), (None, false));
        let resident = |wgsl: &str| resident_workgroups(&naga::front::wgsl::parse_str(wgsl).unwrap());
        assert_eq!([resident("const RESIDENT_WORKGROUPS = 3u;"), resident("")], [Some(3), None]);
    }
}
