//! All portable kernels of forebay, written once in WGSL, and the preprocessor that specialises them.
//!
//! A kernel is a file in `wgsl/`: WGSL with [minijinja] tags for parts that WGSL's own `override` constants
//! cannot express. Examples are element types, the expression of an elementwise operation, and the required
//! files of `math/`. [`render`] converts a template and its definitions to plain WGSL, which a backend
//! compiles.
//!
//! Conventions:
//! - Storage buffers are `@group(0) @binding(0..n)`, declared through the macros of `types.wgsl`.
//! - Parameters are one uniform block `p` at `@group(1) @binding(0)`.
//! - The entry point is `main`.
//! - `group_index` numbers the workgroups, because a grid longer than 65,535 groups is folded into y.
//!
//! A new template is a file in `wgsl/`, whose first comment lists its definitions, and a name in `templates.rs`. Its
//! forms are validated in `tests/`. Kernels in CUDA C++ are files in `cuda/`, and constants of the module [`cuda`].

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::sync::OnceLock;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, UndefinedBehavior, Value};
use thiserror::Error;

pub mod cooperative;
pub mod cuda;
pub mod reflection;
mod templates;
pub mod visit;
pub use templates::TEMPLATES;

/// A definition that a template receives.
#[derive(Clone, Debug, Eq)]
pub enum TemplateDef {
    /// A name or an expression.
    Str(&'static str),
    /// Several names or expressions.
    StrList(smallvec::SmallVec<[&'static str; 1]>),
    /// An integer.
    Int(i64),
    /// Several integers.
    IntList(smallvec::SmallVec<[u8; 16]>),
    /// A flag.
    Bool(bool),
}

/// Compares two strings, whose addresses are mostly equal.
#[inline]
fn str_eq(a: &str, b: &str) -> bool {
    std::ptr::eq(a, b) || a == b
}

impl PartialEq for TemplateDef {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Str(a), Self::Str(b)) => str_eq(a, b),
            (Self::StrList(a), Self::StrList(b)) => {
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| str_eq(a, b))
            }
            (Self::Int(a), Self::Int(b)) => a == b,
            (Self::IntList(a), Self::IntList(b)) => a == b,
            (Self::Bool(a), Self::Bool(b)) => a == b,
            _ => false,
        }
    }
}

impl Hash for TemplateDef {
    #[inline]
    fn hash<H: Hasher>(&self, state: &mut H) {
        // Hashes the bytes of strings without list lengths: lists that differ only in structure are rare
        // within a template.
        match self {
            Self::Str(s) => state.write(s.as_bytes()),
            Self::StrList(l) => l.iter().for_each(|s| state.write(s.as_bytes())),
            Self::Int(n) => state.write_i64(*n),
            Self::IntList(l) => state.write(l),
            Self::Bool(b) => state.write_u8(u8::from(*b)),
        }
    }
}

