//! Factories of tensors.

use super::prelude::*;

/// Returns a number, or the value of a one-element tensor.
fn bound(a: &Args<'_>, at: usize, name: &str) -> anyhow::Result<Scalar> {
    match a.opt_tensor(at, name) {
        Some(v) => Ok(v.to_scalar()?),
        None => a.scalar_or(at, name, 0),
    }
}

/// Returns length, periodicity and type of a window. PyTorch's windows in this namespace are symmetric by default.
fn window_arguments(a: &Args<'_>) -> anyhow::Result<(usize, bool, DType)> {
    let dtype = a.dtype(NAMED, "dtype")?.unwrap_or(DType::F32);
    Ok((usize::try_from(a.int(0, "M", 0)?)?, !a.flag(NAMED, "sym", true), dtype))
}

/// Returns one value in the shape at a position, in the type of the argument `dtype` or in `dtype`.
fn constant(a: &Args<'_>, at: usize, dtype: DType, value: impl Into<Scalar>) -> anyhow::Result<Vec<Tensor>> {
    let dtype = a.dtype(NAMED, "dtype")?.unwrap_or(dtype);
    single(Tensor::full(&a.shape(at, "size")?, value, dtype, a.device()))
}

/// Creates a tensor without values, and fills it with zeros, as the recorded one is.
fn uninitialized(a: &Args<'_>, shape: &[usize], dtype: DType) -> anyhow::Result<Vec<Tensor>> {
    let x = Tensor::empty(shape, a.dtype(NAMED, "dtype")?.unwrap_or(dtype), a.device())?;
    x.zero_()?;
    Ok(vec![x])
}

