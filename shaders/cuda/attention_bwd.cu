// Attention backward, in two kernels without atomics. The first computes the gradients of the queries, by
// tiles of queries over the keys that they attend to. It also computes delta, the sum of grad · out of each
// query. The second computes those of keys and values, by tiles of keys over the queries that attend to them.
// Both also write the sums of each block's rows, if requested. Weights are recomputed from the scores and the
// saved logarithm.

#if PASS == 1
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_bwd_queries(const __grid_constant__ Params p) {
    PDL_WAIT();
    extern __shared__ char memory[];
    const u32 q_tile = shared_base(memory), g_tile = q_tile + TILE_BYTES(ROWS), k_tiles = g_tile + TILE_BYTES(ROWS);
    const u32 v_tiles = k_tiles + STAGES * TILE_BYTES(COLS);
#if MASK_STAGES
    const u32 mask_tiles = v_tiles + STAGES * TILE_BYTES(COLS);
#endif
    __shared__ TileCoord saved;
    const TileCoord work = assign_tile(blockIdx.x, p.heads, p.batch, (p.queries + ROWS - 1) / ROWS, p.group, true);
    save_assignment(saved, work);
    const int kv_head = work.head / (p.heads / p.kv_heads);
    const TileSource q_rows = tile_source(p.q_map, p.q, work.batch, work.head, p.queries);
    const TileSource g_rows = tile_source(p.grad_map, p.grad, work.batch, work.head, p.queries);
    const TileSource k_rows = tile_source(p.k_map, p.k, work.batch, kv_head, p.keys);
    const TileSource v_rows = tile_source(p.v_map, p.v, work.batch, kv_head, p.keys);
#if MASK && !MASK_STAGES
    const MaskElement* mask = head_mask(p, work.batch, work.head);
#endif
#if DROPOUT
    const uint4 random = *p.random;
#endif

    const int q0 = work.tile * ROWS;
    const TileRange span = attended_tiles(q0, p.queries, p.keys, p.left, p.right);
    const int first = span.first, count = span.count, begin = span.begin, end = span.end;
    const int row = q0 + warp_row(), lane = threadIdx.x & 31;

    auto prefetch_mask = [&](bool issues, int t) {
#if MASK_STAGES
        const int key = (first + t) * COLS;
        load_mask_tile(issues && t < count, mask_tiles, p, work.batch, work.head, q0, key, t);
#endif
    };
    auto prefetch = [&](int t) {
        if (ISSUES_LOADS && t < count) {
            begin_stage_loads(t, 2 * COLS + (t == 0 ? 2 * ROWS : 0), MASK_TILE_BYTES);
            if (MASK_STAGES != 1 || t == 0) prefetch_mask(true, t);
            if (t == 0) {
                load_tile<ROWS>(q_tile, q_rows, q0, t);
                load_tile<ROWS>(g_tile, g_rows, q0, t);
            }
            load_tile<COLS>(k_tiles + (t % STAGES) * TILE_BYTES(COLS), k_rows, (first + t) * COLS, t);
            load_tile<COLS>(v_tiles + (t % STAGES) * TILE_BYTES(COLS), v_rows, (first + t) * COLS, t);
        }
        commit_stage_loads();
    };
    init_stages();
#pragma unroll
    for (int t = 0; t < STAGES - 1; t++) prefetch(t);

    const i64 line = (i64)(work.batch * p.heads + work.head) * p.queries;
    float lse[ROWS16][2], delta[ROWS16][2];
    const u16* out_rows = head_of(p.out, work.batch, work.head);
    const u16* grad_rows = head_of(p.grad, work.batch, work.head);
    // Four threads share a row of the sums, and its delta too.
#pragma unroll
    for (int m = 0; m < ROWS16; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int query = row + 16 * m + 8 * half + (lane >> 2);
            bool inside = query < p.queries;
            float sum = 0;
            for (int part = lane & 3; inside && part < HEAD / 8; part += 4) {
                u32 a[4], b[4];
                asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                             : "l"(out_rows + (i64)query * p.out.row + part * 8));
                asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                             : "l"(grad_rows + (i64)query * p.grad.row + part * 8));
#pragma unroll
                for (int i = 0; i < 4; i++) sum += low_half(a[i]) * low_half(b[i]) + high_half(a[i]) * high_half(b[i]);
            }
            sum += __shfl_xor_sync(0xffffffff, sum, 1);
            sum += __shfl_xor_sync(0xffffffff, sum, 2);
            delta[m][half] = sum;
            lse[m][half] = inside ? score_offset(p.lse[line + query], LOG2E) : 0.0f;
            if (inside && (lane & 3) == 0) {
                p.stats[line + query] = lse[m][half];
                p.stats[(i64)p.batch * p.heads * p.queries + line + query] = sum;
            }
        }

    const float scale = score_scale(p);
    Accumulators<DEPTH> dq;
    clear(dq);
