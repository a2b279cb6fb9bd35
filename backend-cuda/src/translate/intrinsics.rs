//! Functions of the kernels that map to a CUDA instruction: they keep their signature, and the prelude has
//! their body.

/// Suffixes of WGSL function names, and the functions of the prelude that replace them.
const INTRINSICS: [(&str, &str); 16] = [
    ("m_exp", "exp_any"),
    ("m_exp_down", "exp_any"),
    ("m_rcp_normal", "rcp_normal"),
    ("m_or_nan", "keep_nan"),
    ("m_nan_unless_finite", "keep_nan"),
    ("m_approx_exp2", "approx_exp2"),
    ("m_approx_rcp", "approx_rcp"),
    ("m_mul_wide", "mul_wide"),
    ("_pair_bf16", "pair_bf16"),
    ("_pair_f16", "pair_f16"),
    ("_pair_in_range_f8_e4m3", "pair_e4m3"),
    ("_pair_in_range_f8_e5m2", "pair_e5m2"),
    ("m_pair_bf16_max", "pair_bf16_max"),
    ("m_pair_f16_max", "pair_f16_max"),
    ("m_pair_bf16_mark_nan", "pair_bf16_mark_nan"),
    ("m_pair_f16_mark_nan", "pair_f16_mark_nan"),
];

/// Returns the prelude's function that replaces a WGSL function.
pub(super) fn find_intrinsic(name: &str) -> Option<&'static str> {
    INTRINSICS.iter().find(|(end, _)| name.ends_with(end)).map(|(_, native)| *native)
}

#[cfg(test)]
mod tests {
    /// Evaluates `rcp_normal` of the prelude for an approximation that is off by `error` ulp.
    fn rcp_normal(x: f32, error: f64) -> f32 {
        let r = (1.0 / f64::from(x) + error * ulp(1.0 / f64::from(x))) as f32;
        r.mul_add((-x).mul_add(r, 1.0), r)
    }

    fn ulp(exact: f64) -> f64 {
        f64::from((exact as f32).next_up()) - f64::from(exact as f32)
    }

    fn ulps(got: f32, exact: f64) -> f64 {
        (f64::from(got) - exact).abs() / ulp(exact)
    }

    /// The documented errors are 1 ulp of `rcp.approx` and 2 ulp of `expf`, of which rounding is half an ulp here.
    #[test]
    fn errors_of_the_instructions_stay_within_the_bounds_of_the_functions() {
        let mut largest = [0f64; 3];
        for k in 0..200_000 {
            let x = f64::from(k) * (87.0 / 200_000.0);
            for (rcp, exp) in [(-0.5, -1.5), (-0.5, 1.5), (0.5, -1.5), (0.5, 1.5)] {
                let e = ((-x).exp() + exp * ulp((-x).exp())) as f32;
                let w = 1.0 + e.min(1.0);
                let d = rcp_normal(w, rcp);
                let tail = (-x).exp() / (1.0 + (-x).exp());
                let errors = [ulps(d, 1.0 / f64::from(w)), ulps(d, 1.0 - tail), ulps(e * d, tail)];
                largest.iter_mut().zip(errors).for_each(|(most, error)| *most = most.max(error));
            }
        }
        let [reciprocal, right, left] = largest;
        assert!(reciprocal <= 1.0, "a Newton step leaves {reciprocal} ulp");
        assert!(right <= 3.0 && left <= 6.0, "the sigmoid has errors of {right} and {left} ulp");
    }
}
