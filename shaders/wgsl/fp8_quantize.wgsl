{#-
Casts a tensor to 8-bit floats after division by a scale, and writes the scale. The scale is the smallest power of two
that brings the largest magnitude into the range of the type.

dtype: f32, f16 or bf16; the largest magnitude is one value of it · to: `f8_e4m3` or `f8_e5m2`
width: elements of a step, 4 or 1
transposed: also writes the transpose of a matrix whose extents are multiples of 16; a workgroup has a tile of
  64 x 64
steps_per_thread: steps of a thread, if nothing is transposed
If the largest magnitude is NaN, the scale and all bytes are NaN. If it is infinite, so is the scale: infinite elements
become NaN, others 0.
-#}
{%- import "types" as t -%}
{%- set bias = 8 if to == "f8_e4m3" else 15 -%}
{{ t.prelude() }}
struct Params {
    rows: u32,
    columns: u32,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.quads(0, "x", dtype) if width == 4 else t.input(0, "x", dtype) }}
{{ t.input(1, "largest", dtype) }}
@group(0) @binding(2) var<storage, read_write> scale: array<u32>;
@group(0) @binding(3) var<storage, read_write> bytes: array<u32>;
{% if transposed %}
@group(0) @binding(4) var<storage, read_write> transposed: array<u32>;
// One word of padding for each row, so that columns are in different banks.
var<workgroup> tile: array<u32, 1088>;
{% endif %}
{{ t.bits_function("byte", to) }}

// Packs two values in the type's range, the first in the low byte. CUDA has an instruction (intrinsics.rs
// in backend-cuda).
fn byte_pair_in_range_{{ to }}(a: f32, b: f32) -> u32 { return byte_bits(a) | (byte_bits(b) << 8u); }

const INFINITE = 0x7f800000u;

// Bits of the scale for the bits of the largest magnitude. The largest value of {{ to }} is 1.75 times 2^{{ bias }}.
fn scale_for(magnitude: u32) -> u32 {
    if magnitude >= INFINITE { return magnitude; }
    // 1e-30: below any relevant magnitude.
    let m = max(magnitude, 0x0da24260u);
    let up = select(0u, 0x800000u, (m & 0x7fffffu) > 0x600000u);
    return (m & 0x7f800000u) + up - {{ bias }}u * 0x800000u;
}

fn pack_bytes(v: vec4<f32>, scale_bits: u32) -> u32 {
    if scale_bits < INFINITE {
        // Exact, because the inverse is a power of two as well.
        let inverse = bitcast<f32>(0x7f000000u - scale_bits);
        return byte_pair_in_range_{{ to }}(v.x * inverse, v.y * inverse)
            | (byte_pair_in_range_{{ to }}(v.z * inverse, v.w * inverse) << 16u);
    }
    let non_finite = ((bitcast<vec4<u32>>(v) & vec4<u32>(0x7fffffffu)) >= vec4<u32>(INFINITE))
        | vec4<bool>(scale_bits > INFINITE);
    let nan_bytes = select(vec4<u32>(0u), vec4<u32>(0x7fu), non_finite);
    return nan_bytes.x | (nan_bytes.y << 8u) | (nan_bytes.z << 16u) | (nan_bytes.w << 24u);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let group = group_index(id, groups);
    let scale_bits = scale_for(bitcast<u32>(largest_at(0u)) & 0x7fffffffu);
    if (group | thread) == 0u { scale[0] = scale_bits; }
    {% if transposed %}
    let tiles_n = (p.columns + 63u) / 64u;
    let row = group / tiles_n * 64u;
    let column = group % tiles_n * 64u;
    for (var k = thread; k < 1024u; k += 256u) {
        let r = k / 16u;
        let c = k % 16u;
        if row + r < p.rows && column + c * 4u < p.columns {
            let at = ((row + r) * p.columns + column) / 4u + c;
            let word = pack_bytes(x_quad(at), scale_bits);
            bytes[at] = word;
            tile[r * 17u + c] = word;
        }
    }
    workgroupBarrier();
    for (var k = thread; k < 1024u; k += 256u) {
        let c = k / 16u;
        let r = k % 16u;
        if row + r * 4u < p.rows && column + c < p.columns {
            let start = r * 68u + c / 4u;
            let shift = (c & 3u) * 8u;
            let word = vec4<u32>(tile[start], tile[start + 17u], tile[start + 34u], tile[start + 51u])
                >> vec4<u32>(shift);
            let low = word & vec4<u32>(0xffu);
            transposed[((column + c) * p.rows + row) / 4u + r] =
                low.x | (low.y << 8u) | (low.z << 16u) | (low.w << 24u);
        }
    }
    {% else %}
    let n = p.rows * p.columns;
    let first = group * {{ 256 * steps_per_thread }}u + thread;
    for (var i = first; i < min((n + 3u) / 4u, first + {{ 256 * steps_per_thread }}u); i += 256u) {
        {% if width == 4 %}
        let v = x_quad(i);
        {% else %}
        var v = vec4<f32>(0.0);
        for (var k = 0u; k < min(n - 4u * i, 4u); k++) { v[k] = x_at(4u * i + k); }
        {% endif %}
        bytes[i] = pack_bytes(v, scale_bits);
    }
    {% endif %}
}
