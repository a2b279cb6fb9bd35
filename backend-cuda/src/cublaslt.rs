//! Matrix products by cuBLASLt, if the library is installed.
//!
//! cuBLASLt's matrices are column-major; the core's are row-major. A row-major matrix is, byte for byte, the
//! column-major transpose, and `c = a b` is `c^T = b^T a^T`. So b becomes the first operand, a the second, n
//! the rows and m the columns, and no data moves. Of the algorithms that the heuristic offers for a kind of
//! problem, the fastest is used (`autotune`).
//!
//! An epilogue's bias runs along the rows of cuBLASLt's c, which are the core's columns. The library's sums
//! of b over k are those of the core's a.

use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex, OnceLock};

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t as Compute, cublasLtEpilogue_t as LtEpilogue, cublasLtMatmulAlgo_t,
    cublasLtMatmulDescAttributes_t as DescAttribute, cublasLtMatmulPreferenceAttributes_t as Preference,
    cublasLtMatrixLayoutAttribute_t as LayoutAttribute, cublasLtReductionScheme_t as Reduction,
    cublasStatus_t as Status, cudaDataType_t as DataType,
};
use cudarc::driver::sys::CUstream;
use forebay_core::backend::{Epilogue, MatmulCall, MatrixOperand, SourceError};
use forebay_core::dtype::DType;
use forebay_core::sync::LockUnpoisoned;
use rustc_hash::FxHashMap;

use crate::autotune::{self, AlgorithmChoices};
use crate::backend::{operand_address, slice_address};
use crate::context::{Context, CudaStream};
use crate::{settings, toolkit};

/// Bytes of cuBLASLt's workspace, as NVIDIA advises for Hopper. The workspace is allocated outside the pool
/// at the first product of a stream, and only this stream uses it.
const WORKSPACE_BYTES: u64 = 32 << 20;
/// Maximum number of cached plans; at the limit all are dropped, so that programs with ever new shapes do not
/// leak memory.
const MAX_PLANS: usize = 4096;
/// Largest alignment that an algorithm requires.
const MAX_ALIGNMENT: u64 = 256;

/// All functions of the library that this crate calls.
const SYMBOLS: [&str; 14] = [
    "cublasLtCreate",
    "cublasLtDestroy",
    "cublasLtGetVersion",
    "cublasLtMatmul",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
    "cublasLtMatrixLayoutSetAttribute",
];

/// Returns the library's version (130001 is 13.0.1) if it is installed and complete.
pub(crate) fn version() -> Option<usize> {
    static VERSION: OnceLock<Option<usize>> = OnceLock::new();
    *VERSION.get_or_init(|| {
        toolkit::load_cublaslt();
        // SAFETY: loading the library runs its initialisers, which do not touch the device.
        if !unsafe { sys::is_culib_present() } {
            return None;
        }
        let is_complete = SYMBOLS.iter().all(|symbol| {
            // SAFETY: the library is present, and the symbol is only looked up, never called through this
            // type.
            unsafe { sys::culib().get::<unsafe extern "C" fn()>(symbol.as_bytes()) }.is_ok()
        });
        // SAFETY: the function exists and takes no arguments.
        is_complete.then(|| unsafe { sys::cublasLtGetVersion() })
    })
}

/// Matrix products of one stream.
#[derive(Debug, Default)]
pub(crate) struct CublasLt {
    /// Opened by the first product; `None` if the library cannot be used.
    library: OnceLock<Option<Mutex<CublasLtLibrary>>>,
}

impl CublasLt {
    /// Reports whether float products run on the library now.
    pub(crate) fn is_available(&self, context: &Arc<Context>) -> bool {
        !settings::portable_kernels() && self.open_library(context).is_some()
    }

    /// Returns the bytes of the library's workspace, which is outside the pool.
    pub(crate) fn workspace_bytes(&self) -> u64 {
        let open = self.library.get().and_then(Option::as_ref);
        open.map_or(0, |library| library.lock_unpoisoned().workspace().1)
    }

