//! User-defined WGSL kernels as operations.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::error::Error;
use forebay::io::safetensors;
use forebay::ops::{CustomOp, CustomOpCall};
use forebay::tensor::Tensor;

use super::host_reference::{ensure_values, iota};
use super::tests;
use super::train_resume::TempFile;

tests![
    custom_ops_run_on_any_strides,
    matrix_units_multiply_in_a_kernel,
    several_outputs,
    overrides_specialise_kernels,
    bools_that_a_kernel_writes_are_zero_or_one,
    gradients_flow_through_custom_ops,
    an_op_without_a_gradient_refuses_inputs_that_require_one,
    a_wrong_gradient_is_named,
    wgsl_that_does_not_compile_is_shown,
    a_grid_that_is_too_long_is_an_error,
    elements_of_another_type_are_refused,
    a_call_that_differs_from_its_module_is_an_error,
    a_type_error_in_wgsl_names_the_line,
];

/// `y = scale * x²`; an override constant is the exponent minus one.
static POWER: CustomOp = CustomOp::new(
    "power",
    "
    struct Params { n: u32, scale: f32 }
    override times: u32 = 1;
    @group(0) @binding(0) var<storage, read> x: array<f32>;
    @group(0) @binding(1) var<storage, read_write> y: array<f32>;
    @group(1) @binding(0) var<uniform> p: Params;
    @compute @workgroup_size(64)
    fn main(@builtin(global_invocation_id) id: vec3<u32>) {
        if id.x >= p.n { return; }
        var v = p.scale * x[id.x];
        for (var i = 0u; i < times; i++) { v *= x[id.x]; }
        y[id.x] = v;
    }",
);

fn power<'a>(x: &'a Tensor, scale: f32) -> CustomOpCall<'a> {
    let n = x.numel();
    let call = POWER.inputs(&[x]).output(x.shape(), DType::F32);
    call.params(&[n as u32, scale.to_bits()]).workgroups([n.div_ceil(64), 1, 1])
}

fn custom_ops_run_on_any_strides(device: &Device) -> Result<()> {
    let x = iota(&[5, 7], DType::F32, device)?;
    for view in
        [x.clone(), x.t()?, x.narrow(1, 3, 2)?, x.narrow(0, 1, 3)?, x.select(0, 4)?, x.narrow(0, 2, 0)?]
    {
        let expected: Vec<f64> = view.to_f64s()?.iter().map(|v| 3.0 * v * v).collect();
        let y = power(&view, 3.0).run()?;
        ensure!(y.shape() == view.shape());
        ensure_values(&y, &expected)?;
    }
    Ok(())
}

/// One WGSL module uses matrix units on every backend that has them; others refuse it by name.
fn matrix_units_multiply_in_a_kernel(device: &Device) -> Result<()> {
    static F16: CustomOp = CustomOp::new(
        "product",
        concat!(
            "enable wgpu_cooperative_matrix; const OPERAND_BITS = 0xf16u;\n",
            include_str!("matrix_units.wgsl")
        ),
    );
    static BF16: CustomOp = CustomOp::new(
        "product",
        concat!(
            "enable wgpu_cooperative_matrix; const OPERAND_BITS = 0xbf16u;\n",
            include_str!("matrix_units.wgsl")
        ),
    );
    for (op, dtype) in [(&F16, DType::F16), (&BF16, DType::BF16)] {
        // The kernel's matrices have 16 x 16 elements.
        let (m, n, k) = (48, 32, 80);
        let values = |rows: usize, factor: usize| -> Vec<f32> {
            (0..rows * k).map(|i| ((i * factor + i / k) % 11) as f32 - 5.0).collect()
        };
        let (left, right) = (values(m, 7), values(n, 5));
        let a = Tensor::from_slice(&left, [m, k], device)?.to_dtype(dtype)?;
        let b = Tensor::from_slice(&right, [n, k], device)?.to_dtype(dtype)?;
        let call = op.inputs(&[&a, &b]).output([m, n], DType::F32).params(&[n as u32, k as u32]);
        let made = call.workgroups([n / 16, m / 16, 1]).run();
        let features = device.info().features;
        if !features.has_cooperative(dtype) || features.cooperative_side != 16 {
            let error = made.err().context("a device without these matrices must refuse the kernel")?;
            ensure!(matches!(error, Error::KernelCompilation { .. }), "{error}");
            continue;
        }
        let expected = (0..m * n).map(|i| {
            let (row, col) = (&left[i / n * k..][..k], &right[i % n * k..][..k]);
            // The kernel adds the product twice, and subtracts it once.
            f64::from(row.iter().zip(col).map(|(a, b)| a * b).sum::<f32>())
        });
        ensure_values(&made?, &expected.collect::<Vec<_>>())?;
    }
    Ok(())
}

