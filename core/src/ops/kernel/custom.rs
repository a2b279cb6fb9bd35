//! A user's own kernel as an operation: one WGSL module, run on every backend, with a gradient of its own.
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
//!         .gradient(|cx, g| Ok(vec![Some(g.mul(&cx.inputs()[0].square()?)?.mul(3.0)?)]))
//!         .run()
//! }
//! # fn main() {}
//! ```

use bytemuck::NoUninit;
use forebay_shaders::reflection::{ModuleInterface, StorageBuffer};
use smallvec::SmallVec;

use crate::autograd::{self, InputGrads, SavedTensor};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory;
use crate::ops::kernel::launch;
use crate::tensor::{Dims, Tensor};

/// A kernel of the user's: a name for messages and the WGSL of one module, usually a `static`.
///
/// The module follows the rules of all kernels: storage buffers at `@group(0)`, first the inputs and then the outputs,
/// each in the order given and none left out; at most one uniform block at `@group(1) @binding(0)`; a compute entry
/// point `main`. A buffer starts with the tensor's first element and is at least as long as the tensor: inputs that are
/// not contiguous, or are views into another tensor, are copied first. Elements are what the module says: a tensor of another type is
/// refused, but for `array<u32>`, which has the words of any. 16-bit and 8-bit elements lie side by side in
/// 32-bit words. Guard accesses by a length among the parameters: the last workgroup is rarely full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CustomOp {
    name: &'static str,
    wgsl: &'static str,
}

/// What a gradient may read: the inputs and the outputs of the call.
#[derive(Clone, Debug)]
pub struct SavedForBackward {
    inputs: SmallVec<[Tensor; 4]>,
    output: Tensor,
}

impl SavedForBackward {
    /// The inputs.
    #[must_use]
    pub fn inputs(&self) -> &[Tensor] {
        &self.inputs
    }

    /// The output.
    #[must_use]
    pub fn output(&self) -> &Tensor {
        &self.output
    }
}

type CustomGradFn = Box<dyn Fn(&SavedForBackward, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync>;

/// One call of a [`CustomOp`], being put together.
#[must_use = "nothing runs until `run` is called"]
pub struct CustomOpCall<'a> {
    op: CustomOp,
    inputs: SmallVec<[&'a Tensor; 4]>,
    outputs: SmallVec<[(Dims, DType); 2]>,
    params: Vec<u8>,
    workgroups: Option<[usize; 3]>,
    overrides: &'static [(&'static str, f64)],
    gradient: Option<CustomGradFn>,
}

impl CustomOp {
    /// A kernel. Nothing is compiled before it first runs on a device, and then once for each device.
    #[must_use]
    pub const fn new(name: &'static str, wgsl: &'static str) -> Self {
        Self { name, wgsl }
    }

    /// Starts a call on these inputs, which are on one device.
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
    /// Adds an output. The kernel writes every element of it: its memory is not cleared.
    pub fn output(mut self, shape: &[usize], dtype: DType) -> Self {
        self.outputs.push((shape.into(), dtype));
        self
    }

    /// The words of the uniform block (`u32`, `i32`, `f32`, or a `#[repr(C)]` structure), in WGSL's layout.
    pub fn params<T: NoUninit>(mut self, params: &[T]) -> Self {
        self.params = bytemuck::cast_slice(params).to_vec();
        self
    }

    /// Values of the module's `override` constants. Each set of values is a kernel of its own.
    pub fn overrides(mut self, overrides: &'static [(&'static str, f64)]) -> Self {
        self.overrides = overrides;
        self
    }

    /// Workgroups in x, y and z: every call says how many. With any 0, nothing runs.
    pub fn workgroups(mut self, groups: [usize; 3]) -> Self {
        self.workgroups = Some(groups);
        self
    }

    /// The gradient: from the gradient of the output to one of each input, in its shape and type, `None` for inputs that
    /// require none. Any operations serve, other custom ones as well. With `create_graph` they are recorded: a custom one
    /// among them then needs a gradient of its own.
    ///
    /// Without it, an input that requires a gradient is an error.
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
    /// The WGSL does not compile; it binds another number of buffers, or elements of another type; an input requires a gradient and there is none;
    /// inputs are on several devices; memory runs out.
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
            return Err(Error::argument(
                name,
                "`run` gives one output; use `run_all`, which has no gradient",
            ));
        };
        let Some(gradient) = gradient.filter(|_| autograd::compute_requires_grad(&inputs)) else {
            return Ok(output);
        };
        let kept: SmallVec<[SavedTensor; 4]> = inputs.iter().map(|t| SavedTensor::input(t)).collect();
        let result = SavedTensor::output(&output);
        Ok(autograd::differentiable(name, output, &inputs, move |g, wants| {
            let inputs = kept.iter().map(|t| t.unpack(wants)).collect::<Result<_>>()?;
            let saved = SavedForBackward { inputs, output: result.unpack(wants)? };
            let grads = gradient(&saved, g)?;
            check_returned_grads(name, &saved, wants, &grads)?;
            Ok(InputGrads::from_vec(grads))
        }))
    }

    /// Runs the call and returns all outputs. No gradient flows through it.
    ///
    /// # Errors
    /// As [`run`](Self::run); a gradient was given.
    #[track_caller]
    pub fn run_all(self) -> Result<Vec<Tensor>> {
        if self.gradient.is_some() {
            return Err(Error::argument(self.op.name, "`run_all` has no gradient; use `run` for one output"));
        }
        autograd::check_no_grad_inputs(self.op.name, &self.inputs)?;
        self.launch()
    }
}