    fn open_library(&self, context: &Arc<Context>) -> Option<&Mutex<CublasLtLibrary>> {
        self.library.get_or_init(|| CublasLtLibrary::open(context).map(Mutex::new)).as_ref()
    }

    /// Enqueues a product; returns `false` if the library does not support it.
    pub(crate) fn run(&self, stream: &CudaStream, call: &MatmulCall) -> Result<bool, SourceError> {
        self.with_library(stream, call, |library, problem| library.run(stream, call, problem))
    }

    /// Reports whether the library has algorithms for a product. Enqueues nothing.
    pub(crate) fn accepts(&self, stream: &CudaStream, call: &MatmulCall) -> Result<bool, SourceError> {
        self.with_library(stream, call, |library, problem| {
            stream.context.make_current()?;
            Ok(library.ensure_plan(problem))
        })
    }

    fn with_library(
        &self,
        stream: &CudaStream,
        call: &MatmulCall,
        act: impl FnOnce(&mut CublasLtLibrary, CublasLtProblem) -> Result<bool, SourceError>,
    ) -> Result<bool, SourceError> {
        if settings::portable_kernels() {
            return Ok(false);
        }
        if call.m == 0 || call.n == 0 || call.batch == 0 {
            return Ok(true);
        }
        let Some(problem) = CublasLtProblem::new(call) else { return Ok(false) };
        match self.open_library(&stream.context) {
            Some(library) => act(&mut library.lock_unpoisoned(), problem),
            None => Ok(false),
        }
    }
}

/// Key of a plan: everything that decides the algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct CublasLtProblem {
    dtype: DType,
    dtype_b: DType,
    dtype_out: DType,
    epilogue: EpilogueKind,
    tf32: bool,
    m: u64,
    n: u64,
    k: u64,
    batch: i32,
    a: OperandLayout,
    b: OperandLayout,
    c: OperandLayout,
}

/// Kind of an epilogue, with the properties of its operands that decide the algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum EpilogueKind {
    None,
    Bias,
    GeluBias { leading_dim: i64 },
    RowSums,
    Scaled { scales: bool, bias: bool },
}

impl EpilogueKind {
    fn new(epilogue: &Epilogue) -> Option<Self> {
        Some(match epilogue {
            Epilogue::None => Self::None,
            Epilogue::Bias(_) => Self::Bias,
            Epilogue::GeluBias { pre_activation: before, .. } => {
                Self::GeluBias { leading_dim: i64::try_from(before.row_stride).ok()? }
            }
            // A native kernel computes this (`gelu_grad.rs`): the library's takes four times as long as the
            // plain product.
            Epilogue::GeluGrad { .. } => return None,
            Epilogue::RowSums(_) => Self::RowSums,
            Epilogue::Scaled { scales, bias } => {
                Self::Scaled { scales: scales.is_some(), bias: bias.is_some() }
            }
        })
    }

    fn to_cublaslt(self) -> LtEpilogue {
        match self {
            Self::None | Self::Scaled { bias: false, .. } => LtEpilogue::CUBLASLT_EPILOGUE_DEFAULT,
            Self::Bias | Self::Scaled { bias: true, .. } => LtEpilogue::CUBLASLT_EPILOGUE_BIAS,
            Self::GeluBias { .. } => LtEpilogue::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            Self::RowSums => LtEpilogue::CUBLASLT_EPILOGUE_BGRADB,
        }
    }
}

/// A matrix in the library's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct OperandLayout {
    /// If true, the matrix is column-major from the core's point of view.
    transposed: bool,
    /// Elements between stored rows, or columns if transposed.
    leading_dim: i64,
    /// Elements between matrices of the batch.
    batch_stride: i64,
    /// Alignment of the address in bytes, up to 256.
    alignment: u32,
}