fn several_outputs(device: &Device) -> Result<()> {
    static SPLIT: CustomOp = CustomOp::new(
        "split",
        "
        @group(0) @binding(0) var<storage, read> x: array<i32>;
        @group(0) @binding(1) var<storage, read_write> half: array<i32>;
        @group(0) @binding(2) var<storage, read_write> rest: array<u32>;
        @compute @workgroup_size(4)
        fn main(@builtin(global_invocation_id) id: vec3<u32>) {
            half[id.x] = x[id.x] / 2;
            rest[id.x] = u32(x[id.x] % 2);
        }",
    );
    let x = Tensor::from_slice(&[9i32, 4, 1, 6], [4], device)?;
    let call = || SPLIT.inputs(&[&x]).output([4], DType::I32).output([4], DType::U32).workgroups([1, 1, 1]);
    let [half, rest] = call().run_all()?.try_into().map_err(|_| anyhow::anyhow!("two outputs"))?;
    ensure_values(&half, &[4.0, 2.0, 0.0, 3.0])?;
    ensure_values(&rest, &[1.0, 0.0, 1.0, 0.0])?;
    ensure!(call().run().is_err(), "`run` is for one output");
    Ok(())
}

fn overrides_specialise_kernels(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[2.0f32, -3.0], [2], device)?;
    ensure_values(&power(&x, 1.0).overrides(&[("times", 3.0)]).run()?, &[16.0, 81.0])?;
    ensure_values(&power(&x, 1.0).overrides(&[("times", 0.0)]).run()?, &[2.0, -3.0])?;
    ensure_values(&power(&x, 1.0).run()?, &[4.0, 9.0])?;
    let twice = power(&x, 1.0).overrides(&[("times", 3.0), ("times", 0.0)]).run();
    let error = twice.err().context("a constant has two values")?.to_string();
    ensure!(error.contains("`times` twice"), "{error}");
    Ok(())
}

/// Checks that operations, reads and files take every byte other than 0 of a bool as true.
pub(super) fn ensure_bools(x: &Tensor, expected: &[bool]) -> Result<()> {
    let numbers: Vec<f64> = expected.iter().map(|&b| f64::from(u8::from(b))).collect();
    ensure!(x.to_bools()? == expected && x.to_f64s()? == numbers, "{:?}", x.to_f64s()?);
    ensure_values(&x.to_dtype(DType::F32)?, &numbers)?;
    ensure_values(&x.to_dtype(DType::U8)?, &numbers)?;
    ensure_values(&x.sum_all()?, &[numbers.iter().sum()])?;
    ensure!(x.equal(&Tensor::from_bools(expected, [expected.len()], x.device())?)?, "another mask");
    // Equal elements keep their order, which indices show.
    let mut order: Vec<usize> = (0..expected.len()).collect();
    order.sort_by_key(|&i| expected[i]);
    let sorted = x.sort(0, false)?.1.to_f64s()?;
    ensure!(sorted == order.iter().map(|&i| i as f64).collect::<Vec<_>>(), "{sorted:?}");
    let file = TempFile::new(x.device(), "bools");
    safetensors::save(&file.0, &BTreeMap::from([("mask".to_owned(), x.clone())]), &BTreeMap::new())?;
    ensure!(safetensors::load(&file.0, x.device())?["mask"].to_bools()? == expected, "a file");
    Ok(())
}

fn bools_that_a_kernel_writes_are_zero_or_one(device: &Device) -> Result<()> {
    static BYTES: CustomOp = CustomOp::new(
        "bytes",
        "
        @group(0) @binding(0) var<storage, read> x: array<u32>;
        @group(0) @binding(1) var<storage, read_write> y: array<u32>;
        @compute @workgroup_size(1)
        fn main() { y[0] = x[0]; y[1] = x[1]; }",
    );
    let bytes = Tensor::from_slice(&[0u8, 1, 2, 255, 128, 0, 64], [7], device)?;
    let write = || BYTES.inputs(&[&bytes]).output([7], DType::Bool).workgroups([1, 1, 1]).run();
    let expected = [false, true, true, true, true, false, true];
    ensure_bools(&write()?, &expected)?;
    // In a replay, too.
    let mut step = device.capture(write)?;
    ensure_bools(&step.replay()?, &expected)
}

