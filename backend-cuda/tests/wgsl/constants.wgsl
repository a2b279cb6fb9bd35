// Constant expressions of every kind, tables that are indexed, overrides that are set, unused declarations.
// override: rows = 3
// override: scale = 0.1
enable f16;

struct Shape {
    size: vec3<f32>,
    parts: array<vec2<i32>, 2>,
    flag: bool,
}

const PI = 3.141592653589793;
const LOWEST: i32 = -2147483648;
const LOWEST_WIDE: i64 = -9223372036854775807li;
const TINY: f32 = 1e-38;
const HUGE: f32 = 3.40282346e38;
const SHAPE = Shape(vec3(1.0, -2.5, PI), array(vec2(1, 2), vec2(-3, LOWEST)), true);
const TABLE = array<f32, 5>(0.1, 0.2, -0.3, TINY, HUGE);
const VECTORS = array(vec4(vec2(1.0), 2.0, -0.0), vec4(0.0), vec4(3.5));
const NESTED = array(array(1u, 2u), array(3u, 4u));
const HALVES = array<f16, 3>(0.5h, -1.0h, 65504.0h);
const MATRIX = mat3x2(1.0, 2.0, 3.0, 4.0, 5.0, 6.0);

override rows: u32;
override scale: f32;
override doubled = rows * 2u;
override unused: f32 = 1.0;

@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(3) var<storage, read> not_used: array<f32>;
var<workgroup> tile: array<f32, doubled>;
var<private> start: vec3<f32> = SHAPE.size;

fn not_called() -> f32 {
    return f32(rows) * not_used[0];
}

@compute @workgroup_size(rows, 2)
fn main(@builtin(local_invocation_id) id: vec3<u32>) {
    var table = TABLE;
    table[id.y] = scale;
    tile[id.x + id.y * rows] = TABLE[id.x] + table[id.y] + VECTORS[id.y][id.x];
    workgroupBarrier();
    var shape = SHAPE;
    shape.parts[id.y].x -= LOWEST;
    let wide = LOWEST_WIDE + i64(id.x);
    out[id.x] = tile[id.x] + start.y + f32(NESTED[id.y][id.x % 2u]) + f32(HALVES[id.x]) + f32(wide);
    out[id.y + 8u] = f32(shape.parts[1].x) + MATRIX[2][id.y] + select(TINY, HUGE, shape.flag);
}

@compute @workgroup_size(1)
fn other() {
    out[0] = 1.0;
}