impl CublasLtProblem {
    /// Returns `None` if the library does not support the call.
    fn new(call: &MatmulCall) -> Option<Self> {
        if !call.has_supported_dtypes() || call.k == 0 || !call.supports_epilogue() {
            return None;
        }
        let c = OperandLayout::new(call, &call.c, call.m, call.n, call.dtype_out)?;
        if c.transposed || (call.batch > 1 && c.batch_stride == 0) {
            return None;
        }
        Some(Self {
            dtype: call.dtype,
            dtype_b: call.dtype_b,
            dtype_out: call.dtype_out,
            epilogue: EpilogueKind::new(&call.epilogue)?,
            tf32: call.dtype == DType::F32 && settings::allow_tf32(),
            m: call.m,
            n: call.n,
            k: call.k,
            batch: i32::try_from(call.batch).ok()?,
            a: OperandLayout::new(call, &call.a, call.m, call.k, call.dtype)?,
            b: OperandLayout::new(call, &call.b, call.k, call.n, call.dtype_b)?,
            c,
        })
    }

    /// Returns the bytes from the first element of c to the end of the last.
    fn output_bytes(&self) -> u64 {
        let step = |count: u64, stride: i64| count.saturating_sub(1) * stride.unsigned_abs();
        let elements =
            step(self.m, self.c.leading_dim) + step(self.batch.unsigned_abs().into(), self.c.batch_stride);
        (elements + self.n) * self.dtype_out.size() as u64
    }

    /// Returns the compute type and the type of the scale factors.
    fn compute_types(&self) -> (Compute, DataType) {
        match self.dtype {
            DType::F64 => (Compute::CUBLAS_COMPUTE_64F, DataType::CUDA_R_64F),
            _ if self.tf32 => (Compute::CUBLAS_COMPUTE_32F_FAST_TF32, DataType::CUDA_R_32F),
            _ => (Compute::CUBLAS_COMPUTE_32F, DataType::CUDA_R_32F),
        }
    }
}

/// Returns the library's constant for an element type.
fn cuda_data_type(dtype: DType) -> Option<DataType> {
    Some(match dtype {
        DType::F32 => DataType::CUDA_R_32F,
        DType::F16 => DataType::CUDA_R_16F,
        DType::BF16 => DataType::CUDA_R_16BF,
        DType::F64 => DataType::CUDA_R_64F,
        DType::F8E4M3 => DataType::CUDA_R_8F_E4M3,
        DType::F8E5M2 => DataType::CUDA_R_8F_E5M2,
        _ => return None,
    })
}

impl OperandLayout {
    fn new(call: &MatmulCall, operand: &MatrixOperand, rows: u64, cols: u64, dtype: DType) -> Option<Self> {
        let MatrixOperand { row_stride, col_stride, .. } = *operand;
        // The stride of a dimension of one element has no meaning.
        let (transposed, lead) = if (col_stride == 1 || cols == 1) && (row_stride >= cols || rows == 1) {
            (false, if rows == 1 { cols } else { row_stride })
        } else if (row_stride == 1 || rows == 1) && (col_stride >= rows || cols == 1) {
            (true, if cols == 1 { rows } else { col_stride })
        } else {
            return None;
        };
        let address = operand_address(operand);
        let alignment = (1 << address.trailing_zeros().min(63)).min(MAX_ALIGNMENT);
        if alignment < dtype.size() as u64 {
            return None;
        }
        Some(Self {
            transposed,
            leading_dim: i64::try_from(lead).ok()?,
            batch_stride: if call.batch > 1 { i64::try_from(operand.batch_stride).ok()? } else { 0 },
            alignment: alignment as u32,
        })
    }
}

/// The opened library.
#[derive(Debug)]
struct CublasLtLibrary {
    /// Plans, with `None` for unsupported problems.
    plans: FxHashMap<CublasLtProblem, Option<TunedPlan>>,
    handle: LtHandle,
    workspace: Option<DeviceScratch>,
    algorithm_choices: AlgorithmChoices,
}

