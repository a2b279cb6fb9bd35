{#-
The start of an attention kernel's `main`: the rows, the head and the batch of a workgroup, and where its results
begin. `rows` is their number; `group`, `groups` and `pass` are those of `attention`.
-#}
    // Written out, so that validation sees that control flow is uniform.
    let index = group.y * groups.x + group.x;
    let blocks = p.window.w;
    {% if pass == "keys" %}
    let heads = p.extents.z;
    {% else %}
    let heads = p.extents.y;
    {% endif %}
    if index >= p.extents.x * heads * blocks { return; }
    // Rows with the most work start first: the last queries, or the first keys.
    let row0 = {{ "index % blocks" if pass == "keys" else "(blocks - 1u - index % blocks)" }} * {{ rows }}u;
    let batch = index / blocks / heads;
    let head = index / blocks % heads;
    let out_base = p.out_offsets.x + batch * p.out.x + head * p.out.y;
    let out_v_base = p.out_offsets.y + batch * p.out_v.x + head * p.out_v.y;
