//! Random chains of views, followed by random operations, compared with plain loops over index lists.
//!
//! The reference of a view is the list of its elements' storage positions: views select and reorder them, without
//! strides. `FOREBAY_FUZZ_ROUNDS` sets the number of chains of each type, `FOREBAY_FUZZ_SEED` the first seed.

use anyhow::{Context, Result, ensure};
use forebay::device::Device;
use forebay::dtype::DType;
use forebay::ops::cat;
use forebay::tensor::Tensor;

use super::host_reference::{SplitMix64, all_indices, ensure_close, ensure_values};
use super::tests;

tests![views_and_operations_on_them_are_plain_loops];

/// Default number of chains of each type.
const ROUNDS: u64 = 120;
/// Maximum number of views in a chain.
const MAX_CHAIN_VIEWS: usize = 4;
/// Maximum number of elements of a view: unfolding multiplies them.
const MAX_VIEW_NUMEL: usize = 4096;

/// Storage positions of a view's elements, in row-major order.
#[derive(Clone, Debug)]
struct IndexMap {
    shape: Vec<usize>,
    offsets: Vec<usize>,
}

impl IndexMap {
    fn contiguous(shape: &[usize]) -> Self {
        Self { shape: shape.to_vec(), offsets: (0..shape.iter().product()).collect() }
    }

    fn offset(&self, index: &[usize]) -> usize {
        self.offsets[index.iter().zip(&self.shape).fold(0, |at, (i, n)| at * n + i)]
    }

    /// Returns a view whose element at an index is the element of this one at index `old`.
    fn remap(&self, shape: Vec<usize>, old: impl Fn(&[usize]) -> Vec<usize>) -> Self {
        let at = all_indices(&shape).iter().map(|index| self.offset(&old(index))).collect();
        Self { shape, offsets: at }
    }

    /// Returns a view in which one dimension of the index is remapped.
    fn remap_dim(&self, dim: usize, n: usize, old: impl Fn(usize) -> usize) -> Self {
        let mut shape = self.shape.clone();
        shape[dim] = n;
        self.remap(shape, |index| {
            let mut index = index.to_vec();
            index[dim] = old(index[dim]);
            index
        })
    }

    fn values(&self, storage: &[f64]) -> Vec<f64> {
        self.offsets.iter().map(|&at| storage[at]).collect()
    }

    fn overlaps(&self) -> bool {
        let mut at = self.offsets.clone();
        at.sort_unstable();
        at.windows(2).any(|pair| pair[0] == pair[1])
    }
}

/// Tensor with its expected contents.
struct ViewChain {
    tensor: Tensor,
    indices: IndexMap,
    storage: Vec<f64>,
    /// Whole storage.
    base: Tensor,
    /// Views of the chain, for error messages.
    chain: Vec<String>,
}

impl ViewChain {
    fn new(rank: u64, dtype: DType, rng: &mut SplitMix64, device: &Device) -> Result<Self> {
        let shape: Vec<usize> = (0..rank).map(|_| 1 + rng.below(5)).collect();
        let count = shape.iter().product();
        let storage: Vec<f64> = (0..count).map(|_| rng.below(17) as f64 - 8.0).collect();
        let base = tensor(&storage, &shape, dtype, device)?;
        let chain = vec![format!("{dtype} {shape:?}")];
        Ok(Self { tensor: base.clone(), indices: IndexMap::contiguous(&shape), storage, base, chain })
    }

    fn values(&self) -> Vec<f64> {
        self.indices.values(&self.storage)
    }