/// The library's handle.
#[derive(Clone, Copy, Debug)]
struct LtHandle(sys::cublasLtHandle_t);

// SAFETY: several threads may call the library with one handle at the same time.
unsafe impl Send for LtHandle {}

impl CublasLtLibrary {
    fn open(context: &Arc<Context>) -> Option<Self> {
        let Some(version) = version() else {
            log::warn!(
                "cuBLASLt was not found (libcublasLt.so.13): matrix products run on the portable kernels, which are slower"
            );
            return None;
        };
        context.make_current().ok()?;
        let handle = result::create_handle()
            .map(LtHandle)
            .inspect_err(|error| {
                log::warn!("cuBLASLt cannot be used ({error}): matrix products run on the portable kernels");
            })
            .ok()?;
        // The library works without a workspace, with fewer algorithms.
        let workspace = DeviceScratch::new(context, WORKSPACE_BYTES)
            .inspect_err(|error| log::debug!("no workspace: {error}"))
            .ok();
        let choices = AlgorithmChoices::new(&context.device.name().unwrap_or_default(), version);
        Some(Self { plans: FxHashMap::default(), handle, workspace, algorithm_choices: choices })
    }

    /// Returns the address and the size of the workspace.
    fn workspace(&self) -> (u64, u64) {
        self.workspace.as_ref().map_or((0, 0), |workspace| (workspace.address, WORKSPACE_BYTES))
    }

    /// Creates the plan for a problem if there is none yet; reports whether the library supports the problem.
    fn ensure_plan(&mut self, problem: CublasLtProblem) -> bool {
        let (_, bytes) = self.workspace();
        if self.plans.len() >= MAX_PLANS && !self.plans.contains_key(&problem) {
            self.plans.clear();
        }
        let plan = self.plans.entry(problem).or_insert_with(|| {
            CublasLtPlan::new(self.handle, &problem, bytes)
                .map(TunedPlan::new)
                .inspect_err(|error| log::debug!("cuBLASLt does not support {problem:?}: {error}"))
                .ok()
        });
        plan.is_some()
    }

    fn run(
        &mut self,
        stream: &CudaStream,
        call: &MatmulCall,
        problem: CublasLtProblem,
    ) -> Result<bool, SourceError> {
        stream.context.make_current()?;
        let workspace = self.workspace();
        let plan = match self.plans.get_mut(&problem) {
            Some(plan) => plan,
            None => {
                self.ensure_plan(problem);
                self.plans.entry(problem).or_default()
            }
        };
        let Some(TunedPlan { plan, algorithm_index, is_tuned, is_proven }) = plan else { return Ok(false) };
        let product = Product { call: *call, handle: self.handle, workspace };
        let is_large = 2 * call.m * call.n * call.k * call.batch >= autotune::MIN_FLOPS_TO_TUNE;
        let must_tune = !*is_tuned && is_large && plan.algorithms.len() > 1;
        if *is_proven && !must_tune {
            let (plan, index) = (Arc::clone(plan), *algorithm_index);
            return stream
                .call(move |queue| {
                    let (algorithm, to) = (&plan.algorithms[index], operand_address(&product.call.c));
                    plan.run(&product, algorithm, to, queue).map_err(matmul_error)
                })
                .map(|()| true);
        }
        let queue = stream.flushed_handle()?;
        let run = |algorithm: &_, to| plan.run(&product, algorithm, to, queue);
        if must_tune {
            *algorithm_index =
                self.algorithm_choices.choose(&format!("{problem:?}"), &plan.algorithms, || {
                    // A product that accumulates into c is timed on a scratch buffer, because it runs several
                    // times.
                    let scratch = (call.beta != 0.0)
                        .then(|| DeviceScratch::new(&stream.context, problem.output_bytes()));
                    let to = match &scratch {
                        None => operand_address(&call.c),
                        Some(Ok(scratch)) => scratch.address,
                        Some(Err(error)) => {
                            log::debug!("no memory to time algorithms of {problem:?}: {error}");
                            return Ok(None);
                        }
                    };
                    autotune::find_fastest(stream, &plan.algorithms, |algorithm| run(algorithm, to)).map(Some)
                })?;
            *is_tuned = true;
        }
        match run(&plan.algorithms[*algorithm_index], operand_address(&call.c)) {
            Ok(()) => {
                *is_proven = true;
                Ok(true)
            }
            // The heuristic was wrong, or the library's code does not fit on a full device.
            Err(CublasError(
                status @ (Status::CUBLAS_STATUS_NOT_SUPPORTED | Status::CUBLAS_STATUS_ALLOC_FAILED),
            )) => {
                log::debug!("cuBLASLt gave up on {problem:?}: {status:?}");
                Ok(false)
            }
            Err(error) => Err(matmul_error(error)),
        }
    }
}

