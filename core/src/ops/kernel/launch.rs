//! Launches: the only module where operations call the backend, with parameters, bindings and a grid.

use forebay_shaders::KernelSpec;

use crate::dtype::DType;
use crate::error::{Error, Result, fail_if};
use crate::memory::scope;
use crate::runtime::capture::replay_params::ReplayCtx;
use crate::runtime::device::{CompiledKernel, Device, KernelKey};
use crate::tensor::Tensor;
pub(crate) use crate::tensor::binding::{bind_contiguous_bytes, bind_for_kernel, bind_tensors};

/// Invocations in a workgroup of elementwise kernels.
#[doc(hidden)]
pub const WORKGROUP_SIZE: usize = 256;

/// Largest number of bytes in one read or write of a thread.
pub(crate) const VECTOR_BYTES: usize = 16;

#[doc(hidden)]
pub use crate::runtime::kernel_params::KernelParams;
pub(crate) use crate::runtime::kernel_params::{MAX_RANK, kernel_params};

/// Builds a [`KernelSpec`] from the template's name and its definitions: `kernel_spec! { "scan", stage, reverse }`.
/// Definitions after `..spec;` extend another spec.
macro_rules! kernel_spec {
    (..$base:expr; $($name:ident $(: $value:expr)?),* $(,)?) => {
        $base$(.def(stringify!($name), $crate::runtime::kernel_params::param_value!($name $($value)?)))*
    };
    ($template:literal $(, $($defs:tt)*)?) => {
        $crate::ops::kernel::launch::kernel_spec!(..forebay_shaders::KernelSpec::new($template); $($($defs)*)?)
    };
}
pub(crate) use kernel_spec;

