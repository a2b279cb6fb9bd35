// All time steps of one direction of one recurrent layer, or the gradients of its gates, for 16-bit floats.
//
// A cluster of blocks runs SEQUENCES sequences, and each block has UNITS hidden features. The part of the weight that
// these features need stays in the block for all steps. Each step has three parts:
// - The warps multiply the weight by the states of all features, from shared memory. WARPS_K warps split each sum.
// - Each thread adds the parts of its features' sums, and computes the gates in f32 as recurrent.wgsl does.
// - The block writes its new states to the shared memory of all blocks of the cluster, and the cluster synchronises.
//   The states have two buffers, so that a fast block does not overwrite what a slow one reads.
// The running state stays in registers, in f32. BACKWARD walks the steps in the other order. Its product has the
// transposed weight, and the blocks exchange the gradients of the state's products in place of states.
//
// Definitions:
// BF16                1, or 0 for f16
// BACKWARD            1 for the gradients
// KIND                0 tanh, 1 relu, 2 LSTM, 3 GRU
// GATES               number of gates of the kind
// CLUSTER             blocks of a cluster
// UNITS               hidden features of a block, even
// SEQUENCES           sequences of a cluster, a multiple of 8
// WARPS_M, WARPS_K    warps along the rows and along the sums of the product
// TILES_M, TILES_K    a warp's tiles of 16 rows and of 16 terms
// REGISTER_TILES      tiles of a warp that are in registers, of TILES_M * TILES_K
// PAIRS               1 if each row of the weight begins at a multiple of four bytes
// tma_pipeline.cuh and packed_halves.cuh precede this file.

#define LSTM (KIND == 2)
#define GRU (KIND == 3)
#define THREADS (WARPS_M * WARPS_K * 32)
// Terms of the sums, in padded rows: eight rows, 16 bytes each, are in different banks.
#define DEPTH (WARPS_K * TILES_K * 16)
#define PITCH (DEPTH + 8)
#define BUFFER (SEQUENCES * PITCH)
// Rows of the product, likewise padded.
#define SUM_PITCH (WARPS_M * TILES_M * 16 + 4)
#define TILES (TILES_M * TILES_K)
#define SHARED_TILES (TILES - REGISTER_TILES)
#define GROUPS (SEQUENCES / 8)
// Independent chains of a warp's products hide their latency: few tiles of rows have two sums each. The number must
// not depend on the sequences, whose results would then depend on the size of the batch.
#define CHAINS (TILES_M <= 2 ? 2 : 1)
// A thread computes the gates of some features of some sequences.
#define ITEMS (UNITS * SEQUENCES)
#define THREAD_ITEMS ((ITEMS + THREADS - 1) / THREADS)

struct Params {
    // [GATES * hidden][hidden]
    const u16* weight;
    // Null, or the length of each sequence.
    const int* lengths;
    // Forward, read: products of the input, with strides; null or a bias [GATES * hidden]; initial values
    // [batch][hidden].
    const u16 *input, *bias, *h_0, *c_0;
    i64 input_step, input_row;
    // Forward, written: [slots][batch][hidden]. Backward, read: their gradients.
    u16* states;
    // Null, or [steps][batch][5][hidden]. Backward of a layer without gates: the states.
    u16* saved;
    // Backward, written: gradients of the input's products and, for a GRU, of the state's products:
    // [steps][batch][GATES * hidden]; those of the initial values.
    u16 *gates, *inner, *grad_h, *grad_c;
    int steps, batch, hidden, reverse;
};

INLINE float to_float(u16 x) { return low_half(x); }
INLINE u16 to_half(float x) { return static_cast<u16>(pack(x, 0.0f)); }
INLINE float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

INLINE void arrive_cluster() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
INLINE void wait_cluster() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
    // Products need all lanes of a warp at once.
    __syncwarp();
#else
    __syncthreads();
#endif
}
INLINE int block_rank() {
#if CLUSTER > 1
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
#else
    return 0;
#endif
}
// Writes a word to the shared memory of half of the cluster's blocks; the other lane of a pair writes to the others.
INLINE void store_all(u32 at, u32 word, int lane) {
#if CLUSTER > 1
#pragma unroll
    for (int i = 0; i < CLUSTER / 2; i++) {
        u32 there;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(i * 2 + (lane & 1)));
        asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(there), "r"(word) : "memory");
    }