fn matmul_error(error: CublasError) -> SourceError {
    SourceError::Driver { call: "cublasLtMatmul", detail: error.to_string() }
}

impl Drop for CublasLtLibrary {
    fn drop(&mut self) {
        self.plans.clear();
        // SAFETY: made in `open`, destroyed once. An error here cannot be handled.
        let _ = unsafe { result::destroy_handle(self.handle.0) };
    }
}

/// Descriptors of a problem, and its algorithms.
#[derive(Debug)]
struct CublasLtPlan {
    /// Locked while a product is enqueued, because it contains the addresses of the epilogue's operands.
    matmul_desc: Mutex<MatmulDesc>,
    first_layout: LayoutHandle,
    second_layout: LayoutHandle,
    out_layout: LayoutHandle,
    /// Never empty.
    algorithms: Vec<cublasLtMatmulAlgo_t>,
}

// SAFETY: the library's descriptors may be used from any thread; `matmul_desc` is locked while it changes.
unsafe impl Send for CublasLtPlan {}
// SAFETY: as above.
unsafe impl Sync for CublasLtPlan {}

/// A plan with the algorithm to use.
#[derive(Debug)]
struct TunedPlan {
    /// Shared with products that the stream's thread has not yet enqueued.
    plan: Arc<CublasLtPlan>,
    algorithm_index: usize,
    /// If true, the algorithm was timed or loaded.
    is_tuned: bool,
    /// If true, the library has accepted a product of this plan by this algorithm.
    is_proven: bool,
}

impl TunedPlan {
    fn new(plan: CublasLtPlan) -> Self {
        Self { plan: Arc::new(plan), algorithm_index: 0, is_tuned: false, is_proven: false }
    }
}

/// A product with everything that is no part of its plan.
#[derive(Clone, Copy, Debug)]
struct Product {
    call: MatmulCall,
    handle: LtHandle,
    /// Address and bytes.
    workspace: (u64, u64),
}