/// Declares the variants of a kernel, each with the word that the template compares.
macro_rules! kernel_variants {
    ($(#[$doc:meta])* $vis:vis enum $name:ident {
        $($(#[$variant_doc:meta])* $variant:ident = $word:literal,)+
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $vis enum $name { $($(#[$variant_doc])* $variant,)+ }

        impl $name {
            /// Returns the word of the variant in the template.
            $vis const fn word(self) -> &'static str {
                match self { $(Self::$variant => $word,)+ }
            }
        }

        impl From<$name> for forebay_shaders::TemplateDef {
            fn from(variant: $name) -> Self {
                variant.word().into()
            }
        }
    };
}
pub(crate) use kernel_variants;

/// Panics if the names or offsets of the parameters differ from the kernel's struct. Each set of names is
/// checked once.
///
/// A difference is a mistake in this crate, which every test of the operation meets first. A program cannot cause
/// or handle one, so this is an assertion of debug builds and no error.
#[cfg(debug_assertions)]
fn check_param_fields(spec: &KernelSpec, params: &KernelParams) {
    use std::collections::HashSet;
    use std::sync::{LazyLock, Mutex};

    use crate::sync::LockUnpoisoned;

    type Fields = Vec<(&'static str, usize)>;
    static CHECKED: LazyLock<Mutex<HashSet<(&'static str, Fields)>>> = LazyLock::new(Mutex::default);
    let fields = &params.fields;
    let key = (spec.template, fields.clone());
    if fields.is_empty() || !CHECKED.lock_unpoisoned().insert(key) {
        return;
    }
    // Debug builds only: a template that does not render, or has other parameters, is a mistake in this crate.
    let wgsl = forebay_shaders::render(spec).unwrap_or_else(|error| panic!("{error}"));
    let declared =
        forebay_shaders::reflection::uniform_fields(&wgsl).unwrap_or_else(|error| panic!("{error}"));
    let declared = declared.iter().map(|(name, at)| (name.as_str(), *at));
    let declared: Vec<(&str, usize)> = declared.filter(|(name, _)| !name.starts_with("unused")).collect();
    assert_eq!(fields, &declared, "parameters of `{}`", spec.template);
}

pub(crate) fn shader_dtype_name(dtype: DType, device: &Device) -> &'static str {
    if dtype == DType::I64 && !device.info().features.i64 { "i64w" } else { dtype.name() }
}

/// Returns the dtype name of an optional tensor in shaders; empty if there is none.
pub(crate) fn dtype_name_of(t: Option<&Tensor>) -> &'static str {
    t.map_or("", |t| shader_dtype_name(t.dtype(), t.device()))
}

#[track_caller]
pub(crate) fn check_device_dtype(op: &'static str, dtype: DType, device: &Device) -> Result<()> {
    let reason = match dtype {
        DType::I64 if !device.info().features.i64 => "the adapter has no 64-bit integers; cast to i32",
        DType::F64 if !device.info().features.f64 => "the adapter has no 64-bit floats; cast to f32",
        _ => return Ok(()),
    };
    Err(Error::unsupported(op, device, reason))
}

/// Checks the type of a kernel that computes i64 as two words on devices without 64-bit integers.
#[track_caller]
pub(crate) fn check_device_dtype_or_words(op: &'static str, dtype: DType, device: &Device) -> Result<()> {
    if dtype == DType::I64 { Ok(()) } else { check_device_dtype(op, dtype, device) }
}

#[track_caller]
pub(crate) fn check_computable(op: &'static str, t: &Tensor) -> Result<()> {
    fail_if!(t.dtype().is_storage_only();
        dtype(op, t.dtype()), "is only stored and multiplied by `scaled_mm`; cast with `to_dtype` first");
    Ok(())
}

/// Fails for a tensor of a type that kernels do not compute with. The name of the operation is looked up for the
/// error only, because every launch comes here.
fn check_all_computable(tensors: &[&Tensor]) -> Result<()> {
    let storage_only = tensors.iter().find(|t| t.dtype().is_storage_only());
    storage_only.map_or(Ok(()), |t| check_computable(scope::current().op, t))
}

#[track_caller]
pub(crate) fn check_bool_mask(op: &'static str, mask: &Tensor) -> Result<()> {
    fail_if!(mask.dtype() != DType::Bool;
        dtype(op, mask.dtype()), "the mask is bool; compare, or cast with `to_dtype`");
    Ok(())
}

pub(crate) fn check_rank(op: &'static str, rank: usize) -> Result<()> {
    fail_if!(rank > MAX_RANK; argument(op),
        "{rank} dimensions that do not merge; kernels index by at most {MAX_RANK}: make it contiguous first");
    Ok(())
}

/// Runs a kernel with `groups` workgroups over the storages of `tensors`, in the order of its bindings.
#[doc(hidden)]
pub fn launch(spec: &KernelSpec, tensors: &[&Tensor], params: KernelParams, groups: usize) -> Result<()> {
    launch_3d(spec, tensors, params, [groups, 1, 1])
}

/// Launches as [`launch`] does, for kernels of small tensors. The spec is built on the first call only. Debug builds
/// check in each call that the key and the spec stand for the same kernel.
pub(crate) fn launch_by_key(
    key: &KernelKey,
    spec: impl FnOnce() -> KernelSpec,
    tensors: &[&Tensor],
    params: KernelParams,
    groups: usize,
) -> Result<()> {
    let Some(first) = tensors.first() else { return Ok(()) };
    check_all_computable(tensors)?;
    match groups {
        0 => Ok(()),
        _ => {
            let device = first.device();
            #[cfg(debug_assertions)]
            let (spec, checked) = {
                let spec = spec();
                check_param_fields(&spec, &params);
                let checked = device.kernel_for_spec(&spec)?;
                (move || spec, checked)
            };
            let kernel = device.kernel_by_key(key, spec)?;
            #[cfg(debug_assertions)]
            assert_eq!(kernel, checked, "a key of `{}` stands for another kernel", scope::current().op);
            enqueue(kernel, tensors, params, [groups, 1, 1])
        }
    }
}

/// Launches as [`launch`] does. `make` builds the parameters of this run and of each replay.
#[doc(hidden)]
pub fn launch_dynamic(
    spec: &KernelSpec,
    tensors: &[&Tensor],
    make: impl Fn(&ReplayCtx) -> KernelParams + Send + Sync + 'static,
    groups: usize,
) -> Result<()> {
    launch_3d(spec, tensors, make(&ReplayCtx::default()), [groups, 1, 1])?;
    if groups > 0
        && let Some(first) = tensors.first()
    {
        first.device().capture_recorder().set_dynamic_params(make);
    }
    Ok(())
}

/// Launches as [`launch`] does, with a three-dimensional grid. A long x is folded into y if y is 1.
pub(crate) fn launch_3d(
    spec: &KernelSpec,
    tensors: &[&Tensor],
    params: KernelParams,
    groups: [usize; 3],
) -> Result<()> {
    let Some(first) = tensors.first() else { return Ok(()) };
    if groups.contains(&0) {
        return Ok(());
    }
    // Copies move any bytes, and casts take another path. Other kernels would misread storage-only types.
    if !matches!(spec.template, "copy" | "cat") {
        check_all_computable(tensors)?;
    }
    #[cfg(debug_assertions)]
    check_param_fields(spec, &params);
    enqueue(first.device().kernel_for_spec(spec)?, tensors, params, groups)
}

/// Splits the `steps` of a kernel into launches within the device's loop limit. `run` receives the first
/// step, the number of steps and the iterations of each launch. The iterations are `fixed` plus `iterations_of`
/// each step. A single step above the limit fails in the launch.
pub(crate) fn launch_in_parts(
    device: &Device,
    fixed: usize,
    steps: usize,
    iterations_of: impl Fn(usize) -> usize,
    mut run: impl FnMut(usize, usize, usize) -> Result<()>,
) -> Result<()> {
    let max_iterations = device.info().limits.max_loop_iterations as usize;
    let mut first = 0;
    while first < steps {
        let (mut end, mut iterations) = (first, fixed);
        while end < steps {
            let more = iterations.saturating_add(iterations_of(end));
            if end > first && more > max_iterations {
                break;
            }
            (end, iterations) = (end + 1, more);
        }
        run(first, end - first, iterations)?;
        first = end;
    }
    Ok(())
}

/// Runs a kernel that was looked up.
pub(crate) fn enqueue(
    kernel: CompiledKernel,
    tensors: &[&Tensor],
    params: KernelParams,
    groups: [usize; 3],
) -> Result<()> {
    fail_if!(params.exceeds_u32; argument(scope::current().op),
        "a view of it repeats elements 2^32 times or more, and kernels count in 32 bits: go through it in parts");
    if let Some(first) = tensors.first()
        && params.loop_iterations > first.device().info().limits.max_loop_iterations as usize
    {
        return Err(too_many_iterations_error(first.device(), params.loop_iterations));
    }
    enqueue_words(kernel, tensors, &params.align().words, groups)
}

/// Builds the error for a kernel whose loops the driver would end early and silently.
#[cold]
fn too_many_iterations_error(device: &Device, iterations: usize) -> Error {
    let max_iterations = device.info().limits.max_loop_iterations;
    let reason = format!(
        "a loop would take {iterations} iterations, and its driver ends loops after {max_iterations}: use smaller extents, or a GPU"
    );
    Error::unsupported(scope::current().op, device, reason)
}

/// Enqueues as [`enqueue`] does, from the words of the uniform block, whose number is a multiple of four.
/// Loop iterations are not checked, so the loops of the kernel must not grow with its operands.
pub(crate) fn enqueue_words(
    kernel: CompiledKernel,
    tensors: &[&Tensor],
    words: &[u32],
    groups: [usize; 3],
) -> Result<()> {
    let Some(first) = tensors.first() else { return Ok(()) };
    let device = first.device();
    let groups = fit_grid(device, groups)?;
    let bound = bind_for_kernel(kernel, tensors)?;
    device.launch(kernel, &bound, bytemuck::cast_slice(words), groups)
}

/// Returns the grid, folded to the device's limits.
pub(crate) fn fit_grid(device: &Device, groups: [usize; 3]) -> Result<[u32; 3]> {
    fold_grid(groups, device.info().limits.max_workgroups_per_dim as usize).ok_or_else(|| {
        Error::argument("launch", format!("a grid of {groups:?} workgroups is larger than {device} takes"))
    })
}

/// Folds x into y if x exceeds the limit of a dimension. `group_index` in the kernels unfolds it.
fn fold_grid(groups: [usize; 3], max: usize) -> Option<[u32; 3]> {
    let [x, y, z] = groups;
    let (x, y) = if x > max && y == 1 {
        let rows = x.div_ceil(max);
        (x.div_ceil(rows), rows)
    } else {
        (x, y)
    };
    (x <= max && y <= max && z <= max).then_some([x as u32, y as u32, z as u32])
}

#[cfg(test)]
mod tests {
    use super::{KernelKey, KernelParams, fold_grid, kernel_params, launch, launch_by_key, launch_in_parts};
    use crate::backend::null::CardProfile;
    use crate::dtype::DType;
    use crate::error::{Error, Result};
    use crate::ops::{AttentionOptions, ConvolutionOptions, EmbeddingBagOptions, Pool1dOptions};
    use crate::runtime::device::Device;
    use crate::tensor::Tensor;

    /// Returns a device whose driver ends loops after 1000 iterations.
    fn impatient() -> Device {
        let mut profile = CardProfile::default();
        profile.limits.max_loop_iterations = 1000;
        Device::null(profile)
    }

    // Release builds do not check names.
    #[cfg(debug_assertions)]
    #[test]
    fn parameters_have_the_names_and_offsets_of_the_wgsl_struct() {
        let device = impatient();
        let sums = Tensor::zeros([2, 8], DType::F32, &device).expect("memory");
        let result = Tensor::empty([8], DType::F32, &device).expect("memory");
        let spec = kernel_spec! {
            "splitk_reduce", T: "f32", dtype: "f32", gelu: false, pre_activation: false, accumulate: false,
        };
        let run = |params| launch(&spec, &[&sums, &result], params, 1);
        assert!(run(kernel_params! { n: 8usize, splits: 2usize }).is_ok());
        let swapped = || drop(run(kernel_params! { splits: 2usize, n: 8usize }));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(swapped)).is_err());
        // Vectors and arrays start at multiples of four words, as in WGSL.
        let params = kernel_params! { a: 1u32, b: [2u32, 3], c: [4u32, 5, 6], d: &[7usize][..] };
        assert_eq!(params.words, [1, 0, 2, 3, 4, 5, 6, 0, 7, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(params.fields, [("a", 0), ("b", 2), ("c", 4), ("d", 8)]);
    }

    // Release builds do not compare keys.
    #[cfg(debug_assertions)]
    #[test]
    fn a_key_that_stands_for_two_kernels_is_found() {
        let device = impatient();
        let sums = Tensor::zeros([2, 8], DType::F32, &device).expect("memory");
        let result = Tensor::empty([8], DType::F32, &device).expect("memory");
        let spec = |accumulate: bool| {
            kernel_spec! {
                "splitk_reduce", T: "f32", dtype: "f32", gelu: false, pre_activation: false, accumulate,
            }
        };
        let run = |accumulate| {
            let params = kernel_params! { n: 8usize, splits: 2usize };
            launch_by_key(&KernelKey::new("test"), || spec(accumulate), &[&sums, &result], params, 1)
        };
        assert!(run(false).is_ok() && run(false).is_ok());
        let other = || drop(run(true));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(other)).is_err());
    }

    #[test]
    fn loops_beyond_the_limit_of_a_driver_are_errors() {
        let device = impatient();
        let sums = Tensor::zeros([2, 8], DType::F32, &device).expect("memory");
        let result = Tensor::empty([8], DType::F32, &device).expect("memory");
        let spec = kernel_spec! {
            "splitk_reduce", T: "f32", dtype: "f32", gelu: false, pre_activation: false, accumulate: false,
        };
        let run = |iterations| {
            launch(
                &spec,
                &[&sums, &result],
                KernelParams::new().size(8).size(2).loop_iterations(iterations),
                1,
            )
        };
        assert!(run(1000).is_ok());
        let error = run(1001).expect_err("too many").to_string();
        assert!(
            error.contains("a loop would take 1001 iterations, and its driver ends loops after 1000"),
            "{error}"
        );
    }

    fn zeros(shape: &[usize], device: &Device) -> Result<Tensor> {
        Tensor::zeros(shape, DType::F32, device)
    }

    fn gradient(x: &Tensor, call: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<()> {
        let y = call(&x.to_leaf()?)?;
        y.backward_with(&y.ones_like()?)
    }

    fn attention(d: &Device, heads: usize, queries: usize, keys: usize, back: bool) -> Result<()> {
        let [q, k] = [(heads, queries), (1, keys)].map(|(heads, n)| zeros(&[1, heads, n, 64], d));
        let (q, k) = (q?, k?);
        let options = AttentionOptions { enable_gqa: true, ..AttentionOptions::default() };
        let call = |q: &Tensor| q.scaled_dot_product_attention(&k, &k, &options);
        if back { gradient(&q, call) } else { call(&q).map(drop) }
    }

    type Case = (&'static str, [usize; 2], fn(&Device, usize) -> Result<()>);

    /// Operations whose loops grow with their operands, with one extent below the loop limit and one above.
    const GROWING: &[Case] = &[
        ("attention to keys", [64, 4000], |d, n| attention(d, 1, 64, n, false)),
        ("gradients of attention of queries", [64, 4000], |d, n| attention(d, 1, n, 64, true)),
        ("gradients of attention of shared keys", [1, 100], |d, n| attention(d, n, 16, 16, true)),
        ("solve", [40, 1000], |d, n| zeros(&[n, n], d)?.solve(&zeros(&[n, 1], d)?).map(drop)),
        ("cholesky", [40, 1000], |d, n| zeros(&[n, n], d)?.cholesky().map(drop)),
        ("solve_triangular", [40, 9000], |d, n| {
            zeros(&[n, n], d)?.solve_triangular(&zeros(&[n, 32], d)?, true, &Default::default()).map(drop)
        }),
        ("qr", [40, 9000], |d, n| zeros(&[n, 40], d)?.qr(false).map(drop)),
        ("svdvals", [40, 400_000], |d, n| zeros(&[n, 4], d)?.svdvals().map(drop)),
        ("index_add", [40, 2000], |d, n| {
            let index = Tensor::zeros([n], DType::I32, d)?;
            zeros(&[10, 8], d)?.index_add(0, &index, &zeros(&[n, 8], d)?, 1.0).map(drop)
        }),
        ("the gradient of embedding", [40, 2000], |d, n| {
            let index = Tensor::zeros([n], DType::I32, d)?;
            gradient(&zeros(&[10, 8], d)?, |x| x.embedding(&index, None))
        }),
        ("embedding_bag", [40, 2000], |d, n| {
            let index = Tensor::zeros([1, n], DType::I32, d)?;
            zeros(&[10, 8], d)?.embedding_bag(&index, &EmbeddingBagOptions::default()).map(drop)
        }),
        ("cumsum", [40, 2000], |d, n| zeros(&[20_000, n], d)?.cumsum(1).map(drop)),
        ("cdist", [40, 20_000], |d, n| {
            let x = zeros(&[600, n], d)?;
            x.cdist(&x, 2.0).map(drop)
        }),
        ("max_pool1d", [40, 1020], |d, n| {
            zeros(&[1, 1, 4000], d)?.max_pool1d(Pool1dOptions::new(n)).map(drop)
        }),
        ("conv1d by windows", [3, 1500], |d, n| {
            d.set_im2col_max_bytes(Some(1 << 30));
            let w = zeros(&[64, 64, n], d)?;
            zeros(&[1, 64, 4000], d)?
                .conv1d(&w, None, &ConvolutionOptions { stride: [2], ..Default::default() })
                .map(drop)
        }),
    ];

    #[test]
    fn every_operation_refuses_operands_beyond_the_loop_limit() {
        let device = impatient();
        for (name, [short, long], run) in GROWING {
            run(&device, *short).unwrap_or_else(|error| panic!("{name} of {short}: {error}"));
            match run(&device, *long) {
                Err(Error::Unsupported { reason, .. }) => {
                    assert!(reason.contains("ends loops after 1000"), "{name} of {long}: {reason}");
                }
                other => panic!("{name} of {long}: {other:?}"),
            }
        }
    }

    #[test]
    fn split_launches_cover_all_steps_within_the_loop_limit() -> Result<()> {
        let device = impatient();
        for (fixed, steps) in [(0, 0), (3, 1), (500, 70), (3, 2000)] {
            let (mut done, iterations_of) = (0, |step: usize| 1 + step % 400);
            launch_in_parts(&device, fixed, steps, iterations_of, |first, count, iterations| {
                assert_eq!(first, done, "a gap");
                assert!(count > 0 && iterations <= 1000, "{count} steps of {iterations} iterations");
                assert_eq!(iterations, fixed + (first..first + count).map(iterations_of).sum::<usize>());
                done += count;
                Ok(())
            })?;
            assert_eq!(done, steps);
        }
        // A step above the limit is alone, and the launch reports it.
        let mut parts = Vec::new();
        launch_in_parts(
            &device,
            1,
            3,
            |_| 1000,
            |first, count, iterations| {
                parts.push((first, count, iterations));
                Ok(())
            },
        )?;
        assert_eq!(parts, [(0, 1, 1001), (1, 1, 1001), (2, 1, 1001)]);
        Ok(())
    }

    #[test]
    fn long_grids_are_folded_and_cover_every_group() {
        for x in [1usize, 65_535, 65_536, 65_537, 200_000, 10_000_019] {
            let [a, b, _] = fold_grid([x, 1, 1], 65_535).expect("it fits");
            assert!(a as usize * b as usize >= x && a <= 65_535 && b <= 65_535, "{x}: {a} x {b}");
        }
        assert!(fold_grid([70_000, 2, 1], 65_535).is_none());
    }
}