    /// Adds a random view to the chain.
    fn add_random_view(&mut self, rng: &mut SplitMix64) -> Result<()> {
        let (x, p) = (&self.tensor, &self.indices);
        let rank = p.shape.len();
        if rank == 0 {
            return self.push_view(
                "unsqueeze(0)",
                x.unsqueeze(0)?,
                IndexMap { shape: vec![1], offsets: p.offsets.clone() },
            );
        }
        let (dim, other) = (rng.below(rank), rng.below(rank));
        let (n, d) = (p.shape[dim], dim as isize);
        match rng.below(10) {
            0 => {
                let start = rng.below(n);
                let length = 1 + rng.below(n - start);
                let text = format!("narrow({dim}, {start}, {length})");
                self.push_view(&text, x.narrow(d, start, length)?, p.remap_dim(dim, length, |i| start + i))
            }
            1 => {
                let (start, step) = (rng.below(n), 1 + rng.below(3));
                let text = format!("slice_dim({dim}, {start}, {n}, {step})");
                let left = (n - start).div_ceil(step);
                self.push_view(
                    &text,
                    x.slice_dim(d, start, n, step)?,
                    p.remap_dim(dim, left, |i| start + i * step),
                )
            }
            2 => {
                let mut shape = p.shape.clone();
                shape.swap(dim, other);
                let indices = p.remap(shape, |index| {
                    let mut index = index.to_vec();
                    index.swap(dim, other);
                    index
                });
                self.push_view(
                    &format!("transpose({dim}, {other})"),
                    x.transpose(d, other as isize)?,
                    indices,
                )
            }
            3 => {
                // Rotates all dimensions.
                let order: Vec<usize> = (0..rank).map(|i| (i + dim) % rank).collect();
                let shape = order.iter().map(|&i| p.shape[i]).collect();
                let indices =
                    p.remap(shape, |index| (0..rank).map(|i| index[(i + rank - dim) % rank]).collect());
                let signed: Vec<isize> = order.iter().map(|&i| i as isize).collect();
                self.push_view(&format!("permute({order:?})"), x.permute(&signed)?, indices)
            }
            4 => {
                let times = 1 + rng.below(3);
                let mut shape = p.shape.clone();
                shape.insert(0, times);
                let indices = p.remap(shape.clone(), |index| index[1..].to_vec());
                let signed: Vec<isize> = shape.iter().map(|&n| n as isize).collect();
                self.push_view(&format!("expand({shape:?})"), x.expand(&signed)?, indices)
            }
            5 => {
                let index = rng.below(n);
                let mut shape = p.shape.clone();
                shape.remove(dim);
                let indices = p.remap(shape, |rest| {
                    let mut rest = rest.to_vec();
                    rest.insert(dim, index);
                    rest
                });
                self.push_view(&format!("select({dim}, {index})"), x.select(d, index as isize)?, indices)
            }
            6 => {
                let (size, step) = (1 + rng.below(n), 1 + rng.below(2));
                let mut shape = p.shape.clone();
                shape[dim] = (n - size) / step + 1;
                shape.push(size);
                let indices = p.remap(shape, |index| {
                    let mut old = index[..rank].to_vec();
                    old[dim] = index[dim] * step + index[rank];
                    old
                });
                self.push_view(&format!("unfold({dim}, {size}, {step})"), x.unfold(d, size, step)?, indices)
            }
            7 if dim != other => {
                let offset = rng.below(p.shape[other]);
                let length = n.min(p.shape[other] - offset);
                let mut shape: Vec<usize> =
                    (0..rank).filter(|i| *i != dim && *i != other).map(|i| p.shape[i]).collect();
                shape.push(length);
                let indices = p.remap(shape, |index| {
                    let (&along, rest) = index.split_last().unwrap_or((&0, &[]));
                    let mut rest = rest.iter();
                    let part = |i: usize| match i {
                        _ if i == dim => along,
                        _ if i == other => along + offset,
                        _ => *rest.next().unwrap_or(&0),
                    };
                    (0..rank).map(part).collect()
                });
                let text = format!("diagonal({offset}, {dim}, {other})");
                self.push_view(&text, x.diagonal(offset as isize, d, other as isize)?, indices)
            }
            8 => {
                // `flip` copies, so the storage is new from here on.
                let y = x.flip([d])?;
                let flipped = p.remap_dim(dim, n, |i| n - 1 - i);
                self.storage = flipped.values(&self.storage);
                self.base = y.clone();
                let indices = IndexMap::contiguous(&flipped.shape);
                self.push_view(&format!("flip({dim})"), y, indices)
            }
            _ => {
                let y = x.reshape(&[-1_isize][..])?;
                let indices = IndexMap { shape: vec![p.offsets.len()], offsets: p.offsets.clone() };
                if !y.shares_storage(x) {
                    self.storage = indices.values(&self.storage);
                    self.base = y.clone();
                    let indices = IndexMap::contiguous(&indices.shape);
                    return self.push_view("reshape(-1), a copy", y, indices);
                }
                self.push_view("reshape(-1)", y, indices)
            }
        }
    }

