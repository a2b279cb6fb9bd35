//! User-defined kernels as operations: one WGSL module that runs on every backend, with an optional gradient.
//!
//! ```no_run
//! # use forebay_core::{dtype::DType, error::Result, ops::CustomOp, tensor::Tensor};
//! static CUBE: CustomOp = CustomOp::new("cube", "
//!     struct Params { n: u32 }
//!     @group(0) @binding(0) var<storage, read> x: array<f32>;
//!     @group(0) @binding(1) var<storage, read_write> y: array<f32>;
//!     @group(1) @binding(0) var<uniform> p: Params;
//!     @compute @workgroup_size(256)
//!     fn main(@builtin(global_invocation_id) id: vec3<u32>) {
//!         if id.x < p.n { y[id.x] = x[id.x] * x[id.x] * x[id.x]; }
//!     }
//! ");
//!
//! fn cube(x: &Tensor) -> Result<Tensor> {
//!     let n = x.numel();
//!     CUBE.inputs(&[x])
//!         .output(x.shape(), DType::F32)
//!         .params(&[n as u32])
//!         .workgroups([n.div_ceil(256), 1, 1])
//!         .gradient(|saved, g| Ok(vec![Some(g.mul(&saved.inputs()[0].square()?)?.mul(3.0)?)]))
//!         .run()
//! }
//! # fn main() {}
//! ```

use bytemuck::NoUninit;
use forebay_shaders::reflection::{ModuleInterface, StorageBuffer};
use smallvec::SmallVec;

use crate::autograd::{self, InputGrads, SavedTensor};
use crate::dtype::DType;
use crate::error::{Error, Result, fail, fail_if};
use crate::memory;
use crate::ops::kernel::launch;
use crate::tensor::shape::Extents;
use crate::tensor::{IntoShape, Tensor};

/// User-defined kernel: a name for messages and the WGSL of one module, usually a `static`.
///
/// The module follows the rules of all kernels. It binds storage buffers at `@group(0)`, first all inputs and
/// then all outputs, in the order of the call. It may have one uniform block at `@group(1) @binding(0)`. Its
/// compute entry point is `main`.
///
/// A buffer starts at the tensor's first element and is at least as long as the tensor. Non-contiguous inputs
/// and views into another tensor are copied first. The module determines the element types: only `array<u32>`
/// accepts any tensor, as raw words. 16-bit and 8-bit elements are packed into 32-bit words. Guard accesses
/// by a length, because the last workgroup is rarely full. Of bools, every byte other than 0 is true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CustomOp {
    name: &'static str,
    wgsl: &'static str,
}

/// Inputs and outputs of the call, which a gradient may read (PyTorch's `ctx.saved_tensors`).
#[derive(Clone, Debug)]
pub struct SavedForBackward {
    inputs: SmallVec<[Tensor; 4]>,
    output: Tensor,
}

impl SavedForBackward {
    /// Returns the inputs.
    #[must_use]
    pub fn inputs(&self) -> &[Tensor] {
        &self.inputs
    }

    /// Returns the output.
    #[must_use]
    pub fn output(&self) -> &Tensor {
        &self.output
    }
}

type CustomGradFn = Box<dyn Fn(&SavedForBackward, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync>;

/// Builder for one call of a [`CustomOp`].
#[must_use = "nothing runs until `run` is called"]
pub struct CustomOpCall<'a> {
    op: CustomOp,
    inputs: SmallVec<[&'a Tensor; 4]>,
    outputs: SmallVec<[(Extents, DType); 2]>,
    params: Vec<u8>,
    workgroups: Option<[usize; 3]>,
    overrides: &'static [(&'static str, f64)],
    gradient: Option<CustomGradFn>,
}

impl CustomOp {
    /// Creates a kernel. The module is compiled once for each device, when it first runs there.
    #[must_use]
    pub const fn new(name: &'static str, wgsl: &'static str) -> Self {
        Self { name, wgsl }
    }

    /// Starts a call on these inputs, which must be on one device.
    pub fn inputs<'a>(&self, inputs: &[&'a Tensor]) -> CustomOpCall<'a> {
        CustomOpCall {
            op: *self,
            inputs: inputs.into(),
            outputs: SmallVec::new(),
            params: Vec::new(),
            workgroups: None,
            overrides: &[],
            gradient: None,
        }
    }
}