fn gradients_flow_through_custom_ops(device: &Device) -> Result<()> {
    let x = Tensor::from_slice(&[1.0f32, -2.0, 3.0], [3], device)?.to_leaf()?;
    let doubled = x.mul(2.0)?;
    let y = power(&doubled, 0.5).gradient(|saved, g| Ok(vec![Some(g.mul(&saved.inputs()[0])?)])).run()?;
    ensure_values(&y, &[2.0, 8.0, 18.0])?;
    y.backward_with(&y.ones_like()?)?;
    ensure_values(&x.grad().context("no gradient")?, &[4.0, -8.0, 12.0])?;
    // Nothing is saved under `no_grad`.
    let _guard = forebay::autograd::no_grad();
    ensure!(!power(&x, 1.0).run()?.requires_grad());
    Ok(())
}

fn an_op_without_a_gradient_refuses_inputs_that_require_one(device: &Device) -> Result<()> {
    let x = Tensor::ones([3], DType::F32, device)?.to_leaf()?;
    ensure!(matches!(power(&x, 1.0).run(), Err(Error::NoGradient { op: "power", .. })));
    ensure!(matches!(power(&x, 1.0).run_all(), Err(Error::NoGradient { op: "power", .. })));
    ensure_values(&power(&x.detach(), 1.0).run()?, &[1.0; 3])
}

fn a_wrong_gradient_is_named(device: &Device) -> Result<()> {
    let x = Tensor::ones([3], DType::F32, device)?.to_leaf()?;
    let message = |call: CustomOpCall<'_>| -> Result<String> {
        let y = call.run()?;
        Ok(y.backward_with(&y.ones_like()?).err().context("the backward pass succeeded")?.message())
    };
    let text = message(power(&x, 1.0).gradient(|_, g| Ok(vec![Some(g.narrow(0, 0, 2)?)])))?;
    ensure!(text == "backward: the gradient of `power` for input 0 is f32 [2], the input f32 [3]", "{text}");
    let text = message(power(&x, 1.0).gradient(|_, _| Ok(vec![None])))?;
    ensure!(
        text == "backward: the gradient of `power` for input 0 is `None`, but the input requires one",
        "{text}"
    );
    let text = message(power(&x, 1.0).gradient(|_, _| Ok(vec![])))?;
    ensure!(text == "backward: the gradient of `power` returned 0 tensors for 1 inputs", "{text}");
    Ok(())
}

fn wgsl_that_does_not_compile_is_shown(device: &Device) -> Result<()> {
    static BROKEN: CustomOp =
        CustomOp::new("broken", "@compute @workgroup_size(1)\nfn main() { let x = 1u + 2.5; }");
    let x = Tensor::ones([3], DType::F32, device)?;
    let Err(Error::KernelCompilation { label, message }) = BROKEN.inputs(&[&x]).output([3], DType::F32).run()
    else {
        anyhow::bail!("the broken module compiled");
    };
    ensure!(label == "broken" && message.contains("2.5") && message.contains(":2:"), "{message}");
    // The device still works.
    ensure_values(&power(&x, 2.0).run()?, &[2.0; 3])
}

fn elements_of_another_type_are_refused(device: &Device) -> Result<()> {
    static WORDS: CustomOp = CustomOp::new(
        "words",
        "
        @group(0) @binding(0) var<storage, read> x: array<u32>;
        @group(0)
        @binding(1) var<storage, read_write> y: array<vec2<f32>>;
        @compute @workgroup_size(1)
        fn main() { y[0] = vec2(f32(x[0]), f32(x[1])); }",
    );
    let x = Tensor::from_slice(&[1i32, 2], [2], device)?;
    let text = power(&x, 1.0).run().err().context("an i32 is not an f32")?.message();
    ensure!(
        text == "power: does not take i32; binding 0 has elements of f32; cast it, or declare `array<u32>` to read its words",
        "{text}"
    );
    // Storage words may be read as any 32-bit type.
    ensure_values(&WORDS.inputs(&[&x]).output([2], DType::F32).workgroups([1, 1, 1]).run()?, &[1.0, 2.0])?;
    let text = WORDS
        .inputs(&[&x])
        .output([2], DType::I32)
        .run()
        .err()
        .context("an i32 output was accepted for f32 elements")?;
    ensure!(text.to_string().starts_with("words: does not take i32; binding 1 "), "{text}");
    Ok(())
}

