// Structs, arrays and arrays of arrays as values: copies, comparisons of parts, zero values.
// expect: 56 698 42 0 11 403 16
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

struct Thing {
    a: u32,
    v: vec3<u32>,
    list: array<u32, 2>,
}
const TABLE = array(vec2(1u, 2u), vec2(3u, 4u));

fn change(thing: Thing) -> Thing {
    var t = thing;
    t.a += 40u;
    return t;
}

fn make(x: u32) -> array<u32, 4> {
    return array(x, x + 1u, x * x, 0u);
}

@compute @workgroup_size(1)
fn main() {
    let n = zeros[0];
    var a: array<array<u32, 3>, 2>;
    a[n + 1u][n + 2u] = 5u;
    let copy = a;
    a[1][2] = 6u;
    out[0] = copy[1][2] * 10u + a[n + 1u][2];
    var p = Thing(n + 1u, vec3(2u, 3u, 4u), array(5u, 6u));
    let q = p;
    p.list[n + 1u] = 9u;
    p.v.z = 8u;
    out[1] = q.list[1] * 100u + p.list[1] * 10u + p.v.z;
    out[2] = change(p).a + p.a;
    let zero = Thing();
    out[3] = zero.a + zero.v.y + zero.list[n + 1u];
    var things = array<Thing, 2>(q, p);
    things[n] = things[n + 1u];
    out[4] = things[0].list[1] + things[0].v.x;
    let table = TABLE;
    out[5] = TABLE[n + 1u].y * 100u + table[n + 1u].x;
    out[6] = make(n + 4u)[n + 2u];
}