pub(super) fn register(ops: &mut Registry) {
    ops.add(constructor!(arange(float, float, float, dtype, device)))
        .case(factory!("arange", |t, d| Tensor::arange(1.0, 9.0, 0.5, t, d)).with_bytes(cost::no_bytes))
        .golden(|a| {
            // If all arguments are integers, the result is an integer tensor.
            let whole =
                |at| !matches!(a.scalar(at, ["start", "end", "step"][at]), Ok(Some(Scalar::Float(_))));
            let natural = if (0..3).all(whole) { DType::I64 } else { DType::F32 };
            let dtype = a.dtype(NAMED, "dtype")?.unwrap_or(natural);
            let (start, end) = match a.get(1, "end") {
                Some(_) => (a.scalar_or(0, "start", 0)?, a.scalar_or(1, "end", 0)?),
                None => (0.into(), a.scalar_or(0, "end", 0)?),
            };
            let step = a.scalar_or(2, "step", 1)?;
            single(Tensor::arange(start, end, step, dtype, a.device()))
        });
    ops.add(constructor!(linspace(float, float, count, dtype, device)))
        .case(factory!("linspace", |t, d| Tensor::linspace(-1.0, 2.0, 7, t, d)).with_bytes(cost::no_bytes))
        .golden(|a| {
            let (from, to) = (bound(a, 0, "start")?, bound(a, 1, "end")?);
            let dtype = a.dtype(NAMED, "dtype")?.unwrap_or(DType::F32);
            single(Tensor::linspace(from, to, a.int(2, "steps", 0)? as usize, dtype, a.device()))
        });
    ops.add(constructor!(logspace(float, float, count, float, dtype, device)))
        .case(
            factory!("logspace", |t, d| Tensor::logspace(-1.0, 2.0, 7, 2.0, t, d)).with_bytes(cost::no_bytes),
        )
        .golden(|a| {
            let (from, to) = (bound(a, 0, "start")?, bound(a, 1, "end")?);
            let (steps, base) = (a.int(2, "steps", 0)? as usize, a.float(3, "base", 10.0)?);
            let dtype = a.dtype(NAMED, "dtype")?.unwrap_or(DType::F32);
            single(Tensor::logspace(from, to, steps, base, dtype, a.device()))
        });
    ops.add(constructor!(hann_window(count, flag, dtype, device)))
        .case(factory!("hann_window", |t, d| Tensor::hann_window(9, true, t, d)).with_bytes(cost::no_bytes))
        .golden_as("signal.windows.hann", |a| {
            let (n, periodic, dtype) = window_arguments(a)?;
            single(Tensor::hann_window(n, periodic, dtype, a.device()))
        });
    ops.add(constructor!(hamming_window(count, flag, dtype, device)))
        .case(
            factory!("hamming_window", |t, d| Tensor::hamming_window(9, true, t, d))
                .with_bytes(cost::no_bytes),
        )
        .golden_as("signal.windows.hamming", |a| {
            let (n, periodic, dtype) = window_arguments(a)?;
            single(Tensor::hamming_window(n, periodic, dtype, a.device()))
        });
    ops.add(constructor!(blackman_window(count, flag, dtype, device)))
        .case(
            factory!("blackman_window", |t, d| Tensor::blackman_window(9, false, t, d))
                .with_bytes(cost::no_bytes),
        )
        .golden_as("signal.windows.blackman", |a| {
            let (n, periodic, dtype) = window_arguments(a)?;
            single(Tensor::blackman_window(n, periodic, dtype, a.device()))
        });
    ops.add(constructor!(bartlett_window(count, flag, dtype, device)))
        .case(
            factory!("bartlett_window", |t, d| Tensor::bartlett_window(9, false, t, d))
                .with_bytes(cost::no_bytes),
        )
        .golden_as("signal.windows.bartlett", |a| {
            let (n, periodic, dtype) = window_arguments(a)?;
            single(Tensor::bartlett_window(n, periodic, dtype, a.device()))
        });
    ops.add(constructor!(kaiser_window(count, flag, float, dtype, device)))
        .case(
            factory!("kaiser_window", |t, d| Tensor::kaiser_window(9, true, 12.0, t, d))
                .with_bytes(cost::no_bytes),
        )
        .golden_as("signal.windows.kaiser", |a| {
            let (n, periodic, dtype) = window_arguments(a)?;
            single(Tensor::kaiser_window(n, periodic, a.float(NAMED, "beta", 12.0)?, dtype, a.device()))
        });
    ops.add(constructor!(gaussian_window(count, float, flag, dtype, device)))
        .case(
            factory!("gaussian_window", |t, d| Tensor::gaussian_window(9, 2.0, true, t, d))
                .with_bytes(cost::no_bytes),
        )
        .golden_as("signal.windows.gaussian", |a| {
            let (n, periodic, dtype) = window_arguments(a)?;
            single(Tensor::gaussian_window(n, a.float(NAMED, "std", 1.0)?, periodic, dtype, a.device()))
        });
    ops.add(constructor!(general_cosine_window(count, floats, flag, dtype, device)))
        .case(
            factory!("general_cosine_window", |t, d| Tensor::general_cosine_window(
                9,
                &[0.5, 0.3, 0.2],
                true,
                t,
                d
            ))
            .with_bytes(cost::no_bytes),
        )
        .golden_as("signal.windows.general_cosine", |a| {
            let (n, periodic, dtype) = window_arguments(a)?;
            let terms = a.floats(NAMED, "a")?.unwrap_or_default();
            single(Tensor::general_cosine_window(n, &terms, periodic, dtype, a.device()))
        })
        .golden_as("signal.windows.general_hamming", |a| {
            let (n, periodic, dtype) = window_arguments(a)?;
            let alpha = a.float(NAMED, "alpha", 0.54)?;
            single(Tensor::general_cosine_window(n, &[alpha, 1.0 - alpha], periodic, dtype, a.device()))
        })
        .golden_as("signal.windows.nuttall", |a| {
            let (n, periodic, dtype) = window_arguments(a)?;
            let terms = [0.3635819, 0.4891775, 0.1365995, 0.0106411];
            single(Tensor::general_cosine_window(n, &terms, periodic, dtype, a.device()))
        });
    ops.add(constructor!(tril_indices(count, count, int, device)))
        .case(factory!("tril_indices", |_t, d| Tensor::tril_indices(3, 4, 0, d)))
        .golden(|a| {
            let (rows, columns) = (a.int(0, "row", 0)? as usize, a.int(1, "col", 0)? as usize);
            Ok(vec![a.cast_to_dtype_arg(Tensor::tril_indices(
                rows,
                columns,
                a.dim(2, "offset", 0)?,
                a.device(),
            )?)?])
        });
    ops.add(constructor!(triu_indices(count, count, int, device)))
        .case(factory!("triu_indices", |_t, d| Tensor::triu_indices(3, 4, 1, d)))
        .golden(|a| {
            let (rows, columns) = (a.int(0, "row", 0)? as usize, a.int(1, "col", 0)? as usize);
            Ok(vec![a.cast_to_dtype_arg(Tensor::triu_indices(
                rows,
                columns,
                a.dim(2, "offset", 0)?,
                a.device(),
            )?)?])
        });
    ops.add(constructor!(eye(count, count, dtype, device)))
        .case(factory!("eye", |t, d| Tensor::eye(3, 5, t, d)))
        .golden(|a| {
            let rows = usize::try_from(a.int(0, "n", 0)?)?;
            let cols = a.opt_int(1, "m")?.map_or(Ok(rows), usize::try_from)?;
            single(Tensor::eye(rows, cols, a.dtype(NAMED, "dtype")?.unwrap_or(DType::F32), a.device()))
        });
    ops.add(method!(full_like(float)))
        .without_case("makes or moves a tensor: the topic `tensors`")
        .golden_as("fill", |a| {
            // The result depends on x by a factor of zero, so its gradient is zero, as in PyTorch.
            let x = a.tensor(0)?.copy()?;
            x.fill_(a.operand(1, "value", Scalar::Int(0))?)?;
            Ok(vec![x])
        })
        .golden(|a| {
            let x = a.tensor(0)?;
            let dtype = a.dtype(NAMED, "dtype")?.unwrap_or(x.dtype());
            single(Tensor::full(x.shape(), a.scalar_or(1, "fill_value", 0)?, dtype, x.device()))
        });
    ops.add(method!(ones_like())).without_case("makes or moves a tensor: the topic `tensors`").golden(|a| {
        let x = a.tensor(0)?;
        single(Tensor::ones(x.shape(), a.dtype(NAMED, "dtype")?.unwrap_or(x.dtype()), x.device()))
    });
    ops.add(constructor!(zeros(counts, dtype, device)))
        .without_case("makes or moves a tensor: the topic `tensors`")
        .golden(|a| constant(a, 0, DType::F32, 0.0))
        .golden_as("new_zeros", |a| constant(a, 1, a.tensor(0)?.dtype(), 0.0));
    ops.add(constructor!(full(counts, float, dtype, device)))
        .without_case("makes or moves a tensor: the topic `tensors`")
        .golden(|a| {
            // PyTorch derives the type from the value if no type is specified.
            let natural = match a.scalar(1, "fill_value")? {
                Some(Scalar::Bool(_)) => DType::Bool,
                Some(Scalar::Int(_)) => DType::I64,
                _ => DType::F32,
            };
            let dtype = a.dtype(NAMED, "dtype")?.unwrap_or(natural);
            single(Tensor::full(&a.shape(0, "size")?, a.scalar_or(1, "fill_value", 0)?, dtype, a.device()))
        })
        .golden_as("new_full", |a| constant(a, 1, a.tensor(0)?.dtype(), a.scalar_or(2, "fill_value", 0)?))
        .golden_as("scalar_tensor", |a| {
            let dtype = a.dtype(NAMED, "dtype")?.unwrap_or(DType::F32);
            single(Tensor::full((), a.scalar_or(0, "s", 0)?, dtype, a.device()))
        });
    ops.add(method!(zeros_like())).without_case("makes or moves a tensor: the topic `tensors`").golden(|a| {
        let x = a.tensor(0)?;
        single(Tensor::zeros(x.shape(), a.dtype(NAMED, "dtype")?.unwrap_or(x.dtype()), x.device()))
    });
    ops.add(constructor!(ones(counts, dtype, device)))
        .without_case("makes or moves a tensor: the topic `tensors`")
        .golden(|a| constant(a, 0, DType::F32, 1.0))
        .golden_as("new_ones", |a| constant(a, 1, a.tensor(0)?.dtype(), 1.0));
    ops.add(constructor!(empty(counts, dtype, device)))
        .without_case("makes or moves a tensor: the topic `tensors`")
        .golden(|a| uninitialized(a, &a.shape(0, "size")?, DType::F32))
        .golden_as("empty_like", |a| {
            let x = a.tensor(0)?;
            uninitialized(a, x.shape(), x.dtype())
        })
        .golden_as("new_empty", |a| uninitialized(a, &a.shape(1, "size")?, a.tensor(0)?.dtype()));
    ops.add(FuzzOp {
        name: "from_slice",
        run: |r, t| Tensor::from_slice(&r.floats(), r.counts(), t[0].device()).map(IntoTensors::into_tensors),
    })
    .without_case("makes or moves a tensor: the topic `tensors`");
}
