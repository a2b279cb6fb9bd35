{#-
A fused chain of elementwise operations: each step is an expression of `pointwise` in f32, and its result is
rounded as if it were stored. A step reads results of other steps as if it loaded them: see `hidden`.

ops: the steps' names, for labels only · math: files that the expressions need
For inputs e0, e1, ...: inputs: dtypes, f32, f16, bf16 or bool (read as 1 or 0) · strided: 1 if the layout differs from
  the results'
For steps s0, s1, ...: exprs · outs: dtypes of results, f32, f16 or bf16 · written: 1 if the result is stored
arities, counts: number of operands and scalars of an expression
For all steps together: args: names of operands in the expressions · sources: their values, e0, s0, ...
scalar_names: names of scalars
repeated: 1 if an input has one element for each line along the last dimension
layout: `vec4` (lines, and the offsets of those of inputs that are not repeated, are multiples of `width`: 4, or 8
  with 16-bit floats in memory), `each`
Results are row-major from element 0. Every thread computes four neighbouring elements (`vec4`: `width`).
-#}
{%- import "types" as t -%}
{%- set components = ["x", "y", "z", "w"] -%}
{%- set halves = ["f16", "bf16"] -%}
{% for file in math %}
{% include "math/" ~ file %}
{% endfor %}
{{ t.prelude() }}
alias T = f32;
struct Params {
    n: u32,
    rank: u32,
    scalars: array<vec4<u32>, 4>,
    shape: array<vec4<u32>, 2>,
    // Offsets and strides of the inputs.
    offsets: array<vec4<u32>, 2>,
    strides: array<vec4<u32>, 14>,
    // One word for each operand of the steps, always 0, which compilers do not know.
    zeros: array<vec4<u32>, {{ (sources | length + 3) // 4 }}>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.bits_function("to_f16", "f16") }}
{{ t.bits_function("to_bf16", "bf16") }}
// A value of which compilers know as little as of a loaded one, because each operand has its own word. They cannot see
// that two operands are one value (`a - a`), or contract a product with the next sum. Nor do they use the range of a
// result, or share an expression between steps.
fn hidden(v: f32, zero: u32) -> f32 { return bitcast<f32>(bitcast<u32>(v) ^ zero); }
{#- Whether operand `j` is hidden. The first operand that reads an input is the load itself. -#}
{%- macro is_hidden(j) -%}{{ "1" if sources[j][0] == "s" or sources[j] in sources[:j] }}{%- endmacro -%}
{#- The f32 of a value that is read. -#}
{%- macro number(value, dtype) -%}
{%- if dtype == "bool" -%}select(0.0, 1.0, {{ value }}){%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}
{#- Element `k` of an input's vectors. A word has four bools. -#}
{%- macro element(name, dtype, k) -%}
{%- if dtype == "bool" -%}
{%- set byte = ["0xffu", "0xff00u", "0xff0000u", "0xff000000u"][k % 4] -%}
{{ number("(" ~ name ~ "_" ~ k // 4 ~ " & " ~ byte ~ ") != 0u", dtype) }}
{%- else -%}{{ t.element(name, dtype, k) }}
{%- endif -%}
{%- endmacro %}
{% for dtype in inputs %}
{% if layout == "vec4" and not repeated[loop.index0] %}
{% set vector = "u32" if dtype == "bool" else t.vector(dtype) %}
@group(0) @binding({{ loop.index0 }}) var<storage, read> e{{ loop.index0 }}_in: array<{{ vector }}>;
{% else %}
{{ t.input(loop.index0, "e" ~ loop.index0 ~ "_in", dtype) }}
{% endif %}
{% endfor %}
{% set next = namespace(binding=inputs | length, arg=0, scalar=0) %}
{% for dtype in outs %}
{% if written[loop.index0] %}
{% if layout == "vec4" %}
@group(0) @binding({{ next.binding }}) var<storage, read_write> s{{ loop.index0 }}_out: array<{{ t.vector(dtype) }}>;
{% else %}
{{ t.output(next.binding, "s" ~ loop.index0 ~ "_out", dtype, "packed") }}
{% endif %}
{% set next.binding = next.binding + 1 %}
{% endif %}
{% endfor %}

{% for expr in exprs %}
{% set k = loop.index0 %}
fn step{{ k }}({% for j in range(next.arg, next.arg + arities[k]) %}
        {{ args[j] }}{{ "_read" if is_hidden(j) }}: f32{{ ", " if not loop.last }}{% endfor %}) -> f32 {
    {% for j in range(next.arg, next.arg + arities[k]) if is_hidden(j) %}
    let {{ args[j] }} = hidden({{ args[j] }}_read, p.zeros[{{ j // 4 }}].{{ components[j % 4] }});
    {% endfor %}
    {% for j in range(next.scalar, next.scalar + counts[k]) %}
    let {{ scalar_names[j] }} = bitcast<f32>(p.scalars[{{ j // 4 }}].{{ components[j % 4] }});
    {% endfor %}
    let v: f32 = {{ t.rounded_expression(expr, outs[k]) }};
    {% if outs[k] == "f16" %}
    return unpack2x16float(to_f16_pair_f16(v, 0.0)).x;
    {% elif outs[k] == "bf16" %}
    // As the upper half of a pair: CUDA rounds pairs in one instruction.
    return bitcast<f32>(to_bf16_pair_bf16(0.0, v));
    {% else %}
    return v;
    {% endif %}
}
{% set next.arg = next.arg + arities[k] %}
{% set next.scalar = next.scalar + counts[k] %}
{% endfor %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let global_index = group_index(group, groups) * 256u + thread;
    {% if layout == "vec4" %}
    if global_index >= p.n / {{ width }}u { return; }
    {% if 1 in strided %}
    var linear_index = global_index * {{ width }}u;
    {{ t.operand_positions(strided) }}
    {% endif %}
    {% for dtype in inputs %}
    {% set e = "e" ~ loop.index0 %}
    {% if repeated[loop.index0] %}
    let {{ e }} = {{ number(e ~ "_in_at(i" ~ loop.index0 ~ ")", dtype) }};
    {% else %}
    {% set vectors = 1 if dtype in halves else width // 4 %}
    {% if strided[loop.index0] %}
    let {{ e }}_at = i{{ loop.index0 }} / {{ width }}u * {{ vectors }}u;
    {% else %}
    let {{ e }}_at = (global_index + p.offsets[{{ loop.index0 // 4 }}].{{ components[loop.index0 % 4] }} / {{ width }}u)
        * {{ vectors }}u;
    {% endif %}
    {% for v in range(vectors) %}
    let {{ e }}_{{ v }} = {{ e }}_in[{{ e }}_at + {{ v }}u];
    {% endfor %}
    {% endif %}
    {% endfor %}
    {% for k in range(width) %}
    {% set next.arg = 0 %}
    {% for arity in arities %}
    let s{{ loop.index0 }}_{{ k }} = step{{ loop.index0 }}(
        {%- for source in sources[next.arg:next.arg + arity] -%}
        {%- if source[0] == "s" -%}{{ source }}_{{ k }}
        {%- elif repeated[source[1:] | int] -%}{{ source }}
        {%- else -%}{{ element(source, inputs[source[1:] | int], k) }}
        {%- endif -%}
        {{ ", " if not loop.last }}
        {%- endfor -%});
    {% set next.arg = next.arg + arity %}
    {% endfor %}
    {% endfor %}
    {% for dtype in outs %}
    {% set s = "s" ~ loop.index0 %}
    {% if written[loop.index0] %}
    {% if dtype == "f16" %}
    {{ s }}_out[global_index] = vec4<u32>({% for k in range(4) %}
        to_f16_pair_f16({{ s }}_{{ 2 * k }}, {{ s }}_{{ 2 * k + 1 }}){{ ", " if not loop.last }}{% endfor %});
    {% elif dtype == "bf16" %}
    // The values are already rounded.
    {{ s }}_out[global_index] = vec4<u32>({% for k in range(4) %}
        (bitcast<u32>({{ s }}_{{ 2 * k }}) >> 16u) | (bitcast<u32>({{ s }}_{{ 2 * k + 1 }}) & 0xffff0000u)
    {{ ", " if not loop.last }}{% endfor %});
    {% else %}
    {% for v in range(width // 4) %}
    {{ s }}_out[global_index * {{ width // 4 }}u + {{ v }}u] =
        vec4<f32>({{ s }}_{{ 4 * v }}, {{ s }}_{{ 4 * v + 1 }}, {{ s }}_{{ 4 * v + 2 }}, {{ s }}_{{ 4 * v + 3 }});
    {% endfor %}
    {% endif %}
    {% endif %}
    {% endfor %}
    {% else %}
    let start = global_index * 4u;
    if start >= p.n { return; }
    {% for flag in written %}
    {% if flag %}
    var r{{ loop.index0 }}: array<f32, 4>;
    {% endif %}
    {% endfor %}
    for (var k = 0u; k < 4u; k++) {
        let i = start + k;
        if i >= p.n { break; }
        {% for flag in strided %}
        {% if not flag %}
        let i{{ loop.index0 }} = i + p.offsets[{{ loop.index0 // 4 }}].{{ components[loop.index0 % 4] }};
        {% endif %}
        {% endfor %}
        {% if 1 in strided %}
        var linear_index = i;
        {{ t.operand_positions(strided) }}
        {% endif %}
        {% for dtype in inputs %}
        let e{{ loop.index0 }} = {{ number("e" ~ loop.index0 ~ "_in_at(i" ~ loop.index0 ~ ")", dtype) }};
        {% endfor %}
        {% set next.arg = 0 %}
        {% for arity in arities %}
        let s{{ loop.index0 }} = step{{ loop.index0 }}({{ sources[next.arg:next.arg + arity] | join(", ") }});
        {% if written[loop.index0] %}
        r{{ loop.index0 }}[k] = s{{ loop.index0 }};
        {% endif %}
        {% set next.arg = next.arg + arity %}
        {% endfor %}
    }
    {% for flag in written %}
    {% if flag %}
    s{{ loop.index0 }}_out_put4(start, r{{ loop.index0 }}, p.n);
    {% endif %}
    {% endfor %}
    {% endif %}
}
