{#-
Buffers of every element type, as macros.

A buffer NAME of dtype D defines `NAME_at(i)`, the i-th element in D's compute type, and for outputs
`NAME_put(i, v)`. 16-bit and 8-bit elements are in 32-bit words: WGSL has no smaller storage on all devices.
An output of such a type is `packed` or `scattered`. `packed`: a thread writes whole words with `NAME_put4`.
`scattered`: any element at any time, and no other thread changes this element's bits. Devices with 16-bit integers
(the global `stores_u16`) store elements of 16 bits one by one; otherwise the word is changed atomically.
`i64w` is an i64 as its two words, the lower one first, for devices without 64-bit integers. i64w computes with it.
`f8_e4m3` and `f8_e5m2` are PyTorch's float8_e4m3fn and float8_e5m2, computed as f32.
-#}

{%- macro value(dtype) -%}
{%- if dtype in ["f16", "bf16", "f8_e4m3", "f8_e5m2"] -%}f32
{%- elif dtype == "u8" -%}u32
{%- elif dtype == "i64w" -%}vec2<u32>
{%- else -%}{{ dtype }}
{%- endif -%}
{%- endmacro -%}

{%- macro word(dtype) -%}
{%- if dtype in ["f16", "bf16", "u8", "bool", "f8_e4m3", "f8_e5m2"] -%}u32
{%- elif dtype == "i64w" -%}vec2<u32>
{%- else -%}{{ dtype }}
{%- endif -%}
{%- endmacro -%}

{#- A buffer of elements of `size` bytes, 1 or 2, that are written at any time: its elements, element `i` as bits, and
NAME_put_bits(i, bits). -#}
{%- macro scattered_bits(binding, name, size) %}
{% set per_word = 4 // size %}
{% if size == 2 and stores_u16 %}
@group(0) @binding({{ binding }}) var<storage, read_write> {{ name }}: array<u16>;
fn {{ name }}_bits_at(i: u32) -> u32 { return u32({{ name }}[i]); }
fn {{ name }}_put_bits(i: u32, bits: u32) { {{ name }}[i] = u16(bits); }
{% else %}
@group(0) @binding({{ binding }}) var<storage, read_write> {{ name }}: array<atomic<u32>>;
fn {{ name }}_bits_at(i: u32) -> u32 {
    return (atomicLoad(&{{ name }}[i / {{ per_word }}u]) >> ((i % {{ per_word }}u) * {{ size * 8 }}u))
        & {{ "0xffffu" if size == 2 else "0xffu" }};
}
fn {{ name }}_put_bits(i: u32, bits: u32) {
    let old = {{ name }}_bits_at(i);
    atomicXor(&{{ name }}[i / {{ per_word }}u], (old ^ bits) << ((i % {{ per_word }}u) * {{ size * 8 }}u));
}
{% endif %}
{% endmacro -%}

{#- The value of an element of 16 or 8 bits. -#}
{%- macro from_bits(dtype, name, bits) -%}
{%- if dtype == "f16" -%}unpack2x16float({{ bits }}).x
{%- elif dtype == "bf16" -%}bitcast<f32>({{ bits }} << 16u)
{%- elif dtype == "bool" -%}({{ bits }} != 0u)
{%- elif dtype in ["f8_e4m3", "f8_e5m2"] -%}{{ name }}_value({{ bits }})
{%- else -%}{{ bits }}
{%- endif -%}
{%- endmacro -%}

{#- Element `i` of a buffer, extracted from its word: `open` and `close` enclose the word's index. -#}
{%- macro unpack(dtype, name, open, close) -%}
{%- if dtype == "f16" -%}unpack2x16float({{ open }}i >> 1u{{ close }} >> ((i & 1u) * 16u)).x
{%- elif dtype == "bf16" -%}bitcast<f32>(({{ open }}i >> 1u{{ close }} >> ((i & 1u) * 16u)) << 16u)
{%- elif dtype == "u8" -%}(({{ open }}i >> 2u{{ close }} >> ((i & 3u) * 8u)) & 0xffu)
{%- elif dtype in ["f8_e4m3", "f8_e5m2"] -%}{{ name }}_value(({{ open }}i >> 2u{{ close }} >> ((i & 3u) * 8u)) & 0xffu)
{%- elif dtype == "bool" -%}((({{ open }}i >> 2u{{ close }} >> ((i & 3u) * 8u)) & 0xffu) != 0u)
{%- else -%}{{ open }}i{{ close }}
{%- endif -%}
{%- endmacro -%}

{#- f32 to f16 by bits: nearest even, which WGSL's conversion does not guarantee; NaN is 0x7fff, as in
CUDA. -#}
{%- macro f16_bits_function(name) %}
fn {{ name }}_bits(v: f32) -> u32 {
    let b = bitcast<u32>(v);
    let sign = (b >> 16u) & 0x8000u;
    let magnitude = b & 0x7fffffffu;
    if magnitude > 0x7f800000u { return 0x7fffu; }
    if magnitude >= 0x477ff000u { return sign | 0x7c00u; }
    if magnitude < 0x38800000u {
        // Subnormal in f16: shift the mantissa into units of 2^-24 and round the lost bits.
        if magnitude < 0x33000000u { return sign; }
        let shift = 126u - (magnitude >> 23u);
        let mantissa = (magnitude & 0x7fffffu) | 0x800000u;
        let kept = mantissa >> shift;
        let lost = mantissa & ((1u << shift) - 1u);
        let half_way = 1u << (shift - 1u);
        let round_up = select(0u, 1u, (lost > half_way) | ((lost == half_way) & ((kept & 1u) == 1u)));
        return sign | (kept + round_up);
    }
    let rebased = magnitude - 0x38000000u;
    return sign | ((rebased + 0xfffu + ((rebased >> 13u) & 1u)) >> 13u);
}
{% endmacro -%}

{#-
8-bit floats: a byte's value, and f32 to bits, rounded to nearest even. Values out of range become e4m3fn's
largest value (as in PyTorch 2.15), and infinity in e5m2. For each: mantissa bits, exponent bias, the first
magnitude out of range, and its byte.
-#}
{%- macro float8_value(name, dtype) %}
{% if dtype in ["f8_e4m3", "f8_e5m2"] %}
{% set is_e4m3 = dtype == "f8_e4m3" %}
fn {{ name }}_value(bits: u32) -> f32 {
    let sign = (bits & 0x80u) << 24u;
    let magnitude = bits & 0x7fu;
    {% if is_e4m3 %}
    if magnitude == 0x7fu { return bitcast<f32>(sign | 0x7fc00000u); }
    {% else %}
    if magnitude >= 0x7cu { return bitcast<f32>(sign | 0x7f800000u | ((magnitude & 3u) << 21u)); }
    {% endif %}
    // Below the smallest normal value a step is 2^-9 or 2^-16.
    if magnitude < {{ 8 if is_e4m3 else 4 }}u {
        return bitcast<f32>(bitcast<u32>(f32(magnitude) * {{ "0x1p-9f" if is_e4m3 else "0x1p-16f" }}) | sign);
    }
    return bitcast<f32>(sign | ((magnitude << {{ 20 if is_e4m3 else 21 }}u)
        + {{ "0x3c000000u" if is_e4m3 else "0x38000000u" }}));
}
{% endif %}
{% endmacro -%}

{%- macro float8_function(name, mantissa, bias, overflow, overflow_byte) %}
fn {{ name }}_bits(v: f32) -> u32 {
    let b = bitcast<u32>(v);
    let sign = (b >> 24u) & 0x80u;
    let magnitude = b & 0x7fffffffu;
    if magnitude > 0x7f800000u { return sign | 0x7fu; }
    if magnitude >= {{ overflow }} { return sign | {{ overflow_byte }}; }
    let exponent = magnitude >> 23u;
    // Below the smallest normal value the steps stay equal, and more bits are lost.
    var bits = magnitude - {{ 127 - bias }}u * 0x800000u;
    var lost = {{ 23 - mantissa }}u;
    if exponent < {{ 128 - bias }}u {
        bits = (magnitude & 0x7fffffu) | 0x800000u;
        lost = min({{ 151 - bias - mantissa }}u - exponent, 31u);
    }
    let kept = bits >> lost;
    let remainder = bits & ((1u << lost) - 1u);
    let half_way = 1u << (lost - 1u);
    return sign | (kept + select(0u, 1u, (remainder > half_way) | ((remainder == half_way) & ((kept & 1u) == 1u))));
}
{% endmacro -%}

{#- The bits of a value, in the low bits of a u32. bf16 rounds to nearest even; NaN is 0x7fff. -#}
{%- macro bits_function(name, dtype) %}
{% if dtype == "f16" %}
{{ f16_bits_function(name) }}
{% elif dtype == "bf16" %}
fn {{ name }}_bits(v: f32) -> u32 {
    let b = bitcast<u32>(v);
    let rounded = (b + 0x7fffu + ((b >> 16u) & 1u)) >> 16u;
    return select(rounded, 0x7fffu, (b & 0x7fffffffu) > 0x7f800000u);
}
{% elif dtype == "f8_e4m3" %}
{{ float8_function(name, 3, 7, "0x43e80000u", "0x7eu") }}
{% elif dtype == "f8_e5m2" %}
{{ float8_function(name, 2, 15, "0x47800000u", "0x7cu") }}
{% elif dtype == "u8" %}
fn {{ name }}_bits(v: u32) -> u32 { return v & 0xffu; }
{% elif dtype == "bool" %}
fn {{ name }}_bits(v: bool) -> u32 { return select(0u, 1u, v); }
{% endif %}
{% if dtype in ["f16", "bf16"] %}
// Packs two values into a word. CUDA has an instruction (intrinsics.rs in backend-cuda).
fn {{ name }}_pair_{{ dtype }}(a: f32, b: f32) -> u32 { return {{ name }}_bits(a) | ({{ name }}_bits(b) << 16u); }
{% endif %}
{% endmacro -%}

{%- macro input(binding, name, dtype) %}
@group(0) @binding({{ binding }}) var<storage, read> {{ name }}: array<{{ word(dtype) }}>;
{{ float8_value(name, dtype) }}
fn {{ name }}_at(i: u32) -> {{ value(dtype) }} { return {{ unpack(dtype, name, name ~ "[", "]") }}; }
{% endmacro -%}

{%- macro output(binding, name, dtype, mode="scattered") %}
{% if dtype in ["f16", "bf16", "u8", "bool", "f8_e4m3", "f8_e5m2"] %}
{{ bits_function(name, dtype) }}
{{ float8_value(name, dtype) }}
{% if mode == "packed" %}
@group(0) @binding({{ binding }}) var<storage, read_write> {{ name }}: array<u32>;
fn {{ name }}_at(i: u32) -> {{ value(dtype) }} { return {{ unpack(dtype, name, name ~ "[", "]") }}; }
fn {{ name }}_put4(i: u32, v: array<{{ value(dtype) }}, 4>, n: u32) {
    {% if dtype in ["f16", "bf16"] %}
    {{ name }}[i >> 1u] = {{ name }}_pair_{{ dtype }}(v[0], v[1]);
    if i + 2u < n { {{ name }}[(i >> 1u) + 1u] = {{ name }}_pair_{{ dtype }}(v[2], v[3]); }
    {% else %}
    {{ name }}[i >> 2u] = {{ name }}_bits(v[0]) | ({{ name }}_bits(v[1]) << 8u)
        | ({{ name }}_bits(v[2]) << 16u) | ({{ name }}_bits(v[3]) << 24u);
    {% endif %}
}
{% else %}
{{ scattered_bits(binding, name, 2 if dtype in ["f16", "bf16"] else 1) }}
fn {{ name }}_at(i: u32) -> {{ value(dtype) }} { return {{ from_bits(dtype, name, name ~ "_bits_at(i)") }}; }
fn {{ name }}_put(i: u32, v: {{ value(dtype) }}) { {{ name }}_put_bits(i, {{ name }}_bits(v)); }
{% endif %}
{% else %}
@group(0) @binding({{ binding }}) var<storage, read_write> {{ name }}: array<{{ word(dtype) }}>;
fn {{ name }}_at(i: u32) -> {{ value(dtype) }} { return {{ unpack(dtype, name, name ~ "[", "]") }}; }
fn {{ name }}_put(i: u32, v: {{ value(dtype) }}) { {{ name }}[i] = v; }
{% if mode == "packed" %}
fn {{ name }}_put4(i: u32, v: array<{{ value(dtype) }}, 4>, n: u32) {
    {{ name }}_put(i, v[0]);
    if i + 1u < n { {{ name }}_put(i + 1u, v[1]); }
    if i + 2u < n { {{ name }}_put(i + 2u, v[2]); }
    if i + 3u < n { {{ name }}_put(i + 3u, v[3]); }
}
{% endif %}
{% endif %}
{% endmacro -%}

{#- Quads: NAME_quad(i) has elements 4 i to 4 i + 3 in one aligned access. For f32, i32, u32, f16 and
bf16. -#}
{%- macro quad_type(dtype) -%}{{ "vec2<u32>" if dtype in ["f16", "bf16"] else "vec4<" ~ dtype ~ ">" }}{%- endmacro -%}

{#- The values of a quad's words `w`. -#}
{%- macro quad_value(dtype, w) -%}
{%- if dtype == "f16" -%}vec4<f32>(unpack2x16float({{ w }}.x), unpack2x16float({{ w }}.y))
{%- elif dtype == "bf16" -%}
bitcast<vec4<f32>>(vec4<u32>({{ w }}.x << 16u, {{ w }}.x & 0xffff0000u, {{ w }}.y << 16u, {{ w }}.y & 0xffff0000u))
{%- else -%}{{ w }}
{%- endif -%}
{%- endmacro -%}

{%- macro quad_read(name, dtype) %}
fn {{ name }}_quad(i: u32) -> vec4<{{ value(dtype) }}> {
    let w = {{ name }}[i];
    return {{ quad_value(dtype, "w") }};
}
{% endmacro -%}

{%- macro quads(binding, name, dtype) %}
@group(0) @binding({{ binding }}) var<storage, read> {{ name }}: array<{{ quad_type(dtype) }}>;
{{ quad_read(name, dtype) }}
{% endmacro -%}

{#- Quads of an output: NAME_put_quad(i, v) writes, NAME_quad(i) reads. -#}
{%- macro quads_output(binding, name, dtype) %}
@group(0) @binding({{ binding }}) var<storage, read_write> {{ name }}: array<{{ quad_type(dtype) }}>;
{{ bits_function(name, dtype) }}
{{ quad_read(name, dtype) }}
fn {{ name }}_put_quad(i: u32, v: vec4<{{ value(dtype) }}>) {
    {% if dtype in ["f16", "bf16"] %}
    {{ name }}[i] = vec2<u32>({{ name }}_pair_{{ dtype }}(v.x, v.y), {{ name }}_pair_{{ dtype }}(v.z, v.w));
    {% else %}
    {{ name }}[i] = v;
    {% endif %}
}
{% endmacro -%}

{#- An expression of math functions whose result is rounded to `dtype`. Those for 16 bits take fewer instructions. -#}
{%- macro rounded_expression(expr, dtype) -%}
{%- set names = ["m_gelu(", "m_gelu_grad(", "m_gelu_tanh(", "m_gelu_tanh_grad("] -%}
{%- set chosen = namespace(expr=expr) -%}
{%- for name in names if dtype in ["f16", "bf16"] -%}
{%- set chosen.expr = chosen.expr | replace(name, "m_approx_" ~ name[2:]) -%}
{%- endfor -%}
{{ chosen.expr }}
{%- endmacro -%}

{#- Element type of a buffer that is accessed in vectors of 16 bytes. -#}
{%- macro vector(dtype) -%}vec4<{{ "u32" if dtype in ["f16", "bf16"] else dtype }}>{%- endmacro -%}

{#- Element `k` of the vectors NAME_0, NAME_1 of an operand, as its value type. -#}
{%- macro element(name, dtype, k) -%}
{%- set components = ["x", "y", "z", "w"] -%}
{%- if dtype == "bf16" -%}
bitcast<f32>({{ name }}_0.{{ components[k // 2] }} {{ "& 0xffff0000u" if k % 2 else "<< 16u" }})
{%- elif dtype == "f16" -%}unpack2x16float({{ name }}_0.{{ components[k // 2] }}).{{ components[k % 2] }}
{%- else -%}{{ name }}_{{ k // 4 }}.{{ components[k % 4] }}
{%- endif -%}
{%- endmacro -%}

{#-
Casts `e` of value type `source` to value type `to`. Floats are truncated to integers, and saturate; NaN
becomes 0, which WGSL leaves open. Casts of i64w need i64w. As a bool NaN is true: `!=` is avoided, because
naga's SPIR-V returns false for NaN.
-#}
{#- A u32 as an i64, by halves: naga 30's SPIR-V sign-extends. -#}
{%- macro u32_to_i64(e) -%}((i64(({{ e }}) >> 16u) << 16u) | i64(({{ e }}) & 0xffffu)){%- endmacro -%}

{%- macro cast(e, source, to) -%}
{%- if source == to -%}{{ e }}
{%- elif to == "vec2<u32>" -%}i64w_from_{{ source }}({{ e }})
{%- elif source == "vec2<u32>" and to in ["i32", "u32"] -%}bitcast<{{ to }}>(({{ e }}).x)
{%- elif source == "vec2<u32>" and to == "bool" -%}any({{ e }} != vec2<u32>())
{%- elif source == "vec2<u32>" -%}i64w_to_{{ to }}({{ e }})
{%- elif source == "u32" and to == "i64" -%}{{ u32_to_i64(e) }}
{%- elif to == "bool" -%}!({{ e }} == {{ source }}(0))
{%- elif source == "f32" and to in ["i32", "u32", "i64"] -%}
select({{ to }}({{ e }}), {{ to }}(0), (bitcast<u32>({{ e }}) & 0x7fffffffu) > 0x7f800000u)
{%- elif source == "f64" and to in ["i32", "u32", "i64"] -%}
select({{ to }}(0), {{ to }}({{ e }}), {{ e }} == {{ e }})
{%- elif source == "bool" -%}select({{ to }}(0), {{ to }}(1), {{ e }})
{%- else -%}{{ to }}({{ e }})
{%- endif -%}
{%- endmacro -%}

{#- Index of a workgroup, for any folding of the grid. -#}
{%- macro prelude() %}
fn group_index(group: vec3<u32>, groups: vec3<u32>) -> u32 { return group.y * groups.x + group.x; }
{% endmacro -%}

{#-
A buffer of indices of any integer type: NAME_words(i) is an index as the two words of a 64-bit integer, the
  lower in x. Indices are compared in 64 bits on every device, so that an i64 of 2^32 is not mistaken for 0.
-#}
{%- macro index(binding, name, dtype) %}
{% if dtype in ["i64", "i64w"] %}
@group(0) @binding({{ binding }}) var<storage, read> {{ name }}: array<vec2<u32>>;
fn {{ name }}_words(i: u32) -> vec2<u32> { return {{ name }}[i]; }
{% else %}
{{ input(binding, name, dtype) }}
fn {{ name }}_words(i: u32) -> vec2<u32> {
    {% if dtype == "i32" %}
    let v = {{ name }}_at(i);
    return vec2<u32>(bitcast<u32>(v), select(0u, 0xffffffffu, v < 0));
    {% else %}
    return vec2<u32>({{ name }}_at(i), 0u);
    {% endif %}
}
{% endif %}
{% endmacro -%}

{#- Validates an index: returns 0xffffffff outside of the dimension, also for negative indices. With `wraps`,
-extent to -1 count from the end. -#}
{%- macro resolve_index(wraps=false) %}
fn resolve_index(index: vec2<u32>, extent: u32) -> u32 {
    {% if wraps %}
    let from_end = (index.y == 0xffffffffu) & (index.x >= 0u - extent) & (extent > 0u);
    if from_end { return index.x + extent; }
    {% endif %}
    return select(0xffffffffu, index.x, (index.y == 0u) & (index.x < extent));
}
{% endmacro -%}

{#- An index as an i32, clamped to the range of i32 without its lowest value. -#}
{%- macro saturate_to_i32() %}
fn saturate_to_i32(index: vec2<u32>) -> i32 {
    let low = bitcast<i32>(index.x);
    if (index.y == 0u && low >= 0) || (index.y == 0xffffffffu && low < 0) { return low; }
    return select(2147483647i, -2147483647i, index.y >= 0x80000000u);
}
{% endmacro -%}

{#- fn is_nan(v), for a float of a compute type. -#}
{%- macro is_nan(T) %}
// By bits, because compilers may assume `v != v` is false; an f64 NaN is NaN as f32 too.
fn is_nan(v: {{ T }}) -> bool { return (bitcast<u32>(f32(v)) & 0x7fffffffu) > 0x7f800000u; }
{% endmacro -%}

{#- Combines two values of a scatter, of the compute type, the earlier and the later one. f64's max and
min need `is_nan`. -#}
{%- macro combine(op, T, earlier, later) -%}
{%- if op == "set" -%}{{ later }}
{%- elif T == "bool" -%}{{ earlier }} {{ "|" if op in ["add", "max"] else "&" }} {{ later }}
{%- elif op == "add" -%}{{ earlier }} + {{ later }}
{%- elif op == "mul" -%}{{ earlier }} * {{ later }}
{%- elif T == "f32" -%}m_{{ op }}({{ earlier }}, {{ later }})
{%- elif T == "f64" -%}select(
    select({{ op }}({{ earlier }}, {{ later }}), {{ later }}, is_nan({{ later }})),
    {{ earlier }}, is_nan({{ earlier }}))
{%- else -%}{{ op }}({{ earlier }}, {{ later }})
{%- endif -%}
{%- endmacro -%}

{#-
Adds to each offset its strides times the coordinates of `linear_index` over p.shape, the last dimension the
fastest. `linear_index` is a variable, which becomes zero. `offsets` are pairs of a
variable and its strides' name; `of` is a prefix of the names of rank, shape and strides.
-#}
{%- macro strided_offsets(offsets, of="") -%}
for (var d = p.{{ of }}rank; d > 0u; d--) {
        let axis = d - 1u;
        let extent = p.{{ of }}shape[axis >> 2u][axis & 3u];
        let coordinate = linear_index % extent;
        linear_index = linear_index / extent;
        {% for offset, strides in offsets %}
        {{ offset }} += coordinate * p.{{ strides }}[axis >> 2u][axis & 3u];
        {% endfor %}
    }
{%- endmacro -%}

{#-
Declares i0, i1, .. as the positions of element `linear_index` in operands. Their strides follow each other in
p.strides, eight for each. `linear_index` is a variable, which becomes zero. `chosen` has a true value for each operand
that is meant.
-#}
{%- macro operand_positions(chosen) %}
{%- set components = ["x", "y", "z", "w"] -%}
{% for flag in chosen %}
{% if flag %}
    var i{{ loop.index0 }} = p.offsets[{{ loop.index0 // 4 }}].{{ components[loop.index0 % 4] }};
{% endif %}
{% endfor %}
    for (var d = p.rank; d > 0u; d--) {
        let axis = d - 1u;
        let extent = p.shape[axis >> 2u][axis & 3u];
        let coordinate = linear_index % extent;
        linear_index = linear_index / extent;
        {% for flag in chosen %}
        {% if flag %}
        i{{ loop.index0 }} += coordinate * p.strides[{{ loop.index0 * 2 }}u + (axis >> 2u)][axis & 3u];
        {% endif %}
        {% endfor %}
    }
{% endmacro -%}

{#- First fields of Params of a kernel over rows along one dimension, as `RowLayout::params` writes them. The others are
`shape` and `strides`. -#}
{%- macro row_fields() -%}
rows: u32,
    extent: u32,
    inner: u32,
    rank: u32,
    offset: u32,
    stride: u32,
{%- endmacro -%}

{#- fn row_offset(row): index of the first element of a row. -#}
{%- macro row_offset() %}
fn row_offset(row: u32) -> u32 {
    var base = p.offset;
    var linear_index = row;
    {{ strided_offsets([("base", "strides")]) }}
    return base;
}
{% endmacro -%}

{#- A kernel that writes function(i) to element i of `out`, for all i below p.n: `per_thread` (1 or 4)
for each thread. -#}
{%- macro each_output(function, type, per_thread) %}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let start = (group_index(group, groups) * 256u + thread) * {{ per_thread }}u;
    if start >= p.n { return; }
    {% if per_thread == 4 %}
    var values: array<{{ type }}, 4>;
    for (var k = 0u; k < 4u; k++) { values[k] = {{ function }}(min(start + k, p.n - 1u)); }
    out_put4(start, values, p.n);
    {% else %}
    out_put(start, {{ function }}(start));
    {% endif %}
}
{% endmacro -%}

{#- A kernel over several tensors with consecutive workgroups: calls NAME(p.items[k], k, thread) for a
thread of tensor k. -#}
{%- macro dispatch_items(name, count) %}
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let group = group_index(id, groups);
    // The last tensor that begins at this workgroup or before.
    var k = 0u;
    {% for k in range(1, count) %}
    if group >= p.items[{{ k }}].group { k = {{ k }}u; }
    {% endfor %}
    {{ name }}(p.items[k], k, (group - p.items[k].group) * 256u + thread);
}
{% endmacro -%}

{#- fn divide(a, b): quotient and remainder. `f32_division`: quotients are below 2^20, and operands below 2^31. -#}
{%- macro divide(f32_division) %}
// Quotient and remainder. Devices divide integers slowly, so the quotient is computed in f32. It has an error of 4 ulp
// at most: 2.5 of a reciprocal, and half of one for each other rounding. Below 2^20 it is therefore off by one at most.
// One reciprocal serves all elements that are divided by the same extent.
fn divide(a: u32, b: u32) -> vec2<u32> {
    {% if f32_division %}
    let q = u32(f32(a) * (1.0 / f32(b)));
    let r = bitcast<i32>(a - q * b);
    let n = bitcast<i32>(b);
    let low = r < 0;
    let high = r >= n;
    return vec2<u32>(q + select(0u, 1u, high) - select(0u, 1u, low),
        bitcast<u32>(select(select(r, r - n, high), r + n, low)));
    {% else %}
    return vec2<u32>(a / b, a % b);
    {% endif %}
}
{% endmacro -%}