    fn push_view(&mut self, text: &str, tensor: Tensor, indices: IndexMap) -> Result<()> {
        self.chain.push(text.to_owned());
        ensure!(tensor.shape() == indices.shape, "shape {:?}, expected {:?}", tensor.shape(), indices.shape);
        (self.tensor, self.indices) = (tensor, indices);
        Ok(())
    }

    /// Runs a random operation on the view, and compares its result.
    fn check_random_op(&mut self, rng: &mut SplitMix64, dtype: DType, device: &Device) -> Result<()> {
        let (x, values) = (&self.tensor, self.values());
        ensure_values(x, &values).context("the view itself")?;
        let shape = self.indices.shape.clone();
        let rank = shape.len();
        let what = rng.below(10);
        if rank == 0 || what >= 7 {
            return self.check_inplace_write(what, dtype, device);
        }
        let dim = rng.below(rank);
        let (n, d) = (shape[dim], dim as isize);
        // Values along the dimension, one list for each outer index.
        let inner: usize = shape[dim + 1..].iter().product();
        let lists: Vec<Vec<f64>> = (0..values.len() / n)
            .map(|k| (0..n).map(|i| values[(k / inner * n + i) * inner + k % inner]).collect())
            .collect();
        let unlist = |lists: &[Vec<f64>]| -> Vec<f64> {
            let n = lists.first().map_or(0, Vec::len);
            let position = |at: usize| (at / (n * inner) * inner + at % inner, at / inner % n);
            (0..lists.len() * n).map(position).map(|(list, i)| lists[list][i]).collect()
        };
        self.chain.push(format!("operation {what} along {dim}"));
        match what {
            0 => ensure_values(&x.mul(3)?.add(x)?, &values.iter().map(|v| 4.0 * v).collect::<Vec<_>>()),
            1 => {
                let sums: Vec<f64> = lists.iter().map(|list| list.iter().sum()).collect();
                ensure_values(&x.sum([d], false)?, &sums)
            }
            2 => {
                let largest: Vec<f64> =
                    lists.iter().map(|l| l.iter().copied().fold(f64::MIN, f64::max)).collect();
                ensure_values(&x.amax([d], false)?, &largest)
            }
            3 => {
                let index: Vec<i32> = (0..1 + rng.below(4)).map(|_| rng.below(n) as i32).collect();
                let index = Tensor::from_slice(&index, [index.len()], device)?;
                let picked = index.to_f64s()?;
                let lists: Vec<Vec<f64>> =
                    lists.iter().map(|list| picked.iter().map(|&i| list[i as usize]).collect()).collect();
                ensure_values(&x.index_select(d, &index)?, &unlist(&lists))
            }
            4 => {
                let joined: Vec<Vec<f64>> = lists.iter().map(|list| [&list[..], list].concat()).collect();
                ensure_values(&cat(&[x, x], d)?, &unlist(&joined))
            }
            5 if dtype == DType::F32 => {
                let soft = |list: &Vec<f64>| {
                    let largest = list.iter().copied().fold(f64::MIN, f64::max);
                    let parts: Vec<f64> = list.iter().map(|v| (v - largest).exp()).collect();
                    let sum: f64 = parts.iter().sum();
                    parts.iter().map(|v| v / sum).collect::<Vec<f64>>()
                };
                let soft: Vec<Vec<f64>> = lists.iter().map(soft).collect();
                ensure_close(&x.softmax(d)?.to_f64s()?, &unlist(&soft), 1e-5, 1e-7)
            }
            6 if dtype == DType::F32 && rank == 2 => {
                let (rows, columns) = (shape[0], shape[1]);
                let product = |at: usize| {
                    let (i, j) = (at / rows, at % rows);
                    (0..columns).map(|k| values[i * columns + k] * values[j * columns + k]).sum()
                };
                let products: Vec<f64> = (0..rows * rows).map(product).collect();
                // The values are small integers, so sums are exact in any order.
                ensure_close(&x.matmul(&x.t()?)?.to_f64s()?, &products, 0.0, 0.0)
            }
            _ => {
                let index: Vec<i32> = values.iter().map(|v| (*v as i32).rem_euclid(n as i32)).collect();
                let picked = Tensor::from_slice(&index, &shape, device)?;
                let taken = |at: usize| lists[at / (n * inner) * inner + at % inner][index[at] as usize];
                ensure_values(&x.gather(d, &picked)?, &(0..values.len()).map(taken).collect::<Vec<_>>())
            }
        }
    }

