// Loops with continuing, break if, continue, nested breaks; early returns.
// expect: 16 5805 6 93 611 1
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

fn early(x: u32) -> u32 {
    if x > 10u {
        return 1u;
    }
    for (var i = 0u; i < 20u; i++) {
        if i == x {
            return i + 1u;
        }
    }
    return 9u;
}

@compute @workgroup_size(1)
fn main() {
    let n = zeros[0];
    var sum = 0u;
    for (var i = n; i < 10u; i++) {
        if i % 3u == 1u {
            continue;
        }
        if i == 8u {
            break;
        }
        sum += i;
    }
    out[0] = sum;
    var k = n;
    var rounds = 0u;
    loop {
        let twice = k * 2u;
        if k == 3u {
            k = 10u;
            continue;
        }
        rounds += 1u;
        continuing {
            k += 1u;
            rounds += twice * 100u;
            break if k > 12u;
        }
    }
    out[1] = rounds;
    var w = n;
    while w < 5u {
        w += 2u;
    }
    out[2] = w;
    var cells = 0u;
    for (var i = 0u; i < 4u; i++) {
        for (var j = 0u; j < 4u; j++) {
            if j > i {
                break;
            }
            if (i + j) % 2u == 0u {
                continue;
            }
            cells += 10u * i + j;
        }
    }
    out[3] = cells;
    out[4] = early(n + 5u) * 100u + early(n + 50u) * 10u + early(n);
    var once = 0u;
    loop {
        once += 1u;
        if once > n { break; }
    }
    out[5] = once;
}
