{#-
What the kernels for convolutions of single channels share, as macros. Their arguments dtype, pass, bias, mode and
vector are those of the kernels. Results of a run are variables: a prefix and the number in the run.
-#}
{%- import "types" as t -%}

{#- Bindings of the source, of the filters or dy, of the bias, and of the result. -#}
{%- macro bindings(dtype, pass, bias, mode, vector) -%}
{{ t.input(0, "source", dtype) }}
{{ t.input(1, "other", dtype) }}
{% if bias %}
{{ t.input(2, "bias", dtype) }}
{% endif %}
{% if mode == "vectors" and vector == 8 %}
@group(0) @binding({{ 3 if bias else 2 }}) var<storage, read_write> out: array<vec4<u32>>;
{{ t.bits_function("out", dtype) }}
{% elif mode == "vectors" %}
{{ t.quads_output(3 if bias else 2, "out", dtype) }}
{% else %}
{{ t.output(3 if bias else 2, "out", "f32" if pass == "weight" else dtype, mode) }}
{% endif %}
{%- endmacro -%}

{#- Adds `sum0`, `sum1`, ... of 64 threads and writes them as part `index` of the sums, in the order of the taps.
The kernel declares `sums`, of 65 elements for each tap: threads that read adjacent taps access different banks. -#}
{%- macro write_sums(taps) -%}
    {% for tap in range(taps) %}
    sums[{{ tap * 65 }}u + thread] = sum{{ tap }};
    {% endfor %}
    workgroupBarrier();
    if thread < {{ taps }}u && part < p.parts {
        var total = 0.0;
        for (var i = 0u; i < 64u; i++) { total += sums[thread * 65u + i]; }
        out_put(index * {{ taps }}u + thread, total);
    }
{%- endmacro -%}

{#- Writes the vector of results from `r` on as the vector with this number. -#}
{%- macro write_vector(dtype, vector, number, prefix, r) -%}
{% if vector == 8 %}
out[{{ number }}] = vec4<u32>(
    {%- for k in range(r, r + 8, 2) -%}
    out_pair_{{ dtype }}({{ prefix }}{{ k }}, {{ prefix }}{{ k + 1 }}){{ ", " if not loop.last }}
    {%- endfor -%}
);
{% else %}
out_put_quad({{ number }},
    vec4<f32>({{ prefix }}{{ r }}, {{ prefix }}{{ r + 1 }}, {{ prefix }}{{ r + 2 }}, {{ prefix }}{{ r + 3 }}));
{% endif %}
{%- endmacro -%}

{#- Writes a run of results, from element `x` of the line that begins at `line`. -#}
{%- macro write_run(mode, run, line, prefix) -%}
    {% if mode == "packed" %}
    {% for r in range(0, run, 4) %}
    if x + {{ r }}u < p.width {
        out_put4({{ line }} + x + {{ r }}u,
            array<f32, 4>(
                {{ prefix }}{{ r }}, {{ prefix }}{{ r + 1 }}, {{ prefix }}{{ r + 2 }}, {{ prefix }}{{ r + 3 }}),
            {{ line }} + p.width);
    }
    {% endfor %}
    {% else %}
    {% for r in range(run) %}
    if x + {{ r }}u < p.width { out_put({{ line }} + x + {{ r }}u, {{ prefix }}{{ r }}); }
    {% endfor %}
    {% endif %}
{%- endmacro -%}
