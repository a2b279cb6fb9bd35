{#-
Concatenates tensors bit by bit: in each row of the output, rows of the inputs follow each other. Everything is counted
in vectors of 16 bytes.

inputs: number of inputs, at most 8
f32_division: the number of rows is below 2^20
-#}
{%- import "types" as t -%}
{{ t.prelude() }}
struct Params {
    // Vectors that this launch copies, and those of one row among them.
    n: u32,
    columns: u32,
    // Vectors of a row of the output, and the first one that this launch writes.
    row: u32,
    first: u32,
    // Of each input: its first column, its offset, and the distance of its rows.
    starts: array<vec4<u32>, 2>,
    offsets: array<vec4<u32>, 2>,
    strides: array<vec4<u32>, 2>,
}
@group(1) @binding(0) var<uniform> p: Params;
{{ t.divide(f32_division) }}
{% macro of(array, k) %}p.{{ array }}[{{ k // 4 }}u][{{ k % 4 }}u]{% endmacro %}
{% for k in range(inputs) %}
@group(0) @binding({{ k }}) var<storage, read> input{{ k }}: array<vec4<u32>>;
fn vector{{ k }}(line: u32, column: u32) -> vec4<u32> {
    return input{{ k }}[{{ of("offsets", k) }} + line * {{ of("strides", k) }} + (column - {{ of("starts", k) }})];
}
{% endfor %}
@group(0) @binding({{ inputs }}) var<storage, read_write> output: array<vec4<u32>>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let i = group_index(group, groups) * 256u + thread;
    if i >= p.n { return; }
    let parts = divide(i, p.columns);
    let at = parts.x * p.row + p.first + parts.y;
    {% for k in range(inputs - 1, 0, -1) %}
    if parts.y >= {{ of("starts", k) }} {
        output[at] = vector{{ k }}(parts.x, parts.y);
        return;
    }
    {% endfor %}
    output[at] = vector0(parts.x, parts.y);
}