fn a_call_that_differs_from_its_module_is_an_error(device: &Device) -> Result<()> {
    static READ_ONLY: CustomOp = CustomOp::new(
        "read_only",
        "
        @group(0) @binding(0) var<storage, read> x: array<f32>;
        @group(0) @binding(1) var<storage, read> y: array<f32>;
        @compute @workgroup_size(1)
        fn main() { var a = x[0] + y[0]; a = 2.0 * a; }",
    );
    static IN_PLACE: CustomOp = CustomOp::new(
        "in_place",
        "
        @group(0) @binding(0) var<storage, read_write> x: array<f32>;
        @group(0) @binding(1) var<storage, read_write> y: array<f32>;
        @compute @workgroup_size(1)
        fn main() { x[0] = 1.0; y[0] = 2.0; }",
    );
    let x = Tensor::ones([3], DType::F32, device)?;
    let says = |call: CustomOpCall<'_>, expected: &str| -> Result<()> {
        let text = call.run().err().context(expected.to_owned())?.message();
        ensure!(text == expected, "{text}\nexpected\n{expected}");
        Ok(())
    };
    let whole = |op: &CustomOp| op.inputs(&[&x]).output([3], DType::F32).workgroups([1, 1, 1]);
    says(
        whole(&READ_ONLY),
        "read_only: output 0 is `y` at binding 1, which the module only reads: declare it `var<storage, read_write>`",
    )?;
    says(
        whole(&IN_PLACE),
        "in_place: input 0 is `x` at binding 0, which the module may write: declare it `var<storage, read>`, or \
         pass an output",
    )?;
    ensure_values(&x, &[1.0; 3])?;
    says(
        whole(&POWER),
        "power: the uniform block at @group(1) @binding(0) has 8 bytes, and `.params` gives 0",
    )?;
    says(
        whole(&POWER).params(&[3u32]),
        "power: the uniform block at @group(1) @binding(0) has 8 bytes, and `.params` gives 4",
    )?;
    ensure!(whole(&POWER).params(&[3u32; 5]).run().is_err(), "20 bytes are more than a block of 8 takes");
    // A parameter block may be padded to 16 bytes.
    ensure_values(&whole(&POWER).params(&[3u32, 2f32.to_bits(), 0, 0]).run()?, &[2.0; 3])?;
    let params = [3u32, 1f32.to_bits()];
    says(
        POWER.inputs(&[&x]).output([3], DType::F32).params(&params),
        "power: the call does not say how many workgroups run; each has 64 x 1 x 1 invocations: add \
         `.workgroups([n.div_ceil(64), 1, 1])` for n invocations in x",
    )?;
    says(
        whole(&POWER).params(&params).output([3], DType::F32),
        "power: the module declares the storage buffers `x` at 0, `y` at 1 of @group(0); the call has 1 inputs and 2 outputs, which \
         are bindings 0 to 2",
    )?;
    says(
        whole(&READ_ONLY).output([1], DType::F32),
        "read_only: the module declares the storage buffers `x` at 0, `y` at 1 of @group(0); the call has 1 inputs and 2 outputs, \
         which are bindings 0 to 2",
    )
}

fn a_type_error_in_wgsl_names_the_line(device: &Device) -> Result<()> {
    static WRONG: CustomOp = CustomOp::new(
        "wrong",
        "@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<u32>;
@compute @workgroup_size(1)
fn main() {
    y[0] = x[0];
}",
    );
    let x = Tensor::ones([3], DType::F32, device)?;
    let call = WRONG.inputs(&[&x]).output([3], DType::U32).workgroups([1, 1, 1]);
    let Err(Error::KernelCompilation { label, message }) = call.run() else {
        anyhow::bail!("the broken module compiled")
    };
    ensure!(label == "wrong" && message.contains(":5:") && message.contains("y[0] = x[0];"), "{message}");
    ensure!(!message.contains("Handle") && !message.contains("[1]"), "{message}");
    Ok(())
}

fn a_grid_that_is_too_long_is_an_error(device: &Device) -> Result<()> {
    let x = Tensor::ones([3], DType::F32, device)?;
    let groups = device.info().limits.max_workgroups_per_dim as usize + 1;
    ensure!(matches!(
        power(&x, 1.0).workgroups([groups, 1, 1]).run(),
        Err(Error::Argument { op: "power", .. })
    ));
    ensure!(POWER.inputs(&[]).output([3], DType::F32).run().is_err(), "an operation without inputs ran");
    Ok(())
}
