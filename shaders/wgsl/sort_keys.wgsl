{#-
Elements as keys: unsigned integers that compare like the elements on every device, also without the elements'
  arithmetic. -0 equals 0, and all NaN are one key: p.nan, the largest or the smallest. p.flip (0 or all ones)
  reverses the order.

kind: f32, f16, bf16, f64, i32, u32, i64, u8 (also for bool). Wide kinds (f64, i64) have two words, the higher
  in y.
-#}
{%- macro wide(kind) -%}{{ "1" if kind in ["f64", "i64"] else "" }}{%- endmacro -%}

{#- The type of keys, and their order. -#}
{%- macro order(is_wide) %}
{% if is_wide %}
alias Key = vec2<u32>;
fn less(a: Key, b: Key) -> bool { return (a.y < b.y) | ((a.y == b.y) & (a.x < b.x)); }
fn same(a: Key, b: Key) -> bool { return (a.y == b.y) & (a.x == b.x); }
{% else %}
alias Key = u32;
fn less(a: Key, b: Key) -> bool { return a < b; }
fn same(a: Key, b: Key) -> bool { return a == b; }
{% endif %}
// Key of a NaN in ascending order.
fn nan_key() -> Key { return Key(p.nan); }
{% endmacro -%}

{#- Expression that is true if the element with these bits is not zero; NaN is not zero. -#}
{%- macro nonzero(kind, b) -%}
{%- if kind == "f64" -%}(({{ b }}.y & 0x7fffffffu) | {{ b }}.x) != 0u
{%- elif kind == "i64" -%}({{ b }}.y | {{ b }}.x) != 0u
{%- elif kind in ["f32", "f16", "bf16"] -%}({{ b }} & {{ "0x7fffffffu" if kind == "f32" else "0x7fffu" }}) != 0u
{%- else -%}{{ b }} != 0u
{%- endif -%}
{%- endmacro -%}

{#- A buffer of elements: NAME_bits(i), in the low bits. -#}
{%- macro bits(binding, name, kind) %}
@group(0) @binding({{ binding }}) var<storage, read> {{ name }}: array<{{ "vec2<u32>" if wide(kind) else "u32" }}>;
fn {{ name }}_bits(i: u32) -> {{ "vec2<u32>" if wide(kind) else "u32" }} {
    {% if kind in ["f16", "bf16"] %}
    return ({{ name }}[i >> 1u] >> ((i & 1u) * 16u)) & 0xffffu;
    {% elif kind == "u8" %}
    return ({{ name }}[i >> 2u] >> ((i & 3u) * 8u)) & 0xffu;
    {% else %}
    return {{ name }}[i];
    {% endif %}
}
{% endmacro -%}

{#- A buffer of elements as keys: NAME_bits(i) and NAME_key(i). -#}
{%- macro input(binding, name, kind) %}
{{ bits(binding, name, kind) }}
fn {{ name }}_key(i: u32) -> {{ "vec2<u32>" if wide(kind) else "u32" }} {
    let b = {{ name }}_bits(i);
    {% if kind == "f64" %}
    let high = b.y & 0x7fffffffu;
    let negative = b.y >= 0x80000000u;
    let zero = (high | b.x) == 0u;
    let ordered = select(vec2<u32>(b.x, b.y | 0x80000000u), ~b, negative & !zero);
    let nan = (high > 0x7ff00000u) | ((high == 0x7ff00000u) & (b.x != 0u));
    return select(ordered, vec2<u32>(p.nan), nan) ^ vec2<u32>(p.flip);
    {% elif kind == "i64" %}
    return vec2<u32>(b.x, b.y ^ 0x80000000u) ^ vec2<u32>(p.flip);
    {% elif kind in ["f32", "f16", "bf16"] %}
    {% set sign, infinity = {
        "f32": ("0x80000000u", "0x7f800000u"), "f16": ("0x8000u", "0x7c00u"), "bf16": ("0x8000u", "0x7f80u")
    }[kind] %}
    let magnitude = b & ({{ sign }} - 1u);
    let negative = (b >= {{ sign }}) & (magnitude != 0u);
    let ordered = select({{ sign }} | magnitude, {{ sign }} - 1u - magnitude, negative);
    return select(ordered, p.nan, magnitude > {{ infinity }}) ^ p.flip;
    {% elif kind == "i32" %}
    return b ^ 0x80000000u ^ p.flip;
    {% else %}
    return b ^ p.flip;
    {% endif %}
}
{% endmacro -%}

{#-
Returns the start of the requested part of a sorted line with keys key_of(base), key_of(base + 1), ...:
p.first by default.
p.start_kind = 1: 0 if a NaN is there (where NaN is the smallest) · 2: the middle of the elements that are not NaN
-#}
{%- macro rank_start() %}
fn rank_start(base: u32) -> u32 {
    if p.start_kind == 0u { return p.first; }
    if p.start_kind == 1u { return select(p.first, 0u, same(key_of(base), nan_key())); }
    var low = 0u;
    var high = p.extent;
    while low < high {
        let middle = (low + high) >> 1u;
        if same(key_of(base + middle), nan_key()) { high = middle; } else { low = middle + 1u; }
    }
    return (max(low, 1u) - 1u) >> 1u;
}
{% endmacro -%}
