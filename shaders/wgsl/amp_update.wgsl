{#-
Updates the loss scale after a step: backs off if a flag is set, and grows after enough steps without. One
  thread.
-#}
{% include "math/base" %}
struct Params {
    growth: f32,
    backoff: f32,
    interval: f32,
    flags: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
// Scale, its inverse, steps since it changed, unused; then the flags, which are cleared.
@group(0) @binding(0) var<storage, read_write> state: array<u32>;

@compute @workgroup_size(1)
fn main() {
    var found = 0u;
    for (var i = 4u; i < 4u + p.flags; i++) {
        found |= state[i];
        state[i] = 0u;
    }
    var scale = bitcast<f32>(state[0]);
    var steps = bitcast<f32>(state[2]) + 1.0;
    if found != 0u {
        scale *= p.backoff;
        steps = 0.0;
    } else if steps >= p.interval {
        let grown = scale * p.growth;
        // Up to 2^126 (compared by bits: `grown` may be infinite), beyond which the inverse is no normal
        // float.
        if m_bits(grown) <= 0x7e800000u { scale = grown; }
        steps = 0.0;
    }
    state[0] = bitcast<u32>(scale);
    state[1] = bitcast<u32>(1.0 / scale);
    state[2] = bitcast<u32>(steps);
}
