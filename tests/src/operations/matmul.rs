//! Matrix products.

use super::prelude::*;

/// Returns the factors of the sum and of the product.
fn addmm_options(a: &Args<'_>) -> anyhow::Result<AddmmOptions> {
    Ok(AddmmOptions { beta: a.float(NAMED, "beta", 1.0)?, alpha: a.float(NAMED, "alpha", 1.0)? })
}

pub(super) fn register(ops: &mut Registry) {
    ops.add(method!(matmul(t1)))
        .case(
            smooth("matmul", &[Signed(&[3, 4]), Signed(&[4, 5])], |x| x[0].matmul(&x[1]))
                .with_flops(cost::matmul_flops)
                .with_bench_inputs(&[Signed(&[2048, 2048]), Signed(&[2048, 2048])])
                .with_batched_inputs(1),
        )
        .case(
            smooth("matmul of batches", &[Signed(&[2, 1, 3, 4]), Signed(&[3, 4, 2])], |x| x[0].matmul(&x[1]))
                .with_flops(cost::matmul_flops)
                .with_bench_inputs(&[Signed(&[16, 1, 512, 512]), Signed(&[4, 512, 512])])
                .with_batched_inputs(1),
        )
        .case(
            smooth("matmul with a vector", &[Signed(&[2, 3, 4]), Signed(&[4])], |x| x[0].matmul(&x[1]))
                .with_flops(cost::matmul_flops)
                .with_bench_inputs(&[Signed(&[64, 512, 1024]), Signed(&[1024])]),
        )
        .case(
            smooth("matmul of transposes", &[Signed(&[4, 3]), Signed(&[5, 4])], |x| {
                x[0].t()?.matmul(&x[1].t()?)
            })
            .with_flops(|x, y| 2 * cost::numel(y) * cost::extent(&x[0], 0))
            .with_bench_inputs(&[Signed(&[2048, 2048]), Signed(&[2048, 2048])]),
        )
        .case(
            smooth("matmul of large matrices", &[Signed(&[65, 70]), Signed(&[70, 66])], |x| {
                x[0].matmul(&x[1])
            })
            .with_flops(cost::matmul_flops),
        )
        .golden_as("__rmatmul__", |a| single(a.tensor(1)?.matmul(a.tensor(0)?)))
        .golden(|a| single(a.tensor(0)?.matmul(a.tensor(1)?)));
    ops.add(method!(dot(t1)))
        .case(
            smooth("dot", &[Signed(&[9]), Signed(&[9])], |x| x[0].dot(&x[1]))
                .with_flops(|x, _| 2 * cost::numel(&x[0])),
        )
        .golden(|a| single(a.tensor(0)?.dot(a.tensor(1)?)));
    ops.add(method!(outer(t1)))
        .case(smooth("outer", &[Signed(&[3]), Signed(&[4])], |x| x[0].outer(&x[1])))
        .golden(|a| single(a.tensor(0)?.outer(a.tensor(1)?)));
    ops.add(method!(addmm(t1, t2, AddmmOptions { beta: float, alpha: float })))
        .case(
            smooth("addmm", &[Signed(&[5]), Signed(&[3, 4]), Signed(&[4, 5])], |x| {
                x[0].addmm(&x[1], &x[2], &AddmmOptions { beta: 0.5, alpha: 2.0 })
            })
            .with_flops(|x, y| cost::matmul_flops(&x[1..], y))
            .with_bench_inputs(&[Signed(&[2048]), Signed(&[2048, 2048]), Signed(&[2048, 2048])]),
        )
        .golden(|a| single(a.tensor(0)?.addmm(a.tensor(1)?, a.tensor(2)?, &addmm_options(a)?)));
    ops.add(method!(linear(t1, maybe2)))
        .case(
            smooth("linear", &[Signed(&[2, 3, 4]), Signed(&[5, 4]), Signed(&[5])], |x| {
                x[0].linear(&x[1], Some(&x[2]))
            })
            .with_flops(cost::matmul_flops)
            .with_bench_inputs(&[Signed(&[8, 1024, 1024]), Signed(&[4096, 1024]), Signed(&[4096])])
            .with_batched_inputs(1),
        )
        .golden(|a| single(a.tensor(0)?.linear(a.tensor(1)?, a.opt_tensor(2, "bias"))));
    ops.add(method!(mlp(t1, t2, t3, t4))).case(
        smooth(
            "mlp",
            &[Signed(&[2, 3, 4]), Signed(&[8, 4]), Bounded(&[8]), Signed(&[5, 8]), Bounded(&[5])],
            |x| x[0].mlp(&x[1], &x[2], &x[3], &x[4]),
        )
        .with_tolerances(case::ONE_ROUNDING_NEAR_4)
        .with_flops(|x, _| 2 * cost::num_rows(&x[0]) * (cost::numel(&x[1]) + cost::numel(&x[3])))
        .with_bench_inputs(&[
            Signed(&[8, 1024, 768]),
            Signed(&[3072, 768]),
            Signed(&[3072]),
            Signed(&[768, 3072]),
            Signed(&[768]),
        ])
        .with_batched_inputs(1),
    );
    ops.add(method!(bilinear(t1, t2, maybe3)))
        .case(
            smooth("bilinear", &[Signed(&[2, 3]), Signed(&[2, 4]), Signed(&[5, 3, 4]), Bounded(&[5])], |x| {
                x[0].bilinear(&x[1], &x[2], Some(&x[3]))
            })
            .with_flops(|x, y| {
                2 * (cost::num_rows(&x[0]) * cost::numel(&x[2]) + cost::numel(y) * cost::extent(&x[1], 1))
            })
            .with_tolerances(case::ONE_ROUNDING_NEAR_4),
        )
        .golden(|a| single(a.tensor(0)?.bilinear(a.tensor(1)?, a.tensor(2)?, a.opt_tensor(3, "bias"))));
    ops.add(function!(einsum(equation, tensors)))
        .case(
            smooth("einsum", &[Signed(&[2, 3, 4]), Signed(&[4, 3, 5])], |x| {
                einsum("bij,jik->bk", &[&x[0], &x[1]])
            })
            .with_flops(|x, _| 2 * cost::numel(&x[0]) * cost::extent(&x[1], 2)),
        )
        .golden(|a| {
            let equation = a.string(1, "equation", "").to_owned();
            single(einsum(&equation, &a.tensors(0)?))
        });
    ops.add(method!(mm(t1)))
        .case(
            smooth("mm", &[Signed(&[3, 4]), Signed(&[4, 5])], |x| x[0].mm(&x[1]))
                .with_flops(cost::matmul_flops),
        )
        .golden(|a| single(a.tensor(0)?.mm(a.tensor(1)?)));
    ops.add(method!(bmm(t1)))
        .case(
            smooth("bmm", &[Signed(&[2, 3, 4]), Signed(&[2, 4, 5])], |x| x[0].bmm(&x[1]))
                .with_flops(cost::matmul_flops),
        )
        .golden(|a| single(a.tensor(0)?.bmm(a.tensor(1)?)));
    ops.add(method!(mv(t1)))
        .case(
            smooth("mv", &[Signed(&[3, 4]), Signed(&[4])], |x| x[0].mv(&x[1])).with_flops(cost::matmul_flops),
        )
        .golden(|a| single(a.tensor(0)?.mv(a.tensor(1)?)));
    ops.add(method!(inner(t1)))
        .case(
            smooth("inner", &[Signed(&[3, 4]), Signed(&[2, 4])], |x| x[0].inner(&x[1]))
                .with_flops(cost::matmul_flops),
        )
        .golden(|a| single(a.tensor(0)?.inner(a.tensor(1)?)));
    ops.add(method!(addmv(t1, t2, AddmmOptions { beta: float, alpha: float })))
        .case(
            smooth("addmv", &[Signed(&[3]), Signed(&[3, 4]), Signed(&[4])], |x| {
                x[0].addmv(&x[1], &x[2], &AddmmOptions { beta: 0.5, alpha: 2.0 })
            })
            .with_flops(|x, y| cost::matmul_flops(&x[1..], y)),
        )
        .golden(|a| single(a.tensor(0)?.addmv(a.tensor(1)?, a.tensor(2)?, &addmm_options(a)?)));
    ops.add(method!(addr(t1, t2, AddmmOptions { beta: float, alpha: float })))
        .case(smooth("addr", &[Signed(&[3, 4]), Signed(&[3]), Signed(&[4])], |x| {
            x[0].addr(&x[1], &x[2], &AddmmOptions { beta: 0.5, alpha: 2.0 })
        }))
        .golden(|a| single(a.tensor(0)?.addr(a.tensor(1)?, a.tensor(2)?, &addmm_options(a)?)));
    ops.add(method!(baddbmm(t1, t2, AddmmOptions { beta: float, alpha: float })))
        .case(
            smooth("baddbmm", &[Signed(&[3, 5]), Signed(&[2, 3, 4]), Signed(&[2, 4, 5])], |x| {
                x[0].baddbmm(&x[1], &x[2], &AddmmOptions { beta: 0.5, alpha: 2.0 })
            })
            .with_flops(|x, y| cost::matmul_flops(&x[1..], y)),
        )
        .golden(|a| single(a.tensor(0)?.baddbmm(a.tensor(1)?, a.tensor(2)?, &addmm_options(a)?)));
    ops.add(method!(addbmm(t1, t2, AddmmOptions { beta: float, alpha: float })))
        .case(
            smooth("addbmm", &[Signed(&[3, 5]), Signed(&[2, 3, 4]), Signed(&[2, 4, 5])], |x| {
                x[0].addbmm(&x[1], &x[2], &AddmmOptions { beta: 0.5, alpha: 2.0 })
            })
            .with_flops(|x, _| 2 * cost::numel(&x[1]) * cost::extent(&x[2], 2)),
        )
        .golden(|a| single(a.tensor(0)?.addbmm(a.tensor(1)?, a.tensor(2)?, &addmm_options(a)?)));
    ops.add(method!(scaled_mm(t1, t2, t3, maybe4, dtype))).case(
        nondifferentiable("scaled_mm", &[Bounded(&[32, 16]), Bounded(&[32, 16])], |x| {
            let (a, b) = (x[0].to_dtype(DType::F8E4M3)?, x[1].to_dtype(DType::F8E4M3)?.t()?);
            let scale = Tensor::full((), 0.5, DType::F32, x[0].device())?;
            a.scaled_mm(&b, &scale, &scale, None, DType::BF16)
        })
        .with_flops(cost::matmul_flops)
        .with_bench_inputs(&[Bounded(&[4096, 4096]), Bounded(&[4096, 4096])]),
    );
}
