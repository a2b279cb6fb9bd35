// Every call and every load happens once, where it is written.
// expect: 123 1661 55 510 121 31
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

var<private> counter: u32 = 0u;

fn next() -> u32 {
    counter += 1u;
    return counter;
}

fn tick() -> bool {
    counter += 1u;
    return true;
}

fn bump(i: ptr<function, u32>) -> u32 {
    *i += 1u;
    return *i;
}

@compute @workgroup_size(1)
fn main() {
    let a = next() * 100u + next() * 10u + next();
    out[0] = a;
    var x = zeros[0] + 1u;
    let before = x;
    x += 5u;
    let after = x;
    x = x * 10u + before;
    out[1] = before * 1000u + after * 100u + x;
    let picked = select(next(), next(), zeros[0] == 0u);
    out[2] = picked * 10u + counter;
    out[3] = u32(zeros[0] == 1u && tick()) + u32(zeros[0] == 0u || tick()) * 10u + counter * 100u;
    var values = array(1u, 2u, 3u);
    var i = zeros[0];
    values[bump(&i)] += 10u;
    out[4] = values[1] * 10u + i;
    let old = values[0];
    values[0] = values[2];
    values[2] = old;
    out[5] = values[0] * 10u + values[2];
}