impl From<&'static str> for TemplateDef {
    fn from(s: &'static str) -> Self {
        Self::Str(s)
    }
}
impl From<bool> for TemplateDef {
    fn from(b: bool) -> Self {
        Self::Bool(b)
    }
}
impl From<usize> for TemplateDef {
    fn from(n: usize) -> Self {
        Self::Int(n as i64)
    }
}
impl From<&[&'static str]> for TemplateDef {
    fn from(l: &[&'static str]) -> Self {
        Self::StrList(l.into())
    }
}
impl From<&[u8]> for TemplateDef {
    fn from(l: &[u8]) -> Self {
        Self::IntList(l.into())
    }
}

/// Number of definitions for which a spec reserves memory. More definitions are moved to larger memory.
const RESERVED_DEFS: usize = 20;
// The host's allocator (glibc) serves sizes up to this from a list of each thread, and larger ones more slowly.
const _: () = assert!(RESERVED_DEFS * size_of::<(&'static str, TemplateDef)>() <= 1032);

/// A template with its definitions, which identifies a kernel. Cheap to build, hash and compare, because
/// every launch does so.
#[derive(Clone, Debug, Eq)]
pub struct KernelSpec {
    /// Name of the file in `wgsl/`, without extension.
    pub template: &'static str,
    /// Definitions of the template, by name.
    pub defs: Vec<(&'static str, TemplateDef)>,
}

impl PartialEq for KernelSpec {
    fn eq(&self, other: &Self) -> bool {
        let equal = |((a, x), (b, y)): (&(&str, TemplateDef), &(&str, TemplateDef))| str_eq(a, b) && x == y;
        str_eq(self.template, other.template)
            && self.defs.len() == other.defs.len()
            && self.defs.iter().zip(&other.defs).all(equal)
    }
}

impl Hash for KernelSpec {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // The template implies the names of the definitions.
        state.write(self.template.as_bytes());
        self.defs.iter().for_each(|(_, def)| def.hash(state));
    }
}

impl KernelSpec {
    /// Creates a spec without definitions.
    #[must_use]
    pub fn new(template: &'static str) -> Self {
        // On the heap, because each definition moves the spec by value.
        Self { template, defs: Vec::with_capacity(RESERVED_DEFS) }
    }

    /// Adds a definition.
    #[must_use]
    pub fn def(mut self, name: &'static str, value: impl Into<TemplateDef>) -> Self {
        self.defs.push((name, value.into()));
        self
    }

    /// Returns a short name for messages and profiles: the template with its string definitions. For a fused
    /// chain, returns the operations and the dtype of the result.
    #[must_use]
    pub fn label(&self) -> String {
        let list = |name| {
            self.defs.iter().find_map(|(n, def)| match def {
                TemplateDef::StrList(l) if *n == name => Some(&l[..]),
                _ => None,
            })
        };
        if let Some(ops) = list("ops") {
            let dtype = list("outs").and_then(|outs| outs.last());
            return ops.iter().chain(dtype).copied().collect::<Vec<_>>().join(" ");
        }
        let mut label = self.template.to_owned();
        for (name, def) in &self.defs {
            match def {
                TemplateDef::Str(s) if s.len() <= 24 => label.push_str(&format!(" {name}={s}")),
                TemplateDef::Int(n) => label.push_str(&format!(" {name}={n}")),
                TemplateDef::Bool(true) => label.push_str(&format!(" {name}")),
                _ => {}
            }
        }
        label
    }
}

/// Error while rendering a template: a bug in this workspace or in the caller's definitions.
#[derive(Debug, Error)]
#[error("kernel template `{template}`: {message}")]
pub struct RenderError {
    /// Name of the template.
    pub template: String,
    /// The preprocessor's message, with the line.
    pub message: String,
}

/// Optional types of the device that a kernel is rendered for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RenderOptions {
    /// If true, buffers may have elements of `u16`, which are stored without atomics.
    pub stores_u16: bool,
}

/// Extension of WGSL that has the type `u16`.
const ENABLE_U16: &str = "enable wgpu_int16;\n";

fn template_environment(options: RenderOptions) -> &'static Environment<'static> {
    static ENVIRONMENTS: [OnceLock<Environment<'static>>; 2] = [OnceLock::new(), OnceLock::new()];
    ENVIRONMENTS[usize::from(options.stores_u16)].get_or_init(|| {
        let mut env = Environment::new();
        env.add_global("stores_u16", options.stores_u16);
        env.set_undefined_behavior(UndefinedBehavior::Strict);
        env.set_syntax(
            SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().unwrap_or_default(),
        );
        env.set_loader(|name| Ok(templates::template_source(name).map(str::to_owned)));
        env
    })
}

/// Returns the source text of a template, such as `math/base`.
#[must_use]
pub fn template_source(name: &str) -> Option<&'static str> {
    TEMPLATES.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}

/// Renders the WGSL of a kernel for all devices.
///
/// # Errors
/// The template does not exist, lacks a definition, or is malformed.
pub fn render(spec: &KernelSpec) -> Result<String, RenderError> {
    render_with_options(spec, RenderOptions::default())
}

/// Renders the WGSL of a kernel for devices with these optional types.
///
/// # Errors
/// See [`render`].
pub fn render_with_options(spec: &KernelSpec, options: RenderOptions) -> Result<String, RenderError> {
    let fail =
        |e: minijinja::Error| RenderError { template: spec.template.to_owned(), message: format!("{e:#}") };
    let defs: BTreeMap<&str, Value> = spec
        .defs
        .iter()
        .map(|(name, def)| {
            let value = match def {
                TemplateDef::Str(s) => Value::from(*s),
                TemplateDef::StrList(l) => l.iter().map(|s| Value::from(*s)).collect(),
                TemplateDef::Int(n) => Value::from(*n),
                TemplateDef::IntList(l) => l.iter().map(|n| Value::from(*n)).collect(),
                TemplateDef::Bool(b) => Value::from(*b),
            };
            (*name, value)
        })
        .collect();
    let template = template_environment(options).get_template(spec.template).map_err(fail)?;
    let mut wgsl = template.render(defs).map_err(fail)?;
    if wgsl.contains("array<u16>") {
        wgsl.insert_str(0, ENABLE_U16);
    }
    Ok(wgsl)
}

/// Returns a bit mask of the storage bindings of group 0 that a module may write; all bits if this cannot be
/// determined.
#[must_use]
pub fn writable_bindings(wgsl: &str) -> u32 {
    let mut bits = 0;
    let mut rest = wgsl;
    while let Some(at) = rest.find("var<storage") {
        let (before, from) = rest.split_at(at);
        let access = from.split('>').next().unwrap_or("");
        if access.contains("write") {
            // The attributes are between the end of the previous declaration and this one.
            let attributes = before.rsplit([';', '}']).next().unwrap_or("");
            let binding = attributes.rsplit_once("@binding(").and_then(|(_, n)| n.split(')').next());
            match binding.and_then(|n| n.trim().trim_end_matches('u').parse::<u32>().ok()) {
                Some(binding) if binding < u32::BITS => bits |= 1 << binding,
                _ => return u32::MAX,
            }
        }
        rest = &from[access.len()..];
    }
    bits
}

#[cfg(test)]
mod tests {
    use naga::valid::{Capabilities, ValidationFlags, Validator};

    use super::{KernelSpec, RenderOptions, TemplateDef, render, render_with_options};

    fn valid(spec: &KernelSpec) {
        for stores_u16 in [false, true] {
            let wgsl =
                render_with_options(spec, RenderOptions { stores_u16 }).unwrap_or_else(|e| panic!("{e}"));
            let module = naga::front::wgsl::parse_str(&wgsl)
                .unwrap_or_else(|e| panic!("{}\n{wgsl}", e.emit_to_string(&wgsl)));
            Validator::new(ValidationFlags::all(), Capabilities::all())
                .validate(&module)
                .unwrap_or_else(|e| panic!("{}\n{wgsl}", e.emit_to_string(&wgsl)));
        }
    }

    #[test]
    fn elements_of_16_bits_are_stored_without_atomics_where_the_device_can() {
        let copy = KernelSpec::new("copy").def("size", 2usize).def("mode", "scattered");
        let copy = copy.def("rank", 3usize).def("f32_division", true);
        let unique = KernelSpec::new("scatter_unique").def("size", 2usize).def("index", "i32");
        let cross = KernelSpec::new("cross").def("dtype", "bf16");
        for spec in [copy, unique, cross] {
            valid(&spec);
            let atomic = render(&spec).expect("it renders");
            assert!(atomic.contains("atomicXor") && !atomic.contains("u16"), "{atomic}");
            let single = render_with_options(&spec, RenderOptions { stores_u16: true }).expect("it renders");
            assert!(single.starts_with("enable wgpu_int16;") && !single.contains("atomic"), "{single}");
        }
    }

    #[test]
    fn pointwise_is_valid_for_every_type_and_layout() {
        for dtype in ["f32", "f16", "bf16", "f64", "i32", "u32", "i64", "u8", "bool", "i64w"] {
            let vectors = matches!(dtype, "f32" | "f16" | "bf16" | "i32" | "u32");
            let layouts = [
                ("vec4", "packed", 0),
                ("lines", "packed", 0),
                ("lines", "packed", 1),
                ("dense", "packed", 0),
                ("strided", "packed", 0),
                ("strided", "scattered", 0),
            ];
            let allowed = |layout: &str| vectors || !matches!(layout, "vec4" | "lines");
            for (layout, mode, repeated) in layouts.into_iter().filter(|(layout, ..)| allowed(layout)) {
                for inplace in [false, true] {
                    if inplace && mode == "packed" && layout == "strided" {
                        continue;
                    }
                    let compute = if dtype == "bool" { "u32" } else { dtype };
                    let spec = KernelSpec::new("pointwise")
                        .def("names", &["a", "b"][..])
                        .def("inputs", &[dtype, "f32"][..])
                        .def("compute", compute)
                        .def("result", compute)
                        .def("out", dtype)
                        .def("expr", "a + b * s")
                        .def("math", TemplateDef::StrList(Default::default()))
                        .def("scalars", &["s"][..])
                        .def("layout", layout)
                        .def("repeated", &[0u8, repeated][..])
                        .def("width", if dtype.ends_with("f16") { 8 } else { 4 })
                        .def("mode", mode)
                        .def("inplace", inplace);
                    valid(&spec);
                }
            }
        }
    }

    #[test]
    fn fused_is_valid_for_every_type_and_layout() {
        for dtype in ["f32", "f16", "bf16"] {
            for (layout, strided, repeated) in
                [("vec4", 0u8, 0u8), ("vec4", 1, 0), ("vec4", 1, 1), ("each", 0, 0), ("each", 1, 0)]
            {
                for written in [[0u8, 1, 0, 1], [1, 1, 1, 1]] {
                    let spec = KernelSpec::new("fused_pointwise")
                        .def("ops", &["mul", "add", "to_dtype", "exp"][..])
                        .def("math", &["base", "exp"][..])
                        .def("inputs", &[dtype, "f32", "bf16"][..])
                        .def("strided", &[0u8, strided, 0][..])
                        .def("repeated", &[0u8, repeated, 0][..])
                        .def("exprs", &["a * b", "a + s * b", "a", "m_exp(a) * k + s"][..])
                        .def("outs", &[dtype, dtype, "f16", "f32"][..])
                        .def("written", &written[..])
                        .def("arities", &[2u8, 2, 1, 1][..])
                        .def("counts", &[0u8, 1, 0, 2][..])
                        .def("args", &["a", "b", "a", "b", "a", "a"][..])
                        .def("sources", &["e0", "e1", "s0", "e2", "s1", "s2"][..])
                        .def("scalar_names", &["s", "k", "s"][..])
                        .def("layout", layout)
                        .def("width", 8usize);
                    valid(&spec);
                    assert_eq!(spec.label(), "mul add to_dtype exp f32");
                }
            }
        }
    }

    #[test]
    fn copy_is_valid_for_every_size() {
        for size in [1usize, 2, 4, 8] {
            for mode in ["packed", "vectors"] {
                valid(&KernelSpec::new("copy").def("size", size).def("mode", mode));
            }
            for rank in 1..=8usize {
                let scattered = KernelSpec::new("copy").def("size", size).def("mode", "scattered");
                valid(&scattered.def("rank", rank).def("f32_division", rank > 4));
                for adjacent in [false, true] {
                    let runs = KernelSpec::new("copy").def("size", size).def("mode", "runs");
                    valid(&runs.def("rank", rank).def("adjacent", adjacent).def("f32_division", rank > 4));
                }
            }
        }
    }

    #[test]
    fn cat_is_valid_for_every_number_of_inputs() {
        for inputs in 1..=8usize {
            valid(&KernelSpec::new("cat").def("inputs", inputs).def("f32_division", inputs > 4));
        }
    }

    #[test]
    fn written_bindings_are_read_from_declarations() {
        let wgsl = "
            @group(0) @binding(0) var<storage, read> a: array<f32>;
            @binding(3u) @group(0) var<storage,read_write> b: array<f32>;
            struct P { n: u32 }
            @group(1) @binding(0) var<uniform> p: P;
            @group(0) @binding(1)
            var<storage, read_write> c: array<f32>;
            var<workgroup> w: array<f32, 4>;";
        assert_eq!(super::writable_bindings(wgsl), 0b1010);
        assert_eq!(
            super::writable_bindings("@group(0) @binding(N) var<storage, read_write> a: array<f32>;"),
            u32::MAX
        );
        let copy =
            render(&KernelSpec::new("copy").def("size", 4usize).def("mode", "packed")).expect("it renders");
        assert_eq!(super::writable_bindings(&copy), 0b10);
    }

    #[test]
    fn a_missing_definition_is_an_error_that_names_the_template() {
        let error = render(&KernelSpec::new("pointwise")).expect_err("nothing was defined");
        assert!(error.to_string().contains("pointwise"), "{error}");
    }
}
