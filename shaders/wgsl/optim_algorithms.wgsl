{#-
The algorithms of optim.wgsl. Each has `update`, the new values of a quad from the old ones and the gradient, and where its numbers depend
on the steps made, `at_step`: what `Rule::at_step` has on the host, for steps that the device counts. The comment before an
algorithm says what `p.c` is, in the order of `Rule::constants`; `s` is the first state, and `s + stride` the next.

algorithm and flags: as the rules define them · counted, states: see optim.wgsl
-#}
{% if counted %}
// What depends on the number of steps, this one included.
fn at_step(n: f32) -> vec3<f32> {
    {% if algorithm == "adam" %}
    // 1 - beta^n, without losing digits where beta is close to 1.
    return vec3<f32>(p.c[1].w / -m_expm1(n * p.c[1].y), sqrt(-m_expm1(n * p.c[1].z)), 0.0);
    {% elif algorithm == "sgd" %}
    // The first buffer is the gradient itself.
    return select(vec3<f32>(p.c[0].z, p.c[0].w, 0.0), vec3<f32>(0.0, 1.0, 0.0), n < 1.5);
    {% elif algorithm == "adagrad" %}
    return vec3<f32>(p.c[0].y / (1.0 + (n - 1.0) * p.c[0].z), select(0.0, p.c[1].x, n < 1.5), 0.0);
    {% elif algorithm == "adamax" %}
    return vec3<f32>(p.c[1].y / -m_expm1(n * p.c[1].x), 0.0, 0.0);
    {% elif algorithm == "nadam" %}
    // mu_i = beta1 (1 - q^i / 2). The logarithm of the product of all up to n is n ln(beta1) less the sum over k of
    // 2^-k / k (q^k + ... + q^nk), the inner sum being geometric.
    var log_product = n * m_log(1.0 - p.c[0].y);
    var half = 0.5;
    for (var k = 1.0; k < 25.0; k += 1.0) {
        let sum = m_exp(k * p.c[1].y) * m_expm1(n * k * p.c[1].y) / m_expm1(k * p.c[1].y);
        log_product -= half / k * sum;
        half *= 0.5;
    }
    let mu = (1.0 - p.c[0].y) * (1.0 - 0.5 * m_exp(n * p.c[1].y));
    let next = (1.0 - p.c[0].y) * (1.0 - 0.5 * m_exp((n + 1.0) * p.c[1].y));
    let root = sqrt(-m_expm1(n * p.c[1].z));
    let lr = p.c[1].w * root;
    return vec3<f32>(lr * (1.0 - mu) / -m_expm1(log_product), lr * next / (1.0 - m_exp(log_product) * next), root);
    {% elif algorithm == "radam" %}
    let short = -m_expm1(n * p.c[1].z);
    let most = 2.0 / p.c[0].w - 1.0;
    let rho = most - 2.0 * n * (1.0 - short) / short;
    let rect = sqrt((rho - 4.0) * (rho - 2.0) * most / ((most - 4.0) * (most - 2.0) * rho));
    return vec3<f32>(p.c[1].w / -m_expm1(n * p.c[1].y), select(0.0, rect * sqrt(short), rho > 5.0), 0.0);
    {% elif algorithm == "asgd" %}
    let before = n - 1.0;
    let power = m_exp(-p.c[0].w * m_log1p(p.c[0].y * p.c[0].z * before));
    return vec3<f32>(p.c[0].z * power, 1.0 / max(1.0, before - p.c[1].x), 0.0);
    {% elif algorithm == "rprop" %}
    return vec3<f32>(select(0.0, 1.0, n < 1.5), 0.0, 0.0);
    {% else %}
    return vec3<f32>();
    {% endif %}
}
{% endif %}

// The larger of each; NaN where either is.
fn larger(a: vec4<f32>, b: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(m_max(a.x, b.x), m_max(a.y, b.y), m_max(a.z, b.z), m_max(a.w, b.w));
}

// The new values of quad `q`.
fn update(item: Item, at: vec3<f32>, q: u32, before: vec4<f32>, grad: vec4<f32>) -> vec4<f32> {
    var w = before;
    var g = grad;
    {% if maximize %}
    g = -g;
    {% endif %}
    {% if states > 0 %}
    let s = item.state + q;
    let stride = (item.n + 3u) / 4u;
    {% endif %}
    {% if algorithm == "sgd" %}
    // c: weight decay, learning rate, momentum, 1 - dampening.
    g += p.c[0].x * w;
    {% if states > 0 %}
    let buffer = at.x * state[s] + at.y * g;
    state[s] = buffer;
    g = {{ "g + p.c[0].z * buffer" if nesterov else "buffer" }};
    {% endif %}
    return w - p.c[0].y * g;
    {% elif algorithm in ["adam", "nadam", "radam"] %}
    // c: weight decay (or the factor that decays, if decoupled), 1 - beta1, beta2, 1 - beta2; eps, ln(beta1) (of nadam ln(q)),
    // ln(beta2), learning rate.
    {% if decoupled %}
    w *= p.c[0].x;
    {% else %}
    g += p.c[0].x * w;
    {% endif %}
    var mean = state[s];
    mean += p.c[0].y * (g - mean);
    state[s] = mean;
    var square = state[s + stride];
    square = p.c[0].z * square + p.c[0].w * (g * g);
    state[s + stride] = square;
    {% if algorithm == "adam" %}
    {% if states == 3 %}
    square = larger(state[s + 2u * stride], square);
    state[s + 2u * stride] = square;
    {% endif %}
    return w - at.x * (mean / (sqrt(square) / at.y + p.c[1].x));
    {% elif algorithm == "nadam" %}
    return w - (at.x * g + at.y * mean) / (sqrt(square) + p.c[1].x * at.z);
    {% else %}
    // Not rectified while the variance of so few steps is unknown.
    if at.y == 0.0 { return w - at.x * mean; }
    return w - at.x * at.y * (mean / (sqrt(square) + p.c[1].x));
    {% endif %}
    {% elif algorithm == "adagrad" %}
    // c: weight decay, learning rate, its decay, eps; what the sum begins with.
    g += p.c[0].x * w;
    let sum = state[s] + at.y + g * g;
    state[s] = sum;
    return w - at.x * (g / (sqrt(sum) + p.c[0].w));
    {% elif algorithm == "adadelta" %}
    // c: weight decay, learning rate, rho, 1 - rho; eps.
    g += p.c[0].x * w;
    let square = p.c[0].z * state[s] + p.c[0].w * (g * g);
    state[s] = square;
    let steps = state[s + stride];
    let step = sqrt(steps + p.c[1].x) / sqrt(square + p.c[1].x) * g;
    state[s + stride] = p.c[0].z * steps + p.c[0].w * (step * step);
    return w - p.c[0].y * step;
    {% elif algorithm == "adamax" %}
    // c: weight decay, 1 - beta1, beta2, eps; ln(beta1), learning rate.
    g += p.c[0].x * w;
    var mean = state[s];
    mean += p.c[0].y * (g - mean);
    state[s] = mean;
    let largest = larger(p.c[0].z * state[s + stride], abs(g) + p.c[0].w);
    state[s + stride] = largest;
    return w - at.x * (mean / largest);
    {% elif algorithm == "lion" %}
    // c: the factor that decays, learning rate, 1 - beta1, 1 - beta2.
    w *= p.c[0].x;
    let mean = state[s];
    state[s] = mean + p.c[0].w * (g - mean);
    return w - p.c[0].y * sign(mean + p.c[0].z * (g - mean));
    {% elif algorithm == "asgd" %}
    // c: weight decay, lambda, learning rate, alpha; t0. at: the rate of this step, and how far the average moves.
    g += p.c[0].x * w;
    w = w * (1.0 - p.c[0].y * at.x) - at.x * g;
    let average = state[s];
    state[s] = select(average + at.y * (w - average), w, at.y == 1.0);
    return w;
    {% elif algorithm == "rprop" %}
    // c: the factors where the sign turned and where it stayed, the smallest and the largest step; learning rate.
    let turn = sign(g * state[s]);
    let factor = select(select(vec4<f32>(1.0), vec4<f32>(p.c[0].y), turn > vec4<f32>()), vec4<f32>(p.c[0].x), turn < vec4<f32>());
    let size = select(state[s + stride], vec4<f32>(p.c[1].x), at.x > 0.0);
    let step = clamp(size * factor, vec4<f32>(p.c[0].z), vec4<f32>(p.c[0].w));
    state[s + stride] = step;
    g = select(g, vec4<f32>(), turn < vec4<f32>());
    state[s] = g;
    return w - sign(g) * step;
    {% else %}
    // rmsprop; c: weight decay, learning rate, alpha, 1 - alpha; eps, momentum.
    g += p.c[0].x * w;
    let square = p.c[0].z * state[s] + p.c[0].w * (g * g);
    state[s] = square;
    {% if centered %}
    var mean = state[s + stride];
    mean += p.c[0].w * (g - mean);
    state[s + stride] = mean;
    let scale = sqrt(square - mean * mean) + p.c[1].x;
    {% else %}
    let scale = sqrt(square) + p.c[1].x;
    {% endif %}
    {% if momentum %}
    let b = s + {{ states - 1 }}u * stride;
    let buffer = p.c[1].y * state[b] + g / scale;
    state[b] = buffer;
    return w - p.c[0].y * buffer;
    {% else %}
    return w - p.c[0].y * (g / scale);
    {% endif %}
    {% endif %}
}