#if ROWS_IN_REGISTERS
    TileFragments q, g;
    wait_stage_loads(0);
    load_fragments<ROWS>(q, q_tile, warp_row());
    load_fragments<ROWS>(g, g_tile, warp_row());
#endif
    for (int t = 0; t < count; t++) {
        wait_stage_loads(t);
        prefetch(t + STAGES - 1);
        if (t < begin || t >= end) continue;
        const u32 k = k_tiles + (t % STAGES) * TILE_BYTES(COLS), v = v_tiles + (t % STAGES) * TILE_BYTES(COLS);
        const int key = (first + t) * COLS;
        // Equal for all warps of a unit, which multiply together.
        const int unit = q0 + unit_row();
        const bool edge = key + COLS > p.keys || key + COLS - 1 > unit + p.right || key < unit + UNIT_ROWS - 1 - p.left;
        // Called twice with constants: 3 % faster here, and slower in the other passes. All warps must meet at one
        // barrier, where there is one.
        auto process_tile = [&](const bool at_edge) FORCE_INLINE {
        Accumulators<COLS> s, dp;
        mma_fence();
#if ROWS_IN_REGISTERS
        mma_abt<COLS, COLS>(s, q, k);
        mma_commit();
        mma_abt<COLS, COLS>(dp, g, v);
#else
        mma_abt<ROWS, COLS, COLS>(s, q_tile, warp_row(), k);
        mma_commit();
        mma_abt<ROWS, COLS, COLS>(dp, g_tile, warp_row(), v);
#endif
        mma_commit();
        TileMasks masks;
#if MASK_STAGES
        read_mask_tile(masks, mask_stage(mask_tiles, t));
#elif MASK
        load_mask(masks, mask, row, key, p.mask_query, p.mask_key, p.queries, p.keys);
#endif
#if DROPOUT
        draw_dropout_bits(masks, random, p.threshold, line + row, key);
#endif
        mma_wait<1>();
        fence_accumulators(s);
        apply_mask(s, masks, p);
#if MASK_STAGES == 1
        __syncthreads();
        prefetch_mask(ISSUES_LOADS, t + 1);
#endif
        if (at_edge) mask_window(s, row, key, p.left, p.right, p.keys - 1);
#pragma unroll
        for (int m = 0; m < ROWS16; m++)
#pragma unroll
            for (int n = 0; n < COLS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) s.v[m][n][i] = softmax_weight(s.v[m][n][i], lse[m][i / 2], scale);
        fence_accumulators(s);
        mma_wait<0>();
        fence_accumulators(dp);
#pragma unroll
        for (int m = 0; m < ROWS16; m++)
#pragma unroll
            for (int n = 0; n < COLS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    s.v[m][n][i] *= (is_kept(masks, m, n, i) ? dp.v[m][n][i] * DROPOUT_SCALE(p) : 0.0f)
                        - delta[m][i / 2];
        AFragments<COLS> ds;
        pack_fragments(ds, s);
        mma_fence();
        mma_ab<COLS, COLS>(dq, ds, k);
        mma_commit();
        mma_wait<0>();
        fence_accumulators(dq);
        };
        if (MASK_STAGES == 1) process_tile(edge);
        else if (edge) process_tile(true);
        else process_tile(false);
    }
    cp_async_wait<0>();
    __syncthreads();
    const int start = saved.tile * ROWS, first_row = start + warp_row();
    float factor[ROWS16][2];
#pragma unroll
    for (int m = 0; m < ROWS16; m++) factor[m][0] = factor[m][1] = p.scale;
    store_tile<ROWS>(dq, factor, q_tile, warp_row(), head_of(p.dq, saved.batch, saved.head), p.dq.row, first_row,
        p.queries);
    if (p.sums)
        store_row_sums<ROWS>(q_tile, min(ROWS, p.queries - start), g_tile, block_sums(p, p.queries, saved, saved.head));
}
#else
// Here rows are keys and columns are queries: the products of weights and gradients then take registers as
// operands.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_bwd_keys(const __grid_constant__ Params p) {
    PDL_WAIT();
    extern __shared__ char memory[];
    const u32 k_tile = shared_base(memory), v_tile = k_tile + TILE_BYTES(ROWS), q_tiles = v_tile + TILE_BYTES(ROWS);
    const u32 g_tiles = q_tiles + STAGES * TILE_BYTES(COLS), mask_tiles = g_tiles + STAGES * TILE_BYTES(COLS);
    const u32 lines = mask_tiles + MASK_STAGES * MASK_TILE_BYTES;
    __shared__ TileCoord saved;
    const TileCoord work = assign_tile(blockIdx.x, p.kv_heads, p.batch, (p.keys + ROWS - 1) / ROWS, p.group, false);
    save_assignment(saved, work);
    const int queries_per_kv_head = p.heads / p.kv_heads;

    // Tiles of queries that attend to some key of the block, for each head that shares the keys.
    const int k0 = work.tile * ROWS;
    const TileRange span = attended_tiles(k0, p.keys, p.queries, p.right, p.left);
    const int first = span.first, tiles = span.count, begin = span.begin, end = span.end,
        count = tiles * queries_per_kv_head;
    const int row = k0 + warp_row(), lane = threadIdx.x & 31;

