// Identifiers that are keywords of C++ or CUDA, shadowing, and other scripts.
// expect: 13 22 1101
@group(0) @binding(0) var<storage, read_write> out: array<u32>;
@group(0) @binding(1) var<storage, read> zeros: array<u32>;

struct dim3 {
    double: u32,
    union_: u32,
}
const clock = 1000u;

fn blockDim(x: u32) -> u32 {
    return x * 3u;
}

fn operator_(x: u32) -> dim3 {
    return dim3(x, 4u);
}

@compute @workgroup_size(1)
fn main() {
    let int = zeros[0] + 1u;
    var float = int;
    {
        let int = 5u;
        float += int;
        {
            let int = 7u;
            float += int;
        }
    }
    let threadIdx = vec2(int, float);
    let größe = threadIdx.y + blockDim(int);
    let half2 = größe;
    let e1 = 2u;
    let v_int = 100u;
    let main_ = operator_(half2);
    out[0] = float;
    out[1] = main_.double + main_.union_ + e1;
    out[2] = v_int + int + clock;
}