impl CublasLtPlan {
    fn new(handle: LtHandle, problem: &CublasLtProblem, workspace: u64) -> Result<Self, CublasError> {
        let CublasLtProblem { m, n, k, batch, a, b, c, .. } = *problem;
        let dtypes = [problem.dtype, problem.dtype_b, problem.dtype_out];
        let [Some(data), Some(data_b), Some(data_out)] = dtypes.map(cuda_data_type) else {
            return Err(CublasError(Status::CUBLAS_STATUS_NOT_SUPPORTED));
        };
        let (compute, scale) = problem.compute_types();
        let matmul_desc = OwnedHandle {
            raw: result::create_matmul_desc(compute, scale)?,
            destroy: result::destroy_matmul_desc,
            setter: result::set_matmul_desc_attribute,
        };
        for (attribute, operand) in
            [(DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA, b), (DescAttribute::CUBLASLT_MATMUL_DESC_TRANSB, a)]
        {
            // SAFETY: the attribute is a 32-bit value.
            unsafe { matmul_desc.set(attribute, i32::from(operand.transposed)) }?;
        }
        let epilogue = problem.epilogue.to_cublaslt();
        if epilogue != LtEpilogue::CUBLASLT_EPILOGUE_DEFAULT {
            let vectors = if problem.dtype.is_storage_only() { data_out } else { data };
            // SAFETY: the attributes are 32-bit enum values.
            unsafe {
                matmul_desc.set(DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue as u32)?;
                matmul_desc.set(DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, vectors as i32)?;
            }
        }
        if let EpilogueKind::GeluBias { leading_dim } = problem.epilogue {
            // SAFETY: the attribute is a 64-bit value.
            unsafe { matmul_desc.set(DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, leading_dim) }?;
        }
        let layout = |extents, operand, data| create_layout(extents, operand, data, batch);
        let (first_layout, second_layout, out_layout) =
            (layout([n, k], b, data_b)?, layout([k, m], a, data)?, layout([n, m], c, data_out)?);
        let preference = OwnedHandle {
            raw: result::create_matmul_pref()?,
            destroy: result::destroy_matmul_pref,
            setter: result::set_matmul_pref_attribute,
        };
        // SAFETY: the attribute is a 64-bit value.
        unsafe { preference.set(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace) }?;
        let mut preferences = vec![
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b.alignment),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a.alignment),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c.alignment),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c.alignment),
        ];
        if matches!(problem.dtype, DType::F16 | DType::BF16) {
            // Sums of 16-bit products stay in f32 until the end, also in split-K algorithms.
            let scheme = Reduction::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
            preferences.push((Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, scheme));
        }
        for (attribute, value) in preferences {
            // SAFETY: the attributes are 32-bit values.
            unsafe { preference.set(attribute, value) }?;
        }
        let layouts = [first_layout.raw, second_layout.raw, out_layout.raw];
        // SAFETY: all descriptors are valid.
        let algorithms =
            unsafe { autotune::query_heuristic(handle.0, matmul_desc.raw, layouts, preference.raw) }?;
        Ok(Self { matmul_desc: Mutex::new(matmul_desc), first_layout, second_layout, out_layout, algorithms })
    }

    /// Enqueues a product by one of the plan's algorithms, which writes to the address `to`.
    fn run(
        &self,
        product: &Product,
        algorithm: &cublasLtMatmulAlgo_t,
        to: u64,
        queue: CUstream,
    ) -> Result<(), CublasError> {
        let Product { call, handle, workspace } = product;
        let matmul_desc = self.matmul_desc.lock_unpoisoned();
        set_epilogue_pointers(&matmul_desc, &call.epilogue)?;
        // The library reads the factors in the type of the sums.
        let (factors_f32, factors_f64) = ([1.0, call.beta], [1.0, f64::from(call.beta)]);
        let [alpha, beta]: [*const c_void; 2] = match call.dtype {
            DType::F64 => factors_f64.each_ref().map(|factor| ptr::from_ref(factor).cast()),
            _ => factors_f32.each_ref().map(|factor| ptr::from_ref(factor).cast()),
        };
        // SAFETY: the descriptors live as long as the plan and match the operands, which the core has checked.
        // Only this stream uses the workspace.
        unsafe {
            result::matmul(
                handle.0,
                matmul_desc.raw,
                alpha,
                beta,
                operand_address(&call.b) as *const c_void,
                self.first_layout.raw,
                operand_address(&call.a) as *const c_void,
                self.second_layout.raw,
                operand_address(&call.c) as *const c_void,
                self.out_layout.raw,
                to as *mut c_void,
                self.out_layout.raw,
                algorithm,
                workspace.0 as *mut c_void,
                workspace.1 as usize,
                queue.cast(),
            )
        }
    }
}