impl CustomOpCall<'_> {
    /// Adds an output. Its memory is not cleared, so the kernel must write every element.
    pub fn output(mut self, shape: impl IntoShape, dtype: DType) -> Self {
        self.outputs.push((shape.to_extents(), dtype));
        self
    }

    /// Sets the words of the uniform block (`u32`, `i32`, `f32`, or `#[repr(C)]` structures) in WGSL's
    /// layout.
    pub fn params<T: NoUninit>(mut self, params: &[T]) -> Self {
        self.params = bytemuck::cast_slice(params).to_vec();
        self
    }

    /// Sets the values of the module's `override` constants, each once. Each set is compiled to a separate
    /// kernel.
    pub fn overrides(mut self, overrides: &'static [(&'static str, f64)]) -> Self {
        self.overrides = overrides;
        self
    }

    /// Sets the number of workgroups in x, y and z, which every call needs. If one is 0, nothing runs.
    pub fn workgroups(mut self, groups: [usize; 3]) -> Self {
        self.workgroups = Some(groups);
        self
    }

    /// Sets the gradient function. It maps the output's gradient to one gradient for each input, in the
    /// input's shape and type, or `None` for inputs that require none. It may use any operations. With
    /// `create_graph` they are recorded, so custom operations among them also need a gradient.
    ///
    /// A call without a gradient function fails if an input requires a gradient.
    #[track_caller]
    pub fn gradient(
        mut self,
        gradient: impl Fn(&SavedForBackward, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
    ) -> Self {
        self.gradient = Some(Box::new(gradient));
        self
    }

    /// Runs the call with one output.
    ///
    /// # Errors
    /// The WGSL does not compile. The module binds a different number of buffers or other element types. An
    /// input requires a gradient and the call has none. The inputs are on several devices. An override
    /// constant has two values.
    #[track_caller]
    pub fn run(mut self) -> Result<Tensor> {
        let name = self.op.name;
        let gradient = self.gradient.take();
        if gradient.is_none() {
            autograd::check_no_grad_inputs(name, &self.inputs)?;
        }
        let inputs: SmallVec<[&Tensor; 4]> = self.inputs.clone();
        let mut outputs = self.launch()?;
        let (Some(output), true) = (outputs.pop(), outputs.is_empty()) else {
            fail!(argument(name), "`run` gives one output; use `run_all`, which has no gradient");
        };
        let Some(gradient) = gradient.filter(|_| autograd::compute_requires_grad(&inputs)) else {
            return Ok(output);
        };
        let saved_inputs: SmallVec<[SavedTensor; 4]> = inputs.iter().map(|t| SavedTensor::input(t)).collect();
        let result = SavedTensor::output(&output);
        Ok(autograd::differentiable(name, output, &inputs, move |g, ctx| {
            let inputs = saved_inputs.iter().map(|t| t.unpack(ctx)).collect::<Result<_>>()?;
            let saved = SavedForBackward { inputs, output: result.unpack(ctx)? };
            let grads = gradient(&saved, g)?;
            check_returned_grads(name, &saved, &ctx.needs_input_grad, &grads)?;
            Ok(InputGrads::from_vec(grads))
        }))
    }

    /// Runs the call and returns all outputs. No gradient flows through the call.
    ///
    /// # Errors
    /// See [`run`](Self::run). A gradient function is also an error.
    #[track_caller]
    pub fn run_all(self) -> Result<Vec<Tensor>> {
        fail_if!(self.gradient.is_some();
            argument(self.op.name), "`run_all` has no gradient; use `run` for one output");
        autograd::check_no_grad_inputs(self.op.name, &self.inputs)?;
        self.launch()
    }
}

impl CustomOpCall<'_> {
    /// Runs the kernel without recording anything.
    #[track_caller]
    fn launch(self) -> Result<Vec<Tensor>> {
        let name = self.op.name;
        let _op = memory::scope::enter_op(name);
        let Some(first) = self.inputs.first() else {
            return Err(Error::argument(name, "takes at least one input, which says where it runs"));
        };
        for (k, (constant, _)) in self.overrides.iter().enumerate() {
            fail_if!(self.overrides[..k].iter().any(|(earlier, _)| earlier == constant);
                argument(name), "`.overrides` gives `{constant}` twice; give each constant one value");
        }
        let device = first.device();
        let mut tensors: SmallVec<[Tensor; 8]> = SmallVec::new();
        for input in &self.inputs {
            first.check_same_device(name, input)?;
            // A buffer binding starts at offset 0 of its memory.
            let is_bindable = input.is_contiguous() && input.layout().offset() == 0;
            tensors.push(if is_bindable { input.detach() } else { input.detach().copy()? });
        }
        let outputs = self
            .outputs
            .iter()
            .map(|(shape, dtype)| Tensor::empty(shape, *dtype, device))
            .collect::<Result<Vec<_>>>()?;
        tensors.extend(outputs.iter().cloned());
        let (kernel, interface) = device.custom_kernel(name, self.op.wgsl, self.overrides)?;
        check_interface(name, &interface, self.inputs.len(), self.outputs.len(), self.params.len())?;
        for (buffer, tensor) in interface.buffers.iter().zip(&tensors) {
            check_element_type(name, buffer, tensor.dtype())?;
        }
        let limits = device.info().limits;
        if let Some(size) = interface.workgroup_size
            && size.iter().map(|&n| u64::from(n)).product::<u64>() > limits.max_workgroup_size.into()
        {
            let max_size = limits.max_workgroup_size;
            fail!(argument(name), "workgroups of {size:?} invocations; {device} takes at most {max_size}");
        }
        let Some(groups) = self.workgroups else {
            let [x, y, z] = interface.workgroup_size.unwrap_or([1; 3]);
            fail!(
                argument(name),
                "the call does not say how many workgroups run; each has {x} x {y} x {z} invocations: add \
                     `.workgroups([n.div_ceil({x}), 1, 1])` for n invocations in x"
            );
        };
        if groups.contains(&0) {
            return Ok(outputs);
        }
        let max = limits.max_workgroups_per_dim as usize;
        let [x, y, z] = groups;
        fail_if!(x.max(y).max(z) > max; argument(name),
            "a grid of {groups:?} workgroups; {device} takes at most {max} along each dimension");
        // The size of a uniform block is a multiple of 16 bytes.
        let mut params = self.params;
        params.resize(params.len().next_multiple_of(16), 0);
        let bound = launch::bind_for_kernel(kernel, &tensors.iter().collect::<SmallVec<[&Tensor; 8]>>())?;
        device.launch(kernel, &bound, &params, [x as u32, y as u32, z as u32])?;
        drop(bound);
        outputs.iter().try_for_each(Tensor::normalize_bools)?;
        Ok(outputs)
    }
}

