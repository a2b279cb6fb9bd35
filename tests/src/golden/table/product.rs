//! Matrix products.

use super::{Table, one};

pub(super) fn register(t: &mut Table) {
    t.op("matmul", |a| one(a.t(0)?.matmul(a.t(1)?)));
    t.op("mm", |a| one(a.t(0)?.mm(a.t(1)?)));
    t.op("bmm", |a| one(a.t(0)?.bmm(a.t(1)?)));
    t.op("mv", |a| one(a.t(0)?.mv(a.t(1)?)));
    t.op("dot", |a| one(a.t(0)?.dot(a.t(1)?)));
    t.op("outer", |a| one(a.t(0)?.outer(a.t(1)?)));
    t.op("inner", |a| one(a.t(0)?.inner(a.t(1)?)));
    t.op("nn.functional.linear", |a| one(a.t(0)?.linear(a.t(1)?, a.opt_t(2, "bias"))));
    t.op("addmm", |a| one(a.t(0)?.addmm(a.t(1)?, a.t(2)?, a.f(9, "beta", 1.0)?, a.f(9, "alpha", 1.0)?)));
    t.op("addmv", |a| one(a.t(0)?.addmv(a.t(1)?, a.t(2)?, a.f(9, "beta", 1.0)?, a.f(9, "alpha", 1.0)?)));
    t.op("addr", |a| one(a.t(0)?.addr(a.t(1)?, a.t(2)?, a.f(9, "beta", 1.0)?, a.f(9, "alpha", 1.0)?)));
    t.op("baddbmm", |a| one(a.t(0)?.baddbmm(a.t(1)?, a.t(2)?, a.f(9, "beta", 1.0)?, a.f(9, "alpha", 1.0)?)));
    t.op("addbmm", |a| one(a.t(0)?.addbmm(a.t(1)?, a.t(2)?, a.f(9, "beta", 1.0)?, a.f(9, "alpha", 1.0)?)));
}