impl CustomOpCall<'_> {
    /// Runs the kernel, whatever is recorded about it.
    #[track_caller]
    fn launch(self) -> Result<Vec<Tensor>> {
        let name = self.op.name;
        let _op = memory::scope::enter_op(name);
        let Some(first) = self.inputs.first() else {
            return Err(Error::argument(name, "takes at least one input, which says where it runs"));
        };
        let device = first.device();
        let mut tensors: SmallVec<[Tensor; 8]> = SmallVec::new();
        for input in &self.inputs {
            first.check_same_device(name, input)?;
            // A binding starts at the start of its memory.
            let whole = input.is_contiguous() && input.layout().offset() == 0;
            tensors.push(if whole { input.detach() } else { input.detach().copy()? });
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
            let most = limits.max_workgroup_size;
            return Err(Error::argument(
                name,
                format!("workgroups of {size:?} invocations; {device} takes at most {most}"),
            ));
        }
        let Some(groups) = self.workgroups else {
            let [x, y, z] = interface.workgroup_size.unwrap_or([1; 3]);
            return Err(Error::argument(
                name,
                format!(
                    "the call does not say how many workgroups run; each has {x} x {y} x {z} invocations: add \
                     `.groups([n.div_ceil({x}), 1, 1])` for n invocations in x"
                ),
            ));
        };
        if groups.contains(&0) {
            return Ok(outputs);
        }
        let max = limits.max_workgroups_per_dim as usize;
        let [x, y, z] = groups;
        if x.max(y).max(z) > max {
            return Err(Error::argument(
                name,
                format!("a grid of {groups:?} workgroups; {device} takes at most {max} along each dimension"),
            ));
        }
        // A uniform block has a multiple of 16 bytes.
        let mut params = self.params;
        params.resize(params.len().next_multiple_of(16), 0);
        let bound = launch::bind_for_kernel(kernel, &tensors.iter().collect::<SmallVec<[&Tensor; 8]>>())?;
        device.launch(kernel, &bound, &params, [x as u32, y as u32, z as u32])?;
        Ok(outputs)
    }
}

/// Fails where a call does not give what the module declares.
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
        return Err(Error::argument(
            op,
            format!(
                "the module declares the storage buffers {} of @group(0); the call has {inputs} inputs and {outputs} outputs, which are \
                 bindings 0 to {}",
                if bindings.is_empty() { "none".to_owned() } else { bindings.join(", ") },
                (inputs + outputs).saturating_sub(1)
            ),
        ));
    }
    for (k, StorageBuffer { name, binding, is_writable: writable, .. }) in module.buffers.iter().enumerate() {
        let rule = match k.checked_sub(inputs) {
            Some(output) if !writable => format!(
                "output {output} is `{name}` at binding {binding}, which the module only reads: declare it `var<storage, read_write>`"
            ),
            None if *writable => format!(
                "input {k} is `{name}` at binding {binding}, which the module may write: declare it `var<storage, read>`, and what is written \
                 as an output"
            ),
            _ => continue,
        };
        return Err(Error::argument(op, rule));
    }
    // A block may be filled up to its alignment.
    let fits = match module.params_size {
        None => params == 0,
        Some(size) => (size as usize..=(size as usize).next_multiple_of(16)).contains(&params),
    };
    if fits {
        return Ok(());
    }
    Err(Error::argument(
        op,
        match module.params_size {
            None => format!(
                "the call has {params} bytes of `.params`, and the module declares no uniform block at @group(1) @binding(0)"
            ),
            Some(size) => format!(
                "the uniform block at @group(1) @binding(0) has {size} bytes, and `.params` gives {params}"
            ),
        },
    ))
}

/// Bits are not converted: what a module reads as floats is floats. Words of `u32` may hold any type.
fn check_element_type(op: &'static str, buffer: &StorageBuffer, dtype: DType) -> Result<()> {
    let StorageBuffer { binding, element_type: element, .. } = *buffer;
    let fits = match element {
        "f32" => dtype == DType::F32,
        "f16" => dtype == DType::F16,
        "f64" => dtype == DType::F64,
        "i32" | "i64" => !dtype.is_float(),
        _ => true,
    };
    if fits {
        return Ok(());
    }
    let expected = format!(
        "binding {binding} has elements of {element}; cast it, or declare `array<u32>` to read its words"
    );
    Err(Error::dtype(op, dtype, expected))
}

/// What a user's gradient returned must fit the inputs.
fn check_returned_grads(
    op: &'static str,
    saved: &SavedForBackward,
    wants: &[bool],
    grads: &[Option<Tensor>],
) -> Result<()> {
    if grads.len() != saved.inputs.len() {
        return Err(Error::Backward(format!(
            "the gradient of `{op}` returned {} tensors for {} inputs",
            grads.len(),
            saved.inputs.len()
        )));
    }
    for (i, ((input, grad), &wanted)) in saved.inputs.iter().zip(grads).zip(wants).enumerate() {
        match grad {
            Some(g) if g.shape() != input.shape() || g.dtype() != input.dtype() => {
                return Err(Error::Backward(format!(
                    "the gradient of `{op}` for input {i} is {} {:?}, the input {} {:?}",
                    g.dtype(),
                    g.shape(),
                    input.dtype(),
                    input.shape()
                )));
            }
            None if wanted => {
                return Err(Error::Backward(format!(
                    "the gradient of `{op}` for input {i} is `None`, but the input requires one"
                )));
            }
            _ => {}
        }
    }
    Ok(())
}
