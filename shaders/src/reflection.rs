//! Reflection of a user's WGSL module: its declarations, and errors in terms of its source.

use naga::front::wgsl;
use naga::valid::{Capabilities, ValidationFlags, Validator};
use naga::{AddressSpace, Module, ShaderStage, StorageAccess, TypeInner};

/// A storage buffer at `@group(0)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorageBuffer {
    /// Binding number.
    pub binding: u32,
    /// Name in the WGSL.
    pub name: String,
    /// If true, the module may write it.
    pub is_writable: bool,
    /// WGSL name of the scalars that the array's elements consist of; empty for other types.
    pub element_type: &'static str,
}

/// Declarations of a module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModuleInterface {
    /// The storage buffers, by binding.
    pub buffers: Vec<StorageBuffer>,
    /// Bytes of the uniform block at `@group(1) @binding(0)`; `None` without one.
    pub params_size: Option<u32>,
    /// Invocations of a workgroup in x, y and z; `None` if `override` constants determine them.
    pub workgroup_size: Option<[u32; 3]>,
}

/// Reads the interface of a module's compute entry point.
///
/// # Errors
/// The module is not valid WGSL, or has no such entry point: the message names the line and the rule.
pub fn reflect_module(wgsl: &str, entry: &str) -> Result<ModuleInterface, String> {
    let module = wgsl::parse_str(wgsl).map_err(|error| error.emit_to_string(wgsl))?;
    Validator::new(ValidationFlags::all(), Capabilities::all()).validate(&module).map_err(|error| {
        // The innermost cause names the rule; the outer ones contain the compiler's indices of expressions.
        let mut rule: &dyn std::error::Error = error.as_inner();
        while let Some(source) = rule.source() {
            rule = source;
        }
        let rule = strip_handles(&rule.to_string());
        let at =
            error.spans().last().filter(|(span, _)| span.is_defined()).map(|(span, _)| span.location(wgsl));
        match at {
            Some(at) => {
                let line = wgsl.lines().nth(at.line_number as usize - 1).unwrap_or("").trim();
                format!("wgsl:{}:{}: {rule}: `{line}`", at.line_number, at.line_position)
            }
            None => rule,
        }
    })?;
    let entries = || module.entry_points.iter().filter(|e| e.stage == ShaderStage::Compute);
    let Some(found) = entries().find(|e| e.name == entry) else {
        let names: Vec<_> = entries().map(|e| format!("`{}`", e.name)).collect();
        let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        return Err(format!("there is no compute entry point `{entry}`; the module has {names}"));
    };
    let mut out = ModuleInterface {
        workgroup_size: found.workgroup_size_overrides.is_none().then_some(found.workgroup_size),
        ..ModuleInterface::default()
    };
    for (_, variable) in module.global_variables.iter() {
        let Some(binding) = variable.binding else { continue };
        match (variable.space, binding.group, binding.binding) {
            (AddressSpace::Storage { access }, 0, binding) => out.buffers.push(StorageBuffer {
                binding,
                name: variable.name.clone().unwrap_or_default(),
                is_writable: access.contains(StorageAccess::STORE),
                element_type: element_type_name(&module, variable.ty),
            }),
            (AddressSpace::Uniform, 1, 0) => {
                out.params_size = Some(module.types[variable.ty].inner.size(module.to_ctx()));
            }
            _ => {}
        }
    }
    out.buffers.sort_by_key(|buffer| buffer.binding);
    Ok(out)
}

/// Returns the name of an array's scalar type.
fn element_type_name(module: &Module, ty: naga::Handle<naga::Type>) -> &'static str {
    let TypeInner::Array { base, .. } = module.types[ty].inner else { return "" };
    let scalar = match module.types[base].inner {
        TypeInner::Scalar(scalar) | TypeInner::Atomic(scalar) => scalar,
        TypeInner::Vector { scalar, .. } => scalar,
        _ => return "",
    };
    match (scalar.kind, scalar.width) {
        (naga::ScalarKind::Float, 2) => "f16",
        (naga::ScalarKind::Float, 4) => "f32",
        (naga::ScalarKind::Float, 8) => "f64",
        (naga::ScalarKind::Sint, 4) => "i32",
        (naga::ScalarKind::Sint, 8) => "i64",
        (naga::ScalarKind::Uint, 4) => "u32",
        _ => "",
    }
}

/// Removes the compiler's indices of expressions and types, such as `[12]`.
fn strip_handles(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('[') {
        let (before, from) = rest.split_at(at);
        let digits = from[1..].chars().take_while(char::is_ascii_digit).count();
        if digits > 0 && from[1 + digits..].starts_with(']') {
            out.push_str(before.trim_end());
            rest = &from[digits + 2..];
        } else {
            out.push_str(&rest[..=at]);
            rest = &rest[at + 1..];
        }
    }
    out + rest
}

/// Returns the fields of the uniform block at `@group(1) @binding(0)`: name and offset in words. Without a block
/// there are none.
///
/// # Errors
/// The module is not valid WGSL.
pub fn uniform_fields(wgsl: &str) -> Result<Vec<(String, usize)>, String> {
    let module = wgsl::parse_str(wgsl).map_err(|error| error.emit_to_string(wgsl))?;
    let block = module.global_variables.iter().find(|(_, v)| v.space == AddressSpace::Uniform);
    Ok(match block.map(|(_, variable)| &module.types[variable.ty].inner) {
        Some(TypeInner::Struct { members, .. }) => members
            .iter()
            .map(|member| (member.name.clone().unwrap_or_default(), member.offset as usize / 4))
            .collect(),
        _ => Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_lists_its_declarations() {
        let wgsl = "
            struct Params { n: u32, scale: f32, at: vec3<u32> }
            @group(0) @binding(1) var<storage, read_write> y: array<vec2<f32>>;
            @group(0) @binding(0) var<storage> x: array<i32>;
            @group(1) @binding(0) var<uniform> p: Params;
            @compute @workgroup_size(8, 4)
            fn main() { y[p.n] = vec2<f32>(f32(x[0])); }";
        let found = reflect_module(wgsl, "main").expect("it is valid");
        let buffer = |binding, name: &str, writable, element| StorageBuffer {
            binding,
            name: name.into(),
            is_writable: writable,
            element_type: element,
        };
        assert_eq!(found.buffers, [buffer(0, "x", false, "i32"), buffer(1, "y", true, "f32")]);
        assert_eq!((found.params_size, found.workgroup_size), (Some(32), Some([8, 4, 1])));
        assert!(reflect_module(wgsl, "run").is_err_and(|e| e.contains("`main`")));
    }

    #[test]
    fn an_error_names_the_line_and_no_handles() {
        for body in
            ["y[0] = 1u;", "y[0] = y[0] + 1u;", "y[0] = foo(1);", "y[0] = max(1u, y[0]);", "if y[0] { }"]
        {
            let wgsl = format!(
                "@group(0) @binding(0) var<storage, read_write> y: array<f32>;\n@compute @workgroup_size(1)\nfn main() {{\n    {body}\n}}"
            );
            let error = reflect_module(&wgsl, "main").expect_err(body);
            let handle = error.match_indices('[').any(|(at, _)| {
                error[at + 1..].starts_with(|c: char| c.is_ascii_digit()) && !error.contains("y[0]")
            });
            assert!(error.contains(":4:") && error.contains(body) && !handle, "{error}");
        }
    }
}
