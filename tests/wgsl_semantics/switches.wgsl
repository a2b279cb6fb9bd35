// switch: several selectors, default in the middle, break inside, continue of the enclosing loop.
// expect: 596769 6 513 77
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

fn pick(x: i32) -> u32 {
    switch x {
        case 0: {
            return 5u;
        }
        default: {
            return 9u;
        }
        case 2, -5, 4: {
            return 6u;
        }
        case 3: {
        }
    }
    return 7u;
}

@compute @workgroup_size(1)
fn main() {
    let n = i32(zeros[0]);
    var list = 0u;
    for (var i = n; i < 6; i++) {
        list = list * 10u + pick(i);
    }
    out[0] = list;
    out[1] = pick(n - 5);
    var total = 0u;
    for (var i = 0u; i < 6u; i++) {
        switch i {
            case 1u: {
                continue;
            }
            case 2u, 3u: {
                if i == 3u {
                    break;
                }
                total += 10u;
            }
            default: {
                total += 1u;
            }
        }
        total += 100u;
    }
    out[2] = total;
    switch n {
        default: {
            out[3] = 77u;
        }
    }
}
