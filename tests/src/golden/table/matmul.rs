//! Matrix products.

use super::{OpTable, single};
use forebay::ops::AddmmOptions;

pub(super) fn register(t: &mut OpTable) {
    t.register("matmul", |a| single(a.tensor(0)?.matmul(a.tensor(1)?)));
    t.register("mm", |a| single(a.tensor(0)?.mm(a.tensor(1)?)));
    t.register("bmm", |a| single(a.tensor(0)?.bmm(a.tensor(1)?)));
    t.register("mv", |a| single(a.tensor(0)?.mv(a.tensor(1)?)));
    t.register("dot", |a| single(a.tensor(0)?.dot(a.tensor(1)?)));
    t.register("outer", |a| single(a.tensor(0)?.outer(a.tensor(1)?)));
    t.register("inner", |a| single(a.tensor(0)?.inner(a.tensor(1)?)));
    t.register("nn.functional.linear", |a| {
        single(a.tensor(0)?.linear(a.tensor(1)?, a.opt_tensor(2, "bias")))
    });
    t.register("addmm", |a| {
        single(a.tensor(0)?.addmm(
            a.tensor(1)?,
            a.tensor(2)?,
            &AddmmOptions { beta: a.float(9, "beta", 1.0)?, alpha: a.float(9, "alpha", 1.0)? },
        ))
    });
    t.register("addmv", |a| {
        single(a.tensor(0)?.addmv(
            a.tensor(1)?,
            a.tensor(2)?,
            &AddmmOptions { beta: a.float(9, "beta", 1.0)?, alpha: a.float(9, "alpha", 1.0)? },
        ))
    });
    t.register("addr", |a| {
        single(a.tensor(0)?.addr(
            a.tensor(1)?,
            a.tensor(2)?,
            &AddmmOptions { beta: a.float(9, "beta", 1.0)?, alpha: a.float(9, "alpha", 1.0)? },
        ))
    });
    t.register("baddbmm", |a| {
        single(a.tensor(0)?.baddbmm(
            a.tensor(1)?,
            a.tensor(2)?,
            &AddmmOptions { beta: a.float(9, "beta", 1.0)?, alpha: a.float(9, "alpha", 1.0)? },
        ))
    });
    t.register("addbmm", |a| {
        single(a.tensor(0)?.addbmm(
            a.tensor(1)?,
            a.tensor(2)?,
            &AddmmOptions { beta: a.float(9, "beta", 1.0)?, alpha: a.float(9, "alpha", 1.0)? },
        ))
    });
}
