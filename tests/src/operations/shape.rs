//! Views, joining, and changes of shape.

use super::prelude::*;

/// Applies a function to a tensor or to each of a list.
fn each(a: &Args<'_>, made: fn(&Tensor) -> Result<Tensor>) -> anyhow::Result<Vec<Tensor>> {
    Ok(a.tensors(0)?.into_iter().map(made).collect::<Result<_>>()?)
}

/// Splits into equal parts, or at indices.
fn split(
    a: &Args<'_>,
    evenly: fn(&Tensor, usize) -> Result<Vec<Tensor>>,
    dim: isize,
) -> anyhow::Result<Vec<Tensor>> {
    match a.get(1, "indices").and_then(|v| v.get("l")) {
        Some(_) => Ok(a.tensor(0)?.tensor_split_at(&a.dims(1, "indices")?, dim)?),
        None => Ok(evenly(a.tensor(0)?, usize::try_from(a.int(1, "sections", 0)?)?)?),
    }
}

fn signed(a: &Args<'_>, at: usize, name: &str) -> anyhow::Result<Vec<isize>> {
    Ok(match a.ints(at, name)? {
        Some(v) => v.into_iter().map(|n| n as isize).collect(),
        None => Vec::new(),
    })
}

pub(super) fn register(ops: &mut Registry) {
    ops.add(method!(reshape(ints)))
        .case(smooth("reshape", &[Signed(&[2, 6])], |x| x[0].t()?.reshape([3, 4])))
        .golden(|a| single(a.tensor(0)?.reshape(&signed(a, 1, "shape")?[..])))
        .golden_as("ravel", |a| single(a.tensor(0)?.reshape([-1])));
    ops.add(method!(permute(ints)))
        .case(
            smooth("permute", &[Signed(&[2, 3, 4])], |x| x[0].permute([2, 0, 1])).with_bytes(cost::no_bytes),
        )
        .golden(|a| single(a.tensor(0)?.permute(&a.dims(1, "dims")?)));
    ops.add(method!(expand(ints)))
        .case(smooth("expand", &[Signed(&[1, 3])], |x| x[0].expand([4, -1])).with_bytes(cost::no_bytes))
        .golden(|a| single(a.tensor(0)?.expand(&signed(a, 1, "size")?)))
        .fuzz("expand of a view", |r, t| {
            t[0].expand(r.ints())?.expand(r.ints())?.permute(r.ints()).map(IntoTensors::into_tensors)
        });
    ops.add(method!(narrow(int, count, count)))
        .case(smooth("narrow", &[Signed(S)], |x| x[0].narrow(1, 1, 3)).with_bytes(cost::no_bytes))
        .golden(|a| {
            let x = a.tensor(0)?;
            let dim = a.dim(1, "dim", 0)?;
            let start = match a.opt_tensor(2, "start") {
                Some(s) => s.item()? as i64,
                None => a.int(2, "start", 0)?,
            };
            let start = if start < 0 { start + x.dim(dim)? as i64 } else { start };
            single(x.narrow(dim, start as usize, a.int(3, "length", 0)? as usize))
        });
    ops.add(method!(slice_dim(int, count, count, count)))
        .case(smooth("slice_dim", &[Signed(&[9])], |x| x[0].slice_dim(0, 1, 8, 3)).with_bytes(cost::no_bytes))
        .golden_as("slice", |a| {
            let x = a.tensor(0)?;
            let dim = a.dim(1, "dim", 0)?;
            let extent = x.dim(dim)? as i64;
            let index = |n: i64| (if n < 0 { n + extent } else { n }).clamp(0, extent) as usize;
            let start = index(a.int(2, "start", 0)?);
            let stop = index(a.opt_int(3, "end")?.unwrap_or(extent)).max(start);
            single(x.slice_dim(dim, start, stop, a.int(4, "step", 1)? as usize))
        });
    ops.add(method!(select(int, int)))
        .case(smooth("select", &[Signed(S)], |x| x[0].select(0, -1)).with_bytes(cost::no_bytes))
        .golden(|a| single(a.tensor(0)?.select(a.dim(1, "dim", 0)?, a.dim(2, "index", 0)?)));
    ops.add(method!(diagonal(int, int, int)))
        .case(smooth("diagonal", &[Signed(S)], |x| x[0].diagonal(1, 0, 1)).with_bytes(cost::no_bytes))
        .golden(|a| {
            single(a.tensor(0)?.diagonal(a.dim(1, "offset", 0)?, a.dim(2, "dim1", 0)?, a.dim(3, "dim2", 1)?))
        });
    ops.add(function!(cat(tensors, int)))
        .case(
            smooth("cat", &[Signed(&[2, 3]), Signed(&[4, 3])], |x| cat(&[&x[0], &x[1]], 0))
                .with_bench_inputs(&[Signed(&[2048, 4096]), Signed(&[2048, 4096])]),
        )
        .golden(|a| single(cat(&a.tensors(0)?, a.dim(1, "dim", 0)?)));
    ops.add(function!(stack(tensors, int)))
        .case(smooth("stack", &[Signed(S), Signed(S)], |x| stack(&[&x[0], &x[1]], -1)))
        .golden(|a| single(stack(&a.tensors(0)?, a.dim(1, "dim", 0)?)));
    ops.add(method!(flip(ints)))
        .case(smooth("flip", &[Signed(S)], |x| x[0].flip([1])).with_batched_inputs(1))
        .golden(|a| single(a.tensor(0)?.flip(&a.dims(1, "dims")?)))
        .golden_as("fliplr", |a| single(a.tensor(0)?.flip([1])))
        .golden_as("flipud", |a| single(a.tensor(0)?.flip([0])));
    ops.add(method!(roll(ints, ints)))
        .case(smooth("roll", &[Signed(S)], |x| x[0].roll(2, 1)).with_bench_inputs(&[Signed(&[4096, 4096])]))
        .golden(|a| {
            let (x, shifts, dims) = (a.tensor(0)?, a.dims(1, "shifts")?, a.dims(2, "dims")?);
            single(if dims.is_empty() { x.roll(shifts, ()) } else { x.roll(shifts, dims) })
        });
    ops.add(method!(movedim(ints, ints)))
        .case(
            smooth("movedim", &[Signed(&[2, 3, 4])], |x| x[0].movedim([0, -1], [1, 0]))
                .with_bytes(cost::no_bytes),
        )
        .golden(|a| single(a.tensor(0)?.movedim(&a.dims(1, "source")?, &a.dims(2, "destination")?)));
    ops.add(method!(repeat(counts)))
        .case(
            smooth("repeat", &[Signed(S)], |x| x[0].repeat([2, 1, 3]))
                .with_bench_inputs(&[Signed(&[2048, 1024])]),
        )
        .golden(|a| single(a.tensor(0)?.repeat(&a.shape(1, "repeats")?)));
    ops.add(method!(repeat_interleave(count, int)))
        .case(smooth("repeat_interleave", &[Signed(S)], |x| x[0].repeat_interleave(3, 0)))
        .golden(|a| {
            if let Some(repeats) = a.opt_tensor(1, "repeats") {
                let (x, dim) = match a.opt_int(2, "dim")? {
                    Some(d) => (a.tensor(0)?.clone(), d as isize),
                    None => (a.tensor(0)?.reshape([-1])?, 0),
                };
                let size = a.opt_int(3, "output_size")?.map(|n| n as usize);
                return single(x.repeat_interleave_by(repeats, dim, size));
            }
            let n = a.int(1, "repeats", 1)? as usize;
            match a.opt_int(2, "dim")? {
                Some(d) => single(a.tensor(0)?.repeat_interleave(n, d as isize)),
                None => single(a.tensor(0)?.reshape([-1])?.repeat_interleave(n, 0)),
            }
        });
    ops.add(method!(pad(ints, pad_mode)))
        .case(
            smooth("pad", &[Signed(S)], |x| x[0].pad(&[1, 2, 0, 1], PadMode::Constant(3.0.into())))
                .with_bench_inputs(&[Signed(&[4096, 4096])]),
        )
        .case(smooth("pad by reflection", &[Signed(S)], |x| x[0].pad(&[2, 1], PadMode::Reflect)))
        .case(smooth("pad by replication", &[Signed(S)], |x| x[0].pad(&[2, 1], PadMode::Replicate)))
        .case(smooth("pad in a circle", &[Signed(S)], |x| x[0].pad(&[2, 1], PadMode::Circular)))
        .golden(|a| {
            let pads = a.dims(1, "pad")?;
            let mode = match a.string(2, "mode", "constant") {
                "reflect" => PadMode::Reflect,
                "replicate" => PadMode::Replicate,
                "circular" => PadMode::Circular,
                "constant" => PadMode::Constant(a.scalar_or(3, "value", 0)?),
                other => return Err(missing_op(&format!("pad in mode {other}"))),
            };
            single(a.tensor(0)?.pad(&pads, mode))
        })
        .golden_as("constant_pad_nd", |a| {
            single(a.tensor(0)?.pad(&a.dims(1, "pad")?, PadMode::Constant(a.scalar_or(2, "value", 0)?)))
        });
    ops.add(method!(tril(int)))
        .case(
            smooth("tril", &[Signed(&[4, 4])], |x| x[0].tril(0)).with_bench_inputs(&[Signed(&[4096, 4096])]),
        )
        .golden(|a| single(a.tensor(0)?.tril(a.dim(1, "diagonal", 0)?)));
    ops.add(method!(triu(int)))
        .case(
            smooth("triu", &[Signed(&[4, 4])], |x| x[0].triu(-1)).with_bench_inputs(&[Signed(&[4096, 4096])]),
        )
        .golden(|a| single(a.tensor(0)?.triu(a.dim(1, "diagonal", 0)?)));
    ops.add(method!(contiguous()))
        .case(
            smooth("contiguous", &[Signed(&[4, 3])], |x| x[0].t()?.contiguous())
                .with_bench_inputs(&[Signed(&[4096, 4096])]),
        )
        .golden(unary_call!(contiguous));
    ops.add(method!(as_strided(counts, counts, maybe_count)))
        .case(
            smooth("as_strided", &[Signed(&[12])], |x| {
                x[0].copy()?.as_strided([3, 2, 4], [2, 0, 1], Some(1))
            })
            .with_bytes(|x, _| 2 * cost::bytes(&x[0])),
        )
        .golden(|a| {
            let offset = a.opt_int(3, "storage_offset")?.map(|n| n as usize);
            let x = match a.variant() {
                // The database's input is elements 5 to 15 of a storage of 20; only these were recorded.
                "partial_views" => {
                    a.tensor(0)?.pad(&[5, 5], PadMode::Constant(0.0.into()))?.narrow(0, 5, 10)?
                }
                _ => a.tensor(0)?.clone(),
            };
            single(x.as_strided(&a.shape(1, "size")?, &a.shape(2, "stride")?, offset))
        })
        .golden_as("as_strided_scatter", |a| {
            let (out, offset) = (a.tensor(0)?.copy()?, a.opt_int(4, "storage_offset")?.map(|n| n as usize));
            out.as_strided(&a.shape(2, "size")?, &a.shape(3, "stride")?, offset)?.copy_(a.tensor(1)?)?;
            Ok(vec![out])
        });
    ops.add(method!(tensor_split(count, int)))
        .case(smooth("tensor_split", &[Signed(&[7, 2])], |x| {
            cat(&[&x[0].tensor_split(3, 0)?[0], &x[0].tensor_split_at(&[2, -1], 0)?[1]], 0)
        }))
        .golden(|a| {
            let (x, dim) = (a.tensor(0)?, a.dim(2, "dim", 0)?);
            if let Some(indices) = a.opt_tensor(1, "tensor_indices_or_sections") {
                let values: Vec<isize> = indices.to_f64s()?.into_iter().map(|n| n as isize).collect();
                return Ok(match indices.rank() {
                    0 => x.tensor_split(values[0] as usize, dim)?,
                    _ => x.tensor_split_at(&values, dim)?,
                });
            }
            if a.get(1, "sections").is_some_and(|v| v.is_i64()) {
                return Ok(x.tensor_split(a.int(1, "sections", 1)? as usize, dim)?);
            }
            Ok(x.tensor_split_at(&a.dims(1, "indices")?, dim)?)
        });
    ops.add(method!(diff(count, int, DiffOptions { prepend: maybe1, append: maybe2 })))
        .case(smooth("diff", &[Signed(&[3, 6]), Signed(&[3, 2])], |x| {
            x[0].diff(2, 1, &DiffOptions { prepend: Some(&x[1]), ..Default::default() })
        }))
        .golden(|a| {
            let (n, dim) = (usize::try_from(a.int(1, "n", 1)?)?, a.dim(2, "dim", -1)?);
            single(a.tensor(0)?.diff(
                n,
                dim,
                &DiffOptions { prepend: a.opt_tensor(3, "prepend"), append: a.opt_tensor(4, "append") },
            ))
        });
    ops.add(method!(trace()))
        .case(smooth("trace", &[Signed(&[4, 5])], |x| x[0].trace()))
        .golden(|a| single(a.tensor(0)?.trace()));
    ops.add(method!(pixel_shuffle(count)))
        .case(smooth("pixel_shuffle", &[Signed(&[1, 8, 2, 3])], |x| x[0].pixel_shuffle(2)))
        .golden(|a| single(a.tensor(0)?.pixel_shuffle(a.int(1, "upscale_factor", 1)? as usize)));
    ops.add(method!(channel_shuffle(count)))
        .case(smooth("channel_shuffle", &[Signed(&[1, 6, 2])], |x| x[0].channel_shuffle(2)))
        .golden(|a| single(a.tensor(0)?.channel_shuffle(a.count(1, "groups", 1)?)));
    ops.add(method!(one_hot(count)))
        .case(nondifferentiable("one_hot", &[Index(S, 4)], |x| x[0].to_dtype(DType::I32)?.one_hot(4)))
        .golden(|a| {
            let x = a.tensor(0)?;
            let classes = match a.int(1, "num_classes", -1)? {
                // PyTorch counts the classes on the host.
                -1 => x.max_all()?.item()? as usize + 1,
                classes => usize::try_from(classes)?,
            };
            single(x.one_hot(classes))
        });
    ops.add(method!(pixel_unshuffle(count)))
        .case(smooth("pixel_unshuffle", &[Signed(&[1, 2, 4, 6])], |x| x[0].pixel_unshuffle(2)))
        .golden(|a| single(a.tensor(0)?.pixel_unshuffle(a.int(1, "downscale_factor", 1)? as usize)));
    ops.add(function!(hstack(tensors)))
        .case(smooth("hstack", &[Signed(&[2, 3]), Signed(&[2, 2])], |x| hstack(&[&x[0], &x[1]])))
        .golden(|a| single(hstack(&a.tensors(0)?)));
    ops.add(function!(vstack(tensors)))
        .case(smooth("vstack", &[Signed(&[3]), Signed(&[2, 3])], |x| vstack(&[&x[0], &x[1]])))
        .golden(|a| single(vstack(&a.tensors(0)?)));
    ops.add(function!(dstack(tensors)))
        .case(smooth("dstack", &[Signed(&[2, 3]), Signed(&[2, 3, 2])], |x| dstack(&[&x[0], &x[1]])))
        .golden(|a| single(dstack(&a.tensors(0)?)));
    ops.add(function!(column_stack(tensors)))
        .case(smooth("column_stack", &[Signed(&[3]), Signed(&[3, 2])], |x| column_stack(&[&x[0], &x[1]])))
        .golden(|a| single(column_stack(&a.tensors(0)?)));
    ops.add(function!(block_diag(tensors)))
        .case(smooth("block_diag", &[Signed(&[2, 3]), Positive(&[2])], |x| block_diag(&[&x[0], &x[1]])))
        .golden(|a| single(block_diag(&a.tensors(0)?)));
    ops.add(function!(cartesian_prod(tensors)))
        .case(smooth("cartesian_prod", &[Signed(&[3]), Positive(&[2])], |x| cartesian_prod(&[&x[0], &x[1]])))
        .golden(|a| single(cartesian_prod(&a.tensors(0)?)));
    ops.add(function!(meshgrid(tensors, flag)))
        .case(smooth("meshgrid", &[Signed(&[3]), Positive(&[2])], |x| {
            cat(&meshgrid(&[&x[0], &x[1]], true)?.iter().collect::<Vec<_>>(), 0)
        }))
        .golden(|a| Ok(meshgrid(&a.tensors(0)?, a.string(NAMED, "indexing", "ij") == "xy")?));
    ops.add(function!(broadcast_tensors(tensors)))
        .case(smooth("broadcast_tensors", &[Signed(&[3, 1]), Positive(&[2])], |x| {
            cat(&broadcast_tensors(&[&x[0], &x[1]])?.iter().collect::<Vec<_>>(), 0)
        }))
        .golden(|a| Ok(broadcast_tensors(&a.tensors(0)?)?))
        .golden_as("broadcast_shapes", |a| {
            let zeros = |at| Ok(Tensor::zeros(&a.shape(at, "")?, DType::F32, a.device())?);
            let zeros = (0..a.num_positional()).map(zeros).collect::<anyhow::Result<Vec<_>>>()?;
            let shape: Vec<i64> = broadcast_tensors(&zeros)?[0].shape().iter().map(|&n| n as i64).collect();
            single(Tensor::from_slice(&shape, shape.len(), a.device()))
        });
    ops.add(method!(atleast_1d()))
        .case(smooth("atleast_1d", &[Signed(&[3])], |x| x[0].atleast_1d()).with_bytes(cost::no_bytes))
        .golden(|a| each(a, Tensor::atleast_1d));
    ops.add(method!(atleast_2d()))
        .case(smooth("atleast_2d", &[Signed(&[3])], |x| x[0].atleast_2d()).with_bytes(cost::no_bytes))
        .golden(|a| each(a, Tensor::atleast_2d));
    ops.add(method!(atleast_3d()))
        .case(smooth("atleast_3d", &[Signed(S)], |x| x[0].atleast_3d()).with_bytes(cost::no_bytes))
        .golden(|a| each(a, Tensor::atleast_3d));
    ops.add(method!(tile(counts)))
        .case(smooth("tile", &[Signed(S)], |x| x[0].tile([2])))
        .golden(|a| single(a.tensor(0)?.tile(&a.shape(1, "dims")?)));
    ops.add(method!(rot90(int, int2)))
        .case(smooth("rot90", &[Signed(&[2, 3, 4])], |x| x[0].rot90(-1, [0, 2])))
        .golden(|a| {
            let dims = a.dims(2, "dims")?;
            let &[first, second] = (if dims.is_empty() { &[0, 1][..] } else { &dims }) else {
                anyhow::bail!("{} dimensions", dims.len())
            };
            single(a.tensor(0)?.rot90(a.dim(1, "k", 1)?, [first, second]))
        });
    ops.add(method!(combinations(count, flag)))
        .case(smooth("combinations", &[Signed(&[5])], |x| x[0].combinations(3, false)))
        .golden(|a| {
            single(
                a.tensor(0)?.combinations(a.int(1, "r", 2)? as usize, a.flag(2, "with_replacement", false)),
            )
        });
    ops.add(method!(kron(t1)))
        .case(smooth("kron", &[Signed(&[2, 3]), Positive(&[2])], |x| x[0].kron(&x[1])))
        .golden(|a| single(a.tensor(0)?.kron(a.tensor(1)?)));
    ops.add(method!(tensordot(t1, ints, ints)))
        .case(
            smooth("tensordot", &[Signed(&[2, 3, 4]), Signed(&[4, 3, 5])], |x| {
                x[0].tensordot(&x[1], [1, 2], [1, 0])
            })
            .with_flops(|_, y| 2 * cost::numel(y) * 12),
        )
        .golden(|a| {
            let (x, y) = (a.tensor(0)?, a.tensor(1)?);
            match a.get(2, "dims") {
                Some(v) if v.get("l").is_some() => {
                    let [dims, other_dims] = a.two_lists(2, "dims")?;
                    single(x.tensordot(y, dims, other_dims))
                }
                _ => {
                    let n = a.dim(2, "dims", 2)?;
                    single(x.tensordot(y, (-n..0).collect::<Vec<_>>(), (0..n).collect::<Vec<_>>()))
                }
            }
        });
    ops.add(method!(diag_embed(int, int, int)))
        .case(smooth("diag_embed", &[Signed(S)], |x| x[0].diag_embed(-1, 0, -1)))
        .golden(|a| {
            single(a.tensor(0)?.diag_embed(
                a.dim(1, "offset", 0)?,
                a.dim(2, "dim1", -2)?,
                a.dim(3, "dim2", -1)?,
            ))
        });
    ops.add(method!(diag(int)))
        .case(smooth("diag", &[Signed(&[4])], |x| x[0].diag(1)))
        .case(smooth("diag of a matrix", &[Signed(S)], |x| x[0].diag(1)))
        .golden(|a| single(a.tensor(0)?.diag(a.dim(1, "diagonal", 0)?)))
        .golden_as("diagflat", |a| single(a.tensor(0)?.reshape([-1])?.diag(a.dim(1, "offset", 0)?)));
    ops.add(method!(expand_as(t1)))
        .case(smooth("expand_as", &[Signed(&[3, 1]), Signed(S)], |x| x[0].expand_as(&x[1])?.mul(&x[1])))
        .golden(|a| single(a.tensor(0)?.expand_as(a.tensor(1)?)));
    ops.add(method!(reshape_as(t1)))
        .case(smooth("reshape_as", &[Signed(S), Signed(&[5, 3])], |x| x[0].reshape_as(&x[1])?.mul(&x[1])))
        .golden(|a| single(a.tensor(0)?.reshape_as(a.tensor(1)?)));
    ops.add(method!(view_as(t1)))
        .case(smooth("view_as", &[Signed(S), Signed(&[5, 3])], |x| {
            x[0].contiguous()?.view_as(&x[1])?.mul(&x[1])
        }))
        .golden(|a| single(a.tensor(0)?.view_as(a.tensor(1)?)));
    ops.add(method!(sum_to_size(counts)))
        .case(smooth("sum_to_size", &[Signed(&[2, 3, 5])], |x| x[0].sum_to_size([3, 1])))
        .golden(|a| single(a.tensor(0)?.sum_to_size(&a.shape(1, "size")?)));
    ops.add(method!(hsplit(count)))
        .case(smooth("hsplit", &[Signed(&[3, 4])], |x| x[0].hsplit(2)?[1].mul(2.0)))
        .golden(|a| split(a, Tensor::hsplit, if a.tensor(0)?.rank() > 1 { 1 } else { 0 }));
    ops.add(method!(vsplit(count)))
        .case(smooth("vsplit", &[Signed(&[4, 3])], |x| x[0].vsplit(2)?[1].mul(2.0)))
        .golden(|a| split(a, Tensor::vsplit, 0));
    ops.add(method!(dsplit(count)))
        .case(smooth("dsplit", &[Signed(&[2, 1, 6])], |x| x[0].dsplit(3)?[1].mul(2.0)))
        .golden(|a| split(a, Tensor::dsplit, 2));
    ops.add(method!(view(ints)))
        .without_case("a view: the topic `tensors`")
        .golden(|a| single(a.tensor(0)?.view(&signed(a, 1, "shape")?[..])));
    ops.add(method!(transpose(int, int)))
        .without_case("a view: the topic `tensors`")
        .golden(|a| single(a.tensor(0)?.transpose(a.dim(1, "dim0", 0)?, a.dim(2, "dim1", 0)?)))
        .golden_as("mT", |a| single(a.tensor(0)?.transpose(-2, -1)))
        .golden_as("mH", |a| single(a.tensor(0)?.transpose(-2, -1)))
        .golden_as("adjoint", |a| single(a.tensor(0)?.transpose(-2, -1)))
        .golden_as("swapaxes", |a| {
            single(a.tensor(0)?.transpose(a.dim(1, "axis0", 0)?, a.dim(2, "axis1", 0)?))
        });
    ops.add(method!(t()))
        .without_case("a view: the topic `tensors`")
        .golden(unary_call!(t))
        .golden_as("T", unary_call!(t))
        .golden_as("H", unary_call!(t));
    ops.add(method!(broadcast_to(counts)))
        .without_case("a view: the topic `tensors`")
        .golden(|a| single(a.tensor(0)?.broadcast_to(&a.shape(1, "size")?)));
    ops.add(method!(unsqueeze(int)))
        .without_case("a view: the topic `tensors`")
        .golden(|a| single(a.tensor(0)?.unsqueeze(a.dim(1, "dim", 0)?)));
    ops.add(method!(squeeze(int))).without_case("a view: the topic `tensors`").golden(|a| {
        let dims = a.dims(1, "dim")?;
        let x = a.tensor(0)?;
        if a.get(1, "dim").is_none() {
            return single(x.squeeze_all());
        }
        // In descending order, so that smaller dimensions keep their index.
        let rank = x.rank() as isize;
        let mut dims: Vec<isize> = dims.iter().map(|&d| if d < 0 { d + rank } else { d }).collect();
        dims.sort_unstable();
        let mut out = x.clone();
        for d in dims.into_iter().rev() {
            out = out.squeeze(d)?;
        }
        Ok(vec![out])
    });
    ops.add(method!(flatten(int, int)))
        .without_case("a view: the topic `tensors`")
        .golden(|a| single(a.tensor(0)?.flatten(a.dim(1, "start_dim", 0)?, a.dim(2, "end_dim", -1)?)));
    ops.add(method!(unflatten(int, ints)))
        .without_case("a view: the topic `tensors`")
        .golden(|a| single(a.tensor(0)?.unflatten(a.dim(1, "dim", 0)?, &signed(a, 2, "sizes")?)));
    ops.add(method!(chunk(count, int)))
        .without_case("a view: the topic `tensors`")
        .golden(|a| Ok(a.tensor(0)?.chunk(a.int(1, "chunks", 1)? as usize, a.dim(2, "dim", 0)?)?));
    ops.add(method!(split(count, int))).without_case("a view: the topic `tensors`").golden(|a| {
        let dim = a.dim(2, "dim", 0)?;
        if a.variant() == "list_args" {
            return Ok(a.tensor(0)?.split_with_sizes(&a.shape(1, "split_size")?, dim)?);
        }
        Ok(a.tensor(0)?.split(a.int(1, "split_size", 1)? as usize, dim)?)
    });
    ops.add(method!(split_with_sizes(counts, int)))
        .without_case("a view: the topic `tensors`")
        .golden(|a| Ok(a.tensor(0)?.split_with_sizes(&a.shape(1, "split_sizes")?, a.dim(2, "dim", 0)?)?));
    ops.add(method!(unbind(int)))
        .without_case("a view: the topic `tensors`")
        .golden(|a| Ok(a.tensor(0)?.unbind(a.dim(1, "dim", 0)?)?));
    ops.add(method!(item())).without_case("makes or moves a tensor: the topic `tensors`").golden(|a| {
        let x = a.tensor(0)?;
        // Python's number has 64 bits.
        let dtype = match x.dtype() {
            DType::Bool => DType::Bool,
            dtype if dtype.is_float() => DType::F64,
            _ => DType::I64,
        };
        single(Tensor::full((), x.item()?, dtype, a.device()))
    });
    ops.add(method!(dim(int))).without_case("makes or moves a tensor: the topic `tensors`");
    ops.add(method!(squeeze_all())).without_case("a view: the topic `tensors`");
    ops.add(method!(tensor_split_at(ints, int))).without_case("a view: the topic `tensors`");
    ops.add(method!(copy()))
        .without_case("makes or moves a tensor: the topic `tensors`")
        .golden_as("clone", unary_call!(copy))
        .golden_as("positive", unary_call!(copy))
        .golden_as("alias_copy", unary_call!(copy));
}