#else
    if ((lane & 1) == 0) asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(word) : "memory");
#endif
}

// Adds the product of a tile of 16 rows and 16 terms with 8 sequences.
INLINE void multiply(float (&sum)[4], const uint4& a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// Returns two neighbouring terms, from `k` on, of a row of the block's product; zeros outside. `k` is even. Loads
// without branches, so that many are under way at once. A weight has at most 2^30 elements.
INLINE u32 load_weight(const Params& p, int first_unit, int row, int k) {
#if BACKWARD
    // Each gate has an even number of terms.
    const int even = (p.hidden + 1) & ~1, gate = k / even, feature = k - gate * even, unit = first_unit + row;
    const bool exists = row < UNITS && unit < p.hidden && gate < GATES, both = exists && feature + 1 < p.hidden;
    const int at = (gate * p.hidden + feature) * p.hidden + unit, step = p.hidden;
#else
    const int gate = row / UNITS, unit = first_unit + row - gate * UNITS;
    const bool exists = gate < GATES && unit < p.hidden && k < p.hidden, both = exists && k + 1 < p.hidden;
    const int at = (gate * p.hidden + unit) * p.hidden + k, step = 1;
#if PAIRS
    const u32 pair = *reinterpret_cast<const u32*>(p.weight + (exists ? at : 0));
    return exists ? pair : 0u;
#endif
#endif
    const u32 low = p.weight[exists ? at : 0], high = p.weight[both ? at + step : 0];
    return (exists ? low : 0u) | (both ? high << 16 : 0u);
}

// The weight, the states and the sums of a block.
struct Product {
    uint4 weight[REGISTER_TILES];
    uint4* shared_weight;
    u32 states;
    float* sums;
    int warp_m, warp_k, lane;

    INLINE void load(const Params& p, int first_unit) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const int row = (warp_m * TILES_M + tile % TILES_M) * 16 + lane / 4;
            const int k = (warp_k * TILES_K + tile / TILES_M) * 16 + lane % 4 * 2;
            auto pair = [&](int r, int c) { return load_weight(p, first_unit, row + r, k + c); };
            const uint4 a = make_uint4(pair(0, 0), pair(8, 0), pair(0, 8), pair(8, 8));
            if (tile < REGISTER_TILES) weight[tile < REGISTER_TILES ? tile : 0] = a;
            else shared_weight[(tile - REGISTER_TILES) * 32] = a;
            // Bounds the registers that addresses take.
            if (tile % 8 == 7) asm volatile("" ::: "memory");
        }
    }

    // Multiplies the states in a buffer, and stores this warp's part of the sums.
    INLINE void run(int buffer) {
        float sum[CHAINS][TILES_M][GROUPS][4] = {};
        // A lane has the address of one row of one of four matrices of 8 sequences and 8 terms.
        const u32 at = states + buffer * (BUFFER * 2) + (lane % 8 * PITCH + warp_k * (TILES_K * 16) + lane / 8 * 8) * 2;
#pragma unroll
        for (int k = 0; k < TILES_K; k += 2) {
            u32 b[GROUPS][4];
#pragma unroll
            for (int n = 0; n < GROUPS; n++) {
                const u32 from = at + (n * 8 * PITCH + k * 16) * 2;
                if (k + 1 < TILES_K) {
                    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                                 : "=r"(b[n][0]), "=r"(b[n][1]), "=r"(b[n][2]), "=r"(b[n][3]) : "r"(from) : "memory");
                } else {
                    // Only the first 16 lanes' addresses are used.
                    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                                 : "=r"(b[n][0]), "=r"(b[n][1]) : "r"(lane < 16 ? from : at) : "memory");
                    b[n][2] = b[n][3] = 0;
                }
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (k + half >= TILES_K) continue;
#pragma unroll
                for (int m = 0; m < TILES_M; m++) {
                    const int tile = (k + half) * TILES_M + m;
                    uint4 a;
                    if (tile < REGISTER_TILES) a = weight[tile < REGISTER_TILES ? tile : 0];
                    else a = shared_weight[(tile - REGISTER_TILES) * 32];
#pragma unroll
                    for (int n = 0; n < GROUPS; n++)
                        multiply(sum[half % CHAINS][m][n], a, b[n][half * 2], b[n][half * 2 + 1]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < TILES_M; m++)
#pragma unroll
            for (int n = 0; n < GROUPS; n++) {
                float* to = sums + (warp_k * SEQUENCES + n * 8 + lane % 4 * 2) * SUM_PITCH
                    + (warp_m * TILES_M + m) * 16 + lane / 4;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float chain = CHAINS > 1 ? sum[CHAINS - 1][m][n][i] : 0.0f;
                    to[i / 2 * 8 + i % 2 * SUM_PITCH] = sum[0][m][n][i] + chain;
                }
            }
    }

    // Returns the sum of a row for a sequence.
    INLINE float row_sum(int sequence, int row) const {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < WARPS_K; k++) sum += sums[(k * SEQUENCES + sequence) * SUM_PITCH + row];
        return sum;
    }
};

