{#-
The algorithms of optim.wgsl. Each defines `update`, which returns the new values of a quad from the old ones
and the gradient. Algorithms whose values depend on the step count define `at_step` for steps that the device
counts; on the host it is `Rule::at_step`. A comment before each algorithm lists the elements of `p.c`, in the
order of `Rule::constants`. `s` is the first state, and `s + stride` the next.

algorithm and flags: as the rules define them · counted, states: see optim.wgsl
-#}
{% if counted %}
// Values that depend on the number of steps, including this one.
fn at_step(n: f32) -> vec3<f32> {
    {% if algorithm == "adam" %}
    // 1 - beta^n, without cancellation for beta close to 1.
    return vec3<f32>(p.c[1].w / -m_expm1(n * p.c[1].y), sqrt(-m_expm1(n * p.c[1].z)), 0.0);
    {% elif algorithm == "sgd" %}
    // The first momentum buffer is the gradient itself.
    return select(vec3<f32>(p.c[0].z, p.c[0].w, 0.0), vec3<f32>(0.0, 1.0, 0.0), n < 1.5);
    {% elif algorithm == "adagrad" %}
    return vec3<f32>(p.c[0].y / (1.0 + (n - 1.0) * p.c[0].z), select(0.0, p.c[1].x, n < 1.5), 0.0);
    {% elif algorithm == "adamax" %}
    return vec3<f32>(p.c[1].y / -m_expm1(n * p.c[1].x), 0.0, 0.0);
    {% elif algorithm == "nadam" %}
    // mu_i = beta1 (1 - q^i / 2). The logarithm of the product of all mu up to n is n ln(beta1) minus a sum
    // over k. Its terms are 2^-k / k (q^k + ... + q^nk), where the inner sum is geometric.
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
    let correction2 = -m_expm1(n * p.c[1].z);
    let rho_inf = 2.0 / p.c[0].w - 1.0;
    let rho = rho_inf - 2.0 * n * (1.0 - correction2) / correction2;
    let rect = sqrt((rho - 4.0) * (rho - 2.0) * rho_inf / ((rho_inf - 4.0) * (rho_inf - 2.0) * rho));
    return vec3<f32>(p.c[1].w / -m_expm1(n * p.c[1].y), select(0.0, rect * sqrt(correction2), rho > 5.0), 0.0);
    {% elif algorithm == "asgd" %}
    let previous_steps = n - 1.0;
    let power = m_exp(-p.c[0].w * m_log1p(p.c[0].y * p.c[0].z * previous_steps));
    return vec3<f32>(p.c[0].z * power, 1.0 / max(1.0, previous_steps - p.c[1].x), 0.0);
    {% elif algorithm == "rprop" %}
    return vec3<f32>(select(0.0, 1.0, n < 1.5), 0.0, 0.0);
    {% else %}
    return vec3<f32>();
    {% endif %}
}
{% endif %}

// Element-wise maximum; NaN if either is NaN.
fn max_or_nan(a: vec4<f32>, b: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(m_max(a.x, b.x), m_max(a.y, b.y), m_max(a.z, b.z), m_max(a.w, b.w));
}

// Returns the new values of quad `q`.
fn update(item: Item, step_values: vec3<f32>, q: u32, old: vec4<f32>, grad: vec4<f32>) -> vec4<f32> {
    var w = old;
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
    let buffer = step_values.x * state[s] + step_values.y * g;
    state[s] = buffer;
    g = {{ "g + p.c[0].z * buffer" if nesterov else "buffer" }};
    {% endif %}
    return w - p.c[0].y * g;
    {% elif algorithm in ["adam", "nadam", "radam"] %}
    // c: weight decay (the decay factor, if decoupled), 1 - beta1, beta2, 1 - beta2; eps, ln(beta1) (nadam:
    // ln(q)), ln(beta2), learning rate.
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
    square = max_or_nan(state[s + 2u * stride], square);
    state[s + 2u * stride] = square;
    {% endif %}
    return w - step_values.x * (mean / (sqrt(square) / step_values.y + p.c[1].x));
    {% elif algorithm == "nadam" %}
    return w - (step_values.x * g + step_values.y * mean) / (sqrt(square) + p.c[1].x * step_values.z);
    {% else %}
    // The step is not rectified while the variance of the few steps is unknown.
    if step_values.y == 0.0 { return w - step_values.x * mean; }
    return w - step_values.x * step_values.y * (mean / (sqrt(square) + p.c[1].x));
    {% endif %}
    {% elif algorithm == "adagrad" %}
    // c: weight decay, learning rate, its decay, eps; initial value of the sum.
    g += p.c[0].x * w;
    let sum = state[s] + step_values.y + g * g;
    state[s] = sum;
    return w - step_values.x * (g / (sqrt(sum) + p.c[0].w));
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
    let largest = max_or_nan(p.c[0].z * state[s + stride], abs(g) + p.c[0].w);
    state[s + stride] = largest;
    return w - step_values.x * (mean / largest);
    {% elif algorithm == "lion" %}
    // c: decay factor, learning rate, 1 - beta1, 1 - beta2.
    w *= p.c[0].x;
    let mean = state[s];
    state[s] = mean + p.c[0].w * (g - mean);
    return w - p.c[0].y * sign(mean + p.c[0].z * (g - mean));
    {% elif algorithm == "asgd" %}
    // c: weight decay, lambda, learning rate, alpha; t0. at: this step's learning rate, and the averaging
    // coefficient.
    g += p.c[0].x * w;
    w = w * (1.0 - p.c[0].y * step_values.x) - step_values.x * g;
    let average = state[s];
    state[s] = select(average + step_values.y * (w - average), w, step_values.y == 1.0);
    return w;
    {% elif algorithm == "rprop" %}
    // c: factors for changed and unchanged sign, minimum and maximum step size; learning rate.
    let sign_product = sign(g * state[s]);
    let factor = select(select(vec4<f32>(1.0), vec4<f32>(p.c[0].y), sign_product > vec4<f32>()),
        vec4<f32>(p.c[0].x), sign_product < vec4<f32>());
    let size = select(state[s + stride], vec4<f32>(p.c[1].x), step_values.x > 0.0);
    let step = clamp(size * factor, vec4<f32>(p.c[0].z), vec4<f32>(p.c[0].w));
    state[s + stride] = step;
    g = select(g, vec4<f32>(), sign_product < vec4<f32>());
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