fn check_interface(
    op: &'static str,
    module: &ModuleInterface,
    inputs: usize,
    outputs: usize,
    params: usize,
) -> Result<()> {
    let numbered = module.buffers.iter().enumerate().all(|(k, buffer)| buffer.binding as usize == k);
    if module.buffers.len() != inputs + outputs || !numbered {
        let bindings: Vec<_> =
            module.buffers.iter().map(|b| format!("`{}` at {}", b.name, b.binding)).collect();
        fail!(
            argument(op),
            "the module declares the storage buffers {} of @group(0); the call has {inputs} inputs and {outputs} outputs, which are \
                 bindings 0 to {}",
            if bindings.is_empty() { "none".to_owned() } else { bindings.join(", ") },
            (inputs + outputs).saturating_sub(1)
        );
    }
    for (k, StorageBuffer { name, binding, is_writable: writable, .. }) in module.buffers.iter().enumerate() {
        let rule = match k.checked_sub(inputs) {
            Some(output) if !writable => format!(
                "output {output} is `{name}` at binding {binding}, which the module only reads: declare it `var<storage, read_write>`"
            ),
            None if *writable => format!(
                "input {k} is `{name}` at binding {binding}, which the module may write: declare it `var<storage, read>`, or \
                 pass an output"
            ),
            _ => continue,
        };
        return Err(Error::argument(op, rule));
    }
    // The parameters may include the block's trailing padding.
    let fits = match module.params_size {
        None => params == 0,
        Some(size) => (size as usize..=(size as usize).next_multiple_of(16)).contains(&params),
    };
    let declared = module.params_size.unwrap_or(0);
    fail_if!(!fits && module.params_size.is_none(); argument(op),
        "the call has {params} bytes of `.params`, and the module declares no uniform block at @group(1) @binding(0)");
    fail_if!(!fits; argument(op),
        "the uniform block at @group(1) @binding(0) has {declared} bytes, and `.params` gives {params}");
    Ok(())
}

/// Fails if a buffer has another element type than the tensor. `u32` words accept any type.
fn check_element_type(op: &'static str, buffer: &StorageBuffer, dtype: DType) -> Result<()> {
    let StorageBuffer { binding, element_type: element, .. } = *buffer;
    let fits = match element {
        "f32" => dtype == DType::F32,
        "f16" => dtype == DType::F16,
        "f64" => dtype == DType::F64,
        "i32" | "i64" => !dtype.is_float(),
        _ => true,
    };
    fail_if!(!fits; dtype(op, dtype),
        "binding {binding} has elements of {element}; cast it, or declare `array<u32>` to read its words");
    Ok(())
}

fn check_returned_grads(
    op: &'static str,
    saved: &SavedForBackward,
    needs_input_grad: &[bool],
    grads: &[Option<Tensor>],
) -> Result<()> {
    fail_if!(grads.len() != saved.inputs.len(); backward,
        "the gradient of `{op}` returned {} tensors for {} inputs", grads.len(), saved.inputs.len());
    for (i, ((input, grad), &requires_grad)) in
        saved.inputs.iter().zip(grads).zip(needs_input_grad).enumerate()
    {
        let Some(g) = grad else {
            fail_if!(requires_grad;
                backward, "the gradient of `{op}` for input {i} is `None`, but the input requires one");
            continue;
        };
        fail_if!(g.shape() != input.shape() || g.dtype() != input.dtype();
            backward, "the gradient of `{op}` for input {i} is {} {:?}, the input {} {:?}",
            g.dtype(), g.shape(), input.dtype(), input.shape());
    }
    Ok(())
}