/// Sets the addresses of an epilogue's operands.
fn set_epilogue_pointers(matmul_desc: &MatmulDesc, epilogue: &Epilogue) -> Result<(), CublasError> {
    use DescAttribute::{
        CUBLASLT_MATMUL_DESC_A_SCALE_POINTER as SCALE_FIRST,
        CUBLASLT_MATMUL_DESC_B_SCALE_POINTER as SCALE_SECOND, CUBLASLT_MATMUL_DESC_BIAS_POINTER as BIAS,
        CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER as AUX,
    };
    let mut pointers: [Option<(DescAttribute, u64)>; 3] = [None; 3];
    match epilogue {
        Epilogue::None | Epilogue::GeluGrad { .. } => {}
        Epilogue::Bias(bias) | Epilogue::RowSums(bias) => pointers[0] = Some((BIAS, slice_address(*bias))),
        Epilogue::GeluBias { bias, pre_activation: before } => {
            pointers[0] = Some((BIAS, slice_address(*bias)));
            pointers[1] = Some((AUX, operand_address(before)));
        }
        Epilogue::Scaled { scales, bias } => {
            pointers[0] = bias.as_ref().map(|bias| (BIAS, slice_address(*bias)));
            // The library's first operand is b.
            if let Some([a, b]) = scales {
                pointers[1] = Some((SCALE_FIRST, slice_address(*b)));
                pointers[2] = Some((SCALE_SECOND, slice_address(*a)));
            }
        }
    }
    for (attribute, pointer) in pointers.into_iter().flatten() {
        // SAFETY: the attributes are addresses.
        unsafe { matmul_desc.set(attribute, pointer) }?;
    }
    Ok(())
}

/// One of cudarc's functions that set an attribute.
type AttributeSetter<T, A> = unsafe fn(T, A, *const c_void, usize) -> Result<(), CublasError>;
type MatmulDesc = OwnedHandle<sys::cublasLtMatmulDesc_t, DescAttribute>;
type LayoutHandle = OwnedHandle<sys::cublasLtMatrixLayout_t, LayoutAttribute>;

/// Creates the layout of a batch of matrices with these rows and columns, from cuBLASLt's point of view.
fn create_layout(
    [rows, cols]: [u64; 2],
    operand: OperandLayout,
    data: DataType,
    batch: i32,
) -> Result<LayoutHandle, CublasError> {
    use LayoutAttribute::{
        CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT as COUNT, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET as OFFSET,
    };
    let (rows, cols) = if operand.transposed { (cols, rows) } else { (rows, cols) };
    let layout = OwnedHandle {
        raw: result::create_matrix_layout(data, rows, cols, operand.leading_dim)?,
        destroy: result::destroy_matrix_layout,
        setter: result::set_matrix_layout_attribute,
    };
    // SAFETY: the attributes are a 32-bit and a 64-bit value.
    unsafe { layout.set(COUNT, batch).and_then(|()| layout.set(OFFSET, operand.batch_stride)) }?;
    Ok(layout)
}

/// A descriptor with attributes `A`, destroyed with its owner.
#[derive(Debug)]
struct OwnedHandle<T: Copy, A> {
    raw: T,
    destroy: unsafe fn(T) -> Result<(), CublasError>,
    setter: AttributeSetter<T, A>,
}

impl<T: Copy, A> OwnedHandle<T, A> {
    /// Sets an attribute.
    ///
    /// # Safety
    /// `V` is the attribute's type.
    unsafe fn set<V>(&self, attribute: A, value: V) -> Result<(), CublasError> {
        // SAFETY: the caller's promise; the handle is valid, and the library copies the value.
        unsafe { (self.setter)(self.raw, attribute, ptr::from_ref(&value).cast(), size_of::<V>()) }
    }
}

impl<T: Copy, A> Drop for OwnedHandle<T, A> {
    fn drop(&mut self) {
        // SAFETY: made by the function that matches `destroy`, and destroyed once. An error here cannot be
        // handled.
        let _ = unsafe { (self.destroy)(self.raw) };
    }
}