    /// Writes into the view: its elements change, and nothing else in the storage.
    fn check_inplace_write(&mut self, what: usize, dtype: DType, device: &Device) -> Result<()> {
        self.chain.push(format!("write {what}"));
        let x = &self.tensor;
        let new: Vec<f64> = match what {
            7 => self.values().iter().map(|v| v + 2.0).collect(),
            8 => vec![5.0; self.indices.offsets.len()],
            _ => (0..self.indices.offsets.len()).map(|i| (i % 11) as f64).collect(),
        };
        let done = match what {
            7 => x.add_(2),
            8 => x.fill_(5),
            _ => x.copy_(&tensor(&new, &self.indices.shape, dtype, device)?),
        };
        if self.indices.overlaps() {
            ensure!(done.is_err(), "elements that share memory were written");
        } else {
            done?;
            for (&at, value) in self.indices.offsets.iter().zip(new) {
                self.storage[at] = value;
            }
        }
        ensure_values(&self.base, &self.storage)
    }
}

fn tensor(values: &[f64], shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    Ok(match dtype {
        DType::I32 => {
            Tensor::from_slice(&values.iter().map(|v| *v as i32).collect::<Vec<_>>(), shape, device)?
        }
        _ => Tensor::from_slice(&values.iter().map(|v| *v as f32).collect::<Vec<_>>(), shape, device)?,
    })
}

/// Reads a number from an environment variable.
fn number(name: &str, default: u64) -> Result<u64> {
    std::env::var(name)
        .map_or(Ok(default), |text| text.trim().parse().with_context(|| format!("{name}={text}")))
}

fn views_and_operations_on_them_are_plain_loops(device: &Device) -> Result<()> {
    let (rounds, seed) = (number("FOREBAY_FUZZ_ROUNDS", ROUNDS)?, number("FOREBAY_FUZZ_SEED", 1)?);
    for dtype in [DType::F32, DType::I32] {
        for round in 0..rounds {
            let mut rng = SplitMix64(seed.wrapping_mul(1 << 32).wrapping_add(round));
            let mut case = ViewChain::new(1 + round % 3, dtype, &mut rng, device)?;
            let mut run = || -> Result<()> {
                for _ in 0..1 + rng.below(MAX_CHAIN_VIEWS) {
                    if case.indices.offsets.len() > MAX_VIEW_NUMEL || case.indices.shape.len() > 5 {
                        break;
                    }
                    case.add_random_view(&mut rng)?;
                }
                case.check_random_op(&mut rng, dtype, device)
            };
            let done = run();
            done.with_context(|| format!("round {round} of seed {seed}: {}", case.chain.join(", ")))?;
        }
    }
    Ok(())
}
