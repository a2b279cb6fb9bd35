// Draws the scores of the classes (logits) from a tensor [side * side, classes]. The first row is at the top.

const CLASSES = 3u;
// Half the width of the boundary's line, in cells of the grid.
const LINE = 0.12;

override side: u32;

@group(0) @binding(0) var<storage, read> scores: array<f32>;
@group(0) @binding(1) var<uniform> colors: array<vec4f, CLASSES>;

struct Fragment {
    @builtin(position) position: vec4f,
    // From (0, 0) at the top left to (1, 1) at the bottom right.
    @location(0) uv: vec2f,
}

// A triangle that covers the square.
@vertex
fn vertex_main(@builtin(vertex_index) index: u32) -> Fragment {
    let uv = 2.0 * vec2f(f32(index & 1u), f32(index >> 1u));
    return Fragment(vec4f(2.0 * uv.x - 1.0, 1.0 - 2.0 * uv.y, 0.0, 1.0), uv);
}

fn load(column: u32, row: u32) -> vec3f {
    let first = (min(row, side - 1u) * side + min(column, side - 1u)) * CLASSES;
    return vec3f(scores[first], scores[first + 1u], scores[first + 2u]);
}

@fragment
fn fragment_main(in: Fragment) -> @location(0) vec4f {
    let position = saturate(in.uv) * f32(side - 1u);
    let cell = vec2u(position);
    let part = fract(position);
    let left_top = load(cell.x, cell.y);
    let right_top = load(cell.x + 1u, cell.y);
    let left_bottom = load(cell.x, cell.y + 1u);
    let right_bottom = load(cell.x + 1u, cell.y + 1u);
    let above = mix(left_top, right_top, part.x);
    let below = mix(left_bottom, right_bottom, part.x);
    var score = mix(above, below, part.y);
    var slope_x = mix(right_top - left_top, right_bottom - left_bottom, part.y);
    var slope_y = below - above;

    // The two likeliest classes.
    var first = select(0u, 1u, score.y > score.x);
    first = select(first, 2u, score.z > score[first]);
    var second = (first + 1u) % CLASSES;
    let third = (first + 2u) % CLASSES;
    second = select(second, third, score[third] > score[second]);

    // Their scores are equal on the boundary. The slope turns a difference of scores into a distance.
    let lead = score[first] - score[second];
    let slope = vec2f(slope_x[first] - slope_x[second], slope_y[first] - slope_y[second]);
    let line = 1.0 - smoothstep(0.5 * LINE, 1.5 * LINE, lead / max(length(slope), 1e-6));

    let weights = exp(score - score[first]);
    let p = weights / (weights.x + weights.y + weights.z);
    let area = p.x * colors[0] + p.y * colors[1] + p.z * colors[2];
    return vec4f(mix(area.rgb, vec3f(1.0), 0.7 * line), 1.0);
}