#if DROPOUT
    const uint4 random = *p.random;
#endif

    // The current tile of queries and its head; the next tile to load, `next_tile`, and the rows of its head.
    int query_tile = 0, query_head = work.head * queries_per_kv_head, next_tile = 0;
    TileSource q_rows = tile_source(p.q_map, p.q, work.batch, query_head, p.queries),
        g_rows = tile_source(p.grad_map, p.grad, work.batch, query_head, p.queries);
    const TileSource k_rows = tile_source(p.k_map, p.k, work.batch, work.head, p.keys),
        v_rows = tile_source(p.v_map, p.v, work.batch, work.head, p.keys);
    i64 line = (i64)(work.batch * p.heads + query_head) * p.queries;
#if MASK_STAGES
    // First query and head of the last tile that `prefetch` has loaded.
    int mask_query = 0, mask_head = 0;
#endif
    auto prefetch_mask = [&](bool issues, int t) {
#if MASK_STAGES
        load_mask_tile(issues && t < count, mask_tiles, p, work.batch, mask_head, mask_query, k0, t);
#endif
    };
    auto prefetch = [&](int t) {
        if (t < count) {
            const int at = (first + next_tile) * COLS, stage = t % STAGES;
#if MASK_STAGES
            mask_query = at, mask_head = q_rows.head;
#endif
            if (ISSUES_LOADS) {
                begin_stage_loads(t, 2 * COLS + (t == 0 ? 2 * ROWS : 0), MASK_TILE_BYTES);
                if (MASK_STAGES != 1 || t == 0) prefetch_mask(true, t);
                if (t == 0) {
                    load_tile<ROWS>(k_tile, k_rows, k0, t);
                    load_tile<ROWS>(v_tile, v_rows, k0, t);
                }
                load_tile<COLS>(q_tiles + stage * TILE_BYTES(COLS), q_rows, at, t);
                load_tile<COLS>(g_tiles + stage * TILE_BYTES(COLS), g_rows, at, t);
            }
#pragma unroll
            for (int first_copy = 0; first_copy < 2 * COLS; first_copy += THREADS) {
                const int i = first_copy + threadIdx.x;
                if (2 * COLS % THREADS != 0 && i >= 2 * COLS) break;
                bool inside = at + i % COLS < p.queries;
                const float* from = p.stats + (i < COLS ? 0 : (i64)p.batch * p.heads * p.queries);
                copy_async4(lines + (stage * 2 * COLS + i) * 4, from + (inside ? line + at + i % COLS : 0), inside);
            }
            if (++next_tile == tiles) {
                next_tile = 0;
                advance_head(q_rows, p.q);
                advance_head(g_rows, p.grad);
                line += p.queries;
            }
        }
        cp_async_commit();
    };
    init_stages();
#pragma unroll
    for (int t = 0; t < STAGES - 1; t++) prefetch(t);

    const float scale = score_scale(p);
    Accumulators<DEPTH> dk, dv;
    clear(dk);
    clear(dv);
#if ROWS_IN_REGISTERS
    TileFragments k, v;
    wait_stage_loads(0);
    load_fragments<ROWS>(k, k_tile, warp_row());
    load_fragments<ROWS>(v, v_tile, warp_row());
