// Pointers to locals and private variables, and into them, through functions and lets.
// expect: 42 608 14 973 149 17 12
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

struct State {
    count: u32,
    list: array<u32, 2>,
}
var<private> total: u32 = 5u;
var<private> shared_state: State = State(7u, array(1u, 2u));

fn add(list: ptr<function, array<u32, 3>>, amount: u32) {
    for (var i = 0; i < 3; i++) {
        (*list)[i] += amount;
    }
}

fn add_one(x: ptr<private, u32>) {
    *x += 1u;
}

fn scale(v: ptr<function, vec3<u32>>, by: u32) {
    *v *= by;
    (*v).y += 1u;
}

fn through(s: ptr<function, State>) -> u32 {
    (*s).count *= 2u;
    return (*s).count + (*s).list[1];
}

@compute @workgroup_size(1)
fn main() {
    let n = zeros[0];
    var local = array(1u, 2u, 3u);
    let second = &local[n + 1u];
    *second += 40u;
    out[0] = local[1];
    add(&local, 5u);
    out[1] = local[0] * 100u + local[2];
    add_one(&total);
    add_one(&total);
    out[2] = total + shared_state.count;
    var v = vec3(1u, 2u, 3u);
    scale(&v, n + 3u);
    out[3] = v.x + v.y * 10u + v.z * 100u;
    var thing = State(4u, array(5u, 6u));
    let inner = &thing.list;
    (*inner)[n + 1u] = 9u;
    thing.list[0] += (*inner)[1];
    out[4] = thing.list[0] * 10u + thing.list[1];
    out[5] = through(&thing);
    let cell = &out[n + 6u];
    *cell = 11u;
    *cell += 1u;
}
