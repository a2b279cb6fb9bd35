//! Parameters of kernels: the words of a launch's uniform block.

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
}

impl KernelParams {
    #[doc(hidden)]
    pub fn new() -> Self {
        Self { words: Vec::with_capacity(80), exceeds_u32: false, loop_iterations: 0 }
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
    pub fn loop_iterations(mut self, turns: usize) -> Self {
        self.loop_iterations = self.loop_iterations.max(turns);
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
    pub fn align(mut self) -> Self {
        while !self.words.len().is_multiple_of(4) {
            self.words.push(0);
        }
        self
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }
}