#endif
#pragma unroll UNROLLED_TILES
    for (int t = 0; t < count; t++) {
        // Waits for the copies of the rows' statistics.
        cp_async_wait<STAGES - 2>();
        wait_stage_loads(t);
        prefetch(t + STAGES - 1);
        const int tile = query_tile, head = query_head, stage = t % STAGES;
        if (++query_tile == tiles) query_tile = 0, query_head++;
        if (tile < begin || tile >= end) continue;
        const u32 q = q_tiles + stage * TILE_BYTES(COLS), g = g_tiles + stage * TILE_BYTES(COLS);
        const int query = (first + tile) * COLS;
        // Queries past the end are zeros, and add nothing.
        const bool edge = row + 16 * ROWS16 - 1 > query + p.right || row < query + COLS - 1 - p.left;
        Accumulators<COLS> s, dp;
        mma_fence();
#if ROWS_IN_REGISTERS
        mma_abt<COLS, COLS>(s, k, q);
        mma_commit();
        mma_abt<COLS, COLS>(dp, v, g);
#else
        mma_abt<ROWS, COLS, COLS>(s, k_tile, warp_row(), q);
        mma_commit();
        mma_abt<ROWS, COLS, COLS>(dp, v_tile, warp_row(), g);
#endif
        mma_commit();
        const u32 line = lines + (stage * 2 * COLS + 2 * (lane & 3)) * 4;
        TileMasks masks;
#if MASK && !MASK_STAGES
        load_mask(masks, head_mask(p, work.batch, head), row, query, p.mask_key, p.mask_query, p.keys, p.queries);
#endif
#if DROPOUT
        draw_dropout_bits(masks, random, p.threshold, (work.batch * p.heads + head) * p.queries + query, row);
#endif
        mma_wait<1>();
        fence_accumulators(s);
#if MASK_STAGES
        // Not earlier, for want of registers.
        read_mask_tile(masks, mask_stage(mask_tiles, t));
#endif
        apply_mask(s, masks, p);
#if MASK_STAGES == 1
        __syncthreads();
        prefetch_mask(ISSUES_LOADS, t + 1);
#endif
        if (edge) mask_window(s, row, query, p.right, p.left, 0x7fffffff);
#pragma unroll
        for (int n = 0; n < COLS / 8; n++) {
            float lse[2];
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(lse[0]), "=f"(lse[1]) : "r"(line + n * 32)
                         : "memory");
#pragma unroll
            for (int m = 0; m < ROWS16; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) s.v[m][n][i] = softmax_weight(s.v[m][n][i], lse[i % 2], scale);
        }
        AFragments<COLS> weights, ds;
        pack_fragments(weights, apply_dropout(s, masks));
        fence_accumulators(s);
        mma_wait<0>();
        fence_accumulators(dp);
        mma_fence();
        mma_ab<COLS, COLS>(dv, weights, g);
        mma_commit();
#pragma unroll
        for (int n = 0; n < COLS / 8; n++) {
            float delta[2];
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(delta[0]), "=f"(delta[1])
                         : "r"(line + COLS * 4 + n * 32) : "memory");
#pragma unroll
            for (int m = 0; m < ROWS16; m++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    s.v[m][n][i] *= (is_kept(masks, m, n, i) ? dp.v[m][n][i] * DROPOUT_SCALE(p) : 0.0f) - delta[i % 2];
        }
        pack_fragments(ds, s);
        mma_fence();
        mma_ab<COLS, COLS>(dk, ds, q);
        mma_commit();
        mma_wait<0>();
        fence_accumulators(dv);
        fence_accumulators(dk);
    }
    cp_async_wait<0>();
    __syncthreads();
    const int start = saved.tile * ROWS, first_row = start + warp_row();
    float factor[ROWS16][2];
#pragma unroll
    for (int m = 0; m < ROWS16; m++) factor[m][0] = factor[m][1] = p.scale;
    store_tile<ROWS>(dk, factor, k_tile, warp_row(), head_of(p.dk, saved.batch, saved.head), p.dk.row, first_row,
        p.keys);
#pragma unroll
    for (int m = 0; m < ROWS16; m++) factor[m][0] = factor[m][1] = DROPOUT_SCALE(p);
    store_tile<ROWS>(dv, factor, v_tile, warp_row(), head_of(p.dv, saved.batch, saved.head), p.dv.row, first_row,
        p.keys);
    if (p.sums) {
        const int rows = min(ROWS, p.keys - start), head = p.heads + saved.head;
        store_row_sums<ROWS>(k_tile, rows, q_tiles, block_sums(p, p.keys, saved, head));
        store_row_sums<ROWS>(v_tile, rows, g_tiles, block_sums(p, p.keys, saved, head + p.kv_heads));
    }
}
#endif
