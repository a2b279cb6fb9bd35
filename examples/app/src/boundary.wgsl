// Draws the probabilities of the classes from a tensor [side * side, classes], whose rows begin at the top left.

const CLASSES = 3u;

override side: u32;

@group(0) @binding(0) var<storage, read> probabilities: array<f32>;
@group(0) @binding(1) var<uniform> colors: array<vec4f, CLASSES>;

struct Fragment {
    @builtin(position) position: vec4f,
    // From (0, 0) at the top left to (1, 1) at the bottom right.
    @location(0) place: vec2f,
}

// A triangle that covers the square.
@vertex
fn vertex_main(@builtin(vertex_index) index: u32) -> Fragment {
    let place = 2.0 * vec2f(f32(index & 1u), f32(index >> 1u));
    return Fragment(vec4f(2.0 * place.x - 1.0, 1.0 - 2.0 * place.y, 0.0, 1.0), place);
}

fn load(column: u32, row: u32) -> vec3f {
    let first = (min(row, side - 1u) * side + min(column, side - 1u)) * CLASSES;
    return vec3f(probabilities[first], probabilities[first + 1u], probabilities[first + 2u]);
}

@fragment
fn fragment_main(in: Fragment) -> @location(0) vec4f {
    let position = saturate(in.place) * f32(side - 1u);
    let cell = vec2u(position);
    let part = fract(position);
    let above = mix(load(cell.x, cell.y), load(cell.x + 1u, cell.y), part.x);
    let below = mix(load(cell.x, cell.y + 1u), load(cell.x + 1u, cell.y + 1u), part.x);
    let p = mix(above, below, part.y);

    // The lead of the likeliest class is 0 on the boundary, which is drawn as a light line.
    let likeliest = max(p.x, max(p.y, p.z));
    let second = max(min(p.x, p.y), min(max(p.x, p.y), p.z));
    let lead = likeliest - second;
    let line = 1.0 - smoothstep(0.0, 1.5 * fwidth(lead) + 1e-4, lead);
    let area = p.x * colors[0] + p.y * colors[1] + p.z * colors[2];
    return vec4f(mix(area.rgb, vec3f(1.0), 0.6 * line), 1.0);
}