/// Device memory outside the pool, for the workspace and for timed products.
#[derive(Debug)]
struct DeviceScratch {
    address: u64,
    context: Arc<Context>,
}

impl DeviceScratch {
    fn new(context: &Arc<Context>, bytes: u64) -> Result<Self, SourceError> {
        Ok(Self { address: context.alloc(bytes)?, context: Arc::clone(context) })
    }
}

impl Drop for DeviceScratch {
    fn drop(&mut self) {
        // An error means that the device is lost, and its memory with it.
        let _ = self.context.free(self.address);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use forebay_core::backend::{Epilogue, MatmulCall, MatrixOperand, SegmentId};
    use forebay_core::dtype::DType;

    use super::CublasLtProblem;

    fn operand(row_stride: u64, col_stride: u64) -> MatrixOperand {
        MatrixOperand { segment: SegmentId(1 << 20), offset: 0, row_stride, col_stride, batch_stride: 0 }
    }

    pub(crate) fn call() -> MatmulCall {
        MatmulCall {
            dtype: DType::F32,
            dtype_b: DType::F32,
            dtype_out: DType::F32,
            m: 3,
            n: 5,
            k: 7,
            batch: 1,
            a: operand(7, 1),
            b: operand(5, 1),
            c: operand(5, 1),
            beta: 0.0,
            epilogue: Epilogue::None,
        }
    }

    #[test]
    fn strides_become_transposes_and_leading_dimensions() {
        let side = |a: MatrixOperand| {
            CublasLtProblem::new(&MatmulCall { a, ..call() }).map(|p| (p.a.transposed, p.a.leading_dim))
        };
        assert_eq!(side(operand(7, 1)), Some((false, 7)));
        assert_eq!(side(operand(12, 1)), Some((false, 12)));
        assert_eq!(side(operand(1, 3)), Some((true, 3)));
        assert_eq!(side(operand(1, 9)), Some((true, 9)));
        // Rows that overlap or repeat.
        assert_eq!(side(operand(6, 1)), None);
        assert_eq!(side(operand(0, 1)), None);
        assert_eq!(side(operand(1, 2)), None);
        assert_eq!(side(operand(14, 2)), None);
    }

    #[test]
    fn strides_of_single_rows_and_columns_do_not_count() {
        let side = |m, k, a: MatrixOperand| {
            CublasLtProblem::new(&MatmulCall { a, m, k, ..call() }).map(|p| (p.a.transposed, p.a.leading_dim))
        };
        assert_eq!(side(1, 7, operand(0, 1)), Some((false, 7)));
        assert_eq!(side(1, 7, operand(1, 4)), Some((true, 4)));
        assert_eq!(side(3, 1, operand(4, 1)), Some((false, 4)));
        assert_eq!(side(3, 1, operand(1, 0)), Some((false, 1)));
        assert_eq!(side(1, 1, operand(0, 0)), Some((false, 1)));
    }

    #[test]
    fn the_core_gets_products_that_the_library_cannot_compute() {
        assert!(CublasLtProblem::new(&call()).is_some());
        assert!(CublasLtProblem::new(&MatmulCall { dtype: DType::I32, ..call() }).is_none());
        assert!(CublasLtProblem::new(&MatmulCall { k: 0, ..call() }).is_none());
        assert!(
            CublasLtProblem::new(&MatmulCall { batch: 2, ..call() }).is_none(),
            "c would be written twice"
        );
        let odd = MatrixOperand { offset: 2, ..operand(7, 1) };
        assert!(CublasLtProblem::new(&MatmulCall { a: odd, ..call() }).is_none(), "half an element off");
        let offset = MatrixOperand { offset: 4, ..operand(7, 1) };
        assert_eq!(CublasLtProblem::new(&MatmulCall { a: offset, ..call() }).map(|p| p.a.alignment), Some(4));
    }
}
