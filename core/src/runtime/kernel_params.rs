//! Parameters of kernels: the words of a launch's uniform block.

use smallvec::SmallVec;

/// Largest number of dimensions that kernels index. Tensors with more must collapse to this many.
pub(crate) const MAX_RANK: usize = 8;

/// Uniform block of a launch, word by word, in WGSL's layout.
#[derive(Clone, Debug)]
#[doc(hidden)]
pub struct KernelParams {
    // A heap vector, because each builder call moves the struct.
    pub(crate) words: Vec<u32>,
    /// True if a size did not fit, as in a view that repeats its elements 2^32 times or more.
    pub(crate) exceeds_u32: bool,
    /// Upper bound on the iterations of all loops of one invocation together.
    pub(crate) loop_iterations: usize,
    /// Names of the fields, each with its first word. Debug builds compare them with the WGSL struct.
    #[cfg(debug_assertions)]
    pub(crate) fields: Vec<(&'static str, usize)>,
}

/// Value of a field in a uniform block.
pub(crate) trait ParamValue {
    /// Alignment in words.
    const ALIGN: usize = 1;

    /// Appends the words of the value.
    fn push_to(self, params: KernelParams) -> KernelParams;
}

macro_rules! impl_param_value {
    ($($value:ident: $type:ty, $align:literal, $push:expr;)*) => {$(
        impl ParamValue for $type {
            const ALIGN: usize = $align;
            fn push_to($value, params: KernelParams) -> KernelParams {
                $push(params)
            }
        }
    )*};
}

impl_param_value! {
    self: usize, 1, |p: KernelParams| p.size(self);
    self: u32, 1, |p: KernelParams| p.u32(self);
    self: i32, 1, |p: KernelParams| p.u32(self as u32);
    self: f32, 1, |p: KernelParams| p.f32(self);
    self: bool, 1, |p: KernelParams| p.u32(u32::from(self));
    self: &[usize], 4, |p: KernelParams| p.dims(self);
    self: &SmallVec<[usize; 6]>, 4, |p: KernelParams| p.dims(self);
}

/// Two elements are a `vec2`; three or four are a `vec4`.
impl<T: ParamValue, const N: usize> ParamValue for [T; N] {
    const ALIGN: usize = if N == 2 { 2 } else { 4 };

    fn push_to(self, params: KernelParams) -> KernelParams {
        self.into_iter().fold(params, |params, value| value.push_to(params)).align_to(Self::ALIGN)
    }
}

/// Builds the uniform block of a kernel from the fields of its WGSL struct `Params`, in their order:
/// `kernel_params! { n, rank: shape.len(), shape: &shape }`. Fields after `..params;` extend another block.
/// Vectors and arrays are aligned as in WGSL, so padding (`unused`) is left out. Debug builds compare names and
/// offsets with the struct.
macro_rules! kernel_params {
    (..$base:expr; $($field:ident $(: $value:expr)?),* $(,)?) => {
        $base$(.field(
            stringify!($field),
            $crate::runtime::kernel_params::param_value!($field $($value)?),
        ))*
    };
    ($($fields:tt)*) => {
        $crate::runtime::kernel_params::kernel_params!(
            ..$crate::runtime::kernel_params::KernelParams::new(); $($fields)*
        )
    };
}
pub(crate) use kernel_params;

/// Returns the value of a field, which defaults to the variable of its name.
macro_rules! param_value {
    ($field:ident) => {
        $field
    };
    ($field:ident $value:expr) => {
        $value
    };
}
pub(crate) use param_value;

impl KernelParams {
    #[doc(hidden)]
    pub fn new() -> Self {
        Self {
            words: Vec::with_capacity(80),
            exceeds_u32: false,
            loop_iterations: 0,
            #[cfg(debug_assertions)]
            fields: Vec::new(),
        }
    }

    /// Appends a field of the WGSL struct: see [`kernel_params!`].
    #[inline]
    #[cfg_attr(not(debug_assertions), expect(unused_variables, reason = "only debug builds compare names"))]
    pub(crate) fn field<V: ParamValue>(self, name: &'static str, value: V) -> Self {
        #[cfg_attr(not(debug_assertions), expect(unused_mut, reason = "only debug builds record names"))]
        let mut params = self.align_to(V::ALIGN);
        #[cfg(debug_assertions)]
        params.fields.push((name, params.words.len()));
        value.push_to(params)
    }

    /// Appends a number of elements, an extent or a stride. Values of 2^32 and above prevent the launch.
    #[doc(hidden)]
    pub fn size(mut self, value: usize) -> Self {
        self.exceeds_u32 |= value > u32::MAX as usize;
        self.words.push(value as u32);
        self
    }

    #[doc(hidden)]
    pub fn u32(mut self, value: u32) -> Self {
        self.words.push(value);
        self
    }

    #[doc(hidden)]
    pub fn f32(mut self, value: f32) -> Self {
        self.words.push(value.to_bits());
        self
    }

    /// Appends up to [`MAX_RANK`] extents or strides as `array<vec4<u32>, 2>`.
    pub(crate) fn dims(mut self, dims: &[usize]) -> Self {
        debug_assert!(self.words.len().is_multiple_of(4) && dims.len() <= MAX_RANK);
        let mut words = [0; MAX_RANK];
        for (word, &extent) in words.iter_mut().zip(dims) {
            *word = extent as u32;
            self.exceeds_u32 |= extent > u32::MAX as usize;
        }
        self.words.extend_from_slice(&words);
        self
    }

    /// Sets an upper bound on the iterations of all loops of one invocation together, which is not passed to
    /// the kernel. A launch above the device's limit is an error. Required if loops grow with the operands.
    #[doc(hidden)]
    pub fn loop_iterations(mut self, iterations: usize) -> Self {
        self.loop_iterations = self.loop_iterations.max(iterations);
        self
    }

    pub(crate) fn len(&self) -> usize {
        self.words.len()
    }

    /// Replaces four words from `at` on.
    pub(crate) fn replace_words(mut self, at: usize, words: [u32; 4]) -> Self {
        self.words.iter_mut().skip(at).zip(words).for_each(|(to, word)| *to = word);
        self
    }

    /// Pads with zeros to a multiple of four words, where a `vec4` or an array starts.
    #[doc(hidden)]
    pub fn align(self) -> Self {
        self.align_to(4)
    }

    fn align_to(mut self, count: usize) -> Self {
        while !self.words.len().is_multiple_of(count) {
            self.words.push(0);
        }
        self
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }
}