// Values of an item that a step reads from memory.
#if BACKWARD
constexpr int VALUES = GATES > 1 ? 6 : 2;
#else
constexpr int VALUES = GATES;
#endif
// Returns the time of a step of the kernel.
INLINE int time_of(const Params& p, int step) {
    return (BACKWARD ? !p.reverse : p.reverse) ? p.steps - 1 - step : step;
}

// A feature of a sequence.
struct Item {
    // Index of the sequence in the cluster, and of the feature in the block.
    int sequence, unit;
    // Index in the layer.
    int b, j;
    // The item is one of the block's; the feature and the sequence exist.
    bool own, exists;
    int length;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
    recurrent(const __grid_constant__ Params p) {
    PDL_WAIT();
    extern __shared__ __align__(128) uint4 shared[];
    u16* buffers = reinterpret_cast<u16*>(shared + WARPS_M * WARPS_K * SHARED_TILES * 32);
    float* sums = reinterpret_cast<float*>(buffers + 2 * BUFFER);
    const u32 states = static_cast<u32>(__cvta_generic_to_shared(buffers));

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, hidden = p.hidden;
    const int first_unit = block_rank() * UNITS, first_sequence = blockIdx.x / CLUSTER * SEQUENCES;
    const i64 plane = static_cast<i64>(p.batch) * hidden;
    Product product;
    product.shared_weight = shared + warp * (SHARED_TILES * 32) + lane;
    product.states = states, product.sums = sums;
    product.warp_m = warp % WARPS_M, product.warp_k = warp / WARPS_M, product.lane = lane;

    auto item_at = [&](int i) {
        const int at = threadIdx.x + i * THREADS;
        Item item;
        item.sequence = at / UNITS, item.unit = at % UNITS;
        item.b = first_sequence + item.sequence, item.j = first_unit + item.unit;
        item.own = at < ITEMS, item.exists = item.own && item.b < p.batch && item.j < hidden;
        item.length = item.exists && p.lengths ? p.lengths[item.b] : p.steps;
        return item;
    };
    Item items[THREAD_ITEMS];
    // Forward: the state. Backward: its gradient that bypasses the products. Then the cell or its gradient.
    float running[THREAD_ITEMS] = {}, cell[THREAD_ITEMS] = {};
#pragma unroll
    for (int i = 0; i < THREAD_ITEMS; i++) items[i] = item_at(i);

    // Padding and missing sequences stay zero.
    for (int at = threadIdx.x; at < BUFFER; at += THREADS) reinterpret_cast<u32*>(buffers)[at] = 0;
    __syncthreads();
#if !BACKWARD
    for (int at = threadIdx.x; at < SEQUENCES * hidden; at += THREADS) {
        const int sequence = at / hidden, j = at - sequence * hidden;
        if (first_sequence + sequence < p.batch)
            buffers[sequence * PITCH + j] = p.h_0[static_cast<i64>(first_sequence + sequence) * hidden + j];
    }
    float* bias = sums + WARPS_K * SEQUENCES * SUM_PITCH;
    for (int at = threadIdx.x; at < GATES * UNITS; at += THREADS) {
        const int gate = at / UNITS, j = first_unit + at - gate * UNITS;
        bias[at] = p.bias && j < hidden ? to_float(p.bias[gate * hidden + j]) : 0.0f;
    }
#endif
#pragma unroll
    for (int i = 0; i < THREAD_ITEMS; i++) {
        const Item& item = items[i];
        if (!item.exists) continue;
        const i64 at = static_cast<i64>(item.b) * hidden + item.j;
#if BACKWARD
        if (LSTM) cell[i] = to_float(p.states[(p.steps + 1) * plane + at]);
#else
        const u16 h = p.h_0[at];
        p.states[(p.reverse ? p.steps : 0) * plane + at] = h;
        running[i] = to_float(h);
        if (LSTM) cell[i] = to_float(p.c_0[at]);
#endif
    }
    product.load(p, first_unit);
    // No block writes to the memory of another one before that one runs, and has cleared its memory.
    __syncthreads();
    arrive_cluster();
    wait_cluster();

    // Sends a value of each thread's item to all blocks. All lanes call this function.
    auto send = [&](const Item& item, int buffer, int term, float value) {
        const float other = __shfl_xor_sync(0xffffffffu, value, 1);
        const u32 word = lane & 1 ? pack(other, value) : pack(value, other);
        // A pair of features is of one sequence, because UNITS is even.
        if (item.own && item.b < p.batch && (item.j & ~1) < hidden)
            store_all(states + (buffer * BUFFER + item.sequence * PITCH + (term & ~1)) * 2, word, lane);
    };

    // Reads the values of a step that come from memory. They stay 16-bit until they are used, so that no thread waits
    // for them earlier.
    auto read = [&](int step, u16 (&values)[THREAD_ITEMS][VALUES]) {
        const int t = time_of(p, step);
#if BACKWARD
        const int slot = p.reverse ? t : t + 1;
#endif
#pragma unroll
        for (int i = 0; i < THREAD_ITEMS; i++) {
            const Item& item = items[i];
#pragma unroll
            for (int k = 0; k < VALUES; k++) {
                values[i][k] = 0;
                if (!item.exists || step >= p.steps) continue;
#if BACKWARD
                const i64 at = static_cast<i64>(item.b) * hidden + item.j;
                const u16* from = p.states + slot * plane + at;
                if (k > 0) {
                    // Steps after a sequence's end saved nothing.
                    if (t >= item.length) continue;
                    const i64 row = static_cast<i64>(t) * p.batch + item.b;
                    from = p.saved + (GATES > 1 ? (row * 5 + k - 1) * hidden + item.j : slot * plane + at);
                }
                values[i][k] = *from;
#else
                values[i][k] = p.input[t * p.input_step + item.b * p.input_row + k * hidden + item.j];
#endif
            }
        }
    };
    u16 values[THREAD_ITEMS][VALUES];
    read(0, values);

    for (int step = 0; step < p.steps; step++) {
        const int t = time_of(p, step);
        // The memory of the initial values is complete, and the gradients of the last state have no product.
        if (step > 0) wait_cluster();
        // The latency of memory is about as long as a step.
        u16 ahead[THREAD_ITEMS][VALUES];
        read(step + 1, ahead);
        if (!BACKWARD || step > 0) {
            product.run(step & 1);
            __syncthreads();
        }
        const int next = (step + 1) & 1;
#pragma unroll
        for (int i = 0; i < THREAD_ITEMS; i++) {
            const Item& item = items[i];
            float x[VALUES];
#pragma unroll
            for (int k = 0; k < VALUES; k++) x[k] = to_float(values[i][k]), values[i][k] = ahead[i][k];
#if BACKWARD
            float gate[GATES] = {}, inner[GATES] = {};
            if (item.exists) {
                float dh = x[0] + running[i];
                if (step > 0) dh += product.row_sum(item.sequence, item.unit);
                if (t >= item.length) {
                    running[i] = dh;
                } else {
#if LSTM
                    const float i_gate = x[1], f_gate = x[2], candidate = x[3], o_gate = x[4], previous = x[5];
                    const float cell_tanh = tanhf(f_gate * previous + i_gate * candidate);
                    const float dc = cell[i] + dh * o_gate * (1.0f - cell_tanh * cell_tanh);
                    gate[0] = dc * candidate * i_gate * (1.0f - i_gate);
                    gate[1] = dc * previous * f_gate * (1.0f - f_gate);
                    gate[2] = dc * i_gate * (1.0f - candidate * candidate);
                    gate[3] = dh * cell_tanh * o_gate * (1.0f - o_gate);
                    running[i] = 0, cell[i] = dc * f_gate;
#elif GRU
                    const float reset = x[1], update = x[2], candidate = x[3], hidden_product = x[4], previous = x[5];
                    gate[2] = dh * (1.0f - update) * (1.0f - candidate * candidate);
                    gate[0] = gate[2] * hidden_product * reset * (1.0f - reset);
                    gate[1] = dh * (previous - candidate) * update * (1.0f - update);
                    inner[0] = gate[0], inner[1] = gate[1], inner[2] = gate[2] * reset;
                    running[i] = dh * update;
#else
                    gate[0] = KIND == 0 ? dh * (1.0f - x[1] * x[1]) : x[1] > 0 ? dh : 0.0f;
                    running[i] = 0;
#endif
                }
                const i64 to = (static_cast<i64>(t) * p.batch + item.b) * (GATES * hidden) + item.j;
#pragma unroll
                for (int k = 0; k < GATES; k++) {
                    p.gates[to + k * hidden] = to_half(gate[k]);
                    if (GRU) p.inner[to + k * hidden] = to_half(inner[k]);
                }
            }
            const int even = (hidden + 1) & ~1;
#pragma unroll
            for (int k = 0; k < GATES; k++) send(item, next, k * even + item.j, GRU ? inner[k] : gate[k]);
#else
            float h = running[i];
            if (item.exists && t < item.length) {
                float products[GATES];
#pragma unroll
                for (int k = 0; k < GATES; k++)
                    products[k] = product.row_sum(item.sequence, k * UNITS + item.unit) + bias[k * UNITS + item.unit];
                float saved[5];
#if LSTM
                const float i_gate = sigmoid(x[0] + products[0]), f_gate = sigmoid(x[1] + products[1]);
                const float candidate = tanhf(x[2] + products[2]), o_gate = sigmoid(x[3] + products[3]);
                saved[0] = i_gate, saved[1] = f_gate, saved[2] = candidate, saved[3] = o_gate, saved[4] = cell[i];
                cell[i] = f_gate * cell[i] + i_gate * candidate;
                h = o_gate * tanhf(cell[i]);
#elif GRU
                const float reset = sigmoid(x[0] + products[0]), update = sigmoid(x[1] + products[1]);
                const float candidate = tanhf(x[2] + reset * products[2]);
                saved[0] = reset, saved[1] = update, saved[2] = candidate, saved[3] = products[2], saved[4] = h;
                h = candidate + update * (h - candidate);
#else
                const float sum = x[0] + products[0];
                // A NaN stays one.
                h = KIND == 0 ? tanhf(sum) : sum <= 0 ? 0.0f : sum;
#endif
                if (GATES > 1 && p.saved) {
                    u16* to = p.saved + (static_cast<i64>(t) * p.batch + item.b) * (5 * hidden) + item.j;
#pragma unroll
                    for (int k = 0; k < 5; k++) to[k * hidden] = to_half(saved[k]);
                }
                running[i] = h;
            }
            const int slot = p.reverse ? t : t + 1;
            if (item.exists) p.states[slot * plane + static_cast<i64>(item.b) * hidden + item.j] = to_half(h);
            if (step + 1 < p.steps) send(item, next, item.j, h);
#endif
        }
        // A block ends only after it has waited for the last values that others send to it.
        if (BACKWARD || step + 1 < p.steps) arrive_cluster();
    }

#if BACKWARD
    wait_cluster();
    product.run(p.steps & 1);
    __syncthreads();
#endif
#pragma unroll
    for (int i = 0; i < THREAD_ITEMS; i++) {
        const Item& item = items[i];
        if (!item.exists) continue;
        const i64 at = static_cast<i64>(item.b) * hidden + item.j;
#if BACKWARD
        p.grad_h[at] = to_half(running[i] + product.row_sum(item.sequence, item.unit));
        if (LSTM) p.grad_c[at] = to_half(cell[i]);
#else
        if (LSTM) p.states[(p.steps + 1) * plane + at] = to_half(cell[i]);
#endif
    }
}
